package httppolicy

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"time"

	"headcount/internal/wake"
)

// Times after which a short connection may be closed when other clients wait for its place.
const (
	progressTimeout = time.Second           // without progress: a whole request, or an answer that was sent
	silenceTimeout  = 50 * time.Millisecond // without any data: an honest client sends its request at once
)

// Over TLS a client is in its handshake until its first request is whole. At most
// handshakesPerCore may be under way for each core; beyond the bound the oldest is closed. One
// address may have half as many; beyond this bound the address's oldest handshake is closed or,
// while that is younger than progressTimeout, the new one. Each handshake takes some 0.3 ms of
// computing as soon as it begins, so this also bounds the computing that one address can cause.
const (
	handshakesPerCore = 512
	handshakeTimeout  = 3 * time.Second // of one handshake, when others begin
)

// maxShort returns how many short connections there may be for a given maximum of long ones:
// a tenth of it, at least 100, and never more than the maximum itself.
func maxShort(long int) int { return max(long/10, min(long, 100)) }

// ConnLimiter accepts clients and bounds the short connections, which are all connections that are
// not (or not yet) a WebSocket or an event stream: handshakes under way, requests, and connections
// kept for the next request.
//
// At the bound the ConnLimiter closes one short connection for each new one: first the connection
// that has been silent for the longest time, after silenceTimeout; if none is silent, the
// connection without progress for the longest time, after progressTimeout. It does not close a
// connection whose data the server has not read yet. Until a place is free the ConnLimiter accepts
// no client, and clients wait in the system's queue. So silent connections and incomplete
// handshakes only displace each other: a client that sends a whole request as soon as it is
// accepted is served.
type ConnLimiter struct {
	net.Listener
	silence time.Duration // how long a client may leave sent data unacknowledged
	max     int           // short connections
	failing func(error)   // see NewConnLimiter; only Accept calls it
	failed  bool          // the last call of failing had an error; only Accept uses it
	evicted Counter       // counts the connections closed to make room
	room    chan struct{} // holds one: a short connection has ended
	shut    chan struct{} // closed by Close
	once    sync.Once     // closes shut

	mu         sync.Mutex // guards what follows
	short      map[net.Conn]*list.Element
	silent     list.List // of each *shortConn that has sent nothing, the oldest first
	active     list.List // of each *shortConn that has, the one whose progress is the oldest first
	handshakes handshakes
	shared     sharedConns
}

// shortConn is the value of an element of the list in.
type shortConn struct {
	conn     net.Conn
	addr     netip.Addr // set during a handshake alone
	progress time.Time
	in       *list.List // silent, active or handshakes.conns
}

// handshakes are the short connections in their TLS handshake.
type handshakes struct {
	max   int                // how many may be under way; 0: the clients do not use TLS
	conns list.List          // of each *shortConn, the oldest first
	from  map[netip.Addr]int // how many of conns each address has; an IPv6 /64 is one address
}

// Counter counts events. A prometheus.Counter is a Counter.
type Counter interface{ Inc() }

// NewConnLimiter prepares l's connections for the HTTP server, whose ConnState must be the
// limiter's State. Requests that the HTTP server refuses before any handler runs, such
// as a badly percent-encoded path, are answered with a Problem. A connection whose client
// acknowledges no sent data for silence is closed, because there is no other way to notice
// that a client that only receives is dead. long is the maximum of long connections. failing is
// called once when clients cannot be accepted because of too many open files, and once with nil
// when they can be again.
func NewConnLimiter(
	l net.Listener, silence time.Duration, long int, failing func(error), evicted Counter,
) *ConnLimiter {
	return &ConnLimiter{
		Listener:   l,
		silence:    silence,
		max:        maxShort(long),
		failing:    failing,
		evicted:    evicted,
		room:       make(chan struct{}, 1),
		shut:       make(chan struct{}),
		short:      map[net.Conn]*list.Element{},
		handshakes: handshakes{from: map[netip.Addr]int{}},
		shared:     sharedConns{long: map[net.Conn]int{}, calls: map[net.Conn]int{}},
	}
}

// SpeakTLS makes the limiter bound the handshakes under way, because its clients use TLS. It must
// be called before Accept.
func (cl *ConnLimiter) SpeakTLS() {
	cl.handshakes.max = max(min(handshakesPerCore*runtime.GOMAXPROCS(0), cl.max/2), 2)
}

