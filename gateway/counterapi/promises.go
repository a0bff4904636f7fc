//go:build promises

package counterapi

import (
	"os"
	"sync"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/counter"
	"headcount/internal/promises"
)

// answered has the newest version of each counter that this process has answered a call with, for the 65,536 counters
// used last. What was answered is acknowledged, or was read in the store.
var (
	answeredMu  sync.Mutex                                  // makes reading and raising a version one step
	answered, _ = lru.New[string, counter.Version](1 << 16) // fails only for a size below 1
)

// storeForgets says that the test lets Redis lose what it had acknowledged. Then reads may be old until the owners have
// written it again, which no single process knows.
var storeForgets = os.Getenv("HEADCOUNT_STORE_FORGETS") != ""

// floors are the versions that had been answered before a call began, by counter.
type floors map[string]counter.Version

// floorsOf returns the floors of a call that changes these counters.
func floorsOf(changes []counter.Change) floors {
	f := floors{}
	for i := range changes {
		f.add(changes[i].Key)
	}

	return f
}

// floorOf returns the floor of a call that reads a counter exactly.
func floorOf(key string) floors {
	f := floors{}
	if !storeForgets {
		f.add(key)
	}

	return f
}

func (f floors) add(key string) {
	answeredMu.Lock()
	defer answeredMu.Unlock()

	version, known := answered.Get(key)
	if known {
		f[key] = version
	}
}

// noteChanges checks the counters after changes that were made, one for each change.
func (f floors) noteChanges(changes []counter.Change, result *counter.Result) {
	for i := range result.Counters {
		change := &changes[i]
		c := &result.Counters[i]
		if change.Verb == counter.Delete {
			answered.Remove(change.Key)
			continue
		}

		f.note(c)

		floor, known := f[c.Key]
		isNew := change.Verb == counter.Add && !result.Replay
		if isNew && known && c.Version == floor {
			promises.Broken("own change: %q has version %s with a change and had it before", c.Key, c.Version)
		}
	}
}

// note checks a counter that a call is answered with. One that was deleted has no version.
func (f floors) note(c *counter.Counter) {
	if !c.Touched() {
		return
	}

	floor := f[c.Key]
	if c.Version.Compare(floor) < 0 {
		promises.Broken("own change: %q has version %s; a call that ended earlier was answered with %s",
			c.Key, c.Version, floor)
	}

	answeredMu.Lock()
	defer answeredMu.Unlock()
	newest, _ := answered.Get(c.Key)
	if c.Version.Compare(newest) > 0 {
		answered.Add(c.Key, c.Version)
	}
}
