package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"headcount/internal/testkit"
)

const increment, decrement = `{"action":"increment"}`, `{"action":"decrement"}`

func TestServerOneUserInThreeTabs(t *testing.T) {
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

	// The user stays as long as one tab is on the page.
	a.leave(page)
	b.close()
	a.skim()
	if got := s.count(t, pathEscape(page)); got != 2 {
		t.Errorf("with one tab left: %d", got)
	}
	c.leave(page) // b may still come back, until its grace ends
	watcher.takeCount(page, 1)
}

func pathEscape(page string) string {
	return strings.ReplaceAll(page, " ", "%20")
}

// joined waits until an event stream reports that its user is on the page.
func (st *stream) joined() {
	st.t.Helper()
	select {
	case e := <-st.events:
		var data struct {
			Page      string
			Heartbeat int64 `json:"heartbeat_ms"`
		}
		err := json.Unmarshal([]byte(e.data), &data)
		if e.name != "join" || err != nil || data.Page == "" || data.Heartbeat <= 0 {
			st.t.Fatalf("event %q with data %s, want a join", e.name, e.data)
		}
	case <-time.After(testkit.Timeout):
		st.t.Fatal("no event")
	}
}

// Without WebSockets a user is on a page while an event stream of any tab joins it, and for at most the leave grace
// after the last stream.
func TestClockJoinByEventStream(t *testing.T) {
	t.Parallel()
	const grace = 4 * time.Second // long enough for a reload on a slow machine
	s := start(t, "--leave-grace="+grace.String(), "--update-interval=10ms")
	watcher, me := s.ws(t), s.ws(t)
	watcher.subscribe("p")
	watcher.takeCount("p", 0)

	one := s.sse(t, "/p/counter/events?join=1&id="+me.id)
	one.joined()
	if e := one.take(); e.Count != 1 {
		t.Errorf("the first count lacks the user: %d", e.Count)
	}
	watcher.takeCount("p", 1)

	tab := s.sse(t, "/p/counter/events?join=1", me.as())
	tab.joined()
	other := s.sse(t, "/p/counter/events?join=1")
	other.joined()
	watcher.takeCount("p", 2)

	_ = one.resp.Body.Close()
	other.awaitCount(2)
	watcher.silent() // the other tab is still there

	_ = tab.resp.Body.Close()
	testkit.Within(t, grace+2*time.Second, "the user is gone", func() bool { return s.count(t, "p") == 1 })
	watcher.takeCount("p", 1)

	back := s.sse(t, "/p/counter/events?join=1", me.as()) // a reload
	back.joined()
	watcher.takeCount("p", 2)
	_ = back.resp.Body.Close()
	s.sse(t, "/p/counter/events?join=1", me.as()).joined()
	watcher.silent()
	s.get(t, "/*/counter/events?join=1").problem(t, http.StatusBadRequest)

	// The client is gone, and its proxy takes the events for it.
	s = start(t, "--ping-interval=1s", "--pong-timeout=1s", "--leave-grace=0s")
	gone := s.sse(t, "/p/counter/events?join=1")
	gone.joined()
	gone.end()

	testkit.Eventually(t, "the user is gone", func() bool { return s.count(t, "p") == 0 })

	// With tokens, a stream that joins needs one.
	s = start(t, "--jwt-secret="+jwtSecret)
	s.get(t, "/p/counter/events?join=1").problem(t, http.StatusUnauthorized)
	s.sse(t, "/p/counter/events?join=1&token="+hs256(t, jwt.MapClaims{"sub": "ann"})).joined()
	if got := s.count(t, "p"); got != 1 {
		t.Errorf("with a token: %d", got)
	}
}

