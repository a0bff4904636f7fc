package owner_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

func increment(key string) []counter.Op {
	rule := &counter.Rule{Match: "*", Kind: counter.Sum}

	return []counter.Op{{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Add, Delta: 1}}}}
}

// TestQueueIsBounded: while the store is silent a bounded number of changes waits. Those beyond are refused and not
// made. Those that wait are made when the store answers again.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const queue, more = 20, 7
		store := &losing{Store: rowsmem.New(rowsmem.Config{})}
		o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1, Queue: queue})
		defer o.Close()
		if err := o.Own(t.Context(), rows.PartitionOf("key")); err != nil {
			t.Fatal(err)
		}

		store.silent.Store(true)
		var calls sync.WaitGroup
		var mu sync.Mutex // guards busy
		busy := 0
		for range 1 + queue + more { // the first call is in a turn alone, so the queue does not count it
			calls.Go(func() {
				_, err := o.Do(t.Context(), owner.Call{Partition: rows.PartitionOf("key"), Ops: increment("key")})
				mu.Lock()
				defer mu.Unlock()
				switch {
				case errors.Is(err, counter.ErrBusy):
					busy++
				case err != nil:

					t.Error(err)
				}
			})

			synctest.Wait()
		}

		store.silent.Store(false)
		calls.Wait()

		read, err := owner.NewReader(store, rows.PartitionOf).Read(t.Context(), []string{"key"}, "", 0)
		if err != nil || busy != more || read[0].Value != queue+1 {
			t.Errorf("%d calls were refused, want %d; then the counter is %+v (%v), want %d",
				busy, more, read, err, queue+1)
		}
	})
}

// counting counts the rows that an owner reads.
type counting struct {
	*rowsmem.Store
	read int
}

// Read implements rows.Store.
func (c *counting) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	c.read += len(addresses)

	return c.Store.Read(ctx, addresses)
}

// TestMemoryIsBounded: a row that was used lately is not read again, and one that was not used for long is.
func TestMemoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const room = 64 << 10
		store := &counting{Store: rowsmem.New(rowsmem.Config{})}
		o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1, Memory: room})
		defer o.Close()
		for id := range rows.Partitions {
			if err := o.Own(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}

		touch := func(key string) (reads int) {
			t.Helper()
			before := store.read
			_, err := o.Do(t.Context(), owner.Call{Partition: rows.PartitionOf(key), Ops: increment(key)})
			if err != nil {
				t.Fatal(err)
			}

			return store.read - before
		}

		touch("old")
		touch("hot")
		for i := range 5000 { // more rows than have room
			touch(fmt.Sprint("key ", i))
			if n := touch("hot"); n > 0 {
				t.Fatalf("a row in use was read again after %d other rows", i)
			}
		}

		if touch("key 4999") > 0 || touch("old") == 0 {
			t.Error("the newest row was forgotten, or the oldest was kept")
		}
	})
}
