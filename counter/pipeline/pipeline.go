// Package pipeline opens the counters of a process: the store that the settings name, and the layers between a call and
// the store.
//
// A change passes these layers in order:
//
//  1. counter.Combiner gathers changes while a write is under way and sends them together.
//  2. The top list tracker and the [Observer] receive the results after layer 4, before the answer.
//  3. Package region, with other regions only, marks totals as approximate.
//  4. The owner of the counter, over a store in Redis, in PostgreSQL, in both, in a file or in memory.
//
// Reads and watches begin at 3. Limits have a queue of their own in front of 4.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/wake"
)

// Observer observes changes.
type Observer interface {
	// Changed receives results that are about to be answered. It must not block.
	Changed(results []counter.Result)
}

// Counters are the counters and limits of a process. The methods may be called from any goroutine.
type Counters struct {
	counter.Reader
	counter.Feed
	counter.Reserver
	cfg      Config
	where    string
	store    counter.Store // layers 3 and 4
	combiner *counter.Combiner
	limits   *counter.Limits
	tops     *counter.TopTracker
	rules    *counter.Rules
	observer Observer // may be nil

	redis, postgres server
	changed         atomic.Pointer[func()] // called when a server becomes reachable or unreachable; may be nil
	database        database               // nil without PostgreSQL
	ready           func() error           // why the store does not serve although its servers answer; may be nil
}

// New returns the counters of a store. Close closes both. It keeps the top lists of rules.
func New(store counter.Store, rules *counter.Rules, cfg counter.CombinerConfig, log zerolog.Logger) *Counters {
	c := &Counters{store: store}
	c.begin(rules, cfg, log)

	return c
}

// begin creates the layers in front of the store.
func (c *Counters) begin(rules *counter.Rules, cfg counter.CombinerConfig, log zerolog.Logger) {
	c.Reader = c.store
	c.Feed = c.store
	c.Reserver = c.store
	c.rules = rules
	c.tops = counter.NewTopTracker(c.store, rules, log)
	c.combiner = counter.NewCombiner(writer{c}, cfg)
	c.limits = counter.NewLimits(c.store, cfg)
}

// Observe sets the observer of changes. It must be called before the first change.
func (c *Counters) Observe(o Observer) { c.observer = o }

// Change makes op, see counter.Combiner.Do.
func (c *Counters) Change(ctx context.Context, op counter.Op) counter.Result {
	// At once: no owner claims such counters, so the call would wait in vain for all of its time.
	if err := c.refused(); err != nil {
		return counter.Result{Err: err}
	}

	return c.combiner.Do(ctx, op)
}

// writer is the counter.Writer of the Combiner. Everything that must follow a change happens here, so that it happens
// even if the caller is gone by then.
type writer struct{ *Counters }

// Apply implements counter.Writer.
func (w writer) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := w.store.Apply(ctx, ops)
	// Candidates for top lists are marked before the answer: this process may die after it.
	w.tops.Note(ctx, ops, results)
	// After the marks, because a change whose mark failed is answered as an error.
	if w.observer != nil {
		w.observer.Changed(results)
	}

	return results
}

// database is the PostgreSQL of the store.
type database interface {
	// Cause returns why it cannot be used, or nil.
	Cause() error
	// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
	ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter))
}

// expireEvery is the time between two looks for reservations that are due. One may come back a second late.
const expireEvery = 250 * time.Millisecond

// expireWithin limits one look, and what follows from it.
const expireWithin = 10 * time.Second

// expire ends reservations whose time has come, until ctx ends. An expiry is a change like any other, so the observer
// and the feed receive it. Every gateway does this, and whoever comes second changes nothing.
func (c *Counters) expire(ctx context.Context) {
	for wake.Wait(ctx, expireEvery, nil) {
		for more := true; more && c.refused() == nil; {
			more = c.expireSome(ctx)
		}
	}
}

// expireSome reports whether there may be more that are due.
func (c *Counters) expireSome(ctx context.Context) (more bool) {
	ctx, cancel := context.WithTimeout(ctx, expireWithin)
	defer cancel()

	// What fails is due again.
	due, err := c.store.Due(ctx)
	if err != nil || len(due) == 0 {
		return false
	}

	ops := make([]counter.Op, len(due))
	for i := range due {
		ops[i] = due[i].Expiring(c.rules)
	}
	// Expiries come together already, so they do not pass the Combiner.
	results := writer{c}.Apply(ctx, ops)
	isFull := len(due) == counter.MaxReservations
	// If none was made, the next question would find the same reservations at once.
	isMade := func(r counter.Result) bool { return r.Err == nil && !r.Replay }

	return isFull && slices.ContainsFunc(results, isMade)
}

