package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"headcount/internal/testkit"
)

// frame is one message of the server.
type frame struct {
	at   time.Time // when it was read
	text string
	member
}

// member has the members of all types of frames.
type member struct {
	Type        string  `json:"type"`
	User        string  `json:"user"`
	ID          *string `json:"id"`
	HeartbeatMS int64   `json:"heartbeat_ms"`
	AfterMS     *int64  `json:"after_ms"`
	Code        string  `json:"code"`
	Message     string  `json:"message"`
	Page        *string `json:"page"`
	Count       *int    `json:"count"`
	UpdatedAt   *string `json:"updated_at"`
	Version     string  `json:"version"`
	Stale       bool    `json:"stale"`

	// Only counters have these members.
	Key     string  `json:"key"`
	Kind    string  `json:"kind"`
	Value   int64   `json:"value"`
	Exact   bool    `json:"exact"`
	Mine    bool    `json:"mine"`
	Counter *string `json:"counter"`
}

// isCount reports whether f is the count of a page.
func (f frame) isCount(page string) bool {
	return f.Type == "count" && f.Page != nil && *f.Page == page
}

// counts is isCount with a count.
func (f frame) counts(page string, n int) bool { return f.isCount(page) && *f.Count == n }

// client is a WebSocket that answers pings and keeps the received frames.
type client struct {
	t    testing.TB
	ws   *websocket.Conn
	resp *http.Response // of the handshake
	user string
	id   string // signed

	mu     sync.Mutex
	frames []frame
	next   int           // the first frame that take has not returned
	end    error         // why reading ended
	more   chan struct{} // closed, and replaced by a new one, with each frame
}

// dialer says how to connect. Every field may be zero.
type dialer struct {
	addr      string // in place of the server's
	query     string // without ?
	headers   []string
	protocols []string
	unread    int // the user's unread count
}

// dial connects, and checks the frames welcome and unread.
func (s *server) dial(t testing.TB, d dialer) *client {
	t.Helper()
	c, err := s.connect(d)
	if err != nil {
		t.Fatal(err)
	}
	c.t = t
	t.Cleanup(func() { c.ws.CloseNow() })

	w := c.take("welcome")
	if w.Type != "welcome" || w.User == "" || w.HeartbeatMS <= 0 {
		t.Fatalf("the first frame is %s", w.text)
	}
	c.user = w.User
	if w.ID != nil {
		c.id = *w.ID
	}

	if u := c.take("unread"); u.text != fmt.Sprintf(`{"type":"unread","count":%d}`, d.unread) {
		t.Fatalf("the second frame is %s", u.text)
	}

	return c
}

// ws dials as a new anonymous user.
func (s *server) ws(t testing.TB) *client {
	t.Helper()
	return s.dial(t, dialer{})
}

// again dials as c's user, as another tab does.
func (s *server) again(t testing.TB, c *client) *client {
	t.Helper()
	o := s.dial(t, dialer{query: "id=" + c.id})
	if o.user != c.user {
		t.Fatalf("user %q came back as %q", c.user, o.user)
	}

	return o
}

func (s *server) connect(d dialer) (*client, error) {
	addr := s.addr
	if d.addr != "" {
		addr = d.addr
	}

	url := "ws://" + addr + "/-/ws"
	if d.query != "" {
		url += "?" + d.query
	}

	opts := &websocket.DialOptions{Subprotocols: d.protocols, HTTPHeader: http.Header{}, HTTPClient: plain}
	for _, line := range d.headers {
		name, value, _ := strings.Cut(line, ": ")
		if name == "Host" {
			opts.Host = value
		} else {
			opts.HTTPHeader.Add(name, value)
		}
	}

	ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
	defer cancel()
	ws, resp, err := websocket.Dial(ctx, url, opts)
	if err != nil {
		return &client{resp: resp}, err
	}

	ws.SetReadLimit(1 << 20)
	c := &client{ws: ws, resp: resp, more: make(chan struct{})}
	go c.read() // ends with the connection
	return c, nil
}

var plain = &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}

func (c *client) read() {
	for {
		kind, text, err := c.ws.Read(context.Background())

		f := frame{at: time.Now(), text: string(text)}
		if err == nil && kind != websocket.MessageText {
			err = errors.New("the server sent a binary message")
		}
		if err == nil {
			err = json.Unmarshal(text, &f.member)
			if err != nil {
				err = fmt.Errorf("%w in %q", err, text)
			}
		}

		c.mu.Lock()
		if err != nil {
			c.end = err
		} else {
			c.frames = append(c.frames, f)
		}
		close(c.more)
		c.more = make(chan struct{})
		c.mu.Unlock()

		if err != nil {
			return
		}
	}
}

