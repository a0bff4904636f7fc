package simulate

import (
	"errors"
	"sync"

	"headcount/client"
)

// A subscriber looks at counters over the WebSocket of a tab, which comes back whenever its
// connection is lost.
type subscriber struct {
	run     *lastingRun
	tallies map[string]*tally
	like    *membership // of the fan whose WebSocket it is; nil: it has the API key

	mu   sync.Mutex
	held map[string]client.Counter // on this connection; the newest of each counter
}

// take keeps what the server said about a counter. A version that goes back, and the same version with two values, are
// wrong.
func (s *subscriber) take(l client.Counter) {
	t := s.tallies[l.Key]
	if t == nil {
		s.run.wrong("counter %q: a subscriber who did not ask for it receives it", l.Key)
		return
	}
	if err := t.check(&l); err != nil {
		s.run.wrong("counter %q: a subscriber receives something else than a counter: %v", l.Key, err)
		return
	}

	s.run.stats.counts.Add(1)
	if l.Stale {
		s.run.stats.stale.Add(1)
	}

	// Faults were noted without it, so that no lock is held while another one is taken.
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
	deleted := s.run.deleting.Load() && l.Version == client.Version{} // the one time at which a version goes back
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

// compare notes in wrong what is not the truth.
func (s *subscriber) compare(wrong *faults) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// All that were asked for, not all that came: a counter that never comes is the fault to find.
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

var errForgotten = errors.New("the server does not know the ids any more that it gave out: give it --id-secret")

// renamed ends the run when a fan has become somebody else: what the fan has liked would be another user's.
func (s *subscriber) renamed() {
	if s.like != nil {
		s.run.fail(errForgotten)
	}
}
