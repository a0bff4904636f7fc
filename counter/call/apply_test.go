package call_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// forgetful makes changes, and remembers no idempotency key of a batch: as if its caller died before it asked for that.
type forgetful struct{ owner *owner.Owner }

func (f forgetful) OwnerOf(int) call.Owner { return f }

func (f forgetful) Do(ctx context.Context, c owner.Call) (owner.Answer, error) {
	if c.More != nil && len(c.More.Remembered) > 0 {
		return owner.Answer{}, counter.ErrBusy
	}

	return f.owner.Do(ctx, c)
}

// emptied has no rows for those who read. The owner goes on with what is in its memory.
type emptied struct{ rows.Store }

func (emptied) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	return make([]rows.Found, len(addresses))
}

// TestTheOwnerRefusesABatch: whether a batch of exact counters is refused depends on its owner alone, which knows
// whether it is a repetition, and what the counters are. A reader knows neither.
func TestTheOwnerRefusesABatch(t *testing.T) {
	rules := counter.BuiltinRules()
	seats := rules.Find("stock:1")
	batch := func(name string, delta int64) []counter.Op {
		change := counter.Change{Key: "stock:1", Rule: seats, Verb: counter.Add, Delta: delta}
		return []counter.Op{{
			Changes:        []counter.Change{change, change},
			IdempotencyKey: counter.NewIdempotencyKey("*", "", name),
		}}
	}

	synctest.Test(t, func(t *testing.T) {
		store := rowsmem.New(rowsmem.Config{})
		o := owner.New(store, owner.Config{Name: "only"})
		defer o.Close()
		for id := range rows.Partitions {
			if err := o.Own(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}

		processes := 0
		apply := func(read rows.Store, ops []counter.Op) counter.Result {
			processes++
			s := call.NewStore(read, forgetful{o}, rules, call.Config{Stream: fmt.Sprint("process ", processes)})
			defer func() { _ = s.Close() }()
			return s.Apply(t.Context(), ops)[0]
		}

		if r := apply(store, batch("in", 3)); r.Err != nil || r.Replay {
			t.Fatalf("six come in: %+v", r)
		}
		if r := apply(emptied{store}, batch("out", -3)); r.Err != nil || r.Replay {
			t.Errorf("all six go out, while readers see none: %+v", r)
		}
		if r := apply(store, batch("out", -3)); r.Err != nil || !r.Replay {
			t.Errorf("the same again: %+v", r)
		}
		if r := apply(store, batch("more", -3)); !errors.Is(r.Err, counter.ErrBound) {
			t.Errorf("more than there are: %+v", r)
		}
	})
}
