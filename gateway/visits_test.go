package gateway

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"headcount/gateway/identity"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
	"headcount/presence"
)

// tab is a WebSocket that answers pings, and reads the frames that its visitor sees.
type tab struct{ *looker }

// tabFrame is a frame other than a ping and an unread count.
type tabFrame struct {
	at   time.Time
	text string

	Type, Code, Page, Version string
	Count                     int
	Stale                     bool
}

func (f tabFrame) counts(page string, n int) bool {
	return f.Type == "count" && f.Page == page && f.Count == n
}

// tab opens a tab of a new visitor, unless header lines identify another one.
func (s *served) tab(lines ...string) *tab { return &tab{s.looker(lines...)} }

// again opens another tab of the same visitor.
func (s *served) again(t *tab) *tab { return s.tab("Headcount-Id: " + t.id) }

func (t *tab) join(page string)  { t.t.Helper(); t.say(`{"type":"join","page":` + quoted(page) + `}`) }
func (t *tab) leave(page string) { t.t.Helper(); t.say(`{"type":"leave","page":` + quoted(page) + `}`) }

func (t *tab) subscribe(pages ...string) {
	t.t.Helper()
	t.say(`{"type":"subscribe","pages":` + quoted(pages) + `}`)
}

func quoted(v any) string {
	text, _ := json.Marshal(v) // a string is never an error

	return string(text)
}

// poll returns the next frame, if one comes by then.
func (t *tab) poll(by time.Time) (f tabFrame, ok bool) {
	t.t.Helper()
	for {
		_ = t.SetReadDeadline(by)
		opcode, text, err := t.raw.next()
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return f, false
		}
		if err != nil {
			t.t.Fatal(err)
		}

		if opcode == websocket.Ping {
			t.write([]byte(masked(websocket.Pong, string(text))))
			continue
		}

		f = tabFrame{at: time.Now(), text: string(text)}
		if err := json.Unmarshal(text, &f); opcode != websocket.Text || err != nil {
			t.t.Fatalf("frame %#x %q: %v", opcode, text, err)
		}
		if f.Type != "unread" {
			return f, true
		}
	}
}

func (t *tab) take(what string) tabFrame {
	t.t.Helper()
	f, ok := t.poll(time.Now().Add(testkit.Timeout))
	if !ok {
		t.t.Fatal("no " + what)
	}

	return f
}

// takeCount requires that the next frame has the page's count n.
func (t *tab) takeCount(page string, n int) tabFrame {
	t.t.Helper()
	f := t.take(fmt.Sprintf("count %d of %q", n, page))
	if !f.counts(page, n) {
		t.t.Fatalf("got %s, want count %d of %q", f.text, n, page)
	}

	return f
}

// awaitCount skips frames until the page's count is n.
func (t *tab) awaitCount(page string, n int) {
	t.t.Helper()
	for f := t.take("count"); !f.counts(page, n); f = t.take(fmt.Sprintf("count %d of %q", n, page)) {
	}
}

// takeError requires that the next frame has this error.
func (t *tab) takeError(code string) tabFrame {
	t.t.Helper()
	f := t.take("error " + code)
	if f.Type != "error" || f.Code != code {
		t.t.Fatalf("got %s, want the error %s", f.text, code)
	}

	return f
}

// silent requires that the earlier messages had no answer.
func (t *tab) silent() {
	t.t.Helper()
	t.say(heartbeatMsg)
	if f := t.take("answer to a heartbeat"); f.Type != "heartbeat" {
		t.t.Fatalf("got %s, want the answer to a heartbeat", f.text)
	}
}

// during returns the frames that come within that time.
func (t *tab) during(d time.Duration) (all []tabFrame) {
	t.t.Helper()
	for end := time.Now().Add(d); ; {
		f, ok := t.poll(end)
		if !ok {
			return all
		}
		all = append(all, f)
	}
}

// eventStream is read event by event.
type eventStream struct {
	*raw
	http.Header
	comments int
}

