package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"headcount/internal/testkit"
)

const increment = `{"action":"increment"}`

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
			t.Fatalf("a client that answers or sends does not stay: %s, error %v", f.text, err)
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
		t.Errorf("in the end the count is %d, want %d", got, users)
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
		t.Errorf("the refusal does not name the flag: %s", a.body)
	}

	// The third place of all is taken by another address.
	s.dial(t, dialer{headers: []string{of2}})
	s.refused(t, dialer{headers: []string{of3}}).problem(t, http.StatusServiceUnavailable)
	s.get(t, "/-/top/events", of3).problem(t, http.StatusServiceUnavailable) // a stream of lists needs a place, too
	if c := s.get(t, "/p/counter", of1).counter(t); c.Count != 1 {           // short calls need no place
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
		t.Errorf("the refusal does not name the page and the limit: %s", refusal.text)
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
