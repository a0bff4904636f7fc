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

// SharedExactConfig tunes a SharedExact. A zero field takes its default.
type SharedExactConfig struct {
	Owned      rows.Store     // of this region, in Redis; required
	URL        string         // of PostgreSQL, postgres://…; required
	Rules      *counter.Rules // required
	OnPostgres func(up bool)  // optional
	Log        zerolog.Logger
}

// SharedExact is a PostgreSQL that has the exact counters of all regions and nothing else, as used by one process; the
// other counters are in the Redis of each region. The process's owner and gateway are built on [SharedExact.Rows], and
// [SharedExact.NewStore] combines them with the exact counters.
type SharedExact struct {
	cfg   SharedExactConfig
	pg    *rowspg.Store
	exact *exactpg.Store
}

// OpenSharedExact opens the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or the
// database cannot be used. While PostgreSQL does not answer, all counters except exact ones can be changed.
func OpenSharedExact(ctx context.Context, cfg SharedExactConfig) (*SharedExact, error) {
	pg, err := UseSharedExact.open(ctx, cfg.URL, cfg.OnPostgres, cfg.Log)
	if err != nil {
		return nil, err
	}

	s := &SharedExact{cfg: cfg, pg: pg}
	s.exact = exactpg.New(exactpg.Config{DB: pg.DB(), Elsewhere: Elsewhere(cfg.Owned), Log: cfg.Log})

	return s, nil
}

// Rows returns the store of rows for the owner, with owner.Config.ExactOutside, and for the gateway of this process. A
// region keeps working while the shared PostgreSQL is unavailable. Counters that are created in that time are not
// looked for there, which matters only if a rule has just changed its kind.
func (s *SharedExact) Rows() rows.Store {
	return withExact{Store: s.cfg.Owned, exact: s.exact, optional: true}
}

// NewStore returns the store of this process. Owned must send its calls to owners that use [SharedExact.Rows].
func (s *SharedExact) NewStore(owned *call.Store) *Store {
	return New(Config{Owned: owned, Exact: s.exact, Rules: s.cfg.Rules, SeparateKeys: true})
}

// ServeSQL lets applications change exact counters in SQL, see exactpg.Store.ServeSQL.
func (s *SharedExact) ServeSQL(ctx context.Context, rules *counter.Rules, changed func([]counter.Counter)) {
	s.exact.ServeSQL(ctx, rules, changed)
}

// Cause returns why PostgreSQL is unavailable, or nil.
func (s *SharedExact) Cause() error { return s.pg.Cause() }

// Close closes the connections. The owner of the process must be closed first.
func (s *SharedExact) Close() {
	s.exact.Close()
	s.pg.Close()
}
