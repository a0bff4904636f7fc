package owner_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// TestTogetherOrNotAtAll: if one of several calls that belong together is refused, or has its owner elsewhere, none of
// them is made, and the owner goes on.
func TestTogetherOrNotAtAll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		apart := keysApart(3)
		keys, foreign := apart[:2], apart[2]

		store := rowsmem.New(rowsmem.Config{})
		o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1})
		defer o.Close()
		if err := o.Own(t.Context(), rows.PartitionOf(keys[0]), rows.PartitionOf(keys[1])); err != nil {
			t.Fatal(err)
		}

		adds := func(n int64, keys ...string) (calls []owner.Call) {
			for _, key := range keys {
				ops := increment(key)
				ops[0].Changes[0].Delta = n
				calls = append(calls, owner.Call{Partition: rows.PartitionOf(key), Ops: ops})
			}

			return calls
		}

		values := func() [2]int64 {
			t.Helper()
			read, err := owner.NewReader(store, rows.PartitionOf).Read(t.Context(), keys, "", 0)
			if err != nil {
				t.Fatal(err)
			}

			return [2]int64{read[0].Value, read[1].Value}
		}

		outcomes, made, err := o.DoTogether(t.Context(), adds(2, keys...))
		if !made || err != nil || outcomes[1].Results[0].Counters[0].Value != 2 {
			t.Fatalf("made: %t, %v, with %+v; want both counters at 2", made, err, outcomes)
		}

		if _, made, err := o.DoTogether(t.Context(), adds(2, keys[0], foreign)); made || err != nil {
			t.Errorf("with a foreign partition: made %t, %v; want not made, and no error", made, err)
		}

		overflow := append(adds(2, keys[0]), adds(math.MaxInt64, keys[1])...)
		if _, made, err := o.DoTogether(t.Context(), overflow); made || err != nil {
			t.Errorf("with a refused part: made %t, %v; want not made, and no error", made, err)
		}
		if got := values(); got != [2]int64{2, 2} {
			t.Errorf("the values are %v, want 2 and 2", got)
		}

		// Made separately, the call that is not refused takes effect.
		separate := o.DoAll(t.Context(), overflow)
		var conflict *counter.Conflict
		if separate[0].Err != nil || !errors.As(separate[1].Results[0].Err, &conflict) {
			t.Errorf("separate calls are answered with %+v, want success and a conflict", separate)
		}
		if got := values(); got != [2]int64{4, 2} {
			t.Errorf("the values are %v, want 4 and 2", got)
		}
	})
}

// slowStore is a store that takes a second to commit.
type slowStore struct{ *rowsmem.Store }

// Commit implements rows.Store.
func (s *slowStore) Commit(ctx context.Context, commits []rows.Commit) []error {
	time.Sleep(time.Second)
	return s.Store.Commit(ctx, commits)
}

// TestCallsThatGetNoTurn: calls whose time is up before the turn of another one has ended make nothing, and say so.
func TestCallsThatGetNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := owner.New(&slowStore{rowsmem.New(rowsmem.Config{})}, owner.Config{Name: "only", VerifyEvery: -1})
		defer o.Close()
		keys := keysApart(2)
		var calls []owner.Call
		for _, key := range keys {
			calls = append(calls, owner.Call{Partition: rows.PartitionOf(key), Ops: increment(key)})
		}
		if err := o.Own(t.Context(), calls[0].Partition, calls[1].Partition); err != nil {
			t.Fatal(err)
		}

		var first sync.WaitGroup
		first.Go(func() {
			if _, err := o.Do(t.Context(), calls[0]); err != nil {
				t.Error(err)
			}
		})
		synctest.Wait()

		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		if _, made, err := o.DoTogether(ctx, calls); made || !errors.Is(err, counter.ErrBusy) {
			t.Errorf("together: made %t, %v; want ErrBusy", made, err)
		}
		for _, outcome := range o.DoAll(ctx, calls) {
			if !errors.Is(outcome.Err, counter.ErrBusy) {
				t.Errorf("each by itself: %v; want ErrBusy", outcome.Err)
			}
		}
		first.Wait()

		for i, want := range []int64{2, 1} {
			answer, err := o.Do(t.Context(), calls[i])
			if err != nil || answer.Results[0].Counters[0].Value != want {
				t.Errorf("call %d again: %+v, %v; want %d", i, answer, err, want)
			}
		}
	})
}

// keysApart returns keys in different partitions.
func keysApart(n int) (keys []string) {
	used := map[int]bool{}
	for i := 0; len(keys) < n; i++ {
		key := fmt.Sprint("key ", i)
		if at := rows.PartitionOf(key); !used[at] {
			used[at] = true
			keys = append(keys, key)
		}
	}

	return keys
}
