package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
)

// A client of the tests gives up a silent connection only after minutes, so that no test loses one when the machine
// stands still for a few seconds.
func init() { maxSilence = 3 * time.Minute }

// script is a server that plays one part per connection, in order. A connection without a part waits for one.
type script struct {
	Config
	parts chan func(*stage)
	ids   chan string // the id that each connection presents
	backs chan string // how long ago the client of each connection says that it was welcomed
}

// stage is one connection of a script, as the server sees it.
type stage struct {
	t   *testing.T
	ctx context.Context
	ws  *websocket.Conn
}

func newScript(t *testing.T, parts ...func(*stage)) *script {
	s := &script{parts: make(chan func(*stage), 10), ids: make(chan string, 100), backs: make(chan string, 100)}
	for _, part := range parts {
		s.parts <- part
	}

	var open sync.WaitGroup
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		open.Add(1)
		defer open.Done()
		s.ids <- r.URL.Query().Get("id")
		s.backs <- r.URL.Query().Get("back")

		var part func(*stage)
		select {
		case part = <-s.parts:
		case <-r.Context().Done():
			return
		}

		if part == nil { // a refusal
			w.Header().Set("Retry-After", "3")
			http.Error(w, `{"title":"no","detail":"not yet"}`, http.StatusForbidden)
			return
		}

		ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{subprotocol}})
		if err != nil {
			t.Error(err)
			return
		}
		defer ws.CloseNow()

		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()

		// Every connection begins with the same welcome.
		at := &stage{t, ctx, ws}
		at.say(`{"type":"welcome","user":"u","id":"u.signed","heartbeat_ms":100}`)
		part(at)
	})}

	listener := newPipes()
	s.Config = Config{URL: "http://script", DialContext: listener.connect}
	open.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() {
		_ = server.Close()
		open.Wait()
	})

	return s
}

func (s *stage) say(text string) {
	if err := s.ws.Write(s.ctx, websocket.MessageText, []byte(text)); err != nil {
		s.t.Errorf("say %s: %v", text, err)
	}
}

func (s *stage) count(page string, n int, version string) {
	s.say(fmt.Sprintf(`{"type":"count","page":%q,"count":%d,"updated_at":null,"version":%q}`, page, n, version))
}

// hear waits for these frames in this order. Other frames may come between them.
func (s *stage) hear(wants ...string) {
	for _, want := range wants {
		for {
			_, text, err := s.ws.Read(s.ctx)
			if err != nil {
				s.t.Errorf("wait for %s: %v", want, err)
				return
			}
			if string(text) == want {
				break
			}
		}
	}
}

// stay reads until the client ends the connection.
func (s *stage) stay() {
	for {
		if _, _, err := s.ws.Read(s.ctx); err != nil {
			return
		}
	}
}

// start runs a client until the test ends. What the test has asked of it before is requested on the first connection.
func start(t *testing.T, c *Client) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)

	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.Run(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Run = %v", err)
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})

	return ctx
}

// await reads updates until the wanted one.
func await(t *testing.T, ctx context.Context, c *Client, what string, wanted func(Update) bool) {
	t.Helper()
	for {
		u, err := c.Next(ctx)
		if err != nil {
			t.Fatalf("wait for %s: %v", what, err)
		}
		if wanted(u) {
			return
		}
	}
}

func isCount(page string, n int64) func(Update) bool {
	return func(u Update) bool {
		c, ok := u.(Count)
		return ok && c.Page == page && c.Count == n
	}
}

func TestAClientComesBackAndAsksForEverything(t *testing.T) {
	synctest.Test(t, aClientComesBackAndAsksForEverything)
}

