package socket

import (
	"crypto/tls"
	"errors"
	"net"
	"os"
)

// lowerConn is the connection below a *tls.Conn. At first it is the connection itself. A Wire
// that uses the *tls.Conn takes the lowerConn over: then neither reads nor writes wait, so
// TLS needs no goroutine either. The Wire's lock is held during every call of the
// *tls.Conn, so records leave in the order in which they were sealed.
type lowerConn struct {
	net.Conn
	wire *Wire // nil: the HTTP server still has the connection
}

// NetConn is the connection itself.
func (l *lowerConn) NetConn() net.Conn { return l.Conn }

// Read reads what the socket has. crypto/tls keeps a part of a record and goes on after
// an error that is temporary, as that of a deadline is.
func (l *lowerConn) Read(p []byte) (int, error) {
	if l.wire == nil {
		return l.Conn.Read(p)
	}

	n, err := l.wire.fd.receive(p)
	if n == 0 && err == nil {
		return 0, os.ErrDeadlineExceeded
	}

	return n, err
}

func (l *lowerConn) Write(p []byte) (int, error) {
	if l.wire == nil {
		return l.Conn.Write(p)
	}

	// What the socket does not take is kept, so for TLS the record is out.
	return len(p), l.wire.emitLocked(p)
}

// Listener prepares the connections that it accepts for TLS.
type Listener struct{ net.Listener }

// Accept returns the next connection as a *lowerConn.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}

	return &lowerConn{Conn: c}, nil
}

// unseal takes over the connection below TLS, if calls that do not wait are possible
// there. Otherwise the Wire treats c like any connection without such calls.
func (w *Wire) unseal(c *tls.Conn) {
	lower, ok := c.NetConn().(*lowerConn)
	if !ok {
		return
	}

	fd := descriptorOf(lower.Conn)
	if fd == noDescriptor {
		return
	}

	lower.wire = w
	w.tls = c
	w.conn = lower.Conn
	w.fd = fd
}

// openLocked reads once through TLS. n is 0 if no complete record has arrived.
// TLS may have kept more than it returned, so n > 0 means that there may be more.
func (w *Wire) openLocked(p []byte) (n int, err error) {
	n, err = w.tls.Read(p)
	if n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		return n, nil // any other error comes again with the next read
	}

	return n, err
}
