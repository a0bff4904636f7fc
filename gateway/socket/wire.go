// Package socket is a client's connection below any protocol. Writes never wait for
// the client, and a silent client costs no goroutine. On Linux the package makes its
// own system calls. Elsewhere, and with the build tag portable, each connection has a
// goroutine that reads, and another goroutine finishes writes.
package socket

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// ErrBusy means that the client has not taken the last write yet.
var ErrBusy = errors.New("the client's last write is not complete")

// Wire is a client's connection below the protocol. All bytes to the client go
// through it. Each call writes one or more whole frames, so frames never mix. A write
// never waits: the Wire keeps the bytes that the socket does not take at once and
// writes them in the background. If they are not out after Owner.WriteTimeout, it closes the
// connection.
//
// The kept bytes are bounded: the fan-out writes nothing to a busy wire, and the
// client's next message is not read. So they are at most one pass of the fan-out or
// the answers to one message, a pong, two frames that are sent once per
// connection (the request to reconnect, and the reason for the close), and for some
// clients a confirmation of each page that they have joined.
type Wire struct {
	busy   atomic.Bool // late is not nil; may be read without mu
	closed atomic.Bool // set under mu
	mu     sync.Mutex  // guards what follows, up to late, and that the descriptor stays open
	fd     descriptor  // for calls that do not wait; noDescriptor: such calls are impossible
	ending bool        // the last frame has been written, so no more frames follow
	late   *late       // what the socket has not taken; nil: nothing
	owner  Owner
	conn   conn      // nil: only the descriptor is left, see dropConnLocked
	tls    *tls.Conn // over conn, called under mu alone; nil: no TLS, or conn itself is TLS, and its calls wait

	turn
}

// late has the bytes that the client has yet to take. The wire's lock guards it.
type late struct {
	rest []byte        // finish writes it; only finish changes it
	more []byte        // the bytes that follow rest
	free chan struct{} // closed when all is out; nil unless a goroutine waits in Wait
}

// conn is what the wire needs of a connection for calls that wait.
type conn interface {
	io.ReadWriteCloser
	SetWriteDeadline(time.Time) error
}

// Owner serves the client of a Wire.
type Owner interface {
	// Spawn starts a goroutine that the owner waits for at its end.
	Spawn(func())
	// Look reads once, with Wire.Read, and serves what it read. more says that there may
	// be more to read. An error ends the connection. One goroutine at a time calls Look.
	// Look must not wait for a client, unless the wire is not polled.
	Look(in *Input) (more bool, err error)
	// WriteTimeout is how long a write may take to finish.
	WriteTimeout() time.Duration
	// Slow says that the client has not taken a write within WriteTimeout. The wire is about to close.
	Slow()
	// Freed says that a busy wire is free again. taken says that the client has taken
	// bytes, which is a sign of life. Any goroutine may call it.
	Freed(taken bool)
	// Ended says that the wire is closed, and that Look is never called again. The
	// goroutine that called Look last calls it once.
	Ended()
}

// Use gives the wire its connection. From then on only the wire may close it. The
// caller has the wire's turn until Start.
func (w *Wire) Use(c net.Conn, o Owner) {
	w.conn = c
	w.owner = o
	w.fd = descriptorOf(c)

	if over, ok := c.(*tls.Conn); ok {
		w.unseal(over)
	}
	w.takeOver(c)

	w.turns.Store(1)
}

// ServeAfter serves the wire once more after d, for an owner that has left something
// unread. The wire may be closed by then. Only Look may call it.
func (w *Wire) ServeAfter(d time.Duration) {
	if w.Polled() {
		time.AfterFunc(d, w.occasion)
	}
}

// Busy reports whether the client has not taken everything that was written.
func (w *Wire) Busy() bool { return w.busy.Load() }

// Closed reports whether the connection is closed.
func (w *Wire) Closed() bool { return w.closed.Load() }

// Try writes p if the client has taken everything before; otherwise it returns
// ErrBusy. It returns net.ErrClosed if the wire is closed. p is not kept.
func (w *Wire) Try(p []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.closed.Load() || w.ending {
		return net.ErrClosed
	}
	if w.late != nil {
		return ErrBusy
	}

	return w.writeLocked(p)
}

// Write writes p, after the bytes that the client has not taken yet. p is not kept.
func (w *Wire) Write(p []byte) error { return w.put(p, false) }

// End is Write for the last bytes: later writes return net.ErrClosed.
func (w *Wire) End(p []byte) error { return w.put(p, true) }

func (w *Wire) put(p []byte, last bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.closed.Load() || w.ending {
		return net.ErrClosed
	}

	w.ending = last
	return w.writeLocked(p)
}