func aClientComesBackAndAsksForEverything(t *testing.T) {
	const (
		join      = `{"type":"join","page":"p"}`
		subscribe = `{"type":"subscribe","pages":["*"]}`
		counters  = `{"type":"subscribe","counters":["likes:1"]}`
	)
	s := newScript(t,
		func(s *stage) {
			// The join is the first frame, or the first count of the site would lack the user.
			s.hear(join, subscribe, counters)
			s.count("p", 1, "5-1")
			s.say(`{"type":"counter","key":"likes:1","kind":"members","value":7,"updated_at":null,"version":"1-1",` +
				`"exact":true}`)
			s.say(`{"type":"unread","count":4}`)
			s.say(`{"type":"error","code":"bad_page","message":"no","page":"q"}`)
			s.say(`{"type":"something new"}`)
			s.say(`not JSON`)
			s.hear(`{"type":"leave","page":"q"}`) // after this the connection is lost

		},
		nil) // this connection is refused

	c := New(s.Config)
	c.Join("p")
	c.Subscribe("*")
	c.SubscribeCounters("likes:1")

	ctx := start(t, c)
	await(t, ctx, c, "the first connection", func(u Update) bool {
		s, ok := u.(Status)
		return ok && s.Connected && s.User == "u"
	})
	await(t, ctx, c, "the fault", func(u Update) bool { return u == Fault{"bad_page", "no", "q", ""} })

	// The client knows everything that was sent, and skips frames that it does not understand.
	if n, _ := c.Count("p"); n.Count != 1 {
		t.Errorf("count %+v", n)
	}
	if n, _ := c.Counter("likes:1"); n.Value != 7 || n.Kind != "members" {
		t.Errorf("counter %+v", n)
	}

	// The client joins and leaves a page before the connection is lost.
	c.Join("q")
	c.Leave("q")

	await(t, ctx, c, "the refusal", func(u Update) bool {
		s, _ := u.(Status)
		refusal, ok := errors.AsType[*Error](s.Err)
		return ok && refusal.Status == http.StatusForbidden && refusal.Detail == "not yet" &&
			refusal.RetryAfter == 3*time.Second
	})

	// This part is added only now: the status of its connection would replace the refusal.
	s.parts <- func(s *stage) {
		s.hear(join, subscribe, counters)
		s.count("p", 9, "4-9") // older than the known count
		s.count("p", 2, "5-2")
		s.stay()
	}

	await(t, ctx, c, "the newer count", func(u Update) bool {
		if isCount("p", 9)(u) {
			t.Error("an older version replaced a newer one")
		}
		return isCount("p", 2)(u)
	})

	// The first connection has no id yet. The others present the id that the server signed.
	if first, second, third := <-s.ids, <-s.ids, <-s.ids; first != "" || second != "u.signed" || third != second {
		t.Errorf("the client came as %q, %q, %q", first, second, third)
	}
}

// A client that comes back says how long ago it was welcomed. A server in memory that was restarted since then learns
// from that alone that its counts lack users: a token and an id of --id-secret are as good as before.
func TestAClientThatComesBackSaysSo(t *testing.T) { synctest.Test(t, aClientThatComesBackSaysSo) }

func aClientThatComesBackSaysSo(t *testing.T) {
	const lasts = 20 * time.Second
	s := newScript(t,
		func(s *stage) {
			var cancel context.CancelFunc
			s.ctx, cancel = context.WithTimeout(s.ctx, lasts)
			defer cancel()
			s.stay()
		},
		func(s *stage) {
			s.count("p", 1, "5-1")
			s.stay()
		})
	s.Config.Token = "a token"
	c := New(s.Config)
	c.Join("p")
	ctx := start(t, c)

	if first := <-s.backs; first != "" {
		t.Errorf("the first connection says that it was welcomed %s ms ago", first)
	}

	// The pause between the two is a second at most.
	ms, err := strconv.Atoi(<-s.backs)
	if err != nil || ms < int(lasts.Milliseconds()) || ms > int((lasts+firstBackoff).Milliseconds()) {
		t.Errorf("the second connection says that it was welcomed %d ms ago, %v; want some %s", ms, err, lasts)
	}
	await(t, ctx, c, "the second connection", isCount("p", 1))
}

// A client that unsubscribes from a page that it has joined keeps getting the page's count: the server ends all counts
// of the page, and begins them again when it is asked to join.
func TestAJoinedPageIsUnsubscribed(t *testing.T) { synctest.Test(t, aJoinedPageIsUnsubscribed) }

