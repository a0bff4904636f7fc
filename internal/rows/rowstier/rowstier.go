// Package rowstier is a write-behind store of rows in two tiers: a fast store (Redis), and a durable store behind it
// (PostgreSQL).
//
// A commit is acknowledged once the fast store has it. The owner of a partition then drains the partition: a moment
// later it writes the dirty rows, those that have changed, to the durable store, always as of one commit of the fast
// store. So the durable store is always a consistent earlier state of the fast store.
//
// # Bookkeeping in the fast store
//
// Each commit adds a row to the fast store that lists the names of the rows it changed. The row is deleted once those
// rows are drained, so the next owner of a partition can find out what is not drained yet. When there are many such
// rows, because the durable store is away, the next one lists everything that is not drained, and the others are
// deleted. One more row per partition, the state, records which commits the two stores have in common.
//
// Rows that were not used for long may be evicted from the fast store ([Store.Evict]). From then on a row that is
// missing there is read from the durable store, so a deleted row leaves a tombstone in the fast store until its
// deletion is drained. As long as nothing was ever evicted, the fast store is complete, and reads need not ask the
// durable store.
//
// # Losses
//
// The durable store records the newest commit of the fast store that was drained. If the fast store's newest commit is
// older than that, the fast store has lost data. Every row of the durable store is then at least as new as the fast
// store's, because a drain includes all changes up to its commit. So the next claim copies the rows that changed in the
// durable store since the two last agreed. If it has no time to find all of them, it fails, and the one after it goes
// on. An empty fast store is not complete, and is filled by reads. Changes that were not drained are restored from the
// memory of the owner, see package counter/owner.
//
// IDs that the fast store has lost are looked up in the durable store for a day.
//
// # Adding a tier
//
// A fast store may have been used alone. When it gets a durable store, the first owner writes every row to it, as if
// the row had just changed, and the fast store's state says so until that is done. Then the durable store is complete
// ([Store.Adopted]).
//
// A durable store that was used alone gets an empty fast store, which is filled by reads. Two stores that both have
// rows, but were never used together, are refused.
//
// # Two fast stores
//
// A fast store has a token for each partition, and the durable store has the token of the fast store that was drained
// last. A fast store with another token is refused. An empty one takes over the durable store, as after a loss; from
// then on the owners that use the former fast store cannot make changes.
//
// One loss goes unnoticed: the fast store has just lost commits that were drained, and a process takes over the
// partition while the durable store is unavailable. The rows of those commits then stay outdated until something
// changes them.
package rowstier

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/rows"
	"headcount/internal/wake"
)

// Durable is the durable store.
type Durable interface {
	rows.Store
	// Changed examines the rows of a partition that follow a place, as many as take a moment. It returns those that
	// commits after the given number have changed, and the next place. A nil value means that the row was deleted,
	// unless a later row has the same name. Deletions are remembered for at least a day.
	Changed(ctx context.Context, partition int, after uint64, from rows.Place) ([]rows.Row, rows.Place, error)
	// Remembered returns the ids that the store still remembers, with their expiry times.
	Remembered(ctx context.Context, partition int, ids []rows.ID) ([]rows.ID, error)
}

// Config tunes a Store. A zero field takes its default.
type Config struct {
	// DrainEvery is the pause between drains, default 200ms. After an error the pause is five times as long.
	DrainEvery time.Duration
	// Dirty is the maximum number of undrained rows in a partition, default 262,144. Beyond it commits fail with
	// rows.ErrFull.
	Dirty int
	// Lists is the number of commits whose changes are listed one by one, default 1,000. Beyond it a commit lists all
	// undrained changes at once.
	Lists int
	// Timeout limits one call of the durable store, default 10s.
	Timeout time.Duration
	// MayAdopt returns why the rows of one partition cannot be copied to the durable store yet, if the fast store was
	// used alone; nil: they can.
	MayAdopt func(ctx context.Context, partition int) error
	Log      zerolog.Logger
}

// idsLackedFor is how long IDs are looked up in the durable store after the fast store has lost data: as long as IDs
// are remembered.
const idsLackedFor = 24 * time.Hour

// Store is a rows.Store. All methods may be called from any goroutine.
type Store struct {
	fast    rows.Store
	durable Durable
	cfg     Config

	stop context.CancelFunc
	wg   sync.WaitGroup // drainEach and adoptEach

	partitions [rows.Partitions]partition

	draining chan struct{} // a lock: its holder alone writes to the durable store, see hold
	away     error         // why the last write to the durable store failed; guarded by draining
}

var _ rows.Store = (*Store)(nil)

