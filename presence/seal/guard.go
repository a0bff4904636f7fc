package seal

import (
	"sync"
	"time"
)

// tolerance is how far a sender's clock may be from ours, either way, and how late a message may be. Processes sign by
// the cluster's time, see Clock, and so agree; those of earlier releases sign by the clocks of their machines.
const tolerance = int64(30 * time.Second / time.Millisecond)

// maxSkew is how far behind a sender's clock may be when this process has just started: a
// message that seems older may be a recorded one, meant for the process before this one.
// If a sender's clock is further behind, the Guard first refuses all its messages for
// maxSkew, and then accepts those that are newer than all it has seen.
const maxSkew = int64(2 * time.Second / time.Millisecond)

// maxSenders is how many senders a Guard knows at once.
const maxSenders = 1024

// Guard accepts every message once. Senders number their messages, and each sender (name
// and incarnation) has a window of numbers as in RFC 4303. The Guard forgets a sender only
// when all its messages are too old, so it accepts no message twice. While it knows too
// many senders it refuses new ones. Any goroutine may use a Guard, after it has verified
// the message's signature.
type Guard struct {
	words int

	mu      sync.Mutex // guards all below
	senders map[sender]*history
	behind  map[sender]*lateness // unknown senders with messages sent until after; at most maxSenders
	// after is the time that messages of an unknown sender must be newer than; those of forgotten senders are not. 0:
	// it is not set yet.
	after int64
	swept int64 // when senders were last forgotten
}

type sender struct {
	name        string
	incarnation uint64
}

// lateness describes an unknown sender whose messages seem too old: either they are
// recordings, or the sender's clock is behind.
type lateness struct {
	since  int64 // our time, unix ms
	newest int64 // greatest timestamp seen
}

// history records which messages of one sender were accepted: number n is bit n modulo
// the size of seen, which covers the numbers (newest - size, newest].
type history struct {
	name   string
	newest uint64
	last   int64 // greatest timestamp, unix ms
	after  int64 // messages sent until then are refused, unix ms
	seen   []uint64
}

// NewGuard returns a Guard that accepts messages sent from now on, or, with the zero time, from the first Admit that
// knows the time. width is how many later messages may overtake one message, rounded up to a multiple of 64.
func NewGuard(width int, now time.Time) *Guard {
	g := &Guard{
		words:   (width+63)/64 + 1, // one word has both the newest and the oldest numbers
		senders: map[sender]*history{},
		behind:  map[sender]*lateness{},
	}
	g.begin(now)

	return g
}

// begin sets after once the time is known: without this bound, messages that were recorded before this process started
// would be accepted.
func (g *Guard) begin(now time.Time) {
	if g.after == 0 && !now.IsZero() {
		g.after = now.UnixMilli() - maxSkew
	}
}

// Admit accepts message number seq, sent at time at (unix ms) by the sender with that name
// and incarnation, or returns ErrClock, ErrOld, ErrFuture, ErrReplayed or ErrSenders. now is the zero time while this
// process does not know it. The string that Admit returns is name, and does not share its memory.
func (g *Guard) Admit(now time.Time, name []byte, incarnation uint64, at int64, seq uint64) (string, error) {
	ms := now.UnixMilli()

	switch {
	case now.IsZero():
		return "", ErrClock
	case at < ms-tolerance:
		return "", ErrOld
	case at > ms+tolerance:
		return "", ErrFuture
	// Numbers begin at 1: 0 is where a window begins.
	case seq == 0:
		return "", ErrReplayed
	}

	g.mu.Lock()
	defer g.mu.Unlock()

	g.begin(now)

	h := g.senders[sender{string(name), incarnation}] // the conversion in an index does not allocate
	if h != nil && at <= h.after {
		return "", ErrOld
	}

	if h == nil {
		var after int64
		if at <= g.after {
			var fresh bool
			after, fresh = g.catchUp(sender{string(name), incarnation}, ms, at)
			if !fresh {
				return "", ErrOld
			}
		}

		if len(g.senders) >= maxSenders || ms-g.swept > tolerance {
			g.sweep(ms)
		}

		// A newcomer is refused, because a sender that is forgotten could be replayed.
		if len(g.senders) >= maxSenders {
			return "", ErrSenders
		}

		delete(g.behind, sender{string(name), incarnation})
		h = &history{name: string(name), after: after, seen: make([]uint64, g.words)}
		g.senders[sender{h.name, incarnation}] = h
	}
	fresh := h.take(seq)
	if !fresh {
		return "", ErrReplayed
	}

	h.last = max(h.last, at)

	return h.name, nil
}

// catchUp judges a message of a sender whose clock seems to be behind. fresh says that the
// Guard has seen messages of the sender for as long as maxSkew, and that this one is newer
// than all of them; after is when the newest of them was sent. A message that was recorded
// before this process began is not fresh, since its sender has sent newer ones.
func (g *Guard) catchUp(s sender, ms, at int64) (after int64, fresh bool) {
	l := g.behind[s]
	if l == nil {
		if len(g.behind) >= maxSenders {
			g.sweep(ms)
		}
		if len(g.behind) < maxSenders {
			g.behind[s] = &lateness{since: ms, newest: at}
		}

		return 0, false
	}

	if at > l.newest && ms-l.since >= maxSkew {
		return l.newest, true
	}

	l.newest = max(l.newest, at)

	return 0, false
}

// sweep forgets senders whose messages are all too old. If this process's clock is set
// back, after still refuses those messages.
func (g *Guard) sweep(ms int64) {
	g.swept = ms

	for s, h := range g.senders {
		if h.last < ms-tolerance {
			// The sender's window is gone, so from now on the time alone tells its old messages from new ones.
			g.after = max(g.after, h.last)
			delete(g.senders, s)
		}
	}

	for s, l := range g.behind {
		if l.newest < ms-tolerance {
			delete(g.behind, s)
		}
	}
}

// take marks seq as accepted. It returns false if seq is marked already, or too old for
// seen.
func (h *history) take(seq uint64) bool {
	size := uint64(len(h.seen)) * 64
	bit := uint64(1) << (seq % 64)

	if seq > h.newest {
		// The words between those of newest and seq have numbers that are too old now.
		from, to := h.newest/64, seq/64
		for i := range min(to-from, uint64(len(h.seen))) {
			h.seen[(to-i)%uint64(len(h.seen))] = 0
		}

		h.newest = seq
		h.seen[to%uint64(len(h.seen))] |= bit
		return true
	}

	// The word of newest was cleared, so it does not cover the oldest numbers any more.
	if h.newest-seq >= size-64 {
		return false
	}

	word := &h.seen[seq/64%uint64(len(h.seen))]
	if *word&bit != 0 {
		return false
	}

	*word |= bit
	return true
}