// sent is an event with a count.
type sent struct {
	name, id, data string

	Page, Version string
	Count         int
}

func (s *served) stream(path string, lines ...string) *eventStream {
	s.t.Helper()
	r := s.open(path, "", lines...)

	return &eventStream{raw: r, Header: r.response(http.StatusOK).Header}
}

// poll returns the next event, if one comes within that time.
func (st *eventStream) poll(d time.Duration) (e sent, ok bool) {
	st.t.Helper()
	_ = st.SetReadDeadline(time.Now().Add(d))
	for {
		line, err := st.in.ReadString('\n')
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return e, false
		}
		if err != nil {
			st.t.Fatal(err)
		}

		line = strings.TrimRight(line, "\r\n")
		name, value, _ := strings.Cut(line, ": ")
		endsEvent := line == "" && e.data != "" // the empty line after a comment ends none
		switch {
		case strings.HasPrefix(line, ":"):
			st.comments++
		case name == "event":
			e.name = value
		case name == "id":
			e.id = value
		case name == "data":
			e.data = value
		case endsEvent:
			if err := json.Unmarshal([]byte(e.data), &e); err != nil {
				st.t.Fatalf("%v in %s", err, e.data)
			}

			return e, true
		}
	}
}

func (st *eventStream) take() sent {
	st.t.Helper()
	e, ok := st.poll(testkit.Timeout)
	if !ok {
		st.t.Fatal("no event")
	}

	return e
}

// takeCount requires that the next event has the count n.
func (st *eventStream) takeCount(n int) sent {
	st.t.Helper()
	e := st.take()
	if e.name != "count" || e.id != e.Version || e.Count != n {
		st.t.Fatalf("event %q %q: %s, want the count %d", e.name, e.id, e.data, n)
	}

	return e
}

// takeJoin requires that the next event says that the stream's user is on the page.
func (st *eventStream) takeJoin() {
	st.t.Helper()
	if e := st.take(); e.name != "join" || e.Page == "" {
		st.t.Fatalf("event %q: %s, want a join", e.name, e.data)
	}
}

// got is an answer that was read.
type got struct {
	http.Header
	status int
	text   string
	sent
}

// do makes a call. Lines are headers; a line "Host: h" names another host, and an empty line is ignored.
func (s *served) do(method, path, body string, lines ...string) got {
	s.t.Helper()
	req, err := http.NewRequest(method, "http://"+s.addr+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}

	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		switch name {
		case "": // no header
		case "Host":
			req.Host = value
		default:
			req.Header.Add(name, value)
		}
	}

	resp, err := s.http().Do(req)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()

	text, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}

	g := got{Header: resp.Header, status: resp.StatusCode, text: string(text)}
	_ = json.Unmarshal(text, &g.sent) // an answer without a count leaves the fields empty

	return g
}

// count returns the count of a page that GET answers.
func (s *served) count(page string) int {
	s.t.Helper()
	g := s.do("GET", "/"+page+"/counter", "")
	if g.status != http.StatusOK {
		s.t.Fatalf("%s: %d %s", page, g.status, g.text)
	}

	return g.Count
}

// newer reports whether version a is greater than b.
func newer(t *testing.T, a, b string) bool {
	t.Helper()
	one, err := presence.ParseVersion(a)
	other, err2 := presence.ParseVersion(b)
	if err != nil || err2 != nil {
		t.Fatalf("versions %q and %q: %v, %v", a, b, err, err2)
	}

	return one.Compare(other) > 0
}

const incrementBody, decrementBody = `{"action":"increment"}`, `{"action":"decrement"}`

// visits runs a test in memory, with dispatchers. Counts are sent at once, and a lost visitor stays for the grace.
func visits(t *testing.T, grace time.Duration, tune func(*Config), test func(*testing.T, *served)) {
	t.Helper()
	inMemory(t, func(cfg *Config) {
		cfg.UpdateInterval, cfg.LeaveGrace = 10*time.Millisecond, grace
		if tune != nil {
			tune(cfg)
		}
	}, func(t *testing.T, s *served) {
		defer s.dispatch()()
		test(t, s)
	})
}

