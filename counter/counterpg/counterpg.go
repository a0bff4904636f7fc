// Package counterpg keeps counters in PostgreSQL 13 or later. Any number of
// processes may write the same counters.
//
// # One step
//
// All operations that come together are one transaction of two round trips,
// each a pipeline. The first begins it, locks the rows of all counters that are
// named in the order of their keys (and makes those that lack one), claims the
// identities in their order, and reads what the operations are about: counters,
// the members they name, the clock. Then counter.Judge judges in Go, while the
// rows are held still. The second writes what changed, an array for each column,
// and commits. So one arithmetic serves every store, and no interleaving of
// processes passes a bound. What changed nothing is rolled back.
//
// Locks are taken in one order everywhere: counters by key, identities by id, the
// row of headcount_meta. So writers wait for each other and never stand still.
// Sweeping skips rows that are locked. Of a process that stops in the midst of a
// step the server lets go after some seconds (idle_in_transaction_session_timeout).
// A step that the server surely rolled back (a deadlock with somebody's own
// tables, a connection that was dead before the commit) is tried again.
//
// Times come from the server's clock, read when the locks are held: processes
// whose clocks differ write one ledger in order.
//
// # Tables
//
// They stand in the first schema of the search path, and in migrations/*.sql.
//
//   - headcount_counters has a row for each counter that exists. It is found by its
//     key alone, so its key is its only index, compared byte by byte (COLLATE "C"):
//     a prefix is a range of it, which is how aggregates find their counters. A
//     change touches no indexed column, and half of each page is left free, so it is
//     a HOT update: it writes no index, and the next visitor of the page takes the
//     old row away. An index on versions or times for the feed would end that.
//   - headcount_members has a row for each member, (set_id, member) its key. The set
//     has a number of its own and not the counter's key: a row is a number and a
//     name, and a reset gives the counter a new number, however large the set was.
//     That a member is in a set, and whether it was, is one look into the index.
//   - headcount_registers has a row for each counter of kind unique, under the number
//     of its set: few members are a few bytes in the row, many are 12 KB beside it. An
//     add reads all registers of its counter, and writes them when one has changed,
//     which happens the less the more members there are.
//   - headcount_gains has what a counter gained in steps of time that are over. The steps
//     that are running stand in the counter's row, so a change of it writes no other row
//     until a step is over; then that is one row, written at the end of its history. Of a unique
//     they have registers of each step, also of the running ones: an add writes those that change.
//   - headcount_dimensions has what sums counted under the values of their dimensions, under the
//     number of their history. A change without dimensions does not look at it; one with some reads and
//     writes the rows of its values, while the counter's row is locked.
//   - headcount_marks and headcount_tops are for what gained most: names of counters, of which a change
//     writes few, and a list for each step that is over.
//   - headcount_ledger is only ever appended, under (ledger_id, seq), which is both
//     how it is read and how its oldest entries are found. Its pages are written at
//     the end, its index within each ledger at the end.
//   - headcount_identities is keyed by the 16 bytes of an identity. A claim is
//     INSERT ... ON CONFLICT: of two at the same time the second waits for the first.
//     The index on until, which is only written at its end, finds those to forget.
//   - headcount_sweeps says what is to be cleared away and when: a row for each
//     ledger whose entries end, and one for each set or ledger that is no counter's
//     any more. The index on due finds the next. It is written when a ledger is
//     made, not when it is appended to.
//   - headcount_limits has a row for each state of a limit that still counts. The state is
//     bytes that package limit writes, so one arithmetic serves here too. A call that passes
//     changes no indexed column: due says when somebody looks whether the state has ended.
//   - headcount_meta is one row: the highest incarnation that was ever deleted.
//     Only a DELETE writes it; a counter that is made reads it after its own key is
//     locked, so it sees every deletion of that key.
//
// Plans are forced to be generic and to use these indexes: a plan that was made
// for an empty table would scan a full one.
//
// # Clearing away
//
// A goroutine of each process forgets identities whose day is over and limits that have ended, takes away
// entries that were kept long enough, and the members and entries of what was
// reset or deleted, a bounded number of rows in one transaction.
//
// # Feed
//
// A process that committed notes the keys, and one goroutine sends what
// gathered as notifications, after the commit: a NOTIFY within the transaction
// would have all commits of the database wait for each other. A notification
// names keys, and of sets also members that joined or left; more than that is
// for who hears of it to read, so what is told is what is committed, in order.
// The members are named because otherwise each user who looks at a set would
// cost a read with each change of it. A process that dies between commit and
// notification is found out by looking at everything followed, a part at a time,
// once in PollEvery.
//
// # When PostgreSQL is away
//
// Calls fail with counter.ErrUnavailable, after three failures in a row at once;
// twice a second one is let through to see. The same holds for a server that is
// read-only, full or out of connections. A process starts without it, and is
// ready (Config.OnState) when the database has answered and has its tables.
// Reads that may lag are answered from memory meanwhile, stale.
//
// A pooler that shares connections between its clients is refused (refusePooler).
package counterpg

