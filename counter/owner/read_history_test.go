package owner_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// asked counts the calls to the store. Each takes a while, like calls over a network.
type asked struct {
	*rowsmem.Store
	times atomic.Int64
}

// Read implements rows.Store.
func (a *asked) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	a.times.Add(1)

	return a.Store.Read(ctx, addresses)
}

// Scan implements rows.Store.
func (a *asked) Scan(
	ctx context.Context, partition int, collection, after string, each func(string, []byte) error,
) error {
	a.times.Add(1)

	return a.Store.Scan(ctx, partition, collection, after, each)
}

// TestHistoriesAreReadTogether: a top list, which has the histories of many counters, needs no more calls to the store
// than the histories of a few counters.
func TestHistoriesAreReadTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const keys, minutes = 200, 130 // 130 minutes are in three or four rows
		store := &asked{Store: rowsmem.New(rowsmem.Config{})}
		o := owner.New(store, owner.Config{Name: "only", VerifyEvery: -1})
		for id := range rows.Partitions {
			if err := o.Own(t.Context(), id); err != nil {
				t.Fatal(err)
			}
		}

		rule := &counter.Rule{Match: "*", Kind: counter.Sum, Resolutions: []counter.Resolution{
			{Step: time.Minute, Kept: 24 * time.Hour},
		}}
		began := time.Now().Unix() / 60
		var names []string
		for i := range keys {
			names = append(names, fmt.Sprint("views:", i))
		}

		for range minutes {
			for i, key := range names {
				add := counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: int64(i + 1)}
				call := owner.Call{
					Partition: rows.PartitionOf(key), Ops: []counter.Op{{Changes: []counter.Change{add}}},
				}
				if _, err := o.Do(t.Context(), call); err != nil {
					t.Fatal(err)
				}
			}

			time.Sleep(time.Minute)
		}

		o.Close() // its sweeps of expired rows would read as well
		store.times.Store(0)
		reader := owner.NewReader(store, rows.PartitionOf)
		histories, err := reader.Histories(t.Context(), names, time.Minute, began, began+minutes)
		if err != nil {
			t.Fatal(err)
		}
		if n := store.times.Load(); n > 3 { // for heads, heads of exact counters that became sums, and histories
			t.Errorf("the store was asked %d times, want at most 3", n)
		}

		for i, gains := range histories {
			if len(gains) != minutes {
				t.Fatalf("%q has %d minutes, want %d", names[i], len(gains), minutes)
			}

			for at, gain := range gains {
				if gain.Number != began+int64(at) || gain.Value != int64(i+1) {
					t.Fatalf("in minute %d %q gained %+v, want %d", at, names[i], gain, i+1)
				}
			}
		}
	})
}