// After a tab has ended, in whatever way, its visitor stays for the grace and no longer.
func TestAVisitorStaysForTheGrace(t *testing.T) {
	const grace = 700 * time.Millisecond
	visits(t, grace, nil, func(t *testing.T, s *served) {
		closes := func(code string) func(*tab) {
			return func(a *tab) { a.write([]byte(masked(websocket.Close, code))) }
		}
		for page, end := range map[string]func(*tab){
			"no close frame": func(a *tab) { _ = a.Close() },
			"close frame":    closes("\x03\xe8bye"),
			"going away":     closes("\x03\xe9"),
			"an error": func(a *tab) {
				a.say(strings.Repeat("x", 5000))
				a.takeError("too_large")
				a.expectClose(websocket.StatusTooBig)
				closes("\x03\xf1")(a)
			},
		} {
			watcher, a := s.tab(), s.tab()
			watcher.subscribe(page)
			watcher.takeCount(page, 0)
			a.join(page)
			a.takeCount(page, 1)
			watcher.takeCount(page, 1)

			// Too early would be a visitor who flickers at each reload.
			ended := time.Now()
			end(a)
			gone := watcher.takeCount(page, 0)
			if took := gone.at.Sub(ended); took < grace-time.Millisecond || took > grace+2*time.Second {
				t.Errorf("%s: the visitor was gone after %s, want %s to 2 s more", page, took, grace)
			}

			_ = watcher.Close()
		}
	})
}

// Without a grace a visitor is gone with the tab.
func TestWithoutAGraceAVisitorIsGoneAtOnce(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		watcher, a := s.tab(), s.tab()
		watcher.subscribe("p")
		watcher.takeCount("p", 0)
		// Several times, since the same user comes back on a new connection: what is left of an earlier one must not
		// count.
		for range 3 {
			a.join("p")
			watcher.takeCount("p", 1)
			_ = a.Close()
			watcher.takeCount("p", 0)
			a = s.again(a)
		}
	})
}

// An explicit leave takes effect at once, however long the grace is.
func TestALeaveIsAtOnce(t *testing.T) {
	visits(t, time.Hour, nil, func(t *testing.T, s *served) {
		watcher, a := s.tab(), s.tab()
		watcher.subscribe("p")
		watcher.takeCount("p", 0)

		a.join("p")
		watcher.takeCount("p", 1)
		left := time.Now()
		a.leave("p")
		if gone := watcher.takeCount("p", 0); gone.at.Sub(left) > time.Second {
			t.Errorf("gone %s after the leave, want 1s at most", gone.at.Sub(left))
		}
		// The total of the site is a set of its own, and would keep the user if the leave reached the page alone.
		if n := s.count("*"); n != 0 {
			t.Errorf("the site has %d users, want 0", n)
		}
	})
}

// A user stays on a page as long as one tab is on it, and counts once.
func TestOneUserInThreeTabs(t *testing.T) {
	visits(t, time.Second, nil, func(t *testing.T, s *served) {
		watcher, a := s.tab(), s.tab()
		watcher.subscribe("p")
		watcher.takeCount("p", 0)
		a.join("p")
		a.takeCount("p", 1)
		watcher.takeCount("p", 1)

		b, c := s.again(a), s.again(a)
		for _, another := range []*tab{b, c} {
			if another.user != a.user {
				t.Fatalf("another tab of user %q is user %q", a.user, another.user)
			}

			another.join("p")
			another.takeCount("p", 1)
		}

		other := s.tab()
		other.join("p")
		other.takeCount("p", 2)
		watcher.takeCount("p", 2)

		// One tab leaves, and one is lost. After the grace of a second neither may end the presence of the third.
		a.leave("p")
		_ = b.Close()
		time.Sleep(2 * time.Second)
		watcher.silent()
		if n := s.count("p"); n != 2 {
			t.Errorf("with one tab left the count is %d, want 2", n)
		}

		c.leave("p")
		watcher.takeCount("p", 1)
	})
}

