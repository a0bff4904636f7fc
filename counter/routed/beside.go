package routed

import (
	"context"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/exactpg"
	"headcount/internal/rows"
	"headcount/internal/rows/rowspg"
)

// BesideConfig tunes a Beside. A zero field takes its default.
type BesideConfig struct {
	Owned      rows.Store     // of this region, in Redis; required
	URL        string         // of PostgreSQL, postgres://…; required
	Rules      *counter.Rules // required
	OnPostgres func(up bool)  // optional
	Log        zerolog.Logger
}

// Beside is a PostgreSQL that has the exact counters of all regions and nothing else, as used by one process; the other
// counters are in the Redis of each region. The process's owner and gateway are built on [Beside.Rows], and
// [Beside.Over] combines them with the exact counters.
type Beside struct {
	cfg   BesideConfig
	pg    *rowspg.Store
	exact *exactpg.Store
}

// OpenBeside opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or the database
// cannot be used. While PostgreSQL does not answer, all counters except exact ones can be changed.
func OpenBeside(ctx context.Context, cfg BesideConfig) (*Beside, error) {
	pg, err := UseBeside.open(ctx, cfg.URL, cfg.OnPostgres, cfg.Log)
	if err != nil {
		return nil, err
	}

	b := &Beside{cfg: cfg, pg: pg}
	b.exact = exactpg.New(exactpg.Config{DB: pg.DB(), Elsewhere: Elsewhere(cfg.Owned), Log: cfg.Log})

	return b, nil
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process. A
// region keeps working while the shared PostgreSQL is unavailable. Counters that are created in that time are not
// looked for there, which matters only if a rule has just changed its kind.
func (b *Beside) Rows() rows.Store {
	return withExact{Store: b.cfg.Owned, exact: b.exact, goesOn: true}
}

// Over returns the store of this process. Owned must send its calls to owners that use [Beside.Rows].
func (b *Beside) Over(owned *call.Store) *Store {
	return New(Config{Owned: owned, Exact: b.exact, Rules: b.cfg.Rules, Notes: true})
}

// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (b *Beside) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	b.exact.ServeSQL(ctx, rules, changed)
}

// Cause returns why PostgreSQL is unavailable, or nil.
func (b *Beside) Cause() error { return b.pg.Cause() }

// Close closes the connections. The owner of the process must be closed first.
func (b *Beside) Close() {
	b.exact.Close()
	b.pg.Close()
}
