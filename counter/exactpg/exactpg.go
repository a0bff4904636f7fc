// Package exactpg keeps exact counters in PostgreSQL 13 or later. Any number of processes, and applications by SQL, may
// change the same counters.
//
// # A change
//
// All operations of a call are one transaction of two round trips, each a pipeline. The first one locks the rows of the
// counters in the order of their keys, makes those that are missing, and claims the idempotency keys in their order.
// Then counter.Judge decides in Go, while nobody else can change the rows. The second one writes what changed, an array
// for each column, and commits. What changed nothing is rolled back.
//
// Writers take locks in one order, so they wait for each other and never stand still. The server's clock counts, read
// after the locks were taken, so the entries of a ledger are in order whatever the clocks of the processes say.
//
// # Tables
//
// They are in migrations/*.sql, beside those of package rowspg, with which this store shares the connection.
//
//   - headcount_counters has a row for each exact counter. No index but that of its key, so a change touches no index,
//     and half of each page is free for the new version of a row. It also has a copy of each other counter, for people
//     ([Readable]); here such a row only says that the key is taken.
//   - headcount_ledger is only ever appended. A counter that was deleted and made again has another incarnation, so it
//     begins a ledger of its own, and the old one is swept.
//   - headcount_sweeps says which ledgers have entries that end, or have no counter any more, and when to look.
//   - headcount_row_ids, of package rowspg, has the idempotency keys, those of batches in the partition in which an
//     owner looks for them. So a batch of exact counters and one of others cannot be made with the same key.
//   - headcount_meta has one row, which only a DELETE writes.
//   - headcount_rules and headcount_changed are for changes in SQL.
//
// # Changes in SQL
//
// Applications change exact counters within their own transactions by the function headcount.change (change.sql). It
// repeats in plpgsql what counter.Judge does for an Add. [Store.ServeSQL] makes it and writes the rules at each start,
// so those of the process that started last hold. The function appends the key to headcount_changed; a server takes it
// from there within a second and publishes it, also a change that was made while no server ran.
//
// # Feed
//
// A process that committed names the keys in a notification after the commit: within the transaction it would have all
// commits of the database wait for each other. Who receives it reads the keys that it follows, so what is published is
// committed, in order. A process that dies in between is found out by reading everything that is followed, once in
// Config.PollEvery.
package exactpg

import (
	"cmp"
	"context"
	"embed"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/postgres"
	"headcount/internal/rows"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	DB *postgres.DB // with the tables of this package and those of rowspg; required
	// Elsewhere returns the counters of another kind, in another store, among the keys. It is called before a counter
	// is created. Nil: there is no other store.
	Elsewhere func(ctx context.Context, keys []string) ([]counter.Counter, error)
	// PollEvery is how often all followed counters are read, default 10s.
	PollEvery time.Duration
	// SweepEvery is the time between two rounds of sweeping ledgers, default 10s.
	SweepEvery time.Duration
	// ReadOnly is for short-lived readers: the store runs no goroutines that follow or sweep.
	ReadOnly bool
	Log      zerolog.Logger
}

// Store is a store of exact counters. All methods may be called from any goroutine. Their errors are
// counter.ErrUnavailable unless their comment says more.
type Store struct {
	cfg  Config
	db   *postgres.DB
	feed *feed

	stop context.CancelFunc
	wg   sync.WaitGroup // goroutines
}

//go:embed migrations/*.sql
var embedded embed.FS

const lockID = 0x68656164636f756e // "headcoun": identifies our advisory locks

// Tables returns the tables that a Store needs.
func Tables() postgres.Tables {
	migrations, err := fs.Sub(embedded, "migrations")
	if err != nil {
		panic(err) // cannot happen: the folder is embedded
	}

	return postgres.Tables{
		Migrations: migrations, Versions: "headcount_counters_migrations", Lock: lockID,
		Former: "headcount_migrations",
		Mend: "carry its counters over: \"headcount export --postgres URL --file FILE\" of that release, " +
			"with --redis URL if it had one, move its tables into another schema as deploy/README.md shows, then " +
			"\"headcount import --postgres URL --file FILE\" of this one",
	}
}

// New returns a Store. It must be closed before the connection.
func New(cfg Config) *Store {
	cfg.PollEvery = cmp.Or(cfg.PollEvery, 10*time.Second)
	cfg.SweepEvery = cmp.Or(cfg.SweepEvery, 10*time.Second)

	s := &Store{cfg: cfg, db: cfg.DB, feed: newFeed()}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	if cfg.ReadOnly {
		return s
	}
	for _, loop := range []func(context.Context){s.listen, s.notify, s.publishEach, s.sweepEach} {
		s.wg.Go(func() { loop(ctx) })
	}

	return s
}

// Close stops the goroutines of the store. It is called only once.
func (s *Store) Close() {
	s.stop()
	s.wg.Wait()
}

// do calls fn with a connection.
func (s *Store) do(ctx context.Context, what string, fn func(context.Context, *pgxpool.Conn) error) error {
	return s.doLonger(ctx, 0, what, fn)
}

// doLonger is do for a call that may take so much longer than others.
func (s *Store) doLonger(
	ctx context.Context, longer time.Duration, what string, fn func(context.Context, *pgxpool.Conn) error,
) error {
	err := postgres.Retry(func() error { return s.db.DoLonger(ctx, longer, fn) })
	if err != nil {
		return fmt.Errorf("exactpg: %s: %w: %w", what, counter.ErrUnavailable, err)
	}

	return nil
}

// query executes a statement, and calls each after each row has been scanned into to.
func (s *Store) query(ctx context.Context, what string, to []any, each func(), sql string, args ...any) error {
	return s.do(ctx, what, func(ctx context.Context, c *pgxpool.Conn) error {
		begun := false
		found, _ := c.Query(ctx, sql, args...) // ForEachRow returns its error
		_, err := pgx.ForEachRow(found, to, func() error {
			begun = true
			each()
			return nil
		})

		// The query must not be repeated, because each has already seen some rows.
		if begun {
			return err
		}

		return postgres.First(ctx, err)
	})
}

// Remember makes later changes with these idempotency keys replays, until the keys expire.
func (s *Store) Remember(ctx context.Context, ids []rows.ID) error {
	const remember = `insert into headcount_row_ids (partition, id, until)
		select get_byte(uuid_send(id), 0) & 63, id, until from unnest($1::uuid[], $2::timestamptz[]) as u (id, until)
		on conflict do nothing`
	bytes := make([][16]byte, len(ids))
	until := make([]time.Time, len(ids))
	for i := range ids {
		bytes[i] = ids[i].Bytes
		until[i] = ids[i].Until
	}

	return s.do(ctx, "remember", func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, remember, bytes, until)
		return err
	})
}

// isHeld reports whether a transaction failed because another session holds a lock, as an application does between a
// call of headcount.change and its commit.
func isHeld(err error) bool { return postgres.Code(err) == lockNotAvailable }

const lockNotAvailable = "55P03"
