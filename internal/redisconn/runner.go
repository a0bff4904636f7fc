package redisconn

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"headcount/internal/wake"
	"headcount/scripts"
)

const (
	movingPause = 10 * time.Millisecond // until a command whose slot is moving is sent again

	maxPipeline = 1024 // scripts in one pipeline; longer lists go in several
)

// States is notified when a Runner becomes able or unable to use Redis. At first it is unable. Only one goroutine calls
// it; it must not block.
type States interface{ StoreState(up bool) }

// RunnerConfig tunes a Runner. A zero field takes its default.
type RunnerConfig struct {
	// Scripts are the scripts that Run may run.
	Scripts []scripts.Name
	// Unavailable is wrapped by the errors of calls that Redis did not answer. Required.
	Unavailable error
	// Classify converts an error of Redis to one of the store's contract; default Unavailable.
	Classify func(error) error
	// Accept is called before anything else is done in Redis. Until it returns nil, its error is that of every call of
	// this Runner. Optional.
	Accept func(context.Context, *Client) error
	// Bounded says that the number of concurrent calls is not limited otherwise: the Runner uses at most half of the
	// pool's connections, and further calls wait.
	Bounded bool
	// Apart says that a call concerns only some masters of a Cluster. Its failure says nothing about the others, so on
	// a Cluster it neither opens the circuit breaker nor is stopped by it.
	Apart      bool
	Registerer prometheus.Registerer // for the metrics; nil: there are none
	Metrics    string                // prefix of their names; default headcount_redis
	OnState    States                // optional
}

// Runner is one store's access to a Conn, with the store's own scripts, interpretation of errors, and metrics. Its
// methods may be called from any goroutine.
type Runner struct {
	Metrics *Metrics

	conn     *Conn
	cfg      RunnerConfig
	scripts  map[scripts.Name]script
	slots    chan struct{} // has an element for each call in progress; nil: calls are not bounded
	accepted atomic.Bool
	closed   atomic.Bool
	notified bool // last state passed to OnState; guarded by mu of the Conn
}

type script struct {
	text, sha string
	marked    bool
}

// Runner returns a new Runner. Close it before the Conn.
func (s *Conn) Runner(cfg RunnerConfig) *Runner {
	c := &Runner{Metrics: newMetrics(&cfg), conn: s, cfg: cfg, scripts: map[scripts.Name]script{}}
	for _, name := range cfg.Scripts {
		text := name.Source()
		marked := slices.Contains(scripts.Marked, name)
		if marked {
			// In one run with the script's own writes, so that Redis has both of them or neither.
			text = scripts.Mark() + text
		}
		c.scripts[name] = script{text, redis.NewScript(text).Hash(), marked}
	}

	if cfg.Bounded {
		c.slots = make(chan struct{}, max(1, s.pool/2))
	}

	c.accepted.Store(cfg.Accept == nil)

	s.mu.Lock()
	s.runners = append(s.runners, c)
	s.mu.Unlock()
	wake.Signal(s.added) // so that its Accept is called at once

	return c
}

// Close makes all further calls fail, and ends the notifications of OnState. It may be called twice.
func (s *Runner) Close() {
	// Before the lock is taken, so that calls stop at once even if a notification holds it for a while.
	s.closed.Store(true)

	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.conn.runners = slices.DeleteFunc(s.conn.runners, func(c *Runner) bool { return c == s })
}

var (
	errClosed  = errors.New("this process has closed its connections")
	errNoReply = errors.New("redis: no reply")
)

// Known returns the client, or an error while Redis is unavailable.
func (s *Runner) Known(ctx context.Context) (*Client, error) {
	// Also during an outage: callers prepare runs for the kind of Redis, and what they send then fails at once.
	if c := s.conn.connected(); c != nil && s.accepted.Load() && !s.closed.Load() {
		return c, nil
	}

	var c *Client
	err := s.Do(ctx, func(_ context.Context, found *Client) error {
		c = found
		return nil
	})
	return c, err
}

