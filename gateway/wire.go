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
// pass here, each call one or more whole frames, so frames never mix. Nobody
// who writes ever waits: what the socket does not take at once is kept, and
// finished in the background or, after the timeout, the connection is closed.
//
// What is kept is bounded: the fan-out writes nothing to a busy wire, and its
// client's next message is not read. So there is at most one pass of the
// fan-out or the answers to one message, a pong, and what is said once in a
// connection's life: that it should reconnect, and why it is closed.
type wire struct {
	busy    atomic.Bool   // rest is not nil; may be read without mu
	closed  atomic.Bool   // set under mu
	ending  bool          // no more frames: a close frame has been written; guarded by mu
	mu      sync.Mutex    // guards what follows, up to free, and that the descriptor stays open
	fd      int           // descriptor; -1: none
	rest    []byte        // what the socket has not taken
	more    []byte        // what comes after it
	free    chan struct{} // closed when rest is out; nil unless somebody waits
	timeout time.Duration // for a write to finish
	owner   owner
	net.Conn
}

// owner is told what happens to a wire.
type owner interface {
	spawn(func()) // starts a goroutine that the gateway waits for
	wireFree()    // a busy wire is free again; called from a goroutine that may be kept
	wireClosed()  // called once
}

// use begins with a connection, which nobody else may close.
func (w *wire) use(c net.Conn, timeout time.Duration, o owner) {
	w.Conn, w.timeout, w.owner, w.fd = c, timeout, o, -1
	if sc, ok := c.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { w.fd = int(fd) }) // or it is closed already
		}
	}
}

// try writes p if the client has taken everything before; p is not kept. It
// returns errBusy when it has not, and net.ErrClosed when the wire is closed.
func (w *wire) try(p []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.closed.Load() || w.ending:
		return net.ErrClosed
	case w.rest != nil:
		return errBusy
	}
	return w.write(p)
}

// receive reads what has come without waiting; n is 0 when that is nothing.
func (w *wire) receive(p []byte) (n int, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Load() {
		return 0, net.ErrClosed
	}
	return receiveNow(w.fd, p)
}

// write writes p under mu, and keeps what the socket does not take.
func (w *wire) write(p []byte) error {
	n := 0
	if w.fd >= 0 {
		var err error
		if n, err = sendNow(w.fd, p); err != nil || n == len(p) {
			return err
		}
	}
	w.rest = append([]byte(nil), p[n:]...)
	w.busy.Store(true)
	w.owner.spawn(w.finish) // ends within the timeout, or when the wire is closed
	return nil
}

// finish writes the rest and frees the wire, or closes it.
func (w *wire) finish() {
	w.mu.Lock()
	rest := w.rest // it stays as it is while it is not nil
	w.mu.Unlock()
	var err error
	for rest != nil {
		_ = w.SetWriteDeadline(time.Now().Add(w.timeout))
		if _, err = w.Conn.Write(rest); err != nil {
			_ = w.Close()
		}
		w.mu.Lock()
		if rest = w.more; err != nil {
			rest = nil
		}
		if w.rest, w.more = rest, nil; rest == nil {
			_ = w.SetWriteDeadline(time.Time{})
			w.busy.Store(false)
			if w.free != nil {
				close(w.free)
				w.free = nil
			}
		}
		w.mu.Unlock()
	}
	if err == nil {
		w.owner.wireFree()
	}
}

// wait returns when the client has taken what was sent, or the wire is closed.
func (w *wire) wait() {
	w.mu.Lock()
	if w.rest == nil {
		w.mu.Unlock()
		return
	}
	if w.free == nil {
		w.free = make(chan struct{})
	}
	free := w.free
	w.mu.Unlock()
	<-free
}

// Write writes our answers, after what the client has not taken yet.
func (w *wire) Write(p []byte) (int, error) { return len(p), w.put(p, false) }

// end writes the last thing the client gets, which ends with a close frame.
func (w *wire) end(p []byte) error { return w.put(p, true) }

func (w *wire) put(p []byte, last bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Load() || w.ending {
		return net.ErrClosed
	}
	w.ending = last
	if w.rest != nil {
		w.more = append(w.more, p...)
		return nil
	}
	return w.write(p)
}

// Close closes the connection; it may be called more than once.
func (w *wire) Close() error {
	w.mu.Lock()
	if w.closed.Load() {
		w.mu.Unlock()
		return nil
	}
	w.closed.Store(true)
	err := w.Conn.Close()
	w.mu.Unlock()
	w.owner.wireClosed()
	return err
}
