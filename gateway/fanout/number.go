package fanout

import (
	"time"

	"headcount/internal/wake"
)

// number is a value of a single subscriber, such as the number of changes that its user has not read. It is delivered
// like the updates of a topic: always the newest, at most once per interval. It is not a topic, because a topic with
// one subscriber takes ten times the memory.
type number struct {
	now  int64         // the newest value; unsent: there is none yet
	sent int64         // the value that the client has; unsent: the next one is sent at once, whatever it is
	at   time.Duration // when the client was last sent one
}

// unsent means no number. Numbers are never negative.
const unsent = -1

// SentUnread records that the client was sent its number before Enter.
func (s *Subscriber) SentUnread(n int64) { s.number = number{now: n, sent: n} }

// SendUnread sends the client its number if it has changed, or in any case if again is set.
func (s *Subscriber) SendUnread(n int64, again bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	if s.index < 0 {
		return // it has left
	}

	s.number.now = n
	if again {
		s.number.sent = unsent
	}

	sh.queueNumberLocked(s)
}

func (s *shard) queueNumberLocked(sub *Subscriber) {
	if sub.numberQueued || sub.number.now == sub.number.sent {
		return
	}

	sub.numberQueued = true
	s.numbers = append(s.numbers, sub)
	wake.Signal(s.wake)
}

// offerNumbersLocked adds the numbers that are due to this pass, and returns when the next one is, or 0. It skips a
// client whose last write is not complete; Free then queues the number again.
func (s *shard) offerNumbersLocked(now time.Duration) (next time.Duration) {
	later := s.numbers[:0]
	for _, sub := range s.numbers {
		n := &sub.number

		// A number waits until the interval since the last one is over, unless the client asked for it or lost it.
		at := n.at + s.interval
		mustWait := n.sent != unsent && n.at != 0 && at > now
		if sub.index >= 0 && mustWait {
			later = append(later, sub)
			next = earliest(next, at)
			continue
		}

		sub.numberQueued = false
		if sub.index < 0 || n.now == n.sent || sub.client.Busy() {
			continue
		}

		n.sent = n.now
		n.at = now

		from := len(s.pass.numbers)
		s.pass.numbers = s.hub.cfg.Numbers.AppendNumber(s.pass.numbers, n.now)
		// The capacity of the slice is cut, so that nobody can append over the next client's number.
		s.chainLocked(sub, s.pass.numbers[from:len(s.pass.numbers):len(s.pass.numbers)])
	}

	clear(s.numbers[len(later):])
	s.numbers = later

	return next
}