// A client that vanishes silently is gone within ping + pong + grace + 2 s. One that answers pings stays, and so does
// one that sends anything.
func TestAVanishedClient(t *testing.T) {
	const ping, pong, grace = 500 * time.Millisecond, 4 * time.Second, 400 * time.Millisecond
	visits(t, grace, func(cfg *Config) { cfg.PingInterval, cfg.PongTimeout = ping, pong },
		func(t *testing.T, s *served) {
			watcher, answers := s.tab(), s.tab()
			for _, page := range []string{"answers", "mute", "talks"} {
				watcher.subscribe(page)
				watcher.takeCount(page, 0)
			}

			answers.join("answers")
			answers.takeCount("answers", 1)
			watcher.takeCount("answers", 1)

			talks, mute := s.tab(), s.tab() // these two answer no pings
			talks.join("talks")
			watcher.takeCount("talks", 1)
			joined := time.Now()
			mute.join("mute")
			watcher.takeCount("mute", 1)

			// A part of a message is a sign of life, too.
			talks.write([]byte(masked(partText, `{"type":"join",`)))
			var gone tabFrame
			for ok := false; !ok; {
				talks.write([]byte(masked(partMore, " ")))
				if f, seen := answers.poll(time.Now()); seen {
					t.Fatalf("a client that answers received %s, want nothing", f.text)
				}

				gone, ok = watcher.poll(time.Now().Add(ping / 2))
			}

			// The client sent its last sign of life when it joined, so that is where its time begins.
			took := gone.at.Sub(joined)
			if !gone.counts("mute", 0) || took < pong+grace || took > ping+pong+grace+2*time.Second {
				t.Errorf("%s after %s, want the mute client gone within ping + pong + grace + 2 s", gone.text, took)
			}

			talks.write([]byte(masked(lastPart, `"page":"late"}`)))
			watcher.subscribe("late")
			watcher.awaitCount("late", 1)
			answers.silent()
			if n := s.count("answers"); n != 1 {
				t.Errorf("the page of the client that answers has %d users, want 1", n)
			}
		})
}

// Other clients notice neither a reload nor a second tab that comes and goes.
func TestAReloadIsNotSeen(t *testing.T) {
	const grace = 4 * time.Second
	visits(t, grace, nil, func(t *testing.T, s *served) {
		watcher, a := s.tab(), s.tab()
		watcher.subscribe("p")
		watcher.takeCount("p", 0)
		st := s.stream("/p/counter/events")
		st.takeCount(0)

		a.join("p")
		watcher.takeCount("p", 1)
		st.takeCount(1)
		// A browser may come back before the gateway has noticed the end of the old connection, or after half of the
		// grace.
		for _, away := range []time.Duration{0, 0, 0, grace / 2} {
			_ = a.Close()
			time.Sleep(away)
			a = s.again(a)
			a.join("p")
			a.takeCount("p", 1)
		}

		// A leave that the reloads left behind would show when the grace of the last one ends, so the watcher waits
		// until then.
		if seen := watcher.during(grace + 500*time.Millisecond); len(seen) != 0 {
			t.Errorf("a reload was seen: %v", seen)
		}
		if e, ok := st.poll(time.Millisecond); ok {
			t.Errorf("a reload was seen by an event stream: %s", e.data)
		}

		// A real arrival is visible.
		s.tab().join("p")
		watcher.takeCount("p", 2)
		st.takeCount(2)
	})
}

