// Package postgres is a connection to PostgreSQL 13 or later, for the stores that are built on it: it sets up sessions,
// migrates tables, and makes calls fail at once while the server is unavailable.
//
// # When PostgreSQL is unavailable
//
// After three failures in a row, calls fail without being tried, except one each half second. A server that answers but
// accepts no changes counts as unavailable, too: it is read-only, full or out of connections, or rejects logins. Reads
// do not end such an outage, but a successful change that is rolled back does.
//
// A process starts without PostgreSQL, and prepares the tables once PostgreSQL answers.
package postgres

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
)

var (
	// ErrConfig is wrapped by every error about invalid settings, including a database that cannot be used. Its text is
	// one sentence.
	ErrConfig = errors.New("bad setting")
	// ErrNewer means that a newer version of the program has migrated the tables. It is an ErrConfig, too.
	ErrNewer = fmt.Errorf("%w: the database is of a newer version", ErrConfig)
	// ErrAway is wrapped by the errors of calls that failed because PostgreSQL is unavailable.
	ErrAway = errors.New("postgres is away")

	errClosed = errors.New("this process has closed its connections")
	errSilent = errors.New("it did not answer a moment ago")
)

const (
	dialTimeout    = 2 * time.Second
	askTimeout     = 2 * dialTimeout  // for checking a database before its first use
	openTimeout    = 20 * time.Second // for preparing the tables at a start; after that tend continues
	callTimeout    = 5 * time.Second  // for a call, if its context has no earlier deadline
	migrateTimeout = 10 * time.Minute // for preparing the tables, including waiting for another process that does so

	maxConnections = 16 // of a DB, besides the one that prepares the tables
)

// Config tunes a DB. A zero field takes its default.
type Config struct {
	URL    string   // postgres://…; required. It may name several servers, as in libpq
	Tables []Tables // of all stores that share the connection, at least one; all are created in the schema of the first
	// Near is a table of others: where it exists, the first tables are created in its schema. Optional.
	Near string
	// Probe is a statement that changes something. It shows whether the server accepts changes, and is rolled back.
	// Required.
	Probe string
	// ReadOnly refuses tables that are missing or of another version, instead of creating or migrating them. Only reads
	// are allowed then.
	ReadOnly bool
	OnState  func(up bool) // called by one goroutine when PostgreSQL becomes available or unavailable; optional
	Log      zerolog.Logger
}

// Tables says how tables are created, and migrated from version to version.
type Tables struct {
	Migrations fs.FS  // migrations in the form of goose
	Versions   string // the table in which goose records the version
	Lock       int64  // advisory lock that is held during a migration
	// Former is a table of a release that kept the same data in another form. A database that has it is refused, and
	// Mend is the remedy. Optional.
	Former, Mend string
	// Refuse is a query that returns whether a database with these tables must be refused. Why is the reason and the
	// remedy. Optional.
	Refuse, Why string
}

// DB is a database. All methods may be called from any goroutine.
type DB struct {
	cfg     Config
	pool    *pgxpool.Pool
	breaker *outage.Breaker
	ready   atomic.Bool // the tables exist
	closed  atomic.Bool

	stop context.CancelFunc
	wg   sync.WaitGroup // waits for tend
}

// Open returns a DB. It fails, with ErrConfig, if settings are invalid or the database cannot be used. A database that
// does not answer is no error: calls then fail with ErrAway. The DB must be closed.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	pc, err := configure(cfg.URL)
	if err != nil {
		return nil, err
	}

	// An idle process must not occupy any of the server's connections.
	pc.MaxConns = maxConnections
	pc.MinConns = 0
	pc.MaxConnIdleTime = 5 * time.Minute

	db := &DB{cfg: cfg, breaker: outage.NewBreaker("postgres")}
	db.pool, err = pgxpool.NewWithConfig(context.Background(), pc)
	if err != nil {
		return nil, fmt.Errorf("postgres: %w: %w", ErrConfig, err)
	}

	// Report an unusable database at once. If the database does not answer, tend keeps trying.
	first, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	err = db.prepare(first)
	if errors.Is(err, ErrConfig) {
		db.pool.Close()
		return nil, fmt.Errorf("postgres: %w", err)
	}
	db.prepared(err)

	run, stop := context.WithCancel(context.Background())
	db.stop = stop
	db.wg.Go(func() { db.tend(run) })

	return db, nil
}

