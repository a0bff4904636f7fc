package gateway

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/wake"
)

// inMemory runs a test in a bubble, with a gateway and connections in memory. A goroutine serves each connection.
func inMemory(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	t.Helper()
	inMemoryWith(t, func(*testing.T) func(*Config) { return tune }, test)
}

// inMemoryWith is inMemory with a Config that is made within the bubble.
func inMemoryWith(t *testing.T, tuned func(*testing.T) func(*Config), test func(*testing.T, *served)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := runGateway(t, false, tuned(t))

		l := &pipes{in: make(chan net.Conn), closed: make(chan struct{})}
		limiter := s.g.Listener(l)
		server := &http.Server{Handler: s.g.Handler(), ConnState: limiter.State, ConnContext: limiter.Context}

		var serving sync.WaitGroup
		serving.Go(func() { _ = server.Serve(limiter) })

		s.addr, s.dial = "gateway", l.dial
		// The order matters: first the clients leave, then the server ends, and then what the gateway runs.
		defer func() {
			s.drain()
			_ = server.Close()
			serving.Wait()
			s.stop()
			l.readers.Wait()
		}()

		test(t, s)
	})
}

// http returns an HTTP client of the gateway.
func (s *served) http() *http.Client {
	dial := func(context.Context, string, string) (net.Conn, error) { return s.dial() }
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}

	return &http.Client{Transport: transport}
}

// pipes is a listener for connections in memory.
type pipes struct {
	in      chan net.Conn
	once    sync.Once
	closed  chan struct{}
	readers sync.WaitGroup
}

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.in:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error   { p.once.Do(func() { close(p.closed) }); return nil }
func (p *pipes) Addr() net.Addr { return visitorAddr }

var visitorAddr = net.TCPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:1"))

// accepted is the gateway's end of a connection.
type accepted struct{ net.Conn }

func (accepted) RemoteAddr() net.Addr { return visitorAddr }

func (p *pipes) dial() (net.Conn, error) {
	here, there := net.Pipe()
	c := &buffered{Conn: here, more: make(chan struct{}, 1), room: make(chan struct{}, 1), ended: make(chan struct{})}

	select {
	case p.in <- accepted{there}:
	case <-p.closed:
		return nil, net.ErrClosed
	}
	p.readers.Go(c.fill)

	return c, nil
}

// buffered is a client's end of a connection. It accepts at once what the gateway sends, like the buffers of a socket.
type buffered struct {
	net.Conn
	more   chan struct{} // has room for one: data or err has changed
	room   chan struct{} // has room for one: data was read, or size has changed
	ended  chan struct{} // closed by Close
	once   sync.Once     // closes ended
	unread atomic.Int64  // bytes that were written and not read yet

	mu       sync.Mutex
	data     bytes.Buffer
	size     int // about how much data is buffered; 0: any amount
	err      error
	deadline time.Time
}

// SetReadBuffer bounds how much is buffered before it is read.
func (b *buffered) SetReadBuffer(bytes int) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.size = bytes

	return nil
}

func (b *buffered) Close() error {
	b.once.Do(func() { close(b.ended) })
	return b.Conn.Close()
}

func (b *buffered) isFull() bool {
	b.mu.Lock()
	defer b.mu.Unlock()

	return b.size > 0 && b.data.Len() >= b.size
}

// awaitRoom waits until some of the buffered data is read.
func (b *buffered) awaitRoom() {
	for b.isFull() {
		select {
		case <-b.room:
		case <-b.ended:
			return
		}
	}
}

func (b *buffered) fill() {
	chunk := make([]byte, 4096)
	for {
		b.awaitRoom()
		n, err := b.Conn.Read(chunk)
		b.mu.Lock()
		b.data.Write(chunk[:n])
		b.err = err
		b.mu.Unlock()

		select {
		case b.more <- struct{}{}:
		default:
		}

		if err != nil {
			return
		}
	}
}

// unreadMost is how much a connection accepts after the gateway has closed it, like the buffers of a socket. A request
// that was answered early may have a body of some hundred kilobytes.
const unreadMost = 1 << 20

// Write does not fail as soon as the gateway has closed the connection, but only after unreadMost.
func (b *buffered) Write(p []byte) (int, error) {
	n, err := b.Conn.Write(p)
	closed := errors.Is(err, io.ErrClosedPipe)
	if closed && b.unread.Add(int64(len(p))) <= unreadMost {
		return len(p), nil
	}

	return n, err
}

func (b *buffered) SetReadDeadline(at time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.deadline = at

	return nil
}

func (b *buffered) Read(p []byte) (int, error) {
	for {
		b.mu.Lock()
		err, left := b.err, time.Until(b.deadline)

		if b.data.Len() > 0 {
			defer b.mu.Unlock()
			wake.Signal(b.room)
			return b.data.Read(p)
		}
		forever := b.deadline.IsZero()

		b.mu.Unlock()
		if err != nil {
			return 0, err
		}

		var end <-chan time.Time
		if !forever {
			end = time.After(left)
		}

		select {
		case <-b.more:
		case <-end:
			return 0, os.ErrDeadlineExceeded
		}
	}
}
