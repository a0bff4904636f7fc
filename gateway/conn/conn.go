package conn

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/bounds"
	"headcount/gateway/fanout"
	"headcount/gateway/identity"
	"headcount/gateway/notifier"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
	"headcount/presence"
)

const (
	// lingerClose is how long a closed client may take to close its side, so that
	// the close frame reaches it before the end of the connection does.
	lingerClose = time.Second

	maxLifetime = 100 * 365 * 24 * time.Hour // longer than any connection lasts
)

// conn is one client's connection: a WebSocket, whose client speaks our protocol or Pusher's, or an event
// stream, which only delivers and may have joined its page. An idle conn has no goroutine. A goroutine with
// work for the conn takes its turn, which only one goroutine has at a time, and serves it.
type conn struct {
	// The fan-out owns these, under its locks. A delivery reads the end of the first and
	// the beginning of the second, so they are next to each other for the CPU's cache.
	fanout.Subscriber
	wire socket.Wire

	// These are set before start, and not changed after that.
	all *Clients
	visitor
	speech  speech
	server  bool // the upgrade had an API key
	crawler bool // the client only watches the pages that it joins

	// The turn owns errors. It is here because small fields next to each other save
	// memory, and there are many idle connections.
	errors uint8

	// Any goroutine may use these.
	closing    atomic.Uint32              // a closing state
	awaitsPong atomic.Bool                // a ping has been sent; its answer is not charged
	totalHeld  atomic.Bool                // the count of the site is held back, see uncounted
	linger     atomic.Pointer[time.Timer] // closes the connection if the client does not answer the close frame

	// The turn owns these.
	rateState
	input
	wants []wanted
	// counters are the counters that the client subscribes to; wants and counters together
	// have at most presence.MaxPages elements. nil: none, as for most clients.
	counters *[]string
}

// visitor is the client of a connection. An event stream has only a user, a name and a slot.
type visitor struct {
	user presence.User
	sum  *notifier.Sum // the user's unread sum
	name string        // the user's qualified name, see member and site
	slot *bounds.Slot  // a place among the connections of the address; given back at the end
	addr netip.Addr
	// opens has the private pages that the user's token opens; nil: none, as for most clients.
	opens *[]string
}

// rateState has the state of each limit.Rate of a client: the time at which the whole
// burst is available again.
type rateState struct {
	messagesRate  time.Duration // messages, see allow
	newTopicsRate time.Duration // new topics, see admitNewTopics
	namesRate     time.Duration // names in lists, see chargeNames
}

// input is the state of reading from a client.
type input struct {
	held           []byte // bytes read but not served yet: a part of a frame, or more while the wire is busy
	reader         websocket.Reader
	throttledUntil time.Duration // nothing is read until then; 0: not throttled
}

// States of the close handshake.
const (
	open      uint32 = iota
	closeSent        // a close frame has been sent, or is about to be
	answered         // the client's close frame has arrived, too, after the gateway's
	leftFirst        // the client's close frame came first, and has been answered
)

// open takes the connection over from the HTTP server. The caller has its turn, and
// ends it with start.
func (cs *Clients) open(w gin.ResponseWriter, id identity.Identity, slot *bounds.Slot) (*conn, error) {
	tcp, rw, err := w.Hijack()
	if err != nil {
		return nil, err
	}

	// Frames that the client sent before it had the answer.
	early, _ := rw.Reader.Peek(rw.Reader.Buffered())
	c := cs.newConn(tcp, id, slot)
	c.held = bytes.Clone(early) // so that the server's buffer can be freed

	return c, nil
}

// newConn returns a client on a connection that nothing else reads or writes.
func (cs *Clients) newConn(over net.Conn, id identity.Identity, slot *bounds.Slot) *conn {
	name := strings.Clone(id.Site.Qualify(id.User)) // the clone lets the memory of the signed id be freed
	c := &conn{all: cs, visitor: visitor{user: id.Hash, name: name, slot: slot}}
	c.wire.Use(over, c)

	cs.cfg.Hub.Prepare(&c.Subscriber, c, lifetimeOf(id))

	return c
}

// lifetimeOf returns how long a connection of this identity may last: 0 without a limit, negative when the identity has
// expired.
func lifetimeOf(id identity.Identity) time.Duration {
	if id.Expires.IsZero() {
		return 0
	}

	left := time.Until(id.Expires)
	if left == 0 {
		return -1 // 0 would mean that it lasts forever
	}

	// time.Until ends at 292 years, and the hub's sum of times must not overflow.
	return min(left, maxLifetime)
}