func TestServerExplicitLeaveIsAtOnce(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=4m", "--presence-timeout=5m", "--update-interval=10ms")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")

	a.join("p")
	watcher.awaitAll(func(f frame) bool { return f.counts("p", 1) }, func(f frame) bool { return f.counts("*", 1) })
	a.leave("p")
	watcher.awaitAll(func(f frame) bool { return f.counts("p", 0) }, func(f frame) bool { return f.counts("*", 0) })

	if got := s.count(t, "*"); got != 0 {
		t.Errorf("the site has %d", got)
	}
}

// After a tab is closed, its user stays for the grace, and no longer.
func TestClockClosedTab(t *testing.T) {
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
			watch := testkit.NewStopwatch(t)
			closed := time.Now()
			end(a)
			f := watcher.takeCount(page, 0)
			if took := f.at.Sub(closed); took < sharedGrace-unit || watch.Elapsed() > sharedGrace+2*time.Second {
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

// A client that vanishes silently is gone within ping + pong + grace + 2 s.
func TestClockVanishedClient(t *testing.T) {
	t.Parallel()
	const ping, pong, grace = 500 * time.Millisecond, 4 * time.Second, 400 * time.Millisecond
	s := start(t, "--ping-interval="+ping.String(), "--pong-timeout="+pong.String(), "--leave-grace="+grace.String(),
		"--update-interval=10ms")
	watcher := s.ws(t)
	for _, page := range []string{"answers", "mute", "talks"} {
		watcher.subscribe(page)
		watcher.awaitCount(page, 0)
	}

	answers := s.ws(t)
	answers.join("answers")
	watcher.awaitCount("answers", 1)

	talks := s.rawWS(t, 0) // it answers no ping, but sends frames
	talks.send(0x81, `{"type":"join","page":"talks"}`)
	watcher.awaitCount("talks", 1)

	mute := s.rawWS(t, 0) // it never reads or answers
	watch := testkit.NewStopwatch(t)
	joined := time.Now()
	mute.send(0x81, `{"type":"join","page":"mute"}`)
	watcher.awaitCount("mute", 1)

	// Until the mute client is gone, the others must stay.
	talks.send(0x01, `{"type":"join",`) // a part of a message counts as well
	var gone frame
	for gone.text == "" {
		talks.send(0x00, ` `)

		f, ok, err := watcher.poll(time.Now().Add(ping / 2))
		if err != nil || ok && !f.counts("mute", 0) {
			t.Fatalf("%s, %v: a client that answers or sends stays", f.text, err)
		}
		gone = f
	}

	if took := gone.at.Sub(joined); took < pong+grace || watch.Elapsed() > ping+pong+grace+2*time.Second {
		t.Errorf("the mute client is gone after %s", took)
	}

	talks.send(0x80, `"page":"late"}`)
	watcher.subscribe("late")
	watcher.awaitCount("late", 1)
}

// Other clients notice neither a reload nor a second tab that comes and goes.
func TestClockReloadIsNotSeen(t *testing.T) {
	t.Parallel()
	const grace = 4 * time.Second // long enough to come back within half of it on a slow machine
	s := start(t, "--leave-grace="+grace.String(), "--update-interval=10ms")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")

	events := s.sse(t, "/p/counter/events")
	events.awaitCount(0)

	a.join("p")
	watcher.awaitAll(func(f frame) bool { return f.counts("p", 1) }, func(f frame) bool { return f.counts("*", 1) })
	if first := events.take(); first.Count != 1 {
		t.Fatalf("event %s", first.data)
	}

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

	// A real arrival is visible.
	b := s.ws(t)
	b.join("p")
	watcher.awaitCount("p", 2)
	if e := events.take(); e.Count != 2 {
		t.Errorf("event %s", e.data)
	}
}

func TestClockHoldsTakenByPut(t *testing.T) {
	t.Parallel()
	s := start(t, "--presence-timeout=1m", "--leave-grace=100ms", "--update-interval=10ms")
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
		const timeout = 1500 * time.Millisecond
		const hold = 3 * timeout
		s := start(t, "--presence-timeout="+timeout.String(), "--heartbeat-interval=500ms", "--leave-grace=100ms",
			"--update-interval=10ms")
		me := "Headcount-Id: " + s.ws(t).id
		watcher := s.ws(t)
		watcher.subscribe("held")
		watcher.takeCount("held", 0)

		s.put(t, "/held/counter", increment, me).counter(t)
		watcher.takeCount("held", 1)

		if fs := watcher.during(time.Now().Add(hold / 2)); len(fs) != 0 {
			t.Fatalf("it ended early: %v", fs)
		}

		watch := testkit.NewStopwatch(t)
		renewed := time.Now()
		if c := s.put(t, "/held/counter", increment, me).counter(t); c.Count != 1 {
			t.Errorf("renewed: %+v", c)
		}

		f := watcher.takeCount("held", 0)
		if took := f.at.Sub(renewed); took < hold-unit || watch.Elapsed() > hold+3*time.Second {
			t.Errorf("it lasted %s after it was renewed, want %s", took, hold)
		}
	})

	t.Run("beside connections", func(t *testing.T) {
		t.Parallel()
		c := s.ws(t)
		me := "Headcount-Id: " + c.id

		c.join("both")
		c.takeCount("both", 1)
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
	})
}

