// Package rowstier is a store of rows with a fast store in front of a lasting one: Redis in front of PostgreSQL.
//
// A commit goes to the front, and is acknowledged then. Who owns a partition drains it: what its commits changed goes
// to the back a moment later, all as of one commit of the front. So the back is always as the front was at some
// moment.
//
// # What the front remembers
//
// Each commit brings a row of its own to the front, which names what it changed and is deleted when that is drained. So
// the next owner of a partition knows what is not drained yet. One more row says how far the front and the back are.
//
// Rows that were not used for long may leave the front ([Store.Evict]). From then on a row that is not in the front is
// looked for in the back, so a deleted row leaves a tombstone in the front until its deletion is drained. While nothing
// has ever left the front it is whole, and the back is not asked.
//
// # Losses
//
// The back knows up to which commit of the front it was drained. A front that has less has lost something. Since a
// drain has everything up to its commit, the back is at least as new as such a front in every row. So the next claim
// brings over what changed in the back since they last agreed. A front that has nothing is not whole, and is filled
// by reads. What was not drained comes back from the memory of the owner, see package owner of the counters.
//
// # A front that was alone
//
// A front may have been used without a back. Its first owner with a new back has everything that is there go to the
// back as if it had just changed, and the front says so until that is done. The back is whole then ([Store.Adopted]).
//
// A back that was used alone gets a front that is empty, which is filled by reads. Two stores that both have rows, and
// were never used together, are refused.
//
// IDs that were lost with the front are asked for in the back for a day.
//
// # Two fronts
//
// A front has a token for each partition, and so has the back from the front that was drained last. A front with
// another token is refused. One that is empty takes the back over, as after a loss; the owners in front of the former
// one make no changes from then on.
//
// One loss is not noticed: when a process takes a partition over while the back is away, and the front has just lost
// commits that were drained. Then their rows are old until something changes them.
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

// Back is the lasting store.
type Back interface {
	rows.Store
	// Changed calls each with the rows that commits after a number have changed; a nil value says that the row is
	// deleted. It remembers deletions for a day at least.
	Changed(ctx context.Context, partition int, after uint64, each func(name rows.Name, value []byte) error) error
	// Remembered returns those of ids that are remembered, with the time until which they are.
	Remembered(ctx context.Context, partition int, ids []rows.ID) ([]rows.ID, error)
}

// Config tunes a Store. A zero field takes its default.
type Config struct {
	// DrainEvery is the pause between drains, default 200ms. After an error it is five times as long.
	DrainEvery time.Duration
	// Dirty is the number of rows of a partition that may wait to be drained, default 262,144. Beyond it commits fail
	// with rows.ErrFull.
	Dirty int
	// Timeout limits one call of the back, default 10s.
	Timeout time.Duration
	// MayAdopt says why what the front had without the back cannot go to the back yet, for one partition; nil: it can.
	MayAdopt func(ctx context.Context, partition int) error
	Log      zerolog.Logger
}

// lossyFor is how long IDs are asked for in the back after the front has lost something: as long as they are
// remembered.
const lossyFor = 24 * time.Hour

// Store is a rows.Store. All methods may be called from any goroutine.
type Store struct {
	front rows.Store
	back  Back
	cfg   Config

	stop context.CancelFunc
	wg   sync.WaitGroup // drainEach and adoptEach

	partitions [rows.Partitions]partition

	draining chan struct{} // a lock for who writes the back, see hold
	away     error         // why the back could not be written the last time; guarded by draining
}

var _ rows.Store = (*Store)(nil)

// New returns a Store. Close ends it; it closes neither front nor back.
func New(front rows.Store, back Back, cfg Config) *Store {
	cfg.DrainEvery = cmp.Or(cfg.DrainEvery, 200*time.Millisecond)
	cfg.Dirty = cmp.Or(cfg.Dirty, 1<<18)
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)

	s := &Store{front: front, back: back, cfg: cfg, draining: make(chan struct{}, 1)}
	for id := range s.partitions {
		s.partitions[id].id = id
	}

	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.drainEach(ctx) })
	s.wg.Go(func() { s.adoptEach(ctx) })

	return s
}

// Close drains what is there, until ctx ends. The owner makes no commits any more.
func (s *Store) Close(ctx context.Context) error {
	s.stop()
	s.wg.Wait()

	for {
		left, err := s.drain(ctx)
		if left == 0 {
			return nil
		}

		if !wake.Wait(ctx, s.cfg.DrainEvery, nil) {
			return fmt.Errorf("rowstier: %d rows are in the front alone: %w", left, err)
		}
	}
}

// hold waits until nobody else writes the back, or claims partitions in it. The caller then calls release.
func (s *Store) hold() (release func()) {
	s.draining <- struct{}{}

	return func() { <-s.draining }
}

// Watch implements rows.Store.
func (s *Store) Watch(ctx context.Context, heard func(int, uint64, []byte), missed func()) error {
	return s.front.Watch(ctx, heard, missed)
}

// Commit implements rows.Store.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := make([]error, len(commits))
	var possible []int
	var fronts []rows.Commit
	for i := range commits {
		c := &commits[i]
		p := &s.partitions[c.Partition]
		errs[i] = s.admit(ctx, p, c)
		if errs[i] == nil {
			possible = append(possible, i)
			fronts = append(fronts, p.begin(c))
		}
	}
	if len(fronts) == 0 {
		return errs
	}

	// Once the front has it, a commit is acknowledged, and waits for the back.
	for at, err := range s.front.Commit(ctx, fronts) {
		i := possible[at]
		errs[i] = err
		if err == nil {
			s.partitions[commits[i].Partition].made(&commits[i], &fronts[at])
		}
	}

	return errs
}

// admit returns why a commit is not sent to the front, or nil. Nothing of it is made then.
func (s *Store) admit(ctx context.Context, p *partition, c *rows.Commit) error {
	if err := p.refuses(c); err != nil {
		return err
	}
	if p.dirty()+len(c.Rows) > s.cfg.Dirty {
		return fmt.Errorf("%w: too many rows wait for the lasting store", rows.ErrFull)
	}
	if len(c.IDs)+len(c.Asked) == 0 || !p.isLossy(c.At) {
		return nil
	}

	// The front may have forgotten IDs, so the back is asked as well.
	ids := append(append([]rows.ID{}, c.IDs...), c.Asked...)
	known, err := s.back.Remembered(ctx, p.id, ids)
	switch {
	case err != nil:
		return fmt.Errorf("%w: whether an ID is remembered is unknown: %w", rows.ErrFull, err)
	case len(known) > 0:
		return &rows.Known{IDs: known}
	default:
		return nil
	}
}

// Dirty returns how many rows and IDs this process has acknowledged, and the back has not got. A row that changes again
// while it is under way counts twice.
func (s *Store) Dirty() int {
	n := 0
	for id := range s.partitions {
		n += s.partitions[id].dirty()
	}

	return n
}

// Lag returns the age of the oldest change of this process that the back has not got.
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

// ScanResident is Scan for the rows that are in the front.
func (s *Store) ScanResident(
	ctx context.Context, partition int, of, after string, each func(string, []byte) error,
) error {
	at := rows.Address{Partition: partition, Name: rows.Name{Collection: of}}

	return s.scanFront(ctx, at, after, each)
}

// Evict has rows of a partition leave the front with its next commit, except those that are not drained. The owner
// calls it.
func (s *Store) Evict(partition int, names []rows.Name) {
	s.partitions[partition].evict(names)
}
