// Package rowspg is a store of rows in PostgreSQL 13 or later.
//
// # Commits
//
// All commits of a call are one transaction of two round trips, each a pipeline. The first locks the partitions in
// order and reads who owns them and which IDs are remembered. Then Go decides by the rules that all stores share. The
// second one writes what is admitted, an array for each column, and commits. So the fence holds whatever processes do
// at the same time, and many partitions share one fsync.
//
// A commit whose connection was lost is repeated by its caller, and the number of the partition says whether it was
// made.
//
// # Tables
//
// They are in the first schema of the search path, and in migrations/*.sql.
//
//   - headcount_partitions has the owner, the epoch and the newest number of each partition. Its rows are the fence: a
//     claim and a commit lock them.
//   - headcount_rows has the rows. A name may have any bytes, and has to sort by them, so it is no text. A change of a
//     value touches no index, and half of each page is free for the new version. Its number is that of the commit that
//     wrote it; what a commit changed is found without an index, as only a loss of the store in front asks for it.
//   - headcount_row_deletions has the rows that were deleted lately, if this store is behind another one.
//   - headcount_row_ids has the IDs that were used. The index on until finds those to forget.
//
// People cannot read rows. [Config.Readable] may write tables that they can, in the same transactions.
//
// # Publications
//
// One process owns all partitions of such a store, so it hands its publications out itself. Another process, which the
// owner has replaced or is about to replace, notices by the numbers of partitions that it has missed some. NOTIFY would
// pass them on, but within a transaction it has all commits of the database wait for each other, it takes 8,000 bytes
// at most, and whoever is not connected misses it all the same.
package rowspg

import (
	"cmp"
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"headcount/internal/outage"
	"headcount/internal/postgres"
	"headcount/internal/rows"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	URL string // postgres://…; required
	// Readable writes tables for people; nil: there are none.
	Readable Readable
	// Beside are the tables of others that use the same connection, see [Store.DB].
	Beside []postgres.Tables
	// Back says that this store is behind another one, see package rowstier: deletions are remembered for two days.
	Back bool
	// NoFront says that this store is not behind another one, and what to do about a database that is: it is refused.
	NoFront string
	// NoRows says that no partition has its rows in this database, and what to do about one in which an owner had some:
	// that one is refused. Empty: it has rows.
	NoRows string
	// PollEvery is how often a watch looks for commits of other processes, default 1s.
	PollEvery time.Duration
	// ReadOnly makes and changes nothing: only Read and Scan may be called.
	ReadOnly bool
	// SweepEvery is the time between two rounds of forgetting IDs, default 10s.
	SweepEvery time.Duration
	OnState    func(up bool) // called when PostgreSQL comes and goes; optional
	Log        zerolog.Logger
}

// Readable is called with each commit that is about to be made. What it queues is a part of the transaction: if it
// fails, the commit is not made. It may be called again for the same commit.
type Readable func(c *rows.Commit, queue func(sql string, args ...any))

// Store is a rows.Store in PostgreSQL. All methods may be called from any goroutine.
type Store struct {
	cfg     Config
	db      *postgres.DB
	watches rows.Watches

	mu     sync.Mutex              // guards the fields below
	mine   [rows.Partitions]uint64 // epochs of the claims of this process
	newest [rows.Partitions]newest // publications

	stop context.CancelFunc
	wg   sync.WaitGroup // sweep
}

var _ rows.Store = (*Store)(nil)

//go:embed migrations/*.sql
var embedded embed.FS

// probe is a change, for postgres.DB. No partition has that number.
const probe = `insert into headcount_row_ids (partition, id, until) values (-1, gen_random_uuid(), now())`

// Open returns a Store in the database of cfg.URL. It fails, with postgres.ErrConfig, if settings cannot work or the
// database that answered cannot be used. While a database does not answer, calls return rows.ErrUnavailable.
func Open(ctx context.Context, cfg Config) (*Store, error) {
	cfg.PollEvery = cmp.Or(cfg.PollEvery, time.Second)
	cfg.SweepEvery = cmp.Or(cfg.SweepEvery, 10*time.Second)

	s := &Store{cfg: cfg}
	var err error
	s.db, err = postgres.Open(ctx, postgres.Config{
		URL: cfg.URL, Tables: Tables(cfg), Probe: probe, ReadOnly: cfg.ReadOnly, OnState: cfg.OnState, Log: cfg.Log,
	})
	if err != nil {
		return nil, fmt.Errorf("rowspg: %w", err)
	}

	run, stop := context.WithCancel(context.Background())
	s.stop = stop
	if !cfg.ReadOnly {
		s.wg.Go(func() { s.sweep(run) })
	}

	return s, nil
}