// Close waits for the calls in progress and closes the connections. Later calls fail with ErrAway.
func (db *DB) Close() {
	if db.closed.Swap(true) {
		return
	}

	db.stop()
	db.wg.Wait()
	db.pool.Close()
}

// Cause returns why PostgreSQL is unavailable, or nil.
func (db *DB) Cause() error {
	if db.up() {
		return nil
	}

	return db.breaker.LastFailure()
}

// ConnConfig returns the configuration for a separate connection, for example to listen for notifications.
func (db *DB) ConnConfig() *pgx.ConnConfig { return db.pool.Config().ConnConfig }

func (db *DB) up() bool { return db.ready.Load() && db.breaker.Up() }

// prepared records the outcome of preparing the tables.
func (db *DB) prepared(err error) {
	if err != nil {
		db.failed(err)
		return
	}

	db.ready.Store(true)
}

// failed records why PostgreSQL is unavailable. It joins the lines of an error about several addresses.
func (db *DB) failed(why error) {
	db.breaker.Failed(errors.New(strings.Join(strings.Fields(why.Error()), " ")))
}

// tend prepares the tables, and probes a server that is unavailable, until ctx ends. It reports when PostgreSQL becomes
// available or unavailable.
func (db *DB) tend(ctx context.Context) {
	ticker := time.NewTicker(outage.ProbeEvery)
	defer ticker.Stop()

	log := outage.Log{
		Log: db.cfg.Log, What: "counters: PostgreSQL",
		Mend: "the server waits for it: see whether it runs, and what headcount check says of it",
	}

	// Open has tried it just before.
	before := db.up()
	db.say(before)
	for ctx.Err() == nil {
		if cause := db.Cause(); cause != nil || db.up() {
			log.Note(cause)
		}

		select {
		case <-ctx.Done():
			return
		case <-db.breaker.Changed:
		case <-ticker.C:
		}

		db.recover(ctx)
		if now := db.up(); now != before {
			before = now
			db.say(now)
		}
	}
}

func (db *DB) say(up bool) {
	if db.cfg.OnState != nil {
		db.cfg.OnState(up)
	}
}

// recover prepares the tables, or probes with a change, if PostgreSQL is unavailable.
func (db *DB) recover(ctx context.Context) {
	switch {
	case db.up():
	case !db.ready.Load():
		// Another process may be migrating large tables, so this may take longer than a call.
		trying, cancel := context.WithTimeout(ctx, migrateTimeout)
		defer cancel()
		db.prepared(db.prepare(trying))
	case db.Do(ctx, db.probe) == nil:
		// This success has also closed the breaker if it was open. But a server that refused a change may still refuse
		// others.
		db.breaker.Probed()
	}
}

// probe makes a change and rolls it back.
func (db *DB) probe(ctx context.Context, c *pgxpool.Conn) error {
	if db.cfg.ReadOnly {
		return c.Ping(ctx)
	}

	// Use one round trip, so that no lock is held for longer than the statement takes.
	b := &pgx.Batch{}
	b.Queue("begin")
	b.Queue(db.cfg.Probe)
	b.Queue("rollback")

	return c.SendBatch(ctx, b).Close()
}

// Do calls fn with a connection. A transaction that fn left open is rolled back. The error is ErrAway if PostgreSQL is
// unavailable, otherwise that of fn.
func (db *DB) Do(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	return db.DoLonger(ctx, 0, fn)
}

