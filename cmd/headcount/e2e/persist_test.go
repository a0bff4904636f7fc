package e2e

import (
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

// front is Redis in front of PostgreSQL. Redis keeps nothing on its disk.
type front struct {
	redis    *redistest.Server
	postgres *pgtest.Server
	database string
}

// startFront starts both, and two processes.
func startFront(t *testing.T) (*front, *processes) {
	t.Helper()
	f := &front{redis: redistest.Start(t), postgres: pgtest.Start(t)}
	f.database = f.postgres.Database(t)
	flags := []string{"--redis=" + f.redis.URL(), "--postgres=" + f.database, "--persist-interval=200ms", "--cluster-listen=" + servertest.FreeAddr()}
	return f, place{open: func(*testing.T) []string { return flags }, twice: true}.start(t)
}

// row is the value of a counter in PostgreSQL, -1 when there is none.
func (f *front) row(t *testing.T, key string) int64 {
	t.Helper()
	return pgtest.Query[int64](t, f.database, "select coalesce((select value from headcount_counters where key = $1), -1)", key)
}

// Redis is killed and comes back empty, again and again, at first while changes go on.
// Nothing that was persisted is lost, and nothing counts twice. What an exact counter
// acknowledged is there in any case.
func TestRedisComesBackEmpty(t *testing.T) {
	t.Parallel()
	f, ps := startFront(t)
	keys := [...]string{"votes:" + fresh(t), "likes:" + fresh(t), "stock:" + fresh(t)}
	// change makes the change id of each counter, and tries until it is made.
	change := func(i int, id string) {
		for k, call := range [...]string{"/increment", "/members", "/increment"} {
			body := ""
			if k == 1 {
				body = `{"add":[` + quoted("m"+id) + `]}`
			}
			for {
				r, err := try("POST", ps.at(i).url+root+url.PathEscape(keys[k])+call, body, withKey, "Idempotency-Key: "+id)
				if err == nil && r.status == http.StatusOK {
					break
				}
				if err == nil && r.status != http.StatusServiceUnavailable {
					t.Errorf("%d %s", r.status, r.body)
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
	}
	values := func() (got [3]int64) {
		for k, key := range keys {
			eventually(t, "an exact read", func() bool {
				r := ps.at(k).call(t, "GET", url.PathEscape(key)+"/exact", "")
				if r.status == http.StatusOK {
					got[k] = r.lasting(t).Value
				}
				return r.status == http.StatusOK
			})
		}
		return got
	}
	rows := func() (got [3]int64) {
		for k, key := range keys {
			got[k] = f.row(t, key)
		}
		return got
	}
	total := int64(0)
	for round := range 3 {
		var done atomic.Int64
		var wg sync.WaitGroup
		stop := make(chan struct{})
		ids := make([][]string, 6)
		for c := range ids {
			wg.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					id := fmt.Sprintf("%d/%d/%d", round, c, n)
					ids[c] = append(ids[c], id)
					change(c, id)
					done.Add(1)
				}
			})
		}
		more := func() {
			t.Helper()
			before := done.Load()
			eventually(t, "more changes", func() bool { return done.Load() >= before+15 })
		}
		more()
		floor := rows()
		f.redis.Kill()
		f.redis.Restart(t)
		more()
		close(stop)
		wg.Wait()
		for _, some := range ids {
			total += int64(len(some))
		}
		if got := values(); got[0] < floor[0] || got[1] < floor[1] || got[2] != total {
			t.Fatalf("round %d: %d; persisted were %d, and acknowledged %d", round, got, floor, total)
		}
		for c, some := range ids {
			for _, id := range some {
				change(c+1, id)
			}
		}
		want := [3]int64{total, total, total}
		if got := values(); got != want {
			t.Fatalf("round %d: %d after all were repeated, want %d", round, got, want)
		}
		start := time.Now()
		eventually(t, "all is persisted", func() bool { return rows() == want })
		t.Logf("round %d: %d changes of each, persisted after %s", round, total, time.Since(start))
		before := ps.at(0).call(t, "GET", url.PathEscape(keys[0])+"/exact", "").lasting(t)
		f.redis.Kill()
		for _, key := range keys[:2] {
			ps.at(0).call(t, "POST", url.PathEscape(key)+"/reset", `{"reason":"r","by":"b"}`).problem(t, http.StatusServiceUnavailable)
		}
		if got := ps.at(0).call(t, "GET", url.PathEscape(keys[0]), "").lasting(t); got.Value != total || !got.Stale {
			t.Errorf("while Redis is away: %+v", got)
		}
		f.redis.Restart(t)
		if got := values(); got != want {
			t.Fatalf("round %d: %d, and %d were persisted", round, got, want)
		}
		if after := ps.at(1).call(t, "GET", url.PathEscape(keys[0])+"/exact", "").lasting(t); version(t, after.Version)[0] <= version(t, before.Version)[0] {
			t.Errorf("%+v after %+v was lost", after, before)
		}
	}
}

// While PostgreSQL is away, exact counters get 503 and the others go on, also when a
// process is killed. Afterwards all changes are persisted.
func TestPostgresIsAwayBehindRedis(t *testing.T) {
	t.Parallel()
	f, ps := startFront(t)
	a, b := ps.at(0), ps.at(1)
	votes, likes, stock := "votes:"+fresh(t), "likes:"+fresh(t), "stock:"+fresh(t)
	v, l, st := url.PathEscape(votes), url.PathEscape(likes), url.PathEscape(stock)
	look := b.ws(t)
	look.send(`{"type":"subscribe","counters":` + quoted([]string{votes}) + `}`)
	a.call(t, "POST", v+"/increment", "").lasting(t)
	a.call(t, "PUT", l+"/members/a", "").lasting(t)
	a.call(t, "POST", st+"/increment", `{"delta":5}`).lasting(t)
	eventually(t, "all is persisted", func() bool { return f.row(t, votes) == 1 && f.row(t, likes) == 1 })

	f.postgres.Kill()
	const once = "Idempotency-Key: once"
	for range 5 { // even once the process knows that it is away
		a.call(t, "POST", st+"/decrement", "", withKey, once).problem(t, http.StatusServiceUnavailable)
	}
	b.call(t, "GET", st+"/exact", "").problem(t, http.StatusServiceUnavailable)
	for n := range int64(20) {
		if c := ps.at(int(n)).call(t, "POST", v+"/increment", "").lasting(t); c.Value != n+2 || !c.Exact || c.Stale {
			t.Fatalf("%+v, want %d", c, n+2)
		}
	}
	look.awaitCounter(votes, 21, false)
	for n := range int64(4) { // a counter that nobody has touched before
		if c := ps.at(int(n)).call(t, "POST", v+"new/increment", "").lasting(t); c.Value != n+1 || c.Exact || !c.Stale {
			t.Fatalf("%+v, want %d, stale", c, n+1)
		}
	}
	look.send(`{"type":"subscribe","counters":` + quoted([]string{votes + "new"}) + `}`)
	look.await("a new counter, stale", func(f frame) bool { return f.Key == votes+"new" && f.Value == 4 && f.Stale && !f.Exact })
	a.call(t, "GET", v+"new/exact", "").problem(t, http.StatusServiceUnavailable)
	if c := a.call(t, "PUT", l+"/members/b", "").lasting(t); c.Value != 2 {
		t.Errorf("%+v", c)
	}
	if r := do(t, "GET", a.admin+"/readyz", ""); r.status != http.StatusOK {
		t.Errorf("readyz %d %s", r.status, r.body)
	}
	const lag = "headcount_persist_lag_seconds"
	for _, least := range []float64{0.5, 1} {
		eventually(t, "the lag grows", func() bool { return a.metric(t, lag) > least && b.metric(t, lag) > least })
	}
	eventually(t, "the stock is stale", func() bool { // at first it is not older than its rule allows
		got := a.call(t, "GET", st, "").lasting(t)
		if got.Value != 5 || got.Exact {
			t.Fatalf("the stock, read while PostgreSQL is away: %+v", got)
		}
		return got.Stale
	})
	ps.crash(0)
	if n := b.exact(t, votes); n != 21 {
		t.Errorf("%d votes after a crash", n)
	}

	f.postgres.Restart(t)
	ps.restart(0)
	look.awaitCounter(votes+"new", 4, false)
	eventually(t, "all is persisted", func() bool { return f.row(t, votes) == 21 && f.row(t, likes) == 2 && f.row(t, votes+"new") == 4 })
	eventually(t, "there is no lag", func() bool { return ps.at(0).metric(t, lag) == 0 && b.metric(t, lag) == 0 })
	for _, s := range []*server{ps.at(0), b} {
		eventually(t, "exact counters are back", func() bool {
			return s.call(t, "POST", st+"/decrement", "", withKey, once).status == http.StatusOK
		})
	}
	if n := b.exact(t, stock); n != 4 {
		t.Errorf("%d are in stock, want 4", n)
	}
}
