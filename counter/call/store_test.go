package call_test

import (
	"testing"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// inMemory returns a store in the memory of this process, as the program without a store has it.
func inMemory(t testing.TB, rules *counter.Rules) *call.Store {
	t.Helper()
	return openedOver(t, rowsmem.New(rowsmem.Config{}), rules, owner.InMemory)
}

// openedOver returns a store all of whose partitions this process owns.
func openedOver(t testing.TB, over rows.Store, rules *counter.Rules, cfg owner.Config) *call.Store {
	t.Helper()
	s, err := call.NewLocal(t.Context(), over, rules, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })

	return s
}

// calledBy returns a store that finds the owner of its partitions, as a process beside others does.
func calledBy(t testing.TB, store rows.Store, rules *counter.Rules, cfg owner.Config) *call.Store {
	t.Helper()
	o := owner.New(store, cfg)
	for id := range rows.Partitions {
		if err := o.Own(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}

	s := call.NewStore(store, call.Everywhere(o), rules, call.Config{Stream: "gateway"})
	t.Cleanup(func() {
		_ = s.Close()
		o.Close()
	})

	return s
}

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
