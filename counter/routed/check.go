package routed

import (
	"context"
	"database/sql"

	"headcount/counter/exactpg"
	"headcount/internal/postgres"
	"headcount/internal/rows/rowspg"
)

// Facts are what Check finds out about a database that can be used.
type Facts struct {
	postgres.Facts
	AdminSQL string // what an administrator has to do before applications can call headcount.change; empty: nothing
}

// Check connects as OpenAlone does, or OpenBehind if the database is behind Redis, and fails as they do, also when the
// database does not answer. It changes nothing.
func Check(ctx context.Context, url string, isBehind bool) (f Facts, err error) {
	cfg := rowspg.Config{Beside: []postgres.Tables{exactpg.Tables()}}
	if !isBehind {
		cfg.NoFront = noFront
	}

	f.Facts, err = postgres.Check(ctx, url, rowspg.Tables(cfg), func(ctx context.Context, conn *sql.DB) (err error) {
		f.AdminSQL, err = exactpg.AdminSQL(ctx, conn)
		return err
	})

	return f, err
}
