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
	movingPause = 10 * time.Millisecond // until a command is sent again whose slot is moving

	maxPipeline = 1024 // scripts in one pipeline; longer lists go in several
)

// States is notified when a Caller begins or ceases to be able to use Redis. It begins as not able. One goroutine
// calls it; it must not block.
type States interface{ StoreState(up bool) }

// CallerConfig tunes a Caller. A zero field takes its default.
type CallerConfig struct {
	// Scripts are those that Run may run.
	Scripts []scripts.Name
	// Unavailable is in the errors of calls that Redis did not answer. Required.
	Unavailable error
	// Classify gives an error of Redis the meaning that the store's contract has for it; default Unavailable.
	Classify func(error) error
	// Accept is asked before anything else is done in Redis. Until it returns nil, its error is that of
	// every call of this Caller. Optional.
	Accept func(context.Context, *Client) error
	// Bounded says that there may be any number of calls at a time: at most half of the connections of the pool
	// are for them, and calls beyond that wait.
	Bounded bool
	// Apart says that a call is about some of a Cluster's masters. Its failure says nothing about the others, so on a
	// Cluster it holds no other call back, and is not held back itself.
	Apart      bool
	Registerer prometheus.Registerer // of the metrics; nil: none
	Metrics    string                // what their names begin with; default headcount_redis
	OnState    States                // optional
}

// Caller is one store's access to a Conn, with the store's own scripts, meaning of errors, and metrics. Its methods may
// be called from any goroutine.
type Caller struct {
	Metrics *Metrics

	conn     *Conn
	cfg      CallerConfig
	scripts  map[scripts.Name]script
	slots    chan struct{} // holds one for each call under way; nil: they are not bounded
	accepted atomic.Bool
	closed   atomic.Bool
	notified bool // what OnState was last notified of; mu of the Conn guards it
}

type script struct {
	text, sha string
	marked    bool
}

// Caller returns a new Caller. Close it before the Conn.
func (s *Conn) Caller(cfg CallerConfig) *Caller {
	c := &Caller{Metrics: newMetrics(&cfg), conn: s, cfg: cfg, scripts: map[scripts.Name]script{}}
	for _, name := range cfg.Scripts {
		text := name.Source()
		marked := slices.Contains(scripts.Marked, name)
		if marked {
			text = scripts.Mark() + text
		}
		c.scripts[name] = script{text, redis.NewScript(text).Hash(), marked}
	}

	if cfg.Bounded {
		c.slots = make(chan struct{}, max(1, s.pool/2))
	}

	c.accepted.Store(cfg.Accept == nil)

	s.mu.Lock()
	s.callers = append(s.callers, c)
	s.mu.Unlock()
	wake.Signal(s.added) // so that its Accept is asked at once

	return c
}

// Close makes all further calls fail, and ends the notifications of OnState. It may be called twice.
func (s *Caller) Close() {
	s.closed.Store(true)

	s.conn.mu.Lock()
	defer s.conn.mu.Unlock()
	s.conn.callers = slices.DeleteFunc(s.conn.callers, func(c *Caller) bool { return c == s })
}

var (
	errClosed  = errors.New("it is closed")
	errNoReply = errors.New("redis: no reply")
)

