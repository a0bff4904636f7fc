package client

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"time"
)

// pipes is a listener in memory.
type pipes struct {
	in     chan net.Conn
	once   sync.Once
	closed chan struct{}
}

func newPipes() *pipes { return &pipes{in: make(chan net.Conn), closed: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.in:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return &net.TCPAddr{} }

// connect is a Config.DialContext that connects to the listener, whatever the address.
func (p *pipes) connect(ctx context.Context, _, _ string) (net.Conn, error) {
	here, there := net.Pipe()
	accepted := &eager{Conn: there, more: make(chan struct{}, 1)}
	select {
	case p.in <- accepted:
		go accepted.send() // ends with the connection
		return here, nil
	case <-p.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// eager is the server's end of a connection. It accepts at once what is written, like the buffers of a socket.
type eager struct {
	net.Conn
	more chan struct{} // has room for one: data or closed has changed

	mu     sync.Mutex
	data   []byte
	closed bool
}

func (e *eager) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return 0, net.ErrClosed
	}

	e.data = append(e.data, p...)
	e.notify()

	return len(p), nil
}

// Close closes the connection when all is sent.
func (e *eager) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	e.notify()

	return e.Conn.SetReadDeadline(time.Unix(1, 0))
}

func (e *eager) notify() {
	select {
	case e.more <- struct{}{}:
	default:
	}
}

func (e *eager) send() {
	defer e.Conn.Close()
	for range e.more {
		e.mu.Lock()
		data, closed := e.data, e.closed
		e.data = nil
		e.mu.Unlock()

		if _, err := e.Conn.Write(data); err != nil || closed {
			return
		}
	}
}

// answering is the transport of an HTTP client. A handler answers its requests.
type answering http.HandlerFunc

func (a answering) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Body == nil {
		req.Body = http.NoBody // as on a server
	}

	w := httptest.NewRecorder()
	a(w, req)

	return w.Result(), nil
}