// DoLonger is Do for a call that may take so much longer than others.
func (db *DB) DoLonger(
	ctx context.Context, longer time.Duration, fn func(context.Context, *pgxpool.Conn) error,
) error {
	if err := db.usable(); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	// After usable, because each permission of an open breaker is one of few, and must not be wasted.
	done, err := db.breaker.Allow()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrAway, errSilent)
	}

	// Callers may wait without a limit, but a server that hangs must not hold them forever.
	start := time.Now()
	call, cancel := context.WithTimeout(ctx, callTimeout+longer)
	defer cancel()

	c, err := db.pool.Acquire(call)
	connected := err == nil
	if connected {
		err = fn(call, c)
		db.release(call, c)
	}

	works := err == nil || connected && answered(err)
	// If the caller gave up early, that does not mean that the server does not answer.
	left := ctx.Err() != nil && time.Since(start) < dialTimeout
	switch {
	case works:
		done(nil)
		return err
	case left:
		done(outage.ErrNotItsFault)
		return fmt.Errorf("%w: %w", ErrAway, err)
	}

	done(err)
	db.failed(err)

	// Reads still succeed on such a server, so the breaker alone would not notice.
	if connected && refuses(err) {
		db.breaker.Refused()
	}

	// The other connections lead to the same server, so drop them, too.
	if moved(err) || Code(err) == "" && call.Err() == nil {
		db.pool.Reset()
	}

	return fmt.Errorf("%w: %w", ErrAway, err)
}

func (db *DB) usable() error {
	switch {
	case db.closed.Load():
		return errClosed
	case !db.ready.Load():
		return db.breaker.LastFailure()
	default:
		return nil
	}
}

// release returns a connection to the pool.
func (db *DB) release(ctx context.Context, c *pgxpool.Conn) {
	defer c.Release() // closes a connection that is still in a transaction

	idle := c.Conn().PgConn().TxStatus() == 'I'
	if idle || c.Conn().IsClosed() {
		return
	}
	if _, err := c.Exec(ctx, "rollback"); err != nil {
		db.cfg.Log.Debug().Err(err).Msg("counters: rolling back a transaction failed")
	}
}

// Code returns the SQLSTATE of err, or nothing.
func Code(err error) string {
	var e *pgconn.PgError
	if errors.As(err, &e) {
		return e.Code
	}

	return ""
}

// Full reports whether err says that the server's disk is full. The transaction was then rolled back: if the server
// cannot write its log, it terminates instead.
func Full(err error) bool { return Code(err) == "53100" }

// errDead marks the failure of a connection before anything was written.
var errDead = errors.New("the connection was dead")

// First marks an error of the first round trip of a transaction, so that Retry repeats the transaction if the
// connection is to blame.
func First(ctx context.Context, err error) error {
	if err != nil && (Code(err) == "" || moved(err)) && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", errDead, err)
	}

	return err
}

// Retry makes a transaction, and repeats it if it was certainly rolled back and may succeed the second time.
func Retry(transaction func() error) (err error) {
	const tries = 3
	for range tries {
		err = transaction()
		// A serialization failure, or a deadlock.
		conflict := Code(err) == "40001" || Code(err) == "40P01"
		if !conflict && !errors.Is(err, errDead) {
			break
		}
	}

	return err
}

// answered reports whether err comes from a server that works. Otherwise the cause is a connection, an operator, a
// timeout, or a failure of the server.
func answered(err error) bool {
	return Code(err) != "" && !ofClass(err, "08", "57", "XX") && !refuses(err)
}

// refuses reports whether err says that the server refuses changes, although it may allow reads: it is read-only, a
// right or a table is missing, its disk or memory is full, or its system fails.
func refuses(err error) bool { return ofClass(err, "25006", "42", "53", "58") }

// moved reports whether err says that this is not, or no longer, the server to write to.
func moved(err error) bool { return ofClass(err, "25006", "57P01", "57P02", "57P03") }

// ofClass reports whether the SQLSTATE of err begins with one of classes.
func ofClass(err error, classes ...string) bool {
	code := Code(err)
	for _, class := range classes {
		if strings.HasPrefix(code, class) {
			return true
		}
	}

	return false
}
