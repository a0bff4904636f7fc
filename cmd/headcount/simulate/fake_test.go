package simulate

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/golang-jwt/jwt/v5"
)

// fake is the contract in its smallest form: one process, one mutex, and every change is
// told. It is honest unless a field says otherwise.
type fake struct {
	*httptest.Server
	heartbeat, pong, grace time.Duration
	secret                 string // of tokens; empty: anonymous ids

	mu       sync.Mutex
	pages    map[string]map[string]int // page, user, joins
	conns    map[*fakeConn]bool
	signing  string // part of every anonymous id
	users    int
	sequence int64
	work     sync.WaitGroup

	// These say how it breaks the contract.
	lie       int64 // added to the count of every page
	starLie   int64 // added to `*`
	backward  bool  // versions fall
	ghosts    bool  // users who do not say that they leave stay counted
	acceptAll bool  // bad pages are accepted
	late      bool  // a join is answered with a count from before it
}

type fakeConn struct {
	ws         *websocket.Conn
	user       string
	joined     map[string]bool
	subscribed map[string]bool
	out        chan []byte
}

const fakeQueue = 1 << 12 // messages; a client that has more pending is cut off

func newFake(t *testing.T) *fake {
	f := &fake{
		heartbeat: 200 * time.Millisecond, pong: 200 * time.Millisecond, grace: 50 * time.Millisecond,
		pages: map[string]map[string]int{}, conns: map[*fakeConn]bool{}, signing: "one",
	}
	f.Server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.CloseClientConnections()
		f.drop()
		f.Close()
		f.work.Wait()
	})
	return f
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/-/ws" {
		f.serve(w, r)
		return
	}
	page, ok := strings.CutSuffix(strings.TrimPrefix(r.URL.EscapedPath(), "/"), "/counter")
	page, err := url.PathUnescape(page)
	if !ok || err != nil {
		http.Error(w, "not found", http.StatusNotFound)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	_, _ = w.Write(f.counter(page, ""))
}

// counter is a page's count as JSON, with a type when it is a frame.
func (f *fake) counter(page, kind string) []byte {
	count := int64(len(f.pages[page])) + f.lie
	if page == wholeSite {
		users := map[string]bool{}
		for _, on := range f.pages {
			for u := range on {
				users[u] = true
			}
		}
		count = int64(len(users)) + f.starLie
	}
	f.sequence++
	seq := f.sequence
	if f.backward {
		seq = 1_000_000 - seq
	}
	m := map[string]any{"page": page, "count": count, "updated_at": nil, "version": fmt.Sprintf("7-%d", seq)}
	if kind != "" {
		m["type"] = kind
	}
	return encode(m)
}

func encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return b
}

func (f *fake) serve(w http.ResponseWriter, r *http.Request) {
	user, id := "", ""
	if f.secret != "" {
		token := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
		if token == "" {
			token = r.URL.Query().Get("token")
		}
		claims := jwt.RegisteredClaims{}
		if _, err := jwt.ParseWithClaims(token, &claims, func(*jwt.Token) (any, error) { return []byte(f.secret), nil }); err != nil {
			http.Error(w, "bad token", http.StatusUnauthorized)
			return
		}
		user = claims.Subject
	} else {
		user, id = f.identify(r.URL.Query().Get("id"))
	}
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{subprotocol}})
	if err != nil {
		return
	}
	c := &fakeConn{ws: ws, user: user, joined: map[string]bool{}, subscribed: map[string]bool{}, out: make(chan []byte, fakeQueue)}
	f.mu.Lock()
	f.conns[c] = true
	c.push(encode(map[string]any{"type": "welcome", "user": user, "id": id, "heartbeat_ms": f.heartbeat.Milliseconds()}))
	c.push(encode(map[string]any{"type": "unread", "count": 0}))
	f.mu.Unlock()

	ctx, cancel := context.WithCancel(context.Background())
	f.work.Go(func() { defer cancel(); f.ping(ctx, ws) })
	f.work.Go(func() { c.write(ctx) })
	f.work.Add(1)
	defer f.work.Done()
	defer cancel()
	for {
		_, msg, err := ws.Read(context.Background())
		if err != nil {
			f.ended(c)
			return
		}
		f.take(c, msg)
	}
}