// Accept waits for a client and for a free place.
func (cl *ConnLimiter) Accept() (net.Conn, error) {
	c, err := cl.accept()
	for err == nil && cl.handshakes.max > 0 && !cl.admitHandshake(addressOf(c)) {
		_ = c.Close()
		cl.evicted.Inc()
		c, err = cl.accept()
	}
	if err != nil {
		return nil, err // after too many open files the HTTP server tries again within a second
	}

	// This client is accepted already, and waits here in front of those in the system's queue.
	for {
		wait := cl.enter(c)
		if wait == 0 {
			return c, nil
		}

		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-cl.room:
			timer.Stop()
		case <-cl.shut:
			timer.Stop()
			return nil, errors.Join(net.ErrClosed, c.Close())
		}
	}
}

// accept waits for a client.
func (cl *ConnLimiter) accept() (net.Conn, error) {
	c, err := cl.Listener.Accept()
	full := errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
	// Only a change is told, since the HTTP server tries again all the time. Another error, such as that of a listener
	// which is closed, says nothing about the files.
	isKnown := full || err == nil
	if isKnown && full != cl.failed {
		cl.failed = full
		cl.failing(err)
	}

	if over, ok := c.(socketConn); ok {
		limitSilence(over, cl.silence)
		c = clientConn{over, new(received)}
	}

	return c, err
}

// addressOf returns the address by which handshakes are counted.
func addressOf(c net.Conn) netip.Addr {
	at, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}

	return Customer(at.AddrPort().Addr())
}

// Customer returns what counts as one address where addresses are bounded: of IPv6 the /64, which is the smallest
// network that a customer of a provider has.
func Customer(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if !addr.Is6() {
		return addr
	}
	prefix, _ := addr.Prefix(64) // fails only for more bits than the address has

	return prefix.Addr()
}

// admitHandshake makes room for one more handshake of addr, and reports whether it could.
func (cl *ConnLimiter) admitHandshake(addr netip.Addr) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()

	h := &cl.handshakes
	now := time.Now()
	// Handshakes that take too long go first, whatever their addresses.
	for e := h.conns.Front(); timeLeft(e, handshakeTimeout, now) <= 0; e = h.conns.Front() {
		cl.evictLocked(e)
	}

	crowded := h.from[addr] >= h.max/2
	if h.conns.Len() < h.max && !crowded {
		return true
	}

	// A crowded address makes room among its own.
	oldest := h.conns.Front()
	for crowded && shortOf(oldest).addr != addr {
		oldest = oldest.Next()
	}
	// Other clients at a crowded address may be honest, so a handshake that has just begun may go on. A handshake
	// whose data has arrived waits for the server, not for its client.
	mayFinish := crowded && timeLeft(oldest, progressTimeout, now) > 0
	if mayFinish || unreadBytes(shortOf(oldest).conn) {
		return false
	}
	cl.evictLocked(oldest)

	return true
}

// enter adds c to the short connections and returns 0. If there is no room, it returns how
// long to wait.
func (cl *ConnLimiter) enter(c net.Conn) (wait time.Duration) {
	cl.mu.Lock()
	defer cl.mu.Unlock()

	now := time.Now()
	for len(cl.short) >= cl.max {
		e := cl.silent.Front()
		// The connection is silent no longer. Its progress stays what it was, until a request is whole.
		if e != nil && said(shortOf(e).conn) {
			cl.advanceLocked(e, shortOf(e).progress)
			continue
		}

		e, wait = cl.nextToGoLocked(now)
		if wait > 0 {
			return wait
		}
		if unreadBytes(shortOf(e).conn) { // it becomes the youngest, so the loop ends
			cl.advanceLocked(e, now)
			continue
		}
		cl.evictLocked(e)
	}

	s := &shortConn{conn: c, progress: now, in: &cl.silent}
	if cl.handshakes.max > 0 {
		s.in = &cl.handshakes.conns
		s.addr = addressOf(c)
		cl.handshakes.from[s.addr]++
	}
	cl.short[c] = s.in.PushBack(s)

	return 0
}

