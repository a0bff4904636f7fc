package redisconn

import (
	"context"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/outage"
)

// refusalOver is how long Redis must not have refused anything, beside taking a
// write of the probe, until it counts as healthy again. Processes renew their
// leases more often than that, so a Redis that takes the probe alone is noticed.
const refusalOver = time.Second

// probed is how many buckets of presence and of counters the probe writes to.
const probed = 64

// refusals are the error codes of a server that answers and does not serve: its
// memory is full, it cannot save, it lacks replicas, it is a replica, it does
// not know us. Inside a script Redis 6.2 puts its own words before the code.
var refusals = regexp.MustCompile(`(?:^|: -?)((?:OOM|MISCONF|NOREPLICAS|NOAUTH|WRONGPASS|NOPERM|READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY) |(?:ERR )?(?:max number of clients|The user executing the script can't)).*`)

// denials are refusals of a command or key for the user of the connection. Redis may serve other stores all the same, so
// only a denial of the probe counts as a Redis that does not serve.
var denials = regexp.MustCompile(`^(?:NOPERM |(?:ERR )?The user executing the script can't)`)

// refusedBy returns what a server that does not serve said, or nothing.
func refusedBy(err error) string {
	var reply redis.Error
	if !errors.As(err, &reply) {
		return ""
	}
	m := refusals.FindString(reply.Error())
	return strings.TrimLeft(m, ": -")
}

// Answered marks an error that is not Redis's fault, for example about a reply that cannot be read.
func Answered(err error) error {
	if err == nil {
		return nil
	}
	return answeredError{err}
}

type answeredError struct{ error }

func (e answeredError) Unwrap() error { return e.error }

// answered reports whether err is the word of a server that is able to serve, or about what it said.
func answered(err error) bool {
	var said answeredError
	if errors.As(err, &said) {
		return true
	}
	var reply redis.Error
	if !errors.As(err, &reply) {
		return false
	}
	reason := refusedBy(err)
	return reason == "" || denials.MatchString(reason)
}

// refused notes an error that says that Redis does not serve. Reads may work all
// the same, so the breaker alone would not notice. After a denial the probe finds out
// whether Redis serves. Any goroutine may call it.
func (s *Conn) refused(err error) {
	switch reason := refusedBy(err); {
	case reason == "":
	case denials.MatchString(reason):
		s.denied.Store(true)
		s.breaker.Signal()
	default:
		s.noteRefusal(reason)
	}
}

func (s *Conn) noteRefusal(reason string) {
	s.breaker.Failed(errors.New(reason))
	now := time.Now()
	s.refusal.Store(&now)
	s.breaker.Signal()
}

// Cause is why Redis cannot be used; nil: it can. Any goroutine may call it.
func (s *Conn) Cause() error {
	if s.up() {
		return nil
	}
	return s.breaker.LastFailure()
}

// watchState tells the Callers' OnState, and probes while Redis is away or refuses commands,
// or a Caller does not accept it, so that all heal also when nobody calls. It is one
// goroutine, which Close ends.
func (s *Conn) watchState(ctx context.Context) {
	defer close(s.ended)
	tick := time.NewTimer(0)
	defer tick.Stop()
	armed := true // tick will ring: what wakes again and again does not put it off
	denied := false
	away := outage.Log{Log: s.cfg.Log, What: "redis", Mend: "counts are stale meanwhile; see whether it runs, and what headcount check says of it"}
	for {
		if r := s.refusal.Load(); r != nil && time.Since(*r) < refusalOver {
			s.refusing.Store(true)
		}
		waiting := s.tell()
		denied = s.denied.Swap(false) || denied
		well := s.up() && s.refusal.Load() == nil && len(waiting) == 0 && !denied
		switch {
		case well:
			away.Note(nil)
		case !armed:
			tick.Reset(outage.ProbeEvery)
			armed = true
		}
		select {
		case <-ctx.Done():
			return
		case <-s.added: // its Accept is asked at once
			tick.Reset(0)
			armed = true
			continue
		case <-s.breaker.Changed:
			continue
		case <-tick.C:
			armed = false
		}
		if well {
			continue
		}
		denied = false
		err := s.do(ctx, probeWrite)
		s.denied.Store(false) // by the probe
		if reason := refusedBy(err); denials.MatchString(reason) {
			s.noteRefusal(reason)
		}
		if err == nil {
			if r := s.refusal.Load(); r != nil && time.Since(*r) >= refusalOver && s.refusal.CompareAndSwap(r, nil) {
				s.refusing.Store(false)
				s.breaker.Signal()
			}
		}
		cause := s.Cause()
		for _, c := range waiting {
			if err := s.do(ctx, c.accept); err != nil && cause == nil {
				cause = err
			}
		}
		if cause != nil && ctx.Err() == nil {
			away.Note(cause)
		}
		armed = true
		tick.Reset(outage.ProbeEvery + 10*time.Millisecond) // a breaker that just opened lets nothing through before
	}
}

// tell tells the OnState of each Caller for which something has changed, and returns the Callers that have not
// accepted Redis yet.
func (s *Conn) tell() (waiting []*Caller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	up := s.up()
	for _, c := range s.callers {
		accepted := c.accepted.Load()
		if !accepted {
			waiting = append(waiting, c)
		}
		if is := up && accepted; is != c.told {
			c.told = is
			if c.cfg.OnState != nil {
				c.cfg.OnState.StoreState(is)
			}
		}
	}
	return waiting
}

// probeWrite has every master that keeps anything of ours carry out a write that changes nothing. The keys are in the
// slots of the buckets of presence and of counters, and are never made. To find the masters of a Cluster its slots
// are read anew: commands alone would go on asking a master that a replica has replaced.
func probeWrite(ctx context.Context, c *Client) error {
	err := c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return m.Ping(ctx).Err() })
	if err != nil {
		return err
	}
	pipe := c.Pipeline()
	for b := range probed {
		for _, bucket := range []string{"b", "n"} {
			pipe.SetRange(ctx, "hc:{"+bucket+strconv.Itoa(b)+"}:probe", 0, "")
		}
		if c.Cluster == nil {
			break
		}
	}
	_, err = pipe.Exec(ctx)
	return err
}

// up reports whether Redis answered when last asked, and does what it is asked.
func (s *Conn) up() bool {
	return s.client.Load() != nil && s.breaker.Closed() && !s.refusing.Load()
}
