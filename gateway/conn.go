package gateway

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"
	"github.com/gin-gonic/gin"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	maxErrors = 20 // the last of these in a connection's life closes it

	// A client may send this many messages a second, and this many at once: far
	// more than a page needs, and no more than it costs others little.
	messageRate  = 500
	messageBurst = 2000

	// lingerClose is how long a closed client may take to close its side, so that
	// the close frame reaches it before the end of the connection does.
	lingerClose = time.Second

	farOff = 100 * 365 * 24 * time.Hour // no connection lasts longer
)

// conn is one client's connection: a WebSocket, or an event stream, which only
// receives. Its reader is the one goroutine that lives as long as it does.
type conn struct {
	g       *Gateway
	shard   *shard
	wire    *wire
	ws      *websocket.Conn // nil for an event stream
	user    presence.User
	events  bool
	expires time.Duration // when the token ends, by the shard's clock; 0: never
	heardAt atomic.Int64  // last sign of life, by the shard's clock
	ended   atomic.Bool   // a close frame has been sent, or is about to be

	// Guarded by the shard's lock.
	places []place
	index  int           // in shard.conns
	pass   uint32        // the last pass that had something for it …
	tail   int32         // … and the last delivery in it
	missed bool          // a delivery was not written
	pinged time.Duration // an unanswered ping was sent then; 0: none

	// The reader's own.
	errors int
	tokens float64 // of the message rate
	filled time.Duration
}

func (c *conn) heard() time.Duration { return time.Duration(c.heardAt.Load()) }

func (c *conn) alive() { c.heardAt.Store(int64(c.shard.now())) }

func (c *conn) expired(now time.Duration) bool {
	return c.expires != 0 && now >= c.expires && !c.ended.Load()
}

// hijack takes over the client's connection with buffers as small as the
// messages are. It is the http.ResponseWriter the WebSocket library is given.
type hijack struct {
	gin.ResponseWriter
	g    *Gateway
	wire *wire
}

const (
	readBuffer  = 256 // client messages are short
	writeBuffer = 128 // the library writes only control frames: at most 2 + 125 bytes
)

// Hijack implements http.Hijacker.
func (h *hijack) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := h.ResponseWriter.Hijack()
	if err != nil {
		return nil, nil, err
	}
	early, err := rw.Reader.Peek(rw.Reader.Buffered()) // what the client sent without waiting
	if err != nil {
		return nil, nil, err
	}
	h.wire = newWire(c, h.g.cfg.WriteTimeout, h.g.conns.Go)
	r := bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(early)), h.wire), max(readBuffer, len(early)))
	if _, err := r.Peek(len(early)); err != nil {
		return nil, nil, err
	}
	return h.wire, bufio.NewReadWriter(r, bufio.NewWriterSize(h.wire, writeBuffer)), nil
}

// open makes the connection known to its shard.
func (g *Gateway) open(w *wire, user presence.User, expires time.Time) *conn {
	s := g.hub.shards[g.hub.next.Add(1)%uint64(len(g.hub.shards))]
	c := &conn{g: g, shard: s, wire: w, user: user, tokens: messageBurst}
	if !expires.IsZero() {
		// time.Until ends at 292 years, and the sum must not overflow.
		c.expires = max(s.now()+min(time.Until(expires), farOff), 1)
	}
	c.alive()
	w.freed = func() { s.freed(c) }
	return c
}

// enter has the connection served; Drain, which may have looked already, misses none.
func (g *Gateway) enter(c *conn) {
	c.shard.add(c)
	if g.draining.Load() {
		c.endSoon(websocket.StatusServiceRestart, "this gateway is shutting down")
	}
}

// serveSocket speaks with a client until the connection ends.
func (c *conn) serveSocket(id Identity) {
	defer c.g.leave(c)
	hello := appendWelcome(nil, id, c.g.cfg.PingInterval)
	hello = appendFrame(appendFrame(nil, frameText, hello), frameText, appendUnread(nil, 0))
	_, err := c.wire.Write(hello)
	for err == nil && !c.ended.Load() {
		err = c.read()
	}
	c.shut(err)
}