// enter writes hello, the client's first bytes, and registers the client with the fan-out and its unread sum.
func (c *conn) enter(hello []byte) {
	if c.wire.Write(hello) != nil {
		_ = c.wire.Close() // the next turn cleans up
	}

	// Only now, since a delivery must not come before hello.
	c.Enter()
	if c.sum != nil {
		c.all.cfg.Unread.Add(c.sum, c)
	}

	// Drain may have missed this client. A Pusher client is not asked to move, because it would reconnect at once,
	// perhaps before another process listens.
	if c.all.draining.Load() {
		if c.speech != pushers {
			c.dialect().move(c, 0)
		}
		c.sendAway()
	}
}

// sendAway closes the connection because the gateway ends.
func (c *conn) sendAway() {
	_ = c.end(websocket.StatusServiceRestart, closeReason, nil) // an error means that the client is gone already
}

// site returns the site that all pages and counters of a WebSocket belong to.
func (c *conn) site() presence.Site {
	site, _ := presence.SplitName(c.name)
	return site
}

// member returns the name by which the user may be a member of sets.
func (c *conn) member() string { return presence.KeyOf(c.name) }

// start begins to serve the client.
func (c *conn) start() { c.wire.Start(c.all.Poller()) }

// Spawn implements socket.Owner.
func (c *conn) Spawn(f func()) { c.all.cfg.Group.Go(f) }

// WriteTimeout implements socket.Owner.
func (c *conn) WriteTimeout() time.Duration { return c.all.cfg.WriteTimeout }

// Slow implements socket.Owner.
func (c *conn) Slow() {
	c.all.metrics.closed.WithLabelValues(closedSlow).Inc()
	c.all.cfg.Log.Debug().Stringer("timeout", c.all.cfg.WriteTimeout).
		Msg("a slow client did not read what was sent to it in time; its connection is closed")
}

// Freed implements socket.Owner. It continues work that had to wait for the end of a write.
func (c *conn) Freed(taken bool) {
	if taken {
		c.MarkAlive() // a client that takes a write is alive
	}

	// The client has taken the close frame, if there is one, so what waited for that goes on.
	switch c.closing.Load() {
	case answered, leftFirst:
		_ = c.Close()
	case closeSent:
		c.awaitClose()
	}

	c.Free()
}

// Look implements socket.Owner. An error is the end of the connection.
func (c *conn) Look(in *socket.Input) (more bool, err error) {
	rest, err := c.frames(in[:copy(in[:], c.held)]) // bytes held back by a busy wire
	c.held = nil
	c.chargeRead()

	if c.wire.Polled() && c.wire.Busy() {
		c.MarkAlive() // a busy client is not read, but Look is called only because it has sent something
	}

	// What was held back has been served, and may have made the client busy or used up its rate.
	if err == nil && !c.blocked() {
		rest, more, err = c.readMore(in, rest)
	}

	// The buffer goes to another connection, so what is left is copied.
	if len(rest) > 0 {
		c.held = bytes.Clone(rest)
	}

	return more, err
}

// readMore reads once, and serves the frames that are complete with rest, which is less than a frame unless the wire
// was busy a moment ago.
func (c *conn) readMore(in *socket.Input, rest []byte) (left []byte, more bool, err error) {
	n := copy(in[:], rest)
	m, more, err := c.wire.Read(in[n:])
	if err != nil {
		return rest, more, err
	}

	left, err = c.frames(in[:n+m])

	return left, more, err
}

// blocked reports whether reading from the client has to stop: it is throttled, or must first take the data
// that it was sent. Without a poller, blocked waits until reading may continue.
func (c *conn) blocked() bool {
	if c.throttled() {
		return true
	}

	if !c.wire.Polled() {
		// The goroutine of a wire without a poller has nothing else to do.
		c.wire.Wait()
		return false
	}

	mustTake := c.speech != stream && c.closing.Load() == open // the client of our messages, before the close frame
	return mustTake && c.wire.Busy() && !c.wire.Closed()
}

// finish closes the connection after the close handshake, which has reached the state answered or leftFirst. It closes
// at once, or when the client has read the close frame.
func (c *conn) finish(state uint32) {
	// The state comes first: a write may end between the two lines, and Freed then closes.
	c.closing.Store(state)
	if !c.wire.Busy() {
		_ = c.Close()
	}
}

// awaitClose closes the connection after lingerClose, unless the client does so earlier. It is called when
// the close frame has been written.
func (c *conn) awaitClose() {
	t := time.AfterFunc(lingerClose, func() { _ = c.Close() })
	// Freed and end may both come here, and one timer is enough.
	if !c.linger.CompareAndSwap(nil, t) {
		t.Stop()
	}
}

// Ended implements socket.Owner. If the client has not left its pages, the user stays there for the grace.
func (c *conn) Ended() {
	all := c.all
	c.Leave()

	for _, key := range c.subscribed() {
		all.cfg.Live.Unview(key, c.member(), c)
	}

	for _, w := range c.wants {
		if w.joined {
			all.metrics.leaves.WithLabelValues(c.cause()).Inc()
			// With the grace even after a close frame, which a browser sends when it loads the page again, too.
			c.leaveRoster(w.name, true)
		}
	}

	if c.sum != nil {
		all.cfg.Unread.Leave(c.sum, c)
	}

	if t := c.linger.Load(); t != nil {
		t.Stop() // it would keep c in memory
	}

	all.Release(c.slot)
}

