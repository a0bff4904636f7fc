package httppolicy

import (
	"container/heap"
	"container/list"
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// progressTimeout is how long a client may stay without progress while others wait for
// its place. Progress is a whole request, or an answer that has been sent.
const progressTimeout = time.Second

// silenceTimeout is how long a client that has sent nothing at all may keep its place
// while others wait. An honest client sends its request as soon as it is connected.
const silenceTimeout = 50 * time.Millisecond

// Over TLS a client is in its handshake until its first request is whole. At most
// handshakesPerCore may be under way for each core; beyond that the oldest is closed. One
// address may have half as many; beyond that its oldest is closed, or, while that is
// younger than progressTimeout, the new one. Each handshake takes some 0.3 ms of computing as
// soon as it begins, so this also bounds what one address can have the server compute.
const (
	handshakesPerCore = 512
	handshakeTimeout  = 3 * time.Second // of one handshake, when others come
)

// plainConnections is how many connections may exist that are not, or not yet, a
// WebSocket or an event stream. It is a tenth of long, at least 100, and never more
// than long.
func plainConnections(long int) int { return max(long/10, min(long, 100)) }

// ConnLimiter accepts clients, and bounds the connections that are not long connections yet:
// handshakes under way, requests, and connections kept for the next request.
//
// At the bound the ConnLimiter closes one connection for each new one. It first closes the
// connection that has been silent the longest, after silenceTimeout. If no client is
// silent, it closes the connection without progress for the longest time, after
// progressTimeout. A connection stays if the server has yet to read what it sent. Until
// a place is free the ConnLimiter accepts no client, and clients wait in the system's queue.
// So silent connections and half handshakes only displace each other: a client that
// sends a whole request as soon as it is accepted is served.
type ConnLimiter struct {
	net.Listener
	silence time.Duration // how long a client may leave sent data unacknowledged
	limit   int
	failing func(error)   // see NewConnLimiter; only Accept calls it
	failed  bool          // the last call of failing had an error; only Accept uses it
	evicted Counter       // counts the connections closed to make room
	room    chan struct{} // holds one: a client has left
	shut    chan struct{} // closed by Close
	once    sync.Once     // closes shut

	handshakes int // that may be under way; 0: the clients do not speak TLS

	mu     sync.Mutex       // guards what follows
	long   map[net.Conn]int // how many long requests each connection has under way, which are not short; not more than long connections
	loads  map[net.Conn]*load
	most   loads // of loads
	calls  int   // in all loads
	short  map[net.Conn]*list.Element
	silent list.List          // of each *shortConn that has sent nothing, the oldest first
	shakes list.List          // of each *shortConn in its TLS handshake, the oldest first; none of these is in silent
	steps  list.List          // of every other *shortConn, the one with the oldest step first
	from   map[netip.Addr]int // how many short connections in shakes each address has; an IPv6 /64 is one address
}

type shortConn struct {
	conn net.Conn
	addr netip.Addr
	step time.Time
	in   *list.List // silent, shakes or steps
}

// Counter counts events. A prometheus.Counter is a Counter.
type Counter interface{ Inc() }

// NewConnLimiter prepares l's connections for the HTTP server, whose ConnState must be the
// limiter's State. Requests that the HTTP server refuses before any handler runs, such
// as a badly percent-encoded path, are answered with a Problem. A client that
// acknowledges nothing of what it was sent for silence is closed; a client that only
// listens can be found dead in no other way. long is how many long connections there
// may be. failing is called once when too many open files keep clients out, and once
// with nil when that is over.
func NewConnLimiter(l net.Listener, silence time.Duration, long int, failing func(error), evicted Counter) *ConnLimiter {
	cl := newConnLimiter(l, silence, plainConnections(long), evicted)
	cl.failing = failing
	return cl
}

func newConnLimiter(l net.Listener, silence time.Duration, limit int, evicted Counter) *ConnLimiter {
	return &ConnLimiter{
		Listener: l, silence: silence, limit: limit, evicted: evicted, failing: func(error) {},
		room: make(chan struct{}, 1), shut: make(chan struct{}), short: map[net.Conn]*list.Element{}, long: map[net.Conn]int{}, loads: map[net.Conn]*load{},
		from: map[netip.Addr]int{},
	}
}

// SpeakTLS bounds the handshakes under way, for a limiter whose clients speak TLS. It is called
// before Accept.
func (cl *ConnLimiter) SpeakTLS() {
	cl.handshakes = max(min(handshakesPerCore*runtime.GOMAXPROCS(0), cl.limit/2), 2)
}

// Accept waits for a client, and for room for it.
func (cl *ConnLimiter) Accept() (net.Conn, error) {
	c, err := cl.accept()
	for err == nil && cl.handshakes > 0 && !cl.admit(addressOf(c)) {
		_ = c.Close()
		cl.evicted.Inc()
		c, err = cl.accept()
	}
	if err != nil {
		return nil, err // after too many open files the HTTP server tries again within a second
	}
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
	if full := errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE); full != cl.failed {
		cl.failed = full
		cl.failing(err)
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		limitSilence(tcp, cl.silence)
		c = clientConn{tcp, new(atomic.Bool)}
	}
	return c, err
}

