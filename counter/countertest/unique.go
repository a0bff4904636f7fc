package countertest

import (
	"fmt"
	"math"
	"strconv"
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

// manyUniques has so many members that no form is sparse any more.
func manyUniques(t *testing.T, i Instance) {
	const size = 20_000
	s, peer := i.Store, i.peer()
	all := visitors(0, size)
	for from := 0; from < size; from += counter.MaxMembers {
		c := one(t, s, see("u:1", all[from:from+counter.MaxMembers]...))
		if want := estimate(all[:from+counter.MaxMembers]); c.Value != want {
			t.Fatalf("%d of %d, want %d", c.Value, from+counter.MaxMembers, want)
		}
		s, peer = peer, s
	}
	if off := float64(read(t, s, "u:1").Value-size) / size; math.Abs(off) > 4*0.0081 {
		t.Errorf("it is off by %.2f %%", 100*off)
	}
	unchanged(t, s, "u:1", func() { one(t, s, see("u:1", all[size-counter.MaxMembers:]...)) })
	one(t, s, reset(unique, "u:1"))
	if c := one(t, s, see("u:1", all[0])); c.Value != 1 {
		t.Errorf("%+v", c)
	}
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
