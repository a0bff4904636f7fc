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

// Behind is PostgreSQL behind Redis, as one process uses it. The owner and the gateway of the process are built over
// [Behind.Rows], and [Behind.Over] makes them a store with exact counters.
type Behind struct {
	cfg   BehindConfig
	front rows.Store
	back  *rowspg.Store
	exact *exactpg.Store
	tier  *rowstier.Store

	postgres counter.Relay // whether PostgreSQL can be used
	adopted  atomic.Bool   // it has what Redis had without it

	stop context.CancelFunc
	wg   sync.WaitGroup // awaitAdopted
}

var _ rowstier.Back = (*rowspg.Store)(nil)

// OpenBehind opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings cannot work or the database
// that answered cannot be used. While PostgreSQL does not answer, what is in Redis can be changed.
func OpenBehind(ctx context.Context, cfg BehindConfig) (*Behind, error) {
	b := &Behind{cfg: cfg, stop: func() {}}
	var err error
	b.back, err = UseBehind.open(ctx, cfg.URL, b.postgres.StoreState, cfg.Log)
	if err != nil {
		return nil, err
	}

	return b, nil
}

// Observe has states told whether PostgreSQL can be used, from now on.
func (b *Behind) Observe(states counter.States) { b.postgres.Observe(states) }

// Begin puts the database behind the rows of a Redis. It is called once, before all methods below.
func (b *Behind) Begin(front rows.Store) {
	b.front = front
	b.tier = rowstier.New(front, b.back, rowstier.Config{
		DrainEvery: b.cfg.PersistInterval, MayAdopt: b.mayAdopt, Log: b.cfg.Log,
	})
	// What is not drained yet is in Redis alone.
	b.exact = exactpg.New(exactpg.Config{DB: b.back.DB(), Elsewhere: Elsewhere(b.tier), Log: b.cfg.Log})
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process.
func (b *Behind) Rows() rows.Store { return Rows(b.tier, b.exact) }

// Tier returns what has rows leave Redis, for owner.Config.Tier.
func (b *Behind) Tier() owner.Tier { return b.tier }

// Over returns the store of this process. Owned sends its calls to owners over [Behind.Rows].
// It is called once.
func (b *Behind) Over(owned *call.Store) *Store {
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	b.wg.Go(func() { b.awaitAdopted(ctx, owned) })

	return New(Config{
		Owned: owned, Exact: b.exact, Rules: b.cfg.Rules, Notes: true, Gate: b.gate,
		Back: owner.NewReader(b.back, rows.PartitionOf),
	})
}

// Lag returns the age of the oldest change that this process has acknowledged, and that is not in PostgreSQL.
func (b *Behind) Lag() time.Duration { return b.tier.Lag() }

// Dirty returns how many rows and idempotency keys this process has acknowledged, and are not in PostgreSQL.
func (b *Behind) Dirty() int { return b.tier.Dirty() }

// ServeSQL has applications change exact counters in SQL, see exactpg.Store.ServeSQL.
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

// Cause returns why PostgreSQL cannot be used, or nil.
func (b *Behind) Cause() error { return b.back.Cause() }

// Close drains what is in Redis alone, until ctx ends. The owner of the process is closed before.
func (b *Behind) Close(ctx context.Context) error {
	b.stop()
	b.wg.Wait()

	// A process that failed to start has no Redis yet.
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
