package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
)

// A Config has the address of a server and the client's credentials. Only URL is required.
type Config struct {
	URL    string // of a gateway: http://host:port or https://host
	Token  string // a JWT that identifies the user, if the server requires one
	ID     string // the signed id of an anonymous user, from Frame.ID or API.Hold
	APIKey string // for calls that only servers may make
	Site   string // a site of the server's --site; empty: the first one

	// Welcomed is Conn.Welcomed of the client's connection before; zero: there was none. A server that was restarted
	// since then learns from it that its counts lack users.
	Welcomed time.Time

	// DialContext opens the connection below WebSocket and TLS; nil: a net.Dialer does.
	DialContext func(ctx context.Context, network, address string) (net.Conn, error)
	// HTTP makes the calls of an API; nil: http.DefaultClient.
	HTTP *http.Client
}

func (c *Config) sign(header http.Header) {
	for name, value := range map[string]string{"X-API-Key": c.APIKey, "Headcount-Site": c.Site} {
		if value != "" {
			header.Set(name, value)
		}
	}

	if c.Token != "" {
		header.Set("Authorization", "Bearer "+c.Token)
	}
}

func (c *Config) address(path string) string { return strings.TrimRight(c.URL, "/") + path }

const (
	subprotocol  = "headcount.v1"
	dialTimeout  = 10 * time.Second // for the connection, its upgrade and the welcome
	writeTimeout = 5 * time.Second
	closeTimeout = 5 * time.Second // for the answer to a close frame
)

// loaded is a time on the monotonic clock, since the wall clock may be set.
var loaded = time.Now()

// A Conn is one WebSocket connection. Most programs use a Client, which keeps a Conn.
// One goroutine at a time may call Receive; any goroutine may call the other methods.
type Conn struct {
	User      string        // the user of the connection, according to the server
	ID        string        // the id of an anonymous user, for Config.ID of the next connection
	Heartbeat time.Duration // the server shows a sign of life at least this often
	Welcomed  time.Time     // when the connection began, for Config.Welcomed of the next connection

	ws    *websocket.Conn
	conn  net.Conn
	ahead []byte       // bytes read together with the answer to the handshake
	heard atomic.Int64 // when bytes were last received, since loaded

	mu     sync.Mutex // held while a frame is written
	closed bool       // the close frame was sent, so nothing may follow
}

// Dial opens a connection and waits for the server's welcome. ctx applies to Dial only, not to
// the connection. If the server refuses the upgrade, the error is an *Error.
func Dial(ctx context.Context, cfg Config) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()

	header := http.Header{}
	cfg.sign(header)

	c := &Conn{}
	// http.Transport would hide the socket, and keep two goroutines and two buffers.
	transport := roundTripper(func(req *http.Request) (*http.Response, error) {
		return c.handshake(req, cfg.DialContext)
	})
	ws, resp, err := websocket.Dial(ctx, cfg.address("/-/ws"+cfg.query()), &websocket.DialOptions{
		HTTPClient:   &http.Client{Transport: transport, CheckRedirect: checkRedirect},
		HTTPHeader:   header,
		Subprotocols: []string{subprotocol},
	})
	if err != nil {
		return nil, c.notDialed(cfg, resp, err)
	}

	c.ws = ws

	// A read knows no context; a deadline in the past ends it.
	stop := context.AfterFunc(ctx, func() { _ = c.conn.SetReadDeadline(time.Unix(1, 0)) })
	var f Frame

	err = c.Receive(&f)
	// Something else that speaks WebSocket may answer, such as another service behind the same proxy.
	if err == nil && f.Type != "welcome" {
		err = fmt.Errorf("%w: the first frame is no welcome but %q", ErrFrame, f.Type)
	}

	// The deadline is or will be set, so the connection is of no use, even if the welcome has come.
	if !stop() && err == nil {
		err = ctx.Err()
	}

	if err != nil {
		c.Abort()
		return nil, fmt.Errorf("wait for the welcome of %s: %w", cfg.URL, err)
	}

	c.User = f.User
	c.ID = f.ID
	c.Heartbeat = f.Heartbeat
	c.Welcomed = time.Now()

	return c, nil
}

