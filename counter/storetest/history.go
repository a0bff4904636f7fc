package storetest

import (
	"math"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// gained is what a counter gained in steps of that length, all that is kept.
func gained(t testing.TB, s counter.Reader, key string, step time.Duration) []counter.Gain {
	t.Helper()
	c, gains, err := s.History(t.Context(), key, step, 0, math.MaxUint32)
	if err != nil || c.Key != key {
		t.Fatalf("History(%q, %s) = %+v, %v, %v", key, step, c, gains, err)
	}
	for i, g := range gains {
		if i > 0 && g.Number <= gains[i-1].Number {
			t.Fatalf("History(%q, %s): %v", key, step, gains)
		}
	}
	return gains
}

func total(gains []counter.Gain) (n int64) {
	for _, g := range gains {
		n += g.Value
	}
	return n
}

// histories are whole in every step that the rule keeps, and the fine ones add up to the coarse ones.
func history(t *testing.T, s counter.Reader, key string, want int64) {
	t.Helper()
	fine := map[int64]int64{}
	for i, b := range sum.Buckets {
		gains := gained(t, s, key, b.Step)
		if got := total(gains); got != want {
			t.Errorf("%q gained %d in steps of %s (%v), want %d", key, got, b.Step, gains, want)
		}
		if i == 0 {
			for _, g := range gains {
				fine[g.Number/int64(sum.Buckets[1].Step/b.Step)] += g.Value
			}
		}
		if i == 1 {
			for _, g := range gains {
				if fine[g.Number] != g.Value {
					t.Errorf("%q: step %d of %s is %d, its parts %d", key, g.Number, b.Step, g.Value, fine[g.Number])
				}
			}
		}
	}
}

// distinct is how many a unique saw in steps.
func distinct(gains []counter.Gain) int64 {
	var all hyperloglog.Union
	for _, g := range gains {
		if g.Seen != nil {
			all.Merge(*g.Seen)
		}
	}
	return all.Count()
}

// saw says that a unique saw these members in the steps of every length, and nobody else.
func saw(t *testing.T, s counter.Reader, key string, members ...string) {
	t.Helper()
	for _, b := range unique.Buckets {
		if gains := gained(t, s, key, b.Step); distinct(gains) != estimate(members) || total(gains) != 0 {
			t.Fatalf("%q saw %d in steps of %s, want %d", key, distinct(gains), b.Step, estimate(members))
		}
	}
}

func seenInSteps(t *testing.T, i Instance) {
	s, peer := i.Store, i.Peer
	if peer == nil {
		peer = s
	}
	saw(t, s, "u:none")
	one(t, s, see("u:1", "a", "b"))
	one(t, peer, see("u:1", "b", "c"))
	saw(t, s, "u:1", "a", "b", "c")
	for _, g := range gained(t, s, "u:1", time.Hour) {
		if n := len(g.Seen.Bytes()); n > 27 {
			t.Errorf("three members take %d bytes", n)
		}
	}
	// Some seconds later they are new in their step, and the counter is as it was. The
	// first two steps may be those of a, b and c.
	unchanged(t, s, "u:1", func() {
		for began := time.Now(); len(gained(t, s, "u:1", time.Second)) < 4; {
			if time.Since(began) > 20*time.Second {
				t.Fatalf("%v", gained(t, s, "u:1", time.Second))
			}
			one(t, s, see("u:1", "b"))
			time.Sleep(20 * time.Millisecond)
		}
	})
	saw(t, peer, "u:1", "a", "b", "c")
	last := gained(t, s, "u:1", time.Second)
	middle := last[len(last)-2]
	if distinct([]counter.Gain{middle}) != 1 {
		t.Errorf("%d in one step", distinct([]counter.Gain{middle}))
	}
	if _, part, err := s.History(t.Context(), "u:1", time.Second, middle.Number, middle.Number+1); err != nil || len(part) != 1 || part[0].Number != middle.Number || distinct(part) != 1 {
		t.Errorf("%v, %v, want %v", part, err, middle)
	}
	one(t, s, reset(unique, "u:1"))
	saw(t, s, "u:1", "a", "b", "c")
	o := with("seen", op(see("u:1", "d")))
	do(t, s, o, op(reset(unique, "u:1")), o)
	// A rule without buckets keeps nothing.
	one(t, s, counter.Change{Key: "u:1", Rule: &counter.Rule{Match: "*", Kind: counter.Unique}, Verb: counter.Edit, Join: []string{"x"}})
	want := []string{"a", "b", "c", "d"}
	saw(t, peer, "u:1", want...)
	many := visitors(0, counter.MaxMembers) // no form of theirs is sparse
	one(t, s, see("u:1", many...))
	want = append(want, many...)
	saw(t, s, "u:1", want...)
	if i.Crash != nil {
		s = i.Crash(t)
		saw(t, s, "u:1", want...)
		one(t, s, see("u:1", "e"))
		want = append(want, "e")
		saw(t, s, "u:1", want...)
	}
	// All in one step: what was seen goes with the counter.
	r := do(t, s, op(see("u:1", "f")), op(drop(unique, "u:1")), op(see("u:1", "g")))
	for j := range r {
		if r[j].Err != nil {
			t.Fatal(r[j].Err)
		}
	}
	saw(t, s, "u:1", "g")
	one(t, s, drop(unique, "u:1"))
	saw(t, s, "u:1")
	one(t, s, see("u:1", "h"))
	saw(t, s, "u:1", "h")
}

func historiesAddUp(t *testing.T, i Instance) {
	s, peer := i.Store, i.Peer
	if peer == nil {
		peer = s
	}
	history(t, s, "s:none", 0)
	began := time.Now()
	one(t, s, add(sum, "s:1", 5))
	one(t, peer, add(sum, "s:1", -7))
	history(t, s, "s:1", -2)
	one(t, s, adjust(sum, "s:1", 1000))
	one(t, s, reset(sum, "s:1"))
	history(t, peer, "s:1", -2)
	apply(t, s, add(sum, "s:1", 1), add(sum, "s:2", 10), add(sum, "s:1", 2), add(exact, "e:1", 7))
	o := with("again", op(add(sum, "s:1", 4)))
	do(t, s, o, o)
	merged := add(sum, "s:1", 30)
	merged.Merged = 3
	one(t, s, merged)
	refused(t, s, counter.ErrKind, "m:1", 0, add(sum, "s:1", 1), add(members, "m:1", 1))
	history(t, s, "s:1", 35)
	history(t, s, "s:2", 10)
	// Only sums have a history, and only under a rule that keeps one.
	one(t, s, add(sum, "e:1", 1))
	history(t, s, "e:1", 0)
	plain := &counter.Rule{Match: "*", Kind: counter.Sum}
	one(t, s, add(plain, "s:2", 1))
	history(t, s, "s:2", 10)
	one(t, s, add(sum, "s:2", 1))
	history(t, s, "s:2", 11)

	// Some seconds are over.
	want := int64(35)
	for len(gained(t, s, "s:1", time.Second)) < 3 && time.Since(began) < 20*time.Second {
		one(t, s, add(sum, "s:1", 3))
		want += 3
		time.Sleep(30 * time.Millisecond)
	}
	history(t, s, "s:1", want)
	history(t, peer, "s:1", want)
	seconds := gained(t, s, "s:1", time.Second)
	if at := time.Unix(seconds[0].Number, 0); at.Before(began.Add(-2*time.Minute)) || at.After(time.Now().Add(2*time.Minute)) {
		t.Errorf("it began at %s", at)
	}
	middle := seconds[1]
	if _, part, err := s.History(t.Context(), "s:1", time.Second, middle.Number, middle.Number+1); err != nil || len(part) != 1 || part[0] != middle {
		t.Errorf("%v, %v, want %v", part, err, middle)
	}
	if _, part, err := s.History(t.Context(), "s:1", time.Second, 0, middle.Number); err != nil || total(part) != seconds[0].Value {
		t.Errorf("%v, %v of %v", part, err, seconds)
	}
	if i.Crash != nil {
		s = i.Crash(t)
		history(t, s, "s:1", want)
		one(t, s, add(sum, "s:1", 1))
		history(t, s, "s:1", want+1)
	}
	one(t, s, drop(sum, "s:1"))
	history(t, s, "s:1", 0)
	one(t, s, add(sum, "s:1", 6))
	history(t, s, "s:1", 6)
}