// poll returns the next frame, if it comes before by.
func (c *client) poll(by time.Time) (frame, bool, error) {
	timer := time.NewTimer(time.Until(by))
	defer timer.Stop()
	for {
		c.mu.Lock()
		if c.next < len(c.frames) {
			f := c.frames[c.next]
			c.next++
			c.mu.Unlock()
			return f, true, nil
		}
		more := c.more
		end := c.end
		c.mu.Unlock()

		if end != nil {
			return frame{}, false, end
		}
		select {
		case <-more:
		case <-timer.C:
			return frame{}, false, nil
		}
	}
}

// take returns the next frame.
func (c *client) take(what string) frame {
	c.t.Helper()
	f, ok, err := c.poll(time.Now().Add(testkit.Timeout))
	if !ok {
		c.t.Fatalf("no %s: %v", what, err)
	}

	return f
}

// await skips frames until the wanted one.
func (c *client) await(what string, want func(frame) bool) frame {
	c.t.Helper()
	var seen []string
	for end := time.Now().Add(testkit.Timeout); ; {
		f, ok, err := c.poll(end)
		if !ok {
			c.t.Fatalf("no %s: %v; there were %.1000q", what, err, seen)
		}
		if want(f) {
			return f
		}
		seen = append(seen, f.text)
	}
}

// awaitCount skips frames until the page's count is n.
func (c *client) awaitCount(page string, n int) frame {
	c.t.Helper()
	return c.await(fmt.Sprintf("count %d of %q", n, page), func(f frame) bool { return f.counts(page, n) })
}

// takeCount returns the next frame, which must be the page's count n.
func (c *client) takeCount(page string, n int) frame {
	c.t.Helper()
	f := c.take(fmt.Sprintf("count %d of %q", n, page))
	if !f.counts(page, n) {
		c.t.Fatalf("want count %d of %q next, got %s", n, page, f.text)
	}
	return f
}

// takeError returns the next frame, which must be this error.
func (c *client) takeError(code string) frame {
	c.t.Helper()
	f := c.take("error " + code)
	if f.Type != "error" || f.Code != code || f.Message == "" {
		c.t.Fatalf("want error %s next, got %s", code, f.text)
	}
	return f
}

func (c *client) send(text string) {
	c.t.Helper()
	c.write(websocket.MessageText, []byte(text))
}

func (c *client) write(kind websocket.MessageType, p []byte) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
	defer cancel()
	if err := c.ws.Write(ctx, kind, p); err != nil {
		c.t.Fatalf("send %.100q: %v", p, err)
	}
}

