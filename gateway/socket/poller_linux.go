//go:build !portable

package socket

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// pollBatch is how many events one epoll_wait returns at most.
const pollBatch = 256

// Poller finds which of its wires have something to read. One goroutine serves these
// wires one after the other, so a silent connection costs no goroutine. Serving never
// waits for a client.
//
// A Poller is an epoll instance of its own. The runtime's epoll watches it like any
// descriptor, so it blocks no thread. Events are edge-triggered. No event is lost: if
// one comes while a goroutine serves the wire, that goroutine reads again
// (turn.turns).
type Poller struct {
	file *os.File
	raw  syscall.RawConn
	used chan struct{} // closed by the first add; until then Run waits for it and not for events
	once sync.Once     // closes used

	mu      sync.Mutex
	entries []entry // by slot; slot 0 is never used
	free    []int32 // slots without an entry
}

// entry is what has a slot: a Wire, or a Conn that no Wire has taken over yet.
type entry interface {
	hangUp()   // the client has closed its side. The Poller calls it with its lock
	occasion() // there may be something to read
}

// NewPoller returns a Poller that does nothing until Run.
func NewPoller() (*Poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("socket: epoll: %w", err)
	}

	// Only a descriptor that does not block is watched by the runtime.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("socket: epoll: %w", err)
	}

	p := &Poller{file: os.NewFile(uintptr(fd), "epoll"), entries: make([]entry, 1), used: make(chan struct{})}
	p.raw, err = p.file.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("socket: epoll: %w", err)
	}

	return p, nil
}

// add makes p serve w whenever w has something to read or has ended. The caller must
// have w's turn. add returns false if w cannot be polled.
func (p *Poller) add(w *Wire) bool {
	if p == nil || w.fd == noDescriptor {
		return false
	}

	// A Conn had the slot, and the Poller has told it alone what happened so far.
	if w.slot != 0 {
		w.from.hand(w)
		return true
	}

	p.once.Do(func() { close(p.used) })

	// The slot comes first, because events may come as soon as the descriptor is added.
	w.from = p
	w.slot = p.seat(w)

	err := net.ErrClosed
	w.mu.Lock() // keeps the descriptor open
	if !w.closed.Load() {
		err = p.watch(w.fd, w.slot)
	}
	if err == nil {
		w.dropConnLocked() // the socket stays watched as long as any descriptor of it is open
	}
	w.mu.Unlock()

	if err != nil {
		p.remove(w)
	}

	return err == nil
}

// watch makes the system report what happens at a descriptor.
func (p *Poller) watch(fd descriptor, slot int32) error {
	return p.control(unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{
		Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET,
		Fd:     slot,
	})
}

// unwatch reverses watch, for a descriptor that stays open.
func (p *Poller) unwatch(fd descriptor) { _ = p.control(unix.EPOLL_CTL_DEL, fd, nil) }

func (p *Poller) control(op int, fd descriptor, event *unix.EpollEvent) (err error) {
	failed := p.raw.Control(func(epoll uintptr) { err = unix.EpollCtl(int(epoll), op, int(fd), event) })

	return cmp.Or(failed, err)
}

// seat gives e a slot.
func (p *Poller) seat(e entry) (slot int32) {
	p.mu.Lock()
	defer p.mu.Unlock()

	n := len(p.free)
	if n == 0 {
		p.entries = append(p.entries, e)
		return int32(len(p.entries) - 1)
	}

	slot = p.free[n-1]
	p.free = p.free[:n-1]
	p.entries[slot] = e

	return slot
}

// hand gives the slot of a Conn to the Wire that has taken it over.
func (p *Poller) hand(w *Wire) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if c, ok := p.entries[w.slot].(*Conn); ok && c.hup {
		w.hup.Store(true)
	}
	p.entries[w.slot] = w
}

// vacate makes a slot free. The system stops watching the descriptor when it is closed.
func (p *Poller) vacate(slot int32) {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.entries[slot] = nil
	p.free = append(p.free, slot)
}

// remove forgets w. The caller must have w's turn.
func (p *Poller) remove(w *Wire) {
	if w.slot == 0 {
		return
	}

	p.vacate(w.slot)
	w.slot = 0
}

// Run serves the wires until ctx ends.
func (p *Poller) Run(ctx context.Context) {
	if p == nil {
		return
	}

	stop := context.AfterFunc(ctx, func() { _ = p.file.Close() })
	defer stop()

	select {
	case <-ctx.Done():
		return
	case <-p.used:
	}

	var n int
	var failed error
	events := make([]unix.EpollEvent, pollBatch)

	wait := func(fd uintptr) bool {
		for {
			// With a timeout of 0: the runtime does the waiting, so no thread is blocked.
			n, failed = unix.EpollWait(int(fd), events, 0)
			if failed != unix.EINTR { //nolint:errorlint
				return n > 0 || failed != nil
			}
		}
	}
	ready := make([]entry, 0, pollBatch)
	for {
		// An error means that ctx has ended and the epoll file is closed.
		if err := p.raw.Read(wait); err != nil || failed != nil {
			return
		}

		p.mu.Lock()
		for i := range events[:n] {
			// The slot may have another entry by now, which is then read in vain.
			e := p.entries[events[i].Fd]
			if e == nil {
				continue
			}

			if events[i].Events&^unix.EPOLLIN != 0 {
				e.hangUp()
			}
			ready = append(ready, e)
		}
		p.mu.Unlock()

		// Without the lock, which a wire that ends needs to be removed.
		for _, e := range ready {
			e.occasion()
		}

		clear(ready)
		ready = ready[:0]
	}
}