func aJoinedPageIsUnsubscribed(t *testing.T) {
	const join = `{"type":"join","page":"p"}`
	s := newScript(t, func(s *stage) {
		s.hear(join, `{"type":"subscribe","pages":["p"]}`)
		s.count("p", 1, "5-1")
		s.hear(`{"type":"unsubscribe","pages":["p","q"]}`, join)
		s.count("p", 2, "5-2")
		s.stay()
	})
	c := New(s.Config)
	c.Subscribe("p")
	c.Join("p")
	ctx := start(t, c)

	await(t, ctx, c, "the first count", isCount("p", 1))
	c.Unsubscribe("p", "q")
	await(t, ctx, c, "a count after the end of the subscription", isCount("p", 2))
}

// A client gives up a refused page on this connection and later ones, and no other page. It repeats what it sent too
// fast.
func TestARefusedPageIsGivenUp(t *testing.T) { synctest.Test(t, aRefusedPageIsGivenUp) }

func aRefusedPageIsGivenUp(t *testing.T) {
	const pricing, join = `{"type":"subscribe","pages":["pricing"]}`, `{"type":"join","page":"p"}`
	s := newScript(t,
		func(s *stage) {
			s.hear(join)
			_, text, err := s.ws.Read(s.ctx) // the pages come in any order
			if err != nil || !strings.Contains(string(text), "team") {
				s.t.Errorf("the frame after the join is %s, %v", text, err)
			}

			s.say(`{"type":"error","code":"forbidden","message":"private","page":"team"}`)
			s.hear(join, pricing)
			s.say(`{"type":"error","code":"rate_limited","message":"slower"}`)
			s.hear(join, pricing) // then the connection is lost
		},
		func(s *stage) {
			s.hear(join, pricing)
			s.count("pricing", 3, "5-1")
			s.stay()
		})

	c := New(s.Config)
	c.Subscribe("pricing", "team")
	c.Join("p")
	ctx := start(t, c)

	await(t, ctx, c, "the fault", func(u Update) bool { return u == Fault{"forbidden", "private", "team", ""} })
	await(t, ctx, c, "the count", isCount("pricing", 3))
}

// Two updates arrive before either of two waiting callers runs. Both callers are woken.
func TestEveryCallerOfNextGetsAnUpdate(t *testing.T) {
	c := New(Config{})
	c.mu.Lock()
	c.putLocked(Unread(1))
	c.putLocked(Status{})
	c.mu.Unlock()

	// The first caller wakes and takes one update; the second must be woken as well.
	<-c.wake
	if _, err := c.Next(t.Context()); err != nil {
		t.Fatal(err)
	}

	select {
	case <-c.wake:
	default:
		t.Fatal("the second caller is not woken")
	}
}

func TestOnlyTheNewestOfEachTopicWaits(t *testing.T) { synctest.Test(t, onlyTheNewestOfEachTopicWaits) }

