package httppolicy

import (
	"context"
	"net"
	"net/http"
	"time"
)

// sharedConns are the connections that carry several requests at a time, as HTTP/2 does. The
// limiter's mu guards them.
type sharedConns struct {
	// long has the number of long requests, such as event streams, by connection; a connection here is not short
	long  map[net.Conn]int
	calls map[net.Conn]int // number of other requests, by connection
	total int              // the sum of calls
}

type visitKey struct{}

// visit is the connection of a request.
type visit struct {
	limiter *ConnLimiter
	conn    net.Conn // as Accept returned it
}

// Shared bounds the calls under way over connections that carry several, as HTTP/2 does: all of
// them together are bounded by the maximum of short connections. Beyond the bound the connection
// with the most calls is closed, unless it has only one call. So a client that begins many calls
// and reads no answers loses its connection first.
func Shared(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		of, ok := r.Context().Value(visitKey{}).(visit)
		// A connection of HTTP/1 has one request at a time, of which State knows.
		if r.ProtoMajor < 2 || !ok {
			next.ServeHTTP(w, r)
			return
		}

		defer of.limiter.call(of.conn)()
		next.ServeHTTP(w, r)
		// The call lasts until the client has read the answer, or until the server's timeout.
		_ = http.NewResponseController(w).Flush()
	})
}

// call records that c has a call under way until over is called. The beginning of a call counts
// as progress.
func (cl *ConnLimiter) call(c net.Conn) (over func()) {
	cl.mu.Lock()
	defer cl.mu.Unlock()

	if e := cl.short[c]; e != nil {
		cl.advanceLocked(e, time.Now())
	}
	cl.countLocked(c, 1)

	// The new call counts already, so that its own connection may be the one that goes.
	if busiest := cl.shared.busiest(cl.max); busiest != nil {
		cl.forgetLocked(busiest)
		_ = busiest.Close() // this ends its calls
		cl.evicted.Inc()
	}

	return func() {
		cl.mu.Lock()
		defer cl.mu.Unlock()

		cl.countLocked(c, -1)
	}
}

// countLocked adds n to the calls of c, unless c is closed.
func (cl *ConnLimiter) countLocked(c net.Conn, n int) {
	s := &cl.shared
	if cl.short[c] == nil && s.long[c] == 0 {
		return
	}

	s.total += n
	s.calls[c] += n
	if s.calls[c] == 0 {
		delete(s.calls, c)
	}
}

// busiest returns the connection with the most calls, if there are more than limit calls in all
// and the connection has more than one; otherwise nil.
func (s *sharedConns) busiest(limit int) net.Conn {
	// With as many connections as calls, none has more than one.
	if s.total <= limit || s.total <= len(s.calls) {
		return nil
	}

	var busiest net.Conn
	for c, calls := range s.calls {
		if calls > s.calls[busiest] {
			busiest = c
		}
	}

	return busiest
}

func (s *sharedConns) forget(c net.Conn) {
	s.total -= s.calls[c]
	delete(s.calls, c)
	delete(s.long, c)
}

// Stay marks a request, which must have passed through Shared, as a long one, such as an event
// stream: until over is called its connection is a long one, and the request is not counted as a
// call.
func Stay(ctx context.Context) (over func()) {
	if of, ok := ctx.Value(visitKey{}).(visit); ok {
		return of.limiter.stay(of.conn)
	}

	return func() {}
}

// stay makes c a long connection until over is called.
func (cl *ConnLimiter) stay(c net.Conn) (over func()) {
	cl.mu.Lock()
	defer cl.mu.Unlock()

	long := cl.shared.long
	if long[c] == 0 && cl.short[c] == nil { // c is closed already, so forget would never be called for it
		return func() {}
	}

	long[c]++
	if long[c] == 1 {
		cl.makeRoomLocked(c)
	}
	// Shared has counted the request as a call.
	cl.countLocked(c, -1)

	return func() { cl.endStay(c) }
}

// endStay ends a stay of c.
func (cl *ConnLimiter) endStay(c net.Conn) {
	cl.mu.Lock()
	defer cl.mu.Unlock()

	// First, because a connection that is neither short nor long counts as closed.
	cl.countLocked(c, 1)
	long := cl.shared.long
	if long[c] == 0 { // it was closed meanwhile
		return
	}

	long[c]--
	if long[c] > 0 {
		return
	}

	// The connection exists anyway, so it becomes short again even beyond the bound; the next client waits.
	delete(long, c)
	cl.short[c] = cl.active.PushBack(&shortConn{conn: c, progress: time.Now(), in: &cl.active})
}
