package counterpg

import (
	"cmp"
	"context"
	"database/sql"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"log"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
)

// What a session is set to once it has begun. PgBouncer would refuse it as start-up parameters.
const (
	sessionSettings = `set default_transaction_isolation = 'read committed';` +
		// Every statement finds its rows by an index: see the package doc.
		`set plan_cache_mode = 'force_generic_plan'; set enable_seqscan = off; set jit = off;` +
		// What is answered is on disk, whatever the database's default is.
		`select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off';`
	// The lock of a counter may be held by an application that has called headcount.change. That is far shorter than
	// callTimeout, so it does not look like a server that does not answer.
	sessionTimeouts = `set statement_timeout = 10000; set idle_in_transaction_session_timeout = 5000; set lock_timeout = 1000;`
)

// tablesFirst has new tables made in the schema of the old ones, else in the one that is first now. That does not change
// while another process makes the tables, and then the schema headcount for headcount.change, which would be the first in
// the search path of a user of that name.
const tablesFirst = `select set_config('search_path', concat_ws(', ', coalesce(
		(select quote_ident(n.nspname) from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = to_regclass('` + migrations + `')),
		quote_ident(current_schema())), current_setting('search_path')), false);`

// begin returns what sets up a session by statements.
func begin(statements string) pgconn.AfterConnectFunc {
	return func(ctx context.Context, c *pgconn.PgConn) error {
		_, err := c.Exec(ctx, statements).ReadAll()
		return err
	}
}

// ofPrisma are parameters that only Prisma knows, in URLs that applications share. PostgreSQL would refuse every connection.
var ofPrisma = []string{
	"connection_limit", "pgbouncer", "pool_timeout", "schema", "socket_timeout", "sslaccept", "sslidentity", "statement_cache_size",
}

// Ignored returns the parameters of a URL that CheckURL accepts which have no effect.
func Ignored(url string) (names []string) {
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil
	}
	for _, name := range ofPrisma {
		if _, given := pc.ConnConfig.RuntimeParams[name]; given {
			names = append(names, name)
		}
	}
	return names
}

// configure returns how to connect to the database of url.
func configure(url string) (*pgxpool.Config, error) {
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cc := pc.ConnConfig
	for _, name := range ofPrisma {
		delete(cc.RuntimeParams, name)
	}
	cc.Tracer = traced{}
	cc.ConnectTimeout = cmp.Or(cc.ConnectTimeout, dialTimeout)
	cc.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
	cc.AfterConnect = begin(sessionSettings + sessionTimeouts)
	cc.RuntimeParams["application_name"], cc.RuntimeParams["client_encoding"] = "headcount", "UTF8"
	return pc, nil
}

//go:embed migrations/*.sql
var embedded embed.FS

// prepare makes the tables, or moves them to this version, and refuses a database that is of no use.
func (s *Store) prepare(ctx context.Context) error {
	cc := s.pool.Config().ConnConfig
	cc.AfterConnect = begin(sessionSettings + tablesFirst) // without timeouts: moving a large table may take long
	sources, newest, err := steps()
	if err != nil {
		return err
	}
	db := stdlib.OpenDB(*cc)
	defer db.Close()
	asking, cancel := context.WithTimeout(ctx, askTimeout)
	version, err := check(asking, cc, db, newest)
	cancel()
	switch {
	case err != nil:
		return err
	case s.cfg.ReadOnly && version == 0:
		return fmt.Errorf("%w: the database has no counters; leave --postgres out, or start a server with it, which carries them there", ErrConfig)
	case s.cfg.ReadOnly && version != newest:
		return fmt.Errorf("%w: its tables are of version %d, this program knows version %d; start a server of this release once, or export by the release that wrote them", ErrConfig, version, newest)
	case s.cfg.ReadOnly:
		return nil
	case version != newest:
		if err := s.move(ctx, db, sources, version, newest); err != nil {
			return err
		}
	}
	return s.cfg.checkFront(ctx, db)
}

// checkFront refuses a database in front of which another Redis, or none, has to stand.
func (c *Config) checkFront(ctx context.Context, db *sql.DB) error {
	if c.Behind && !c.Beside {
		return nil
	}
	var generation int64
	if err := db.QueryRowContext(ctx, `select generation from headcount_front`).Scan(&generation); err != nil {
		return err
	}
	switch {
	case generation == 0:
		return nil
	case c.Beside:
		return fmt.Errorf("%w: a Redis stands in front of the database, which has counters of all kinds; export these, and import them into an empty database and Redis with --regions", ErrConfig)
	}
	return fmt.Errorf("%w: a Redis stands in front of the database and has newer values; give its --redis, too, or carry the counters over (headcount export --redis URL --postgres URL) and import them into an empty database", ErrConfig)
}

