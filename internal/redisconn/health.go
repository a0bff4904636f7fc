package redisconn

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/outage"
)

// refusalOver is how long Redis must not have refused anything, beside taking a
// write of the probe, until it counts as healthy again. Processes renew their
// leases more often than that, so a Redis that takes the probe alone is noticed.
const refusalOver = time.Second

// refusals are the error codes of a server that answers and does not serve: its
// memory is full, it cannot save, it lacks replicas, it is a replica, it does
// not know us. Inside a script Redis 6.2 puts its own words before the code.
var refusals = regexp.MustCompile(`(?:^|: -?)((?:OOM|MISCONF|NOREPLICAS|NOAUTH|WRONGPASS|NOPERM|READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY) |(?:ERR )?(?:max number of clients|The user executing the script can't)).*`)

// refusedBy returns what a server that does not serve said, or nothing.
func refusedBy(err error) string {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return ""
	}
	m := refusals.FindString(reply.Error())
	return strings.TrimLeft(m, ": -")
}

// answered reports whether err is the word of a server that is able to serve.
func answered(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && refusedBy(err) == ""
}

// refused notes an error that says that Redis does not serve. Reads may work all
// the same, so the breaker alone would not notice. Any goroutine may call it.
func (s *Conn) refused(err error) {
	if reason := refusedBy(err); reason != "" {
		s.breaker.Failed(errors.New(reason))
		now := time.Now()
		s.refusal.Store(&now)
		s.breaker.Signal()
	}
}

// Cause is why Redis cannot be used; nil: it can. Any goroutine may call it.
func (s *Conn) Cause() error {
	if s.up() {
		return nil
	}
	return s.breaker.LastFailure()
}

// watchState tells OnState, and probes while Redis is away or refuses commands,
// so that the store heals also when nobody calls it. It is one goroutine, which
// Close ends.
func (s *Conn) watchState(ctx context.Context) {
	defer close(s.ended)
	tick := time.NewTimer(0)
	defer tick.Stop()
	armed := true // tick will ring: what wakes again and again does not put it off
	away := outage.Log{Log: s.cfg.Log, What: "redis", Mend: "counts are stale meanwhile; see whether it runs, and what headcount check says of it"}
	for told := false; ; {
		if r := s.refusal.Load(); r != nil && time.Since(*r) < refusalOver {
			s.refusing.Store(true)
		}
		if up := s.up(); up != told {
			told = up
			if up {
				away.Note(nil)
			}
			if s.cfg.OnState != nil {
				s.cfg.OnState.StoreState(up)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.breaker.Changed:
			if !armed && (!s.up() || s.refusal.Load() != nil) {
				tick.Reset(outage.ProbeEvery)
				armed = true
			}
			continue
		case <-tick.C:
			armed = false
		}
		if s.up() && s.refusal.Load() == nil {
			continue
		}
		if err := s.Do(ctx, s.probeWrite); err == nil {
			if r := s.refusal.Load(); r != nil && time.Since(*r) >= refusalOver && s.refusal.CompareAndSwap(r, nil) {
				s.refusing.Store(false)
				s.breaker.Signal()
			}
		}
		if cause := s.Cause(); cause != nil && ctx.Err() == nil {
			away.Note(cause)
		}
		armed = true
		tick.Reset(outage.ProbeEvery + 10*time.Millisecond) // a breaker that just opened lets nothing through before
	}
}

// probeWrite has every master carry out a write that changes nothing. To find the
// masters of a Cluster its slots are read anew: commands alone would go on asking
// a master that a replica has replaced.
func (s *Conn) probeWrite(ctx context.Context, c *Client) error {
	err := c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return m.Ping(ctx).Err() })
	if err != nil {
		return err
	}
	n, err := s.cfg.ProbeWrite(ctx, c)
	s.Metrics.Commands.Add(float64(n))
	return err
}

// up reports whether Redis answered when last asked, and does what it is asked.
func (s *Conn) up() bool {
	return s.client.Load() != nil && s.breaker.Closed() && !s.refusing.Load()
}
