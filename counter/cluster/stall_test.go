package cluster_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/testkit"
)

// keys has one key for each partition.
var keys = func() []string {
	keys := make([]string, rows.Partitions)
	for i, found := 0, 0; found < rows.Partitions; i++ {
		key := fmt.Sprint("s:", i)
		if at := rows.PartitionOf(key); keys[at] == "" {
			keys[at] = key
			found++
		}
	}

	return keys
}()

// TestClockASilentMaster: one master of three does not answer. The partitions of the others are served meanwhile: a
// process waits for the silent master once, and then sets its partitions aside.
func TestClockASilentMaster(t *testing.T) {
	const promised = 2 * time.Second
	redis := redistest.StartCluster(t, 3, 0)
	w := &world{url: redis.URL()}
	p := w.start(t, gateway, owns)
	elsewhere := func(partition int) bool {
		return partition < rows.Partitions/3-1 || partition > 2*rows.Partitions/3+1 // not at the second of three
	}
	increment := func(ctx context.Context, partition int) error {
		key := keys[partition]
		one := counter.Change{Key: key, Rule: countertest.Rules.Find(key), Verb: counter.Add, Delta: 1}

		return p.store.Apply(ctx, []counter.Op{{Changes: []counter.Change{one}}})[0].Err
	}

	for partition := range keys {
		testkit.Eventually(t, "each partition is served",
			func() bool { return increment(t.Context(), partition) == nil })
	}

	redis.Masters[1].Pause()
	defer redis.Masters[1].Resume()
	ctx, stop := context.WithCancel(t.Context())
	time.AfterFunc(8*time.Second, stop)
	watch := testkit.NewStopwatch(t)
	var wg sync.WaitGroup
	var mu sync.Mutex // guards longest
	longest := time.Duration(0)
	for partition := range keys {
		wg.Go(func() {
			for ctx.Err() == nil {
				within, cancel := context.WithTimeout(ctx, 10*time.Second)
				began := watch.Elapsed()
				err := increment(within, partition)
				took := watch.Elapsed() - began
				cancel()
				if !elsewhere(partition) || ctx.Err() != nil {
					continue
				}
				if err != nil {
					t.Errorf("partition %d is at a working master, and fails: %v", partition, err)
				}

				mu.Lock()
				longest = max(longest, took)
				mu.Unlock()
				time.Sleep(20 * time.Millisecond) // keeps the machine from being too busy
			}
		})
	}

	wg.Wait()
	t.Logf("partitions on the other masters waited for %v at most, lost %v", longest, watch.Lost())
	if longest > promised {
		t.Errorf("partitions at the other masters waited for %v, want %v at most", longest, promised)
	}
}
