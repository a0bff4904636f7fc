package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const increment, decrement = `{"action":"increment"}`, `{"action":"decrement"}`

func TestOneUserInThreeTabs(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe(page)
	watcher.takeCount(page, 0)
	a.join(page)
	a.takeCount(page, 1)
	watcher.takeCount(page, 1)
	b, c := s.again(t, a), s.again(t, a)
	for _, tab := range []*client{b, c} {
		tab.join(page)
		tab.takeCount(page, 1)
	}
	other := s.ws(t)
	other.join(page)
	other.takeCount(page, 2)
	watcher.takeCount(page, 2)
	a.leave(page)
	b.close()
	a.skim()
	if got := s.count(t, pathEscape(page)); got != 2 {
		t.Errorf("with one tab left: %d", got)
	}
	c.leave(page) // b may still come back
	closed := time.Now()
	watcher.takeCount(page, 1)
	if took := time.Since(closed); took > patience {
		t.Errorf("took %s", took)
	}
}

func pathEscape(page string) string {
	return strings.ReplaceAll(page, " ", "%20")
}

func TestExplicitLeaveIsAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=6s", "--update-interval=10ms")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")
	a.join("p")
	watcher.awaitCount("p", 1)
	left := time.Now()
	a.leave("p")
	watcher.awaitCount("p", 0)
	if took := time.Since(left); took >= 6*time.Second {
		t.Errorf("it took the grace: %s", took)
	}
	if got := s.count(t, "*"); got != 0 {
		t.Errorf("the site has %d", got)
	}
}

// After a tab is closed its user stays for the grace, and no longer.
func TestClosedTab(t *testing.T) {
	t.Parallel()
	s := common(t)
	for name, end := range map[string]func(*client){
		"no close frame": func(c *client) { c.close() },
		"close frame":    func(c *client) { _ = c.ws.Close(1000, "bye") },
		"going away":     func(c *client) { _ = c.ws.Close(1001, "") },
		"error":          func(c *client) { c.send(strings.Repeat("x", 5000)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			page := fresh(t)
			watcher, a := s.ws(t), s.ws(t)
			watcher.subscribe(page)
			watcher.takeCount(page, 0)
			a.join(page)
			watcher.takeCount(page, 1)
			closed := time.Now()
			end(a)
			f := watcher.takeCount(page, 0)
			if took := f.at.Sub(closed); took < sharedGrace || took > sharedGrace+5*time.Second {
				t.Errorf("gone after %s, want the grace of %s", took, sharedGrace)
			}
		})
	}
	t.Run("grace 0", func(t *testing.T) {
		t.Parallel()
		s := start(t, "--leave-grace=0s", "--update-interval=10ms")
		watcher, a := s.ws(t), s.ws(t)
		watcher.subscribe("p")
		watcher.takeCount("p", 0)
		for range 3 {
			a.join("p")
			watcher.takeCount("p", 1)
			a.close()
			watcher.takeCount("p", 0)
			a = s.again(t, a)
		}
	})
}

// A client that vanishes without a word is gone within ping + pong + grace + 2 s.
func TestVanishedClient(t *testing.T) {
	t.Parallel()
	const ping, pong, grace = 500 * time.Millisecond, time.Second, 400 * time.Millisecond
	s := start(t, "--ping-interval="+ping.String(), "--pong-timeout="+pong.String(), "--leave-grace="+grace.String(), "--update-interval=10ms")
	watcher := s.ws(t)
	watcher.subscribe("p", "mute")
	watcher.take("count")
	watcher.take("count")

	k := newLink(t, s.addr)
	a := s.dial(t, dialer{addr: k.addr})
	a.join("p")
	watcher.awaitCount("p", 1)
	// It stays as long as it answers pings.
	if fs := watcher.during(time.Now().Add(2 * (ping + pong + grace))); len(fs) != 0 {
		t.Fatalf("while it answered: %v", fs)
	}
	k.silence()
	silent := time.Now()
	f := watcher.takeCount("p", 0)
	if took := f.at.Sub(silent); took < grace || took > ping+pong+grace+2*time.Second {
		t.Errorf("gone after %s", took)
	}

	// This client never reads or answers, from the beginning.
	w := s.rawWS(t, 0)
	joined := time.Now()
	w.send(0x81, `{"type":"join","page":"mute"}`)
	watcher.awaitCount("mute", 1)
	f = watcher.takeCount("mute", 0)
	if took := f.at.Sub(joined); took < pong+grace || took > ping+pong+grace+2*time.Second {
		t.Errorf("the mute one is gone after %s", took)
	}

	// This one answers no ping but sends something, also a part of a message.
	w = s.rawWS(t, 0)
	w.send(0x81, `{"type":"join","page":"mute"}`)
	watcher.awaitCount("mute", 1)
	for end := time.Now().Add(ping + pong + grace + time.Second); time.Now().Before(end); time.Sleep(ping / 2) {
		w.send(0x81, `{"type":"leave","page":"other"}`)
	}
	w.send(0x01, `{"type":"join",`)
	for end := time.Now().Add(ping + pong + grace + time.Second); time.Now().Before(end); time.Sleep(ping / 2) {
		w.send(0x00, ` `)
	}
	w.send(0x80, `"page":"late"}`)
	if fs := watcher.skim(); len(fs) != 0 {
		t.Errorf("a client that sends counted as dead: %v", fs)
	}
	watcher.subscribe("late")
	watcher.awaitCount("late", 1)
}

