package owner_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// losing is a store that is silent for a while, and then says that it has lost something.
type losing struct {
	*rowsmem.Store
	silent, lost atomic.Bool
}

// Commit implements rows.Store.
func (l *losing) Commit(ctx context.Context, commits []rows.Commit) []error {
	switch {
	case l.silent.Load():
		return []error{rows.ErrUnavailable}
	case l.lost.CompareAndSwap(true, false):
		return []error{&rows.Lost{}}
	}

	return l.Store.Commit(ctx, commits)
}

// TestCallersGetTheirOperationsBack: a caller that has given up may reuse the memory of its operations at once, even
// while the owner does not know yet whether they were made.
func TestCallersGetTheirOperationsBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &losing{Store: rowsmem.New(rowsmem.Config{})}
		o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1})
		defer o.Close()
		if err := o.Own(t.Context(), rows.PartitionOf("key")); err != nil {
			t.Fatal(err)
		}

		rule := &counter.Rule{Match: "*", Kind: counter.Sum}
		ops := []counter.Op{{Changes: []counter.Change{{Key: "key", Rule: rule, Verb: counter.Add, Delta: 1}}}}
		store.silent.Store(true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := o.Do(ctx, owner.Call{Partition: rows.PartitionOf("key"), Ops: ops})
		if !errors.Is(err, counter.ErrUnavailable) {
			t.Fatalf("while the store is silent Do returns %v, want ErrUnavailable", err)
		}

		ops[0].Changes[0].Delta = 100 // the caller reuses the memory
		store.lost.Store(true)
		store.silent.Store(false)
		time.Sleep(10 * time.Second)
		other := []counter.Op{{Changes: []counter.Change{{Key: "key", Rule: rule, Verb: counter.Add, Delta: 1}}}}
		if _, err := o.Do(t.Context(), owner.Call{Partition: rows.PartitionOf("key"), Ops: other}); err != nil {
			t.Fatal(err)
		}

		read, err := owner.NewReader(store, rows.PartitionOf).Read(t.Context(), []string{"key"}, "", 0)
		if err != nil || read[0].Value > 2 {
			t.Errorf("the counter is %+v, %v; want 2 at most", read, err)
		}
	})
}