func onlyTheNewestOfEachTopicWaits(t *testing.T) {
	s := newScript(t, func(s *stage) {
		s.hear(`{"type":"join","page":"p"}`)
		for i := range 1000 {
			s.count("p", i, fmt.Sprint("1-", i+1))
			s.count("not asked for", i, fmt.Sprint("1-", i+1))
		}
		s.say(`{"type":"unread","count":4}`)
		s.stay()
	})

	c := New(s.Config)
	c.Join("p")
	ctx := start(t, c)

	// The test does not read until all frames have arrived.
	for c.mu.Lock(); c.pending["unread"] == nil; c.mu.Lock() {
		c.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	c.mu.Unlock()

	// Expected are the status, the newest count of the page, and unread; no count of pages that were not asked for.
	var got []Update
	await(t, ctx, c, "unread", func(u Update) bool {
		got = append(got, u)
		_, ok := u.(Unread)
		return ok
	})
	if len(got) != 3 || !isCount("p", 999)(got[1]) {
		t.Errorf("the updates are %+v", got)
	}
}

// A server that is about to end asks clients to reconnect. The old connection stays until the new one works.
func TestAReconnectFrameIsObeyed(t *testing.T) { synctest.Test(t, aReconnectFrameIsObeyed) }

func aReconnectFrameIsObeyed(t *testing.T) {
	second := make(chan bool)
	s := newScript(t,
		func(s *stage) {
			s.hear(`{"type":"join","page":"p"}`)
			s.say(`{"type":"reconnect","after_ms":20}`)
			<-second
			// Frames of the old connection are ignored. The client may have closed it already.
			_ = s.ws.Write(s.ctx, websocket.MessageText,
				[]byte(`{"type":"count","page":"p","count":7,"updated_at":null,"version":"1-7"}`))
			s.stay()
		},
		func(s *stage) {
			s.hear(`{"type":"join","page":"p"}`)
			second <- true
			s.count("p", 2, "1-2")
			s.stay()
		})

	c := New(s.Config)
	c.Join("p")
	ctx := start(t, c)

	await(t, ctx, c, "the second connection", func(u Update) bool {
		if s, ok := u.(Status); ok && !s.Connected {
			t.Errorf("the client was not connected: %v", s.Err)
		}

		return isCount("p", 2)(u)
	})
}

// closedConn records that it was closed.
type closedConn struct {
	net.Conn
	once   sync.Once
	closed chan struct{}
}

func (c *closedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// A connection that the server or the network has ended is closed by the client, too, without a wait for the garbage
// collector.
func TestALostConnectionIsClosed(t *testing.T) { synctest.Test(t, aLostConnectionIsClosed) }

func aLostConnectionIsClosed(t *testing.T) {
	s := newScript(t, func(*stage) {}, (*stage).stay)
	first := &closedConn{closed: make(chan struct{})}
	connect := s.Config.DialContext
	s.Config.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := connect(ctx, network, address)
		if err != nil || first.Conn != nil {
			return conn, err
		}

		first.Conn = conn
		return first, nil
	}

	ctx := start(t, New(s.Config))
	select {
	case <-first.closed:
	case <-ctx.Done():
		t.Error("the client keeps a connection that the server has closed")
	}
}

func TestServerALoopOfRedirectsEnds(t *testing.T) {
	requests := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		if requests > 20 {
			w.WriteHeader(http.StatusForbidden)
			return
		}

		http.Redirect(w, r, "/-/ws", http.StatusFound)
	}))

	defer s.Close()

	if _, err := Dial(t.Context(), Config{URL: s.URL}); err == nil || requests > 20 {
		t.Errorf("Dial = %v after %d requests", err, requests)
	}
}

func TestServerNoOtherHostGetsTheKey(t *testing.T) {
	var got []http.Header
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, r.Header)
		w.WriteHeader(http.StatusForbidden)
	}))
	defer other.Close()

	// Another name of the same machine counts as another host.
	elsewhere := strings.Replace(other.URL, "127.0.0.1", "localhost", 1)

	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, elsewhere+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	defer s.Close()

	cfg := Config{URL: s.URL, APIKey: "key", ID: "id"}
	_, _ = NewAPI(cfg).Count(t.Context(), "p")
	_, _ = Dial(t.Context(), cfg)
	if len(got) != 2 {
		t.Fatalf("%d requests were redirected, want 2", len(got))
	}

	// The redirect is followed, but without secrets.
	for _, header := range got {
		if header.Get("X-API-Key")+header.Get("Headcount-Id") != "" {
			t.Errorf("another host gets %v", header)
		}
	}
}

// A server that never answers a heartbeat is silent, so the client dials again.
func TestSilenceEndsAConnection(t *testing.T) { synctest.Test(t, silenceEndsAConnection) }

func silenceEndsAConnection(t *testing.T) {
	defer func(d time.Duration) { maxSilence = d }(maxSilence)
	maxSilence = 50 * time.Millisecond
	second := make(chan struct{}) // the test may end before this connection sends anything
	s := newScript(t,
		func(s *stage) {
			s.hear(`{"type":"heartbeat"}`)
			s.stay()
		},
		func(s *stage) {
			close(second)
			s.stay()
		})

	ctx := start(t, New(s.Config))

	select {
	case <-second:
	case <-ctx.Done():
		t.Error("there is no second connection")
	}
}