// Other clients see neither a reload nor a second tab that comes and goes.
func TestReloadIsNotSeen(t *testing.T) {
	t.Parallel()
	const grace = 2 * time.Second
	s := start(t, "--leave-grace="+grace.String(), "--update-interval=10ms")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")
	events := s.sse(t, "/p/counter/events")
	events.awaitCount(0)
	a.join("p")
	watcher.awaitCount("p", 1)
	if first := events.take(); first.Count != 1 {
		t.Fatalf("event %s", first.data)
	}
	watcher.during(time.Now().Add(100 * time.Millisecond)) // that of the site
	for range 4 {
		a.close()
		a = s.again(t, a)
		a.join("p")
		a.takeCount("p", 1)
	}
	a.close() // lost, and back after half of the grace
	fs := watcher.during(time.Now().Add(grace / 2))
	a = s.again(t, a)
	a.join("p")
	a.takeCount("p", 1)
	fs = append(fs, watcher.during(time.Now().Add(grace+500*time.Millisecond))...)
	if len(fs) != 0 {
		t.Errorf("seen: %v", fs)
	}
	select {
	case e := <-events.events:
		t.Errorf("event %s", e.data)
	default:
	}
	b := s.ws(t)
	b.join("p")
	watcher.awaitCount("p", 2)
	if e := events.take(); e.Count != 2 {
		t.Errorf("event %s", e.data)
	}
}

// Each tab counts by itself: a lost tab may come back although another one has left.
func TestOneLostOneLeft(t *testing.T) {
	t.Parallel()
	const grace = 1500 * time.Millisecond
	s := start(t, "--leave-grace="+grace.String(), "--update-interval=10ms")
	watcher := s.ws(t)
	watcher.subscribe("p")
	watcher.takeCount("p", 0)
	for _, order := range []string{"lost first", "left first"} {
		a := s.ws(t)
		a.join("p")
		a.takeCount("p", 1)
		watcher.takeCount("p", 1)
		b := s.again(t, a)
		b.join("p")
		b.takeCount("p", 1)
		if order == "left first" {
			b.leave("p")
			b.silent()
		}
		lost := time.Now()
		a.close()
		eventually(t, "one connection is gone", func() bool { return s.metric(t, "headcount_connections") == 2 })
		if order == "lost first" {
			b.leave("p")
		}
		f := watcher.takeCount("p", 0)
		if took := f.at.Sub(lost); took < grace {
			t.Errorf("%s: gone after %s, before the grace of the lost one", order, took)
		}
		b.close()
		eventually(t, "all connections but one are gone", func() bool { return s.metric(t, "headcount_connections") == 1 })
	}
	// The lost tab comes back and leaves: there is nobody left to wait for.
	a := s.ws(t)
	a.join("p")
	watcher.takeCount("p", 1)
	a.close()
	eventually(t, "one connection is gone", func() bool { return s.metric(t, "headcount_connections") == 1 })
	a = s.again(t, a)
	a.join("p")
	a.takeCount("p", 1)
	left := time.Now()
	a.leave("p")
	if took := watcher.takeCount("p", 0).at.Sub(left); took > grace {
		t.Logf("an explicit leave took %s: a slow machine?", took)
	}
}

