package countertest

import (
	"math"
	"slices"
	"testing"
	"time"

	"headcount/counter"
)

// topped is sum under another match, with a list of what gained most.
var topped = &counter.Rule{Match: "t:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, Top: true, Buckets: sum.Buckets}

// marked are the counters that are marked in any step.
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
	s, peer := i.Store, i.Peer
	if peer == nil {
		peer = s
	}
	light := func(c counter.Change, numbers ...int64) counter.Change {
		for _, n := range numbers {
			c.Light = n
		}
		return c
	}
	want := func(s counter.TopStore, keys ...string) map[int64][]string {
		t.Helper()
		is, steps := marked(t, s)
		if !slices.Equal(is, keys) {
			t.Fatalf("%q are marked, want %q", is, keys)
		}
		return steps
	}
	want(s)
	one(t, s, add(topped, "t:1", 5))
	apply(t, peer, add(topped, "t:2 a:b", 1), add(topped, "t:1", 2), light(add(topped, "t:3", 3), -1), add(sum, "s:1", 1))
	// What falls, what is refused or repeated, and what is known to be light are not marked.
	one(t, s, add(topped, "t:down", -1))
	one(t, s, adjust(topped, "t:down", 100))
	one(t, s, edit("m:1", []string{"a"}, nil))
	refused(t, s, counter.ErrKind, "m:1", 1, add(topped, "t:refused", 1), add(members, "m:1", 1))
	want(peer, "t:1", "t:2 a:b", "t:3")
	// In whichever second it is made, the number of one of these is not that of the step.
	now := time.Now().Unix()
	for n := now - 2; n <= now+30; n++ {
		one(t, s, light(add(topped, "t:light", 1), n))
	}
	steps := want(s, "t:1", "t:2 a:b", "t:3", "t:light")
	for _, b := range topped.Buckets {
		sameAsOneByOne(t, s, []string{"t:1", "t:never", "t:light", "t:2 a:b", "t:down", "t:3"}, b.Step, 0, math.MaxUint32)
	}

	// A step that is closed has a list in the place of marks.
	for number, keys := range steps {
		list := counter.TopList{Number: number}
		for _, key := range keys {
			list.Most = append(list.Most, counter.Gained{Key: key, Value: number})
		}
		if err := peer.KeepTop(t.Context(), topped.Match, time.Second, list, time.Hour, keys); err != nil {
			t.Fatal(err)
		}
	}
	if i.Crash != nil {
		s = i.Crash(t)
	}
	want(s)
	for number, keys := range steps {
		got, err := s.TopLists(t.Context(), topped.Match, time.Second, number, number+1)
		if err != nil || len(got) != 1 || got[0].Number != number || len(got[0].Most) != len(keys) || got[0].Most[0].Value != number || !slices.Contains(keys, got[0].Most[0].Key) {
			t.Errorf("%+v, %v, want %d of %q", got, err, number, keys)
		}
		for _, none := range []func() ([]counter.TopList, error){
			func() ([]counter.TopList, error) {
				return s.TopLists(t.Context(), topped.Match, time.Minute, number, number+1)
			},
			func() ([]counter.TopList, error) { return s.TopLists(t.Context(), "t:", time.Second, number, number+1) },
			func() ([]counter.TopList, error) {
				return s.TopLists(t.Context(), topped.Match, time.Second, number, number)
			},
		} {
			if got, err := none(); err != nil || len(got) != 0 {
				t.Errorf("%+v, %v", got, err)
			}
		}
	}
	// One that comes late is marked again; an empty list is one.
	one(t, s, add(topped, "t:1", 1))
	for number := range want(s, "t:1") {
		if err := s.KeepTop(t.Context(), topped.Match, time.Hour, counter.TopList{Number: number}, time.Hour, []string{"t:none"}); err != nil {
			t.Fatal(err)
		}
	}
	want(s, "t:1")
}
