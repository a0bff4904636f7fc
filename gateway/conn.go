package gateway

import (
	"bytes"
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/coder/websocket"
	"github.com/gin-gonic/gin"

	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/unread"
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

	// patience is how many buffers full of one client's bytes are read in a row
	// at the others' cost. One that still has more gets a goroutine for it.
	patience = 4
)

var errNoPoller = errors.New("there is no poller for this connection")

// conn is one client's connection: a WebSocket, or an event stream, which only
// receives. A silent one has no goroutine: whoever learns that there is
// something to do for it takes its turn and serves it.
type conn struct {
	// What a delivery looks at comes first, so that it is close together.
	events bool
	asked  bool   // has sent read and waits for the answer; under the followers' lock
	pass   uint32 // the last pass that had something for it; guarded by the shard's lock, and so is
	tail   int32  // the last delivery in it
	wire   wire

	g     *Gateway
	shard *shard
	user  presence.User
	// follower is the user with what is followed; nil for an event stream.
	follower *follower
	expires  time.Duration              // when the token ends, by the shard's clock; 0: never
	heardAt  atomic.Int64               // last sign of life, by the shard's clock
	ended    atomic.Bool                // a close frame has been sent, or is about to be
	linger   atomic.Pointer[time.Timer] // it is out, and the client has until then
	hup      atomic.Bool                // the client has closed its side: read to the end

	// turns counts the occasions to serve since nobody did. Who counts the first
	// has the turn, until nobody has counted another: so exactly one goroutine
	// serves, and no occasion is lost. The last turn is kept for ever.
	turns atomic.Int32

	// Guarded by the shard's lock.
	places []place
	index  int           // in shard.conns
	missed bool          // a delivery was not written
	pinged time.Duration // an unanswered ping was sent then; 0: none
	bell   bell

	// The turn's own.
	slot    int32    // in the poller; 0: none, a goroutine reads
	held    []byte   // what has been read and not served: a part of a frame, or what a busy wire keeps from being served
	speaker *speaker // in the middle of a fragmented message, else nil
	errors  int
	tokens  float64 // of the message rate
	filled  time.Duration
}

func (c *conn) heard() time.Duration { return time.Duration(c.heardAt.Load()) }

func (c *conn) alive() { c.heardAt.Store(int64(c.shard.now())) }

func (c *conn) expired(now time.Duration) bool {
	return c.expires != 0 && now >= c.expires && !c.ended.Load()
}

// open makes the connection known to its shard. The caller has its turn, and
// ends it with start.
func (g *Gateway) open(w gin.ResponseWriter, user presence.User, expires time.Time) (*conn, error) {
	tcp, rw, err := w.Hijack()
	if err != nil {
		return nil, err
	}
	early, err := rw.Reader.Peek(rw.Reader.Buffered()) // what the client sent without waiting
	if err != nil {
		return nil, err
	}
	s := g.hub.shards[g.hub.next.Add(1)%uint64(len(g.hub.shards))]
	c := &conn{g: g, shard: s, user: user, tokens: messageBurst, held: bytes.Clone(early)}
	c.wire.use(tcp, g.cfg.WriteTimeout, c)
	if !expires.IsZero() {
		// time.Until ends at 292 years, and the sum must not overflow.
		c.expires = max(s.now()+min(time.Until(expires), farOff), 1)
	}
	c.turns.Store(1)
	c.alive()
	return c, nil
}

// start sends the client what it gets first, does what comes before its
// messages, and has the connection served from now on.
func (c *conn) start(hello []byte, begin func()) {
	if _, err := c.wire.Write(hello); err != nil {
		_ = c.wire.Close() // serve cleans up
	}
	c.shard.add(c)
	if c.follower != nil {
		c.g.followers.add(c)
	}
	if c.g.draining.Load() { // Drain may have looked already
		if !c.events {
			_ = c.send(frameText, appendReconnect(nil, 0))
		}
		_ = c.end(websocket.StatusServiceRestart, goodbye)
	}
	begin()
	if c.shard.poller.add(c) != nil {
		c.spawn(c.serve) // reads until the end
		return
	}
	c.serve()
}

// spawn implements owner.
func (c *conn) spawn(f func()) { c.g.conns.Go(f) }

// wireFree implements owner: what waited for the client is done now.
func (c *conn) wireFree() {
	if c.ended.Load() {
		c.awaitClose()
	}
	c.shard.freed(c)
	if c.turns.Add(1) == 1 {
		c.serve()
	}
}

// wireClosed implements owner: somebody has to clean up.
func (c *conn) wireClosed() {
	if c.turns.Add(1) == 1 {
		c.spawn(c.serve)
	}
}

// input is a buffer for more than the longest frame. One goroutine at a time.
type input [8 << 10]byte

var inputs = sync.Pool{New: func() any { return new(input) }}

// serve does what there is to do for the connection; its caller has the turn.
// It does not wait, unless there is no poller for the connection.
func (c *conn) serve() {
	in := inputs.Get().(*input)
	defer inputs.Put(in)
	for range patience {
		turns := c.turns.Load()
		switch more, err := c.look(in); {
		case err != nil:
			_ = c.wire.Close()
			c.shard.poller.remove(c)
			c.g.leave(c)
			return // with the turn
		case more:
		case c.turns.CompareAndSwap(turns, 0):
			return
		}
	}
	c.spawn(c.serve)
}

