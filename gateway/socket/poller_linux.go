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

	mu    sync.Mutex
	wires []*Wire // by slot; slot 0 is never used
	free  []int32 // slots without a wire
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

	p := &Poller{file: os.NewFile(uintptr(fd), "epoll"), wires: make([]*Wire, 1), used: make(chan struct{})}
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

	p.once.Do(func() { close(p.used) })

	// The slot comes first, because events may come as soon as the descriptor is added.
	p.seat(w)

	err := net.ErrClosed
	failed := p.raw.Control(func(epoll uintptr) {
		w.mu.Lock() // keeps the descriptor open
		defer w.mu.Unlock()
		if !w.closed.Load() {
			err = unix.EpollCtl(int(epoll), unix.EPOLL_CTL_ADD, int(w.fd), &unix.EpollEvent{
				Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET,
				Fd:     w.slot,
			})
		}
		if err == nil {
			w.dropConnLocked() // the socket stays watched as long as any descriptor of it is open
		}
	})
	if cmp.Or(failed, err) != nil {
		p.remove(w)
		return false
	}

	return true
}

// seat gives w a slot.
func (p *Poller) seat(w *Wire) {
	p.mu.Lock()
	defer p.mu.Unlock()

	w.from = p
	n := len(p.free)
	if n == 0 {
		w.slot = int32(len(p.wires))
		p.wires = append(p.wires, w)
		return
	}

	w.slot = p.free[n-1]
	p.free = p.free[:n-1]
	p.wires[w.slot] = w
}

// remove forgets w. The caller must have w's turn. The system stops watching the
// descriptor when it is closed.
func (p *Poller) remove(w *Wire) {
	if w.slot == 0 {
		return
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	p.wires[w.slot] = nil
	p.free = append(p.free, w.slot)
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
	ready := make([]*Wire, 0, pollBatch)
	for {
		// An error means that ctx has ended and the epoll file is closed.
		if err := p.raw.Read(wait); err != nil || failed != nil {
			return
		}

		p.mu.Lock()
		for i := range events[:n] {
			// The slot may hold another wire by now, which is then read in vain.
			w := p.wires[events[i].Fd]
			if w == nil {
				continue
			}

			if events[i].Events&^unix.EPOLLIN != 0 {
				w.hup.Store(true)
			}
			ready = append(ready, w)
		}
		p.mu.Unlock()

		// Without the lock, which a wire that ends needs to be removed.
		for _, w := range ready {
			w.occasion()
		}

		clear(ready)
		ready = ready[:0]
	}
}