// Two counts of one page reach a subscriber at least the update interval apart. The first change is sent at once, and
// the newest count always arrives.
func TestConflation(t *testing.T) {
	const interval = time.Second
	visits(t, 0, func(cfg *Config) { cfg.UpdateInterval = interval }, func(t *testing.T, s *served) {
		watcher, a, b, c := s.tab(), s.tab(), s.tab(), s.tab()
		watcher.subscribe("p", "other")
		watcher.take("count")
		watcher.take("count")
		st := s.stream("/p/counter/events")
		st.takeCount(0)

		time.Sleep(interval) // so that the next change counts as a first one again
		joined := time.Now()
		a.join("p")
		if f := watcher.takeCount("p", 1); f.at.Sub(joined) >= interval {
			t.Errorf("the first change took %s, want less than the interval of %s", f.at.Sub(joined), interval)
		}

		st.takeCount(1)
		synctest.Wait() // until the last write is complete

		// The counts 2, 3 and 2 are conflated, but the count of one's own page is sent at once.
		b.join("p")
		b.takeCount("p", 2)
		c.join("p")
		c.takeCount("p", 3)
		b.leave("p")
		if f := watcher.takeCount("p", 2); f.at.Sub(joined) < interval-time.Millisecond {
			t.Errorf("the second count comes %s after the first, want %s at least", f.at.Sub(joined), interval)
		}

		st.takeCount(2)

		c.join("other") // pages do not delay one another
		c.awaitCount("other", 1)
		watcher.takeCount("other", 1)
	})
}

// Without WebSockets a user is on a page while an event stream of any tab joins it, and for at most the grace after the
// last one.
func TestJoinByEventStream(t *testing.T) {
	const grace = 4 * time.Second
	visits(t, grace, nil, func(t *testing.T, s *served) {
		watcher, me := s.tab(), s.tab()
		watcher.subscribe("p")
		watcher.takeCount("p", 0)

		const path = "/p/counter/events?join=1"
		one := s.stream(path + "&id=" + me.id)
		one.takeJoin()
		one.takeCount(1) // the first count includes the user
		watcher.takeCount("p", 1)

		// The id in a header means the same user as the id in the query, so the second stream adds nobody.
		mine := "Headcount-Id: " + me.id
		second := s.stream(path, mine)
		second.takeJoin()
		other := s.stream(path)
		other.takeJoin()
		watcher.takeCount("p", 2)

		_ = one.Close()
		time.Sleep(2 * grace)
		watcher.silent() // the other tab is still there

		_ = second.Close()
		ended := time.Now()
		if gone := watcher.takeCount("p", 1); gone.at.Sub(ended) > grace+2*time.Second {
			t.Errorf("gone after %s, want %s at most", gone.at.Sub(ended), grace+2*time.Second)
		}

		back := s.stream(path, mine)
		back.takeJoin()
		watcher.takeCount("p", 2)
		_ = back.Close() // a reload
		s.stream(path, mine).takeJoin()
		if seen := watcher.during(2 * grace); len(seen) > 0 {
			t.Errorf("a reload was seen: %v", seen)
		}
		if g := s.do("GET", "/*/counter/events?join=1", ""); g.status != http.StatusBadRequest {
			t.Errorf("a join of the whole site: %d %s, want 400", g.status, g.text)
		}
	})
}

// TestAStreamThatJoinsEnds: a stream that joins ends after some time, since a proxy may go on taking its events for a
// client that is gone.
func TestAStreamThatJoinsEnds(t *testing.T) {
	visits(t, 0, func(cfg *Config) { cfg.PingInterval, cfg.PongTimeout = time.Second, time.Second },
		func(t *testing.T, s *served) {
			gone := s.stream("/p/counter/events?join=1")
			gone.takeJoin()
			gone.expectEnd()
			testkit.Eventually(t, "the user is gone", func() bool { return s.count("p") == 0 })
		})
}

