package e2e

import (
	"encoding/json"
	"sync"
	"syscall"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestClockReadsAfterStandstill: a process that stood still answers its first reads with the changes that happened
// meanwhile, or marks the answers as stale.
func TestClockReadsAfterStandstill(t *testing.T) {
	t.Parallel()

	const changes, pause = 5, 6 * time.Second // longer than the built-in stale
	redis := redistest.Start(t).URL()
	both := startAll(t, overRedis(redis, "--api-key="+apiKey), overRedis(redis, "--api-key="+apiKey))
	goes, stands := both[0], both[1]

	// A subscription lets the process keep the counts in memory, where they grow old.
	looks := stands.ws(t)
	looks.send(`{"type":"subscribe","pages":["p"],"counters":["views:1"]}`)
	looks.awaitAll(shows("views:1", 0, false), func(f frame) bool { return f.counts("p", 0) })

	stands.Signal(syscall.SIGSTOP)
	for range changes {
		goes.ws(t).join("p")
		goes.add(t, "views:1")
	}
	// Nobody can explain a count while a process stands still.
	testkit.Eventually(t, "the others are counted", func() bool {
		return goes.get(t, "/p/counter").counter(t).Count == changes
	})
	time.Sleep(pause)

	var asked sync.WaitGroup
	for range 20 {
		for path, member := range map[string]string{"/p/counter": "count", root + "views:1": "value"} {
			asked.Go(func() {
				a, err := try("GET", stands.url+path, "", withKey)
				if err != nil {
					t.Error(err)
					return
				}

				is := map[string]any{}
				err = json.Unmarshal([]byte(a.body), &is)
				if err != nil || is[member] != float64(changes) && is["stale"] != true {
					t.Errorf("%s: %s; want %d, or a stale answer", path, a.body, changes)
				}
			})
		}
	}

	time.Sleep(100 * time.Millisecond) // by now the reads are sent: the first precede the publications since
	stands.Signal(syscall.SIGCONT)
	asked.Wait()

	// New subscribers get the true values in the end, and no old value that looks fresh.
	late := stands.ws(t)
	late.send(`{"type":"subscribe","pages":["p"],"counters":["views:1"]}`)
	late.awaitAll(shows("views:1", changes, false), func(f frame) bool {
		if f.isCount("p") && *f.Count < changes && !f.Stale {
			t.Errorf("a frame says %s", f.text)
		}
		return f.counts("p", changes) && !f.Stale
	})
}
