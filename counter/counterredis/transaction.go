package counterredis

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/internal/redisconn"
	"headcount/scripts"
)

const (
	abandoned    = time.Second    // a lock this old may be a dead process's; finishing it is right in any case
	abortedKept  = 24 * time.Hour // longer than a decision can be on its way
	abortedState = "aborted"

	// mixedKept is how long a part of an operation that PostgreSQL decides may be on its way. Releases before this one
	// made these, with a home below 0; what a dead process of theirs left is aborted.
	mixedKept = 30 * time.Second
)

// errDead is in the error of a transaction that a test has ended in its midst.
var errDead = errors.New("the process is dead")

// transactionPart is one bucket's of a transaction.
type transactionPart struct {
	id           string
	bucket, home int
	others       []int // the buckets beside home; of the home's part alone
}

// prepared is what a bucket keeps of a transaction until it is decided: one run of
// counter_apply.lua.
type prepared struct {
	Keys        []string `json:"keys"`
	Call        string   `json:"call"`
	Transaction string   `json:"transaction"`
}

// transact makes an operation of several buckets; the package doc has the steps.
func (s *Store) transact(ctx context.Context, c *redisconn.Client, op *counter.Op) (counter.Result, error) {
	select {
	case s.crossing <- struct{}{}:
		defer func() { <-s.crossing }()
	case <-ctx.Done():
		return counter.Result{}, fmt.Errorf("%w: %w", counter.ErrUnavailable, context.Cause(ctx))
	}
	w := s.wait(ctx)
	for {
		r, lock, err := s.tryTransact(ctx, c, op)
		if err != nil || lock == nil {
			return r, err
		}
		if err := w.locked(*lock); err != nil {
			return counter.Result{}, err
		}
	}
}

// tryTransact is transact, once. lock says why it has to be tried again, and that
// nothing was changed.
func (s *Store) tryTransact(ctx context.Context, c *redisconn.Client, op *counter.Op) (r counter.Result, lock *string, err error) {
	buckets := bucketsOf(op)
	id, home := rand.Text(), buckets[0]
	parts := make([]*group, len(buckets))
	for i, b := range buckets {
		parts[i] = s.newGroup()
		parts[i].add(0, op, b)
	}
	run := func(mode string, from, to int) ([]outcome, error) {
		if !s.before(mode) {
			return nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, errDead)
		}
		calls := make([]*redisconn.Call, 0, to-from)
		for i := from; i < to; i++ {
			cl, err := s.applyCall(c, parts[i], mode, transactionPart{id: id, bucket: buckets[i], home: home, others: buckets[1:]})
			if err != nil {
				return nil, err
			}
			calls = append(calls, cl)
		}
		_ = s.conn.Run(ctx, calls) // each call has its error
		outcomes := make([]outcome, len(calls))
		var err error
		for i, cl := range calls {
			o, e := parseOutcome(cl)
			if e == nil && o.Busy == nil && !o.Aborted && len(o.Results) != 1 {
				e = fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
			}
			outcomes[i], err = o, errors.Join(err, e)
		}
		return outcomes, err
	}

	// A replay is known by its home, whatever the others would say.
	first, err := run("judge", 0, 1)
	if err != nil {
		return r, nil, err
	}
	switch o := first[0]; {
	case o.Busy != nil:
		return r, o.Busy, nil
	case o.Results[0].Replay:
		r, err = s.replay(ctx, op)
		return r, nil, err
	}
	outcomes, err := run("prepare", 1, len(buckets))
	refusal := first[0].Results[0]
	parts[0].call.Token = first[0].Token
	for _, o := range outcomes {
		switch {
		case o.Token != first[0].Token && o.Busy == nil: // buckets are being cut
			again := ""
			lock = &again
		case o.Busy != nil:
			lock = o.Busy
		case len(o.Results) == 1 && o.Results[0].Refused != "" && (refusal.Refused == "" || o.Results[0].At < refusal.At):
			refusal = o.Results[0]
		}
	}
	if err != nil || lock != nil || refusal.Refused != "" {
		// What an error leaves is finished by whoever meets it.
		abortErr := s.abort(ctx, id, home, buckets[1:], parts[1:])
		switch err = errors.Join(err, abortErr); {
		case err != nil, lock != nil:
			return r, lock, err
		}
		return counter.Result{Err: refusal.conflict(op)}, nil, nil
	}
	decided, err := run("decide", 0, 1)
	if err != nil {
		return r, nil, err // it is unknown: others finish it, either way
	}
	switch o := decided[0]; {
	case o.Aborted: // by who took this process for dead: nothing was changed
		again := ""
		return r, &again, nil
	case o.Busy != nil, o.Results[0].Refused != "", o.Results[0].Replay: // the home has changed since it was judged
		again := ""
		if o.Busy != nil {
			again = *o.Busy
		}
		return r, &again, s.abort(ctx, id, home, buckets[1:], parts[1:])
	}
	outcomes, err = run("commit", 1, len(buckets))
	if err != nil {
		return r, nil, err
	}
	states := decided[0].States
	for _, o := range outcomes {
		for key, text := range o.States {
			states[key] = text
		}
	}
	if !s.before("forget") {
		return r, nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, errDead)
	}
	_ = s.forget(ctx, home, id) // it is made; what is left of the note harms nobody
	r, err = result(op, made{}, states)
	return r, nil, err
}

// before is called before each step.
func (s *Store) before(step string) bool { return s.step == nil || s.step(step) }