func (f *fake) identify(sent string) (user, id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if user, signing, ok := strings.Cut(sent, "."); ok && signing == f.signing {
		return user, sent
	}
	f.users++
	user = fmt.Sprint("anon", f.users)
	return user, user + "." + f.signing
}

func (f *fake) ping(ctx context.Context, ws *websocket.Conn) {
	tick := time.NewTicker(f.heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		limit, cancel := context.WithTimeout(ctx, f.pong)
		err := ws.Ping(limit)
		cancel()
		if err != nil {
			_ = ws.CloseNow()
			return
		}
	}
}

func (c *fakeConn) push(msg []byte) {
	select {
	case c.out <- msg:
	default:
		go c.ws.CloseNow()
	}
}

func (c *fakeConn) write(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case msg := <-c.out:
			if c.ws.Write(context.Background(), websocket.MessageText, msg) != nil {
				return
			}
		}
	}
}

func (f *fake) take(c *fakeConn, msg []byte) {
	var m struct {
		Type, Page string
		Pages      []string
	}
	if err := json.Unmarshal(msg, &m); err != nil {
		panic(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch m.Type {
	case "join":
		if !validPage(m.Page) && !f.acceptAll {
			c.push(encode(map[string]any{"type": "error", "code": "bad_page", "message": "too <long>", "page": m.Page}))
			return
		}
		if f.late {
			c.push(f.counter(m.Page, "count"))
		}
		if !c.joined[m.Page] {
			c.joined[m.Page] = true
			f.change(m.Page, c.user, 1, c)
		}
		c.push(f.counter(m.Page, "count"))
	case "leave":
		if c.joined[m.Page] {
			delete(c.joined, m.Page)
			f.change(m.Page, c.user, -1, nil)
		}
	case "subscribe":
		for _, page := range m.Pages {
			c.subscribed[page] = true
			c.push(f.counter(page, "count"))
		}
	case "heartbeat":
		c.push([]byte(`{"type":"heartbeat"}`))
	}
}

// change moves a user in or out and tells everyone but one.
func (f *fake) change(page, user string, by int, but *fakeConn) {
	if f.pages[page] == nil {
		f.pages[page] = map[string]int{}
	}
	if f.pages[page][user] += by; f.pages[page][user] == 0 {
		delete(f.pages[page], user)
	}
	for c := range f.conns {
		if (c.joined[page] || c.subscribed[page]) && c != but {
			c.push(f.counter(page, "count"))
		}
		if c.subscribed[wholeSite] {
			c.push(f.counter(wholeSite, "count"))
		}
	}
}

// ended keeps the user of a lost connection for the grace.
func (f *fake) ended(c *fakeConn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.conns, c)
	if f.ghosts {
		return
	}
	pages := maps.Clone(c.joined)
	f.work.Go(func() {
		time.Sleep(f.grace)
		f.mu.Lock()
		defer f.mu.Unlock()
		for page := range pages {
			f.change(page, c.user, -1, nil)
		}
	})
}

// drop cuts every connection, as a gateway that is killed does.
func (f *fake) drop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		go c.ws.CloseNow()
	}
}

// tell sends a message to every connection.
func (f *fake) tell(msg string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for c := range f.conns {
		c.push([]byte(msg))
	}
}

// set changes a field while the server runs.
func (f *fake) set(change func(*fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

// proxy is a second way to the server that can die.
func proxy(t *testing.T, target string) (address string, stop func()) {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var open []net.Conn
	var work sync.WaitGroup
	work.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", u.Host)
			if err != nil {
				in.Close()
				return
			}
			mu.Lock()
			open = append(open, in, out)
			mu.Unlock()
			work.Go(func() { _, _ = io.Copy(in, out); in.Close() })
			work.Go(func() { _, _ = io.Copy(out, in); out.Close() })
		}
	})
	stop = sync.OnceFunc(func() {
		listener.Close()
		mu.Lock()
		defer mu.Unlock()
		for _, c := range open {
			c.Close()
		}
	})
	t.Cleanup(func() { stop(); work.Wait() })
	return "http://" + listener.Addr().String(), stop
}