// So is one that has asked the client to move, and falls silent before the client has found another server.
func TestSilenceEndsAConnectionThatIsLeft(t *testing.T) {
	synctest.Test(t, silenceEndsAConnectionThatIsLeft)
}

func silenceEndsAConnectionThatIsLeft(t *testing.T) {
	defer func(d time.Duration) { maxSilence = d }(maxSilence)
	maxSilence = 50 * time.Millisecond
	s := newScript(t,
		func(s *stage) {
			s.say(`{"type":"reconnect","after_ms":20}`)
			s.stay()
		}) // whoever comes later is not welcomed

	c := New(s.Config)
	ctx := start(t, c)
	isConnected := func(want bool) func(Update) bool {
		return func(u Update) bool {
			s, ok := u.(Status)
			return ok && s.Connected == want
		}
	}
	await(t, ctx, c, "the connection", isConnected(true))
	await(t, ctx, c, "its end", isConnected(false))
}

// The age of a connection is measured by the monotonic clock: by the wall clock, a connection from before the clock was
// set back an hour would seem to be alive for an hour.
func TestHeardAtIsOnTheMonotonicClock(t *testing.T) {
	if at := new(Conn).HeardAt(); at == at.Round(0) {
		t.Errorf("%s has no monotonic reading", at)
	}
}

func TestOnlyANewConnectionMayLowerAVersion(t *testing.T) {
	c := New(Config{})
	c.Subscribe("p")

	take := func(n int64, v Version) int64 {
		c.store(c.conn, &Frame{Type: "count", Count: Count{Page: "p", Count: n, Version: v}})
		got, _ := c.Count("p")
		return got.Count
	}

	c.conn, c.fresh = &Conn{}, map[string]bool{}
	if got := take(5, Version{1, 1}); got != 5 {
		t.Errorf("count %d", got)
	}

	if got := take(0, Version{}); got != 5 {
		t.Errorf("count %d after an old frame of the same connection", got)
	}

	// A new connection may reach a server that has lost all data, and has lower versions.
	c.conn, c.fresh = &Conn{}, map[string]bool{}
	if got := take(0, Version{}); got != 0 {
		t.Errorf("count %d after a server that knows nothing", got)
	}

	c.conn = nil
	c.Unsubscribe("p")
	if _, known := c.Count("p"); known {
		t.Error("the client still knows a page that it left")
	}
}

