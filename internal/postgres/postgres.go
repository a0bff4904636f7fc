// Package postgres is a connection to PostgreSQL 13 or later, for the stores that are built on it: sessions that are
// set up alike, the migrations of tables, and calls that fail at once while the server cannot be used.
//
// # When PostgreSQL is away
//
// After three failures in a row, calls fail without being tried, but for one in half a second. A server that answers
// and takes no changes counts as away, too: it is read-only, full or out of connections, or lets nobody log in. Reads
// do not end such an outage, but a change that is taken back.
//
// A process starts without PostgreSQL, and prepares the tables once it answers.
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
	// ErrConfig is in every error about settings that cannot work, among them a database that cannot be used. Its text
	// is one sentence.
	ErrConfig = errors.New("bad setting")
	// ErrNewer means that a newer version of the program has moved the tables. It is an ErrConfig, too.
	ErrNewer = fmt.Errorf("%w: the database is of a newer version", ErrConfig)
	// ErrAway is in the errors of calls that failed because PostgreSQL cannot be used.
	ErrAway = errors.New("postgres is away")

	errClosed = errors.New("it is closed")
	errSilent = errors.New("it did not answer a moment ago")
)

const (
	dialTimeout    = 2 * time.Second
	askTimeout     = 2 * dialTimeout  // of asking a database what it is
	openTimeout    = 20 * time.Second // of preparing the tables at a start, which goes on after it
	callTimeout    = 5 * time.Second  // of a call, if its context has no earlier end
	migrateTimeout = 10 * time.Minute // of preparing the tables, or waiting for another process that does

	maxConnections = 16 // of a DB, apart from one that prepares the tables
)

// Config tunes a DB. A zero field takes its default.
type Config struct {
	URL    string   // postgres://…; required. It may name several servers, as libpq has it
	Tables []Tables // of those who share the connection, at least one; all are made in the schema of the first
	// Near is a table of others: where it exists, the first tables are made in its schema. Optional.
	Near string
	// Probe is a statement that changes something. It finds out whether the server takes changes, and is rolled back.
	// Required.
	Probe string
	// ReadOnly refuses tables that are missing or of another version, instead of making or moving them. Only reads may
	// be made then.
	ReadOnly bool
	OnState  func(up bool) // called when PostgreSQL comes and goes, by one goroutine; optional
	Log      zerolog.Logger
}

// Tables says how tables are made, and moved from version to version.
type Tables struct {
	Migrations fs.FS  // files of goose
	Versions   string // the table of goose
	Lock       int64  // of the advisory lock of who moves them
	// Former is a table of a release that kept the same data in another form. A database that has it is refused, and
	// Mend says what to do. Optional.
	Former, Mend string
	// Refuse asks a database that has the tables whether it cannot be used nevertheless, and Why says what to do then.
	// Optional.
	Refuse, Why string
}

// DB is a database. All methods may be called from any goroutine.
type DB struct {
	cfg     Config
	pool    *pgxpool.Pool
	breaker *outage.Breaker
	ready   atomic.Bool // the tables are there
	closed  atomic.Bool

	stop context.CancelFunc
	wg   sync.WaitGroup // tend
}

// Open returns a DB. It fails, with ErrConfig, if settings cannot work or the database that answered cannot be used.
// While a database does not answer, calls fail with ErrAway. Close ends the DB.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	pc, err := configure(cfg.URL)
	if err != nil {
		return nil, err
	}

	// A process that has nothing to do keeps none of the server's connections.
	pc.MaxConns = maxConnections
	pc.MinConns = 0
	pc.MaxConnIdleTime = 5 * time.Minute

	db := &DB{cfg: cfg, breaker: outage.NewBreaker("postgres")}
	db.pool, err = pgxpool.NewWithConfig(context.Background(), pc)
	if err != nil {
		return nil, fmt.Errorf("postgres: %w: %w", ErrConfig, err)
	}

	// A database that cannot be used is refused at once, and one that does not answer is waited for by tend.
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

// Close waits for calls under way and ends the connections. Later calls fail with ErrAway.
func (db *DB) Close() {
	if db.closed.Swap(true) {
		return
	}

	db.stop()
	db.wg.Wait()
	db.pool.Close()
}

// Cause returns why PostgreSQL cannot be used, or nil.
func (db *DB) Cause() error {
	if db.up() {
		return nil
	}

	return db.breaker.LastFailure()
}

// ConnConfig returns how to open a connection apart from those of Do, for who listens to notifications.
func (db *DB) ConnConfig() *pgx.ConnConfig { return db.pool.Config().ConnConfig }

func (db *DB) up() bool { return db.ready.Load() && db.breaker.Up() }

// prepared notes the outcome of preparing the tables.
func (db *DB) prepared(err error) {
	if err != nil {
		db.failed(err)
		return
	}

	db.ready.Store(true)
}

