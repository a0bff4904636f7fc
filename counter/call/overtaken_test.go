package call_test

import (
	"context"
	"errors"
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

// mute is the way to an owner. While it is mute the owner makes the calls, and their answers are lost.
type mute struct {
	countertest.Everywhere
	isMute bool
}

// OwnerOf implements call.Owners.
func (m *mute) OwnerOf(int) call.Owner { return m }

// Do implements call.Owner.
func (m *mute) Do(ctx context.Context, c owner.Call) (owner.Answer, error) {
	answer, err := m.Owner.Do(ctx, c)
	if m.isMute {
		<-ctx.Done()
		return owner.Answer{}, ctx.Err()
	}

	return answer, err
}

// TestACallAfterOneThatWasGivenUp: the owner makes the call, and does not take it for a repetition of the one that was
// given up.
func TestACallAfterOneThatWasGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := owner.New(rowsmem.New(rowsmem.Config{}), owner.Config{Name: "only"})
		defer o.Close()
		partition := rows.PartitionOf("k")
		if err := o.Own(t.Context(), partition); err != nil {
			t.Fatal(err)
		}

		way := &mute{Everywhere: countertest.Everywhere{Owner: o}}
		caller := call.New(way, call.Config{Stream: "gateway"})
		increment := counter.Change{Key: "k", Rule: countertest.Rules.Find("k"), Verb: counter.Add, Delta: 1}
		one := owner.Call{Partition: partition, Ops: []counter.Op{{Changes: []counter.Change{increment}}}}

		for n := range int64(3) {
			way.isMute = true
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if _, err := caller.Do(ctx, one); !errors.Is(err, counter.ErrUnavailable) {
				t.Errorf("without an answer Do returns %v, want ErrUnavailable", err)
			}

			cancel()

			// The same operation again, as a new call. With the number of the former one the owner would answer it from
			// memory.
			way.isMute = false
			answer, err := caller.Do(t.Context(), one)
			if err != nil {
				t.Fatal(err)
			}
			// The call that was given up was made as well.
			if is := answer.Results[0].Counters[0].Value; is != 2*n+2 {
				t.Errorf("the counter is %d, want %d", is, 2*n+2)
			}
		}
	})
}