// An event stream begins with the newest count, whichever count the client received last. It has comments, and is no
// presence.
func TestEventStream(t *testing.T) {
	const ping = 300 * time.Millisecond
	visits(t, 0, func(cfg *Config) { cfg.PingInterval = ping }, func(t *testing.T, s *served) {
		st := s.stream("/p/counter/events", "Accept: text/event-stream", "Last-Event-ID: 1-1")
		kind, _, _ := strings.Cut(st.Get("Content-Type"), ";")
		if kind != "text/event-stream" || !strings.Contains(st.Get("Cache-Control"), "no-store") ||
			len(st.Values("Set-Cookie")) != 1 || st.Get("Access-Control-Allow-Origin") != "" ||
			st.Get("Content-Length") != "" {
			t.Errorf("the stream has the headers %v", st.Header)
		}

		last := st.takeCount(0).Version
		if last != "0-0" {
			t.Errorf("the first event has version %s, want 0-0", last)
		}

		c := s.tab()
		for i, n := range []int{1, 0, 1, 0, 1} {
			if n == 1 {
				c.join("p")
			} else {
				c.leave("p")
			}
			e := st.takeCount(n)
			if !newer(t, e.Version, last) {
				t.Errorf("change %d has version %s, want one greater than %s", i, e.Version, last)
			}

			last = e.Version
		}

		// The id of an event is a version and no place in a log, so whatever a client sends, it gets the newest count.
		for _, id := range []string{"1-1", "", "x", last} {
			if e := s.stream("/p/counter/events", "Last-Event-ID: "+id).takeCount(1); e.Version != last {
				t.Errorf("with Last-Event-ID %q a stream begins with %s, want version %s", id, e.data, last)
			}
		}

		if n := s.count("*"); n != 1 {
			t.Errorf("the site has %d users, want 1: a stream is no presence", n)
		}

		st.takeCount(0) // c has answered no ping
		if st.comments < 2 {
			t.Errorf("the stream had %d comments, want at least 2", st.comments)
		}
		if g := s.do("GET", "/%20%00/counter/events", ""); g.status != http.StatusBadRequest {
			t.Errorf("a stream of an invalid page: %d %s, want 400", g.status, g.text)
		}
	})
}

// A PUT takes or ends a hold, and may be repeated.
func TestHoldsMayBeRepeated(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		a, b := "Headcount-Id: "+s.tab().id, "Headcount-Id: "+s.tab().id
		last := "0-0"
		for i, step := range []struct {
			who, action string
			want        int
			changes     bool
		}{
			{a, decrementBody, 0, false},
			{a, incrementBody, 1, true},
			{a, incrementBody, 1, false},
			{b, incrementBody, 2, true},
			{a, incrementBody, 2, false},
			{b, decrementBody, 1, true},
			{b, decrementBody, 1, false},
			{a, decrementBody, 0, true},
			{a, decrementBody, 0, false},
			{a, incrementBody, 1, true},
			{a, decrementBody, 0, true},
		} {
			g := s.do("PUT", "/p/counter", step.action, step.who)
			if g.status != http.StatusOK || g.Count != step.want || newer(t, g.Version, last) != step.changes {
				t.Errorf("step %d: %d %s after version %s, want the count %d, and a newer version: %t",
					i, g.status, g.text, last, step.want, step.changes)
			}

			last = g.Version
		}
	})
}

// A hold lasts three presence timeouts from its last renewal.
func TestAHoldEnds(t *testing.T) {
	const hold = 21 * time.Second // three times the presence timeout of runGateway
	visits(t, 0, nil, func(t *testing.T, s *served) {
		watcher, me := s.tab(), "Headcount-Id: "+s.tab().id
		watcher.subscribe("p")
		watcher.takeCount("p", 0)
		s.do("PUT", "/p/counter", incrementBody, me)
		watcher.takeCount("p", 1)
		// Renewed in the middle of its time, the hold would end half a hold later if the renewal were not noted.
		if early := watcher.during(hold / 2); len(early) > 0 {
			t.Fatalf("the hold ended early: %v", early)
		}

		renewed := time.Now()
		if g := s.do("PUT", "/p/counter", incrementBody, me); g.Count != 1 {
			t.Errorf("the renewal is answered %s, want the count 1", g.text)
		}

		ended := watcher.takeCount("p", 0)
		if took := ended.at.Sub(renewed); took < hold-time.Millisecond || took > hold+3*time.Second {
			t.Errorf("the hold lasted %s after its renewal, want %s", took, hold)
		}
	})
}

