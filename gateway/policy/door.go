package policy

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/http"
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

// plainConnections is how many connections may exist that are not, or not yet, a
// WebSocket or an event stream. It is a tenth of long, at least 100, and never more
// than long.
func plainConnections(long int) int { return max(long/10, min(long, 100)) }

// Door accepts clients, and bounds the connections that are not long connections yet:
// handshakes under way, requests, and connections kept for the next request.
//
// At the bound the Door closes one connection for each new one. It first closes the
// connection that has been silent the longest, after silentPatience. If no client is
// silent, it closes the connection without progress for the longest time, after
// stepPatience. A connection stays if the server has yet to read what it sent. Until
// a place is free the Door accepts no client, and clients wait in the system's queue.
// So silent connections and half handshakes only displace each other: a client that
// sends a whole request as soon as it is accepted is served.
type Door struct {
	net.Listener
	silence time.Duration // how long a client may leave sent data unacknowledged
	limit   int
	failing func(error)   // see NewDoor; only Accept calls it
	failed  bool          // the last call of failing had an error; only Accept uses it
	evicted Counter       // counts the connections closed to make room
	room    chan struct{} // holds one: a client has left
	shut    chan struct{} // closed by Close
	once    sync.Once     // closes shut

	mu     sync.Mutex       // guards what follows
	long   map[net.Conn]int // how many long requests each connection has under way, which are no guests; not more than long connections
	guests map[net.Conn]*list.Element
	silent list.List // of each *guest that has sent nothing, the oldest first
	steps  list.List // of every other *guest, the one with the oldest step first
}

type guest struct {
	conn  net.Conn
	step  time.Time
	spoke bool // the guest is in steps; otherwise it is in silent
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
func NewDoor(l net.Listener, silence time.Duration, long int, failing func(error), evicted Counter) *Door {
	d := newDoor(l, silence, plainConnections(long), evicted)
	d.failing = failing
	return d
}

func newDoor(l net.Listener, silence time.Duration, limit int, evicted Counter) *Door {
	return &Door{
		Listener: l, silence: silence, limit: limit, evicted: evicted, failing: func(error) {},
		room: make(chan struct{}, 1), shut: make(chan struct{}), guests: map[net.Conn]*list.Element{}, long: map[net.Conn]int{},
	}
}

// Accept waits for a client, and for room for it.
func (d *Door) Accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if full := errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE); full != d.failed {
		d.failed = full
		d.failing(err)
	}
	if err != nil {
		return nil, err // after too many open files the HTTP server tries again within a second
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		limitSilence(tcp, d.silence)
		c = clientConn{tcp, new(atomic.Bool)}
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

// enter adds c to the guests and returns 0. If there is no room, it returns how long
// to wait.
func (d *Door) enter(c net.Conn) (wait time.Duration) {
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
		oldest := e.Value.(*guest)
		if unreadBytes(oldest.conn) { // step makes the guest the youngest, so the loop ends
			d.step(e, now)
			continue
		}
		d.leave(oldest.conn)
		_ = oldest.conn.Close() // this ends the HTTP server's goroutine for the connection
		d.evicted.Inc()
	}
	d.guests[c] = d.silent.PushBack(&guest{conn: c, step: now})
	return 0
}

// patience is how long e's guest may still stay, if it may stay for most in all.
func patience(e *list.Element, most time.Duration, now time.Time) time.Duration {
	if e == nil {
		return most
	}
	return most - now.Sub(e.Value.(*guest).step)
}

// step notes that e's guest made progress at this time. The caller holds mu.
func (d *Door) step(e *list.Element, at time.Time) {
	g := e.Value.(*guest)
	d.list(g).Remove(e)
	g.step, g.spoke = at, true
	before := d.steps.Back()
	for before != nil && before.Value.(*guest).step.After(at) {
		before = before.Prev()
	}
	if before == nil {
		d.guests[g.conn] = d.steps.PushFront(g)
	} else {
		d.guests[g.conn] = d.steps.InsertAfter(g, before)
	}
}

// list returns the list that holds the guest.
func (d *Door) list(g *guest) *list.List {
	if g.spoke {
		return &d.steps
	}
	return &d.silent
}

// leave forgets c, and reports whether c was known. The caller holds mu.
func (d *Door) leave(c net.Conn) bool {
	e := d.guests[c]
	if e != nil {
		d.list(e.Value.(*guest)).Remove(e)
		delete(d.guests, c)
	}
	return e != nil
}

// State notes the progress or the end of a client. The HTTP server calls it.
func (d *Door) State(c net.Conn, state http.ConnState) {
	c = accepted(c)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch state {
	case http.StateActive, http.StateIdle:
		if e := d.guests[c]; e != nil {
			d.step(e, time.Now())
		}
	case http.StateHijacked, http.StateClosed:
		delete(d.long, c)
		d.makeRoom(c)
	}
}

// makeRoom forgets c, and tells Accept. The caller holds mu.
func (d *Door) makeRoom(c net.Conn) {
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

// Context tells the requests of c which connection is theirs. The HTTP server calls it,
// as its ConnContext.
func (d *Door) Context(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, doorKey{}, func() func() { return d.stay(accepted(c)) })
}

// Stay says that this request lasts, and lets others use its connection meanwhile, as
// HTTP/2 does: until over is called the connection is a long one and no guest.
func Stay(ctx context.Context) (over func()) {
	if stay, ok := ctx.Value(doorKey{}).(func() func()); ok {
		return stay()
	}
	return func() {}
}

func (d *Door) stay(c net.Conn) (over func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.long[c]++; d.long[c] == 1 {
		d.makeRoom(c)
	}
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if _, open := d.long[c]; !open {
			return
		}
		if d.long[c]--; d.long[c] == 0 {
			// It is there anyway, so it comes back beyond the bound too; the next one waits.
			delete(d.long, c)
			d.guests[c] = d.steps.PushBack(&guest{conn: c, step: time.Now(), spoke: true})
		}
	}
}

// Close ends Accept. Accepted connections stay open.
func (d *Door) Close() error {
	d.once.Do(func() { close(d.shut) })
	return d.Listener.Close()
}
