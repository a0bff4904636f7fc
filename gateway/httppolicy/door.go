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

// stepPatience is how long a client may stay without progress while others wait for
// its place. Progress is a whole request, or an answer that has been sent.
const stepPatience = time.Second

// silentPatience is how long a client that has sent nothing at all may keep its place
// while others wait. An honest client sends its request as soon as it is connected.
const silentPatience = 50 * time.Millisecond

// Over TLS a client is in its handshake until its first request is whole. At most
// handshakesPerCore may be under way for each core; beyond that the oldest is closed. One
// address may have half as many; beyond that its oldest is closed, or, while that is
// younger than stepPatience, the new one. Each handshake takes some 0.3 ms of computing as
// soon as it begins, so this also bounds what one address can have the server compute.
const (
	handshakesPerCore = 512
	handshakeTime     = 3 * time.Second // of one handshake, when others come
)

// plainConnections is how many connections may exist that are not, or not yet, a
// WebSocket or an event stream. It is a tenth of long, at least 100, and never more
// than long.
func plainConnections(long int) int { return max(long/10, min(long, 100)) }

// ConnLimiter accepts clients, and bounds the connections that are not long connections yet:
// handshakes under way, requests, and connections kept for the next request.
//
// At the bound the ConnLimiter closes one connection for each new one. It first closes the
// connection that has been silent the longest, after silentPatience. If no client is
// silent, it closes the connection without progress for the longest time, after
// stepPatience. A connection stays if the server has yet to read what it sent. Until
// a place is free the ConnLimiter accepts no client, and clients wait in the system's queue.
// So silent connections and half handshakes only displace each other: a client that
// sends a whole request as soon as it is accepted is served.
type ConnLimiter struct {
	net.Listener
	silence time.Duration // how long a client may leave sent data unacknowledged
	limit   int
	failing func(error)   // see NewDoor; only Accept calls it
	failed  bool          // the last call of failing had an error; only Accept uses it
	evicted Counter       // counts the connections closed to make room
	room    chan struct{} // holds one: a client has left
	shut    chan struct{} // closed by Close
	once    sync.Once     // closes shut

	handshakes int // that may be under way; 0: the clients do not speak TLS

	mu     sync.Mutex       // guards what follows
	long   map[net.Conn]int // how many long requests each connection has under way, which are no guests; not more than long connections
	loads  map[net.Conn]*load
	most   loads // of loads
	calls  int   // in all loads
	guests map[net.Conn]*list.Element
	silent list.List          // of each *guest that has sent nothing, the oldest first
	shakes list.List          // of each *guest in its TLS handshake, the oldest first; none of these is in silent
	steps  list.List          // of every other *guest, the one with the oldest step first
	from   map[netip.Addr]int // how many guests in shakes each address has; an IPv6 /64 is one address
}

type guest struct {
	conn net.Conn
	addr netip.Addr
	step time.Time
	in   *list.List // silent, shakes or steps
}

// Counter counts events. A prometheus.Counter is a Counter.
type Counter interface{ Inc() }

// NewDoor prepares l's connections for the HTTP server, whose ConnState must be the
// door's State. Requests that the HTTP server refuses before any handler runs, such
// as a badly percent-encoded path, are answered with a Problem. A client that
// acknowledges nothing of what it was sent for silence is closed; a client that only
// listens can be found dead in no other way. long is how many long connections there
// may be. failing is called once when too many open files keep clients out, and once
// with nil when that is over.
func NewDoor(l net.Listener, silence time.Duration, long int, failing func(error), evicted Counter) *ConnLimiter {
	d := newDoor(l, silence, plainConnections(long), evicted)
	d.failing = failing
	return d
}

func newDoor(l net.Listener, silence time.Duration, limit int, evicted Counter) *ConnLimiter {
	return &ConnLimiter{
		Listener: l, silence: silence, limit: limit, evicted: evicted, failing: func(error) {},
		room: make(chan struct{}, 1), shut: make(chan struct{}), guests: map[net.Conn]*list.Element{}, long: map[net.Conn]int{}, loads: map[net.Conn]*load{},
		from: map[netip.Addr]int{},
	}
}

// SpeakTLS bounds the handshakes under way, for a door whose clients speak TLS. It is called
// before Accept.
func (d *ConnLimiter) SpeakTLS() {
	d.handshakes = max(min(handshakesPerCore*runtime.GOMAXPROCS(0), d.limit/2), 2)
}