// query returns the query of the URL of a connection: what browsers say there, since they cannot set the headers of an
// upgrade.
func (c *Config) query() string {
	says := url.Values{}
	if c.ID != "" {
		says.Set("id", c.ID)
	}
	if !c.Welcomed.IsZero() {
		says.Set("back", strconv.FormatInt(time.Since(c.Welcomed).Milliseconds(), 10))
	}

	if len(says) == 0 {
		return ""
	}

	return "?" + says.Encode()
}

// notDialed closes what the handshake has opened, and returns why there is no WebSocket.
func (c *Conn) notDialed(cfg Config, resp *http.Response, err error) error {
	// The body that the library has closed is a copy, so the socket is still open.
	if c.conn != nil {
		_ = c.conn.Close()
	}

	// A refusal has a problem as its body, which says more than the library's error.
	if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
		return errorOf(resp)
	}

	return fmt.Errorf("dial %s: %w", cfg.URL, err)
}

// checkRedirect ends a loop of redirects as net/http does, whose own check the WebSocket library replaces. What the
// server gave to the caller goes to no other host: net/http withholds only the headers that it knows.
func checkRedirect(req *http.Request, via []*http.Request) error {
	if len(via) == 10 {
		return errors.New("stopped after 10 redirects")
	}

	// The port may differ: http to https on one host is such a redirect.
	if req.URL.Hostname() != via[0].URL.Hostname() {
		req.Header.Del("X-API-Key")
		req.Header.Del("Headcount-Id")
	}

	return nil
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func (c *Conn) handshake(
	req *http.Request, dial func(context.Context, string, string) (net.Conn, error),
) (*http.Response, error) {
	ctx := req.Context()
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}

	port := cmp.Or(req.URL.Port(), map[string]string{"http": "80", "https": "443"}[req.URL.Scheme])
	conn, err := dial(ctx, "tcp", net.JoinHostPort(req.URL.Hostname(), port))
	if err != nil {
		return nil, err
	}

	if c.conn != nil {
		_ = c.conn.Close() // it answered with a redirect
	}

	c.conn = conn
	if req.URL.Scheme == "https" {
		// HTTP/2 must not be negotiated: this handshake is written as HTTP/1.1.
		secure := tls.Client(conn, &tls.Config{ServerName: req.URL.Hostname(), NextProtos: []string{"http/1.1"}})
		if err := secure.HandshakeContext(ctx); err != nil {
			return nil, fmt.Errorf("TLS with %s: %w", req.URL.Host, err)
		}
		c.conn = secure
	}

	// Unlike the read of the welcome, the handshake also writes, so both directions get the deadline.
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()

	if err := req.Write(c.conn); err != nil {
		return nil, fmt.Errorf("write the handshake: %w", err)
	}

	// Small, because its buffer lives as long as ahead has bytes of it.
	br := bufio.NewReaderSize(c.conn, 1024)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, fmt.Errorf("read the answer to the handshake: %w", err)
	}

	// The body must not need the socket, which the next redirect or notDialed closes.
	if resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem))
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return resp, nil
	}

	// A server may send its welcome in the same packet as the answer.
	c.ahead, _ = br.Peek(br.Buffered()) // a peek at buffered bytes cannot fail
	c.heard.Store(int64(time.Since(loaded)))

	resp.Body = (*wire)(c)
	return resp, nil
}

// A wire is the connection as the WebSocket library uses it.
type wire Conn

func (w *wire) Read(p []byte) (int, error) {
	if len(w.ahead) > 0 {
		n := copy(p, w.ahead)
		w.ahead = w.ahead[n:]
		if len(w.ahead) == 0 {
			w.ahead = nil // frees the buffer
		}

		return n, nil
	}

	// Each byte counts here, also pings, which never reach Receive.
	n, err := w.conn.Read(p)
	if n > 0 {
		w.heard.Store(int64(time.Since(loaded)))
	}

	return n, err
}

