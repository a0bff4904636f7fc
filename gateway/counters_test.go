package gateway

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/pipeline"
	"headcount/gateway/identity"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
	"headcount/presence"
)

// countersOf adds counters in memory, and the API key "k", to a Config.
func countersOf(t testing.TB, cfg *Config) counter.Store {
	t.Helper()
	store := countertest.InMemory(t, nil)
	cfg.Keys, _ = identity.NewSiteKeys([]string{"k"}, cfg.Sites)
	cfg.UpdateInterval = 10 * time.Millisecond
	cfg.Counters.Counters = countersIn(store)
	return store
}

// withCounters is countersOf for inMemoryWith.
func withCounters(t *testing.T) func(*Config) { return func(cfg *Config) { countersOf(t, cfg) } }

// countersIn returns the counters over a store. No rule has a top list, so nothing runs that would have to be ended.
func countersIn(store counter.Store) *pipeline.Counters {
	return pipeline.New(store, &counter.Rules{}, counter.CombinerConfig{Instant: true}, zerolog.Nop())
}

// looker is a WebSocket and its user.
type looker struct {
	*raw
	id, user string
}

func (s *served) looker(lines ...string) *looker {
	s.t.Helper()
	r := s.open("/-/ws", "", upgrade(lines...)...)
	r.response(http.StatusSwitchingProtocols)

	var welcome struct{ ID, User string }
	_, text, err := r.frame()
	if err != nil || json.Unmarshal(text, &welcome) != nil || welcome.ID == "" {
		s.t.Fatalf("welcome %q, %v", text, err)
	}
	r.expect(websocket.Text, `{"type":"unread"`)
	return &looker{r, welcome.ID, welcome.User}
}

func (l *looker) say(text string) { l.t.Helper(); l.write([]byte(masked(websocket.Text, text))) }

// shown is a frame with a counter, or an error frame.
type shown struct {
	Type, Key, Kind, Version, Code, Counter string
	Value                                   int64
	Mine, Stale, Exact                      bool
}

// next returns the next text frame, except for the unread count, which is repeated to a client that was busy.
func (l *looker) next() shown {
	l.t.Helper()
	for {
		kind, text, err := l.frame()
		if err != nil {
			l.t.Fatal(err)
		}

		if kind != websocket.Text {
			continue
		}

		var f shown
		if err := json.Unmarshal(text, &f); err != nil {
			l.t.Fatalf("%v in %s", err, text)
		}

		if f.Type != "unread" {
			return f
		}
	}
}

// until reads frames of the counter until one has the value and mine. Versions never go back, unless the counter was
// deleted.
func (l *looker) until(key string, value int64, mine bool) shown {
	l.t.Helper()
	var last presence.Version
	for {
		f := l.next()

		if f.Type != "counter" || f.Key != key {
			l.t.Fatalf("got %+v, want a frame of %s", f, key)
		}

		v, err := presence.ParseVersion(f.Version)
		if err != nil || v != (presence.Version{}) && v.Compare(last) < 0 {
			l.t.Fatalf("version %s after %s: %v", f.Version, last, err)
		}

		last = v

		if f.Value == value && f.Mine == mine {
			return f
		}
	}
}

// call makes a call on a counter, with the API key unless a header line identifies the caller.
func (s *served) call(method, path, body string, lines ...string) string {
	s.t.Helper()

	if len(lines) == 0 {
		lines = []string{"X-API-Key: k"}
	}

	// open only sends a GET, so the call is the second request on its connection.
	r := s.open("/", "")
	_, _ = io.Copy(io.Discard, r.response(http.StatusNotFound).Body)
	r.write([]byte(fmt.Sprintf(
		"%s /api/v1/counters%s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n\r\n%s", method,
		path, len(body), strings.Join(lines, "\r\n"), body)))

	resp, err := http.ReadResponse(r.in, nil)
	if err != nil {
		s.t.Fatal(err)
	}

	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode/100 != 2 {
		s.t.Fatalf("%s %s: %s %s %v", method, path, resp.Status, text, err)
	}
	_ = r.Close()
	return string(text)
}