// steps are the migrations, and the version to which the last one moves.
func steps() (sources fs.FS, newest int64, err error) {
	if sources, err = fs.Sub(embedded, "migrations"); err != nil {
		return nil, 0, err
	}
	files, err := fs.Glob(sources, "*.sql")
	if err != nil {
		return nil, 0, err
	}
	number, _, _ := strings.Cut(files[len(files)-1], "_")
	newest, err = strconv.ParseInt(number, 10, 64)
	return sources, newest, err
}

// Facts are what Check finds out about a database that a store can use.
type Facts struct {
	ReadOnly   bool          // it takes no changes
	MakesTable bool          // the user may make tables
	ClockOff   time.Duration // between its clock and ours
	AdminSQL   string        // what an administrator has to do before applications can call headcount.change; empty: nothing
}

// Check connects as Open does and fails as Open does, also when the database does not answer. It changes nothing.
func Check(ctx context.Context, cfg Config) (f Facts, err error) {
	pc, err := configure(cfg.URL)
	if err != nil {
		return f, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	_, newest, err := steps()
	if err != nil {
		return f, err
	}
	db := stdlib.OpenDB(*pc.ConnConfig)
	defer db.Close()
	version, err := check(ctx, pc.ConnConfig, db, newest)
	if err == nil && version == newest {
		err = cfg.checkFront(ctx, db)
	}
	if err != nil {
		return f, err
	}
	var now time.Time
	before := time.Now()
	err = db.QueryRowContext(ctx, `select current_setting('transaction_read_only') = 'on', coalesce(has_schema_privilege(current_schema(), 'CREATE'), false), clock_timestamp()`).
		Scan(&f.ReadOnly, &f.MakesTable, &now)
	f.ClockOff = now.Sub(before.Add(time.Since(before) / 2)).Abs()
	var user string
	var makesFunction bool
	if err == nil {
		err = db.QueryRowContext(ctx, readRights).Scan(&user, &makesFunction)
	}
	if err == nil {
		err = db.QueryRowContext(ctx, readOwners).Scan(&f.AdminSQL)
	}
	if f.AdminSQL == "" && !makesFunction {
		f.AdminSQL = adminSQL(user)
	}
	return f, err
}

// move makes the tables, or moves them from version to newest.
func (s *Store) move(ctx context.Context, db *sql.DB, sources fs.FS, version, newest int64) error {
	// Who does not get the lock asks again every second: the other one is at work.
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockID(lockID), lock.WithLockTimeout(1, 600), lock.WithUnlockTimeout(1, 3))
	if err != nil {
		return err
	}
	g, err := goose.NewProvider(goose.DialectPostgres, db, sources, goose.WithTableName(migrations), goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true), goose.WithLogger(log.New(io.Discard, "", 0)))
	if err != nil {
		return err
	}
	done, err := g.Up(ctx)
	if err != nil {
		return fmt.Errorf("moving the tables to version %d: %w", newest, err)
	}
	if len(done) > 0 {
		s.cfg.Log.Info().Int64("from", version).Int64("to", newest).Msg("counters: the tables in PostgreSQL were moved")
	}
	return nil
}

// check refuses a database that cannot hold counters of a program that knows the version newest of its
// tables, and returns the version that they have, 0 when there are none.
func check(ctx context.Context, cc *pgx.ConnConfig, db *sql.DB, newest int64) (version int64, err error) {
	if err := refusePooler(ctx, cc); err != nil {
		return 0, err
	}
	var server int
	var encoding, name string
	var tables sql.NullString
	err = db.QueryRowContext(ctx, `select current_setting('server_version_num')::int, current_setting('server_encoding'), current_setting('server_version'), to_regclass('`+migrations+`')::text`).
		Scan(&server, &encoding, &name, &tables)
	switch {
	case err != nil:
		return 0, err
	case server < leastServer:
		return 0, fmt.Errorf("%w: the server is PostgreSQL %s; it must be 13 or later", ErrConfig, name)
	case encoding != "UTF8":
		return 0, fmt.Errorf("%w: the database's encoding is %s; make one with ENCODING 'UTF8'", ErrConfig, encoding)
	case !tables.Valid:
		return 0, nil
	}
	err = db.QueryRowContext(ctx, `select coalesce(max(version_id), 0) from `+migrations+` where is_applied`).Scan(&version)
	if err == nil && version > newest {
		err = fmt.Errorf("%w: its tables are of version %d, this program knows version %d; start the program that moved it, or a newer one", ErrNewer, version, newest)
	}
	return version, err
}
