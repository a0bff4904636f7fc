package main

import (
	"bytes"
	"errors"
	"io"
	"net"
	"sync"

	"github.com/gobwas/ws"
	"golang.org/x/sys/unix"

	"beside/work"
)

// A poller has all WebSockets. One goroutine reads them, with one buffer.
type poller struct {
	hub   *work.Hub
	epoll int

	mu    sync.Mutex
	conns map[int]*conn // by file descriptor
}

func newPoller(hub *work.Hub) (*poller, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	return &poller{hub: hub, epoll: epoll, conns: map[int]*conn{}}, err
}

// add takes over the connection. It duplicates the file descriptor, so that Go's runtime does not poll it, and closes
// the original.
func (p *poller) add(c *net.TCPConn, id string) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}

	fd := -1
	var duplicated error
	err = raw.Control(func(old uintptr) { fd, duplicated = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	if err := errors.Join(err, duplicated); err != nil {
		return err
	}
	_ = c.Close() // before epoll gets the connection, which stays in epoll as long as any descriptor of it is open

	one := &conn{poller: p, fd: fd}
	one.client = p.hub.Welcome(id, one)
	p.mu.Lock()
	p.conns[fd] = one
	p.mu.Unlock()

	return unix.EpollCtl(p.epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

// run reads and writes what the kernel is ready for.
func (p *poller) run() {
	events := make([]unix.EpollEvent, 256)
	buf := make([]byte, 4096)
	for {
		n, err := unix.EpollWait(p.epoll, events, -1)
		if err != nil && !errors.Is(err, unix.EINTR) {
			panic(err)
		}

		for _, e := range events[:max(n, 0)] {
			p.mu.Lock()
			c := p.conns[int(e.Fd)]
			p.mu.Unlock()

			if e.Events&unix.EPOLLOUT != 0 {
				c.flush()
			}
			if e.Events&^unix.EPOLLOUT != 0 && c.read(buf) != nil {
				p.end(c)
			}
		}
	}
}

func (p *poller) end(c *conn) {
	p.hub.Gone(c.client)
	p.mu.Lock()
	delete(p.conns, c.fd)
	p.mu.Unlock()
	c.close()
}

// A conn is a WebSocket.
type conn struct {
	poller *poller
	fd     int
	client *work.Client
	ahead  []byte // the beginning of a frame that has not arrived completely

	mu     sync.Mutex
	unsent []byte
	closed bool
}

// read handles the frames that have come. An error means that the connection has ended.
func (c *conn) read(buf []byte) error {
	n, err := unix.Read(c.fd, buf)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
		return nil
	}
	if err != nil {
		return err
	}
	if n == 0 {
		return io.EOF
	}

	rest := buf[:n]
	if c.ahead != nil {
		rest = append(c.ahead, rest...)
		c.ahead = nil
	}

	for len(rest) > 0 {
		in := bytes.NewReader(rest)
		header, err := ws.ReadHeader(in)
		if header.Length > int64(len(buf)) {
			return ws.ErrHeaderLengthUnexpected
		}
		if err != nil || int64(in.Len()) < header.Length {
			c.ahead = bytes.Clone(rest)
			return nil
		}

		begins := len(rest) - in.Len()
		ends := begins + int(header.Length)
		if err := c.handle(header, rest[begins:ends]); err != nil {
			return err
		}
		rest = rest[ends:]
	}

	return nil
}

// handle handles a frame. Pongs are ignored.
func (c *conn) handle(header ws.Header, payload []byte) error {
	if header.Masked {
		ws.Cipher(payload, header.Mask, 0)
	}

	switch header.OpCode {
	case ws.OpText:
		c.poller.hub.Receive(c.client, payload)
	case ws.OpPing:
		_, _ = c.Write(ws.MustCompileFrame(ws.NewPongFrame(payload))) // an error ends the connection
	case ws.OpClose:
		_, _ = c.Write(ws.MustCompileFrame(ws.NewCloseFrame(payload)))
		return io.EOF
	}

	return nil
}

// Write sends a frame, or keeps what the kernel does not take until it takes more.
func (c *conn) Write(frame []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.closed {
		return 0, net.ErrClosed
	}
	if c.unsent != nil {
		c.unsent = append(c.unsent, frame...)
		return len(frame), nil
	}

	n, err := unix.Write(c.fd, frame)
	if n = max(n, 0); n < len(frame) {
		if err != nil && !errors.Is(err, unix.EAGAIN) {
			return n, err
		}
		c.unsent = bytes.Clone(frame[n:])
		c.waitLocked(unix.EPOLLIN | unix.EPOLLOUT)
	}

	return len(frame), nil
}

// flush sends what the kernel did not take before.
func (c *conn) flush() {
	c.mu.Lock()
	defer c.mu.Unlock()

	n, err := unix.Write(c.fd, c.unsent)
	c.unsent = c.unsent[max(n, 0):]

	failed := err != nil && !errors.Is(err, unix.EAGAIN) // then reading sees the error, too
	if len(c.unsent) == 0 || failed {
		c.unsent = nil
		c.waitLocked(unix.EPOLLIN)
	}
}

func (c *conn) waitLocked(events uint32) {
	// An error means that the connection is not in epoll yet, or that it has ended.
	_ = unix.EpollCtl(c.poller.epoll, unix.EPOLL_CTL_MOD, c.fd, &unix.EpollEvent{Events: events, Fd: int32(c.fd)})
}

func (c *conn) close() {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.closed = true
	_ = unix.Close(c.fd)
}