// Known returns the client, or an error while Redis is away.
func (s *Caller) Known(ctx context.Context) (*Client, error) {
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

// Do runs fn against Redis, unless it is known not to answer. An error of fn is taken for a failure of Redis, unless
// it is a reply of Redis or Answered.
func (s *Caller) Do(ctx context.Context, fn func(context.Context, *Client) error) error {
	if s.closed.Load() {
		return s.classify(errClosed)
	}

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

	if err != nil && err != ErrAway {
		s.Metrics.errors.Inc()
	}
	return s.classify(err)
}

// accept asks Accept until that has returned nil once.
func (s *Caller) accept(ctx context.Context, c *Client) error {
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

// classify gives err the meaning that it has for the store.
func (s *Caller) classify(err error) error {
	if err == nil || errors.Is(err, s.cfg.Unavailable) {
		return err
	}
	if s.cfg.Classify != nil {
		return s.cfg.Classify(err)
	}
	return fmt.Errorf("%w: %w", s.cfg.Unavailable, err)
}

// Call is one run of a script.
type Call struct {
	Script scripts.Name
	Keys   []string
	Args   []any
	Reply  any
	Err    error // classified
}

// Run runs scripts in pipelines, in order for each key, and fills in the reply or error of each. The first error is
// returned, too.
func (s *Caller) Run(ctx context.Context, calls []*Call) error {
	for chunk := range slices.Chunk(calls, maxPipeline) {
		err := s.Do(ctx, func(ctx context.Context, c *Client) error { return s.pipeline(ctx, c, chunk) })
		if err == nil {
			continue
		}
		for _, cl := range chunk {
			if cl.Reply == nil && cl.Err == nil { // it was not sent, or the whole pipeline was lost
				cl.Err = err
			}
		}
	}

	for _, cl := range calls {
		if cl.Err != nil {
			return cl.Err
		}
	}
	return nil
}

// scriptCmd runs a script. go-redis sends it once: its Cluster client repeats a whole pipeline after a lost connection,
// whatever MaxRetries says, and most scripts would count twice. It follows only MOVED and ASK, which say that nothing
// ran.
type scriptCmd struct {
	*redis.Cmd

	mark, number string // of a script that is marked
}

// NoRetry tells go-redis not to repeat the command.
func (scriptCmd) NoRetry() bool { return true }

// SetErr does not replace a reply. When a master of a Cluster cannot be connected to, and the time is over before
// go-redis tries it again, go-redis gives that error to all commands of the pipeline, also to those that the other
// masters have answered.
func (c scriptCmd) SetErr(err error) {
	if c.Val() == nil {
		c.Cmd.SetErr(err)
	}
}

// command returns one run of cl, by the script's hash or with its text.
func (s *Caller) command(ctx context.Context, c *Client, cl *Call, withText bool) (cmd scriptCmd) {
	sc := s.scripts[cl.Script]
	args := make([]any, 0, 6+len(cl.Keys)+len(cl.Args))
	if withText {
		args = append(args, "eval", sc.text)
	} else {
		args = append(args, "evalsha", sc.sha)
	}

	keys := len(args)
	args = append(args, len(cl.Keys))

	for _, key := range cl.Keys {
		args = append(args, key)
	}

	if sc.marked {
		// The mark must be in the slot of the script's own keys, behind which the script expects it.
		cmd.mark = s.conn.Marks.key(c, cl.Keys)
		args[keys] = len(cl.Keys) + 1
		args = append(args, cmd.mark)
	}

	args = append(args, cl.Args...)
	if sc.marked {
		var acknowledged string
		cmd.number, acknowledged = s.conn.Marks.next(cmd.mark)
		args = append(args, cmd.number, acknowledged)
	}

	cmd.Cmd = redis.NewCmd(ctx, args...)
	return cmd
}

// moving reports whether a command did not run because its slot is on the way from one
// master of a Cluster to another.
func moving(err error) bool {
	return redis.HasErrorPrefix(err, "TRYAGAIN") || redis.HasErrorPrefix(err, "MOVED") ||
		redis.HasErrorPrefix(err, "ASK")
}

// pipeline runs one pipeline of scripts, and repeats those that surely did not run: the server did not know the script,
// or its slot is moving. Its error is nil when any of them was answered; the others have theirs.
func (s *Caller) pipeline(ctx context.Context, c *Client, calls []*Call) error {
	for unknown := 0; ; { // how often the server did not know a script
		cmds := make([]scriptCmd, len(calls))

		pipe := c.Pipeline()
		for i, cl := range calls {
			cmds[i] = s.command(ctx, c, cl, unknown == 2)
			_ = pipe.Process(ctx, cmds[i])
		}

		s.Metrics.Commands.Add(float64(len(calls)))

		began := time.Now()
		_, err := pipe.Exec(ctx)
		s.Metrics.seconds.Observe(time.Since(began).Seconds())

		var again []*Call
		served := false  // Redis answered one of them
		missing := false // it did not know the script of one of them
		for i, cl := range calls {
			v, e := cmds[i].Result()
			if e == nil && v == nil { // go-redis says nothing of it when a connection is refused
				e = cmp.Or(err, errNoReply)
			}

			if e == nil {
				cl.Reply = v
				cl.Err = nil
				served = true
				if cmds[i].number != "" {
					s.conn.Marks.acknowledged(cmds[i].mark, cmds[i].number)
				}
				continue
			}

			if unknown < 2 && redis.HasErrorPrefix(e, "NOSCRIPT") {
				again = append(again, cl)
				missing = true
			} else if moving(e) {
				again = append(again, cl)
			}

			cl.Reply = nil
			cl.Err = s.classify(e)
			served = served || answered(e)
			s.conn.refused(e)
		}

		if len(again) == 0 {
			if served {
				return nil
			}
			return err

		}

		if missing {
			// The first time the scripts are loaded. The second time, one was lost again at once: the text goes along.
			unknown++
			if unknown == 1 {
				if err := s.loadScripts(ctx, c); err != nil {
					return err
				}
			}
		} else {
			select {
			case <-ctx.Done():
				return nil // Redis answers
			case <-time.After(movingPause):
			}
		}

		calls = again
	}
}

// loadScripts loads all scripts into every master. If it loaded only those that were missed, a later pipeline could
// have one script that the server knows after one that it does not, and would not run in order (resize.lua,
// members.lua).
func (s *Caller) loadScripts(ctx context.Context, c *Client) error {
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
