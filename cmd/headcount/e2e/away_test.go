package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// several reads several counters with one call.
func (s *server) several(t testing.TB, keys ...string) answer {
	t.Helper()
	return do(t, "GET", s.url+"/api/v1/counters?"+url.Values{"key": keys}.Encode(), "", withKey)
}

// read reads a counter in the way that may lag.
func (s *server) read(t testing.TB, key string) lasting {
	t.Helper()
	return s.call(t, "GET", url.PathEscape(key), "").lasting(t)
}

// add adds 1 to counters.
func (s *server) add(t testing.TB, keys ...string) {
	t.Helper()
	for _, key := range keys {
		s.call(t, "POST", url.PathEscape(key)+"/increment", "").lasting(t)
	}
}

// wantRead checks a read that may lag, and returns the version.
func (s *server) wantRead(t testing.TB, key string, value int64, stale bool) string {
	t.Helper()
	c := s.read(t, key)
	if c.Value != value || c.Stale != stale || stale && c.Exact {
		t.Errorf("a read shows %+v, want %d, stale %t", c, value, stale)
	}

	return c.Version
}

// wantSeveral checks one read of several counters: their values, and which of them are stale.
func (s *server) wantSeveral(t testing.TB, keys []string, values []int64, stale []bool) {
	t.Helper()
	a := s.several(t, keys...)

	var list struct{ Counters []lasting }
	err := json.Unmarshal([]byte(a.body), &list)
	if err != nil || a.status != http.StatusOK || len(list.Counters) != len(keys) {
		t.Fatalf("the counters %q: %d %s, error %v", keys, a.status, a.body, err)
	}

	for i, c := range list.Counters {
		if c.Key != keys[i] || c.Value != values[i] || c.Stale != stale[i] || c.Stale && c.Exact {
			t.Errorf("a read of several shows %+v, want %d, stale %t", c, values[i], stale[i])
		}
	}
}

// addBefore adds 1 to counters with another server, which has persisted them and ended on return.
func addBefore(t testing.TB, flags []string, keys ...string) {
	t.Helper()
	s := startWithKey(t, flags...)
	s.add(t, keys...)
	if problem := s.end(); problem != "" {
		t.Fatal(problem)
	}
}

// shows returns a predicate: a frame shows a counter with this value, stale or not.
func shows(key string, value int64, stale bool) func(frame) bool {
	return func(f frame) bool {
		return f.Type == "counter" && f.Key == key && f.Value == value && f.Stale == stale && !(f.Stale && f.Exact)
	}
}

// outage has what changes before a store is away, while it is away, and after that.
type outage struct {
	s            *server
	visitor      *client // watches likes, and is one of them
	likes, stock string  // a set, and an exact counter with 5
}

// beforeOutage makes the counters of an outage, and waits until they are persisted.
func beforeOutage(t *testing.T, s *server) *outage {
	t.Helper()
	o := &outage{s, s.ws(t), "likes:" + fresh(t), "stock:" + fresh(t)}
	s.call(t, "PUT", url.PathEscape(o.likes)+"/members/me", "", o.visitor.as()).lasting(t)
	s.call(t, "POST", url.PathEscape(o.stock)+"/increment", `{"delta":5}`).lasting(t)

	o.visitor.send(`{"type":"subscribe","counters":` + quoted([]string{o.likes}) + `}`)
	o.visitor.awaitCounter(o.likes, 1, true)

	// The fault must not hit changes that are still on their way to PostgreSQL.
	o.persisted(t)

	return o
}

func (o *outage) persisted(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, "everything is persisted",
		func() bool { return o.s.metric(t, "headcount_persist_lag_seconds") == 0 })
}

func (o *outage) decrement(t *testing.T) answer {
	t.Helper()

	return o.s.call(t, "POST", url.PathEscape(o.stock)+"/decrement", "", withKey, "Idempotency-Key: k")
}

func (o *outage) like(t *testing.T) answer {
	t.Helper()

	return o.s.call(t, "PUT", url.PathEscape(o.likes)+"/members/x", "")
}

