package routed

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/rs/zerolog"

	"headcount/counter/exactpg"
	"headcount/internal/postgres"
	"headcount/internal/rows/rowspg"
)

// Use says for what counters use a database.
type Use int

const (
	UseAlone       Use = iota // it has all counters, see Alone
	UseTiered                 // it is the durable store behind Redis, see Tiered
	UseSharedExact            // it has the exact counters of all regions and nothing else, see SharedExact
)

// Remedies for a database that is already used in another way.
const (
	refuseTier = "a Redis stands in front of the database and has newer values; give its --redis, too, or carry the " +
		"counters over (headcount export --redis URL --postgres URL) and import them into an empty database"
	noRows = "its counters are of all kinds; export them, and import them with --regions into an empty " +
		"database and Redis"
)

// config returns the configuration with which a database is opened. Exact counters have the same tables in every use.
// With UseSharedExact there are no rows of partitions, but the idempotency keys of exact counters still need a table of
// rowspg.
func (u Use) config() rowspg.Config {
	cfg := rowspg.Config{Readable: exactpg.Readable, OtherTables: []postgres.Tables{exactpg.Tables()}}
	switch u {
	case UseAlone:
		cfg.RefuseTier = refuseTier
	case UseTiered:
		cfg.DurableTier = true
	case UseSharedExact:
		cfg.NoRows = noRows
	}

	return cfg
}

// open opens the database of a URL. It fails, with postgres.ErrConfig, if settings are invalid or the database cannot
// be used. OnState may be nil.
func (u Use) open(ctx context.Context, url string, onState func(up bool), log zerolog.Logger) (*rowspg.Store, error) {
	cfg := u.config()
	cfg.URL = url
	cfg.OnState = onState
	cfg.Log = log

	return open(ctx, cfg)
}

func open(ctx context.Context, cfg rowspg.Config) (*rowspg.Store, error) {
	store, err := rowspg.Open(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("routed: %w", err)
	}

	return store, nil
}

// Checked is what Check found in a database that answers.
type Checked struct {
	Problems []error // with a remedy each
	AdminSQL string  // what an administrator must execute before applications can call headcount.change; empty: nothing
}

// Check connects as a process with that use would, and fails in the same cases, and also if the database does not
// answer. It changes nothing.
func Check(ctx context.Context, url string, use Use) (found Checked, err error) {
	tables := rowspg.Tables(use.config())
	found.Problems, err = postgres.Check(ctx, url, tables, func(ctx context.Context, conn *sql.DB) (err error) {
		found.AdminSQL, err = exactpg.AdminSQL(ctx, conn)
		return err
	})

	return found, err
}
