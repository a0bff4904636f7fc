package gateway

import (
	"container/list"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

// stepPatience is how long a client may be without a step forward, from
// connecting to a whole request to its answer to the next, when others wait
// for its place.
const stepPatience = time.Second

// plainConnections is how many connections there may be that are no WebSocket
// or event stream, or not yet: a tenth of those that are, and enough for a few.
func plainConnections(long int) int { return max(long/10, 100) }

// Door lets clients in and bounds those that are no long connections yet:
// handshakes under way, requests, and connections kept for the next one.
//
// Beyond the bound the one that has been without a step forward the longest is
// closed, once that is a second and it is not us who have yet to read what it
// sent; until then nobody else is let in, and clients wait in the system's
// queue. So half handshakes cost their own kind: whoever sends a whole request
// when it is let in is served.
type Door struct {
	net.Listener
	silence time.Duration // that a client may keep to what it was sent
	limit   int
	closed  func()        // counts those that had to make room
	room    chan struct{} // holds one: somebody has left
	shut    chan struct{} // closed by Close
	once    sync.Once     // for it

	mu     sync.Mutex // guards what follows
	guests map[net.Conn]*list.Element
	steps  list.List // of guest, by their last step, the oldest first
}

type guest struct {
	conn net.Conn
	step time.Time
}

// Door prepares l's connections for the HTTP server, whose ConnState has to be
// the door's State: what the server refuses before any handler is asked, such
// as a path that is badly percent-encoded, is answered in our form; and a
// client ends that acknowledges nothing of what it was sent for as long as a
// ping, its answer and a write may take, which is the only way to notice one
// that only listens.
func (g *Gateway) Door(l net.Listener) *Door {
	silence := g.cfg.PingInterval + g.cfg.PongTimeout + g.cfg.WriteTimeout
	return newDoor(l, silence, plainConnections(g.cfg.MaxConnections), g.metrics.evicted.Inc)
}

func newDoor(l net.Listener, silence time.Duration, limit int, closed func()) *Door {
	return &Door{
		Listener: l, silence: silence, limit: limit, closed: closed,
		room: make(chan struct{}, 1), shut: make(chan struct{}), guests: map[net.Conn]*list.Element{},
	}
}

// Accept waits for a client, and for room for it.
func (d *Door) Accept() (net.Conn, error) {
	c, err := d.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		limitSilence(tcp, d.silence)
		c = clientConn{tcp}
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

// enter lets c in; when there is no room it returns how long to wait.
func (d *Door) enter(c net.Conn) (wait time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	for len(d.guests) >= d.limit {
		e := d.steps.Front()
		oldest := e.Value.(*guest)
		if wait = stepPatience - now.Sub(oldest.step); wait > 0 {
			return wait
		}
		if unreadBytes(oldest.conn) { // ends with the last of them: each is younger then
			oldest.step = now
			d.steps.MoveToBack(e)
			continue
		}
		d.leave(oldest.conn)
		_ = oldest.conn.Close() // the server's goroutine for it ends with that
		d.closed()
	}
	d.guests[c] = d.steps.PushBack(&guest{c, now})
	return 0
}

// leave forgets c under mu; it reports whether c was known.
func (d *Door) leave(c net.Conn) bool {
	e := d.guests[c]
	if e != nil {
		d.steps.Remove(e)
		delete(d.guests, c)
	}
	return e != nil
}

// State takes notice of a step of a client. The HTTP server calls it.
func (d *Door) State(c net.Conn, state http.ConnState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch state {
	case http.StateActive, http.StateIdle:
		if e := d.guests[c]; e != nil {
			e.Value.(*guest).step = time.Now()
			d.steps.MoveToBack(e)
		}
	case http.StateHijacked, http.StateClosed:
		if d.leave(c) {
			select {
			case d.room <- struct{}{}:
			default:
			}
		}
	}
}

// Close ends Accept. Those who are in stay.
func (d *Door) Close() error {
	d.once.Do(func() { close(d.shut) })
	return d.Listener.Close()
}
