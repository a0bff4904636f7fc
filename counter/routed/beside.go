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

// Beside is PostgreSQL beside the Redis of a region, as one process uses it. PostgreSQL has the exact counters of all
// regions and nothing else. The owner and the gateway of the process are built over [Beside.Rows], and [Beside.Over]
// makes them a store with exact counters.
type Beside struct {
	cfg   BesideConfig
	pg    *rowspg.Store
	exact *exactpg.Store
}

// OpenBeside opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings cannot work or the database
// that answered cannot be used. While PostgreSQL does not answer, all but exact counters can be changed.
func OpenBeside(ctx context.Context, cfg BesideConfig) (*Beside, error) {
	pg, err := UseBeside.open(ctx, cfg.URL, cfg.OnPostgres, cfg.Log)
	if err != nil {
		return nil, err
	}

	b := &Beside{cfg: cfg, pg: pg}
	b.exact = exactpg.New(exactpg.Config{DB: pg.DB(), Elsewhere: Elsewhere(cfg.Owned), Log: cfg.Log})

	return b, nil
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process.
// A region goes on while the PostgreSQL of all regions is away. A counter that is made then is not looked for there,
// which matters only if a rule has just changed its kind.
func (b *Beside) Rows() rows.Store {
	return withExact{Store: b.cfg.Owned, exact: b.exact, goesOn: true}
}

// Over returns the store of this process. Owned sends its calls to owners over [Beside.Rows].
func (b *Beside) Over(owned *call.Store) *Store {
	return New(Config{Owned: owned, Exact: b.exact, Rules: b.cfg.Rules, Notes: true})
}

// ServeSQL has applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (b *Beside) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	b.exact.ServeSQL(ctx, rules, changed)
}

// Cause returns why PostgreSQL cannot be used, or nil.
func (b *Beside) Cause() error { return b.pg.Cause() }

// Close ends the connections. The owner of the process is closed before.
func (b *Beside) Close() {
	b.exact.Close()
	b.pg.Close()
}
