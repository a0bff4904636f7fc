package routed

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/counter/owner"
	"headcount/internal/outage"
	"headcount/internal/rows"
	"headcount/internal/rows/rowspg"
	"headcount/internal/rows/rowstier"
)

// BehindConfig tunes a Behind. A zero field takes its default.
type BehindConfig struct {
	URL             string         // of PostgreSQL, postgres://…; required
	Rules           *counter.Rules // required
	PersistInterval time.Duration  // as rowstier.Config.DrainEvery
	Log             zerolog.Logger
}

// Behind is a PostgreSQL that is the durable store behind Redis, as used by one process. The process's owner and
// gateway are built on [Behind.Rows], and [Behind.Over] combines them with the exact counters.
type Behind struct {
	cfg   BehindConfig
	front rows.Store
	back  *rowspg.Store
	exact *exactpg.Store
	tier  *rowstier.Store

	postgres counter.Relay // whether PostgreSQL is available
	adopted  atomic.Bool   // everything that Redis had before PostgreSQL was added has been copied

	stop context.CancelFunc
	wg   sync.WaitGroup // waits for awaitAdopted
}

var _ rowstier.Durable = (*rowspg.Store)(nil)

// OpenBehind opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or the database
// cannot be used. While PostgreSQL does not answer, counters in Redis can still be changed.
func OpenBehind(ctx context.Context, cfg BehindConfig) (*Behind, error) {
	b := &Behind{cfg: cfg, stop: func() {}}
	var err error
	b.back, err = UseBehind.open(ctx, cfg.URL, b.postgres.StoreState, cfg.Log)
	if err != nil {
		return nil, err
	}

	return b, nil
}

// Observe notifies states from now on whether PostgreSQL is available.
func (b *Behind) Observe(states counter.States) { b.postgres.Observe(states) }

// Begin uses the database as the durable store behind the rows of a Redis. It must be called once, before all methods
// below.
func (b *Behind) Begin(front rows.Store) {
	b.front = front
	b.tier = rowstier.New(front, b.back, rowstier.Config{
		DrainEvery: b.cfg.PersistInterval, MayAdopt: b.mayAdopt, Log: b.cfg.Log,
	})
	// Undrained rows are in Redis only, so look in both.
	b.exact = exactpg.New(exactpg.Config{DB: b.back.DB(), Elsewhere: Elsewhere(b.tier), Log: b.cfg.Log})
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process.
func (b *Behind) Rows() rows.Store { return Rows(b.tier, b.exact) }

// Tier returns the store that evicts rows from Redis, for owner.Config.Tier.
func (b *Behind) Tier() owner.Tier { return b.tier }

// Over returns the store of this process. Owned must send its calls to owners that use [Behind.Rows]. It is called only
// once.
func (b *Behind) Over(owned *call.Store) *Store {
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.wg.Go(func() { b.awaitAdopted(ctx, owned) })

	return New(Config{
		Owned: owned, Exact: b.exact, Rules: b.cfg.Rules, Notes: true, Gate: b.gate,
		Back: owner.NewReader(b.back, rows.PartitionOf),
	})
}

// Lag returns the age of the oldest change that this process has acknowledged and that is not in PostgreSQL yet.
func (b *Behind) Lag() time.Duration { return b.tier.Lag() }

// Dirty returns the number of rows and idempotency keys that this process has acknowledged and that are not in
// PostgreSQL yet.
func (b *Behind) Dirty() int { return b.tier.Dirty() }

// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (b *Behind) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	b.exact.ServeSQL(ctx, rules, changed)
}

// Ready returns why counters are not served yet, or nil.
func (b *Behind) Ready() error {
	if !b.adopted.Load() {
		return errAdopting
	}

	return nil
}

// AwaitReady returns nil once counters are served, or why they are not when ctx ends.
func (b *Behind) AwaitReady(ctx context.Context) error {
	for b.Ready() != nil {
		if !outage.Sleep(ctx, adoptedEvery) {
			return b.Ready()
		}
	}

	return nil
}

// Cause returns why PostgreSQL is unavailable, or nil.
func (b *Behind) Cause() error { return b.back.Cause() }

// Close drains the rows that are in Redis only, until ctx ends. The owner of the process must be closed first.
func (b *Behind) Close(ctx context.Context) error {
	b.stop()
	b.wg.Wait()

	// If the process failed to start, Begin was not called.
	var err error
	if b.tier != nil {
		err = b.tier.Close(ctx)
		b.exact.Close()
	}
	b.back.Close()

	if err != nil {
		return errors.Join(counter.ErrUnavailable, err)
	}

	return nil
}
