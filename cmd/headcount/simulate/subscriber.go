package simulate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"
)

// A fan is a user without API key. Its identity comes with its first WebSocket
// connection, so that all its calls are made as one user.
type fan struct {
	number int
	name   string // subject of its tokens
	likes  *tally

	known chan struct{} // closed when user and id are set
	user  string
	id    string

	mu    sync.Mutex
	liked bool // the truth
}

// sign says in the header who the fan is.
func (v *fan) sign(c *crowd, header http.Header) error {
	if c.cfg.JWTSecret == "" {
		header.Set("Headcount-Id", v.id)
		return nil
	}
	token, err := c.token(v.name)
	if err != nil {
		return err
	}
	header.Set("Authorization", "Bearer "+token)
	return nil
}

func (v *fan) like(liked bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.liked = liked
}

func (v *fan) hasLiked() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.liked
}

// A subscriber looks at counters: over a WebSocket, or at one of them as an event
// stream. It comes back whenever its connection is lost.
type subscriber struct {
	run     *lastingRun
	tallies map[string]*tally
	who     *fan   // whose WebSocket it is; nil: it has the API key
	stream  *tally // the counter of an event stream; nil: it is a WebSocket

	mu   sync.Mutex
	held map[string]lasting // on this connection; the newest of each counter
}

// take keeps what the server said about a counter. A version that goes back, and the
// same version with two values, are wrong.
func (s *subscriber) take(l lasting) {
	t := s.tallies[l.Key]
	if t == nil {
		s.run.wrong("counter %q: a subscriber who did not ask for it is told of it", l.Key)
		return
	}
	if err := l.check(t); err != nil {
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
	case ok && l.version.before(had.version) && s.run.deleting.Load() && l.version == version{}:
		// the one time at which a version goes back
	case ok && l.version.before(had.version):
		s.run.stats.backward.Add(1)
		s.run.wrong("counter %q: the version went back on one connection: from %s to %s", l.Key, had.Version, l.Version)
	case ok && l.version == had.version && *l.Value != *had.Value:
		s.run.wrong("counter %q: version %s has the values %d and %d", l.Key, l.Version, *had.Value, *l.Value)
	}
	s.held[l.Key] = l
}

// begin forgets what the connection before was told.
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
		case *l.Value != want || l.Stale:
			wrong.add("counter %q: %s holds %d (stale: %t); the true value is %d", key, how, *l.Value, l.Stale, want)
		case s.who != nil && t == s.who.likes && l.Mine != s.who.hasLiked():
			wrong.add("counter %q: a member's frame says \"mine\":%t; the truth is %t", key, l.Mine, s.who.hasLiked())
		}
	}
}

// follow keeps the subscriber connected until ctx ends.
func (s *subscriber) follow(ctx context.Context, number int) error {
	for try := number; ; try++ {
		s.begin()
		gateway := s.run.gateway(try)
		var err error
		if s.stream != nil {
			err = s.listen(ctx, gateway)
		} else {
			err = s.watch(ctx, gateway)
		}
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errUnexpected) || errors.Is(err, errForgotten) {
			return err
		}
		s.run.stats.drops.Add(1)
		s.run.failed(err)
		if err := sleep(ctx, pauseMost/5); err != nil {
			return nil
		}
	}
}

// watch opens a WebSocket and reads it to its end.
func (s *subscriber) watch(ctx context.Context, gateway string) error {
	header, query := http.Header{}, url.Values{}
	s.run.cfg.inSite(header)
	switch {
	case s.who == nil:
		header.Set("X-API-Key", s.run.cfg.APIKey)
		if s.run.cfg.JWTSecret != "" {
			token, err := s.run.token(s.run.name + "-watcher")
			if err != nil {
				return err
			}
			header.Set("Authorization", "Bearer "+token)
		}
	case s.run.cfg.JWTSecret != "":
		if err := s.who.sign(s.run.crowd, header); err != nil {
			return err
		}
	case s.who.id != "": // only this goroutine sets it
		query.Set("id", s.who.id)
	}
	l, err := dial(ctx, gateway+"/-/ws?"+query.Encode(), header, &s.run.stats.bytes)
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, l.kill)
	defer stop()
	defer l.kill()
	s.run.stats.connects.Add(1)
	for _, frame := range subscribeCounters(s.tallies) {
		l.send(frame)
	}
	for {
		var fault error
		if err := l.next(func(msg []byte) { fault = s.hear(msg) }); err != nil {
			return err
		}
		if fault != nil {
			return fault
		}
	}
}

