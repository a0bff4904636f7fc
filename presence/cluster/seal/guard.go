package seal

import (
	"cmp"
	"fmt"
	"sync"
	"time"
)

// GuardConfig tunes a Guard. A zero field takes its default.
type GuardConfig struct {
	Window  time.Duration // how far a sender's clock may be from ours, either way; default 30s, at least 1s
	Width   int           // how many numbers one message may be overtaken by; default 1024, rounded up to a multiple of 64
	Senders int           // most senders known at once; default 1024
	// Skew is how far behind a sender's clock may be when this process has just
	// started: what was sent longer ago than that was meant for its predecessor.
	// Default 2s.
	Skew time.Duration
}

// Guard takes every message once. Senders number their messages, and each life
// of a sender (name and incarnation) has a window of numbers as in RFC 4303. A
// sender is forgotten only when everything it has sent has become too old, so
// nothing can be taken twice; when there are too many, new ones are refused
// until then. Any goroutine may use it, after it has verified the signature.
type Guard struct {
	window  int64 // ms
	words   int
	most    int
	mu      sync.Mutex
	senders map[sender]*history
	floor   int64 // a sender that is not known must have sent after this: what a forgotten one sent is before it
	swept   int64 // when senders were last forgotten
}

type sender struct {
	name        string
	incarnation uint64
}

// history is what one sender has sent: bit n of the ring stands for number n
// modulo its size. Only the numbers (newest - size, newest] are in it.
type history struct {
	name   string
	newest uint64
	last   int64 // greatest timestamp, unix ms
	ring   []uint64
}

// NewGuard returns a Guard that takes what is sent from now on.
func NewGuard(cfg GuardConfig) (*Guard, error) {
	cfg.Window = cmp.Or(cfg.Window, 30*time.Second)
	cfg.Width = cmp.Or(cfg.Width, 1024)
	cfg.Senders = cmp.Or(cfg.Senders, 1024)
	cfg.Skew = cmp.Or(cfg.Skew, 2*time.Second)
	switch {
	case cfg.Window < time.Second:
		return nil, fmt.Errorf("seal: %w: a window of %s", ErrConfig, cfg.Window)
	case cfg.Width < 0 || cfg.Senders < 0 || cfg.Skew < 0:
		return nil, fmt.Errorf("seal: %w: a width, number of senders or skew below zero", ErrConfig)
	}
	return &Guard{
		window:  cfg.Window.Milliseconds(),
		words:   (cfg.Width+63)/64 + 1, // one is shared between the newest and the oldest numbers
		most:    cfg.Senders,
		senders: map[sender]*history{},
		floor:   time.Now().Add(-min(cfg.Skew, cfg.Window)).UnixMilli(),
	}, nil
}

// Admit takes message number seq, sent at that time (unix ms) by that life of
// that sender, or says why not: ErrOld, ErrFuture, ErrReplayed or ErrSenders.
// It returns the name as a string of its own.
func (g *Guard) Admit(now time.Time, name []byte, incarnation uint64, at int64, seq uint64) (string, error) {
	ms := now.UnixMilli()
	switch {
	case at < ms-g.window:
		return "", ErrOld
	case at > ms+g.window:
		return "", ErrFuture
	case seq == 0:
		return "", ErrReplayed
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	h := g.senders[sender{string(name), incarnation}]
	if h == nil {
		if at <= g.floor {
			return "", ErrOld
		}
		if len(g.senders) >= g.most || ms-g.swept > g.window {
			g.sweep(ms)
		}
		if len(g.senders) >= g.most {
			return "", ErrSenders
		}
		h = &history{name: string(name), ring: make([]uint64, g.words)}
		g.senders[sender{h.name, incarnation}] = h
	}
	if !h.take(seq) {
		return "", ErrReplayed
	}
	h.last = max(h.last, at)
	return h.name, nil
}

// sweep forgets senders whose every message is too old by now. Should our clock
// go back, the floor keeps those messages out.
func (g *Guard) sweep(ms int64) {
	g.swept = ms
	for s, h := range g.senders {
		if h.last < ms-g.window {
			g.floor = max(g.floor, h.last)
			delete(g.senders, s)
		}
	}
}

// take marks seq as taken, unless it is marked or has left the ring.
func (h *history) take(seq uint64) bool {
	size := uint64(len(h.ring)) * 64
	bit := uint64(1) << (seq % 64)
	if seq > h.newest {
		// Words between the newest's and seq's hold numbers that have left the ring.
		from, to := h.newest/64, seq/64
		for i := range min(to-from, uint64(len(h.ring))) {
			h.ring[(to-i)%uint64(len(h.ring))] = 0
		}
		h.newest = seq
		h.ring[to%uint64(len(h.ring))] |= bit
		return true
	}
	// Of the word that the newest is in, the rest was cleared: it cannot tell of the oldest.
	if h.newest-seq >= size-64 {
		return false
	}
	word := &h.ring[seq/64%uint64(len(h.ring))]
	if *word&bit != 0 {
		return false
	}
	*word |= bit
	return true
}