// look reads once and serves what came; more says that there may be more. An
// error is the end of the connection.
func (c *conn) look(in *input) (more bool, err error) {
	rest, err := c.frames(in[:copy(in[:], c.held)]) // what a busy wire kept
	c.held = nil
	if err == nil && !c.deaf() {
		n := copy(in[:], rest) // less than a frame
		var m int
		if m, more, err = c.read(in[n:]); err == nil {
			rest, err = c.frames(in[:n+m])
		}
	}
	if len(rest) > 0 {
		c.held = bytes.Clone(rest)
	}
	return more, err
}

// deaf reports whether the client is not heard now: it has to take first what
// it was sent. Without a poller, it waits for that.
func (c *conn) deaf() bool {
	if c.slot == 0 {
		c.wire.wait()
		return false
	}
	return c.wire.busy.Load() && !c.wire.closed.Load() && !c.events && !c.ended.Load()
}

// read reads once. It waits only when there is no poller for the connection.
func (c *conn) read(p []byte) (n int, more bool, err error) {
	if c.slot == 0 {
		n, err = c.wire.Read(p)
		return n, true, err
	}
	if n, err = c.wire.receive(p); n == 0 {
		return 0, false, err
	}
	// A read that could have had more has emptied the socket; what comes then is
	// told of again, but not the end, if it was told of with what has been read.
	return n, n == len(p) || c.hup.Load(), nil
}

// frames serves the whole frames at the beginning of data and returns what is
// left: less than a frame, unless the client has to take its answers first.
func (c *conn) frames(data []byte) (rest []byte, err error) {
	for len(data) > 0 {
		if c.events || c.ended.Load() {
			return nil, nil // not listened to any more, but for the end
		}
		if c.deaf() {
			return data, nil
		}
		size := frameSize(data)
		switch {
		case size > maxFrame:
			if err := c.tooLarge(); err != nil {
				return nil, err
			}
			continue
		case size == 0 || size > len(data):
			return data, nil
		}
		// Most frames are the answers to our pings, with nothing in them.
		if data[0] == framePong && data[1] == 0x80 {
			c.alive()
		} else if err := c.frame(data[:size]); err != nil {
			return nil, err
		}
		data = data[size:]
	}
	return nil, nil
}

// frame serves one whole frame.
func (c *conn) frame(frame []byte) error {
	began := time.Now()
	c.alive() // a part of a message is a sign of life, too
	s := c.speaker
	if c.speaker = nil; s == nil {
		s = c.g.speakers.get()
	}
	whole, err := s.read(c, frame)
	switch {
	case err != nil && s.closing && websocket.CloseStatus(err) < 0:
		c.ended.Store(true) // a breach of protocol, and the client is told of it
		c.awaitClose()
		return nil
	case err != nil:
		return err
	case !whole && s.message != nil:
		c.speaker = s
		return nil
	}
	defer s.release(began)
	if !whole {
		return nil
	}
	return c.message(s.kind, s.text[:s.n])
}

// message does what a message says.
func (c *conn) message(kind websocket.MessageType, text []byte) error {
	c.g.metrics.received.Add(1)
	switch {
	case len(text) > maxMessage:
		return c.tooLarge()
	case kind == websocket.MessageBinary:
		return c.fault(&fault{code: codeBinary, message: "binary messages have no meaning here; send JSON text"})
	case !utf8.Valid(text):
		return c.end(websocket.StatusInvalidFramePayloadData, "invalid UTF-8")
	case !c.allow():
		return c.fault(&fault{code: codeRateLimited, message: "too many messages; at most 500 a second"})
	}
	m, err := parseMessage(text)
	if err == nil {
		err = c.do(m)
	}
	var f *fault
	if errors.As(err, &f) {
		return c.fault(f)
	}
	return err
}

func (c *conn) tooLarge() error {
	if err := c.fault(&fault{code: codeTooLarge, message: "a message is at most 4096 bytes"}); err != nil {
		return err
	}
	return c.end(websocket.StatusMessageTooBig, "message over 4096 bytes")
}

