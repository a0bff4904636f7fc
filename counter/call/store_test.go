package call_test

import (
	"fmt"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// inMemory returns a store in the memory of this process, like that of the program without Redis or PostgreSQL.
func inMemory(t testing.TB, rules *counter.Rules) *call.Store {
	t.Helper()
	return openedOver(t, rowsmem.New(rowsmem.Config{}), rules, owner.InMemory)
}

// openedOver returns a store of whose partitions this process owns all.
func openedOver(t testing.TB, over rows.Store, rules *counter.Rules, cfg owner.Config) *call.Store {
	t.Helper()
	s, err := call.NewLocal(t.Context(), over, rules, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })

	return s
}

// calledBy returns a store that calls the owner of its partitions, as in a cluster.
func calledBy(t testing.TB, store rows.Store, rules *counter.Rules, cfg owner.Config) *call.Store {
	t.Helper()
	o := owner.New(store, cfg)
	for id := range rows.Partitions {
		if err := o.Own(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}

	s := call.NewStore(store, countertest.Everywhere{Owner: o}, rules, call.Config{Stream: "gateway"})
	t.Cleanup(func() {
		_ = s.Close()
		o.Close()
	})

	return s
}

// TestContract: counters keep the whole contract, in memory and through numbered calls.
func TestContract(t *testing.T) {
	for name, open := range map[string]func(testing.TB) *call.Store{
		"in memory": func(t testing.TB) *call.Store { return inMemory(t, countertest.Rules) },
		"through calls": func(t testing.TB) *call.Store {
			return calledBy(t, rowsmem.New(rowsmem.Config{}), countertest.Rules, owner.Config{Name: "only"})
		},
	} {
		t.Run(name, func(t *testing.T) {
			countertest.RunInBubble(t, func(t testing.TB) countertest.Instance {
				return countertest.Instance{Store: open(t)}
			})
		})
	}
}

// TestCopies: exported counters can be imported again.
func TestCopies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		countertest.RunCopies(t, func(t testing.TB) countertest.CopyStore {
			return inMemory(t, counter.BuiltinRules())
		})
	})
}

// An export has the hashes by which every store knows members.
func TestHashesOfAnExport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rules := counter.BuiltinRules()
		s := inMemory(t, rules)
		join := counter.Change{Key: "likes:1", Rule: rules.Find("likes:1"), Verb: counter.Edit}
		var want []string
		for n := range 200 {
			member := fmt.Sprint("member ", n)
			join.Join = append(join.Join, member)
			want = append(want, counter.MemberHash(member))
		}

		if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{join}}})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}

		slices.Sort(want)
		if is := countertest.Everything(t, s); len(is) != 1 || !slices.Equal(is[0].Hashes, want) {
			t.Errorf("the export is %+v, want one counter with the hashes %v", is, want)
		}
	})
}

// An export may lack the first entries of a ledger, because they have expired. It is imported all the same.
func TestALedgerWithoutItsBeginning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t, counter.BuiltinRules())
		now := time.Now().UTC()
		is := counter.Copy{Key: "stock:1", State: counter.State{
			Kind: counter.Exact, Value: 72, Updated: now.UnixMilli(), Entries: 72,
			Version: counter.Version{Incarnation: 1, Sequence: 72},
		}}

		// The ledger begins at entry 70 of 72.
		for seq := uint64(70); seq <= 72; seq++ {
			is.Ledger = append(is.Ledger, counter.Entry{
				Seq: seq, At: now, Op: counter.LedgerIncrement, Delta: 1, Before: int64(seq - 1), After: int64(seq),
			})
		}

		if n, err := s.Restore(t.Context(), []counter.Copy{is}, counter.BuiltinRules()); n != 1 || err != nil {
			t.Fatalf("restored %d counters: %v", n, err)
		}

		copies := countertest.Everything(t, s)
		if len(copies) != 1 || !reflect.DeepEqual(copies[0].Ledger, is.Ledger) {
			t.Errorf("the ledger is %+v, want %+v", copies, is.Ledger)
		}
	})
}