func TestHoldsTakenByPut(t *testing.T) {
	t.Parallel()
	const timeout = 700 * time.Millisecond
	const hold = 3 * timeout
	s := start(t, "--presence-timeout="+timeout.String(), "--heartbeat-interval=200ms", "--leave-grace=100ms", "--update-interval=10ms")
	id := func() string { return "Headcount-Id: " + s.ws(t).id }

	t.Run("idempotent", func(t *testing.T) {
		t.Parallel()
		a, b := id(), id()
		last := "0-0"
		for i, step := range []struct {
			who, action string
			want        int
			changes     bool
		}{
			{a, decrement, 0, false},
			{a, increment, 1, true},
			{a, increment, 1, false},
			{b, increment, 2, true},
			{a, increment, 2, false},
			{b, decrement, 1, true},
			{b, decrement, 1, false},
			{a, decrement, 0, true},
			{a, decrement, 0, false},
			{a, increment, 1, true},
			{a, decrement, 0, true},
		} {
			c := s.put(t, "/idem/counter", step.action, step.who).counter(t)
			if c.Count != step.want || newer(t, c.Version, last) != step.changes {
				t.Errorf("step %d: %+v after version %s", i, c, last)
			}
			last = c.Version
		}
	})
	t.Run("lasts three timeouts", func(t *testing.T) {
		t.Parallel()
		me := id()
		watcher := s.ws(t)
		watcher.subscribe("held")
		watcher.takeCount("held", 0)
		s.put(t, "/held/counter", increment, me).counter(t)
		watcher.takeCount("held", 1)
		if fs := watcher.during(time.Now().Add(hold * 2 / 3)); len(fs) != 0 {
			t.Fatalf("it ended early: %v", fs)
		}
		renewed := time.Now()
		if c := s.put(t, "/held/counter", increment, me).counter(t); c.Count != 1 {
			t.Errorf("renewed: %+v", c)
		}
		f := watcher.takeCount("held", 0)
		if took := f.at.Sub(renewed); took < hold || took > hold+5*time.Second {
			t.Errorf("it lasted %s after it was renewed, want %s", took, hold)
		}
	})
	t.Run("beside connections", func(t *testing.T) {
		t.Parallel()
		c := s.ws(t)
		me := "Headcount-Id: " + c.id
		watcher := s.ws(t)
		watcher.subscribe("both", "there")
		watcher.take("count")
		watcher.take("count")
		c.join("both")
		watcher.awaitCount("both", 1)
		if got := s.put(t, "/both/counter", increment, me).counter(t); got.Count != 1 {
			t.Errorf("hold and tab: %+v", got)
		}
		if got := s.put(t, "/there/counter", increment, me).counter(t); got.Count != 1 {
			t.Errorf("a hold on another page: %+v", got)
		}
		if got := s.put(t, "/both/counter", decrement, me).counter(t); got.Count != 1 {
			t.Errorf("the tab is still there: %+v", got)
		}
		if got := s.put(t, "/both/counter", increment, me).counter(t); got.Count != 1 {
			t.Errorf("%+v", got)
		}
		c.leave("both")
		c.skim()
		if got := s.get(t, "/both/counter").counter(t); got.Count != 1 {
			t.Errorf("the hold is still there: %+v", got)
		}
		if got := s.put(t, "/both/counter", decrement, me).counter(t); got.Count != 0 {
			t.Errorf("both have ended: %+v", got)
		}
		if got := s.get(t, "/there/counter").counter(t); got.Count != 1 {
			t.Errorf("the other page: %+v", got)
		}
		watcher.awaitCount("there", 0)
	})
}

// When a process stood still for longer than the presence timeout, it loses no user.
func TestSuspendedServer(t *testing.T) {
	t.Parallel()
	const timeout = 1500 * time.Millisecond
	const users = 40
	s := start(t, "--presence-timeout="+timeout.String(), "--heartbeat-interval=400ms", "--leave-grace=300ms", "--ping-interval=500ms", "--pong-timeout=1500ms", "--update-interval=10ms")
	watcher := s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")
	for range users {
		s.ws(t).join("p")
	}
	watcher.awaitCount("p", users)
	eventually(t, "all are on the site", func() bool { return s.count(t, "*") == users })
	watcher.during(time.Now().Add(300 * time.Millisecond))
	for _, stop := range []time.Duration{timeout - 100*time.Millisecond, timeout + 300*time.Millisecond, 2 * timeout} {
		s.signal(syscall.SIGSTOP)
		time.Sleep(stop)
		s.signal(syscall.SIGCONT)
		for _, f := range watcher.during(time.Now().Add(timeout + 500*time.Millisecond)) {
			if f.Type == "count" && *f.Count < users {
				t.Errorf("suspended for %s: %s", stop, f.text)
			}
		}
	}
	if got := s.count(t, "p"); got != users {
		t.Errorf("in the end: %d", got)
	}
}