// Run ends reservations whose time has come, and has the observer and the feed receive what applications change in SQL,
// until ctx ends.
func (c *Counters) Run(ctx context.Context) {
	var expiring sync.WaitGroup
	expiring.Go(func() { c.expire(ctx) })
	defer expiring.Wait()

	if c.database == nil {
		return
	}

	c.database.ServeSQL(ctx, c.cfg.Rules, func(changed []counter.Counter) {
		if c.observer != nil {
			c.observer.Changed([]counter.Result{{Counters: changed}})
		}
	})
}

// Limit judges a request to a limit, see counter.Limits.Do.
func (c *Counters) Limit(ctx context.Context, request limit.Request) (limit.Answer, error) {
	if err := c.refused(); err != nil {
		return limit.Answer{}, err
	}

	return c.limits.Do(ctx, request)
}

// ForgetLimit deletes the states of a limit, see counter.Limiter.
func (c *Counters) ForgetLimit(ctx context.Context, key string) error {
	if err := c.refused(); err != nil {
		return err
	}

	return c.store.ForgetLimit(ctx, key)
}

// Top returns the counters that gained most, see counter.TopTracker.Top.
func (c *Counters) Top(ctx context.Context, rule *counter.Rule, last time.Duration, n int) ([]counter.Gained, error) {
	return c.tops.Top(ctx, rule, last, n)
}

// Close closes the layers from front to back, so that nothing is closed before its users:
//
//   - The Combiner and the limits complete the calls that they accepted.
//   - The top list tracker may be writing a list to the store.
//   - The store closes from the outside in; it waits until PostgreSQL has what is in Redis.
func (c *Counters) Close() error {
	c.combiner.Close()
	c.limits.Close()
	err := c.tops.Close()

	return errors.Join(err, c.store.Close())
}

// server is Redis or PostgreSQL.
type server struct {
	counters *Counters
	up       atomic.Bool
	answered atomic.Bool // it was reachable at least once
}

// StoreState implements counter.States.
func (s *server) StoreState(up bool) {
	// The new state is stored before anybody is told, since who is told asks for it at once.
	s.up.Store(up)
	if up {
		s.answered.Store(true)
	}

	if changed := s.counters.changed.Load(); changed != nil {
		(*changed)()
	}
}

// OnState calls changed now, and after each change of the results of Up and Ready.
func (c *Counters) OnState(changed func()) {
	// Stored before the first call, so that no change in between is missed.
	c.changed.Store(&changed)
	changed()
}

// Where returns a description of the store.
func (c *Counters) Where() string { return c.where }

// Remote reports whether the store is a server, which may be unreachable.
func (c *Counters) Remote() bool { return c.cfg.Cluster != nil || c.cfg.Postgres != "" }

// Up reports whether the store can be reached; with Redis and PostgreSQL, whether Redis can.
func (c *Counters) Up() bool {
	switch {
	case c.cfg.Cluster != nil:
		return c.redis.up.Load()
	case c.cfg.Postgres != "":
		return c.postgres.up.Load()
	default:
		return true
	}
}

// PostgresUp reports whether PostgreSQL can be reached.
func (c *Counters) PostgresUp() bool { return c.postgres.up.Load() }

// refused returns the error of all calls while the counters in Redis are of another release, or nil.
func (c *Counters) refused() error {
	if c.cfg.Cluster == nil {
		return nil
	}
	if err := c.cfg.Cluster.Refused(); err != nil {
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}

	return nil
}

// Ready returns why counters cannot be served now, or nil. A process that serves none, because those in Redis are of
// another release, is ready for everything else: otherwise a rolling restart would come to a halt.
func (c *Counters) Ready() error {
	if c.refused() != nil {
		return nil
	}
	if !c.Up() {
		return c.away("the store of counters, " + c.where + ",")
	}

	// Later on, all but exact counters work without it.
	isAwaited := c.cfg.Postgres != "" && !c.postgres.answered.Load()
	if isAwaited {
		return c.away("PostgreSQL")
	}
	if c.ready != nil {
		return c.ready()
	}

	return nil
}

// away returns an error that says that a server cannot be reached, and for PostgreSQL why.
func (c *Counters) away(what string) error {
	err := errors.New(what + " cannot be reached")
	if c.database == nil {
		return err
	}
	if why := c.database.Cause(); why != nil {
		return fmt.Errorf("%w: PostgreSQL: %w", err, why)
	}

	return err
}