// Accept waits for a client, and for room for it.
func (d *ConnLimiter) Accept() (net.Conn, error) {
	c, err := d.accept()
	for err == nil && d.handshakes > 0 && !d.admit(addressOf(c)) {
		_ = c.Close()
		d.evicted.Inc()
		c, err = d.accept()
	}
	if err != nil {
		return nil, err // after too many open files the HTTP server tries again within a second
	}
	for {
		wait := d.enter(c)
		if wait == 0 {
			return c, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-d.room:
			timer.Stop()
		case <-d.shut:
			timer.Stop()
			return nil, errors.Join(net.ErrClosed, c.Close())
		}
	}
}

// accept waits for a client.
func (d *ConnLimiter) accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if full := errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE); full != d.failed {
		d.failed = full
		d.failing(err)
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		limitSilence(tcp, d.silence)
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
// A handshake that waits for the server does not have to go before handshakeTime is over.
func (d *ConnLimiter) admit(addr netip.Addr) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	for e := d.shakes.Front(); patience(e, handshakeTime, now) <= 0; e = d.shakes.Front() {
		d.evict(e)
	}
	slot := d.from[addr] >= d.handshakes/2
	if d.shakes.Len() < d.handshakes && !slot {
		return true
	}
	oldest := d.shakes.Front()
	for slot && oldest.Value.(*guest).addr != addr {
		oldest = oldest.Next()
	}
	if slot && patience(oldest, stepPatience, now) > 0 || unreadBytes(oldest.Value.(*guest).conn) {
		return false
	}
	d.evict(oldest)
	return true
}

// evict closes e's guest to make room. The caller holds mu.
func (d *ConnLimiter) evict(e *list.Element) {
	c := e.Value.(*guest).conn
	d.leave(c)
	_ = c.Close() // this ends the HTTP server's goroutine for the connection
	d.evicted.Inc()
}

// enter adds c to the guests and returns 0. If there is no room, it returns how long
// to wait.
func (d *ConnLimiter) enter(c net.Conn) (wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	for len(d.guests) >= d.limit {
		if e := d.silent.Front(); e != nil && said(e.Value.(*guest).conn) {
			d.step(e, e.Value.(*guest).step)
			continue
		}
		e := d.silent.Front()
		if wait = patience(e, silentPatience, now); e == nil || wait > 0 {
			half := d.steps.Front()
			if longer := patience(half, stepPatience, now); e == nil || longer < wait {
				e, wait = half, longer
			}
		}
		if wait > 0 {
			return wait
		}
		if unreadBytes(e.Value.(*guest).conn) { // step makes the guest the youngest, so the loop ends
			d.step(e, now)
			continue
		}
		d.evict(e)
	}
	g := &guest{conn: c, step: now, in: &d.silent}
	if d.handshakes > 0 {
		g.in, g.addr = &d.shakes, addressOf(c)
		d.from[g.addr]++
	}
	d.guests[c] = g.in.PushBack(g)
	return 0
}

// patience is how long e's guest may still stay, if it may stay for most in all.
func patience(e *list.Element, most time.Duration, now time.Time) time.Duration {
	if e == nil {
		return most
	}
	return most - now.Sub(e.Value.(*guest).step)
}

// step notes that e's guest made progress at this time. Every request is two steps, so only
// the first one of a guest makes an element. The caller holds mu.
func (d *ConnLimiter) step(e *list.Element, at time.Time) {
	g := e.Value.(*guest)
	if g.in != &d.steps {
		d.out(e)
		g.in = &d.steps
		e = d.steps.PushBack(g)
		d.guests[g.conn] = e
	}
	g.step = at
	d.steps.MoveToBack(e)
	before := e.Prev()
	for before != nil && before.Value.(*guest).step.After(at) {
		before = before.Prev()
	}
	if before == nil {
		d.steps.MoveToFront(e)
	} else {
		d.steps.MoveAfter(e, before)
	}
}

// out takes e's guest out of its list. The caller holds mu.
func (d *ConnLimiter) out(e *list.Element) {
	g := e.Value.(*guest)
	g.in.Remove(e)
	if g.in != &d.shakes {
		return
	}
	if d.from[g.addr]--; d.from[g.addr] == 0 {
		delete(d.from, g.addr)
	}
}

// leave forgets c, and reports whether c was known. The caller holds mu.
func (d *ConnLimiter) leave(c net.Conn) bool {
	e := d.guests[c]
	if e != nil {
		d.out(e)
		delete(d.guests, c)
	}
	return e != nil
}

