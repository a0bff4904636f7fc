package counterredis_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestClockSentinelFailover: while clients change counters, their master dies and the replica takes its place.
// The replica is asynchronous: what was acknowledged and had not reached it is lost, an operation with all
// its counters and its idempotency key. What had reached it stays, and nothing counts twice.
func TestClockSentinelFailover(t *testing.T) {
	t.Parallel()
	const clients = 8
	sentinel := redistest.StartSentinel(t)
	s := open(t, sentinel.URL(), "")
	likes := &counter.Rule{Match: "l:*", Kind: counter.Members}
	stock := &counter.Rule{Match: "k:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
	ops := func(id string) []counter.Op {
		number := counter.Op{IdempotencyKey: counter.NewIdempotencyKey("*", "", id), Changes: []counter.Change{
			{Key: "k:2", Rule: stock, Verb: counter.Add, Delta: 1}, {Key: "k:1", Rule: stock, Verb: counter.Add, Delta: 1},
		}}
		member := counter.Op{Changes: []counter.Change{{Key: "l:1", Rule: likes, Verb: counter.Edit, Join: []string{id}}}}
		return []counter.Op{number, member}
	}
	// insist makes the operations of id, however often that fails.
	insist := func(id string) {
		for ; t.Context().Err() == nil; time.Sleep(2 * time.Millisecond) {
			unmade := slices.ContainsFunc(s.Apply(t.Context(), ops(id)), func(r counter.Result) bool {
				if r.Err != nil && !errors.Is(r.Err, counter.ErrUnavailable) {
					t.Error(r.Err)
				}
				return r.Err != nil
			})
			if !unmade {
				return
			}
		}
	}
	values := func() (all [3]int64) {
		t.Helper()
		countertest.AwaitServed(t, s)
		got, err := s.Read(t.Context(), []string{"k:2", "k:1", "l:1"}, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			all[i] = got[i].Value
		}
		return all
	}

	ctx, stop := context.WithCancel(t.Context())
	var acknowledged atomic.Int64
	var made [clients]int
	var wg sync.WaitGroup
	for c := range clients {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				insist(fmt.Sprint(c, " ", n))
				made[c]++
				acknowledged.Add(1)
			}
		})
	}
	until := func(n int64) {
		testkit.Eventually(t, "operations are made", func() bool { return acknowledged.Load() >= n })
	}
	until(200)
	safe := acknowledged.Load()
	marker := sentinel.Master.Client() // what comes before its write is on the replica, too, when that is
	defer marker.Close()
	if err := marker.Set(t.Context(), "marker", 1, 0).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := marker.Wait(t.Context(), 1, testkit.Timeout).Result(); n != 1 {
		t.Fatalf("%d replicas have it, %v", n, err)
	}
	sentinel.Master.Kill()
	dead := acknowledged.Load()
	until(dead + 200)
	stop()
	wg.Wait()

	all := acknowledged.Load()
	got := values()
	// Of what the clients were told while the master died, each may have told of one more.
	if least := all - (dead + clients - safe); got[0] < least || got[0] > all || got[0] != got[1] {
		t.Errorf("%v of %d operations, want at least %d, and as many of each", got, all, least)
	}
	t.Logf("%v of %d operations are left, %d of them were surely safe", got, all, safe)
	for c, n := range made {
		for i := range n {
			insist(fmt.Sprint(c, " ", i))
		}
	}
	if got := values(); got != [3]int64{all, all, all} {
		t.Errorf("%v after all were repeated, want %d of each", got, all)
	}
	ledger, err := s.Ledger(t.Context(), "k:1", 0, int(all)+1)
	if err != nil || int64(len(ledger.Entries)) != all {
		t.Errorf("%d entries, %v, want %d", len(ledger.Entries), err, all)
	}
	for i, e := range ledger.Entries {
		if e.Seq != uint64(i+1) || e.Before != int64(i) || e.After != int64(i+1) {
			t.Fatalf("entry %d: %+v", i, e)
		}
	}
}
