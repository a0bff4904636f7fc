package countertest

import (
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"headcount/counter"
)

// topped is the rule sum with another match and a top list.
var topped = &counter.Rule{
	Match: "t:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, Top: true, Resolutions: sum.Resolutions,
}

// marked returns the counters that are marked in any step, and those of each step.
func marked(t testing.TB, s counter.TopStore) (keys []string, steps map[int64][]string) {
	t.Helper()
	steps, err := s.Marked(t.Context(), topped.Match)
	if err != nil {
		t.Fatal(err)
	}

	for _, some := range steps {
		keys = append(keys, some...)
	}
	slices.Sort(keys)

	return slices.Compact(keys), steps
}

func tops(t *testing.T, i Instance) {
	s := i.Store
	peer := i.peer()
	want := func(s counter.TopStore, keys ...string) map[int64][]string {
		t.Helper()
		is, steps := marked(t, s)
		if !slices.Equal(is, keys) {
			t.Fatalf("%q are marked, want %q", is, keys)
		}

		return steps
	}
	mark := func(s counter.TopStore, number int64, keys ...string) {
		t.Helper()
		if err := s.Mark(t.Context(), topped.Match, number, keys); err != nil {
			t.Fatal(err)
		}
	}

	want(s)
	now := time.Now().Unix()
	one(t, s, add(topped, "t:1", 5))
	apply(t, peer, add(topped, "t:2 a:b", 1), add(topped, "t:1", 2), add(topped, "t:3", 3), add(sum, "s:1", 1))
	one(t, s, add(topped, "t:down", -1))
	one(t, s, adjust(topped, "t:down", 100))
	want(s) // a change marks no counter

	mark(s, now, "t:1")
	mark(peer, now, "t:2 a:b", "t:1")
	mark(peer, now+1, "t:3", "t:never")
	// Another match that begins alike has marks of its own.
	if err := s.Mark(t.Context(), "t:", now, []string{"t:other"}); err != nil {
		t.Fatal(err)
	}

	for _, s := range []counter.Store{s, peer} {
		steps := want(s, "t:1", "t:2 a:b", "t:3", "t:never")
		for number, keys := range map[int64][]string{now: {"t:1", "t:2 a:b"}, now + 1: {"t:3", "t:never"}} {
			got := slices.Sorted(slices.Values(steps[number]))
			if len(steps) != 2 || !slices.Equal(got, keys) {
				t.Errorf("%q are marked in step %d, want %q", got, number, keys)
			}
		}
	}
	for _, b := range topped.Resolutions {
		sameAsOneByOne(t, s, []string{"t:1", "t:never", "t:2 a:b", "t:down", "t:3"}, b.Step, 0, math.MaxUint32)
	}

	// A closed step has a list in place of marks.
	list := counter.TopList{Number: now, Most: []counter.Gained{{Key: "t:1", Value: 7}, {Key: "t:2 a:b", Value: 1}}}
	keep := func(s counter.TopStore, step time.Duration, list counter.TopList, marks ...string) {
		t.Helper()
		if err := s.KeepTop(t.Context(), topped.Match, step, list, time.Hour, marks); err != nil {
			t.Fatal(err)
		}
	}
	keep(peer, time.Second, list, "t:1", "t:2 a:b")
	if i.Crash != nil {
		s = i.Crash(t)
	}

	want(s, "t:3", "t:never")
	got, err := s.TopLists(t.Context(), topped.Match, time.Second, now, now+1)
	if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], list) {
		t.Errorf("%+v, %v, want %+v", got, err, list)
	}
	for _, none := range []struct {
		match string
		step  time.Duration
		to    int64
	}{{topped.Match, time.Minute, now + 1}, {"t:", time.Second, now + 1}, {topped.Match, time.Second, now}} {
		got, err := s.TopLists(t.Context(), none.match, none.step, now, none.to)
		if err != nil || len(got) != 0 {
			t.Errorf("the lists of %+v are %+v, %v", none, got, err)
		}
	}
	keep(s, time.Second, counter.TopList{Number: now + 1}, "t:3", "t:never")
	want(s)

	// A mark may come late, and then an empty list takes its place.
	mark(s, now, "t:1")
	for number := range want(s, "t:1") {
		keep(s, time.Hour, counter.TopList{Number: number}, "t:none")
	}
	want(s, "t:1")
}