// refused checks that exact counters are refused, while the server serves what it can.
func (o *outage) refused(t *testing.T) {
	t.Helper()
	o.decrement(t).problem(t, http.StatusServiceUnavailable)
	if a := do(t, "GET", o.s.admin+"/readyz?exclude=store", ""); a.status != http.StatusOK {
		t.Errorf("the server serves without the store, but /readyz?exclude=store is %d %s", a.status, a.body)
	}

	o.s.call(t, "GET", url.PathEscape(o.stock)+"/exact", "").problem(t, http.StatusServiceUnavailable)
}

// allRefused checks that sets are refused as well, and shown as stale: the server is not ready.
func (o *outage) allRefused(t *testing.T) {
	t.Helper()
	o.refused(t)
	o.like(t).problem(t, http.StatusServiceUnavailable)
	o.visitor.await("a stale counter", func(f frame) bool {
		return f.Type == "counter" && f.Stale && f.Value == 1 && f.Mine && !f.Exact
	})
	o.s.wantRead(t, o.likes, 1, true)
	testkit.Eventually(t, "that it is not ready", func() bool { return !o.s.ready() })
}

// over checks that changes are made when the store is back, and once although they were refused.
func (o *outage) over(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, "changes of every kind", func() bool {
		return o.decrement(t).status == http.StatusOK && o.like(t).status == http.StatusOK
	})
	o.visitor.await("both likes", func(f frame) bool {
		return f.Type == "counter" && f.Value == 2 && f.Mine && !f.Stale
	})

	if n := o.s.exact(t, o.stock); n != 4 {
		t.Errorf("%d in stock, want 4", n)
	}

	testkit.Eventually(t, "that it is ready", o.s.ready)
	o.persisted(t)
	if strings.Contains(fmt.Sprint(o.s.log), o.likes) {
		t.Error("a key is in the log")
	}
}

// TestClockRedisIsAway kills the only store. Calls that need it get 503, and known counters are shown as stale.
// Afterwards everything is as before.
func TestClockRedisIsAway(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, redistest.Durable...)
	s := startWithKey(t, overRedis(redis.URL())...)
	page := fresh(t)

	follower := s.ws(t)
	s.follow(t, follower.as(), page)
	s.change(t, page, "")
	follower.awaitUnread(1)
	o := beforeOutage(t, s)

	redis.Kill()
	o.allRefused(t)
	for _, call := range [][3]string{
		{"GET", "/-/me/unread"}, {"GET", "/-/me/follows"}, {"PUT", "/-/me/unread", `{"action":"reset"}`},
		{"POST", "/p/changes"},
	} {
		do(t, call[0], s.url+call[1], call[2], follower.as(), withKey).problem(t, http.StatusServiceUnavailable)
	}
	follower.send(`{"type":"read"}`)
	follower.await("the last known count", func(f frame) bool { return f.Type == "unread" && *f.Count == 1 })

	redis.Restart(t)
	o.over(t)
	testkit.Eventually(t, "a change of the page", func() bool {
		path := "/" + url.PathEscape(page) + "/changes"
		return do(t, "POST", s.url+path, "", withKey, "Idempotency-Key: k").status == http.StatusNoContent
	})
	follower.awaitUnread(2)
}