// A process that stood still for longer than the presence timeout loses no user.
func TestClockSuspendedServer(t *testing.T) {
	t.Parallel()
	const timeout = 5 * time.Second
	const users = 40
	s := start(t, "--presence-timeout="+timeout.String(), "--heartbeat-interval=400ms", "--leave-grace=300ms",
		"--ping-interval=500ms", "--pong-timeout="+timeout.String(), "--update-interval=10ms")

	watcher := s.ws(t)
	watcher.subscribe("p", "*")
	watcher.take("count")
	watcher.take("count")

	for range users {
		s.ws(t).join("p")
	}

	watcher.awaitCount("p", users)
	testkit.Eventually(t, "all are on the site", func() bool { return s.count(t, "*") == users })
	watcher.during(time.Now().Add(300 * time.Millisecond))

	// Just below and above the timeout, and far above it.
	for _, stop := range []time.Duration{timeout - 100*time.Millisecond, timeout + 300*time.Millisecond, 2 * timeout} {
		s.Signal(syscall.SIGSTOP)
		time.Sleep(stop)
		s.Signal(syscall.SIGCONT)

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

// One address cannot occupy every place. Clients of a trusted proxy count under their own addresses.
func TestServerMaxConnections(t *testing.T) {
	t.Parallel()
	s := start(t, "--max-connections=3", "--max-connections-per-address=2", "--leave-grace=0s",
		"--trusted-proxies=127.0.0.1")
	const of1, of2, of3 = "X-Forwarded-For: 192.0.2.1", "X-Forwarded-For: 192.0.2.2", "X-Forwarded-For: 192.0.2.3"

	first := s.dial(t, dialer{headers: []string{of1}})
	first.join("p")
	first.takeCount("p", 1)

	s.sse(t, "/p/counter/events", of1)
	a := s.get(t, "/p/counter/events", of1)
	a.problem(t, http.StatusServiceUnavailable)
	if !strings.Contains(a.body, "--max-connections-per-address") {
		t.Errorf("%s", a.body)
	}

	// The third place of all is taken by another address.
	s.dial(t, dialer{headers: []string{of2}})
	s.refused(t, dialer{headers: []string{of3}}).problem(t, http.StatusServiceUnavailable)
	if c := s.get(t, "/p/counter", of1).counter(t); c.Count != 1 { // short calls need no place
		t.Errorf("GET while full: %+v", c)
	}

	first.silent()
	first.close()
	testkit.Eventually(t, "there is room again", func() bool {
		c, err := s.connect(dialer{headers: []string{of1}})
		if err == nil {
			c.ws.CloseNow()
		}
		return err == nil
	})
}

// One user may be on 10,000 pages at a gateway, and delays nobody: the next page is refused, another user's join is
// answered at once, and all pages end with their connections.
func TestClockAUserWithThousandsOfPages(t *testing.T) {
	t.Parallel()
	const connections, each = 100, 100

	// This process answers the pings of a hundred connections, which sometimes takes more than 5 s when the whole suite
	// runs.
	s := start(t, "--leave-grace=0s", "--ping-interval=1m", "--pong-timeout=2m")
	first := s.ws(t)
	tabs := []*client{first}
	for len(tabs) < connections {
		tabs = append(tabs, s.again(t, first))
	}

	for n, tab := range tabs {
		for p := range each {
			tab.join(fmt.Sprintf("%d-%d", n, p))
		}
	}

	for n := range tabs {
		last := fmt.Sprintf("%d-%d", n, each-1)
		testkit.Eventually(t, "the user is on "+last, func() bool { return s.count(t, last) == 1 })
		tabs[n].skim() // still connected
	}

	// The user has 10,000 pages: one more is refused, and a known page is not.
	more := s.again(t, first)
	more.join("one more")
	refusal := more.takeError("too_many_pages")
	if refusal.Page == nil || *refusal.Page != "one more" ||
		!strings.Contains(refusal.text, "a user may join at most 10000 pages") {
		t.Errorf("%s", refusal.text)
	}
	more.join("7-7")
	more.awaitCount("7-7", 1)

	other := s.ws(t)
	other.join("7-7")
	testkit.Within(t, 2*time.Second, "another user is seen", func() bool { return s.count(t, "7-7") == 2 })

	for _, tab := range append(tabs, more) {
		tab.ws.CloseNow()
	}
	other.awaitCount("7-7", 1)
	testkit.Eventually(t, "the user is gone", func() bool { return s.count(t, "99-99") == 0 && s.count(t, "*") == 1 })
}

// A crawler is served like everybody, but does not count as a visitor or voter unless --count-bots is set.
func TestServerCrawlers(t *testing.T) {
	t.Parallel()
	const agent = "User-Agent: Mozilla/5.0 (compatible; Googlebot/2.1; +http://www.google.com/bot.html)"
	for counted, s := range map[int]*server{0: startWithKey(t), 1: startWithKey(t, "--count-bots")} {
		c := s.dial(t, dialer{headers: []string{agent}})
		c.join("p")
		c.awaitCount("p", counted)

		person := s.ws(t)
		person.join("p")
		person.awaitCount("p", counted+1)
		c.awaitCount("p", counted+1)

		c.leave("p")
		c.silent()

		// The other ways to count: a stream, a hold, a vote, and a like.
		st := s.sse(t, "/q/counter/events?join=1", agent)
		if counted == 0 {
			st.awaitCount(0)
		}

		put := do(t, "PUT", s.url+"/r/counter", `{"action":"increment"}`, agent)
		if n := put.counter(t).Count; n != counted {
			t.Errorf("a hold of a crawler: %d, want %d", n, counted)
		}

		if n := s.call(t, "POST", "votes:1/increment", "", agent).lasting(t).Value; n != int64(counted) {
			t.Errorf("a vote of a crawler: %d, want %d", n, counted)
		}

		member := s.call(t, "PUT", "likes:1/members/me", "", agent)
		if like := member.lasting(t); like.Value != int64(counted) || *like.Member != (counted == 1) {
			t.Errorf("a like of a crawler: %s", member.body)
		}
		ignored := 5.0
		if counted == 1 {
			ignored = 0
		}
		if n := s.metric(t, `headcount_ignored_total{reason="crawler"}`); n != ignored {
			t.Errorf("%v clients were ignored", n)
		}

		if n := s.call(t, "POST", "votes:1/increment", "", agent, withKey).lasting(t).Value; n != int64(counted)+1 {
			t.Errorf("a vote of a server that calls itself a crawler: %d", n)
		}
	}
}
