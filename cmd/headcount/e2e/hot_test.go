package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter/pgtest"
	"headcount/presence/redistest"
	"headcount/servertest"
)

// A sum that many change is spread over parts. A process is killed meanwhile, who watches sees the value grow, and in
// the end everything is what was acknowledged: exact reads, reads that may lag, history and the row in PostgreSQL.
func TestHotSumsAreSpread(t *testing.T) {
	t.Parallel()
	f := &front{redis: redistest.Start(t, redistest.Durable...), postgres: pgtest.Start(t)}
	f.database = f.postgres.Database(t)
	flags := []string{"--redis=" + f.redis.URL(), "--postgres=" + f.database, "--cluster-listen=" + servertest.FreeAddr()}
	ps := place{open: func(*testing.T) []string { return flags }, twice: true}.start(t, "--hot-rate=5")
	key := "views:" + fresh(t)
	path := root + url.PathEscape(key)
	watcher := ps.at(0).ws(t)
	watcher.send(`{"type":"subscribe","counters":[` + quoted(key) + `]}`)
	watcher.awaitCounter(key, 0, false)

	var acked, unknown, spread atomic.Int64 // spread: answers that said "exact":false
	var stop atomic.Bool
	var wg sync.WaitGroup
	for c := range 6 {
		wg.Go(func() {
			for !stop.Load() {
				r, err := try("POST", ps.at(c).url+path+"/increment", "", withKey)
				switch {
				case err == nil && r.status == http.StatusOK:
					acked.Add(1)
					if !r.lasting(t).Exact {
						spread.Add(1)
					}
				default: // it may have been made
					unknown.Add(1)
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	eventually(t, "an answer of a sum that is spread", func() bool { return spread.Load() > 50 })
	ps.crash(1)
	before := acked.Load()
	eventually(t, "changes without the other process", func() bool { return acked.Load() > before+100 })
	ps.restart(1)
	before = acked.Load()
	eventually(t, "changes by both", func() bool { return acked.Load() > before+100 })
	stop.Store(true)
	wg.Wait()

	value := ps.at(0).exact(t, key)
	if least, most := acked.Load(), acked.Load()+unknown.Load(); value < least || value > most {
		t.Errorf("the value is %d; %d were acknowledged, and %d may have been made", value, acked.Load(), unknown.Load())
	}
	if got := ps.at(1).exact(t, key); got != value {
		t.Errorf("one process reads %d, the other %d", value, got)
	}
	for i := range 2 {
		eventually(t, "the value of a read that may lag", func() bool { return ps.at(i).call(t, "GET", url.PathEscape(key), "").lasting(t).Value == value })
	}
	watcher.awaitCounter(key, value, false)
	eventually(t, "the row", func() bool { return f.row(t, key) == value })
	eventually(t, "the history", func() bool {
		var r struct{ Total int64 }
		_ = json.Unmarshal([]byte(ps.at(0).call(t, "GET", url.PathEscape(key)+"/range?step=1h", "").body), &r)
		return r.Total == value
	})
	if r := ps.at(1).call(t, "POST", url.PathEscape(key)+"/reset", `{"reason":"the end","by":"a test"}`); r.status != http.StatusOK || r.lasting(t).Value != 0 {
		t.Errorf("reset: %d %s", r.status, r.body)
	}
	entries := ps.at(0).ledger(t, key)
	if len(entries) != 1 || fmt.Sprint(entries[0].Before) != fmt.Sprint(value) {
		t.Errorf("%+v", entries)
	}
	if got := ps.at(0).exact(t, key); got != 0 {
		t.Errorf("%d after a reset", got)
	}
	t.Logf("%d acknowledged, %d of them by parts; %d unknown", acked.Load(), spread.Load(), unknown.Load())
}
