package simulate

import (
	"errors"
	"sync"

	"headcount/client"
)

// A subscriber subscribes to counters over the WebSocket of a tab, which reconnects whenever its connection is lost.
type subscriber struct {
	run     *lastingRun
	tallies map[string]*tally
	like    *membership // of the fan whose WebSocket it is; nil: the WebSocket has the API key

	mu   sync.Mutex
	held map[string]client.Counter // the newest value of each counter on this connection
}

// take checks and stores a value that the server has sent. A version that goes back, and a version with two values, are
// wrong.
func (s *subscriber) take(l client.Counter) {
	t := s.tallies[l.Key]
	if t == nil {
		s.run.wrong("counter %q: a subscriber received it without a subscription", l.Key)
		return
	}
	if err := t.check(&l); err != nil {
		s.run.wrong("counter %q: a subscriber received a frame that cannot be of this counter: %v", l.Key, err)
		return
	}

	s.run.stats.counts.Add(1)
	if l.Stale {
		s.run.stats.stale.Add(1)
	}

	s.mu.Lock()
	defer s.mu.Unlock()

	had, ok := s.held[l.Key]
	if ok {
		s.judge(&had, &l)
	}

	s.held[l.Key] = l
}

// judge compares a counter with what the connection had before.
func (s *subscriber) judge(had, l *client.Counter) {
	deleted := s.run.deleting.Load() && l.Version == client.Version{} // only then may a version go back
	if l.Version.Before(had.Version) && !deleted {
		s.run.stats.backward.Add(1)
		s.run.wrong("counter %q: the version went back on one connection: from %s to %s", l.Key, had.Version, l.Version)
	}
	if l.Version == had.Version && l.Value != had.Value {
		s.run.wrong("counter %q: version %s has the values %d and %d", l.Key, l.Version, had.Value, l.Value)
	}
}

// begin forgets what the last connection received.
func (s *subscriber) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.held)
}

// compare compares the values with the truth, and notes in wrong what differs.
func (s *subscriber) compare(wrong *faults) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// Over all subscriptions, because a value may never have come.
	for key, t := range s.tallies {
		l, ok := s.held[key]
		if !ok {
			wrong.add("counter %q: a WebSocket has not received it", key)
			continue
		}

		want := t.value()
		if l.Value != want || l.Stale {
			wrong.add("counter %q: a WebSocket holds %d (stale: %t); the true value is %d", key, l.Value, l.Stale, want)
			continue
		}

		liked := s.like != nil && t == s.like.t
		if liked && l.Mine != s.like.in {
			wrong.add("counter %q: a member's frame says \"mine\":%t; the truth is %t", key, l.Mine, s.like.in)
		}
	}
}

var errForgotten = errors.New("the server does not accept the ids that it has given out: give it --id-secret")

// renamed ends the run when the server has made a fan another user, to whom the fan's likes do not belong.
func (s *subscriber) renamed() {
	if s.like != nil {
		s.run.fail(errForgotten)
	}
}