// Do runs fn against Redis, unless the circuit breaker is open. An error of fn counts as a failure of Redis, unless it
// is a reply of Redis or is marked by Answered.
func (s *Runner) Do(ctx context.Context, fn func(context.Context, *Client) error) error {
	if s.closed.Load() {
		return s.classify(errClosed)
	}

	// Before the breaker is asked: its one call that tries Redis again must not wait for a place.
	if s.slots != nil {
		select {
		case s.slots <- struct{}{}:
			defer func() { <-s.slots }()
		case <-ctx.Done():
			return s.classify(ctx.Err())
		}
	}

	run := s.conn.do
	if s.cfg.Apart && s.conn.onCluster() {
		run = s.conn.doApart
	}

	err := run(ctx, func(ctx context.Context, c *Client) error {
		if err := s.accept(ctx, c); err != nil {
			return err
		}
		return fn(ctx, c)
	})

	// What was not sent has not failed. During an outage it would be most of what is counted.
	if err != nil && err != ErrAway {
		s.Metrics.errors.Inc()
	}
	return s.classify(err)
}

// accept calls Accept until it has returned nil once.
func (s *Runner) accept(ctx context.Context, c *Client) error {
	if s.accepted.Load() {
		return nil
	}

	if err := s.cfg.Accept(ctx, c); err != nil {
		return err
	}

	s.accepted.Store(true)
	s.conn.breaker.Signal() // so that OnState is notified
	return nil
}

// classify converts err to an error of the store's contract.
func (s *Runner) classify(err error) error {
	// What an inner call has classified stays as it is.
	if err == nil || errors.Is(err, s.cfg.Unavailable) {
		return err
	}
	if s.cfg.Classify != nil {
		return s.cfg.Classify(err)
	}
	return fmt.Errorf("%w: %w", s.cfg.Unavailable, err)
}

// ScriptRun is one run of a script.
type ScriptRun struct {
	Script scripts.Name
	Keys   []string
	Args   []any
	Reply  any
	Err    error // classified
}

// Run runs scripts in pipelines, in order for each key, and fills in the reply or error of each. It also returns the
// first error.
func (s *Runner) Run(ctx context.Context, runs []*ScriptRun) error {
	// Each pipeline has the time of a call, so a long list takes longer and does not fail.
	for chunk := range slices.Chunk(runs, maxPipeline) {
		err := s.Do(ctx, func(ctx context.Context, c *Client) error { return s.pipeline(ctx, c, chunk) })
		if err == nil {
			continue
		}
		for _, run := range chunk {
			if run.Reply == nil && run.Err == nil { // it was not sent, or the whole pipeline was lost
				run.Err = err
			}
		}
	}

	// The first in order, not in time, so that a caller reports the same error each time.
	for _, run := range runs {
		if run.Err != nil {
			return run.Err
		}
	}
	return nil
}

// scriptCmd runs a script. It must not be repeated blindly, because most scripts would count twice. But after a lost
// connection, go-redis's Cluster client repeats a whole pipeline, whatever MaxRetries says. For a scriptCmd it only
// follows MOVED and ASK, which mean that nothing was executed.
type scriptCmd struct {
	*redis.Cmd

	mark, number string // of a marked script
}

// NoRetry tells go-redis not to repeat the command.
func (scriptCmd) NoRetry() bool { return true }

// SetErr keeps an existing reply. If the time is over while go-redis cannot connect to one master of a Cluster, it sets
// that error for all commands of the pipeline, including those that other masters have answered.
func (c scriptCmd) SetErr(err error) {
	if c.Val() == nil {
		c.Cmd.SetErr(err)
	}
}

// command returns the command that runs a script once, by the script's hash or with its text.
func (s *Runner) command(ctx context.Context, c *Client, run *ScriptRun, withText bool) (cmd scriptCmd) {
	sc := s.scripts[run.Script]
	args := make([]any, 0, 6+len(run.Keys)+len(run.Args))
	if withText {
		args = append(args, "eval", sc.text)
	} else {
		args = append(args, "evalsha", sc.sha)
	}

	keys := len(args)
	args = append(args, len(run.Keys))

	for _, key := range run.Keys {
		args = append(args, key)
	}

	if sc.marked {
		// The mark must be in the same slot as the script's own keys. The script expects it as the last key.
		cmd.mark = s.conn.Marks.key(c, run.Keys)
		args[keys] = len(run.Keys) + 1
		args = append(args, cmd.mark)
	}

	args = append(args, run.Args...)
	if sc.marked {
		var acknowledged string
		cmd.number, acknowledged = s.conn.Marks.next(cmd.mark)
		args = append(args, cmd.number, acknowledged)
	}

	cmd.Cmd = redis.NewCmd(ctx, args...)
	return cmd
}

