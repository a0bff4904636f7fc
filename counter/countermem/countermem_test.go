package countermem

import (
	"fmt"
	"math"
	"runtime"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
)

func TestContract(t *testing.T) {
	countertest.RunInBubble(t, func(testing.TB) countertest.Instance { return countertest.Instance{Store: New(Config{})} })
}

// TestHistoryIsForgotten: what was gained is kept as long as the rule says, also of counters that
// nobody touches any more, and then goes without anybody asking for it.
func TestHistoryIsForgotten(t *testing.T) {
	now := time.Unix(2e9, 0)
	s := New(Config{Now: func() time.Time { return now }})
	views := &counter.Rule{Match: "*", Kind: counter.Sum, Buckets: []counter.Bucket{{Step: time.Minute, Kept: time.Hour}}}
	view := func(key string) {
		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: key, Rule: views, Verb: counter.Add, Delta: 1}}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}
	}
	gained := func(key string) int {
		_, gains, err := s.History(t.Context(), key, time.Minute, 0, math.MaxUint32)
		if err != nil {
			t.Fatal(err)
		}
		return len(gains)
	}
	for range 30 {
		view("left")
		view("gone")
		now = now.Add(time.Minute)
	}
	for range 300 {
		view("busy")
		now = now.Add(time.Minute)
		if n := gained("busy"); now.After(time.Unix(2e9, 0).Add(31*time.Minute+time.Hour)) && (n < 61 || n > 64) {
			t.Fatalf("%d minutes are kept", n)
		}
		if now.Before(time.Unix(2e9, 0).Add(time.Hour)) && gained("left") != 30 {
			t.Fatalf("%d minutes of a counter that nobody touches, want 30", gained("left"))
		}
	}
	if n := gained("left"); n != 1 { // the slot
		t.Errorf("%d minutes are left of a counter that nobody touches", n)
	}
	if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "gone", Rule: views, Verb: counter.Delete}}}})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
	if len(s.pasts) != 1 {
		t.Errorf("%d histories are waited for, want that of the busy one", len(s.pasts))
	}
}

// TestMemoryOfASum: a sum that is touched takes at most 200 bytes, with its key and its place in the map.
func TestMemoryOfASum(t *testing.T) {
	const counters = 100_000
	rule := &counter.Rule{Match: "*", Kind: counter.Sum}
	s := New(Config{})
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for n := range counters {
		s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: fmt.Sprint("views:", n), Rule: rule, Verb: counter.Add, Delta: 1}}}})
	}
	if each := (heap() - before) / counters; each > 200 {
		t.Errorf("a sum takes %d bytes", each)
	}
	runtime.KeepAlive(s)
}