var errForgotten = errors.New("the server does not know the ids any more that it gave out: give it --id-secret")

var errSentAway = errors.New("the server asked to reconnect")

// hear takes one message.
func (s *subscriber) hear(msg []byte) error {
	s.run.stats.messages.Add(1)
	var f struct {
		lasting
		Type    string `json:"type"`
		User    string `json:"user"`
		ID      string `json:"id"`
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	if err := json.Unmarshal(msg, &f); err != nil {
		return fmt.Errorf("%w: a frame: %w: %.200q", errUnexpected, err, msg)
	}
	switch f.Type {
	case "welcome":
		return s.welcome(f.User, f.ID)
	case "counter":
		s.take(f.lasting)
	case "reconnect":
		s.run.stats.sentAway.Add(1)
		return errSentAway
	case "error":
		s.run.stats.errorFrame(f.Code)
		if f.Code != "rate_limited" {
			return fmt.Errorf("%w: an error frame: %.200q", errUnexpected, msg)
		}
		return errSentAway // and ask again
	}
	return nil
}

// welcome learns who the fan is.
func (s *subscriber) welcome(user, id string) error {
	v := s.who
	if v == nil {
		return nil
	}
	select {
	case <-v.known:
		if user != v.user {
			return errForgotten
		}
		return nil
	default:
	}
	v.user, v.id = user, id
	close(v.known)
	return nil
}

// listen opens an event stream and reads it to its end.
func (s *subscriber) listen(ctx context.Context, gateway string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, gateway+s.stream.path("/events"), nil)
	if err != nil {
		return err
	}
	req.Header.Set("X-API-Key", s.run.cfg.APIKey)
	s.run.cfg.inSite(req.Header)
	resp, err := s.run.streams.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		if resp.StatusCode < http.StatusInternalServerError && resp.StatusCode != http.StatusTooManyRequests {
			return s.run.unexpected("the event stream of "+s.stream.key, reply{status: resp.StatusCode})
		}
		return fmt.Errorf("the event stream of %s: status %d", s.stream.key, resp.StatusCode)
	}
	s.run.stats.connects.Add(1)
	lines := bufio.NewScanner(resp.Body)
	var event, id string
	for lines.Scan() {
		line := lines.Text()
		s.run.stats.bytes.Add(int64(len(line)) + 1)
		name, value, _ := strings.Cut(line, ": ")
		switch name {
		case "event":
			event = value
		case "id":
			id = value
		case "data":
			var l lasting
			if err := json.Unmarshal([]byte(value), &l); event != "counter" || err != nil || l.Version != id {
				return fmt.Errorf("%w: the event stream of %q: event %q, id %q, data %.200q", errUnexpected, s.stream.key, event, id, value)
			}
			s.run.stats.messages.Add(1)
			s.take(l)
		}
	}
	if err := lines.Err(); err != nil {
		return err
	}
	return errors.New("the event stream ended")
}

// subscribeCounters asks for counters, in frames of less than the 4,096 bytes that the server reads.
func subscribeCounters(tallies map[string]*tally) [][]byte {
	var keys []string
	for key := range tallies {
		keys = append(keys, key)
	}
	frames := subscribeFrames(keys)
	for i, frame := range frames {
		frames[i] = bytes.Replace(frame, []byte(`"pages":`), []byte(`"counters":`), 1)
	}
	return frames
}

// places waits until every fan knows who it is.
func (r *lastingRun) places(ctx context.Context) error {
	limit := time.NewTimer(placeLimit)
	defer limit.Stop()
	for _, v := range r.fans {
		select {
		case <-v.known:
		case <-ctx.Done():
			return fmt.Errorf("interrupted: %w", context.Cause(ctx))
		case <-limit.C:
			return fmt.Errorf("not every fan is connected after %s; last error: %w", placeLimit, r.lastFailure())
		}
	}
	return nil
}