func TestTwoThousandComeAndGo(t *testing.T) {
	t.Parallel()
	const users, pages = 2000, 20
	s := start(t, "--leave-grace=500ms", "--update-interval=100ms")
	conns := make([]*client, users)
	var wg sync.WaitGroup
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < users; i += 16 {
				c, err := s.connect(dialer{})
				if err != nil {
					t.Errorf("connect: %v", err)
					return
				}
				c.t = t
				conns[i] = c
				// Subscriptions would turn this into a test of the fan-out, with clients
				// that are much slower than the server.
				page := fmt.Sprintf("p%d", i%pages)
				c.join(page)
				c.unsubscribe(page)
				c.join("all")
				c.unsubscribe("all")
			}
		})
	}
	wg.Wait()
	for _, c := range conns {
		if c == nil {
			t.Fatal("not all could connect")
		}
	}
	eventually(t, "all are counted", func() bool { return s.count(t, "all") == users && s.count(t, "*") == users })
	for i := range pages {
		if got := s.count(t, fmt.Sprintf("p%d", i)); got != users/pages {
			t.Errorf("page %d has %d", i, got)
		}
	}
	for i, c := range conns {
		if i%2 == 0 {
			c.close()
		} else {
			wg.Go(func() { _ = c.ws.Close(1000, "") })
		}
	}
	wg.Wait()
	eventually(t, "all are gone", func() bool { return s.count(t, "all") == 0 && s.count(t, "*") == 0 })
	for i := range pages {
		if got := s.count(t, fmt.Sprintf("p%d", i)); got != 0 {
			t.Errorf("page %d has %d", i, got)
		}
	}
	eventually(t, "all connections are forgotten", func() bool {
		return s.metric(t, "headcount_connections") == 0 && s.metric(t, "headcount_users") == 0
	})
}

func TestMaxConnections(t *testing.T) {
	t.Parallel()
	s := start(t, "--max-connections=3", "--leave-grace=0s")
	a, b := s.ws(t), s.ws(t)
	a.join("p")
	a.takeCount("p", 1)
	st := s.sse(t, "/p/counter/events")
	st.take()
	s.refused(t, dialer{}).problem(t, http.StatusServiceUnavailable)
	s.get(t, "/p/counter/events").problem(t, http.StatusServiceUnavailable)
	if got := s.count(t, "p"); got != 1 {
		t.Errorf("GET while full: %d", got)
	}
	b.silent()
	b.close()
	eventually(t, "there is room again", func() bool {
		c, err := s.connect(dialer{})
		if err == nil {
			c.ws.CloseNow()
		}
		return err == nil
	})
}

// Whatever happens at the same time, the first count after a join includes the joiner.
func TestAnswersIncludeTheJoiner(t *testing.T) {
	t.Parallel()
	s := common(t)
	a := s.ws(t)
	tabs := []*client{a, s.again(t, a), s.again(t, a), s.again(t, a)}
	base := fresh(t)
	for i := range 150 {
		page := fmt.Sprintf("%s/%d", base, i)
		var wg sync.WaitGroup
		for j, c := range tabs {
			wg.Go(func() {
				switch j {
				case 2: // on its way twice
					c.join(page)
				case 3: // what is asked in between does not count
					c.join(page)
					c.unsubscribe(page)
				}
				c.join(page)
			})
		}
		wg.Wait()
		for j, c := range tabs {
			f := c.await("count", func(f frame) bool { return f.isCount(page) })
			if *f.Count != 1 {
				t.Errorf("tab %d joined %s and got %s", j, page, f.text)
			}
			c.leave(page)
			c.unsubscribe(page)
		}
		for _, c := range tabs {
			c.skim()
		}
	}
}

// One address cannot take every place. Clients of a trusted proxy count under their own
// addresses.
func TestConnectionsPerAddress(t *testing.T) {
	t.Parallel()
	s := start(t, "--max-connections-per-address=2", "--leave-grace=0s", "--trusted-proxies=127.0.0.1")
	forwarded := func(addr string) dialer { return dialer{headers: []string{"X-Forwarded-For: " + addr}} }
	first := s.dial(t, forwarded("192.0.2.1"))
	s.sse(t, "/p/counter/events", "X-Forwarded-For: 192.0.2.1")
	a := s.get(t, "/p/counter/events", "X-Forwarded-For: 192.0.2.1")
	a.problem(t, http.StatusServiceUnavailable)
	if a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "--max-connections-per-address") {
		t.Errorf("%v %s", a.header, a.body)
	}
	s.dial(t, forwarded("192.0.2.2"))
	s.get(t, "/p/counter", "X-Forwarded-For: 192.0.2.1").counter(t) // short calls are not counted
	first.close()
	eventually(t, "a place for the same address", func() bool {
		c, err := s.connect(forwarded("192.0.2.1"))
		if err == nil {
			c.ws.CloseNow()
		}
		return err == nil
	})
}
