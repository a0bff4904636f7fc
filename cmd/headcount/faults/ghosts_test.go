package faults

import (
	"context"
	"fmt"
	"testing"
	"time"

	"headcount/presence"
	"headcount/presence/redistest"
	"headcount/servertest"
)

// TestGhostsOfAKilledProcess: a process is killed that also owned half of the
// partitions. Its users are gone from every count in time. That also holds with a
// presence timeout much shorter than the default, and whatever the process has just
// done.
func TestGhostsOfAKilledProcess(t *testing.T) {
	t.Parallel()
	const timeout, users = 3 * time.Second, 20
	redis := redistest.Start(t)
	var all []*member
	for i := range 2 {
		all = append(all, newMember(fmt.Sprint("process ", i), allRoles, redis.URL(), nil, "--presence-timeout="+timeout.String(), "--heartbeat-interval=1s"))
	}
	startAll(t, all...)
	awaitReady(t, readyWithin, all...)
	killed, other := all[0], all[1]
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	watcher, err := dial(ctx, other, "", []string{join("p"), `{"type":"subscribe","pages":["*"]}`})
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.CloseNow()
	shown := make(chan frame, 1024)
	go func() { // ends with the connection
		defer close(shown)
		for {
			f, err := read(ctx, watcher)
			if err != nil {
				return
			}
			if f.Type == "count" {
				shown <- f
			}
		}
	}()
	await := func(within time.Duration, n int64) {
		t.Helper()
		limit := time.After(within)
		for last := map[string]int64{}; last["p"] != n || last[presence.Site] != n; {
			select {
			case f := <-shown:
				last[f.Page] = f.Count
			case <-limit:
				t.Fatalf("not shown within %s: %d users; last shown %v", within, n, last)
			}
		}
	}
	await(exactWithin, 1)
	for moment := range 4 {
		for range users {
			conn, err := dial(ctx, killed, "", []string{join("p")})
			if err != nil {
				t.Fatal(err)
			}
			defer conn.CloseNow()
		}
		await(exactWithin, 1+users)
		time.Sleep(time.Duration(moment) * 250 * time.Millisecond)
		late, waited := watchStalls(), servertest.Waited(other.process.PID())
		killed.kill()
		begun := time.Now()
		await(timeout+3*time.Second+stallsAtMost, 1)
		took := time.Since(begun)
		waited = servertest.Waited(other.process.PID()) - waited // for a core that others have
		stalled := min(3*late.total()+waited, stallsAtMost)
		late.stop()
		t.Logf("gone %s after the kill; this machine is excused %s", took, stalled)
		if limit := timeout + 3*time.Second + stalled; took > limit {
			t.Errorf("gone %s after the kill, want %s", took, limit)
		}
		if err := killed.start(); err != nil {
			t.Fatal(err)
		}
		awaitReady(t, readyWithin, all...)
	}
}