// A client is shown each change of the counters that it subscribed to, and whether it is a member itself.
func TestCountersAreLive(t *testing.T) {
	inMemoryWith(t, withCounters, func(t *testing.T, s *served) {
		a, b := s.looker(), s.looker()
		a.say(`{"type":"subscribe","counters":["views:1","likes:1"]}`)
		for range 2 {
			// The two frames may come in either order.
			if f := a.next(); f.Type != "counter" || f.Value != 0 || f.Version != "0-0" || f.Mine || !f.Exact ||
				f.Kind != map[string]string{"views:1": "sum", "likes:1": "members"}[f.Key] {
				t.Fatalf("got %+v, want a new counter", f)
			}
		}

		b.say(`{"type":"subscribe","counters":["likes:1"]}`)
		b.until("likes:1", 0, false)

		twice := s.looker() // names a counter twice and is shown it once
		twice.say(`{"type":"subscribe","counters":["views:1","views:1"]}`)
		twice.until("views:1", 0, false)

		s.call("POST", "/views:1/increment", `{"delta":7}`)
		a.until("views:1", 7, false)
		if f := twice.next(); f.Value != 7 {
			t.Errorf("got %+v, want the next change: the counter was shown twice", f)
		}
		s.call("PUT", "/likes:1/members/me", "", "Headcount-Id: "+a.id)
		if f := a.next(); f.Value != 1 || !f.Mine { // one frame has the value and the membership
			t.Errorf("a new member is shown %+v, want the value 1 and mine", f)
		}
		b.until("likes:1", 1, false)
		s.call("PUT", "/likes:1/members/"+b.user, "")
		b.until("likes:1", 2, true)
		a.until("likes:1", 2, true)

		// Another tab of the same user is a member from its first frame on.
		tab := s.looker("Headcount-Id: " + a.id)
		tab.say(`{"type":"subscribe","counters":["likes:1"]}`)
		if f := tab.next(); f.Value != 2 || !f.Mine {
			t.Errorf("another tab is shown %+v, want the value 2 and mine", f)
		}
		// The value does not change.
		s.call("POST", "/likes:1/members", fmt.Sprintf(`{"add":["x"],"remove":[%q]}`, a.user))
		tab.until("likes:1", 2, false)
		a.until("likes:1", 2, false)
		b.until("likes:1", 2, true)

		// A reset removes the members, too.
		s.call("POST", "/likes:1/reset", `{"reason":"r","by":"b"}`)
		b.until("likes:1", 0, false)
		a.until("likes:1", 0, false)

		s.call("PUT", "/likes:1/members/"+b.user, "")
		made := b.until("likes:1", 1, true)
		a.until("likes:1", 1, false)

		s.call("DELETE", "/likes:1", "")
		if f := b.until("likes:1", 0, false); f.Version != "0-0" {
			t.Errorf("a deleted counter is shown as %+v, want version 0-0", f)
		}

		s.call("PUT", "/likes:1/members/"+b.user, "")
		// The counter is created anew. Clients must not take its frames for old ones.
		again := b.until("likes:1", 1, true)
		before, _ := presence.ParseVersion(made.Version)
		after, _ := presence.ParseVersion(again.Version)
		if after.Incarnation <= before.Incarnation {
			t.Errorf("the new counter has version %s, want one greater than %s", again.Version, made.Version)
		}

		// A client that unsubscribes receives no more frames.
		b.say(`{"type":"unsubscribe","counters":["likes:1","views:9"]}`)
		b.say(heartbeatMsg)
		if f := b.next(); f.Type != "heartbeat" {
			t.Errorf("got %+v, want the answer to the heartbeat alone", f)
		}

		// After a change of a counter that the client has left, the next frames are those of its next subscription.
		s.call("PUT", "/likes:1/members/y", "")
		b.say(`{"type":"subscribe","pages":["p"],"counters":["stock:1"]}`)
		for range 2 {
			// The two come in either order, and no frame of likes:1 comes between them.
			if f := b.next(); f.Type != "count" && f.Key != "stock:1" {
				t.Errorf("got %+v, want a count or stock:1", f)
			}
		}
	})
}

// The badge of a counter shows its value and a label to everybody who may read the counter.
func TestBadgeOfACounter(t *testing.T) {
	inMemoryWith(t, withCounters, func(t *testing.T, s *served) {
		s.call("POST", "/views:1/decrement", `{"delta":1234}`)
		get := func(path string) (status int, body string) {
			resp, err := s.http().Get("http://" + s.addr + path)
			if err != nil {
				t.Fatal(err)
			}

			defer resp.Body.Close()
			text, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}

			return resp.StatusCode, string(text)
		}

		for path, want := range map[string]string{
			"views:1/badge.svg":                                   "<title>-1234 views</title>",
			"views:1/badge.svg?label=reads+%3C3&color=teal":       "<title>-1234 reads &lt;3</title>",
			"views:new/badge.svg?label=&background=RebeccaPurple": "<title>0 </title>",
		} {
			if status, body := get("/api/v1/counters/" + path); status != 200 || !strings.Contains(body, want) {
				t.Errorf("%s: %d %s, want %s", path, status, body, want)
			}
		}

		for path, want := range map[string]int{
			"views:1/badge.svg?color=x": 400, "views:1/badge.svg?label=" + strings.Repeat("x", 41): 400,
			"stores:1/badge.svg": 403, "a%2A/badge.svg": 400,
		} {
			if status, body := get("/api/v1/counters/" + path); status != want {
				t.Errorf("%s: %d %s, want %d", path, status, body, want)
			}
		}
	})
}

