//go:build !portable

package socket

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// acceptor accepts the clients of a TCP listener as *Conn.
type acceptor struct {
	net.Listener
	file *os.File // another descriptor of the listener: that of a net.Listener has no calls that wait
	raw  syscall.RawConn
}

// Acceptor returns a listener that accepts the clients of l as *Conn. If l has no descriptor, it returns l.
func Acceptor(l net.Listener) (net.Listener, error) {
	of := descriptorOf(l)
	if of == noDescriptor {
		return l, nil
	}

	d, err := of.duplicate()
	if err != nil {
		return nil, err
	}

	a := &acceptor{Listener: l, file: os.NewFile(uintptr(d), "listener")}
	a.raw, err = a.file.SyscallConn()
	if err != nil {
		return nil, errors.Join(err, a.file.Close())
	}

	// Clients inherit it: frames are whole, and must not wait for others.
	_ = a.raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) })

	return a, nil
}

// Accept returns the next connection as a *Conn.
func (a *acceptor) Accept() (net.Conn, error) {
	var fd int
	var from unix.Sockaddr
	var err error

	failed := a.raw.Read(func(l uintptr) bool {
		for {
			fd, from, err = unix.Accept4(int(l), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC)
			switch err { //nolint:errorlint
			case unix.EINTR, unix.ECONNABORTED: // a signal, or a client that left before it was accepted
			case unix.EAGAIN:
				return false
			default:
				return true
			}
		}
	})
	if failed != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: a.Addr(), Err: net.ErrClosed}
	}
	if err != nil {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Addr: a.Addr(), Err: os.NewSyscallError("accept4", err)}
	}

	return &Conn{fd: descriptor(fd), local: a.Addr(), remote: addressOf(from)}, nil
}

// Close ends Accept.
func (a *acceptor) Close() error { return errors.Join(a.file.Close(), a.Listener.Close()) }

func addressOf(from unix.Sockaddr) *net.TCPAddr {
	switch a := from.(type) {
	case *unix.SockaddrInet4:
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port}
	case *unix.SockaddrInet6:
		zone := ""
		if a.ZoneId != 0 {
			// As net does, which has the names of interfaces.
			if i, err := net.InterfaceByIndex(int(a.ZoneId)); err == nil {
				zone = i.Name
			}
		}
		return &net.TCPAddr{IP: a.Addr[:], Port: a.Port, Zone: zone}
	}

	return nil
}

// Conn is a connection that was accepted a moment ago. At first it is a descriptor and no more: a Poller reports when
// the client has sent something, and a Wire may then take it over. What net keeps for each connection, and the system
// calls for that, are spared. To everybody else a Conn is a net.Conn like any other: the first call that may have to
// wait takes it from the Poller to Go's runtime.
type Conn struct {
	local  net.Addr
	remote *net.TCPAddr

	mu   sync.Mutex
	fd   descriptor // noDescriptor: a Wire has taken it, or the Conn is closed
	file *os.File   // of fd, once a call has had to wait; nil before
	sent []byte     // what Read returns first, see Unread
	gone Awaiter    // learns of Close; nil: nobody does

	// The Poller's goroutine owns these, slot and hup with the Poller's lock.
	awaiter Awaiter // nil: it knows of the Conn
	from    *Poller
	slot    int32
	hup     bool
}

// firstRead is how many of the first bytes an Awaiter gets at most. The HTTP server reads as many at once. So whoever
// takes the connection over from it finds the rest of them in its buffer or in the socket, and none in Conn.sent.
const firstRead = 4 << 10

// Awaiter learns what a client that Await was called for sends first.
type Awaiter interface {
	// Awaited gets the Conn and the first bytes, which are valid until it returns; none if the client has gone. The
	// Poller calls it once for each Conn, and other clients wait meanwhile, so it must not wait.
	Awaited(c *Conn, sent []byte)
	// Gone says that the Conn was closed while a Poller watched it. Close calls it, with the Conn's lock.
	Gone()
}

// Await has the Poller report the first bytes of a client to w. It returns false if that is not possible.
func (p *Poller) Await(c net.Conn, w Awaiter) bool {
	own, ok := c.(*Conn)
	if p == nil || !ok {
		return false
	}

	p.once.Do(func() { close(p.used) })

	own.mu.Lock()
	defer own.mu.Unlock()

	// The slot comes first, because events may come as soon as the descriptor is added.
	own.awaiter = w
	own.gone = w
	own.from = p
	own.slot = p.seat(own)
	err := p.watch(own.fd, own.slot)
	if err != nil {
		p.vacate(own.slot)
		own.slot = 0
	}

	return err == nil
}

