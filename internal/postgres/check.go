package postgres

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
)

// Facts are what Check finds out about a database that can be used.
type Facts struct {
	ReadOnly   bool          // it takes no changes
	MakesTable bool          // the user may make tables
	ClockOff   time.Duration // between its clock and ours
}

// Check connects as Open does and fails as Open does, also when the database does not answer. It changes nothing. Then
// it calls more, if that is not nil, with the connection.
func Check(
	ctx context.Context, url string, tables []Tables, more func(ctx context.Context, conn *sql.DB) error,
) (f Facts, err error) {
	pc, err := configure(url)
	if err != nil {
		return f, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	conn := stdlib.OpenDB(*pc.ConnConfig)
	defer conn.Close()

	if _, err := check(ctx, pc.ConnConfig, conn, tables); err != nil {
		return f, err
	}

	const facts = `select current_setting('transaction_read_only') = 'on',
		coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), clock_timestamp()`
	var now time.Time
	before := time.Now()
	if err := conn.QueryRowContext(ctx, facts).Scan(&f.ReadOnly, &f.MakesTable, &now); err != nil {
		return f, err
	}
	f.ClockOff = now.Sub(before.Add(time.Since(before) / 2)).Abs()
	if more != nil {
		err = more(ctx, conn)
	}

	return f, err
}