// failed notes why PostgreSQL could not be used, on one line: several addresses have a line each.
func (db *DB) failed(why error) {
	db.breaker.Failed(errors.New(strings.Join(strings.Fields(why.Error()), " ")))
}

// tend prepares the tables and asks a server that is away, until ctx ends. It says when PostgreSQL comes and goes.
func (db *DB) tend(ctx context.Context) {
	ticker := time.NewTicker(outage.ProbeEvery)
	defer ticker.Stop()

	log := outage.Log{
		Log: db.cfg.Log, What: "counters: PostgreSQL",
		Mend: "the server waits for it: see whether it runs, and what headcount check says of it",
	}

	// Open has tried it a moment ago.
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

// recover prepares the tables, or tries a change, if PostgreSQL is away.
func (db *DB) recover(ctx context.Context) {
	switch {
	case db.up():
	case !db.ready.Load():
		// Another process may be moving large tables, so this is not bounded as a call is.
		trying, cancel := context.WithTimeout(ctx, migrateTimeout)
		defer cancel()
		db.prepared(db.prepare(trying))
	case db.Do(ctx, db.probe) == nil:
		// The breaker has closed with it, if it was open. A server that refused a change may still refuse others.
		db.breaker.Probed()
	}
}

// probe makes a change and takes it back.
func (db *DB) probe(ctx context.Context, c *pgxpool.Conn) error {
	if db.cfg.ReadOnly {
		return c.Ping(ctx)
	}

	// In one round trip, so that no lock is held for longer than the statement takes.
	b := &pgx.Batch{}
	b.Queue("begin")
	b.Queue(db.cfg.Probe)
	b.Queue("rollback")

	return c.SendBatch(ctx, b).Close()
}

// Do calls fn with a connection. A transaction that fn left open is rolled back. The error is ErrAway if PostgreSQL
// cannot be used, else that of fn.
func (db *DB) Do(ctx context.Context, fn func(context.Context, *pgxpool.Conn) error) error {
	if err := db.usable(); err != nil {
		return fmt.Errorf("%w: %w", ErrAway, err)
	}
	done, err := db.breaker.Allow()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrAway, errSilent)
	}

	// A server that hangs must not hold a caller who would wait for ever.
	start := time.Now()
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()

	c, err := db.pool.Acquire(call)
	connected := err == nil
	if connected {
		err = fn(call, c)
		db.release(call, c)
	}

	works := err == nil || connected && answered(err)
	// A caller who left early is no sign of a server that does not answer.
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

	// Reads succeed meanwhile, so the breaker alone would not notice.
	if connected && refuses(err) {
		db.breaker.Refused()
	}

	// The other connections lead to the same server.
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

// release gives a connection back.
func (db *DB) release(ctx context.Context, c *pgxpool.Conn) {
	defer c.Release() // which closes a connection in a transaction

	idle := c.Conn().PgConn().TxStatus() == 'I'
	if idle || c.Conn().IsClosed() {
		return
	}
	if _, err := c.Exec(ctx, "rollback"); err != nil {
		db.cfg.Log.Debug().Err(err).Msg("counters: rolling back")
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

// Full reports whether err says that the server's disk is full. The transaction was rolled back: a server that cannot
// write its log ends instead.
func Full(err error) bool { return Code(err) == "53100" }

// errDead marks the failure of a connection before anything was written.
var errDead = errors.New("the connection was dead")

// First marks the error of the first round trip of a transaction. Retry makes the transaction anew if the connection is
// to blame.
func First(ctx context.Context, err error) error {
	if err != nil && (Code(err) == "" || moved(err)) && ctx.Err() == nil {
		return fmt.Errorf("%w: %w", errDead, err)
	}

	return err
}

// Retry makes a transaction, and makes it anew if it was surely rolled back and may succeed then.
func Retry(transaction func() error) (err error) {
	const tries = 3
	for range tries {
		err = transaction()
		// A transaction that failed to serialise, or was part of a deadlock.
		conflict := Code(err) == "40001" || Code(err) == "40P01"
		if !conflict && !errors.Is(err, errDead) {
			break
		}
	}

	return err
}

// answered reports whether err comes from a server that is able to serve. Otherwise a connection is to blame, an
// operator, a time-out, or the server itself.
func answered(err error) bool {
	return Code(err) != "" && !ofClass(err, "08", "57", "XX") && !refuses(err)
}

// refuses reports whether err is that of a server that may carry out reads and refuses changes: it is read-only, a
// right or a table is missing, its disk or memory is full, or its system fails.
func refuses(err error) bool { return ofClass(err, "25006", "42", "53", "58") }

// moved reports whether err says that the server is not the one to write to, or not any more.
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