// addressOf is the address by which handshakes are counted.
func addressOf(c net.Conn) netip.Addr {
	at, ok := c.RemoteAddr().(*net.TCPAddr)
	if !ok {
		return netip.Addr{}
	}
	return limitKey(at.AddrPort().Addr())
}

// admit makes room for one more handshake, of that address, and reports whether it could.
// A handshake that waits for the server does not have to go before handshakeTimeout is over.
func (cl *ConnLimiter) admit(addr netip.Addr) bool {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	now := time.Now()
	for e := cl.shakes.Front(); remaining(e, handshakeTimeout, now) <= 0; e = cl.shakes.Front() {
		cl.evict(e)
	}
	slot := cl.from[addr] >= cl.handshakes/2
	if cl.shakes.Len() < cl.handshakes && !slot {
		return true
	}
	oldest := cl.shakes.Front()
	for slot && oldest.Value.(*shortConn).addr != addr {
		oldest = oldest.Next()
	}
	if slot && remaining(oldest, progressTimeout, now) > 0 || unreadBytes(oldest.Value.(*shortConn).conn) {
		return false
	}
	cl.evict(oldest)
	return true
}

// evict closes e's connection to make room. The caller holds mu.
func (cl *ConnLimiter) evict(e *list.Element) {
	c := e.Value.(*shortConn).conn
	cl.leave(c)
	_ = c.Close() // this ends the HTTP server's goroutine for the connection
	cl.evicted.Inc()
}

// enter adds c to the short connections and returns 0. If there is no room, it returns how long
// to wait.
func (cl *ConnLimiter) enter(c net.Conn) (wait time.Duration) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	now := time.Now()
	for len(cl.short) >= cl.limit {
		if e := cl.silent.Front(); e != nil && said(e.Value.(*shortConn).conn) {
			cl.step(e, e.Value.(*shortConn).step)
			continue
		}
		e := cl.silent.Front()
		if wait = remaining(e, silenceTimeout, now); e == nil || wait > 0 {
			half := cl.steps.Front()
			if longer := remaining(half, progressTimeout, now); e == nil || longer < wait {
				e, wait = half, longer
			}
		}
		if wait > 0 {
			return wait
		}
		if unreadBytes(e.Value.(*shortConn).conn) { // step makes the connection the youngest, so the loop ends
			cl.step(e, now)
			continue
		}
		cl.evict(e)
	}
	g := &shortConn{conn: c, step: now, in: &cl.silent}
	if cl.handshakes > 0 {
		g.in, g.addr = &cl.shakes, addressOf(c)
		cl.from[g.addr]++
	}
	cl.short[c] = g.in.PushBack(g)
	return 0
}

// remaining is how long e's connection may still stay, if it may stay for most in all.
func remaining(e *list.Element, most time.Duration, now time.Time) time.Duration {
	if e == nil {
		return most
	}
	return most - now.Sub(e.Value.(*shortConn).step)
}

// step notes that e's connection made progress at this time. Every request is two steps, so only
// the first one of a connection makes an element. The caller holds mu.
func (cl *ConnLimiter) step(e *list.Element, at time.Time) {
	g := e.Value.(*shortConn)
	if g.in != &cl.steps {
		cl.out(e)
		g.in = &cl.steps
		e = cl.steps.PushBack(g)
		cl.short[g.conn] = e
	}
	g.step = at
	cl.steps.MoveToBack(e)
	before := e.Prev()
	for before != nil && before.Value.(*shortConn).step.After(at) {
		before = before.Prev()
	}
	if before == nil {
		cl.steps.MoveToFront(e)
	} else {
		cl.steps.MoveAfter(e, before)
	}
}

// out takes e's connection out of its list. The caller holds mu.
func (cl *ConnLimiter) out(e *list.Element) {
	g := e.Value.(*shortConn)
	g.in.Remove(e)
	if g.in != &cl.shakes {
		return
	}
	if cl.from[g.addr]--; cl.from[g.addr] == 0 {
		delete(cl.from, g.addr)
	}
}

// leave forgets c, and reports whether c was known. The caller holds mu.
func (cl *ConnLimiter) leave(c net.Conn) bool {
	e := cl.short[c]
	if e != nil {
		cl.out(e)
		delete(cl.short, c)
	}
	return e != nil
}

// State notes the progress or the end of a client. The HTTP server calls it.
func (cl *ConnLimiter) State(c net.Conn, state http.ConnState) {
	c = accepted(c)
	cl.mu.Lock()
	defer cl.mu.Unlock()
	switch state {
	case http.StateActive, http.StateIdle:
		if e := cl.short[c]; e != nil {
			cl.step(e, time.Now())
		}
	case http.StateHijacked, http.StateClosed:
		cl.forget(c)
	}
}