// State notes the progress or the end of a client. The HTTP server calls it.
func (d *ConnLimiter) State(c net.Conn, state http.ConnState) {
	c = accepted(c)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch state {
	case http.StateActive, http.StateIdle:
		if e := d.guests[c]; e != nil {
			d.step(e, time.Now())
		}
	case http.StateHijacked, http.StateClosed:
		d.forget(c)
	}
}

// forget forgets a connection that is closed or is the server's no more. The caller holds mu.
func (d *ConnLimiter) forget(c net.Conn) {
	if l := d.loads[c]; l != nil {
		d.calls -= l.calls
		heap.Remove(&d.most, l.place)
		l.place = -1
		delete(d.loads, c)
	}
	delete(d.long, c)
	d.makeRoom(c)
}

// makeRoom forgets that c is a guest, and tells Accept. The caller holds mu.
func (d *ConnLimiter) makeRoom(c net.Conn) {
	if d.leave(c) {
		select {
		case d.room <- struct{}{}:
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

type doorKey struct{}

// visit is a connection of a door.
type visit struct {
	door *ConnLimiter
	conn net.Conn // as Accept returned it
}

// Context tells the requests of c which connection is theirs. The HTTP server calls it,
// as its ConnContext.
func (d *ConnLimiter) Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, doorKey{}, visit{d, accepted(c)})
}

// Shared bounds the calls under way over connections that carry several, as HTTP/2 does:
// all of them together are no more than the connections that are not long. Beyond that the
// door closes the connection with the most calls, unless that has only one. So a client that
// begins many calls and takes no answer gives up its place first.
func Shared(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		of, ok := r.Context().Value(doorKey{}).(visit)
		if r.ProtoMajor < 2 || !ok {
			next.ServeHTTP(w, r)
			return
		}
		defer of.door.call(of.conn)()
		next.ServeHTTP(w, r)
		_ = http.NewResponseController(w).Flush() // the call lasts until its answer is taken, else until the server's timeout
	})
}

// load is how many calls a connection has under way. The door's mu guards it.
type load struct {
	conn  net.Conn
	calls int
	place int // in the door's most; -1: the connection is forgotten
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
func (d *ConnLimiter) call(c net.Conn) (over func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := d.guests[c]
	if e != nil {
		d.step(e, time.Now())
	} else if d.long[c] == 0 { // it is closed already
		return func() {}
	}
	l := d.loads[c]
	if l == nil {
		l = &load{conn: c, place: len(d.most)}
		d.loads[c] = l
		heap.Push(&d.most, l)
	}
	d.count(l, 1)
	if busiest := d.most[0]; d.calls > d.limit && busiest.calls > 1 {
		d.forget(busiest.conn)
		_ = busiest.conn.Close() // this ends its calls
		d.evicted.Inc()
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.count(l, -1)
	}
}

// count adds n calls to those of a connection, unless that is forgotten. The caller holds mu.
func (d *ConnLimiter) count(l *load, n int) {
	if l != nil && l.place >= 0 {
		l.calls += n
		d.calls += n
		heap.Fix(&d.most, l.place)
	}
}

// Stay says that this request lasts, and lets others use its connection meanwhile, as
// HTTP/2 does: until over is called the connection is a long one and no guest, and the request
// is none of its calls.
func Stay(ctx context.Context) (over func()) {
	if of, ok := ctx.Value(doorKey{}).(visit); ok {
		return of.door.stay(of.conn)
	}
	return func() {}
}

func (d *ConnLimiter) stay(c net.Conn) (over func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.long[c] == 0 && d.guests[c] == nil { // it is closed already, and nobody would forget it
		return func() {}
	}
	if d.long[c]++; d.long[c] == 1 {
		d.makeRoom(c)
	}
	l := d.loads[c]
	d.count(l, -1)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.count(l, 1)
		if _, open := d.long[c]; !open {
			return
		}
		if d.long[c]--; d.long[c] == 0 {
			// It is there anyway, so it comes back beyond the bound too; the next one waits.
			delete(d.long, c)
			d.guests[c] = d.steps.PushBack(&guest{conn: c, step: time.Now(), in: &d.steps})
		}
	}
}

// Close ends Accept. Accepted connections stay open.
func (d *ConnLimiter) Close() error {
	d.once.Do(func() { close(d.shut) })
	return d.Listener.Close()
}