import (
	"cmp"
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/outage"
)

var (
	// ErrConfig is in every error about settings that cannot work, among them a
	// database that cannot hold counters. Its text is one sentence.
	ErrConfig = errors.New("bad setting")
	// ErrNewer says that a newer version of the program has moved the tables. It is
	// an ErrConfig too.
	ErrNewer = fmt.Errorf("%w: the database is of a newer version", ErrConfig)
	// ErrAway is in every error that Cause explains, and the log of the outage tells of. It is a counter.ErrUnavailable.
	ErrAway = fmt.Errorf("%w", counter.ErrUnavailable)
)

const (
	dialTimeout    = 2 * time.Second
	askTimeout     = 2 * dialTimeout  // of asking a database what it is
	openTimeout    = 20 * time.Second // of a start that prepares the tables: it goes on without a database that takes longer
	callTimeout    = 5 * time.Second  // of a whole call, when its context has no earlier end
	migrateTimeout = 10 * time.Minute // of preparing the tables, or waiting for who prepares them

	maxConnections = 16      // of this process; two more listen and migrate
	maxCached      = 1 << 16 // counters that are remembered for reads that may lag

	leastServer = 13_00_00 // server_version_num
	migrations  = "headcount_migrations"
	lockID      = 0x68656164636f756e // "headcoun": of the advisory lock
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	URL string // postgres://…; required. It may name several servers, as libpq has it
	// PollEvery is the time in which everything followed is looked at once, in case
	// a process died before it told; default 10s.
	PollEvery time.Duration
	// SweepEvery is the time between two rounds of clearing away, default 10s.
	SweepEvery time.Duration
	// Behind says that Redis has all counters but exact ones, as package tiered has it.
	// The feed tells of no others, and Follow does not fail when PostgreSQL is away.
	Behind bool
	// Beside says of Behind that Redis does not stand in front of these tables: one in front of which it has stood is refused.
	Beside bool
	// ReadOnly is for an export: nothing is written, and a Redis may stand in front.
	ReadOnly bool
	Log      zerolog.Logger
	OnState  counter.States // optional
}

// Store is a counter.Store in PostgreSQL. All methods may be called from any goroutine.
type Store struct {
	cfg     Config
	pool    *pgxpool.Pool
	breaker *outage.Breaker
	ready   atomic.Bool // the tables are there
	closed  atomic.Bool
	ids     numbers
	cache   *cache
	feed    *feed

	stop context.CancelFunc
	wg   sync.WaitGroup // the goroutines of run, awaited by Close
}

var _ counter.Store = (*Store)(nil)

// CheckURL says what is wrong with the URL of a database, or nothing. It repeats
// no part of it: it may hold a password.
func CheckURL(url string) (problem string) {
	if !strings.HasPrefix(url, "postgres://") && !strings.HasPrefix(url, "postgresql://") {
		return "it does not begin with postgres://; write postgres://user:password@host:5432/database"
	}
	if _, err := pgxpool.ParseConfig(url); err != nil {
		return "it is not a URL of PostgreSQL; write postgres://user:password@host:5432/database"
	}
	return ""
}

