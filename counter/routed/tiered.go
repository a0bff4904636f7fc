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

// TieredConfig tunes a Tiered. A zero field takes its default.
type TieredConfig struct {
	URL             string         // of PostgreSQL, postgres://…; required
	Rules           *counter.Rules // required
	PersistInterval time.Duration  // as rowstier.Config.DrainEvery
	Log             zerolog.Logger
}

// Tiered is a PostgreSQL that is the durable store behind Redis, as used by one process. The process's owner and
// gateway are built on [Tiered.Rows], and [Tiered.NewStore] combines them with the exact counters.
type Tiered struct {
	cfg     TieredConfig
	fast    rows.Store
	durable *rowspg.Store
	exact   *exactpg.Store
	tier    *rowstier.Store

	postgres counter.Relay // whether PostgreSQL is available
	adopted  atomic.Bool   // everything that Redis had before PostgreSQL was added has been copied

	stop context.CancelFunc
	wg   sync.WaitGroup // waits for awaitAdopted
}

var _ rowstier.Durable = (*rowspg.Store)(nil)

// OpenTiered opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or the database
// cannot be used. While PostgreSQL does not answer, counters in Redis can still be changed.
func OpenTiered(ctx context.Context, cfg TieredConfig) (*Tiered, error) {
	// Close may come before NewStore, which sets stop.
	t := &Tiered{cfg: cfg, stop: func() {}}
	var err error
	t.durable, err = UseTiered.open(ctx, cfg.URL, t.postgres.StoreState, cfg.Log)
	if err != nil {
		return nil, err
	}

	return t, nil
}

// Observe notifies states from now on whether PostgreSQL is available.
func (t *Tiered) Observe(states counter.States) { t.postgres.Observe(states) }

// Begin uses the database as the durable store behind the rows of a Redis. It must be called once, before all methods
// below.
func (t *Tiered) Begin(fast rows.Store) {
	t.fast = fast
	t.tier = rowstier.New(fast, t.durable, rowstier.Config{
		DrainEvery: t.cfg.PersistInterval, MayAdopt: t.mayAdopt, Log: t.cfg.Log,
	})
	// Undrained rows are in Redis only, so look in both.
	t.exact = exactpg.New(exactpg.Config{DB: t.durable.DB(), Elsewhere: Elsewhere(t.tier), Log: t.cfg.Log})
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process.
func (t *Tiered) Rows() rows.Store { return Rows(t.tier, t.exact) }

// Tier returns the store that evicts rows from Redis, for owner.Config.Tier.
func (t *Tiered) Tier() owner.Tier { return t.tier }

// NewStore returns the store of this process. Owned must send its calls to owners that use [Tiered.Rows]. It is called
// only once.
func (t *Tiered) NewStore(owned *call.Store) *Store {
	ctx, stop := context.WithCancel(context.Background())
	t.stop = stop
	t.wg.Go(func() { t.awaitAdopted(ctx, owned) })

	return New(Config{
		Owned: owned, Exact: t.exact, Rules: t.cfg.Rules, SeparateKeys: true, Gate: t.gate,
		Durable: owner.NewReader(t.durable, rows.PartitionOf),
	})
}

// Lag returns the age of the oldest change that this process has acknowledged and that is not in PostgreSQL yet.
func (t *Tiered) Lag() time.Duration { return t.tier.Lag() }

// Dirty returns the number of rows and idempotency keys that this process has acknowledged and that are not in
// PostgreSQL yet.
func (t *Tiered) Dirty() int { return t.tier.Dirty() }

// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (t *Tiered) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	t.exact.ServeSQL(ctx, rules, changed)
}

// Ready returns why counters are not served yet, or nil.
func (t *Tiered) Ready() error {
	if !t.adopted.Load() {
		return errAdopting
	}

	return nil
}

// AwaitReady returns nil once counters are served, or why they are not when ctx ends.
func (t *Tiered) AwaitReady(ctx context.Context) error {
	for t.Ready() != nil {
		if !outage.Sleep(ctx, adoptedEvery) {
			return t.Ready()
		}
	}

	return nil
}

// Cause returns why PostgreSQL is unavailable, or nil.
func (t *Tiered) Cause() error { return t.durable.Cause() }

// Close drains the rows that are in Redis only, until ctx ends. The owner of the process must be closed first.
func (t *Tiered) Close(ctx context.Context) error {
	t.stop()
	t.wg.Wait()

	// If the process failed to start, Begin was not called.
	var err error
	if t.tier != nil {
		err = t.tier.Close(ctx)
		t.exact.Close()
	}
	// The durable store comes last, because tier and exact use its connections.
	t.durable.Close()

	if err != nil {
		return errors.Join(counter.ErrUnavailable, err)
	}

	return nil
}
