package fanout

import (
	"math"
	"time"
)

// maxSilence is the silence before a ping of a client that takes a minute of silence for a broken connection.
const maxSilence = 25 * time.Second

// liveness says when a silent client is dead.
type liveness struct {
	ping time.Duration // silence before a ping
	pong time.Duration // silence after it before the end
}

func (l liveness) tick() time.Duration {
	return max(min(time.Second, min(l.ping, l.pong)/8), 5*time.Millisecond)
}

// verdict decides about a client whose last sign of life was at heard and whose last ping
// was sent at pinged (0: every ping was answered).
func (l liveness) verdict(now, heard, pinged time.Duration) (ping, dead bool) {
	if pinged != 0 && heard < pinged {
		return false, now-pinged >= l.pong
	}

	return now-max(heard, pinged) >= l.ping, false
}

// next returns when verdict may decide differently, unless the client gives a sign of life.
func (l liveness) next(heard, pinged time.Duration) time.Duration {
	if pinged != 0 && heard < pinged {
		return pinged + l.pong
	}
	return max(heard, pinged) + l.ping
}

// sweep pings the clients that have been silent, closes those that do not answer, and calls
// Expire of those whose time is over.
func (s *shard) sweep() {
	type task struct { // not a closure: pings are most of what an idle gateway does
		sub *Subscriber
		do  func(s *shard, sub *Subscriber, at time.Duration)
	}
	var tasks []task

	s.mu.Lock()
	now := s.now()
	suspended := s.swept != 0 && now-s.swept > s.live.tick()+s.live.pong/2
	s.swept = now
	for i := range s.seats {
		seat := &s.seats[i]
		if now < seat.look && !suspended {
			continue // without reading the subscriber, which is not in the cache
		}

		sub := seat.sub
		if suspended && sub.lastHeard() < sub.pinged {
			sub.pinged = now // the process stood still: its clients get their time again
		}

		live := s.live
		if sub.often {
			live.ping = min(live.ping, maxSilence)
		}

		ping, dead := live.verdict(now, sub.lastHeard(), sub.pinged)
		switch {
		case dead:
			s.figures.silent.Add(1)
			tasks = append(tasks, task{sub, (*shard).close})
		case sub.expired(now):
			sub.expires = 0 // once is enough
			tasks = append(tasks, task{sub, (*shard).expire})
		case ping:
			sub.pinged = now
			tasks = append(tasks, task{sub, (*shard).ping})
		}
		seat.look = live.next(sub.lastHeard(), sub.pinged)

		if sub.expires != 0 {
			seat.look = min(seat.look, sub.expires)
		}
		seat.look = min(seat.look, s.endHoldsLocked(sub, now))
	}
	s.mu.Unlock()

	// Without the lock: a client that is closed leaves, and one that is pinged is written to.
	for _, t := range tasks {
		t.do(s, t.sub, now)
	}
}

// endHoldsLocked looks for the subscriber's holds that have lasted too long, and returns when to look
// at it again at the latest.
func (s *shard) endHoldsLocked(sub *Subscriber, now time.Duration) (look time.Duration) {
	look = math.MaxInt64

	for i := range sub.places {
		p := &sub.places[i]
		if p.topic.subs[p.index].state != held {
			continue
		}
		lasts := now - p.heldAt
		stale := p.topic.gen != 0 && p.topic.update.Stale
		mayWait := !stale && lasts < holdFresh

		switch {
		case lasts < holdStale:
			look = min(look, p.heldAt+holdStale)
		case mayWait:
			look = min(look, now+holdStale) // it may be stale by then
		default:
			s.lapseLocked(sub, p)
		}
	}
	return look
}

// expired reports whether the client's time is over.
func (s *Subscriber) expired(now time.Duration) bool { return s.expires != 0 && now >= s.expires }

// ping pings a client that the sweep at that time chose. If the ping could not be sent, the
// client need not answer, and the next sweep tries again.
func (s *shard) ping(sub *Subscriber, at time.Duration) {
	if sub.client.Ping() {
		return
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	if sub.index >= 0 && sub.pinged == at {
		sub.pinged = 0
		s.seats[sub.index].look = 0
	}
}

func (s *shard) close(sub *Subscriber, _ time.Duration)  { _ = sub.client.Close() } // the client then leaves
func (s *shard) expire(sub *Subscriber, _ time.Duration) { sub.client.Expire() }