// quoted returns v as JSON.
func quoted(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func (c *client) join(page string) {
	c.t.Helper()
	c.send(`{"type":"join","page":` + quoted(page) + `}`)
}

func (c *client) leave(page string) {
	c.t.Helper()
	c.send(`{"type":"leave","page":` + quoted(page) + `}`)
}

func (c *client) subscribe(pages ...string) {
	c.t.Helper()
	c.send(`{"type":"subscribe","pages":` + quoted(pages) + `}`)
}

// silent checks that the client has received nothing else: the next frame must be the answer to a heartbeat.
func (c *client) silent() {
	c.t.Helper()
	c.send(`{"type":"heartbeat"}`)
	if f := c.take("heartbeat"); f.text != `{"type":"heartbeat"}` {
		c.t.Fatalf("want the answer to a heartbeat next, got %s", f.text)
	}
}

// skim sends a heartbeat and returns the frames before the answer.
func (c *client) skim() []frame {
	c.t.Helper()
	c.send(`{"type":"heartbeat"}`)

	var before []frame
	c.await("answer to a heartbeat", func(f frame) bool {
		if f.Type == "heartbeat" {
			return true
		}
		before = append(before, f)
		return false
	})

	return before
}

// during returns the frames that arrive before until.
func (c *client) during(until time.Time) []frame {
	c.t.Helper()
	var all []frame
	for {
		f, ok, err := c.poll(until)
		if err != nil {
			c.t.Fatal(err)
		}
		if !ok {
			return all
		}
		all = append(all, f)
	}
}

// close ends the connection as a closed tab does.
func (c *client) close() { c.ws.CloseNow() }

// refused dials, and returns the HTTP answer with which the server refuses.
func (s *server) refused(t testing.TB, d dialer) answer {
	t.Helper()
	c, err := s.connect(d)
	if err == nil {
		c.ws.CloseNow()
		t.Fatal("the upgrade was not refused")
	}
	if c.resp == nil {
		t.Fatal(err)
	}

	body, err := io.ReadAll(c.resp.Body) // the library keeps its first KiB
	if err != nil {
		t.Fatal(err)
	}

	return answer{c.resp.StatusCode, c.resp.Header, string(body)}
}

// rawSocket is a WebSocket over which a test sends any bytes, and from which nobody reads.
type rawSocket struct {
	net.Conn
	t testing.TB
}

// rawWS opens a rawSocket. rcvbuf, unless 0, bounds the kernel's receive buffer.
func (s *server) rawWS(t testing.TB, rcvbuf int) *rawSocket {
	t.Helper()
	c := s.rawDial(t)
	if rcvbuf > 0 {
		if err := c.(*net.TCPConn).SetReadBuffer(rcvbuf); err != nil {
			t.Fatal(err)
		}
	}

	_ = c.SetDeadline(time.Now().Add(testkit.Timeout))
	fmt.Fprintf(c, "GET /-/ws HTTP/1.1\r\nHost: %s\r\nUpgrade: websocket\r\nConnection: "+
		"Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", s.addr)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}

	if resp.StatusCode != http.StatusSwitchingProtocols ||
		resp.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		t.Fatalf("handshake: %s %v", resp.Status, resp.Header)
	}

	_ = c.SetDeadline(time.Time{})
	return &rawSocket{Conn: c, t: t}
}

func (w *rawSocket) send(first byte, payload string) {
	w.t.Helper()
	_ = w.SetWriteDeadline(time.Now().Add(testkit.Timeout))
	if _, err := w.Write(testkit.ClientFrame(first, payload)); err != nil {
		w.t.Fatal(err)
	}
}

// event is one server-sent event.
type event struct {
	at   time.Time
	name string
	id   string
	data string
	counter
}

// stream is an event stream.
type stream struct {
	t      testing.TB
	resp   *http.Response
	events chan event
	ended  chan struct{} // closed at the end of the stream
}

// sse opens an event stream; path is everything after the host.
func (s *server) sse(t testing.TB, path string, headers ...string) *stream {
	t.Helper()
	req, err := request("GET", s.url+path, "", headers...)
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	resp, err := plain.Do(req.WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(resp.Body)
		t.Fatalf("event stream: %s: %s", resp.Status, body)
	}

	st := &stream{
		t: t, resp: resp, events: make(chan event, 10_000), ended: make(chan struct{}),
	}

	go st.read() // ends with the stream
	return st
}

func (st *stream) read() {
	defer close(st.ended)
	var e event
	var data bytes.Buffer
	lines := bufio.NewReader(st.resp.Body)

	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return
		}

		line = strings.TrimRight(line, "\r\n")
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "":
			if data.Len() > 0 {
				e.at, e.data = time.Now(), data.String()
				if err := json.Unmarshal(data.Bytes(), &e.counter); err != nil {
					e.data = err.Error() + " in " + e.data
				}
				st.events <- e
			}
			e = event{}
			data.Reset()
		case name == "event":
			e.name = value
		case name == "id":
			e.id = value
		case name == "data":
			data.WriteString(value)
		}
	}
}

// take returns the next event, which must be a complete count.
func (st *stream) take() event {
	st.t.Helper()
	select {
	case e := <-st.events:
		c := decodeCounter(st.t, e.data)
		if e.name != "count" || e.id != c.Version {
			st.t.Fatalf("event %q with id %q and data %s", e.name, e.id, e.data)
		}
		return e
	case <-st.ended:
		st.t.Fatal("the stream ended")
	case <-time.After(testkit.Timeout):
		st.t.Fatal("no event")
	}
	return event{}
}

// awaitCount skips events until the count is n.
func (st *stream) awaitCount(n int) event {
	st.t.Helper()
	for {
		e := st.take()
		if e.Count == n {
			return e
		}
	}
}

// end waits for the server to end the stream.
func (st *stream) end() {
	st.t.Helper()
	select {
	case <-st.ended:
	case <-time.After(testkit.Timeout):
		st.t.Fatal("the stream does not end")
	}
}
