package call_test

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

// A sum that is touched takes at most 200 bytes of memory, including its key and its place in the map.
func TestMemoryOfASum(t *testing.T) {
	const counters = 100_000
	rules := counter.BuiltinRules()
	rule := rules.Find("views:1")
	s := inMemory(t, rules)

	before := testkit.Heap()
	for n := range counters {
		s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{
			{Key: fmt.Sprint("views:", n), Rule: rule, Verb: counter.Add, Delta: 1},
		}}})
	}

	each := (testkit.Heap() - before) / counters
	if each > 200 {
		t.Errorf("a sum takes %d bytes, want 200 at most", each)
	}

	// Otherwise the store could be freed before the heap is measured.
	runtime.KeepAlive(s)
}

// At the bound of their memory, states of further limits are refused, existing states work on, and expired ones make
// room.
func TestLimitsInMemoryAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t, counter.BuiltinRules())
		take := func(key string) counter.LimitResult {
			name := limit.Name{Key: key, Algorithm: limit.Fixed, Window: time.Hour.Milliseconds()}
			return s.Limit(t.Context(), []limit.Request{{Name: name, Limit: 10, Cost: 1}})[0]
		}

		var keys []string
		for n := 0; len(keys) == 0 || take(keys[len(keys)-1]).Err == nil; n++ {
			key := fmt.Sprint("k", n)
			// The bound is one of each partition. Filling one of them is enough, and takes a fraction of the time.
			for rows.PartitionOf(key) != 0 {
				n++
				key = fmt.Sprint("k", n)
			}

			keys = append(keys, key)
		}

		last := keys[len(keys)-1]
		if len(keys) < 10_000 || !errors.Is(take(last).Err, counter.ErrBusy) {
			t.Errorf("limit %d is refused with %v, want ErrBusy, and not before limit 10,000",
				len(keys), take(last).Err)
		}
		if r := take(keys[0]); r.Err != nil || !r.Allowed {
			t.Errorf("an existing limit: %+v, want it allowed", r)
		}

		// The window of an hour, and then time for a sweep.
		time.Sleep(time.Hour + 3*time.Minute)
		synctest.Wait()
		if r := take(last); r.Err != nil || !r.Allowed {
			t.Errorf("when others have expired: %+v, want it allowed", r)
		}
	})
}
