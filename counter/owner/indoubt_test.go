package owner_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// doubtful is a store that makes a commit, loses its answer, and refuses the repetition, because a late message of the
// same process has claimed the partition again meanwhile.
type doubtful struct {
	*rowsmem.Store
	unanswered atomic.Bool // the answer to the next commit is lost
}

// Commit implements rows.Store, for one partition.
func (d *doubtful) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := d.Store.Commit(ctx, commits)
	if len(commits[0].Rows) == 0 || !d.unanswered.CompareAndSwap(true, false) {
		return errs
	}

	_, _ = d.Claim(ctx, "a", []rows.Former{{Partition: commits[0].Partition}})

	return []error{rows.ErrUnavailable}
}

// TestRefusedAfterItWasMade: the store has made a commit, and refuses its repetition. The owner finds out when it
// claims the partition again, so the change is neither made twice nor forgotten.
func TestRefusedAfterItWasMade(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &doubtful{Store: rowsmem.New(rowsmem.Config{})}
		o := begin(t, "a", store)
		defer o.Close()
		change := func(ops []counter.Op) counter.Result {
			t.Helper()
			answer, err := o.Do(t.Context(), owner.Call{Partition: 0, Ops: ops})
			if err != nil {
				t.Fatal(err)
			}

			return answer.Results[0]
		}

		change(increment("k"))
		// The owner sees the answer of its repetition alone, which is a refusal, and must not take the change for
		// refused.
		store.unanswered.Store(true)
		once := increment("k")
		once[0].IdempotencyKey = counter.IdempotencyKey{1}
		if is := change(once); is.Replay || is.Counters[0].Value != 2 {
			t.Errorf("the change in doubt is answered with %+v, want 2 and no replay", is)
		}

		if is := change(increment("k")); is.Counters[0].Value != 3 {
			t.Errorf("after three changes the counter is %d, want 3", is.Counters[0].Value)
		}
	})
}

// silent is a store that leaves commits with rows of partition 0 without an answer, and makes them only when it is told
// to.
type silent struct {
	*rowsmem.Store
	isSilent atomic.Bool
}

// Commit implements rows.Store, for one partition.
func (s *silent) Commit(ctx context.Context, commits []rows.Commit) []error {
	if s.isSilent.Load() && commits[0].Partition == 0 {
		return []error{rows.ErrUnavailable}
	}

	return s.Store.Commit(ctx, commits)
}

// TestReleasedInDoubt: a partition is released while a commit of it is in doubt. The repetition that finally arrives
// has the whole commit, although the owner has reused memory for other partitions since.
func TestReleasedInDoubt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &silent{Store: rowsmem.New(rowsmem.Config{})}
		o := begin(t, "a", store)
		defer o.Close()

		store.isSilent.Store(true)
		once := increment("k")
		once[0].IdempotencyKey = counter.IdempotencyKey{1}
		go func() { _, _ = o.Do(t.Context(), owner.Call{Partition: 0, Ops: once}) }()
		synctest.Wait()

		if err := o.Release(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if err := o.Own(t.Context(), 1); err != nil {
			t.Fatal(err)
		}

		// These commits use the memory again that the one in doubt was made in.
		for _, key := range []string{"x", "y"} {
			if _, err := o.Do(t.Context(), owner.Call{Partition: 1, Ops: increment(key)}); err != nil {
				t.Fatal(err)
			}
		}

		store.isSilent.Store(false)
		time.Sleep(time.Second) // the commit is repeated
		next := begin(t, "b", store)
		defer next.Close()
		answer, err := next.Do(t.Context(), owner.Call{Partition: 0, Ops: once})
		if err != nil {
			t.Fatal(err)
		}
		if is := answer.Results[0]; !is.Replay || is.Counters[0].Value != 1 {
			t.Errorf("the repeated change is answered with %+v, want a replay and the value 1", is)
		}
	})
}