// Open returns a store over the database of that URL. It fails, with
// ErrConfig, when settings cannot work or the database that answered cannot be
// used. A database that does not answer is waited for: until it does, calls return
// counter.ErrUnavailable. Close ends the store.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg.PollEvery = cmp.Or(cfg.PollEvery, 10*time.Second)
	cfg.SweepEvery = cmp.Or(cfg.SweepEvery, 10*time.Second)
	if problem := CheckURL(cfg.URL); problem != "" {
		return nil, fmt.Errorf("counterpg: %w: %s", ErrConfig, problem)
	}
	pc, err := configure(cfg.URL)
	if err != nil { // CheckURL has parsed it
		return nil, fmt.Errorf("counterpg: %w: URL of PostgreSQL: %w", ErrConfig, err)
	}
	pc.MaxConns = maxConnections
	pc.MinConns = 0
	pc.MaxConnIdleTime = 5 * time.Minute
	s := &Store{cfg: cfg}
	if s.pool, err = pgxpool.NewWithConfig(context.Background(), pc); err != nil {
		return nil, fmt.Errorf("counterpg: %w: %w", ErrConfig, err)
	}
	s.cache = newCache(maxCached)
	s.feed = newFeed()
	s.breaker = outage.NewBreaker("postgres")
	first, cancel := context.WithTimeout(ctx, openTimeout)
	err = s.prepare(first)
	cancel()
	if errors.Is(err, ErrConfig) {
		s.pool.Close()
		return nil, fmt.Errorf("counterpg: %w", err)
	}
	s.note(err)
	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	loops := []func(context.Context){s.tend, s.listen, s.notify, s.tell}
	if !cfg.ReadOnly {
		loops = append(loops, s.sweep)
	}
	for _, loop := range loops {
		s.wg.Go(func() { loop(run) })
	}
	return s, nil
}

// Close waits for what the store runs and for calls under way, and ends its connections.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	s.stop()
	s.wg.Wait()
	s.pool.Close()
	return nil
}

// What a session is set to once it has begun. PgBouncer would refuse it as start-up parameters.
const (
	sessionSettings = `set default_transaction_isolation = 'read committed';` +
		// Every statement finds its rows by an index: see the package doc.
		`set plan_cache_mode = 'force_generic_plan'; set enable_seqscan = off; set jit = off;` +
		// What is answered is on disk, whatever the database's default is.
		`select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off';`
	sessionTimeouts = `set statement_timeout = 10000; set idle_in_transaction_session_timeout = 5000;`
)

// begin returns what sets up a session by statements.
func begin(statements string) pgconn.AfterConnectFunc {
	return func(ctx context.Context, c *pgconn.PgConn) error {
		_, err := c.Exec(ctx, statements).ReadAll()
		return err
	}
}

// configure returns how to connect to the database of url.
func configure(url string) (*pgxpool.Config, error) {
	pc, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cc := pc.ConnConfig
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
	cc.AfterConnect = begin(sessionSettings) // moving a large table may take long
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

// note says whether the tables are there now.
func (s *Store) note(err error) {
	if err != nil {
		s.failed(err)
		return
	}
	s.ready.Store(true)
}

// Cause is why PostgreSQL cannot be used; nil: it can. Any goroutine may call it.
func (s *Store) Cause() error {
	if s.up() {
		return nil
	}
	return s.breaker.LastFailure()
}

func (s *Store) up() bool { return s.ready.Load() && s.breaker.Closed() }

// failed notes why PostgreSQL could not be used, on one line: of several addresses each has its own.
func (s *Store) failed(why error) {
	s.breaker.Failed(errors.New(strings.Join(strings.Fields(why.Error()), " ")))
}

// tend prepares the tables, asks for a server that does not answer, and says
// when it comes and goes.
func (s *Store) tend(ctx context.Context) {
	ticker := time.NewTicker(outage.ProbeEvery)
	defer ticker.Stop()
	was, first := false, true
	away := outage.Log{Log: s.cfg.Log, What: "counters: PostgreSQL", Mend: "the server waits for it: see whether it runs, and what headcount check says of it"}
	for ctx.Err() == nil {
		if !s.ready.Load() && !first {
			trying, cancel := context.WithTimeout(ctx, migrateTimeout)
			s.note(s.prepare(trying))
			cancel()
		}
		up := s.up()
		if s.ready.Load() && !up {
			// One call that the breaker lets through ends the outage, whoever makes it.
			up = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error { return c.Ping(ctx) }) == nil && s.up()
		}
		if up != was || first {
			if s.cfg.OnState != nil {
				s.cfg.OnState.StoreState(up)
			}
			was, first = up, false
		}
		if cause := s.Cause(); up || cause != nil && ctx.Err() == nil {
			away.Note(cause)
		}
		select {
		case <-ctx.Done():
		case <-s.breaker.Changed:
		case <-ticker.C:
		}
	}
}

var (
	errClosed = errors.New("it is closed")
	errSilent = errors.New("it did not answer a moment ago")
)

// callers marks an error of a caller's function, which says nothing about PostgreSQL.
type callers struct{ error }

func (c callers) Unwrap() error        { return c.error }
func (c callers) Is(target error) bool { return target == outage.ErrNotItsFault }

// do runs fn on a connection, unless PostgreSQL is known not to answer. A
// transaction that fn left open is rolled back. Its error is counter.ErrUnavailable.
func (s *Store) do(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return s.doFor(ctx, callTimeout, fn)
}

