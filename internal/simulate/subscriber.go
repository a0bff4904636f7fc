package simulate

import (
	"context"
	"errors"
	"net/http"
	"sync"

	"headcount/client"
)

// A fan is a user without API key. Its identity comes with its first WebSocket
// connection, so that all its calls are made as one user.
type fan struct {
	user *user
	like membership
}

// A subscriber looks at counters: over the WebSocket of a tab, or at one of them as an event
// stream. It comes back whenever its connection is lost.
type subscriber struct {
	run     *lastingRun
	tallies map[string]*tally
	who     *fan   // whose WebSocket it is; nil: it has the API key
	stream  *tally // the counter of an event stream; nil: it is a WebSocket

	mu   sync.Mutex
	held map[string]client.Counter // on this connection; the newest of each counter
}

// take keeps what the server said about a counter. A version that goes back, and the
// same version with two values, are wrong.
func (s *subscriber) take(l client.Counter) {
	t := s.tallies[l.Key]
	if t == nil {
		s.run.wrong("counter %q: a subscriber who did not ask for it is told of it", l.Key)
		return
	}
	if err := t.check(&l); err != nil {
		s.run.wrong("counter %q: a subscriber is told something else than a counter: %v", l.Key, err)
		return
	}
	s.run.stats.counts.Add(1)
	if l.Stale {
		s.run.stats.stale.Add(1)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	had, ok := s.held[l.Key]
	switch {
	case ok && l.Version.Before(had.Version) && s.run.deleting.Load() && l.Version == client.Version{}:
		// the one time at which a version goes back
	case ok && l.Version.Before(had.Version):
		s.run.stats.backward.Add(1)
		s.run.wrong("counter %q: the version went back on one connection: from %s to %s", l.Key, had.Version, l.Version)
	case ok && l.Version == had.Version && l.Value != had.Value:
		s.run.wrong("counter %q: version %s has the values %d and %d", l.Key, l.Version, had.Value, l.Value)
	}
	s.held[l.Key] = l
}

// begin forgets what the last connection was told.
func (s *subscriber) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.held)
}

// compare notes in wrong what is not the truth.
func (s *subscriber) compare(wrong *faults) {
	s.mu.Lock()
	defer s.mu.Unlock()
	how := "a WebSocket"
	if s.stream != nil {
		how = "an event stream"
	}
	for key, t := range s.tallies {
		l, ok := s.held[key]
		switch want := t.value(); {
		case !ok:
			wrong.add("counter %q: %s has not been told of it", key, how)
		case l.Value != want || l.Stale:
			wrong.add("counter %q: %s holds %d (stale: %t); the true value is %d", key, how, l.Value, l.Stale, want)
		case s.who != nil && t == s.who.like.t && l.Mine != s.who.like.in:
			wrong.add("counter %q: a member's frame says \"mine\":%t; the truth is %t", key, l.Mine, s.who.like.in)
		}
	}
}

// follow keeps an event stream open until ctx ends.
func (s *subscriber) follow(ctx context.Context, number int) error {
	for try := number; ; try++ {
		s.begin()
		err := s.listen(ctx, s.run.gateway(try))
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errUnexpected) {
			return err
		}
		s.run.stats.drops.Add(1)
		s.run.failed(err)
		if err := sleep(ctx, pauseMost/5); err != nil {
			return nil
		}
	}
}

var errForgotten = errors.New("the server does not know the ids any more that it gave out: give it --id-secret")

// renamed ends the run when a fan has become somebody else: what the fan has liked would be another one's.
func (s *subscriber) renamed() {
	if s.who != nil {
		s.run.fail(errForgotten)
	}
}

// listen opens an event stream and reads it to its end.
func (s *subscriber) listen(ctx context.Context, gateway string) error {
	cfg, err := s.run.config(gateway, s.run.name+"-watcher", "")
	if err != nil {
		return err
	}
	cfg.APIKey, cfg.HTTP = s.run.cfg.APIKey, s.run.streams
	opened := false
	err = client.NewAPI(cfg).CounterEvents(ctx, s.stream.key, func(l client.Counter) error {
		if !opened {
			s.run.stats.connects.Add(1)
			opened = true
		}
		s.run.stats.messages.Add(1)
		s.take(l)
		return nil
	})
	if problem := (*client.Error)(nil); errors.Is(err, client.ErrFrame) || errors.As(err, &problem) && !problem.Temporary() && problem.Status < http.StatusInternalServerError {
		return unexpected("the event stream of "+s.stream.key, err)
	}
	return err
}
