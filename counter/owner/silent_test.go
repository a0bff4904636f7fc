package owner_test

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// halfSilent is a store like a Redis Cluster with a silent master: every second partition gets no answer, and a call
// about several partitions lasts until its timeout.
type halfSilent struct {
	*rowsmem.Store
	refuses bool // every second partition cannot be claimed
}

// Commit implements rows.Store.
func (h *halfSilent) Commit(ctx context.Context, commits []rows.Commit) []error {
	time.Sleep(time.Millisecond)
	errs := make([]error, len(commits))
	for i := range commits {
		if commits[i].Partition%2 == 0 {
			errs[i] = h.Store.Commit(ctx, commits[i:i+1])[0]
			continue
		}
		<-ctx.Done()
		errs[i] = rows.ErrUnavailable
	}

	return errs
}

// Claim implements rows.Store.
func (h *halfSilent) Claim(ctx context.Context, name string, partitions []rows.Former) ([]rows.Claim, error) {
	claims, err := h.Store.Claim(ctx, name, partitions)
	for i := range claims {
		if h.refuses && partitions[i].Partition%2 == 1 {
			claims[i] = rows.Claim{Err: rows.ErrUnavailable}
		}
	}

	return claims, err
}

// TestClaimsApart: a partition that cannot be claimed does not keep others from being owned.
func TestClaimsApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := owner.New(&halfSilent{rowsmem.New(rowsmem.Config{}), true}, owner.Config{Name: "a"})
		defer o.Close()
		if err := o.Own(t.Context(), 0, 1, 2, 3); !errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("two of four partitions cannot be claimed, and Own returns %v, want ErrUnavailable", err)
		}
		for id := range 4 {
			if o.Owns(id) != (id%2 == 0) {
				t.Errorf("partition %d is owned: %v, want %v", id, o.Owns(id), id%2 == 0)
			}
		}
	})
}

// TestSilentPartitionsAreSetAside: partitions whose commits get no answer delay the others at first, and then no more.
func TestSilentPartitionsAreSetAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const timeout = 500 * time.Millisecond
		o := owner.New(&halfSilent{Store: rowsmem.New(rowsmem.Config{})},
			owner.Config{Name: "a", WriteTimeout: timeout})
		defer o.Close()

		var all []int
		for id := range rows.Partitions {
			all = append(all, id)
		}

		if err := o.Own(t.Context(), all...); err != nil {
			t.Fatal(err)
		}

		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		var calls sync.WaitGroup
		// Each of these has a commit that gets no answer, so that a common call to the store lasts until its timeout.
		for id := 1; id < rows.Partitions; id += 2 {
			calls.Go(func() { _, _ = o.Do(ctx, owner.Call{Partition: id, Ops: increment("silent")}) })
		}

		began := time.Now()
		var first, later time.Duration // the longest waits
		for ctx.Err() == nil {
			start := time.Now()
			if _, err := o.Do(ctx, owner.Call{Partition: 0, Ops: increment("key")}); err != nil && ctx.Err() == nil {
				t.Fatal(err)
			}

			took := time.Since(start)
			// In the first seconds the owner finds out which partitions are silent.
			if time.Since(began) < 3*time.Second {
				first = max(first, took)
			} else {
				later = max(later, took)
			}
			time.Sleep(10 * time.Millisecond)
		}

		calls.Wait()

		if first > 2*timeout+10*time.Millisecond || later > 5*time.Millisecond {
			t.Errorf("another partition waited for %v at first, want %v at most, and later for %v, want 5ms at most",
				first, 2*timeout+10*time.Millisecond, later)
		}
	})
}

// laborious is a store that takes time for each row, as PostgreSQL does.
type laborious struct{ rows.Store }

// Commit implements rows.Store.
func (l laborious) Commit(ctx context.Context, commits []rows.Commit) []error {
	n := 0
	for i := range commits {
		n += len(commits[i].Rows)
	}

	select {
	case <-time.After(time.Duration(n) * 100 * time.Microsecond):
		return l.Store.Commit(ctx, commits)
	case <-ctx.Done():
		return slices.Repeat([]error{rows.ErrUnavailable}, len(commits))
	}
}

// TestALargeCommit: a commit of very many rows, like that of a counter with a long history which is imported, takes
// longer than a commit usually may. It is made all the same, and its partition goes on.
func TestALargeCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := owner.New(laborious{rowsmem.New(rowsmem.Config{})}, owner.Config{Name: "a"})
		defer o.Close()
		if err := o.Own(t.Context(), 0); err != nil {
			t.Fatal(err)
		}

		call := owner.Call{Partition: 0, More: &owner.More{}}
		// Four seconds of work, and the time for an ordinary commit is three.
		for i := range 40_000 {
			name := rows.Name{Collection: "history", Field: strconv.Itoa(i)}
			call.More.Rows = append(call.More.Rows, owner.Expiring{Row: rows.Row{Name: name, Value: []byte{1}}})
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := o.Do(ctx, call); err != nil {
			t.Errorf("a commit of %d rows is not made in a minute: %v", len(call.More.Rows), err)
		}
	})
}
