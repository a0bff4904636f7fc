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
//     value touches no index, and half of each page is free for the new version. The number of a row is that of the
//     commit that wrote it. It has no index, because rows are looked up by it only after a fast store (package
//     rowstier) has lost data. Then all rows of a partition are examined, in parts.
//   - headcount_row_deletions has the rows that were deleted lately, if this store is the durable tier of
//     package rowstier.
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
	// OtherTables are the tables of other stores that use the same connection, see [Store.DB].
	OtherTables []postgres.Tables
	// DurableTier says that this store is the durable tier of package rowstier. Then deletions are remembered for two
	// days.
	DurableTier bool
	// RefuseTier says that this store must not be the durable tier of package rowstier. A database that is one is
	// refused, with RefuseTier as the remedy. Empty: it may be one.
	RefuseTier string
	// NoRows says that this database must not have rows of partitions. A database in which an owner has any is refused,
	// with NoRows as the remedy. Empty: it may have rows.
	NoRows string
	// PollEvery is how often a watch checks for commits of other processes, default 1s.
	PollEvery time.Duration
	// ReadOnly is for readers: the store creates and changes nothing, and only Read and Scan may be called.
	ReadOnly bool
	// SweepEvery is the time between two rounds of deleting expired IDs, default 10s.
	SweepEvery time.Duration
	OnState    func(up bool) // called when PostgreSQL becomes available or unavailable; optional
	Log        zerolog.Logger
}

// Readable is called with each commit that is about to be made, a part of its rows at a time if there are many. The
// statements that it queues are a part of the transaction: if one fails, the commit is not made. Readable may be called
// again for the same commit.
type Readable func(c *rows.Commit, queue func(sql string, args ...any))

// Store is a rows.Store in PostgreSQL. All methods may be called from any goroutine.
type Store struct {
	cfg     Config
	db      *postgres.DB
	watches rows.Watches

	mu     sync.Mutex              // guards the fields below
	mine   [rows.Partitions]uint64 // epochs of the claims of this process
	newest [rows.Partitions]newest // commits that the watches know of

	stop context.CancelFunc
	wg   sync.WaitGroup // waits for sweep
}

var _ rows.Store = (*Store)(nil)

//go:embed migrations/*.sql
var embedded embed.FS

// probe is a change, for postgres.DB. No partition has that number.
const probe = `insert into headcount_row_ids (partition, id, until) values (-1, gen_random_uuid(), now())`

// Open returns a Store in the database of cfg.URL. It fails, with postgres.ErrConfig, if settings are invalid or the
// database cannot be used. A database that does not answer is no error: calls then return rows.ErrUnavailable.
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

// hasFront reports whether the database has the row in which package rowstier records what was drained.
const hasFront = `select exists (select from generate_series(0, 63) as p
	join headcount_rows r on r.partition = p and r.collection = 'tier' and r.field = 'drained')`

// hasRows reports whether an owner has claimed any partition.
const hasRows = `select exists (select from headcount_partitions where epoch > 0)`

// Tables returns the tables that a Store needs, its own ones first.
func Tables(cfg Config) []postgres.Tables {
	migrations, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // cannot happen: the folder is embedded
	}

	// The lock differs from that of other stores in the same database.
	const lockID = 0x68656164726f7773 // "headrows"
	own := postgres.Tables{Migrations: migrations, Versions: "headcount_rows_migrations", Lock: lockID}
	switch {
	case cfg.RefuseTier != "":
		own.Refuse = hasFront
		own.Why = cfg.RefuseTier
	case cfg.NoRows != "":
		own.Refuse = hasRows
		own.Why = cfg.NoRows
	}

	return append([]postgres.Tables{own}, cfg.OtherTables...)
}

// Close waits for the calls in progress, and closes the connections. Later calls fail with rows.ErrUnavailable.
func (s *Store) Close() {
	// A sweep may have a transaction in progress, for which closing the connections would wait.
	s.stop()
	s.wg.Wait()
	s.db.Close()
}

// DB returns the connection. It ends with the store.
func (s *Store) DB() *postgres.DB { return s.db }

// Cause returns why PostgreSQL is unavailable, or nil.
func (s *Store) Cause() error { return s.db.Cause() }

// do calls fn with a connection. Its error is rows.ErrUnavailable, or rows.ErrFull.
func (s *Store) do(ctx context.Context, what string, fn func(context.Context, *pgxpool.Conn) error) error {
	return s.doLonger(ctx, 0, what, fn)
}

// doLonger is do for a call that may take so much longer than others.
func (s *Store) doLonger(
	ctx context.Context, longer time.Duration, what string, fn func(context.Context, *pgxpool.Conn) error,
) error {
	err := postgres.Retry(func() error { return s.db.DoLonger(ctx, longer, fn) })
	switch {
	case err == nil:
		return nil
	case postgres.Full(err):
		return fmt.Errorf("rowspg: %s: %w: %w", what, rows.ErrFull, err)
	default:
		return fmt.Errorf("rowspg: %s: %w: %w", what, rows.ErrUnavailable, err)
	}
}

// query executes a statement, and calls each after each row has been scanned into to.
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

		// The query must not be repeated, because each has already seen some rows.
		if begun {
			return err
		}

		return postgres.First(ctx, err)
	})
}

// sweepAtOnce is how many IDs or deletions one transaction deletes.
const sweepAtOnce = 2000

// An array of row locations keeps the planner from reading all rows. The clock of a commit may be behind that of the
// server, so IDs are kept somewhat longer.
const (
	sweepIDs = `delete from headcount_row_ids where ctid = any(array(
	select ctid from headcount_row_ids where until < now() - interval '1 hour'
	order by until limit $1 for update skip locked))`
	sweepDeletions = `delete from headcount_row_deletions where ctid = any(array(
	select ctid from headcount_row_deletions where at < now() - interval '2 days'
	order by at limit $1 for update skip locked))`
)

// sweep deletes expired IDs and deletions until ctx ends.
func (s *Store) sweep(ctx context.Context) {
	for outage.Sleep(ctx, s.cfg.SweepEvery) {
		s.sweepAll(ctx, sweepIDs)
		s.sweepAll(ctx, sweepDeletions)
	}
}

// sweepAll repeats a statement until it finds no more rows.
func (s *Store) sweepAll(ctx context.Context, sql string) {
	// Use small transactions, so that no commit waits for a large one.
	for more := true; more && ctx.Err() == nil; {
		err := s.do(ctx, "forget", func(ctx context.Context, c *pgxpool.Conn) error {
			tag, err := c.Exec(ctx, sql, sweepAtOnce)
			more = tag.RowsAffected() == sweepAtOnce
			return err
		})
		if err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: deleting expired idempotency keys failed; retrying")
			return
		}
	}
}

var errPartition = errors.New("headcount_partitions lacks a partition; restore the table")