// moving reports whether a command was not executed because its slot is being moved between masters of a Cluster.
func moving(err error) bool {
	// go-redis follows a few redirections itself; these are what is left when it gives up.
	return redis.HasErrorPrefix(err, "TRYAGAIN") || redis.HasErrorPrefix(err, "MOVED") ||
		redis.HasErrorPrefix(err, "ASK")
}

// pipeline runs one pipeline of scripts, and repeats those that certainly did not run, because the server did not know
// the script or its slot is moving. Its error is nil if any script was answered; the others have their own errors.
func (s *Runner) pipeline(ctx context.Context, c *Client, runs []*ScriptRun) error {
	for unknown := 0; ; { // number of rounds in which the server did not know a script
		done := s.round(ctx, c, runs, unknown)
		if len(done.again) == 0 {
			// Redis works, whatever it says of single scripts.
			if done.served {
				return nil
			}
			return done.err
		}

		if done.missing {
			// In the first such round, load the scripts. If one is lost again in the next round, send its text.
			unknown++
			if unknown == 1 {
				if err := s.loadScripts(ctx, c); err != nil {
					for _, run := range done.again {
						run.Err = s.classify(err) // the cause, rather than that a script is missing
					}
					return err
				}
			}
		} else {
			select {
			case <-ctx.Done():
				return nil // Redis works
			case <-time.After(movingPause):
			}
		}

		runs = done.again
	}
}

// roundDone is the outcome of one round of a pipeline.
type roundDone struct {
	again   []*ScriptRun // scripts that certainly did not run
	served  bool         // Redis answered at least one script
	missing bool         // a server did not know at least one script
	err     error        // that of one command; each script has its own
}

// round sends scripts once. unknown is the number of earlier rounds in which the server did not know one.
func (s *Runner) round(ctx context.Context, c *Client, runs []*ScriptRun, unknown int) (done roundDone) {
	cmds := make([]scriptCmd, len(runs))
	pipe := c.Pipeline()
	for i, run := range runs {
		// A new command in each round: the old one has kept its error, and a marked run needs its own number.
		cmds[i] = s.command(ctx, c, run, unknown == 2)
		_ = pipe.Process(ctx, cmds[i])
	}

	s.Metrics.Commands.Add(float64(len(runs)))
	began := time.Now()
	_, done.err = pipe.Exec(ctx)
	s.Metrics.seconds.Observe(time.Since(began).Seconds())

	for i, run := range runs {
		reply, err := cmds[i].Result()
		if err == nil && reply == nil { // go-redis sets no error when a connection is refused
			err = cmp.Or(done.err, errNoReply)
		}

		if err == nil {
			run.Reply = reply
			run.Err = nil
			done.served = true
			if cmds[i].number != "" {
				s.conn.Marks.acknowledged(cmds[i].mark, cmds[i].number)
			}
			continue
		}

		if unknown < 2 && redis.HasErrorPrefix(err, "NOSCRIPT") {
			done.again = append(done.again, run)
			done.missing = true
		} else if moving(err) {
			done.again = append(done.again, run)
		}

		run.Reply = nil
		run.Err = s.classify(err)
		done.served = done.served || answered(err)
		// do sees the pipeline as a whole, which is a success if any of its scripts was answered.
		s.conn.refused(err)
	}

	return done
}

// loadScripts loads all scripts into every master. If only the missing ones were loaded, a later pipeline might have a
// script that the server knows after one that it does not, and these would run out of order (resize.lua, members.lua).
func (s *Runner) loadScripts(ctx context.Context, c *Client) error {
	return c.Masters(ctx, func(ctx context.Context, m redis.Cmdable) error {
		pipe := m.Pipeline()
		for _, sc := range s.scripts {
			pipe.ScriptLoad(ctx, sc.text)
		}

		s.Metrics.Commands.Add(float64(len(s.scripts)))

		_, err := pipe.Exec(ctx)
		return err
	})
}