var messageBuffers = sync.Pool{New: func() any { return new([maxMessage + 1]byte) }}

// read waits for one message and does what it says.
func (c *conn) read() error {
	kind, r, err := c.ws.Reader(context.Background())
	if err != nil {
		return err
	}
	buf := messageBuffers.Get().(*[maxMessage + 1]byte)
	defer messageBuffers.Put(buf)
	n := 0
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
		c.alive() // a part of a message is a sign of life, too
	}
	// The end of a message is io.EOF itself; that of the connection wraps it.
	if err != nil && err != io.EOF { //nolint:errorlint
		return err
	}
	c.g.metrics.received.Add(1)
	switch {
	case n > maxMessage:
		c.fault(&fault{code: codeTooLarge, message: "a message is at most 4096 bytes"})
		return c.end(websocket.StatusMessageTooBig, "message over 4096 bytes")
	case kind == websocket.MessageBinary:
		return c.fault(&fault{code: codeBinary, message: "binary messages have no meaning here; send JSON text"})
	case !utf8.Valid(buf[:n]):
		return c.end(websocket.StatusInvalidFramePayloadData, "invalid UTF-8")
	case !c.allow():
		return c.fault(&fault{code: codeRateLimited, message: "too many messages; at most 500 a second"})
	}
	m, err := parseMessage(buf[:n])
	if err == nil {
		err = c.do(m)
	}
	var f *fault
	if errors.As(err, &f) {
		return c.fault(f)
	}
	return err
}

// allow takes a token of the message rate.
func (c *conn) allow() bool {
	now := c.shard.now()
	c.tokens = min(messageBurst, c.tokens+(now-c.filled).Seconds()*messageRate)
	c.filled = now
	if c.tokens < 1 {
		return false
	}
	c.tokens--
	return true
}

// do carries out a message. A *fault is the client's, anything else ends the
// connection.
func (c *conn) do(m message) error {
	switch m.kind {
	case typeJoin:
		page := m.pages[0]
		fresh, err := c.shard.join(c, page)
		if err != nil {
			return tooManyPages(page)
		}
		if fresh && c.g.roster.join(c.user, page, c) {
			c.g.joined(c, page, presence.Count{})
		}
	case typeLeave:
		if c.shard.leave(c, m.pages[0]) {
			c.g.roster.leave(c.user, m.pages[0], c, false)
		}
	case typeSubscribe:
		if err := c.shard.watch(c, m.pages); err != nil {
			return tooManyPages("")
		}
	case typeUnsubscribe:
		c.shard.unwatch(c, m.pages)
	case typeHeartbeat:
		return c.send([]byte(`{"type":"heartbeat"}`))
	case typeRead: // nothing can be followed yet, so nothing is unread
		return c.send(appendUnread(nil, 0))
	}
	return nil
}

func tooManyPages(page string) *fault {
	return &fault{
		code:    codeTooManyPages,
		message: "a connection may join and subscribe to at most 100 pages; leave some or open another connection",
		page:    page,
		hasPage: page != "",
	}
}

// send writes a message; it waits while the client does not take what it got.
func (c *conn) send(text []byte) error {
	_, err := c.wire.Write(appendFrame(nil, frameText, text))
	return err
}

// fault tells the client of its mistake, and closes at the twentieth.
func (c *conn) fault(f *fault) error {
	c.g.metrics.faults.WithLabelValues(f.code).Inc()
	if err := c.send(f.appendJSON(nil)); err != nil {
		return err
	}
	if c.errors++; c.errors < maxErrors || f.code == codeTooLarge {
		return nil
	}
	last := fault{code: codeTooManyErrors, message: "too many errors on one connection"}
	if err := c.send(last.appendJSON(nil)); err != nil {
		return err
	}
	return c.end(websocket.StatusPolicyViolation, "too many errors")
}

// end sends a close frame; the reader stops when it has returned.
func (c *conn) end(code websocket.StatusCode, reason string) error {
	if c.ended.Swap(true) {
		return nil
	}
	return c.wire.end(appendClose(nil, int(code), reason))
}