// answerPing answers a client's ping.
func (c *conn) answerPing(payload []byte) {
	c.alive()
	_ = c.send(framePong, payload) // when that fails, so will the next read
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
// connection. It must not wait: other connections are served after this one.
func (c *conn) do(m message) error {
	switch m.kind {
	case typeJoin:
		page := m.pages[0]
		fresh, err := c.shard.join(c, page)
		if err != nil {
			return tooManyPages(page)
		}
		if fresh {
			c.g.followers.moved(c, page)
		}
		if fresh && c.g.roster.join(c.user, page, c) {
			c.g.joined(c, page, presence.Count{})
		}
	case typeLeave:
		if c.shard.leave(c, m.pages[0]) {
			c.g.roster.leave(c.user, m.pages[0], c, false)
			c.g.followers.moved(c, m.pages[0])
		}
	case typeSubscribe:
		if err := c.shard.watch(c, m.pages, m.precision); err != nil {
			return tooManyPages("")
		}
	case typeUnsubscribe:
		c.shard.unwatch(c, m.pages)
	case typeHeartbeat:
		return c.send(frameText, []byte(`{"type":"heartbeat"}`))
	case typeRead:
		c.g.followers.read(c)
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

// send writes one frame.
func (c *conn) send(opcode byte, payload []byte) error {
	_, err := c.wire.Write(appendFrame(nil, opcode, payload))
	return err
}

// fault tells the client of its mistake, and closes at the twentieth.
func (c *conn) fault(f *fault) error {
	c.g.metrics.faults.WithLabelValues(f.code).Inc()
	if err := c.send(frameText, f.appendJSON(nil)); err != nil {
		return err
	}
	if c.errors++; c.errors < maxErrors || f.code == codeTooLarge {
		return nil
	}
	last := fault{code: codeTooManyErrors, message: "too many errors on one connection"}
	return c.end(websocket.StatusPolicyViolation, "too many errors", last.appendJSON(nil))
}

// end sends what is left to say and a close frame. The client then has a
// moment to close its side; an event stream just ends.
func (c *conn) end(code websocket.StatusCode, reason string, last ...[]byte) error {
	if c.events {
		return c.wire.Close()
	}
	if c.ended.Swap(true) {
		return nil
	}
	var b []byte
	for _, text := range last {
		b = appendFrame(b, frameText, text)
	}
	err := c.wire.end(appendClose(b, int(code), reason))
	if !c.wire.busy.Load() {
		c.awaitClose()
	}
	return err
}

// awaitClose closes the connection unless the client does in a moment. It is
// called when the close frame is out.
func (c *conn) awaitClose() {
	if t := time.AfterFunc(lingerClose, c.dead); !c.linger.CompareAndSwap(nil, t) {
		t.Stop()
	}
}

// leave forgets a connection that has ended without saying so for its pages:
// its user stays for the grace.
func (g *Gateway) leave(c *conn) {
	joined := c.shard.remove(c)
	for _, page := range joined {
		g.roster.leave(c.user, page, c, true)
	}
	if c.follower != nil {
		g.followers.leave(c.follower, c, joined)
	}
	if t := c.linger.Load(); t != nil {
		t.Stop() // it would keep c for nothing
	}
	g.release()
}

// ping asks a silent client for a sign of life. The sweep calls it.
func (c *conn) ping() {
	frame := []byte{framePing, 0}
	if c.events {
		frame = []byte(": ping\n\n")
	}
	if err := c.wire.try(frame); err != nil && !errors.Is(err, errBusy) {
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
	_ = c.end(websocket.StatusPolicyViolation, "token expired", f.appendJSON(nil)) // it has gone anyway
}

// accept upgrades the request, which upgradeProblem has found to be right, and
// hands the connection over, so that the server's goroutine and buffers for the
// request are freed. Answer and first messages go in one write. While the store
// is away the unread count of a user who is new here is not known: it comes when
// it is, since 0 would not be true.
func (g *Gateway) accept(w gin.ResponseWriter, r *http.Request, id Identity) error {
	w.WriteHeader(http.StatusSwitchingProtocols) // for the metrics; nothing is written yet
	f := g.followers.enter(r.Context(), unread.User(g.cfg.Identities.Hash128(id.User)))
	c, err := g.open(w, id.Hash, id.Expires)
	if err != nil {
		g.followers.leave(f, nil, nil)
		return err
	}
	c.follower = f
	head := w.Header()
	head.Set("Upgrade", "websocket")
	head.Set("Connection", "Upgrade")
	head.Set("Sec-WebSocket-Accept", acceptKey(r.Header.Get("Sec-WebSocket-Key")))
	if len(r.Header.Values("Sec-WebSocket-Protocol")) > 0 {
		head.Set("Sec-WebSocket-Protocol", subprotocol)
	}
	hello := responseHead(http.StatusSwitchingProtocols, head)
	hello = appendFrame(hello, frameText, appendWelcome(nil, id, g.cfg.PingInterval))
	count, known := g.followers.unread(f)
	if known {
		hello = appendFrame(hello, frameText, appendUnread(nil, count))
	}
	if c.bell.told = count; !known {
		c.bell.told = -1 // whatever it is, it is news
	}
	c.start(hello, func() {})
	return nil
}

// acceptKey is the answer to a handshake's key, as RFC 6455 has it.
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(strings.TrimSpace(key) + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// responseHead is the head of a response on a connection that was taken over.
func responseHead(status int, head http.Header) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", status, http.StatusText(status))
	_ = head.Write(&b) // to memory
	b.WriteString("\r\n")
	return b.Bytes()
}

// Receive takes a presence node's answer to a beat. It does not block.
func (g *Gateway) Receive(r *heartbeat.Reply) { g.roster.receive(r) }

// Push takes new counts, and what travels like them, in any order, repeated or not. It does not block.
func (g *Gateway) Push(counts []presence.Count) {
	for _, c := range counts {
		g.hub.update(c)
	}
}
