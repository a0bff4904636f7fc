package fanout

import (
	"math"
	"time"
)

// maxSilence is the silence before a ping for clients that take a silent minute for a broken connection.
const maxSilence = 25 * time.Second

// liveness defines when a silent client counts as dead.
type liveness struct {
	ping time.Duration // silence before a ping
	pong time.Duration // further silence before it is closed
}

func (l liveness) tick() time.Duration {
	// A client is pinged or closed late by at most an eighth of the shorter time.
	return max(min(time.Second, min(l.ping, l.pong)/8), 5*time.Millisecond)
}

// verdict decides whether to ping a client, and whether it is dead. alive is the time of its last sign of life, pinged
// that of its last ping, or 0.
func (l liveness) verdict(now, alive, pinged time.Duration) (ping, dead bool) {
	if pinged != 0 && alive < pinged {
		return false, now-pinged >= l.pong
	}

	return now-max(alive, pinged) >= l.ping, false
}

// next returns when to look at the client again: no later than verdict may change, whenever the client answers.
func (l liveness) next(now, alive, pinged time.Duration) time.Duration {
	if pinged != 0 && alive < pinged {
		// The answer may come at any moment, and the next ping is due l.ping after it.
		return min(pinged+l.pong, now+l.ping)
	}
	return max(alive, pinged) + l.ping
}

// sweep pings silent clients, closes those that do not answer, and calls Expire of those whose time is over.
func (s *shard) sweep() {
	// Tasks are structs, because closures would be allocated, and an idle gateway does little else than ping.
	type task struct {
		sub *Subscriber
		do  func(s *shard, sub *Subscriber, at time.Duration)
	}
	var tasks []task

	s.mu.Lock()
	now := s.now()
	// Whatever made this sweep late may also have kept answers to pings from being read. The hub's Standstill would
	// notice suspensions alone.
	late := s.swept != 0 && now-s.swept > s.live.tick()+s.live.pong/2
	s.swept = now
	for i := range s.seats {
		seat := &s.seats[i]
		if now < seat.look && !late {
			continue // do not read the subscriber: it is not in the CPU's cache
		}

		sub := seat.sub
		if late && sub.lastAlive() < sub.pinged {
			// The process was suspended or too busy, so its clients get the full time again.
			sub.pinged = now
		}

		live := s.live
		if sub.often {
			live.ping = min(live.ping, maxSilence)
		}

		ping, dead := live.verdict(now, sub.lastAlive(), sub.pinged)
		switch {
		case dead:
			s.figures.silent.Add(1)
			tasks = append(tasks, task{sub, (*shard).close})
		case sub.expired(now):
			sub.expires = 0 // expire only once
			tasks = append(tasks, task{sub, (*shard).expire})
		case ping:
			sub.pinged = now
			tasks = append(tasks, task{sub, (*shard).ping})
		}
		seat.look = live.next(now, sub.lastAlive(), sub.pinged)

		if sub.expires != 0 {
			seat.look = min(seat.look, sub.expires)
		}
		seat.look = min(seat.look, s.lapseAllLocked(sub, now))
	}
	s.checkNewestLocked()
	s.mu.Unlock()

	// The tasks need the lock to be free: a client that is closed leaves, and one that is pinged is written to.
	for _, t := range tasks {
		t.do(s, t.sub, now)
	}
}

// lapseAllLocked sends, as stale ones, the subscriber's updates that were withheld for too long. It returns the latest
// time of the next check.
func (s *shard) lapseAllLocked(sub *Subscriber, now time.Duration) (look time.Duration) {
	look = math.MaxInt64

	for i := range sub.places {
		p := &sub.places[i]
		if p.topic.subs[p.index].state != withheld {
			continue
		}
		lasts := now - p.withheldAt
		stale := p.topic.gen != 0 && p.topic.update.Stale
		mayWait := !stale && lasts < withholdFresh

		switch {
		case lasts < withholdStale:
			look = min(look, p.withheldAt+withholdStale)
		case mayWait:
			look = min(look, now+withholdStale) // by then the update may be stale
		default:
			s.lapseLocked(sub, p)
		}
	}
	return look
}

// expired reports whether the client's time is over.
func (s *Subscriber) expired(now time.Duration) bool { return s.expires != 0 && now >= s.expires }

// ping pings a client that the sweep at the given time selected. If the ping could not be sent, the client is not
// expected to answer, and the next sweep tries again.
func (s *shard) ping(sub *Subscriber, at time.Duration) {
	if sub.client.Ping() {
		return
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	// Unless it has left, or another sweep has pinged it since.
	if sub.index >= 0 && sub.pinged == at {
		sub.pinged = 0
		s.seats[sub.index].look = 0
	}
}

func (s *shard) close(sub *Subscriber, _ time.Duration)  { _ = sub.client.Close() } // closing makes the client leave
func (s *shard) expire(sub *Subscriber, _ time.Duration) { sub.client.Expire() }
