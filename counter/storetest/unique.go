package storetest

import (
	"fmt"
	"math"
	"strconv"
	"sync"
	"testing"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

var unique = &counter.Rule{Match: "u:*", Kind: counter.Unique, Ledger: counter.DefaultLedger, Buckets: sum.Buckets}

func see(key string, members ...string) counter.Change {
	return counter.Change{Key: key, Rule: unique, Verb: counter.Edit, Join: members}
}

// estimate is what every store must say of these members, whatever became of them in between.
func estimate(members []string) int64 {
	var r hyperloglog.Registers
	r.Add(members...)
	return r.Count()
}

func visitors(from, to int) []string {
	list := make([]string, 0, to-from)
	for n := from; n < to; n++ {
		list = append(list, "visitor "+strconv.Itoa(n))
	}
	return list
}

func uniques(t *testing.T, i Instance) {
	s := i.Store
	for _, step := range []struct {
		members []string
		want    int64
		moves   bool
	}{
		{[]string{"a"}, 1, true}, {[]string{"a"}, 1, false}, {[]string{"b", "a", "c"}, 3, true}, {[]string{"c", "b"}, 3, false},
		{[]string{"a b", "ü", "A", "%"}, 7, true},
	} {
		before := read(t, s, "u:1")
		c := one(t, s, see("u:1", step.members...))
		if c.Value != step.want || c.Kind != counter.Unique {
			t.Fatalf("%+v: %+v", step, c)
		}
		if moved := c.Version.Compare(before.Version) > 0; moved != step.moves || !moved && !same(c, before) {
			t.Fatalf("%+v: %+v after %+v", step, c, before)
		}
		if got := readAll(t, s, step.members[0], "u:1"); !same(got[0].Counter, c) || got[0].Mine {
			t.Fatalf("%+v, answered %+v", got[0], c)
		}
	}
	unchanged(t, s, "u:1", func() {
		refused(t, s, counter.ErrKind, "u:1", 7, counter.Change{Key: "u:1", Rule: unique, Verb: counter.Edit, Leave: []string{"a"}})
		refused(t, s, counter.ErrKind, "u:1", 7, counter.Change{Key: "u:1", Rule: unique, Verb: counter.Edit, Join: []string{"x"}, Leave: []string{"a"}})
		refused(t, s, counter.ErrKind, "u:1", 7, add(unique, "u:1", 1))
		refused(t, s, counter.ErrKind, "u:1", 7, adjust(sum, "u:1", 1))
	})
	refused(t, s, counter.ErrKind, "u:2", 0, counter.Change{Key: "u:2", Rule: unique, Verb: counter.Edit, Leave: []string{"a"}})
	// It keeps its kind, and others theirs.
	if c := one(t, s, edit("u:1", []string{"under another rule"}, nil)); c.Value != 8 || c.Kind != counter.Unique {
		t.Fatalf("%+v", c)
	}
	one(t, s, edit("m:1", []string{"a"}, nil))
	if c := one(t, s, see("m:1", "b")); c.Value != 2 || c.Kind != counter.Members || !readAll(t, s, "b", "m:1")[0].Mine {
		t.Fatalf("%+v", c)
	}

	last := read(t, s, "u:1")
	if c := one(t, s, reset(unique, "u:1")); c.Value != 0 || c.Version.Compare(last.Version) <= 0 {
		t.Fatalf("%+v", c)
	}
	if all := allEntries(t, s, "u:1"); len(all) != 1 || all[0].Op != counter.LedgerReset || all[0].Before != 8 || all[0].After != 0 {
		t.Errorf("%+v", all)
	}
	unchanged(t, s, "u:1", func() { one(t, s, reset(unique, "u:1")) })
	if c := one(t, s, see("u:1", "a")); c.Value != 1 { // it is new again
		t.Errorf("%+v", c)
	}
	last = read(t, s, "u:1")
	one(t, s, drop(unique, "u:1"))
	if c := read(t, s, "u:1"); c.Touched() {
		t.Errorf("%+v", c)
	}
	if c := one(t, s, see("u:1", "b")); c.Value != 1 || c.Version.Incarnation <= last.Version.Incarnation {
		t.Errorf("%+v after %+v", c, last)
	}
	// In one step with what comes before and after.
	r := do(t, s, op(see("u:3", "a", "b")), op(reset(unique, "u:3")), op(see("u:3", "b")), op(drop(unique, "u:3")), op(see("u:3", "a", "c", "d")), op(see("u:3", "d")))
	for j := range r {
		if r[j].Err != nil {
			t.Fatal(r[j].Err)
		}
	}
	value(t, s, "u:3", 3)
	o := with("seen", op(see("u:3", "e")))
	do(t, s, o)
	one(t, s, reset(unique, "u:3"))
	if r := do(t, s, o)[0]; !r.Replay || r.Counters[0].Value != 0 {
		t.Errorf("%+v", r)
	}
}

// manyUniques has so many members that no form is sparse any more.
func manyUniques(t *testing.T, i Instance) {
	const size = 20_000
	s := i.Store
	all := visitors(0, size)
	for from := 0; from < size; from += counter.MaxMembers {
		c := one(t, s, see("u:1", all[from:from+counter.MaxMembers]...))
		if want := estimate(all[:from+counter.MaxMembers]); c.Value != want {
			t.Fatalf("%d of %d, want %d", c.Value, from+counter.MaxMembers, want)
		}
		if i.Peer != nil {
			s, i.Peer = i.Peer, s
		}
	}
	if off := float64(read(t, s, "u:1").Value-size) / size; math.Abs(off) > 4*counter.UniqueError {
		t.Errorf("it is off by %.2f %%", 100*off)
	}
	unchanged(t, s, "u:1", func() { one(t, s, see("u:1", all[size-counter.MaxMembers:]...)) })
	one(t, s, reset(unique, "u:1"))
	if c := one(t, s, see("u:1", all[0])); c.Value != 1 {
		t.Errorf("%+v", c)
	}
}

func concurrentUniques(t *testing.T, i Instance) {
	const clients, each, rounds = 8, 300, 6
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			s := i.Store
			if i.Peer != nil && c%2 == 0 {
				s = i.Peer
			}
			for n := range rounds { // half of them overlap with the next client's
				from := c*each/2 + n*each/rounds
				if r := s.Apply(t.Context(), []counter.Op{op(see("u:1", visitors(from, from+each/rounds)...))})[0]; r.Err != nil {
					t.Error(r.Err)
					return
				}
			}
		})
	}
	wg.Wait()
	value(t, i.Store, "u:1", estimate(visitors(0, (clients-1)*each/2+each)))
}

func unions(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, see("u:1", visitors(0, 1000)...))
	one(t, s, see("u:2", visitors(500, 1500)...))
	for n := range 10 {
		one(t, s, see(fmt.Sprint("u:few ", n), visitors(n, n+3)...))
	}
	one(t, s, see("u:gone", visitors(5000, 5500)...))
	one(t, s, drop(unique, "u:gone"))
	one(t, s, see("u:reset", visitors(5000, 5500)...))
	one(t, s, reset(unique, "u:reset"))
	one(t, s, add(sum, "s:1", 5))
	for prefix, want := range map[string]counter.Aggregate{
		"u:":     {Counters: 13, Value: estimate(visitors(0, 1500))},
		"u:few":  {Counters: 10, Value: 12},
		"u:1":    {Counters: 1, Value: estimate(visitors(0, 1000))},
		"u:rese": {Counters: 1},
		"u:gone": {},
		"s:":     {Counters: 1, Value: 5},
	} {
		if got, err := s.Aggregate(t.Context(), prefix); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", prefix, got, err, want)
		}
	}
	_, err := s.Aggregate(t.Context(), "")
	conflict(t, err, counter.ErrKind, "*", 0)
}
