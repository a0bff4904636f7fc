package gateway

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// errBusy says that the client has not taken the last write yet.
var errBusy = errors.New("the client has not taken what was sent")

// wire is a client's connection below the protocol. All bytes to the client
// pass here, ours and the WebSocket library's, each call one whole frame, so
// frames never mix. It never makes the fan-out wait: what the socket does not
// take at once is kept, at most one write of it, and nothing else is written
// until that is out or, after the timeout, the connection is closed.
type wire struct {
	net.Conn
	raw     syscall.RawConn // nil when Conn has no descriptor
	timeout time.Duration   // for a write to finish
	spawn   func(func())    // starts a goroutine that the gateway waits for
	freed   func()          // called, from a goroutine of its own, when a busy wire is free again
	busy    atomic.Bool     // rest is not nil; may be read without mu

	mu     sync.Mutex
	rest   []byte        // what the socket has not taken
	free   chan struct{} // closed when rest is out; nil unless somebody waits
	ending bool          // no more frames: a close frame has been written
	closed bool
}

func newWire(c net.Conn, timeout time.Duration, spawn func(func())) *wire {
	w := &wire{Conn: c, timeout: timeout, spawn: spawn}
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			w.raw = raw
		}
	}
	return w
}

// attempt is one non-blocking write. Its function is made once and used again,
// so that a delivery allocates nothing. One goroutine at a time.
type attempt struct {
	p   []byte
	n   int
	err error
	fn  func(fd uintptr) bool
}

func newAttempt() *attempt {
	a := &attempt{}
	a.fn = func(fd uintptr) bool {
		for {
			a.n, a.err = syscall.Write(int(fd), a.p)
			if a.err != syscall.EINTR {
				return true // whatever came of it: never wait
			}
		}
	}
	return a
}

var attempts = sync.Pool{New: func() any { return newAttempt() }}

// try writes p if the client has taken everything before; p is not kept. It
// returns errBusy when it has not, and net.ErrClosed when the wire is closed.
func (w *wire) try(p []byte, a *attempt) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.closed || w.ending:
		return net.ErrClosed
	case w.rest != nil:
		return errBusy
	}
	return w.write(p, a)
}

// write writes p under mu, and keeps what the socket does not take.
func (w *wire) write(p []byte, a *attempt) error {
	n := 0
	if w.raw != nil {
		a.p = p
		err := w.raw.Write(a.fn)
		a.p = nil
		if err != nil {
			return err
		}
		if a.err != nil && a.err != syscall.EAGAIN {
			return a.err
		}
		if n = max(a.n, 0); n == len(p) {
			return nil
		}
	}
	w.rest = append([]byte(nil), p[n:]...)
	w.busy.Store(true)
	w.spawn(w.finish) // ends within the timeout, or when the wire is closed
	return nil
}

// finish writes the rest and frees the wire, or closes it.
func (w *wire) finish() {
	w.mu.Lock()
	rest := w.rest // it stays as it is while it is not nil
	w.mu.Unlock()
	_ = w.SetWriteDeadline(time.Now().Add(w.timeout))
	_, err := w.Conn.Write(rest)
	_ = w.SetWriteDeadline(time.Time{})
	w.mu.Lock()
	w.rest = nil
	w.busy.Store(false)
	if w.free != nil {
		close(w.free)
		w.free = nil
	}
	w.mu.Unlock()
	if err != nil {
		_ = w.Close()
		return
	}
	if w.freed != nil {
		w.freed()
	}
}

// Write implements net.Conn for the library's frames and our answers: it waits
// until the client has taken what was sent before, at most as long as that may
// take.
func (w *wire) Write(p []byte) (int, error) { return len(p), w.put(p, false) }

// end writes a close frame, the last thing the client gets.
func (w *wire) end(frame []byte) error { return w.put(frame, true) }

func (w *wire) put(p []byte, last bool) error {
	a := attempts.Get().(*attempt)
	defer attempts.Put(a)
	for {
		w.mu.Lock()
		if w.closed || w.ending {
			w.mu.Unlock()
			return net.ErrClosed
		}
		if w.rest == nil {
			w.ending = last
			err := w.write(p, a)
			w.mu.Unlock()
			return err
		}
		if w.free == nil {
			w.free = make(chan struct{})
		}
		free := w.free
		w.mu.Unlock()
		<-free
	}
}

// Close closes the connection; it may be called more than once.
func (w *wire) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	return w.Conn.Close()
}