// hangUp implements entry.
func (c *Conn) hangUp() { c.hup = true }

// occasion implements entry.
func (c *Conn) occasion() {
	if c.awaiter == nil {
		return
	}

	in := inputs.Get().(*Input)
	defer inputs.Put(in)

	n, err := c.receive(in[:firstRead])
	if n == 0 && err == nil {
		return
	}

	w := c.awaiter
	c.awaiter = nil
	w.Awaited(c, in[:n])
}

func (c *Conn) receive(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.fd == noDescriptor {
		return 0, net.ErrClosed
	}

	return c.fd.receive(p)
}

// Send sends p, or fails if the system does not take all of it at once.
func (c *Conn) Send(p []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.fd == noDescriptor {
		return net.ErrClosed
	}

	n, err := c.fd.send(p)
	if err == nil && n < len(p) {
		return io.ErrShortWrite
	}

	return err
}

// Unread makes the next calls of Read return sent first. It must be called before them.
func (c *Conn) Unread(sent []byte) { c.sent = sent }

// waiting returns the file whose calls wait, which it makes at the first call. From then on no Poller watches c.
func (c *Conn) waiting() (*os.File, error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.file != nil {
		return c.file, nil
	}
	if c.fd == noDescriptor {
		return nil, net.ErrClosed
	}

	if c.slot != 0 {
		c.from.unwatch(c.fd)
		c.from.vacate(c.slot)
		c.slot = 0
		c.gone = nil
	}
	c.file = os.NewFile(uintptr(c.fd), "socket")

	return c.file, nil
}

// take gives the descriptor to the caller. For everybody else c is closed from then on.
func (c *Conn) take() descriptor {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.file != nil {
		return noDescriptor
	}

	d := c.fd
	c.fd = noDescriptor

	return d
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	f, err := c.waiting()
	if err != nil {
		return 0, c.errorOf("read", err)
	}

	if len(c.sent) > 0 {
		n := copy(p, c.sent)
		c.sent = c.sent[n:]
		return n, nil
	}

	n, err := f.Read(p)

	return n, c.errorOf("read", err)
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	f, err := c.waiting()
	if err != nil {
		return 0, c.errorOf("write", err)
	}

	n, err := f.Write(p)

	return n, c.errorOf("write", err)
}

// errorOf returns an error as net's connections have it: net/http knows these from others.
func (c *Conn) errorOf(op string, err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint
		return err
	}
	if errors.Is(err, os.ErrClosed) {
		err = net.ErrClosed
	}

	return &net.OpError{Op: op, Net: "tcp", Source: c.local, Addr: c.remote, Err: err}
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.file != nil {
		return c.file.Close()
	}
	if c.fd == noDescriptor {
		return net.ErrClosed
	}

	err := unix.Close(int(c.fd))
	c.fd = noDescriptor
	if c.slot != 0 {
		c.from.vacate(c.slot) // only now, since no more events come for it
		c.slot = 0
		c.gone.Gone()
	}

	return os.NewSyscallError("close", err)
}

// CloseWrite ends what is sent. The HTTP server does so before it closes a client that may still be sending.
func (c *Conn) CloseWrite() error {
	err := net.ErrClosed
	failed := control{c}.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_WR) })

	return errors.Join(failed, err)
}

// LocalAddr returns the address of the listener.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error { return c.limit((*os.File).SetDeadline, t) }

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.limit((*os.File).SetReadDeadline, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.limit((*os.File).SetWriteDeadline, t) }

func (c *Conn) limit(set func(*os.File, time.Time) error, t time.Time) error {
	f, err := c.waiting()
	if err == nil {
		err = set(f, t)
	}

	return c.errorOf("set", err)
}

// SyscallConn implements syscall.Conn. Its calls do not take c from a Poller.
func (c *Conn) SyscallConn() (syscall.RawConn, error) { return control{c}, nil }

type control struct{ *Conn }

// Control implements syscall.RawConn.
func (c control) Control(f func(fd uintptr)) error {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.file != nil {
		raw, err := c.file.SyscallConn()
		if err != nil {
			return err
		}
		return raw.Control(f)
	}
	if c.fd == noDescriptor {
		return net.ErrClosed
	}
	f(uintptr(c.fd))

	return nil
}

// Read implements syscall.RawConn.
func (control) Read(func(uintptr) bool) error { return errors.ErrUnsupported }

// Write implements syscall.RawConn.
func (control) Write(func(uintptr) bool) error { return errors.ErrUnsupported }