// writeLocked writes p, after the bytes that the client has not taken yet.
func (w *Wire) writeLocked(p []byte) error {
	w.wrote(p)

	if w.tls != nil {
		_, err := w.tls.Write(p) // which calls emit
		return err
	}

	return w.emitLocked(p)
}

// emitLocked sends the bytes p as they are, and keeps those that the socket does not take. After
// Close they are TLS's last record, of which nothing is kept.
func (w *Wire) emitLocked(p []byte) error {
	isClosed := w.closed.Load()
	if w.late != nil {
		if !isClosed {
			w.late.more = append(w.late.more, p...)
		}

		return nil
	}

	n := 0
	if w.fd != noDescriptor {
		var err error
		n, err = w.fd.send(p)
		if err != nil || n == len(p) || isClosed {
			return err
		}
	}

	w.waitsLocked()
	// The caller reuses p, so the rest is a copy.
	w.late = &late{rest: bytes.Clone(p[n:])}
	w.busy.Store(true)
	w.owner.Spawn(w.finish) // finish ends within the timeout, or when the wire is closed

	return nil
}

// stalled is the shortest duration of a write that counts as having waited for the client.
const stalled = 100 * time.Millisecond

// finish writes the rest and frees the wire, or closes it.
func (w *Wire) finish() {
	began := time.Now()
	w.mu.Lock()
	late := w.late
	triedAtOnce := w.fd != noDescriptor // read here, since Start changes the descriptor
	w.mu.Unlock()

	var err error
	for rest := late.rest; rest != nil; {
		_ = w.conn.SetWriteDeadline(time.Now().Add(w.owner.WriteTimeout()))
		_, err = w.conn.Write(rest)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			w.owner.Slow()
		}
		if err != nil {
			_ = w.Close()
		}

		rest = w.next(late, err == nil)
	}

	if err == nil {
		// Without calls that do not wait every write ends here, and one that ends at once
		// has only reached the system's buffer.
		w.owner.Freed(triedAtOnce || time.Since(began) >= stalled)
		w.occasion() // a busy client was not read
	}
}

// next returns the bytes that followed the last write, if it was taken. When there are none, the wire is free.
func (w *Wire) next(late *late, taken bool) (rest []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if taken {
		rest = late.more
	}
	late.rest = rest
	late.more = nil
	if rest != nil {
		return rest
	}

	_ = w.conn.SetWriteDeadline(time.Time{})
	w.late = nil
	w.busy.Store(false)
	if late.free != nil {
		close(late.free)
	}

	return nil
}

// Wait returns when the client has taken everything, or the wire is closed.
func (w *Wire) Wait() {
	w.mu.Lock()
	if w.late == nil {
		w.mu.Unlock()
		return
	}

	if w.late.free == nil {
		w.late.free = make(chan struct{})
	}

	free := w.late.free
	w.mu.Unlock()

	<-free
}

// Read reads once. more says that there may be more to read; if it is false, n may be
// 0. Read waits only if the wire is not polled. Only Look may call it.
//
// A busy wire over TLS reads nothing. TLS by itself answers messages, such as requests for new
// keys, that a client may send as often as it likes, and the answers would have to be kept. When
// the wire is free, Look is called again.
func (w *Wire) Read(p []byte) (n int, more bool, err error) {
	if len(p) == 0 {
		return 0, false, nil
	}

	if !w.Polled() {
		n, err = w.conn.Read(p)
		return n, true, err
	}

	w.mu.Lock()
	n, err = w.receiveLocked(p)
	w.mu.Unlock()

	if n == 0 {
		return 0, false, err
	}

	// A read that did not fill p has emptied the socket, and the poller reports later
	// bytes. But it does not report the client's end again (hup), so Read reads on.
	more = n == len(p) || w.hup.Load() || w.tls != nil

	return n, more, nil
}

// receiveLocked reads what the connection has, without waiting.
func (w *Wire) receiveLocked(p []byte) (n int, err error) {
	if w.closed.Load() {
		return 0, net.ErrClosed
	}
	if w.tls == nil {
		return w.fd.receive(p)
	}
	if w.late != nil {
		return 0, nil
	}

	return w.openLocked(p)
}

// Close closes the connection. Any goroutine may call it, more than once. Owner.Ended
// is called after it.
func (w *Wire) Close() error {
	w.mu.Lock()
	if w.closed.Load() {
		w.mu.Unlock()
		return nil
	}

	w.closed.Store(true)
	var err error
	if w.tls != nil {
		err = w.tls.Close() // sends close_notify first, which ends an event stream properly
	} else {
		err = w.closeLocked()
	}
	w.mu.Unlock()

	// Whoever serves the wire finds it closed, and calls Ended. Close does not call it, because the caller may hold a
	// lock that Ended takes.
	if w.turns.Add(1) == 1 {
		w.owner.Spawn(w.serve)
	}

	return err
}