// New returns a Store and starts its goroutines, which Close ends. Close closes neither store.
func New(fast rows.Store, durable Durable, cfg Config) *Store {
	cfg.DrainEvery = cmp.Or(cfg.DrainEvery, 200*time.Millisecond)
	cfg.Dirty = cmp.Or(cfg.Dirty, 1<<18)
	cfg.Lists = cmp.Or(cfg.Lists, 1000)
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)

	s := &Store{fast: fast, durable: durable, cfg: cfg, draining: make(chan struct{}, 1)}
	for id := range s.partitions {
		s.partitions[id].id = id
		s.partitions[id].lists = cfg.Lists
	}

	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.drainEach(ctx) })
	s.wg.Go(func() { s.adoptEach(ctx) })

	return s
}

// Close drains everything that is left, but stops when ctx ends. The owner must not commit any more.
func (s *Store) Close(ctx context.Context) error {
	// The goroutines end first, so that each drain below is the only one.
	s.stop()
	s.wg.Wait()

	// An error does not end the loop: only the fast store has what is left.
	for {
		left, err := s.drain(ctx)
		if left == 0 {
			return nil
		}

		if !wake.Wait(ctx, s.cfg.DrainEvery, nil) {
			// Without an error of the durable store, draining was too slow for ctx.
			reason := cmp.Or(err, context.Cause(ctx))
			return fmt.Errorf("rowstier: %d rows are in Redis only: %w", left, reason)
		}
	}
}

// hold waits until no other goroutine writes to the durable store or claims partitions in it. The caller must call
// release. If ctx ends first, the error is rows.ErrUnavailable.
func (s *Store) hold(ctx context.Context) (release func(), err error) {
	select {
	case s.draining <- struct{}{}:
		return func() { <-s.draining }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("rowstier: %w: PostgreSQL is being written: %w", rows.ErrUnavailable, context.Cause(ctx))
	}
}

// Watch implements rows.Store.
func (s *Store) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) error {
	return s.fast.Watch(ctx, received, missed)
}

// Commit implements rows.Store.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	var possible []int
	var prepared []rows.Commit
	for i := range commits {
		c := &commits[i]
		p := &s.partitions[c.Partition]
		errs[i] = s.admit(ctx, p, c)
		if errs[i] == nil {
			possible = append(possible, i)
			prepared = append(prepared, p.prepare(c))
		}
	}
	if len(prepared) == 0 {
		return errs
	}

	// Once the fast store has a commit, the commit is acknowledged, and its rows wait to be drained.
	for at, err := range s.fast.Commit(ctx, prepared) {
		i := possible[at]
		errs[i] = err
		if err == nil {
			s.partitions[commits[i].Partition].acknowledge(&commits[i], &prepared[at])
		}
	}

	return errs
}

// admit returns why a commit must not be sent to the fast store, or nil. A refused commit has no effect.
func (s *Store) admit(ctx context.Context, p *partition, c *rows.Commit) error {
	if err := p.refuses(c); err != nil {
		return err
	}
	// Refused before the fast store gets the rows, because what it has must be kept until it is drained.
	if p.countDirty()+len(c.Rows) > s.cfg.Dirty {
		return fmt.Errorf("%w: too many rows wait to be written to PostgreSQL", rows.ErrFull)
	}
	if len(c.IDs)+len(c.Asked) == 0 || !p.mayLackIDs(c.At) {
		return nil
	}

	// The fast store may have forgotten IDs, so the durable store is asked as well.
	ids := append(append([]rows.ID{}, c.IDs...), c.Asked...)
	known, err := s.durable.Remembered(ctx, p.id, ids)
	switch {
	case err != nil:
		// ErrFull says that nothing was sent to the fast store. After ErrUnavailable the owner would not know that.
		return fmt.Errorf("%w: looking up IDs in PostgreSQL: %w", rows.ErrFull, err)
	case len(known) > 0:
		return &rows.Known{IDs: known}
	default:
		return nil
	}
}

// Dirty returns the number of rows and IDs that this process has acknowledged and not drained. A row that changes again
// while it is being drained counts twice.
func (s *Store) Dirty() int {
	n := 0
	for id := range s.partitions {
		n += s.partitions[id].countDirty()
	}

	return n
}

// Lag returns the age of this process's oldest undrained change.
func (s *Store) Lag() time.Duration {
	var oldest time.Time
	for id := range s.partitions {
		is := s.partitions[id].oldest()
		if !is.IsZero() && (oldest.IsZero() || is.Before(oldest)) {
			oldest = is
		}
	}
	if oldest.IsZero() {
		return 0
	}

	return time.Since(oldest)
}

// ScanResident is Scan for the rows that are in the fast store.
func (s *Store) ScanResident(
	ctx context.Context, partition int, of, after string, each func(string, []byte) error,
) error {
	at := rows.Address{Partition: partition, Name: rows.Name{Collection: of}}

	return s.scanFast(ctx, at, after, each)
}

// Evict removes rows of a partition from the fast store with the partition's next commit, except undrained rows. Only
// the owner of the partition may call it.
func (s *Store) Evict(partition int, names []rows.Name) {
	s.partitions[partition].evict(names)
}
