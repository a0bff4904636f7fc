package rowstier

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// silentFast is a fast store that does not answer for some partitions, like a Redis Cluster with a master that hangs.
type silentFast struct {
	*fastStore
	silent atomic.Int64 // the partitions below this one get no answer
}

func (f *silentFast) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	waits := false
	for i := range commits {
		if int64(commits[i].Partition) < f.silent.Load() {
			errs[i] = rows.ErrUnavailable
			waits = true
			continue
		}
		errs[i] = f.fastStore.Commit(ctx, commits[i:i+1])[0]
	}

	if waits {
		within, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		<-within.Done()
	}

	return errs
}

// TestSomePartitionsCannotBeConfirmed: the durable store is back, but the fast store does not answer for some
// partitions. The other partitions are drained.
func TestSomePartitionsCannotBeConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast := &silentFast{fastStore: newFast()}
		durable := newDurable()
		first := New(fast, durable, Config{})
		claims := claimEach(t, first, "first")
		changeEach(t, first, claims, "1")
		time.Sleep(time.Second)
		changeEach(t, first, claims, "2") // this writes the states to the fast store
		if err := first.Close(t.Context()); err != nil {
			t.Fatal(err)
		}

		// The new process cannot claim the durable store, so its first drain has to confirm every partition in the fast
		// store.
		durable.away.Store(true)
		s := New(fast, durable, Config{})
		changeEach(t, s, claimEach(t, s, "owner"), "3")
		const silent = 4
		fast.silent.Store(silent)
		durable.away.Store(false)
		time.Sleep(time.Minute)
		checkEach(t, durable, silent, "3")

		// Nothing was lost meanwhile: what could not be confirmed is drained as soon as the fast store answers.
		fast.silent.Store(0)
		if err := s.Close(t.Context()); err != nil {
			t.Error(err)
		}

		checkEach(t, durable, 0, "3")
	})
}

// claimEach claims all partitions.
func claimEach(t *testing.T, s *Store, owner string) []rows.Claim {
	t.Helper()
	claims, err := s.Claim(t.Context(), owner, everyPartition())
	if err != nil {
		t.Fatal(err)
	}

	return claims
}

// changeEach changes a row of each partition.
func changeEach(t *testing.T, s *Store, claims []rows.Claim, value string) {
	t.Helper()
	for id := range claims {
		o := owned{Store: s, name: rows.Name{Collection: "c", Field: "f"}, claim: claims[id]}
		c := o.next(value)
		c.Partition = id
		if err := o.commit(t, c); err != nil {
			t.Fatal(id, err)
		}
		claims[id] = o.claim
	}
}

// checkEach checks the rows of all partitions from the first one on.
func checkEach(t *testing.T, durable *durableStore, first int, want string) {
	t.Helper()
	for id := first; id < rows.Partitions; id++ {
		at := rows.Address{Partition: id, Name: rows.Name{Collection: "c", Field: "f"}}
		got := durable.Read(t.Context(), []rows.Address{at})[0]
		if string(got.Value) != want {
			t.Fatalf("partition %d in the durable store has %q, %v; want %q", id, got.Value, got.Err, want)
		}
	}
}

// hangingDurable is a durable store whose commits can take long.
type hangingDurable struct {
	*durableStore
	hangs atomic.Bool
}

func (d *hangingDurable) Commit(ctx context.Context, commits []rows.Commit) []error {
	if d.hangs.Load() {
		time.Sleep(8 * time.Second)
	}

	return d.durableStore.Commit(ctx, commits)
}

// TestAClaimWaitsForNoDrain: the durable store hangs while it is being written. A claim, for which all partitions of
// its owner wait, ends when its time is over.
func TestAClaimWaitsForNoDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		durable := &hangingDurable{durableStore: newDurable()}
		o := newOwned(t, "owner", newFast(), durable)
		defer o.close(t)

		durable.hangs.Store(true)
		if err := o.commit(t, o.next("1")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // until a drain has begun

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		_, err := o.Claim(ctx, "owner", []rows.Former{{Partition: 7, Epoch: o.claim.Epoch}})
		if took := time.Since(began); !errors.Is(err, rows.ErrUnavailable) || took > time.Second {
			t.Errorf("the claim ends with %v after %v, want ErrUnavailable after a second", err, took)
		}
		durable.hangs.Store(false)
	})
}

// TestAPartitionOfAnotherOwnerIsNoOutage: a process that has never claimed a partition in the durable store learns at
// its first drain that the partition has another owner. It has nothing more to drain there.
func TestAPartitionOfAnotherOwnerIsNoOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable, former := unclaimedDurable(t)
		o := newOwned(t, "owner", fast, durable)
		durable.away.Store(false)
		if left, err := former.drain(t.Context()); left != 0 || err != nil {
			t.Errorf("%d rows are left, %v; want none", left, err)
		}
		former.close(t)
		o.close(t)
	})
}