// calls returns an API whose calls all get the same answer, and a text about the last call.
func calls(status int, header, body string) (*API, *string) {
	asked := new(string)
	web := &http.Client{Transport: answering(func(w http.ResponseWriter, r *http.Request) {
		in, _ := io.ReadAll(r.Body)
		*asked = strings.TrimSpace(fmt.Sprint(r.Method, " ", r.URL.RequestURI(), " ", string(in)))
		for _, name := range []string{
			"X-API-Key", "Headcount-Id", "Headcount-Site", "Authorization", "Idempotency-Key",
		} {
			if v := r.Header.Get(name); v != "" {
				*asked += " " + v
			}
		}

		if name, value, ok := strings.Cut(header, ": "); ok {
			w.Header().Set(name, value)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})}

	return NewAPI(Config{
		URL: "http://server/", APIKey: "key", ID: "id", Site: "site", Token: "token", HTTP: web,
	}), asked
}

// The name of the cookie is a setting of the server. A new id comes in a header of its own, too.
func TestHoldReturnsTheIDWhateverTheCookie(t *testing.T) {
	const page = `{"page":"p","count":1,"updated_at":null,"version":"1-2"}`

	for header, want := range map[string]string{
		"Headcount-Id: new.id":               "new.id",
		"Set-Cookie: headcount_id=new.id":    "new.id",
		"Set-Cookie: headcount_id_s=new.id":  "new.id",
		"Set-Cookie: of_a_proxy=somebody.is": "",
	} {
		a, _ := calls(http.StatusOK, header, page)
		if _, id, err := a.Hold(t.Context(), "p"); err != nil || id != want {
			t.Errorf("%s: the id is %q, %v, want %q", header, id, err, want)
		}
	}
}

var errSeen = errors.New("seen")

func TestCalls(t *testing.T) {
	const page = `{"page":"a/b","count":3,"updated_at":null,"version":"1-2"}`
	const counter = `{"key":"n/1","kind":"sum","value":5,"version":"1-2","member":true}`
	const signed = " key id site Bearer token" // the headers of every call

	for _, tc := range []struct {
		answer string
		call   func(context.Context, *API) (any, error)
		asks   string
		want   string
	}{
		{page, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Count(ctx, "a/b")
			return c.Count, err
		}, "GET /a%2Fb/counter", "3"},
		{`{"counters":[` + page + `]}`, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Counts(ctx, "a/b", "*")
			return len(c), err
		}, "GET /-/counters?page=a%2Fb&page=%2A", "1"},
		{page, func(ctx context.Context, a *API) (any, error) {
			_, id, err := a.Hold(ctx, "a/b")
			return id, err
		}, `PUT /a%2Fb/counter {"action":"increment"}`, "new.id"},
		{page, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Release(ctx, "a/b")
			return c.Version, err
		}, `PUT /a%2Fb/counter {"action":"decrement"}`, "1-2"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Exact(ctx, "n/1")
			return c.Value, err
		}, "GET /api/v1/counters/n%2F1/exact", "5"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Once("o").Increment(ctx, "n/1", 2)
			return c.Replayed, err
		}, `POST /api/v1/counters/n%2F1/increment {"delta":2}`, "true"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Decrement(ctx, "n/1", 2)
			return c.Kind, err
		}, `POST /api/v1/counters/n%2F1/decrement {"delta":2}`, "sum"},
		{`{"counters":[` + counter + `]}`, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Change(ctx, Change{Key: "n/1", Delta: -1})
			return c[0].Value, err
		}, `POST /api/v1/counters {"changes":[{"key":"n/1","delta":-1}]}`, "5"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Set(ctx, "n/1", 0, "r", "b")
			return c.Value, err
		}, `POST /api/v1/counters/n%2F1/set {"value":0,"reason":"r","by":"b"}`, "5"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.Reset(ctx, "n/1", "r", "b")
			return c.Value, err
		}, `POST /api/v1/counters/n%2F1/reset {"reason":"r","by":"b"}`, "5"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.RemoveMember(ctx, "n/1", Me)
			return *c.Member, err
		}, "DELETE /api/v1/counters/n%2F1/members/me", "true"},
		{counter, func(ctx context.Context, a *API) (any, error) {
			c, err := a.EditMembers(ctx, "n/1", []string{"x"}, nil)
			return c.Value, err
		}, `POST /api/v1/counters/n%2F1/members {"add":["x"]}`, "5"},
		{`{"entries":[{"seq":8,"at":"2030-10-10T12:11:42Z","after":3}],"next":8}`,
			func(ctx context.Context, a *API) (any, error) {
				e, next, err := a.Ledger(ctx, "n/1", 7, 1)
				return fmt.Sprint(e[0].After, " ", next), err
			}, "GET /api/v1/counters/n%2F1/ledger?after=7&limit=1", "3 8"},
		{`{"counter":` + counter + `,"reservation":{"id":"a/b","amount":2,"expires_at":"2030-10-10T12:11:42.5Z"}}`,
			func(ctx context.Context, a *API) (any, error) {
				c, r, err := a.Reserve(ctx, "n/1", "a/b", 2, 10*time.Minute)
				return fmt.Sprint(c.Value, " ", r.Amount, " ", r.ExpiresAt.Year()), err
			}, `POST /api/v1/counters/n%2F1/reservations {"id":"a/b","amount":2,"for":"10m0s"}`, "5 2 2030"},
		{`{"counter":` + counter + `,"reservation":{"id":"a/b"}}`, func(ctx context.Context, a *API) (any, error) {
			c, r, err := a.Commit(ctx, "n/1", "a/b")
			return fmt.Sprint(c.Replayed, " ", r.ID), err
		}, "POST /api/v1/counters/n%2F1/reservations/a%2Fb/commit", "true a/b"},
		{`{"counter":` + counter + `,"reservation":{"id":"a/b"}}`, func(ctx context.Context, a *API) (any, error) {
			_, r, err := a.Cancel(ctx, "n/1", "a/b")
			return r.ID, err
		}, "POST /api/v1/counters/n%2F1/reservations/a%2Fb/cancel", "a/b"},
		{`{"reservations":[{"id":"b"}],"next":"b"}`, func(ctx context.Context, a *API) (any, error) {
			open, next, err := a.Reservations(ctx, "n/1", "a/b")
			return fmt.Sprint(open[0].ID, " ", next), err
		}, "GET /api/v1/counters/n%2F1/reservations?after=a%2Fb", "b b"},
		{`{"match":"n/*","counters":2,"value":9}`, func(ctx context.Context, a *API) (any, error) {
			s, err := a.Aggregate(ctx, "n/*")
			return s.Value, err
		}, "GET /api/v1/counters/n%2F%2A/aggregate", "9"},
		{"", func(ctx context.Context, a *API) (any, error) {
			return nil, a.Delete(ctx, "n/1")
		}, "DELETE /api/v1/counters/n%2F1", "<nil>"},
		{`{"allowed":true,"limit":9,"remaining":8,"reset_after_ms":1500}`,
			func(ctx context.Context, a *API) (any, error) {
				return a.Limit(ctx, "l", Limit{Limit: 9, Window: time.Minute, Algorithm: "log"})
			}, `POST /api/v1/limits/l {"limit":9,"window":"1m0s","cost":1,"algorithm":"log"}`, "{true 9 8 1.5s}"},
		{`{"allowed":true,"limit":9,"remaining":9,"reset_after_ms":0}`, func(ctx context.Context, a *API) (any, error) {
			return a.LookAtLimit(ctx, "l", Limit{Limit: 9, Window: time.Minute, Cost: 3})
		}, `POST /api/v1/limits/l {"limit":9,"window":"1m0s","cost":0}`, "{true 9 9 0s}"},
		{"", func(ctx context.Context, a *API) (any, error) {
			return nil, a.ForgetLimit(ctx, "l")
		}, "DELETE /api/v1/limits/l", "<nil>"},
		{"event: counter\nid: 1-2\ndata: " + counter + "\n\n", func(ctx context.Context, a *API) (any, error) {
			n := int64(0)
			err := a.CounterEvents(ctx, "n/1", func(c Counter) error { n = c.Value; return nil })
			if errors.Is(err, ErrStreamEnded) {
				err = nil
			}

			return n, err
		}, "GET /api/v1/counters/n%2F1/events", "5"},
		{`{"points":[{"at":"2030-10-09T00:00:00Z","max":7,"joins":4,"avg":1.25,"person_minutes":1800,"visitors":3},` +
			`{"at":"2030-10-10T00:00:00Z","max":2,"joins":0,"avg":2,"person_minutes":9,"visitors":2}]}`,
			func(ctx context.Context, a *API) (any, error) {
				days, err := a.Days(ctx, "a/b", 1)
				return fmt.Sprint(days[0].PersonMinutes, days[0].Avg, days[1].At.Day()), err
			}, "GET /a%2Fb/stats?last=1d&step=1d", "1800 1.25 10"},
		{`{"users":[{"user":"a","online":true,"since":"2030-10-10T12:11:42Z","pages":2},{"user":"b","online":false}]}`,
			func(ctx context.Context, a *API) (any, error) {
				u, err := a.Users(ctx, "a", "b", "a")
				return fmt.Sprint(u[0].Pages, u[1].Online, u[1].LastSeen.IsZero()), err
			}, "GET /-/users?user=a&user=b&user=a", "2 false true"},
		{"event: user\ndata: {\"user\":\"a\",\"online\":true}\n\n", func(ctx context.Context, a *API) (any, error) {
			var seen User
			err := a.UserEvents(ctx, func(u User) error { seen = u; return errSeen }, "a")
			return fmt.Sprint([]any{seen.User, seen.Online, errors.Is(err, errSeen)}), nil
		}, "GET /-/users/events?user=a", "[a true true]"},
		{"event: top\ndata: {\"top\":[{\"page\":\"p\",\"users\":3}],\"stale\":true}\n\n",
			func(ctx context.Context, a *API) (any, error) {
				var top TopPages
				err := a.TopEvents(ctx, 5, func(l TopPages) error { top = l; return errSeen })
				return fmt.Sprint(top, errors.Is(err, errSeen)), nil
			}, "GET /-/top/events?n=5", "{[{p 3}] true} true"},
	} {
		// The answer to a hold has the user's new id in a cookie.
		header := "Idempotent-Replay: true"
		if strings.HasPrefix(tc.asks, "PUT /a") {
			header = "Set-Cookie: headcount_id_site=new.id; Path=/"
		}

		api, asked := calls(http.StatusOK, header, tc.answer)
		got, err := tc.call(t.Context(), api)
		asks := strings.TrimSuffix(strings.TrimSuffix(*asked, " o"), signed)
		if err != nil || asks != tc.asks || fmt.Sprint(got) != tc.want {
			t.Errorf("asked %q, got %v, %v; want %q and %s", *asked, got, err, tc.asks, tc.want)
		}
	}
}