// replay answers an operation that was made before, and is whole: what its
// transaction has left is finished first.
func (s *Store) replay(ctx context.Context, op *counter.Op) (counter.Result, error) {
	keys := make([]string, 0, len(op.Changes))
	seen := map[string]bool{}
	for i := range op.Changes {
		if key := op.Changes[i].Key; !seen[key] {
			seen[key] = true
			keys = append(keys, key)
		}
	}
	read, _, err := s.read(ctx, keys, "", true)
	if err != nil {
		return counter.Result{}, err
	}
	by := make(map[string]counter.Counter, len(read))
	for _, r := range read {
		by[r.Key] = r.Counter
	}
	r := counter.Result{Replay: true, Counters: make([]counter.Counter, len(op.Changes))}
	for i := range op.Changes {
		r.Counters[i] = by[op.Changes[i].Key].Or(op.Changes[i].Rule.Kind)
	}
	return r, nil
}

// abort notes that the transaction is aborted, and takes its parts away.
func (s *Store) abort(ctx context.Context, id string, home int, buckets []int, parts []*group) error {
	if !s.before("abort") {
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, errDead)
	}
	noted, err := s.outcome(ctx, id, home)
	if err != nil {
		return err
	}
	if noted != abortedState {
		return fmt.Errorf("%w: it was decided in the meantime", counter.ErrUnavailable)
	}
	calls := make([]*redisconn.Call, len(buckets))
	for i, b := range buckets {
		calls[i] = abortCall(id, b, parts[i].call.Ops)
	}
	return s.conn.Run(ctx, calls)
}

func abortCall(id string, bucket int, ops []operation) *redisconn.Call {
	cl := &redisconn.Call{Script: scripts.CounterAbort, Keys: []string{transactionKey(bucket, id), locksKey(bucket)}, Args: []any{id}}
	for _, o := range ops {
		for _, c := range o.Changes {
			cl.Args = append(cl.Args, c.Key)
		}
	}
	return cl
}

// outcome is what became of a transaction; it is aborted when nothing has.
func (s *Store) outcome(ctx context.Context, id string, home int) (string, error) {
	if home < 0 {
		return abortedState, nil
	}
	cl := &redisconn.Call{Script: scripts.CounterOutcome, Keys: []string{transactionKey(home, id)}, Args: []any{abortedKept.Milliseconds()}}
	if err := s.conn.Run(ctx, []*redisconn.Call{cl}); err != nil {
		return "", err
	}
	text, ok := cl.Reply.(string)
	if !ok {
		return "", fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
	}
	return text, nil
}

// forget takes the note away, when all parts are made.
func (s *Store) forget(ctx context.Context, home int, id string) error {
	return s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		return c.Unlink(ctx, transactionKey(home, id)).Err()
	})
}

// lock is one that was met.
type lock struct {
	id   string
	home int
	age  time.Duration // by Redis
}

// parseLock reads "transaction home since now".
func parseLock(text string) (lock, bool) {
	f := strings.Fields(text)
	if len(f) != 4 {
		return lock{}, false
	}
	home, err := strconv.Atoi(f[1])
	since, err1 := strconv.ParseInt(f[2], 10, 64)
	now, err2 := strconv.ParseInt(f[3], 10, 64)
	return lock{id: f[0], home: home, age: time.Duration(now-since) * time.Millisecond}, errors.Join(err, err1, err2) == nil
}

// finish brings a transaction of somebody else's to its end.
func (s *Store) finish(ctx context.Context, l lock) error {
	if l.home < 0 && l.age < mixedKept {
		return nil
	}
	noted, err := s.outcome(ctx, l.id, l.home)
	if err != nil {
		return err
	}
	s.cfg.Log.Info().Str("transaction", l.id).Bool("made", noted != abortedState).Msg("finishing an operation on counters that its process left")
	c, err := s.conn.Known(ctx)
	if err != nil {
		return err
	}
	// An aborted one does not say where its parts are: the bucket with the lock that
	// was met is among all.
	buckets := make([]int, 0, Buckets)
	if noted == abortedState || json.Unmarshal([]byte(noted), &buckets) != nil {
		buckets = buckets[:0]
		for b := range Buckets {
			buckets = append(buckets, b)
		}
	}
	parts, err := s.parts(ctx, l.id, l.home, buckets)
	if err != nil {
		return err
	}
	var calls []*redisconn.Call
	for b, p := range parts {
		if noted != abortedState {
			calls = append(calls, applyScript(c, "commit", p.Keys, p.Call, p.Transaction, ""))
			continue
		}
		var call script
		if err := json.Unmarshal([]byte(p.Call), &call); err != nil {
			return fmt.Errorf("%w: %w: %w", counter.ErrUnavailable, errReply, err)
		}
		calls = append(calls, abortCall(l.id, b, call.Ops))
	}
	if err := s.conn.Run(ctx, calls); err != nil || noted == abortedState {
		return err
	}
	return s.forget(ctx, l.home, l.id)
}

// parts are what buckets keep of a transaction.
func (s *Store) parts(ctx context.Context, id string, home int, buckets []int) (map[int]prepared, error) {
	parts := map[int]prepared{}
	err := s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		pipe := c.Pipeline()
		texts := map[int]*redis.StringCmd{}
		for _, b := range buckets {
			if b != home {
				texts[b] = pipe.Get(ctx, transactionKey(b, id))
			}
		}
		s.conn.Metrics.Commands.Add(float64(len(texts)))
		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}
		for b, cmd := range texts {
			text, err := cmd.Result()
			if errors.Is(err, redis.Nil) {
				continue // made, or never prepared
			}
			var p prepared
			if err == nil {
				err = json.Unmarshal([]byte(text), &p)
			}
			if err != nil {
				return err
			}
			parts[b] = p
		}
		return nil
	})
	return parts, err
}
