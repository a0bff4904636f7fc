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
	tables := []postgres.Tables{rowspg.Tables(), exactpg.Tables()}
	f.Facts, err = postgres.Check(ctx, url, tables, func(ctx context.Context, conn *sql.DB, is postgres.Facts) error {
		if is.HasTables && !isBehind {
			if err := checkFront(ctx, conn); err != nil {
				return err
			}
		}

		var err error
		f.AdminSQL, err = exactpg.AdminSQL(ctx, conn)

		return err
	})

	return f, err
}

// checkFront refuses a database with a Redis in front of it.
func checkFront(ctx context.Context, conn *sql.DB) error {
	const drained = `select exists (select from generate_series(0, 63) as p join headcount_rows r
		on r.partition = p and r.collection = 'tier' and r.field = 'drained')`
	var hasFront bool
	err := conn.QueryRowContext(ctx, drained).Scan(&hasFront)
	if err == nil && hasFront {
		err = errFront
	}

	return err
}