// A connection that is lost in the middle of an event is an outage, and not a malformed message.
func TestAnEventThatBreaksOffIsNone(t *testing.T) {
	const user = "event: user\ndata: {\"user\":\"a\",\"online\":true}\n\n"
	for cut := range len(user) {
		api, _ := calls(http.StatusOK, "", user+": a comment\n\n"+user[:cut])

		taken := 0
		err := api.UserEvents(t.Context(), func(User) error { taken++; return nil }, "a")
		if !errors.Is(err, ErrStreamEnded) || taken != 1 {
			t.Errorf("a stream that ends %d bytes into its second event: %d events, %v", cut, taken, err)
		}
	}
}

func TestRefusalsAreErrors(t *testing.T) {
	api, _ := calls(http.StatusConflict, "",
		`{"type":"about:blank","title":"Conflict","status":409,"detail":"the floor","key":"stock:1","value":2}`)
	_, err := api.Decrement(t.Context(), "stock:1", 5)
	if e, ok := errors.AsType[*Error](err); !ok || e.Status != 409 || e.Key != "stock:1" || e.Value != 2 ||
		e.Temporary() || e.Error() != "status 409: Conflict: the floor" {
		t.Errorf("Decrement = %v", err)
	}

	// An answer of a proxy may be no JSON: then its text is the error.
	api, _ = calls(http.StatusServiceUnavailable, "Retry-After: 2", "a proxy's page")
	_, err = api.Counter(t.Context(), "n")
	if e, ok := errors.AsType[*Error](err); !ok || e.Status != 503 || e.RetryAfter != 2*time.Second || !e.Temporary() ||
		e.Detail != "a proxy's page" {
		t.Errorf("Counter = %v", err)
	}

	// A refusal by the limit itself is an answer, not an error.
	api, _ = calls(http.StatusTooManyRequests, "", `{"allowed":false,"limit":9,"remaining":0,"reset_after_ms":10}`)
	if v, err := api.Limit(t.Context(), "l", Limit{Limit: 9, Window: time.Second}); err != nil || v.Allowed {
		t.Errorf("Limit = %+v, %v", v, err)
	}

	api, _ = calls(http.StatusTooManyRequests, "", `{"title":"slow down"}`)
	_, err = api.Limit(t.Context(), "l", Limit{Limit: 9, Window: time.Second})
	if err == nil || !err.(*Error).Temporary() {
		t.Errorf("Limit = %v", err)
	}

	// Answers about something else than the counter n.
	for _, answer := range []string{
		"", "[]", `{"key":"another","value":1,"version":"1-1"}`, `{"key":"n","value":1.5,"version":"1-1"}`,
		`{"key":"n","value":1,"version":"1"}`,
	} {
		api, _ = calls(http.StatusOK, "", answer)
		if c, err := api.Counter(t.Context(), "n"); !errors.Is(err, ErrFrame) {
			t.Errorf("Counter of %s = %+v, %v", answer, c, err)
		}
	}
}
