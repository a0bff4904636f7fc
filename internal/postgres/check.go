package postgres

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
)

// Facts are what Check learns about a usable database.
type Facts struct {
	ReadOnly   bool          // it accepts no changes
	MakesTable bool          // the user may create tables
	ClockOff   time.Duration // difference between its clock and ours
}

// Check connects as Open does, and fails in the same cases, and also if the database does not answer. It changes
// nothing. If more is not nil, it is then called with the connection.
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
