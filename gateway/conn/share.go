package conn

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
)

// shared is an event stream over HTTP/2, as a net.Conn. Many streams and calls share one
// connection of the client, so the gateway cannot take the connection over from the HTTP
// server. A stream costs a goroutine, and another one while a write is under way. Streams
// count towards --max-connections.
type shared struct {
	w     http.ResponseWriter
	ctl   *http.ResponseController
	ended <-chan struct{} // closed when the client has gone, or by close
	close context.CancelFunc

	mu   sync.Mutex // held while a write is under way
	over bool       // the handler has returned, and w must not be used any more
}

// share answers with an event stream that lasts until the client ends it, or the
// connection is closed here.
func (cs *Clients) share(c *gin.Context, id identity.Identity, slot *bounds.Slot, want Events) {
	// Without this, the connection would count as one of short calls, which may be closed to make room for others.
	defer httppolicy.Stay(c.Request.Context())()
	// Otherwise the server would buffer the data that the client sends.
	_ = c.Request.Body.Close()

	ctx, cancel := context.WithCancel(c.Request.Context())
	defer cancel()

	s := &shared{w: c.Writer, ctl: http.NewResponseController(c.Writer), ended: ctx.Done(), close: cancel}
	_ = s.ctl.SetWriteDeadline(time.Time{}) // each write sets its own deadline

	streamHead(c.Writer.Header())
	c.Writer.WriteHeader(http.StatusOK)
	c.Writer.WriteHeaderNow()
	api.Opened(c)

	client := cs.newConn(s, id, slot)

	// The comment makes the server send the head before the first count is known.
	client.beginEvents(want, []byte(":\n\n"))
	client.wire.Serve()

	// A late write of the fan-out must not use the writer after the handler has returned.
	s.mu.Lock()
	s.over = true
	s.mu.Unlock()
}

// Read waits for the end of the stream, because the client sends no data.
func (s *shared) Read([]byte) (int, error) {
	<-s.ended

	return 0, io.EOF
}

func (s *shared) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.over {
		return 0, net.ErrClosed
	}

	// The lock is held meanwhile, so that the handler cannot return under the write.
	n, err := s.w.Write(p)
	if err == nil {
		// Otherwise the server would gather events in its buffer.
		err = s.ctl.Flush()
	}

	return n, err
}

func (s *shared) Close() error {
	s.close()

	return nil
}

// SetWriteDeadline sets the deadline of the next Write, after which the HTTP server resets the stream.
func (s *shared) SetWriteDeadline(t time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.over {
		return net.ErrClosed
	}

	return s.ctl.SetWriteDeadline(t)
}

// The rest of a net.Conn, which a wire does not use.
func (s *shared) LocalAddr() net.Addr             { return nil }
func (s *shared) RemoteAddr() net.Addr            { return nil }
func (s *shared) SetDeadline(t time.Time) error   { return s.SetWriteDeadline(t) }
func (s *shared) SetReadDeadline(time.Time) error { return nil }
