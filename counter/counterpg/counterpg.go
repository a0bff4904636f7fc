// Package counterpg keeps counters in PostgreSQL 13 or later. Any number of
// processes may write the same counters.
//
// # One step
//
// All operations that come together are one transaction of two round trips,
// each a pipeline. The first begins it, locks the rows of all counters that are
// named in the order of their keys (and makes those that lack one), claims the
// idempotency keys in their order, and reads what the operations are about: counters,
// the members they name, the clock. Then counter.Judge judges in Go, while the
// rows are held still. The second writes what changed, an array for each column,
// and commits. So one arithmetic serves every store, and no interleaving of
// processes passes a bound. What changed nothing is rolled back.
//
// Locks are taken in one order everywhere: counters by key, idempotency keys by id, the
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
//   - headcount_identities is keyed by the 16 bytes of a key. A claim is
//     INSERT ... ON CONFLICT: of two at the same time the second waits for the first.
//     The index on until, which is only written at its end, finds those to forget.
//   - headcount_sweeps says what is to be cleared away and when: a row for each
//     ledger whose entries end, and one for each set or ledger that is no counter's
//     any more. The index on due finds the next. It is written when a ledger is
//     made, not when it is appended to.
//   - headcount_limits has a row for each state of a limit that still counts. The state is
//     bytes that package limit writes, so one arithmetic serves here too. A call that passes
//     changes no indexed column: due says when somebody looks whether the state has ended.
//   - headcount_rules and headcount_changed are for changes in SQL, see below.
//   - headcount_meta is one row: the highest incarnation that was ever deleted.
//     Only a DELETE writes it; a counter that is made reads it after its own key is
//     locked, so it sees every deletion of that key.
//
// Plans are forced to be generic and to use these indexes: a plan that was made
// for an empty table would scan a full one.
//
// # Clearing away
//
// A goroutine of each process forgets idempotency keys whose day is over and limits that have ended, takes away
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
// # Changes in SQL
//
// Applications change exact counters in transactions of their own by the function headcount.change (change.sql), which
// repeats in plpgsql what counter.Judge does for an Add, on the same rows, with the same locks and the same idempotency
// keys. A test makes the same changes by both and compares all that they leave.
//
// [Store.ServeSQL] makes both tables, if they are not there, writes the rules and makes the function at each start. So
// after a rolling restart with other rules those of the process that started last hold, also while older processes still
// judge by theirs. That is no migration: releases that do not know the function use the other tables all the same, and
// so does a user without the right to make schemas and roles.
//
// The function appends the key to headcount_changed, within the caller's transaction. Four times a second each process
// takes what was appended, and publishes it as if it had made the change. So each change is passed on once, also one that
// was made while no server ran, and nobody waits for a NOTIFY at a commit, which the section about the feed rules out.
//
// # When PostgreSQL is away
//
// Calls fail with counter.ErrUnavailable, after three failures in a row at once;
// twice a second one is let through to see. The same holds for a server that is
// read-only, full or out of connections, or that lets nobody log in; reads do not
// end that, but a change that is taken back. A process starts without it, and is
// ready (Config.OnState) when the database has answered and has its tables.
//
// A pooler that shares connections between its clients is refused (refusePooler).
package counterpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
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

	maxConnections = 16 // of this process; two more listen and migrate

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
	pc.AfterConnect = func(context.Context, *pgx.Conn) error {
		s.ids.drop()
		return nil
	}
	if s.pool, err = pgxpool.NewWithConfig(context.Background(), pc); err != nil {
		return nil, fmt.Errorf("counterpg: %w: %w", ErrConfig, err)
	}
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

// drop gives up the block. The server of a new connection may have taken the place of another one, and not know that
// the block was given out.
func (n *numbers) drop() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.left = 0
}

// sortedKeys are the keys of m in their order.
func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
