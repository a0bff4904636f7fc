package routed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/internal/postgres"
	"headcount/internal/rows"
	"headcount/internal/rows/rowspg"
	"headcount/internal/rows/rowstier"
)

// BehindConfig tunes a Behind. A zero field takes its default.
type BehindConfig struct {
	Front           rows.Store     // in Redis; required
	URL             string         // of PostgreSQL, postgres://…; required
	Rules           *counter.Rules // required
	PersistInterval time.Duration  // as rowstier.Config.DrainEvery
	OnPostgres      counter.States // optional
	Log             zerolog.Logger
}

// Behind is PostgreSQL behind Redis, as one process uses it. The owner and the gateway of the process are built over
// [Behind.Rows], and [Behind.Over] makes them a store with exact counters.
type Behind struct {
	cfg   BehindConfig
	back  *rowspg.Store
	exact *exactpg.Store
	tier  *rowstier.Store
}

var _ rowstier.Back = (*rowspg.Store)(nil)

// OpenBehind opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings cannot work or the database
// that answered cannot be used. While PostgreSQL does not answer, what is in Redis can be changed.
func OpenBehind(ctx context.Context, cfg BehindConfig) (*Behind, error) {
	b := &Behind{cfg: cfg}
	var err error
	b.back, err = rowspg.Open(ctx, rowspg.Config{
		URL:      cfg.URL,
		Back:     true,
		Readable: exactpg.Readable,
		Beside:   []postgres.Tables{exactpg.Tables()},
		OnState: func(up bool) {
			if cfg.OnPostgres != nil {
				cfg.OnPostgres.StoreState(up)
			}
		},
		Log: cfg.Log,
	})
	if err != nil {
		return nil, fmt.Errorf("routed: %w", err)
	}

	b.tier = rowstier.New(cfg.Front, b.back, rowstier.Config{DrainEvery: cfg.PersistInterval, Log: cfg.Log})
	// What is not drained yet is in Redis alone.
	b.exact = exactpg.New(exactpg.Config{DB: b.back.DB(), Elsewhere: Elsewhere(b.tier), Log: cfg.Log})

	return b, nil
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process.
func (b *Behind) Rows() rows.Store { return Rows(b.tier, b.exact) }

// Over returns the store of this process. Owned sends its calls to owners over [Behind.Rows].
func (b *Behind) Over(owned *call.Store) *Store {
	return New(Config{Owned: owned, Exact: b.exact, Rules: b.cfg.Rules, Notes: true})
}

// Evict has rows of a partition leave Redis once they are drained. Its owner calls it.
func (b *Behind) Evict(partition int, names []rows.Name) { b.tier.Evict(partition, names) }

// Cause returns why PostgreSQL cannot be used, or nil.
func (b *Behind) Cause() error { return b.back.Cause() }

// Close drains what is in Redis alone, until ctx ends. The owner of the process is closed before.
func (b *Behind) Close(ctx context.Context) error {
	err := b.tier.Close(ctx)
	b.exact.Close()
	b.back.Close()
	if err != nil {
		return errors.Join(counter.ErrUnavailable, err)
	}

	return nil
}