// forget forgets a connection that is closed or is the server's no more. The caller holds mu.
func (cl *ConnLimiter) forget(c net.Conn) {
	if l := cl.loads[c]; l != nil {
		cl.calls -= l.calls
		heap.Remove(&cl.most, l.place)
		l.place = -1
		delete(cl.loads, c)
	}
	delete(cl.long, c)
	cl.makeRoom(c)
}

// makeRoom forgets that c is short, and tells Accept. The caller holds mu.
func (cl *ConnLimiter) makeRoom(c net.Conn) {
	if cl.leave(c) {
		select {
		case cl.room <- struct{}{}:
		default:
		}
	}
}

// accepted is the connection that Accept returned, of one that may lie over it, as TLS
// does.
func accepted(c net.Conn) net.Conn {
	for {
		over, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return c
		}
		c = over.NetConn()
	}
}

type visitKey struct{}

// visit is a connection of a ConnLimiter.
type visit struct {
	limiter *ConnLimiter
	conn    net.Conn // as Accept returned it
}

// Context tells the requests of c which connection is theirs. The HTTP server calls it,
// as its ConnContext.
func (cl *ConnLimiter) Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, visitKey{}, visit{cl, accepted(c)})
}

// Shared bounds the calls under way over connections that carry several, as HTTP/2 does:
// all of them together are no more than the connections that are not long. Beyond that the
// limiter closes the connection with the most calls, unless that has only one. So a client that
// begins many calls and takes no answer gives up its place first.
func Shared(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		of, ok := r.Context().Value(visitKey{}).(visit)
		if r.ProtoMajor < 2 || !ok {
			next.ServeHTTP(w, r)
			return
		}
		defer of.limiter.call(of.conn)()
		next.ServeHTTP(w, r)
		_ = http.NewResponseController(w).Flush() // the call lasts until its answer is taken, else until the server's timeout
	})
}

// load is how many calls a connection has under way. The limiter's mu guards it.
type load struct {
	conn  net.Conn
	calls int
	place int // in the limiter's most; -1: the connection is forgotten
}

// loads are a heap, the one with the most calls first.
type loads []*load

func (l loads) Len() int           { return len(l) }
func (l loads) Less(i, j int) bool { return l[i].calls > l[j].calls }
func (l loads) Swap(i, j int) {
	l[i], l[j] = l[j], l[i]
	l[i].place, l[j].place = i, j
}

// Push implements heap.Interface.
func (l *loads) Push(x any) { *l = append(*l, x.(*load)) }

// Pop implements heap.Interface.
func (l *loads) Pop() any {
	last := (*l)[len(*l)-1]
	*l = slices.Delete(*l, len(*l)-1, len(*l))
	return last
}

// call notes that a connection has a call under way until over is called. That a call begins
// is progress of its client.
func (cl *ConnLimiter) call(c net.Conn) (over func()) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	e := cl.short[c]
	if e != nil {
		cl.step(e, time.Now())
	} else if cl.long[c] == 0 { // it is closed already
		return func() {}
	}
	l := cl.loads[c]
	if l == nil {
		l = &load{conn: c, place: len(cl.most)}
		cl.loads[c] = l
		heap.Push(&cl.most, l)
	}
	cl.count(l, 1)
	if busiest := cl.most[0]; cl.calls > cl.limit && busiest.calls > 1 {
		cl.forget(busiest.conn)
		_ = busiest.conn.Close() // this ends its calls
		cl.evicted.Inc()
	}
	return func() {
		cl.mu.Lock()
		defer cl.mu.Unlock()
		cl.count(l, -1)
	}
}

// count adds n calls to those of a connection, unless that is forgotten. The caller holds mu.
func (cl *ConnLimiter) count(l *load, n int) {
	if l != nil && l.place >= 0 {
		l.calls += n
		cl.calls += n
		heap.Fix(&cl.most, l.place)
	}
}

// Stay says that this request lasts, and lets others use its connection meanwhile, as
// HTTP/2 does: until over is called the connection is a long one and not a short one, and the request
// is none of its calls.
func Stay(ctx context.Context) (over func()) {
	if of, ok := ctx.Value(visitKey{}).(visit); ok {
		return of.limiter.stay(of.conn)
	}
	return func() {}
}

func (cl *ConnLimiter) stay(c net.Conn) (over func()) {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	if cl.long[c] == 0 && cl.short[c] == nil { // it is closed already, and nobody would forget it
		return func() {}
	}
	if cl.long[c]++; cl.long[c] == 1 {
		cl.makeRoom(c)
	}
	l := cl.loads[c]
	cl.count(l, -1)
	return func() {
		cl.mu.Lock()
		defer cl.mu.Unlock()
		cl.count(l, 1)
		if _, open := cl.long[c]; !open {
			return
		}
		if cl.long[c]--; cl.long[c] == 0 {
			// It is there anyway, so it comes back beyond the bound too; the next one waits.
			delete(cl.long, c)
			cl.short[c] = cl.steps.PushBack(&shortConn{conn: c, step: time.Now(), in: &cl.steps})
		}
	}
}

// Close ends Accept. Accepted connections stay open.
func (cl *ConnLimiter) Close() error {
	cl.once.Do(func() { close(cl.shut) })
	return cl.Listener.Close()
}
