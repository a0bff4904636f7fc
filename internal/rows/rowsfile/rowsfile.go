// Package rowsfile is a store of rows in one file of a data directory. What it acknowledges is on disk.
//
// # Group commit
//
// One transaction of the file is under way at a time. Commits of many callers gather meanwhile, and the next
// transaction makes all of them, so they share one fsync.
//
// # A disk that fails
//
// After a transaction that failed, the file is opened again, which verifies all of it, and says whether it has the
// transaction. It may have it without being on disk, when the last fsync was what failed. Then the transaction counts
// as made once another one has succeeded, and an fsync with it. So the outcome is known unless the file cannot be
// opened.
package rowsfile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/internal/rows"
)

// File is the name of the file in the data directory.
const File = "counters.db"

const (
	healWait = 100 * time.Millisecond // after a transaction that failed, until another one is tried
	calm     = 5 * time.Second        // without a failure, until the disk counts as mended
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Log zerolog.Logger
	Now func() time.Time // default time.Now; for tests

	openFile boltfile.Opener // default os.OpenFile; tests put one that fails
}

// Store is a rows.Store in a file. All methods may be called from any goroutine.
type Store struct {
	path    string
	cfg     Config
	watches rows.Watches

	// turn is a lock that a caller may stop waiting for. Who has it makes transactions, and owns failed and next.
	turn   chan struct{}
	failed error     // of a transaction, not long ago; it was logged
	next   time.Time // before it no transaction is tried

	queue  sync.Mutex // guards queued
	queued []*request

	mu     sync.RWMutex // guards db and closed; held while db is read; taken after turn
	db     *bbolt.DB    // nil: the file has to be opened again
	closed bool
}

var _ rows.Store = (*Store)(nil)

var (
	errClosed  = errors.New("it is closed")
	errNothing = errors.New("nothing is to be written")
)

// Open opens the file in dir, and makes both if they are missing. Only one process at a time can have the file open.
func Open(dir string, cfg Config) (*Store, error) {
	s := &Store{path: filepath.Join(dir, File), cfg: cfg, turn: make(chan struct{}, 1)}
	if s.cfg.Now == nil {
		s.cfg.Now = time.Now
	}

	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if _, err := s.open(0); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}

	// A file whose name is lost is lost.
	if err := syncDir(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("data directory: %w", err), s.Close())
	}

	return s, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}

	return errors.Join(d.Sync(), d.Close())
}

// open opens the file. If it lacks the transaction with the number failed, it is used as it is. Otherwise it may be
// ahead of the disk, after a failure or the death of a process, and is used once an fsync has succeeded. It returns the
// number of the newest transaction.
func (s *Store) open(failed int) (newest int, err error) {
	db, err := boltfile.Open(s.path, s.cfg.openFile, format, buckets, func(db *bbolt.DB) error {
		err := db.View(func(tx *bbolt.Tx) error {
			newest = tx.ID()
			return nil
		})
		if err != nil || newest < failed {
			return err
		}

		// An empty transaction writes a page, and waits until the disk has it and all pages before.
		return db.Update(func(*bbolt.Tx) error { return nil })
	})
	if err != nil {
		return 0, err
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.db = db

	return newest, nil
}

// Close waits for the transaction under way and closes the file. Later calls fail with rows.ErrUnavailable.
func (s *Store) Close() error {
	s.turn <- struct{}{}
	defer s.unlock()

	// Readers hold mu, and bbolt would wait for them without refusing new ones.
	s.mu.Lock()
	defer s.mu.Unlock()

	s.closed = true
	if s.db == nil {
		return nil
	}
	db := s.db
	s.db = nil

	return db.Close()
}

func (s *Store) lock(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return unavailable(context.Cause(ctx))
	}
}

func (s *Store) unlock() { <-s.turn }

func unavailable(err error) error { return fmt.Errorf("rowsfile: %w: %w", rows.ErrUnavailable, err) }

