package owner_test

import (
	"errors"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// TestAReplacedOwnerAnswersNothing: an owner was replaced and does not know it yet. It answers nothing from memory,
// even where the answer would change nothing: otherwise a removed member would seem to stay, and a free seat would be
// refused.
func TestAReplacedOwnerAnswersNothing(t *testing.T) {
	rules := counter.BuiltinRules()
	edit := func(join, leave []string) owner.Call {
		change := counter.Change{
			Key: "likes:1", Rule: rules.Find("likes:1"), Verb: counter.Edit, Join: join, Leave: leave,
		}
		return owner.Call{
			Partition: rows.PartitionOf("likes:1"), Ops: []counter.Op{{Changes: []counter.Change{change}}},
		}
	}

	sell := func(n int64) owner.Call {
		change := counter.Change{Key: "stock:1", Rule: rules.Find("stock:1"), Verb: counter.Add, Delta: n}
		return owner.Call{Partition: owner.ExactPartition, Ops: []counter.Op{{Changes: []counter.Change{change}}}}
	}

	ask := func(cost int64) owner.Call {
		name := limit.Name{Key: "a", Algorithm: limit.Log, Window: 60_000}
		asked := []limit.Request{{Name: name, Limit: 2, Cost: cost}}
		return owner.Call{Partition: rows.PartitionOf("a"), More: &owner.More{Limits: asked}}
	}

	for name, tc := range map[string]struct{ former, later, stale owner.Call }{
		"a member that is out": {edit([]string{"b"}, nil), edit([]string{"a"}, nil), edit(nil, []string{"a"})},
		"a seat that is free":  {sell(1), sell(5), sell(-3)},
		"a limit":              {ask(2), ask(-2), ask(1)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := rowsmem.New(rowsmem.Config{})
				former := owner.New(store, owner.Config{Name: "former"})
				defer former.Close()
				later := owner.New(store, owner.Config{Name: "later"})
				defer later.Close()

				for _, step := range []struct {
					by   *owner.Owner
					call owner.Call
				}{{former, tc.former}, {later, tc.later}} {
					if err := step.by.Own(t.Context(), step.call.Partition); err != nil {
						t.Fatal(err)
					}
					if _, err := step.by.Do(t.Context(), step.call); err != nil {
						t.Fatal(err)
					}
				}

				if answer, err := former.Do(t.Context(), tc.stale); !errors.Is(err, owner.ErrNotOwner) {
					t.Errorf("the former owner answers %+v, %v; want ErrNotOwner", answer, err)
				}
			})
		})
	}
}
