package countertest

import (
	"math"
	"testing"
	"time"

	"headcount/counter"
	"headcount/hyperloglog"
	"headcount/internal/testkit"
)

// gained returns everything that the store keeps of what a counter gained in steps of that length.
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

// history checks that the steps of every length that the rule keeps add up to want, and that fine steps add up to
// coarse ones.
func history(t *testing.T, s counter.Reader, key string, want int64) {
	t.Helper()
	fine := map[int64]int64{}
	for i, b := range sum.Resolutions {
		gains := gained(t, s, key, b.Step)
		if got := total(gains); got != want {
			t.Errorf("%q gained %d in steps of %s (%v), want %d", key, got, b.Step, gains, want)
		}

		for _, g := range gains {
			if i == 0 {
				fine[g.Number/int64(sum.Resolutions[1].Step/b.Step)] += g.Value
			}
			if i == 1 && fine[g.Number] != g.Value {
				t.Errorf("%q: step %d of %s is %d, its parts %d", key, g.Number, b.Step, g.Value, fine[g.Number])
			}
		}
	}
}

// distinct returns how many members a unique saw in some steps.
func distinct(gains []counter.Gain) int64 {
	var all hyperloglog.Union
	for _, g := range gains {
		if g.Seen != nil {
			all.Merge(*g.Seen)
		}
	}

	return all.Count()
}

// saw checks that a unique saw these members, and nobody else, in the steps of every length.
func saw(t *testing.T, s counter.Reader, key string, members ...string) {
	t.Helper()
	for _, b := range unique.Resolutions {
		gains := gained(t, s, key, b.Step)
		if distinct(gains) != estimate(members) || total(gains) != 0 {
			t.Fatalf("%q saw %d in steps of %s, want %d", key, distinct(gains), b.Step, estimate(members))
		}
	}
}

// histories tests steps of time over some seconds and a crash. The model's histories may be too short for that.
func histories(t *testing.T, i Instance) {
	s := i.Store
	peer := i.peer()
	began := time.Now()
	one(t, peer, add(sum, "s:1", -7))
	merged := add(sum, "s:1", 42)
	merged.Merged = 3
	one(t, s, merged)
	one(t, s, add(sum, "s:2", 10))
	one(t, s, add(&counter.Rule{Match: "*", Kind: counter.Sum}, "s:2", 1)) // a rule without history
	one(t, s, add(sum, "s:2", 1))
	history(t, s, "s:2", 11)

	one(t, s, see("u:1", "a", "b"))
	one(t, peer, see("u:1", "b", "c"))
	withoutHistory := see("u:1", "x")
	withoutHistory.Rule = &counter.Rule{Match: "*", Kind: counter.Unique}
	one(t, s, withoutHistory)
	for _, g := range gained(t, s, "u:1", time.Hour) {
		if n := len(g.Seen.Bytes()); n > 27 {
			t.Errorf("three members take %d bytes", n)
		}
	}

	// A counter.Archive compares the two incarnations.
	for _, key := range []string{"s:1", "u:1"} {
		is, _, err := s.History(t.Context(), key, time.Hour, 0, 1)
		if err != nil || is.Version.Incarnation != read(t, s, key).Version.Incarnation {
			t.Errorf("%q has the version %s in its history, %v", key, is.Version, err)
		}
	}

	// Seconds later b is new in its step, but the counter stays the same. The first two steps may be those of a, b and
	// c.
	want := int64(35)
	unchanged(t, s, "u:1", func() {
		testkit.Eventually(t, "some seconds are over", func() bool {
			one(t, s, add(sum, "s:1", 3))
			want += 3
			one(t, s, see("u:1", "b"))

			return len(gained(t, s, "u:1", time.Second)) >= 4 && len(gained(t, s, "s:1", time.Second)) >= 3
		})
	})
	members := []string{"a", "b", "c"}
	for _, s := range []counter.Store{s, peer} {
		history(t, s, "s:1", want)
		saw(t, s, "u:1", members...)
	}

	first := gained(t, s, "s:1", time.Second)[0]
	at := time.Unix(first.Number, 0)
	if at.Before(began.Add(-2*time.Minute)) || at.After(time.Now().Add(2*time.Minute)) {
		t.Errorf("it began at %s", at)
	}
	partsOfHistory(t, s)

	// The steps of a unique outlive a reset.
	one(t, s, reset(unique, "u:1"))
	many := visitors(0, counter.MaxMembers) // too many for the sparse form
	one(t, s, see("u:1", many...))
	members = append(members, many...)
	saw(t, s, "u:1", members...)

	if i.Crash != nil {
		s = i.Crash(t)
		history(t, s, "s:1", want)
		saw(t, s, "u:1", members...)
		unchanged(t, s, "u:1", func() { one(t, s, see("u:1", many...)) })
		one(t, s, add(sum, "s:1", 1))
		one(t, s, see("u:1", "e"))
		history(t, s, "s:1", want+1)
		saw(t, s, "u:1", append(members, "e")...)
	}

	// A delete removes the history, even within one step.
	do(t, s, op(drop(sum, "s:1")), op(add(sum, "s:1", 6)))
	do(t, s, op(see("u:1", "f")), op(drop(unique, "u:1")), op(see("u:1", "g")))
	history(t, s, "s:1", 6)
	saw(t, s, "u:1", "g")
}

// partsOfHistory reads parts of the histories of s:1 and u:1, which must be the same as in the whole.
func partsOfHistory(t *testing.T, s counter.Reader) {
	t.Helper()
	seconds := gained(t, s, "s:1", time.Second)
	middle := seconds[1]
	_, part, err := s.History(t.Context(), "s:1", time.Second, middle.Number, middle.Number+1)
	if err != nil || len(part) != 1 || part[0] != middle {
		t.Errorf("%v, %v, want %v", part, err, middle)
	}
	_, part, err = s.History(t.Context(), "s:1", time.Second, 0, middle.Number)
	if err != nil || total(part) != seconds[0].Value {
		t.Errorf("%v, %v of %v", part, err, seconds)
	}

	seen := gained(t, s, "u:1", time.Second)
	middle = seen[len(seen)-2]
	_, part, err = s.History(t.Context(), "u:1", time.Second, middle.Number, middle.Number+1)
	if err != nil || len(part) != 1 || distinct(part) != 1 {
		t.Errorf("%v, %v, want %v", part, err, middle)
	}
}
