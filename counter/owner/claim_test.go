package owner_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// silentClaims is a store that answers no claim of partition 1, like a Redis Cluster with a master that hangs.
type silentClaims struct{ *rowsmem.Store }

// Claim implements rows.Store.
func (s silentClaims) Claim(ctx context.Context, name string, wanted []rows.Former) ([]rows.Claim, error) {
	claims, err := s.Store.Claim(ctx, name, wanted)
	for i := range wanted {
		if wanted[i].Partition == 1 {
			<-ctx.Done()
			claims[i] = rows.Claim{Err: rows.ErrUnavailable}
		}
	}

	return claims, err
}

// TestAClaimHoldsUpNoOtherPartition: the store does not answer the claim of one partition. Meanwhile the partitions
// that the process owns are served.
func TestAClaimHoldsUpNoOtherPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := begin(t, "a", silentClaims{rowsmem.New(rowsmem.Config{})})
		defer o.Close()

		within, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		claimed := make(chan error, 1)
		go func() { claimed <- o.Own(within, 1, 2) }()
		synctest.Wait()

		began := time.Now()
		makes(t, o, increment("k"))
		if took := time.Since(began); took > 0 {
			t.Errorf("a call of another partition took %v, want no wait", took)
		}

		if err := <-claimed; !errors.Is(err, rows.ErrUnavailable) {
			t.Errorf("the claim ends with %v, want ErrUnavailable", err)
		}
	})
}

// TestAClaimThatComesLate: an owner ends while the store has a claim of it. It owns nothing afterwards.
func TestAClaimThatComesLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := owner.New(silentClaims{rowsmem.New(rowsmem.Config{})}, owner.Config{Name: "a"})
		within, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		claimed := make(chan error, 1)
		go func() { claimed <- o.Own(within, 1, 2) }()
		synctest.Wait()

		// The claim of partition 2 was granted, so the answer that comes now says that it is owned.
		o.Close()
		if err := <-claimed; !errors.Is(err, owner.ErrNotOwner) || o.Owns(2) {
			t.Errorf("the claim ends with %v, and it is %v that the partition is owned; want ErrNotOwner, and false",
				err, o.Owns(2))
		}
	})
}

// lostAndSilent is a store that answers no claim of partition 1 and has lost its commits, once hangs is closed: a
// master of a Redis Cluster has failed over, and the PostgreSQL behind it is slow.
type lostAndSilent struct {
	*rowsmem.Store
	hangs chan struct{}
}

func (s lostAndSilent) has(partition int) bool {
	select {
	case <-s.hangs:
		return partition == 1
	default:
		return false
	}
}

// Claim implements rows.Store.
func (s lostAndSilent) Claim(ctx context.Context, name string, wanted []rows.Former) ([]rows.Claim, error) {
	if s.has(wanted[0].Partition) {
		<-ctx.Done()
		return nil, rows.ErrUnavailable
	}

	return s.Store.Claim(ctx, name, wanted)
}

// Commit implements rows.Store.
func (s lostAndSilent) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := slices.Clone(s.Store.Commit(ctx, commits))
	for i := range commits {
		if s.has(commits[i].Partition) {
			errs[i] = &rows.Lost{}
		}
	}

	return errs
}

// TestAClaimAfterALossHoldsUpNoOtherPartition: the store has lost commits of one partition, and does not answer the
// claim of it. Meanwhile the other partitions are served.
func TestAClaimAfterALossHoldsUpNoOtherPartition(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := lostAndSilent{rowsmem.New(rowsmem.Config{}), make(chan struct{})}
		o := begin(t, "a", store)
		defer o.Close()
		if err := o.Own(t.Context(), 1); err != nil {
			t.Fatal(err)
		}

		// Within two seconds the owner finds the loss, and claims the partition again and again.
		close(store.hangs)
		time.Sleep(2 * time.Second)
		for range 20 {
			began := time.Now()
			makes(t, o, increment("k"))
			if took := time.Since(began); took > 0 {
				t.Fatalf("a call of another partition took %v, want no wait", took)
			}
			time.Sleep(time.Second)
		}
	})
}