// update makes a transaction, or gives it up if write returns errNothing. The error is rows.ErrFull if the disk has no
// room and nothing was written. The caller has the turn.
func (s *Store) update(write func(tx *bbolt.Tx) error) error {
	if err := s.ready(); err != nil {
		return err
	}

	// The number of the transaction, by which the file says after a failure whether it was made.
	var id int
	err := s.db.Update(func(tx *bbolt.Tx) error {
		id = tx.ID()
		return write(tx)
	})
	switch {
	case errors.Is(err, errNothing):
		return nil
	case err != nil:
		return s.outcome(id, err)
	}

	// On a full disk small transactions fit now and then, so one that succeeds does not say that it is mended.
	if s.failed != nil && time.Since(s.next) >= calm {
		s.cfg.Log.Info().Msg("counters: the data directory can be written again")
		s.failed = nil
	}

	return nil
}

// outcome finds out whether a transaction that failed was made, and returns the error of it if it was not. bbolt's
// memory is of no use after a failure, so the file is opened again. The caller has the turn.
func (s *Store) outcome(id int, cause error) error {
	s.pause(cause)
	s.drop()

	// Each transaction has the number after that of the one before, so the newest one in the file tells.
	newest, err := s.open(id)
	switch {
	case err != nil:
		return unavailable(errors.Join(cause, err))
	case newest >= id:
		return nil
	default:
		return refusal(cause)
	}
}

// drop closes the file after a failure.
func (s *Store) drop() {
	s.mu.Lock()
	defer s.mu.Unlock()

	if err := s.db.Close(); err != nil {
		s.cfg.Log.Warn().Err(err).Msg("counters: closing a file that could not be written")
	}
	s.db = nil
}

// ready makes sure that the file is open. The caller has the turn.
func (s *Store) ready() error {
	switch {
	case s.closed:
		return unavailable(errClosed)
	case time.Now().Before(s.next):
		// Each attempt may read all of the file, so a disk that stays full must not have one for each call.
		return refusal(s.failed)
	case s.db != nil:
		return nil
	}

	if _, err := s.open(0); err != nil {
		s.pause(err)
		return refusal(err)
	}

	return nil
}

// pause has no transaction tried for some time after a failure. The caller has the turn.
func (s *Store) pause(err error) {
	// An outage is logged once, however many transactions fail in it.
	if s.failed == nil {
		const refuses = "counters: the data directory cannot be written; changes are refused until it can"
		s.cfg.Log.Error().Err(err).Msg(refuses)
	}

	s.failed = err
	s.next = time.Now().Add(healWait)
}

// refusal is the error of what was surely not made, because of a failure. bbolt passes some of them on as text alone.
func refusal(failed error) error {
	// EFBIG is a limit of the process or of the file system, which is full to this process.
	isFull := func(full syscall.Errno) bool { return strings.Contains(failed.Error(), full.Error()) }
	if isFull(syscall.ENOSPC) || isFull(syscall.EDQUOT) || isFull(syscall.EFBIG) {
		return fmt.Errorf("rowsfile: %w: %w", rows.ErrFull, failed)
	}

	return unavailable(failed)
}

// view reads what is on disk. What it passes to read is valid until read returns.
func (s *Store) view(ctx context.Context, read func(tx *bbolt.Tx) error) error {
	if err := s.reopen(ctx); err != nil {
		return err
	}

	// A transaction that fails meanwhile waits with closing the file until this one has read.
	s.mu.RLock()
	defer s.mu.RUnlock()

	if s.db == nil {
		return unavailable(errClosed)
	}
	if err := s.db.View(read); err != nil {
		return unavailable(err)
	}

	return nil
}

// reopen opens the file again after a failure.
func (s *Store) reopen(ctx context.Context) error {
	s.mu.RLock()
	isOpen := s.db != nil
	s.mu.RUnlock()
	if isOpen {
		return nil
	}

	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()

	return s.ready()
}
