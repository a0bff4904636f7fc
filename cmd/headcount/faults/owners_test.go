package faults

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// increments are clients of one gateway that increment counters without a pause.
type increments struct {
	to    *client.API
	watch *testkit.Stopwatch
	stop  context.CancelFunc
	wg    sync.WaitGroup

	mu      sync.Mutex // guards the fields below
	made    map[string]int64
	longest time.Duration // the longest wait since the last check
}

// increment starts clients that increment n counters, some of them exact.
func increment(t *testing.T, to *member, n int) *increments {
	ctx, stop := context.WithCancel(t.Context())
	connections := &http.Transport{MaxIdleConnsPerHost: n}
	t.Cleanup(connections.CloseIdleConnections)

	calls := client.NewAPI(client.Config{
		URL: "http://" + to.addr, APIKey: counterKey,
		HTTP: &http.Client{Transport: connections, Timeout: testkit.Timeout},
	})
	all := &increments{to: calls, watch: testkit.NewStopwatch(t), stop: stop, made: map[string]int64{}}

	for i := range n {
		key := fmt.Sprint("moved:", i)
		if i%10 == 0 {
			key = fmt.Sprint("stock:", i)
		}
		all.wg.Go(func() {
			for ctx.Err() == nil {
				all.one(t, key)
				time.Sleep(20 * time.Millisecond)
			}
		})
	}

	return all
}

func (all *increments) one(t *testing.T, key string) {
	began := all.watch.Elapsed()
	_, err := all.to.Increment(context.Background(), key, 1)
	took := all.watch.Elapsed() - began
	if err != nil {
		t.Errorf("increment of %s: %v", key, err)
		return
	}

	all.mu.Lock()
	defer all.mu.Unlock()
	all.made[key]++
	all.longest = max(all.longest, took)
}

// promised checks the longest wait since the last check.
func (all *increments) promised(t *testing.T, what string, most time.Duration) {
	t.Helper()
	all.mu.Lock()
	longest := all.longest
	all.longest = 0
	all.mu.Unlock()

	t.Logf("%s: a client waited for %v at most", what, longest.Round(time.Millisecond))
	if longest > most {
		t.Errorf("%s: a client waited for %v, want at most %v", what, longest, most)
	}
}

// end ends the clients. Each counter must have exactly the acknowledged increments.
func (all *increments) end(t *testing.T) {
	t.Helper()
	all.stop()
	all.wg.Wait()

	for key, made := range all.made {
		c, err := all.to.Exact(t.Context(), key)
		if err != nil || c.Value != made {
			t.Errorf("%s is %d, error %v; want %d, the acknowledged increments", key, c.Value, err, made)
		}
	}
}

// TestClockOwnersGo: an owner of counters is killed, falls silent, or ends in order, and comes back. Clients of another
// process get no error, and wait no longer than docs/faults.md says.
func TestClockOwnersGo(t *testing.T) {
	redis := redistest.Start(t).URL()
	key := "--api-key=" + counterKey
	gateway := newMember("gateway", "gateway", redis, nil, key)
	owners := []*member{
		newMember("first", allRoles, redis, nil, key),
		newMember("second", allRoles, redis, nil, key),
		newMember("third", allRoles, redis, nil, key),
	}
	startAll(t, append(owners, gateway)...)
	awaitReady(t, append(owners, gateway)...)

	all := increment(t, gateway, 60)
	time.Sleep(3 * time.Second)
	all.promised(t, "at the beginning", 5*time.Second)

	back := func(m *member) {
		t.Helper()
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
		awaitReady(t, m)
		time.Sleep(5 * time.Second)
		all.promised(t, "it is back", 500*time.Millisecond)
	}

	// A crash: others have to notice it.
	owners[0].kill()
	time.Sleep(5 * time.Second)
	all.promised(t, "an owner is killed", 500*time.Millisecond)
	back(owners[0])

	// An orderly end hands the counters over.
	if err := owners[1].leave(); err != nil {
		t.Error(err)
	}
	all.promised(t, "an owner ends in order", 150*time.Millisecond)
	back(owners[1])

	// A process that hangs must not keep its counters.
	owners[2].pause()
	time.Sleep(6 * time.Second)
	all.promised(t, "an owner is silent", 2500*time.Millisecond)
	owners[2].resume()
	time.Sleep(5 * time.Second)
	all.promised(t, "it wakes", 500*time.Millisecond)
	all.end(t)
}