// doLong is do for what takes long. While PostgreSQL was away one call at a time finds out
// whether it is back, and all others fail until that one has ended: so it must not be this.
func (s *Store) doLong(ctx context.Context, timeout time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	if err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error { return c.Ping(ctx) }); err != nil {
		return err
	}
	return s.doFor(ctx, timeout, fn)
}

// doFor is do with another timeout.
func (s *Store) doFor(ctx context.Context, timeout time.Duration, fn func(context.Context, *pgxpool.Conn) error) error {
	away := func(err error) error { return fmt.Errorf("%w: %w", ErrAway, err) }
	if s.closed.Load() {
		return away(errClosed)
	}
	if !s.ready.Load() {
		return away(s.breaker.LastFailure())
	}
	done, err := s.breaker.Allow()
	if err != nil {
		return away(errSilent)
	}
	start := time.Now()
	call, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c, err := s.pool.Acquire(call)
	if err == nil {
		err = fn(call, c)
		if c.Conn().PgConn().TxStatus() != 'I' && !c.Conn().IsClosed() {
			if _, fault := c.Exec(call, "rollback"); fault != nil { // Release gives up what is not idle
				s.cfg.Log.Debug().Err(fault).Msg("counters: rolling back")
			}
		}
		c.Release()
	}
	switch {
	case err == nil || answered(err):
		done(nil)
	case errors.As(err, new(callers)):
		done(outage.ErrNotItsFault)
	case ctx.Err() != nil && time.Since(start) < dialTimeout:
		done(outage.ErrNotItsFault)
	default:
		done(err)
		s.failed(err)
		if moved(err) || code(err) == "" && call.Err() == nil {
			s.pool.Reset() // the other connections have the same end
		}
		return away(err)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
	}
	return nil
}

// exec carries out one statement.
func (s *Store) exec(ctx context.Context, sql string, args ...any) error {
	return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, sql, args...)
		return err
	})
}

// query carries out one statement, and calls each for each row, when its columns are in to.
func (s *Store) query(ctx context.Context, to []any, each func() error, sql string, args ...any) error {
	return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, _ := c.Query(ctx, sql, args...) // ForEachRow returns the error
		_, err := pgx.ForEachRow(rows, to, each)
		return err
	})
}

// retry makes a transaction, and makes it anew when it was surely rolled back.
func retry(transaction func() error) (err error) {
	for range tries {
		if err = transaction(); err == nil || !again(err) {
			break
		}
	}
	return err
}

// during is err, or nil, with what was done.
func during(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("counterpg: %s: %w", what, err)
}

// code is the SQLSTATE of err, or nothing.
func code(err error) string {
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// answered reports whether err is the word of a server that is able to serve.
func answered(err error) bool {
	c := code(err)
	if c == "" {
		return false
	}
	// Connections, resources (disk, memory, connections), an operator's or a timeout's
	// hand, the system, the server itself; a transaction that may only read.
	for _, class := range []string{"08", "53", "57", "58", "XX", "25006", "55P03"} {
		if strings.HasPrefix(c, class) {
			return false
		}
	}
	return true
}

// moved reports whether err says that the server is not, or no more, the one to
// write to.
func moved(err error) bool {
	switch code(err) {
	case "25006", "57P01", "57P02", "57P03":
		return true
	}
	return false
}

// again reports whether err says that a transaction was surely rolled back and
// may succeed when it is made anew.
func again(err error) bool {
	switch code(err) {
	case "40001", "40P01":
		return true
	}
	return errors.Is(err, errDead)
}

// errDead marks the failure of a connection before anything was written.
var errDead = errors.New("the connection was dead")

// dead is the error of a first round trip, marked when the connection is to blame.
func dead(ctx context.Context, err error) error {
	if err != nil && (code(err) == "" || moved(err)) && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", errDead, err)
	}
	return err
}

// numbers are ids of sets and ledgers that this process may give out.
type numbers struct {
	mu   sync.Mutex // guards next and left
	next int64
	left int64
}

// idBlock is the increment of the sequence headcount_ids.
const idBlock = 1 << 20

// take returns the first of n ids in a row, or false: add a block.
func (n *numbers) take(count int64) (first int64, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.left < count {
		return 0, false
	}
	first = n.next
	n.next += count
	n.left -= count
	return first, true
}

// add begins a new block, which begins with first; what is left of the other is lost.
func (n *numbers) add(first int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.next, n.left = first, idBlock
}

// sortedKeys are the keys of m in their order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