// A subscription to a counter that the client may not see, or that cannot exist, is refused by an error that names it.
func TestCountersThatMayNotBeSeen(t *testing.T) {
	inMemoryWith(t, withCounters, func(t *testing.T, s *served) {
		c := s.looker()
		var many []string
		for i := range 99 {
			many = append(many, fmt.Sprintf(`"views:%d"`, i))
		}

		for _, tc := range []struct{ text, code, counter string }{
			{`{"type":"subscribe","counters":["views:1","private"]}`, "forbidden", "private"},
			{`{"type":"subscribe","counters":["views:1","*"]}`, "bad_counter", "*"},
			{`{"type":"subscribe","counters":["views:1",""],"pages":["p"]}`, "bad_counter", ""},
			{`{"type":"unsubscribe","counters":["-"]}`, "bad_counter", "-"},
			{`{"type":"subscribe","counters":"views:1"}`, "bad_json", ""},
			{`{"type":"subscribe","counters":[null]}`, "bad_json", ""},
			{`{"type":"subscribe","pages":["p",""],"counters":["views:1"]}`, "bad_page", ""},
			{
				`{"type":"subscribe","pages":["p","q"],"counters":[` + strings.Join(many, ",") + `]}`, "too_many_pages",
				"",
			},
		} {
			c.say(tc.text)
			if f := c.next(); f.Type != "error" || f.Code != tc.code || f.Counter != tc.counter {
				t.Errorf("%.60s: got %+v, want %s about %q", tc.text, f, tc.code, tc.counter)
			}
		}

		c.say(heartbeatMsg) // no refused message has changed anything
		if f := c.next(); f.Type != "heartbeat" {
			t.Errorf("got %+v, want the answer to the heartbeat alone", f)
		}
		// A subscription that is refused for one name subscribes to none.
		if n := s.g.hub.Wanted(); n != 1 { // the user's own
			t.Errorf("%d topics are wanted, want 1", n)
		}

		// A client may have 100 pages and counters together.
		c.say(`{"type":"subscribe","counters":[` + strings.Join(many, ",") + `]}`)
		// Each of the 99 is shown, so each of them has a place.
		for range 99 {
			if f := c.next(); f.Type != "counter" {
				t.Fatalf("got %+v, want a counter", f)
			}
		}

		c.say(`{"type":"join","page":"p"}`)
		if f := c.next(); f.Type != "count" {
			t.Fatalf("got %+v, want a count", f)
		}

		for _, text := range []string{
			`{"type":"join","page":"q"}`, `{"type":"subscribe","pages":["q"]}`,
			`{"type":"subscribe","counters":["likes:1"]}`,
		} {
			c.say(text)
			if f := c.next(); f.Code != "too_many_pages" {
				t.Errorf("%s: got %+v, want too_many_pages", text, f)
			}
		}

		// A server with an API key may see all counters.
		server := s.looker("X-API-Key: k")
		server.say(`{"type":"subscribe","counters":["private"]}`)
		server.until("private", 0, false)

		s.open("/-/ws", "", upgrade("X-API-Key: x")...).response(http.StatusUnauthorized)
	})
}

// event reads the next event of a stream, and returns its id and its data.
func event(t *testing.T, r *bufio.Reader) (id, data string) {
	t.Helper()
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}

		line = strings.TrimSuffix(line, "\n")
		name, value, _ := strings.Cut(line, ": ")
		if line == "" && data != "" {
			return id, data
		}

		switch name {
		case "event":
			if value != "counter" {
				t.Fatalf("the event is %q, want counter", value)
			}
		case "id":
			id = value
		case "data":
			data = value
		}
	}
}

