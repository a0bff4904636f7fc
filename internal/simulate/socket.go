package simulate

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

const (
	answerLimitOfClose = 5 * time.Second // how long the server may take to answer a close frame
	endOfHeader        = "\r\n\r\n"      // the frames begin after it
)

// A socket is a connection that can end as those of real clients do, in ways that no WebSocket library offers: it can
// be reset, or fall silent for ever.
type socket struct {
	*net.TCPConn
	received *atomic.Int64 // bytes after the handshake, of all sockets; over TLS all bytes
	matched  int           // how many bytes of endOfHeader have come
	silent   atomic.Bool   // reads and writes fail, and Close leaves the connection open
	slow     bool          // it has a small receive buffer
}

// dial opens the connection.
func (s *socket) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}

	s.TCPConn = conn.(*net.TCPConn)
	if s.slow {
		_ = s.SetReadBuffer(slowRead) // on an error the buffer has its usual size
	}

	return s, nil
}

func (s *socket) Read(p []byte) (int, error) {
	if s.silent.Load() {
		return 0, net.ErrClosed
	}

	n, err := s.TCPConn.Read(p)

	// Only bytes after the handshake count. Its end may be spread over several reads.
	from := 0
	for ; from < n && s.matched < len(endOfHeader); from++ {
		switch p[from] {
		case endOfHeader[s.matched]:
			s.matched++
		case '\r': // may begin another endOfHeader
			s.matched = 1
		default:
			s.matched = 0
		}
	}

	s.received.Add(int64(n - from))
	return n, err
}

func (s *socket) Write(p []byte) (int, error) {
	if s.silent.Load() {
		return 0, net.ErrClosed
	}

	return s.TCPConn.Write(p)
}

func (s *socket) Close() error {
	if s.silent.Load() {
		return nil
	}

	return s.TCPConn.Close()
}

// fin ends the connection without a close frame, as a process that is killed does.
func (s *socket) fin() { _ = s.TCPConn.Close() }

// reset resets the connection, as a process that is killed with unread data does.
func (s *socket) reset() {
	// With a linger time of 0 the system sends a reset.
	_ = s.SetLinger(0)
	_ = s.TCPConn.Close()
}

// vanish makes the socket fall silent for ever, as a phone in a tunnel does: the connection stays open, but nothing is
// read, answered or sent. The caller closes it later with fin.
func (s *socket) vanish() {
	s.silent.Store(true)
	// Ends the read under way, whose caller would answer the server's pings.
	_ = s.SetReadDeadline(time.Unix(1, 0))
}