// A user with a hold and a tab counts once, until both have ended.
func TestHoldsBesideTabs(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		c := s.tab()
		me := "Headcount-Id: " + c.id
		c.join("both")
		c.takeCount("both", 1)
		for _, step := range []struct {
			page, action string
			want         int
		}{
			{"both", incrementBody, 1},
			{"there", incrementBody, 1},
			{"both", decrementBody, 1}, // the tab is still there
			{"both", incrementBody, 1},
		} {
			if g := s.do("PUT", "/"+step.page+"/counter", step.action, me); g.Count != step.want {
				t.Errorf("%s of %s is answered %s, want the count %d", step.action, step.page, g.text, step.want)
			}
		}

		c.leave("both")
		c.silent()
		synctest.Wait() // until the owner has the leave, which takes another way than a PUT
		if n := s.count("both"); n != 1 {
			t.Errorf("the hold is left, and the count is %d, want 1", n)
		}
		if g := s.do("PUT", "/both/counter", decrementBody, me); g.Count != 0 {
			t.Errorf("both have ended, and the answer is %s, want the count 0", g.text)
		}
		if n := s.count("there"); n != 1 {
			t.Errorf("the count of the other page is %d, want 1", n)
		}
	})
}

// A connection or stream ends when its token expires. Expiry times beyond what a clock can hold never come.
func TestATokenExpires(t *testing.T) {
	const secret = "a secret for tokens, of thirty-two bytes or more"
	identities := identity.New(identity.Config{
		IDSecrets: [][]byte{[]byte("0123456789abcdef")}, JWTSecret: []byte(secret),
	})
	t.Cleanup(identities.Close)
	visits(t, 0, func(cfg *Config) { cfg.Identities = identities }, func(t *testing.T, s *served) {
		token := func(claims jwt.MapClaims) string {
			text, err := jwt.NewWithClaims(jwt.SigningMethodHS256, claims).SignedString([]byte(secret))
			if err != nil {
				t.Fatal(err)
			}

			return text
		}

		dial := func(token string) *tab {
			r := s.open("/-/ws?token="+token, "", upgrade()...)
			r.response(http.StatusSwitchingProtocols)
			r.expect(websocket.Text, `{"type":"welcome"`)
			return &tab{&looker{raw: r}}
		}

		// An expiry so far away does not fit into a duration. Taken as one in the past, it would end these connections
		// at once.
		var stay []*tab
		for _, exp := range []any{int64(99_999_999_999), time.Now().UnixMilli(), 1e300} {
			stay = append(stay, dial(token(jwt.MapClaims{"sub": "eve", "exp": exp})))
		}

		watcher := dial(token(jwt.MapClaims{"sub": "watcher"}))
		watcher.subscribe("p")
		watcher.takeCount("p", 0)

		const lasts = 6 * time.Second
		short := token(jwt.MapClaims{"sub": "alice", "exp": time.Now().Add(lasts).Unix()})
		began := time.Now()
		c := dial(short)
		c.join("p")
		c.takeCount("p", 1)
		watcher.takeCount("p", 1)
		st := s.stream("/p/counter/events?join=1&token=" + short)
		st.takeJoin()

		f := c.takeError("token_expired")
		if took := f.at.Sub(began); took < lasts-time.Second || took > lasts+time.Second {
			t.Errorf("%s after %s, want the expiry after %s", f.text, took, lasts)
		}

		c.expectClose(websocket.StatusPolicyViolation)
		c.write([]byte(masked(websocket.Close, "\x03\xf0")))
		st.expectEnd()
		watcher.takeCount("p", 0)
		// The end of one token ends no other connection.
		for _, t := range append(stay, watcher) {
			t.silent()
		}

		refused := s.open("/-/ws?token="+short, "", upgrade()...)
		refused.response(http.StatusUnauthorized)
		if g := s.do("GET", "/p/counter/events?join=1", ""); g.status != http.StatusUnauthorized {
			t.Errorf("a stream that joins without a token: %d %s, want 401", g.status, g.text)
		}
	})
}
