package gateway

import (
	"time"
)

// bell is a connection's unread count: the newest, and what its client has been
// told. The shard's lock guards it.
type bell struct {
	count  int64
	told   int64
	forced bool          // tell it also when it is what was told: the client asked, or a write was lost
	queued bool          // in shard.bells
	at     time.Duration // when the client was last told
}

// ring is a connection that is to be told.
type ring struct {
	conn   *conn
	count  int64
	forced bool
}

// ring has connections of this shard told their unread count, with the counts
// that are due and as these at most once per interval, the newest.
func (s *shard) ring(rings []ring) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range rings {
		if r.conn.index < 0 {
			continue // it has ended
		}
		r.conn.bell.count = r.count
		r.conn.bell.forced = r.conn.bell.forced || r.forced
		s.queueBell(r.conn)
	}
}

func (s *shard) queueBell(c *conn) {
	b := &c.bell
	if b.queued || !b.forced && b.count == b.told {
		return
	}
	b.queued = true
	s.bells = append(s.bells, c)
	s.wakeUp()
}

// offerBells adds the unread counts that are due to this pass, and returns when
// the next is, or 0. A connection that has not taken its last write is left
// alone; it is queued again when it has.
func (s *shard) offerBells(now time.Duration) (next time.Duration) {
	later := s.bells[:0]
	s.bellText = s.bellText[:0]
	for _, c := range s.bells {
		b := &c.bell
		at := b.at + s.interval
		if c.index >= 0 && !b.forced && b.at != 0 && at > now {
			later = append(later, c)
			if next == 0 || at < next {
				next = at
			}
			continue
		}
		b.queued = false
		if c.index < 0 || c.wire.busy.Load() || !b.forced && b.count == b.told {
			continue
		}
		b.told, b.forced, b.at = b.count, false, now
		from := len(s.bellText)
		s.bellText = appendFrame(s.bellText, frameText, appendUnread(nil, b.count))
		s.chain(c, s.bellText[from:len(s.bellText):len(s.bellText)])
	}
	clear(s.bells[len(later):])
	s.bells = later
	return next
}
