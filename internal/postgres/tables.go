package postgres

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"io/fs"
	"log"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

const leastServer = 13_00_00 // server_version_num

// tablesFirst puts the schema of the existing tables, or of those they are to be near, first in the search path, or
// else the current first one. Otherwise, the first schema would change when another process creates a schema with the
// name of the user.
const tablesFirst = `select set_config('search_path', concat_ws(', ', coalesce(
		(select quote_ident(n.nspname) from pg_class c join pg_namespace n on n.oid = c.relnamespace
			where c.oid = coalesce(to_regclass('%s'), to_regclass(nullif('%s', '')))),
		quote_ident(current_schema())), current_setting('search_path')), false);`

// prepare creates the tables or migrates them to this version. It refuses a database that cannot be used.
func (db *DB) prepare(ctx context.Context) error {
	// Do not use the timeouts of a session: migrating a large table may take long.
	cc := db.pool.Config().ConnConfig
	cc.AfterConnect = begin(sessionSettings + fmt.Sprintf(tablesFirst, db.cfg.Tables[0].Versions, db.cfg.Near))
	conn := stdlib.OpenDB(*cc)
	defer conn.Close()

	// Check everything before anything is created. The checks have a shorter timeout than a migration, in case the
	// server hangs.
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	versions, err := check(asking, cc, conn, db.cfg.Tables)
	if err != nil {
		return err
	}
	if db.cfg.ReadOnly {
		return readable(db.cfg.Tables, versions)
	}

	for i := range db.cfg.Tables {
		if err := db.move(ctx, conn, &db.cfg.Tables[i], versions[i]); err != nil {
			return err
		}
	}

	return nil
}

// check refuses a database that cannot be used. It returns the versions of the tables, 0 for missing ones.
func check(ctx context.Context, cc *pgx.ConnConfig, conn *sql.DB, tables []Tables) ([]int64, error) {
	if err := checkServer(ctx, cc, conn); err != nil {
		return nil, err
	}

	versions := make([]int64, len(tables))
	for i := range tables {
		var err error
		versions[i], err = tables[i].check(ctx, conn)
		if err != nil {
			return nil, err
		}
	}

	return versions, nil
}

// readable refuses tables that are missing or of another version.
func readable(tables []Tables, versions []int64) error {
	for i := range tables {
		newest, err := tables[i].newest()
		switch {
		case err != nil:
			return err
		case versions[i] == 0:
			return fmt.Errorf("%w: the database has no counters; leave --postgres out, or start a server with it, "+
				"which makes the tables", ErrConfig)
		case versions[i] != newest:
			return fmt.Errorf("%w: its tables are of version %d, this program knows version %d; "+
				"start a server of this release once, or export by the release that wrote them", ErrConfig, versions[i],
				newest)
		}
	}

	return nil
}

// newest returns the version to which the last migration leads.
func (t *Tables) newest() (int64, error) {
	files, err := fs.Glob(t.Migrations, "*.sql")
	if err != nil {
		return 0, err
	}
	// The names of the files begin with numbers of the same length, so the last name has the greatest.
	number, _, _ := strings.Cut(files[len(files)-1], "_")

	return strconv.ParseInt(number, 10, 64)
}

// checkServer refuses a database that cannot be used, whatever tables it has.
func checkServer(ctx context.Context, cc *pgx.ConnConfig, db *sql.DB) error {
	if err := refusePooler(ctx, cc); err != nil {
		return err
	}

	const facts = `select current_setting('server_version_num')::int, current_setting('server_encoding'),
		current_setting('server_version')`
	var server int
	var encoding, name string
	err := db.QueryRowContext(ctx, facts).Scan(&server, &encoding, &name)
	switch {
	case err != nil:
		return err
	case server < leastServer:
		return fmt.Errorf("%w: the server is PostgreSQL %s; it must be 13 or later", ErrConfig, name)
	case encoding != "UTF8":
		return fmt.Errorf("%w: the database's encoding is %s; make one with ENCODING 'UTF8'", ErrConfig, encoding)
	default:
		return nil
	}
}

// check refuses tables that this program cannot use. It returns their version, 0 if there are none.
func (t *Tables) check(ctx context.Context, db *sql.DB) (version int64, err error) {
	newest, err := t.newest()
	if err != nil {
		return 0, err
	}

	const facts = `select to_regclass($1)::text, to_regclass(nullif($2, ''))::text`
	var tables, former sql.NullString
	err = db.QueryRowContext(ctx, facts, t.Versions, t.Former).Scan(&tables, &former)
	switch {
	case err != nil:
		return 0, err
	case former.Valid:
		return 0, fmt.Errorf("%w: the database has the table %s of an earlier release; %s", ErrConfig, t.Former, t.Mend)
	case !tables.Valid:
		return 0, nil
	}

	const applied = `select coalesce(max(version_id), 0) from %s where is_applied`
	err = db.QueryRowContext(ctx, fmt.Sprintf(applied, t.Versions)).Scan(&version)
	if err == nil && version > newest {
		err = fmt.Errorf("%w: its tables are of version %d, this program knows version %d; "+
			"start the program that moved it, or a newer one", ErrNewer, version, newest)
	}
	if err != nil || version == 0 || t.Refuse == "" {
		return version, err
	}

	var refused bool
	err = db.QueryRowContext(ctx, t.Refuse).Scan(&refused)
	if err == nil && refused {
		err = fmt.Errorf("%w: %s", ErrConfig, t.Why)
	}

	return version, err
}

// move creates tables, or migrates them from version to the newest one.
func (db *DB) move(ctx context.Context, conn *sql.DB, tables *Tables, version int64) error {
	newest, err := tables.newest()
	// Most starts find nothing to do, and need no lock.
	if err != nil || version == newest {
		return err
	}

	// If another process is migrating, ask for the lock again every second.
	locker, err := lock.NewPostgresSessionLocker(
		lock.WithLockID(tables.Lock), lock.WithLockTimeout(1, 600), lock.WithUnlockTimeout(1, 3))
	if err != nil {
		return err
	}

	provider, err := goose.NewProvider(goose.DialectPostgres, conn, tables.Migrations,
		goose.WithTableName(tables.Versions), goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(log.New(io.Discard, "", 0)))
	if err != nil {
		return err
	}

	// Of several processes that start at the same time, the first migrates the tables, and the others find nothing to
	// do.
	done, err := provider.Up(ctx)
	if err != nil {
		return fmt.Errorf("migrating the tables to version %d: %w", newest, err)
	}
	if len(done) > 0 {
		moved := db.cfg.Log.Info().Int64("from", version).Int64("to", newest)
		moved.Msg("counters: tables in PostgreSQL were migrated")
	}

	return nil
}