// nextToGoLocked returns the connection that has to go first, and how long it may still stay. It is one that has sent
// nothing or, if there is none, the one that has been without progress for the longest time.
func (cl *ConnLimiter) nextToGoLocked(now time.Time) (e *list.Element, wait time.Duration) {
	silent := cl.silent.Front()
	wait = timeLeft(silent, silenceTimeout, now)
	// Who has sent nothing goes before anybody who is only slow.
	if silent != nil && wait <= 0 {
		return silent, wait
	}

	slow := cl.active.Front()
	longer := timeLeft(slow, progressTimeout, now)
	if silent == nil || longer < wait {
		return slow, longer
	}

	return silent, wait
}

func shortOf(e *list.Element) *shortConn { return e.Value.(*shortConn) }

// timeLeft returns how long e's connection may still stay, if it must be closed timeout after its
// last progress. Without an element it returns timeout.
func timeLeft(e *list.Element, timeout time.Duration, now time.Time) time.Duration {
	if e == nil {
		return timeout
	}

	return timeout - now.Sub(shortOf(e).progress)
}

// advanceLocked records that e's connection made progress at this time. A request makes progress twice,
// so only the first progress of a connection allocates an element.
func (cl *ConnLimiter) advanceLocked(e *list.Element, at time.Time) {
	s := shortOf(e)
	if s.in != &cl.active {
		cl.removeLocked(e)
		s.in = &cl.active
		e = cl.active.PushBack(s)
		cl.short[s.conn] = e
	}
	s.progress = at
	cl.active.MoveToBack(e)

	// Keep the list in the order of progress: other connections may have made progress after this time.
	before := e.Prev()
	for before != nil && shortOf(before).progress.After(at) {
		before = before.Prev()
	}
	if before == nil {
		cl.active.MoveToFront(e)
	} else {
		cl.active.MoveAfter(e, before)
	}
}

// removeLocked removes e from its list.
func (cl *ConnLimiter) removeLocked(e *list.Element) {
	s := shortOf(e)
	s.in.Remove(e)
	if s.in != &cl.handshakes.conns {
		return
	}

	from := cl.handshakes.from
	from[s.addr]--
	if from[s.addr] == 0 {
		delete(from, s.addr)
	}
}

// evictLocked closes e's connection to make room.
func (cl *ConnLimiter) evictLocked(e *list.Element) {
	c := shortOf(e).conn
	cl.removeLocked(e)
	delete(cl.short, c)
	_ = c.Close() // this ends the HTTP server's goroutine for the connection
	cl.evicted.Inc()
}

// makeRoomLocked removes c from the short connections, and wakes Accept.
func (cl *ConnLimiter) makeRoomLocked(c net.Conn) {
	e := cl.short[c]
	// The connection was evicted, or is a long one.
	if e == nil {
		return
	}

	cl.removeLocked(e)
	delete(cl.short, c)
	wake.Signal(cl.room)
}

// State records the progress or the end of a connection. It is the HTTP server's ConnState.
func (cl *ConnLimiter) State(c net.Conn, state http.ConnState) {
	c = accepted(c)

	cl.mu.Lock()
	defer cl.mu.Unlock()

	switch state {
	case http.StateActive, http.StateIdle:
		if e := cl.short[c]; e != nil {
			cl.advanceLocked(e, time.Now())
		}
	case http.StateHijacked, http.StateClosed:
		cl.forgetLocked(c)
	}
}

// forgetLocked removes a connection that is closed or no longer the server's.
func (cl *ConnLimiter) forgetLocked(c net.Conn) {
	cl.shared.forget(c)
	cl.makeRoomLocked(c)
}

// accepted returns the connection that Accept returned; c may be a wrapper of it, such as TLS.
func accepted(c net.Conn) net.Conn {
	for {
		if _, is := c.(clientConn); is {
			return c
		}
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

// Below returns the connection of the limiter's listener that c, which Accept returned, uses.
func Below(c net.Conn) net.Conn {
	if client, ok := c.(clientConn); ok {
		return client.socketConn
	}

	return c
}

// Max returns how many short connections there may be.
func (cl *ConnLimiter) Max() int { return cl.max }

// Context adds the connection c to the context of its requests. It is the HTTP server's
// ConnContext.
func (cl *ConnLimiter) Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, visitKey{}, visit{cl, accepted(c)})
}

// Close ends Accept. Accepted connections stay open.
func (cl *ConnLimiter) Close() error {
	// Accept may wait for a place, where the end of the listener does not wake it.
	cl.once.Do(func() { close(cl.shut) })
	return cl.Listener.Close()
}