// cause returns the cause of the connection's end, as a label of the metrics.
func (c *conn) cause() string {
	switch c.closing.Load() {
	case leftFirst:
		return leftClosed
	case closeSent, answered:
		return leftSentAway
	default:
		return leftLost
	}
}

// Busy implements fanout.Client.
func (c *conn) Busy() bool { return c.wire.Busy() }

// Try implements fanout.Client.
func (c *conn) Try(p []byte) error {
	err := c.wire.Try(p)
	if errors.Is(err, socket.ErrBusy) {
		return fanout.ErrBusy
	}

	return err
}

// Close implements fanout.Client: it closes the connection at once. A client that has to be told that it was silent is
// told so, unless the write would block. Any other client has its close frame already, or reads nothing.
func (c *conn) Close() error {
	if last := c.dialect().silent(); last != nil {
		_ = c.wire.Try(last)
	}

	return c.wire.Close()
}

// Ping implements fanout.Client: it sends a silent client a ping. A busy client needs none: it takes the
// write that is under way, or that write times out.
func (c *conn) Ping() bool {
	ping, answers := c.dialect().ping()
	c.awaitsPong.Store(true) // before the write, which the answer may overtake

	err := c.wire.Try(ping)
	if err != nil && !errors.Is(err, socket.ErrBusy) {
		_ = c.Close()
		return false
	}

	// If a client that never answers is dead, the next write of a ping fails.
	if !answers {
		c.MarkAlive()
	}

	return err == nil
}

// Expire implements fanout.Client: the connection's token has expired.
func (c *conn) Expire() {
	f := faultOf(identity.ErrBadToken, "the token has expired; connect again with a new one")
	// An error means that the client is gone already.
	_ = c.end(websocket.StatusPolicyViolation, "token expired", f)
}

// Accept upgrades a request for a WebSocket with Subprotocol. The answer and the first messages are one write. While
// the store is unavailable, the unread count of a user that is new at this gateway is unknown. The message with the
// count then follows later, because a 0 would be wrong.
func (cs *Clients) Accept(w gin.ResponseWriter, r *http.Request, id identity.Identity, slot *bounds.Slot) {
	// Before the upgrade, so that the first write can have the count.
	sum := cs.cfg.Unread.Enter(r.Context(), cs.cfg.Callers.UserOf(id.Site, id.User))
	c, hello, err := cs.upgrade(w, r, Subprotocol, id, slot)
	if err != nil {
		cs.cfg.Unread.Leave(sum, nil)
		return
	}

	c.sum = sum
	hello = websocket.AppendFrame(hello, websocket.Text, appendWelcome(nil, id, cs.cfg.PingInterval))
	if count, known := cs.cfg.Unread.Unread(sum); known {
		hello = websocket.AppendFrame(hello, websocket.Text, appendUnread(nil, count))
		c.SentUnread(count)
	}

	c.enter(hello)
	c.start()
}

// upgrade takes over the connection of a request that isUpgrade has accepted, so that the HTTP server's goroutine and
// buffers are freed. It returns the answer to the request, which the caller must write. After an error it has released
// the client's place.
func (cs *Clients) upgrade(
	w gin.ResponseWriter, r *http.Request, subprotocol string, id identity.Identity, slot *bounds.Slot,
) (c *conn, answer []byte, err error) {
	w.WriteHeader(http.StatusSwitchingProtocols) // only records the status for the metrics

	c, err = cs.open(w, id, slot)
	if err != nil {
		cs.Release(slot)
		cs.cfg.Log.Debug().Err(err).Msg("the connection of a client could not be taken over")
		return nil, nil, err
	}

	// What the request says is noted now, since a connection does not keep it.
	c.addr = cs.cfg.Callers.Addr(r)
	c.server = cs.cfg.Callers.IsServer(r)
	c.crawler = cs.cfg.Callers.Crawler(r)
	// Without private pages the list has no use, and there may be many connections.
	if len(id.Pages) > 0 && len(cs.cfg.Callers.Private) > 0 {
		open := id.Pages // not &id.Pages, which would keep all of id
		c.opens = &open
	}

	head := w.Header()
	websocket.SetUpgrade(head, r, subprotocol)

	return c, responseHead(http.StatusSwitchingProtocols, head), nil
}

// responseHead returns the head of a response on a connection that was taken over.
func responseHead(status int, head http.Header) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", status, http.StatusText(status))
	_ = head.Write(&b) // a write to memory does not fail
	b.WriteString("\r\n")

	return b.Bytes()
}