// hasFront asks for a row by which package rowstier knows what was drained to a store.
const hasFront = `select exists (select from generate_series(0, 63) as p
	join headcount_rows r on r.partition = p and r.collection = 'tier' and r.field = 'drained')`

// hasRows asks whether an owner has claimed a partition.
const hasRows = `select exists (select from headcount_partitions where epoch > 0)`

// Tables returns the tables that the database of a Store has to have, its own ones first.
func Tables(cfg Config) []postgres.Tables {
	migrations, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // the folder is embedded
	}

	// Apart from the tables of other stores in the same database.
	const lockID = 0x68656164726f7773 // "headrows"
	own := postgres.Tables{Migrations: migrations, Versions: "headcount_rows_migrations", Lock: lockID}
	switch {
	case cfg.NoFront != "":
		own.Refuse = hasFront
		own.Why = cfg.NoFront
	case cfg.NoRows != "":
		own.Refuse = hasRows
		own.Why = cfg.NoRows
	}

	return append([]postgres.Tables{own}, cfg.Beside...)
}

// Close waits for calls under way, and ends the connections. Later calls fail with rows.ErrUnavailable.
func (s *Store) Close() {
	// Sweeping has a transaction under way, perhaps, which the database would wait for.
	s.stop()
	s.wg.Wait()
	s.db.Close()
}

// DB returns the connection. It ends with the store.
func (s *Store) DB() *postgres.DB { return s.db }

// Cause returns why PostgreSQL cannot be used, or nil.
func (s *Store) Cause() error { return s.db.Cause() }

// do calls fn with a connection. Its error is rows.ErrUnavailable, or rows.ErrFull.
func (s *Store) do(ctx context.Context, what string, fn func(context.Context, *pgxpool.Conn) error) error {
	err := postgres.Retry(func() error { return s.db.Do(ctx, fn) })
	switch {
	case err == nil:
		return nil
	case postgres.Full(err):
		return fmt.Errorf("rowspg: %s: %w: %w", what, rows.ErrFull, err)
	default:
		return fmt.Errorf("rowspg: %s: %w: %w", what, rows.ErrUnavailable, err)
	}
}

// query carries out one statement, and calls each for each row, when its columns are in to.
func (s *Store) query(ctx context.Context, what string, to []any, each func() error, sql string, args ...any) error {
	return s.do(ctx, what, func(ctx context.Context, c *pgxpool.Conn) error {
		found, err := c.Query(ctx, sql, args...)
		if err != nil {
			return postgres.First(ctx, err)
		}

		begun := false
		_, err = pgx.ForEachRow(found, to, func() error {
			begun = true
			return each()
		})

		// What each has got must not come again.
		if begun {
			return err
		}

		return postgres.First(ctx, err)
	})
}

// sweepAtOnce is how many IDs, or deletions, one transaction forgets.
const sweepAtOnce = 2000

// An array of the rows' places keeps the planner from reading all rows. A commit has a clock of its own, which may be
// behind that of the server, so IDs stay somewhat longer.
const (
	sweepIDs = `delete from headcount_row_ids where ctid = any(array(
	select ctid from headcount_row_ids where until < now() - interval '1 hour'
	order by until limit $1 for update skip locked))`
	sweepDeletions = `delete from headcount_row_deletions where ctid = any(array(
	select ctid from headcount_row_deletions where at < now() - interval '2 days'
	order by at limit $1 for update skip locked))`
)

// sweep forgets IDs and deletions until ctx ends.
func (s *Store) sweep(ctx context.Context) {
	for outage.Sleep(ctx, s.cfg.SweepEvery) {
		s.sweepAll(ctx, sweepIDs)
		s.sweepAll(ctx, sweepDeletions)
	}
}

// sweepAll carries out a statement until it finds nothing more.
func (s *Store) sweepAll(ctx context.Context, sql string) {
	// In small transactions, so that no commit waits for a large one.
	for more := true; more && ctx.Err() == nil; {
		err := s.do(ctx, "forget", func(ctx context.Context, c *pgxpool.Conn) error {
			tag, err := c.Exec(ctx, sql, sweepAtOnce)
			more = tag.RowsAffected() == sweepAtOnce
			return err
		})
		if err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: forgetting idempotency keys and deletions")
			return
		}
	}
}

var errPartition = errors.New("headcount_partitions lacks a partition; restore the table")