func (w *wire) Write(p []byte) (int, error) {
	// Send and Close write without a context that ends, so the bound of a write is here.
	if err := w.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return 0, err
	}

	return w.conn.Write(p)
}

func (w *wire) Close() error { return w.conn.Close() }

// buffers hold messages while they are parsed, so that a waiting connection has no buffer.
var buffers = sync.Pool{New: func() any { return bytes.NewBuffer(make([]byte, 0, 512)) }}

// Receive waits for the next frame. After an error that wraps ErrFrame the connection can
// still be used; after any other error it cannot.
func (c *Conn) Receive(f *Frame) error {
	_, r, err := c.ws.Reader(context.Background())
	if err != nil {
		return err
	}

	// The buffer is taken after the frame has begun, so a connection that waits has none.
	buf := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(buf)
	buf.Reset()

	// The library bounds a message at 32 KiB, and ends the connection beyond.
	if _, err := buf.ReadFrom(r); err != nil {
		return err
	}

	return ParseFrame(buf.Bytes(), f)
}

// HeardAt returns when data of the server last arrived, including pings.
func (c *Conn) HeardAt() time.Time { return loaded.Add(time.Duration(c.heard.Load())) }

// Join makes the user present on a page, and subscribes to its count.
func (c *Conn) Join(page string) error { return c.page("join", page) }

// Leave ends the user's presence on a page, and the subscription that Join made.
func (c *Conn) Leave(page string) error { return c.page("leave", page) }

// Read marks the user's unread notifications of a page as read, or all if page is empty.
func (c *Conn) Read(page string) error {
	if page == "" {
		return c.Send([]byte(`{"type":"read"}`))
	}

	return c.page("read", page)
}

func (c *Conn) page(kind, page string) error {
	return c.Send(fmt.Appendf(nil, `{"type":%q,"page":%s}`, kind, quote(page)))
}

// Subscribe asks for the counts of pages; "*" is the whole site.
func (c *Conn) Subscribe(pages ...string) error {
	return c.Send(topicFrames("subscribe", "pages", pages)...)
}

// Unsubscribe ends subscriptions to counts.
func (c *Conn) Unsubscribe(pages ...string) error {
	return c.Send(topicFrames("unsubscribe", "pages", pages)...)
}

// SubscribeCounters asks for counters.
func (c *Conn) SubscribeCounters(keys ...string) error {
	return c.Send(topicFrames("subscribe", "counters", keys)...)
}

// UnsubscribeCounters ends subscriptions to counters.
func (c *Conn) UnsubscribeCounters(keys ...string) error {
	return c.Send(topicFrames("unsubscribe", "counters", keys)...)
}

// Beat asks for a sign of life.
func (c *Conn) Beat() error { return c.Send([]byte(`{"type":"heartbeat"}`)) }

// Send writes frames as they are. After an error the connection cannot be used any more, and
// Receive returns an error, too.
func (c *Conn) Send(frames ...[]byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.closed {
		return net.ErrClosed
	}

	for _, frame := range frames {
		if err := c.ws.Write(context.Background(), websocket.MessageText, frame); err != nil {
			// A frame may be written in part, so what follows it could not be parsed.
			_ = c.conn.Close()
			return err
		}
	}

	return nil
}

// closeFrame is a whole close frame, status 1000, masked with zeros.
var closeFrame = []byte{0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe8}

// Close sends a close frame. It does not wait: Receive returns an error when the server
// has answered, or after five seconds.
func (c *Conn) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.closed {
		return
	}

	c.closed = true
	// Without the deadline Receive would wait for ever for a server that does not answer.
	_ = c.conn.SetReadDeadline(time.Now().Add(closeTimeout))

	// Bypass the library, whose Close waits for the answer.
	_, err := (*wire)(c).Write(closeFrame)
	if err != nil {
		_ = c.conn.Close()
	}
}

// Abort ends the connection at once, without a close frame.
func (c *Conn) Abort() {
	// Dial aborts before there is a WebSocket, if the welcome does not come.
	if c.ws != nil {
		_ = c.ws.CloseNow()
	}

	_ = c.conn.Close()
}