func TestEventsOfACounter(t *testing.T) {
	inMemoryWith(t, withCounters, func(t *testing.T, s *served) {
		stream := func(lines ...string) (*raw, *bufio.Reader) {
			r := s.open("/api/v1/counters/likes:1/events", "", lines...)
			resp := r.response(http.StatusOK)
			if got := resp.Header.Get("Content-Type"); got != "text/event-stream" {
				t.Fatalf("Content-Type is %q, want text/event-stream", got)
			}
			return r, bufio.NewReader(resp.Body)
		}

		conn, first := stream()
		if id, data := event(t, first); id != "0-0" ||
			data != `{"key":"likes:1","kind":"members","value":0,"updated_at":null,"version":"0-0","exact":true}` {
			t.Errorf("the first event is %s %s, want that of a new counter", id, data)
		}

		want := strings.TrimSuffix(strings.TrimSpace(s.call("PUT", "/likes:1/members/a", "")), `,"member":true}`) + "}"
		id, data := event(t, first)
		if data != want || !strings.Contains(want, `"version":"`+id+`"`) {
			t.Errorf("%s %s, want %s", id, data, want)
		}

		// The id is a version, and no place in a log: a stream that comes back gets only the newest value.
		back, again := stream("Last-Event-ID: " + id)
		if got, _ := event(t, again); got != id {
			t.Errorf("a stream that comes back begins with %s, want the newest, %s", got, id)
		}

		s.call("PUT", "/likes:1/members/b", "")
		got, _ := event(t, again)
		if next, _ := event(t, first); got != next || got == id {
			t.Errorf("both streams must get the same new version after %s: got %s and %s", id, got, next)
		}

		s.call("DELETE", "/likes:1", "")
		if got, data := event(t, first); got != "0-0" || !strings.Contains(data, `"value":0`) {
			t.Errorf("after the deletion: %s %s, want the value 0 of version 0-0", got, data)
		}

		for _, r := range []*raw{conn, back} {
			_ = r.Close()
		}

		for path, status := range map[string]int{"private/events": 403, "a*/events": 400} {
			s.open("/api/v1/counters/"+path, "", "Connection: close").response(status)
		}
	})
}

// distant is a store that can be away.
type distant struct {
	counter.Store
	away atomic.Bool
}

// remote has counters in a distant store.
type remote struct {
	*pipeline.Counters
	store *distant
}

func (r remote) Remote() bool { return true }
func (r remote) Up() bool     { return !r.store.away.Load() }

func (d *distant) Read(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	if d.away.Load() {
		return nil, counter.ErrUnavailable
	}
	return d.Store.Read(ctx, keys, member, lag)
}

// While the store is away, the counters that clients see are stale. Afterwards they are right again, also for clients
// that came meanwhile.
func TestCountersWhileTheStoreIsAway(t *testing.T) {
	store := &distant{}
	inMemoryWith(t, func(t *testing.T) func(*Config) {
		return func(cfg *Config) {
			store.Store = countersOf(t, cfg)
			cfg.Counters.Counters = remote{countersIn(store), store}
		}
	}, func(t *testing.T, s *served) {
		a := s.looker()
		s.call("PUT", "/likes:1/members/"+a.user, "")
		a.say(`{"type":"subscribe","counters":["likes:1"]}`)
		a.until("likes:1", 1, true)
		s.call("POST", "/views:known/increment", "")

		// Clients cannot see that the store is away. Unless they are told, they take the old value for the present one.
		store.away.Store(true)
		s.g.CountersChanged()
		if f := a.next(); !f.Stale || f.Exact || f.Value != 1 || !f.Mine {
			t.Errorf("while the store is away: %+v, want it stale", f)
		}

		stream := bufio.NewReader(
			s.open("/api/v1/counters/views:known/events", "", "Connection: close").response(http.StatusOK).Body)
		if _, text := event(t, stream); !strings.Contains(text, `"value":1,`) ||
			!strings.Contains(text, `"exact":false,"stale":true}`) {
			t.Errorf("an event stream opened while the store is away has %s, want it stale", text)
		}

		// Nobody has read this counter before, so there is no old value to show: a new stream is refused, and the
		// client of a WebSocket is shown the counter after the outage.
		b := s.looker()
		b.say(`{"type":"subscribe","counters":["likes:2"]}`)
		s.open("/api/v1/counters/likes:2/events", "", "Connection: close").response(http.StatusServiceUnavailable)
		s.call("PUT", "/likes:2/members/"+b.user, "") // as another process would change it

		store.away.Store(false)
		s.g.CountersChanged()
		if f := a.next(); f.Stale || f.Value != 1 || !f.Mine {
			t.Errorf("after the store came back: %+v, want the present value, not stale", f)
		}
		b.until("likes:2", 1, true)

		if _, text := event(t, stream); !strings.Contains(text, `"value":1,`) || strings.Contains(text, "stale") {
			t.Errorf("after the store came back the event stream has %s, want the value 1, not stale", text)
		}

		// A counter that clients of this process watch is read from the copy that they see, which is not exact.
		testkit.Eventually(t, "an answer from the process's own copy", func() bool {
			return strings.Contains(s.call("GET", "/likes:1", "", "Headcount-Id: "+a.id), `"exact":false`)
		})
	})
}
