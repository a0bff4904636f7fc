package gateway

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

// pollBatch is how many connections are asked for at once.
const pollBatch = 256

// poller tells which of a shard's connections have something to read and
// serves them, one after the other in one goroutine, so that a silent
// connection costs no goroutine. Serving never waits for a client.
//
// It is an epoll instance beside the runtime's, which itself is waited for by
// the runtime's like any descriptor: no thread is blocked for it. Events are
// edge-triggered: one is lost on nobody, since who serves a connection looks
// again when there was one meanwhile (conn.turns).
type poller struct {
	file *os.File
	raw  syscall.RawConn
	used chan struct{} // closed with the first connection: until then nobody need be woken
	once sync.Once     // closes it

	mu    sync.Mutex
	conns []*conn // by slot; slot 0 is nobody's
	free  []int32
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("gateway: epoll: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("gateway: epoll: %w", err)
	}
	p := &poller{file: os.NewFile(uintptr(fd), "epoll"), conns: make([]*conn, 1), used: make(chan struct{})}
	if p.raw, err = p.file.SyscallConn(); err != nil {
		return nil, fmt.Errorf("gateway: epoll: %w", err)
	}
	return p, nil
}

// add has c served when there is something to read or it has ended. The caller
// has c's turn.
func (p *poller) add(c *conn) error {
	if p == nil || c.wire.fd < 0 {
		return errNoPoller
	}
	p.once.Do(func() { close(p.used) })
	p.mu.Lock()
	if n := len(p.free); n > 0 {
		c.slot, p.free = p.free[n-1], p.free[:n-1]
		p.conns[c.slot] = c
	} else {
		c.slot = int32(len(p.conns))
		p.conns = append(p.conns, c)
	}
	p.mu.Unlock()
	err := net.ErrClosed
	failed := p.raw.Control(func(epoll uintptr) {
		c.wire.mu.Lock() // the descriptor stays open
		defer c.wire.mu.Unlock()
		if !c.wire.closed.Load() {
			err = unix.EpollCtl(int(epoll), unix.EPOLL_CTL_ADD, c.wire.fd, &unix.EpollEvent{
				Events: unix.EPOLLIN | unix.EPOLLRDHUP | unix.EPOLLET,
				Fd:     c.slot,
			})
		}
	})
	if err = cmp.Or(failed, err); err != nil {
		p.remove(c)
		return fmt.Errorf("gateway: epoll: %w", err)
	}
	return nil
}

// remove forgets c. Its descriptor is no longer watched once it is closed.
func (p *poller) remove(c *conn) {
	if c.slot == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c.slot] = nil
	p.free = append(p.free, c.slot)
	c.slot = 0
}

// run serves until ctx ends.
func (p *poller) run(ctx context.Context) {
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
			n, failed = unix.EpollWait(int(fd), events, 0)
			if failed != unix.EINTR { //nolint:errorlint
				return n > 0 || failed != nil
			}
		}
	}
	ready := make([]*conn, 0, pollBatch)
	for {
		if err := p.raw.Read(wait); err != nil || failed != nil {
			return // closed
		}
		p.mu.Lock()
		for i := range events[:n] {
			// The slot's owner may be another by now: then it is looked at for nothing.
			c := p.conns[events[i].Fd]
			if c == nil {
				continue
			}
			if events[i].Events&^unix.EPOLLIN != 0 {
				c.hup.Store(true)
			}
			ready = append(ready, c)
		}
		p.mu.Unlock()
		for _, c := range ready {
			if c.turns.Add(1) == 1 {
				c.serve()
			}
		}
		clear(ready)
		ready = ready[:0]
	}
}