// TestClockKnownWhileAway kills a store of counters. Counters that this process has seen are read as stale, in no older
// version. Exact reads, and reads of counters that the process has never seen, get 503. Counters in another store are
// read as before. Afterwards everything is as before.
func TestClockKnownWhileAway(t *testing.T) {
	t.Parallel()
	t.Run("PostgreSQL", func(t *testing.T) {
		t.Parallel()
		pg := pgtest.Start(t)
		flags := []string{"--postgres=" + pg.Database(t)}

		addBefore(t, flags, "stock:unseen")
		s := startWithKey(t, flags...)
		views, stock := "views:1", "stock:1"
		never, unseen := "views:never", "stock:unseen"
		s.add(t, views, views, stock)
		version := s.wantRead(t, views, 2, false)

		s.wantRead(t, never, 0, false)
		looks := s.ws(t)
		looks.send(`{"type":"subscribe","counters":` + quoted([]string{views, "votes:1"}) + `}`)
		looks.awaitAll(shows(views, 2, false), shows("votes:1", 0, false))
		looks.send(`{"type":"unsubscribe","counters":["votes:1"]}`)
		o := beforeOutage(t, s)

		pg.Kill()
		o.allRefused(t)
		looks.await("a stale frame", shows(views, 2, true))
		testkit.Eventually(t, "a stale answer", func() bool { return s.read(t, views).Stale })
		if is := s.wantRead(t, views, 2, true); is != version {
			t.Errorf("version %s, want %s", is, version)
		}
		s.wantRead(t, stock, 1, true) // this process has changed it, and never read it
		s.wantRead(t, never, 0, true)
		s.wantSeveral(t, []string{never, views, stock}, []int64{0, 2, 1}, []bool{true, true, true})

		for _, key := range []string{unseen, "views:unseen"} {
			s.call(t, "GET", key, "").problem(t, http.StatusServiceUnavailable)
			s.several(t, views, key).problem(t, http.StatusServiceUnavailable)
			s.call(t, "GET", key+"/events", "").problem(t, http.StatusServiceUnavailable)
		}

		s.call(t, "GET", "views:1/exact", "").problem(t, http.StatusServiceUnavailable)

		late := s.ws(t)
		late.send(`{"type":"subscribe","counters":` + quoted([]string{stock, "votes:1"}) + `}`)
		late.awaitAll(shows(stock, 1, true), shows("votes:1", 0, true)) // looks has seen votes:1 before

		pg.Restart(t)
		looks.await("a fresh frame", shows(views, 2, false))
		late.await("a fresh frame", shows(stock, 1, false))
		testkit.Eventually(t, "it is known again", func() bool { return !s.read(t, views).Stale })
		s.wantRead(t, unseen, 1, false)
		o.over(t)
	})

	t.Run("PostgreSQL behind Redis", func(t *testing.T) {
		t.Parallel()
		pg := pgtest.Start(t)
		flags := overRedis(redistest.Start(t).URL(), "--postgres="+pg.Database(t), "--persist-interval=100ms")

		addBefore(t, flags, "stock:unseen")
		s := startWithKey(t, flags...)
		views, written, stock := "views:1", "views:2", "stock:1"
		never, unseen := "views:never", "stock:unseen"
		s.add(t, views, written, stock, stock)
		version := s.wantRead(t, stock, 2, false)
		s.wantRead(t, views, 1, false)
		s.wantRead(t, never, 0, false)

		looks := s.ws(t)
		all := []string{views, stock, never}
		looks.send(`{"type":"subscribe","counters":` + quoted(all) + `}`)
		looks.awaitAll(shows(views, 1, false), shows(stock, 2, false), shows(never, 0, false))
		o := beforeOutage(t, s)

		pg.Kill()
		o.refused(t)
		if got := o.like(t).lasting(t); got.Value != 2 || got.Stale {
			t.Errorf("a like during the outage: %+v, want a fresh 2", got)
		}
		if !s.ready() {
			t.Error("the server is not ready, and Redis is there")
		}
		isStock := func(f frame) bool {
			if f.Key == views && f.Stale {
				t.Error("a counter in Redis is shown as stale")
			}
			return shows(stock, 2, true)(f)
		}

		looks.await("a stale frame", isStock)
		testkit.Eventually(t, "a stale answer", func() bool { return s.read(t, stock).Stale })
		if is := s.wantRead(t, stock, 2, true); is != version {
			t.Errorf("version %s, want %s", is, version)
		}
		s.wantRead(t, never, 0, false)   // Redis has every counter that was not evicted, so it knows
		s.wantRead(t, written, 1, false) // in Redis
		s.add(t, written)
		s.wantSeveral(t, []string{stock, written, never}, []int64{2, 2, 0}, []bool{true, false, false})

		s.call(t, "GET", unseen, "").problem(t, http.StatusServiceUnavailable)
		s.several(t, written, unseen).problem(t, http.StatusServiceUnavailable)
		s.wantRead(t, "views:unseen", 0, false)
		s.call(t, "GET", "stock:1/exact", "").problem(t, http.StatusServiceUnavailable)

		if n := s.exact(t, views); n != 1 {
			t.Errorf("the exact value is %d, want 1", n)
		}

		for n := range int64(5) { // changes arrive while the stale counters are retried
			s.add(t, views)
			looks.await("a change", func(f frame) bool {
				isStock(f)
				return f.Key == views && f.Value == n+2
			})
			time.Sleep(300 * time.Millisecond)
		}

		late := s.ws(t)
		late.send(`{"type":"subscribe","counters":` + quoted(all) + `}`)
		late.awaitAll(shows(stock, 2, true), shows(views, 6, false), shows(never, 0, false))

		pg.Restart(t)
		looks.await("a fresh frame", shows(stock, 2, false))
		late.await("a fresh frame", shows(stock, 2, false))
		testkit.Eventually(t, "it is known again", func() bool { return !s.read(t, stock).Stale })
		s.wantRead(t, unseen, 1, false)
		o.over(t)
	})

	t.Run("PostgreSQL beside the Redis of a region", func(t *testing.T) {
		t.Parallel()
		pg := pgtest.Start(t)
		peer := redistest.Start(t)
		flags := overRedis(redistest.Start(t).URL(), "--postgres="+pg.Database(t), "--region=us",
			"--peer=eu="+peer.URL())
		addBefore(t, flags, "stock:unseen")
		s := startWithKey(t, flags...)
		views, stock := "views:1", "stock:1"
		s.add(t, views, stock)
		s.wantRead(t, stock, 1, false)

		looks := s.ws(t)
		looks.send(`{"type":"subscribe","counters":` + quoted([]string{views, stock}) + `}`)
		looks.awaitAll(shows(views, 1, false), shows(stock, 1, false))

		pg.Kill()
		looks.await("a stale frame", shows(stock, 1, true))
		testkit.Eventually(t, "a stale answer", func() bool { return s.read(t, stock).Stale })

		s.add(t, views)
		s.wantSeveral(t, []string{stock, views}, []int64{1, 2}, []bool{true, false})
		looks.await("a change", shows(views, 2, false))
		s.several(t, views, "stock:unseen").problem(t, http.StatusServiceUnavailable)

		pg.Restart(t)
		looks.await("a fresh frame", shows(stock, 1, false))
	})

	t.Run("Redis in front of PostgreSQL", func(t *testing.T) {
		t.Parallel()
		redis := redistest.Start(t, redistest.Durable...)
		postgres := "--postgres=" + pgtest.Single(t).Database(t)
		flags := overRedis(redis.URL(), postgres)
		changed, other, deleted := "views:changed", "views:other", "views:deleted"
		stock := "stock:1"

		before := startWithKey(t, flags...)
		before.add(t, changed, other, deleted, stock)

		// The export waits until everything is persisted; a server that ends waits only 2 s.
		headcount(t, nil, nil, "export", "--redis="+redis.URL(), postgres)
		if problem := before.end(); problem != "" {
			t.Fatal(problem)
		}

		s := startWithKey(t, append(flags, "--persist-interval=1h")...)
		s.add(t, changed)
		version := s.wantRead(t, changed, 2, false)
		s.call(t, "DELETE", deleted, "").noContent(t)

		looks, late := s.ws(t), s.ws(t)
		looks.send(`{"type":"subscribe","counters":` + quoted([]string{changed}) + `}`)
		looks.await("a counter", shows(changed, 2, false))

		redis.Kill()
		looks.await("a stale frame", shows(changed, 2, true))
		testkit.Eventually(t, "a stale answer", func() bool { return s.read(t, changed).Stale })
		if is := s.wantRead(t, changed, 2, true); is != version { // PostgreSQL has 1
			t.Errorf("version %s, want %s", is, version)
		}
		s.wantRead(t, deleted, 0, true)
		s.wantRead(t, other, 1, true) // this process has not seen it, but PostgreSQL has it
		s.wantSeveral(t, []string{changed, deleted}, []int64{2, 0}, []bool{true, true})

		if c := s.read(t, stock); c.Value != 1 {
			t.Errorf("a read shows %+v, want 1", c)
		}
		if n := s.exact(t, stock); n != 1 {
			t.Errorf("the exact value is %d, want 1", n)
		}

		s.call(t, "GET", "views:changed/exact", "").problem(t, http.StatusServiceUnavailable)
		late.send(`{"type":"subscribe","counters":` + quoted([]string{changed, deleted}) + `}`)
		late.awaitAll(shows(changed, 2, true), shows(deleted, 0, true))

		redis.Restart(t)
		late.await("a fresh frame", shows(changed, 2, false))
		testkit.Eventually(t, "it is known again", func() bool { return !s.read(t, changed).Stale })
		s.wantRead(t, deleted, 0, false)
	})
}
