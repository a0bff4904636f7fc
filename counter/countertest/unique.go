package countertest

import (
	"math"
	"strconv"
	"testing"

	"headcount/counter"
	"headcount/hyperloglog"
)

var unique = &counter.Rule{
	Match: "u:*", Kind: counter.Unique, Ledger: counter.DefaultLedger, Resolutions: sum.Resolutions,
}

func see(key string, members ...string) counter.Change {
	return counter.Change{Key: key, Rule: unique, Verb: counter.Edit, Join: members}
}

// estimate returns the value that every store must have for these members.
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

// manyUniques tests a unique with too many members for the sparse form, and aggregates of uniques.
func manyUniques(t *testing.T, i Instance) {
	const size = 20_000
	s := i.Store
	peer := i.peer()
	all := visitors(0, size)
	for from := 0; from < size; from += counter.MaxMembers {
		c := one(t, s, see("u:1", all[from:from+counter.MaxMembers]...))
		if want := estimate(all[:from+counter.MaxMembers]); c.Value != want {
			t.Fatalf("%d of %d, want %d", c.Value, from+counter.MaxMembers, want)
		}
		s, peer = peer, s // in turn, so that what a process has in memory is out of date
	}

	// Four standard errors.
	if off := float64(read(t, s, "u:1").Value-size) / size; math.Abs(off) > 4*0.0081 {
		t.Errorf("it is off by %.2f %%", 100*off)
	}
	unchanged(t, s, "u:1", func() { one(t, s, see("u:1", all[size-counter.MaxMembers:]...)) })

	one(t, s, see("u:2", visitors(size-500, size+500)...))
	one(t, s, see("u:3", "visitor 7", "nobody else"))
	for _, key := range []string{"u:deleted", "u:reset"} {
		one(t, s, see(key, visitors(2*size, 2*size+500)...))
	}
	one(t, s, drop(unique, "u:deleted"))
	one(t, s, reset(unique, "u:reset"))

	// A member that several of them have seen counts once.
	want := counter.Aggregate{Counters: 4, Value: estimate(append(visitors(0, size+500), "nobody else"))}
	a, err := s.Aggregate(t.Context(), "u:")
	if err != nil || a != want {
		t.Errorf("Aggregate = %+v, %v", a, err)
	}
	one(t, s, add(sum, "s:1", 5))
	_, err = s.Aggregate(t.Context(), "")
	conflict(t, err, counter.ErrKind, "*", 0)

	one(t, s, reset(unique, "u:1"))
	if c := one(t, s, see("u:1", all[0])); c.Value != 1 {
		t.Errorf("%+v", c)
	}
}
