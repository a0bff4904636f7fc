package redisconn

import (
	"context"
	"errors"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/outage"
)

const noScript = "0000000000000000000000000000000000000000" // not the SHA-1 of any script

// probeTags are the hash tags of what the probe writes. Their slots are evenly spaced, so that each of as many masters
// has one, if they share the slots evenly. They begin like those of buckets, because a user of Redis may have no other
// keys.
var probeTags = sync.OnceValue(func() []string { return EvenTags("b", 64) })

// refusals are the error codes of a server that answers but cannot serve: its memory is full, it cannot save, it lacks
// replicas, it is a replica, or it does not permit a command to this user. In a script, Redis 6.2 puts its own words
// before the code.
var refusals = regexp.MustCompile(`(?:^|: -?)((?:` +
	`OOM|MISCONF|NOREPLICAS|NOAUTH|WRONGPASS|NOPERM|READONLY|LOADING|MASTERDOWN|CLUSTERDOWN|BUSY) ` +
	`|(?:ERR )?(?:max number of clients|The user executing the script can't)).*`)

// denials are refusals because the user may not execute a command or access a key. Redis may still serve other stores,
// so only a denial of the probe means that Redis cannot serve.
var denials = regexp.MustCompile(`^(?:NOPERM |(?:ERR )?The user executing the script can't)`)

// refusedBy returns the reply in err by which Redis refused a command; empty: it did not.
func refusedBy(err error) string {
	var reply redis.Error
	// Only replies are looked at: a lost connection is no refusal, whatever its text.
	if !errors.As(err, &reply) {
		return ""
	}

	m := refusals.FindString(reply.Error())
	// The match may begin with what separates Redis' own words from the code.
	return strings.TrimLeft(m, ": -")
}

// Answered marks an error as not being a failure of Redis, for example an error about a malformed reply.
func Answered(err error) error {
	if err == nil {
		return nil
	}
	return answeredError{err}
}

type answeredError struct{ error }

func (e answeredError) Unwrap() error { return e.error }

// answered reports whether err is an error reply of a server that works, or is about the content of a reply.
func answered(err error) bool {
	var said answeredError
	// Look for this mark first: the error that has it may wrap anything.
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

// refused records that Redis refused a command. Reads may still work, so the circuit breaker alone would not open.
// After a denial, the probe finds out whether Redis serves. Any goroutine may call it.
func (s *Conn) refused(err error) {
	switch reason := refusedBy(err); {
	case reason == "":
	// One command that is not permitted may be a single store's; the probe looks whether Redis serves at all.
	case denials.MatchString(reason):
		s.denied.Store(true)
		s.breaker.Signal()
	default:
		s.noteRefusal(reason)
	}
}

func (s *Conn) noteRefusal(reason string) {
	// Set the reason first: whoever sees the refusal asks for its reason.
	s.breaker.Failed(errors.New(reason))
	s.breaker.Refused()
}

// Cause returns why Redis is unavailable; nil: it is available. Any goroutine may call it.
func (s *Conn) Cause() error {
	if s.up() {
		return nil
	}
	return s.breaker.LastFailure()
}

// watchState notifies the Runners when their state changes. It probes while Redis is unavailable, refuses commands, or
// is not accepted by a Runner, so that an outage ends even without calls. Close ends it.
func (s *Conn) watchState(ctx context.Context) {
	defer close(s.ended)
	tick := time.NewTimer(0)
	defer tick.Stop()
	armed := true // tick is running; repeated signals must not postpone the probe
	away := outage.Log{
		Log:  s.cfg.Log,
		What: "redis",
		Mend: s.cfg.Meanwhile + "; see whether it runs, and what headcount check says of it",
	}
	refused := outage.Log{Log: s.cfg.Log, What: "a part of the data in redis", Mend: "everything else is served"}

	for {
		// In each round, because any of the signals below may have changed the state.
		waiting := s.notify()
		well := s.up() && len(waiting) == 0 && !s.denied.Load()
		if well {
			away.Note(nil)
			refused.Note(nil)
		} else if !armed {
			tick.Reset(outage.ProbeEvery)
			armed = true
		}

		select {
		case <-ctx.Done():
			return
		case <-s.added: // calls its Accept at once
			tick.Reset(0)
			armed = true
			continue
		case <-s.breaker.Changed: // the state may have changed, so notify again
			continue
		case <-tick.C:
			armed = false
		}

		// Calls that succeed say enough, so a probe of its own would only cost Redis.
		if well {
			continue
		}

		cause, refusal := s.check(ctx, waiting)
		if cause != nil && ctx.Err() == nil {
			away.Note(cause)
		}
		if refusal != nil {
			refused.Note(refusal)
		}

		armed = true
		tick.Reset(outage.ProbeEvery + 10*time.Millisecond) // a newly opened breaker lets a call through by then
	}
}

// check probes with a write, and asks the waiting Runners whether they accept Redis. It returns why Redis is
// unavailable, and why a Runner does not accept it; nil: it is available, and all accept it.
func (s *Conn) check(ctx context.Context, waiting []*Runner) (cause, refusal error) {
	err := s.do(ctx, probeWrite)
	s.denied.Store(false) // this probe has found out whether Redis serves
	if reason := refusedBy(err); denials.MatchString(reason) {
		s.noteRefusal(reason)
	}
	if err == nil {
		s.breaker.Probed()
	}

	// Not the error of the probe: one write that succeeds does not end a refusal, see outage.Breaker.
	cause = s.Cause()
	for _, c := range waiting {
		err := s.do(ctx, c.accept)
		// The Runner has read its data and cannot use it. Redis works, for the others.
		if errors.As(err, new(answeredError)) {
			refusal = err
		} else if err != nil && cause == nil {
			cause = err
		}
	}

	return cause, refusal
}

// notify notifies the Runners whose state has changed, and returns those that have not accepted Redis yet.
func (s *Conn) notify() (waiting []*Runner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	up := s.up()

	for _, c := range s.runners {
		accepted := c.accepted.Load()
		if !accepted {
			waiting = append(waiting, c)
		}

		is := up && accepted
		if is == c.notified {
			continue
		}
		c.notified = is
		// While mu is held, so that nobody is notified after the Close of its Runner.
		if c.cfg.OnState != nil {
			c.cfg.OnState.StoreState(is)
		}
	}
	return waiting
}

// probeWrite sends a write without effect to every master, see probeTags; it creates no key. It also checks whether the
// master runs scripts: if permitted, the call of an unknown script fails with NOSCRIPT. In a Cluster it reads the slots
// again, because commands alone would keep going to a master that a replica has replaced.
func probeWrite(ctx context.Context, c *Client) error {
	// The pings also read the list of masters anew, to which the commands below go.
	err := c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error { return m.Ping(ctx).Err() })
	if err != nil {
		return err
	}

	pipe := c.Pipeline()
	tags := probeTags()
	if c.Cluster == nil { // all slots are on one server
		tags = tags[:1]
	}
	for _, tag := range tags {
		key := "hc:{" + tag + "}:probe"
		pipe.SetRange(ctx, key, 0, "")
		pipe.EvalSha(ctx, noScript, []string{key})
	}

	done, _ := pipe.Exec(ctx) // each command has its own error
	for _, cmd := range done {
		if err := cmd.Err(); err != nil && !redis.HasErrorPrefix(err, "NOSCRIPT") {
			return err
		}
	}

	return nil
}

// up reports whether Redis answered the last call, and executes commands.
func (s *Conn) up() bool {
	return s.connected() != nil && s.breaker.Up()
}
