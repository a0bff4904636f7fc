// Package pipeline opens the counters of a process: the store that the settings ask for, and all that stands between a
// call and that store.
//
// A change goes through these, in this order:
//
//  1. counter.Combiner: what comes while a write is under way gathers, and goes as one.
//  2. [Counters.Observe] and the tracker of top lists are told of what became of it, after 5 and before the answer.
//  3. regions: only with other regions. It marks totals, which other regions may have changed.
//  4. hot: only with Redis. It adds to the shards of busy sums instead of their records.
//  5. The store: in Redis, in PostgreSQL, in both, in a file or in memory.
//
// Reads and watches begin at 3, limits have a queue of their own in front of 5.
package pipeline

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/counter/limit"
	"headcount/counter/tiered"
)

// lastPersist is how long Close waits until PostgreSQL has what was changed.
const lastPersist = 2 * time.Second

// Observer is told of changes.
type Observer interface {
	// Changed takes results that are about to be answered. It must not block.
	Changed(results []counter.Result)
}

// Counters are the counters and limits of a process. The methods may be called from any goroutine.
type Counters struct {
	counter.Reader
	counter.Feed
	cfg      Config
	where    string
	store    counter.Store // behind the Combiner
	combiner *counter.Combiner
	limits   *counter.Limits
	tops     *counter.TopTracker
	observer Observer // nil: nobody observes

	redis, postgres server
	changed         atomic.Pointer[func()] // to be called when a server comes or goes; nil: nobody is told
	cause           func() error           // why PostgreSQL cannot be used; nil: there is none
	tiered          *tiered.Store          // PostgreSQL behind Redis; nil: it is not
	peers           []*counterredis.Store
}

// New returns the counters in a store. Close ends both. rules are those whose top lists are kept.
func New(store counter.Store, rules *counter.Rules, cfg counter.CombinerConfig, log zerolog.Logger) *Counters {
	c := &Counters{store: store}
	c.begin(rules, cfg, log)
	return c
}

// begin puts together what is in front of the store.
func (c *Counters) begin(rules *counter.Rules, cfg counter.CombinerConfig, log zerolog.Logger) {
	c.Reader, c.Feed = c.store, c.store
	c.tops = counter.NewTopTracker(c.store, rules, log)
	c.combiner = counter.NewCombiner(writer{c}, cfg)
	c.limits = counter.NewLimits(c.store, cfg)
}

// Observe has an observer told of each change. It must be called before the first change.
func (c *Counters) Observe(o Observer) { c.observer = o }

// Change makes op, as counter.Combiner.Do says.
func (c *Counters) Change(ctx context.Context, op counter.Op) counter.Result {
	return c.combiner.Do(ctx, op)
}

// writer is what the Combiner writes to: the one place where changes are made. What a change promises beside itself is
// done here, also for a caller that is gone by then.
type writer struct{ *Counters }

// Apply implements counter.Writer.
func (w writer) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := w.store.Apply(ctx, ops)
	w.tops.Note(ctx, ops, results)
	if w.observer != nil {
		w.observer.Changed(results)
	}
	return results
}

// Limit judges a call on a limit, as counter.Limits.Do says.
func (c *Counters) Limit(ctx context.Context, call limit.Call) (limit.Answer, error) {
	return c.limits.Do(ctx, call)
}

// Top returns what gained most, as counter.TopTracker.Top says.
func (c *Counters) Top(ctx context.Context, rule *counter.Rule, last time.Duration, n int) ([]counter.Gained, error) {
	return c.tops.Top(ctx, rule, last, n)
}

// Close ends from the front to the back, so that nothing ends before what uses it:
//
//   - The Combiner and the limits make what they have taken, and that is noted for top lists.
//   - The tracker of top lists may be writing a list to the store.
//   - Changes in Redis are persisted while it and PostgreSQL are open.
//   - The store ends from the outside in: the links to other regions, the gathering of sharded sums, the store itself.
//   - Peers are what those links went to.
func (c *Counters) Close() error {
	c.combiner.Close()
	c.limits.Close()
	err := c.tops.Close()
	if c.tiered != nil {
		ctx, cancel := context.WithTimeout(context.Background(), lastPersist)
		defer cancel()
		err = errors.Join(err, c.tiered.Persist(ctx))
	}
	return errors.Join(err, c.closeStores())
}

// closeStores closes the store, if it is open, and then the peers.
func (c *Counters) closeStores() (err error) {
	if c.store != nil {
		err = c.store.Close()
	}
	for _, peer := range c.peers {
		err = errors.Join(err, peer.Close())
	}
	return err
}

// server is Redis or PostgreSQL.
type server struct {
	counters *Counters
	up       atomic.Bool
	answered atomic.Bool // once is enough
}

// StoreState implements counter.States.
func (s *server) StoreState(up bool) {
	s.up.Store(up)
	if up {
		s.answered.Store(true)
	}
	if changed := s.counters.changed.Load(); changed != nil {
		(*changed)()
	}
}

// OnState has changed called after each change of what Up and Ready say, and now.
func (c *Counters) OnState(changed func()) {
	c.changed.Store(&changed)
	changed()
}

// Where says where the counters are.
func (c *Counters) Where() string { return c.where }

// Remote reports whether the store is a server of its own, and may be away.
func (c *Counters) Remote() bool { return c.cfg.Redis != "" || c.cfg.Postgres != "" }

// Up reports whether the store can be reached. Where there are Redis and PostgreSQL it is Redis.
func (c *Counters) Up() bool {
	switch {
	case c.cfg.Redis != "":
		return c.redis.up.Load()
	case c.cfg.Postgres != "":
		return c.postgres.up.Load()
	default:
		return true
	}
}

// PostgresUp reports whether PostgreSQL can be reached.
func (c *Counters) PostgresUp() bool { return c.postgres.up.Load() }

// Ready returns why counters cannot be served now, or nil.
func (c *Counters) Ready() error {
	switch {
	case !c.Up():
		return c.away("the store of counters, " + c.where + ",")
	case c.cfg.Postgres != "" && !c.postgres.answered.Load(): // later, what is not exact goes on without it
		return c.away("PostgreSQL")
	case c.tiered != nil:
		return c.tiered.Ready()
	default:
		return nil
	}
}

// away says that something cannot be reached, and of PostgreSQL why.
func (c *Counters) away(what string) error {
	err := errors.New(what + " cannot be reached")
	if c.cause == nil {
		return err
	}
	if why := c.cause(); why != nil {
		return fmt.Errorf("%w: PostgreSQL: %w", err, why)
	}
	return err
}