// endSoon is end for those who may not wait for a slow client. The client then
// has a moment to close its side.
func (c *conn) endSoon(code websocket.StatusCode, reason string, last ...[]byte) {
	c.g.conns.Go(func() {
		if c.events {
			_ = c.wire.Close()
			return
		}
		for _, text := range last {
			_ = c.send(text)
		}
		_ = c.end(code, reason)
		_ = c.wire.SetReadDeadline(time.Now().Add(lingerClose))
	})
}

// shut closes the connection: at once when the client has gone, else when it
// has closed its side or taken too long to.
func (c *conn) shut(err error) {
	if c.ended.Load() {
		_ = c.wire.SetReadDeadline(time.Now().Add(lingerClose))
		for r := io.Reader(nil); err == nil; { // until its close frame
			if _, r, err = c.ws.Reader(context.Background()); err == nil {
				_, err = io.Copy(io.Discard, r)
			}
		}
		if websocket.CloseStatus(err) == -1 { // it is in the middle of a message
			_, _ = io.Copy(io.Discard, c.wire)
		}
	}
	_ = c.ws.CloseNow()
}

// leave forgets a connection that has ended without saying so for its pages:
// its user stays for the grace.
func (g *Gateway) leave(c *conn) {
	for _, page := range c.shard.remove(c) {
		g.roster.leave(c.user, page, c, true)
	}
	g.release()
}

// ping asks a silent client for a sign of life. The sweep calls it.
func (c *conn) ping() {
	frame := []byte{framePing, 0}
	if c.events {
		frame = []byte(": ping\n\n")
	}
	if err := c.wire.try(frame, c.shard.try); err != nil && !errors.Is(err, errBusy) {
		c.dead()
		return
	}
	if c.events {
		c.alive() // nobody answers there: a dead one fails to take the comments
	}
}

// dead closes the connection at once: nobody is listening.
func (c *conn) dead() { _ = c.wire.Close() }

// expire ends the connection because its token did.
func (c *conn) expire() {
	f := fault{code: codeTokenExpired, message: "the token has expired; connect again with a new one"}
	c.endSoon(websocket.StatusPolicyViolation, "token expired", f.appendJSON(nil))
}

// serveEvents keeps an event stream until the client closes it.
func (c *conn) serveEvents() {
	defer c.g.leave(c)
	_, _ = io.Copy(io.Discard, c.wire)
	_ = c.wire.Close()
}

// socketOptions are how this gateway wants its WebSockets. Origins are checked
// before; compression costs every connection a window of memory.
func (g *Gateway) socketOptions(pong func()) *websocket.AcceptOptions {
	return &websocket.AcceptOptions{
		Subprotocols:       []string{subprotocol},
		InsecureSkipVerify: true,
		CompressionMode:    websocket.CompressionDisabled,
		OnPingReceived:     func(context.Context, []byte) bool { pong(); return true },
		OnPongReceived:     func(context.Context, []byte) { pong() },
	}
}

// accept upgrades the request and hands the connection to a reader of its own,
// so that the server's goroutine and buffers for the request are freed.
func (g *Gateway) accept(w gin.ResponseWriter, r *http.Request, id Identity) error {
	h := &hijack{ResponseWriter: w, g: g}
	var c *conn
	ws, err := websocket.Accept(h, r, g.socketOptions(func() { c.alive() }))
	if err != nil {
		return err
	}
	ws.SetReadLimit(-1) // read has its own, with an error frame
	c = g.open(h.wire, id.Hash, id.Expires)
	c.ws = ws
	g.enter(c)
	g.conns.Go(func() { c.serveSocket(id) })
	return nil
}

// Receive takes a presence node's answer to a beat. It does not block.
func (g *Gateway) Receive(r *heartbeat.Reply) { g.roster.receive(r) }

// Push takes new counts, in any order, repeated or not. It does not block.
func (g *Gateway) Push(counts []presence.Count) {
	for _, c := range counts {
		g.hub.update(c)
	}
}
