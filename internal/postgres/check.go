package postgres

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/stdlib"
)

// clockTolerance is how much the clocks of PostgreSQL and of this machine may differ: times in its rows are compared
// with both.
const clockTolerance = 2 * time.Second

// Check connects as Open does, and fails in the same cases, and also if the database does not answer. It changes
// nothing. If more is not nil, it is then called with the connection. problems are those of a database that answers.
func Check(
	ctx context.Context, url string, tables []Tables, more func(ctx context.Context, conn *sql.DB) error,
) (problems []error, err error) {
	problems, err = inspect(ctx, url, tables, more)
	if err != nil && !errors.Is(err, ErrConfig) {
		err = fmt.Errorf("PostgreSQL does not let the server in: %w; start it, or correct the URL", err)
	}

	return problems, err
}

func inspect(
	ctx context.Context, url string, tables []Tables, more func(ctx context.Context, conn *sql.DB) error,
) (problems []error, err error) {
	pc, err := configure(url)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	conn := stdlib.OpenDB(*pc.ConnConfig)
	defer conn.Close()

	if _, err := check(ctx, pc.ConnConfig, conn, tables); err != nil {
		return nil, err
	}

	const facts = `select current_setting('transaction_read_only') = 'on',
		coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), clock_timestamp()`
	var readOnly, makesTable bool
	var now time.Time
	before := time.Now()
	if err := conn.QueryRowContext(ctx, facts).Scan(&readOnly, &makesTable, &now); err != nil {
		return nil, err
	}

	switch {
	case readOnly:
		problems = append(problems, errors.New("PostgreSQL accepts no changes: it is a replica, or read only; name "+
			"the primary"))
	case !makesTable:
		problems = append(problems, errors.New("the user may not create tables; grant it CREATE on the schema"))
	}

	// The answer is from about half way between the call and its return.
	if off := now.Sub(before.Add(time.Since(before) / 2)).Abs(); off > clockTolerance {
		problems = append(problems, fmt.Errorf("the clocks of PostgreSQL and of this machine differ by %s; let both "+
			"keep time by NTP", off.Round(time.Second)))
	}

	if more != nil {
		err = more(ctx, conn)
	}

	return problems, err
}
