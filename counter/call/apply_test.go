package call_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/countertest"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// forgetful is an owner that makes a batch without its idempotency key: as if the caller had died before it sent the
// key.
type forgetful struct{ owner *owner.Owner }

func (f forgetful) OwnerOf(int) call.Owner { return f }

func (f forgetful) Do(ctx context.Context, c owner.Call) (owner.Answer, error) {
	if c.More != nil && len(c.More.Remembered) > 0 {
		return owner.Answer{}, counter.ErrBusy
	}

	return f.owner.Do(ctx, c)
}

// emptied is a store in which readers find no rows. The owner goes on with the rows in its memory.
type emptied struct{ rows.Store }

func (emptied) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	return make([]rows.Found, len(addresses))
}

// TestTheOwnerRefusesABatch: only the owner decides whether a batch of exact counters is refused, since only the owner
// knows whether it is a repetition, and the present values.
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
			t.Fatalf("adding six: %+v, want success", r)
		}
		// A gateway that judged by its own read would refuse this: it sees no stock.
		if r := apply(emptied{store}, batch("out", -3)); r.Err != nil || r.Replay {
			t.Errorf("taking all six while readers see none: %+v, want success", r)
		}
		// Now nothing is in stock, so the batch would be refused as a new one. But a client that repeats a call without
		// an answer has to learn that it was made.
		if r := apply(store, batch("out", -3)); r.Err != nil || !r.Replay {
			t.Errorf("taking six again under the same key: %+v, want a replay", r)
		}
		if r := apply(store, batch("more", -3)); !errors.Is(r.Err, counter.ErrBound) {
			t.Errorf("taking more than there are: %+v, want ErrBound", r)
		}
	})
}

// TestABatchThatOverflows: nothing of the batch is made, even if two changes of one counter exceed 64 bits only
// together, and the counter in another partition has room for its part.
func TestABatchThatOverflows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := calledBy(t, rowsmem.New(rowsmem.Config{}), countertest.Rules, owner.Config{Name: "only"})
		add := func(key string, delta int64) counter.Change {
			return counter.Change{Key: key, Rule: countertest.Rules.Find(key), Verb: counter.Add, Delta: delta}
		}

		var batch counter.Op
		// Ten keys lie in several partitions, so the batch is made in parts.
		for n := range 10 {
			batch.Changes = append(batch.Changes, add(fmt.Sprint("s:", n), 1))
		}
		batch.Changes = append(batch.Changes, add("s:full", math.MaxInt64), add("s:full", 1))
		if r := s.Apply(t.Context(), []counter.Op{batch})[0]; !errors.Is(r.Err, counter.ErrOverflow) {
			t.Errorf("got %+v, want ErrOverflow", r)
		}

		if sum, err := s.Aggregate(t.Context(), "s:"); err != nil || sum.Counters != 0 {
			t.Errorf("the counters are %+v, %v; want none", sum, err)
		}
	})
}

// measuring is an owner that makes nothing, and notes how long the longest call is, as it is sent.
type measuring struct{ longest int }

// OwnerOf implements call.Owners.
func (m *measuring) OwnerOf(int) call.Owner { return m }

// Do implements call.Owner.
func (m *measuring) Do(_ context.Context, c owner.Call) (owner.Answer, error) {
	m.longest = max(m.longest, len(owner.AppendCall(nil, &c)))

	return owner.Answer{Results: make([]counter.Result, len(c.Ops))}, nil
}

// TestManyMembersAtOnce: changes of sets that come together, each of a thousand members, are sent in several calls. One
// call with all of them would be longer than package link takes, and all callers would get an error.
func TestManyMembersAtOnce(t *testing.T) {
	rules := counter.BuiltinRules()
	// A thousand members of 128 bytes in each of 200 changes are 25 MB, more than a frame of package link takes.
	join := make([]string, counter.MaxMembers)
	for i := range join {
		join[i] = fmt.Sprintf("%0128d", i)
	}
	one := counter.Change{Key: "likes:1", Rule: rules.Find("likes:1"), Verb: counter.Edit, Join: join}
	ops := make([]counter.Op, 200)
	for i := range ops {
		ops[i].Changes = []counter.Change{one}
	}

	way := &measuring{}
	s := call.NewStore(rowsmem.New(rowsmem.Config{}), way, rules, call.Config{Stream: "gateway"})
	defer func() { _ = s.Close() }()
	for i, result := range s.Apply(t.Context(), ops) {
		if result.Err != nil {
			t.Fatalf("change %d: %v", i, result.Err)
		}
	}

	const takes = 16 << 20 // bytes
	if way.longest > takes {
		t.Errorf("the longest call has %d bytes, want at most %d", way.longest, takes)
	}
}
