// Package rowsfile is a store of rows in one file of a data directory. Everything that it acknowledges is on disk.
//
// # Group commit
//
// The file has one transaction at a time. Commits that arrive in the meantime are queued, and the next transaction
// makes all of them, so they share one fsync.
//
// # Disk failures
//
// After a failed transaction the file is opened again, which verifies the whole file and shows whether it contains the
// transaction. It may contain the transaction without being on disk, if only the last fsync failed. Then the
// transaction counts as made once another one has succeeded, including its fsync. So the outcome is known unless the
// file cannot be opened.
//
// On a full disk small transactions still succeed now and then. So after a failure the disk counts as working again
// when the store could write a probe, which it tries once a second.
package rowsfile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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
	healWait   = 100 * time.Millisecond // after a failed transaction, before the next attempt
	probeEvery = time.Second            // while the disk counts as failed
	probeBytes = 256 << 10              // more than most transactions need
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Log zerolog.Logger
	Now func() time.Time // default time.Now; for tests

	openFile boltfile.Opener // default os.OpenFile; tests inject a failing one
}

// Store is a rows.Store in a file. All methods may be called from any goroutine.
type Store struct {
	path    string
	cfg     Config
	watches rows.Watches

	// turn is a lock whose waiters may give up. Its holder makes transactions, sets failed, and owns next. Methods with
	// the suffix Locked need it.
	turn   chan struct{}
	failed atomic.Pointer[error] // of the last transaction that failed; it has been logged. nil: the disk works
	next   time.Time             // no transaction is attempted before

	closing context.Context // ends with Close, and with it heal
	end     context.CancelFunc
	healing sync.WaitGroup

	queue  sync.Mutex // guards queued
	queued []*request

	mu     sync.RWMutex // guards db and closed; read-locked while db is read; locked after turn
	db     *bbolt.DB    // nil: the file must be opened again
	closed bool
}

var _ rows.Store = (*Store)(nil)

var (
	errClosed  = errors.New("this process has closed it")
	errNothing = errors.New("nothing is to be written")
)

// Open opens the file in dir, and creates both if they are missing. Only one process at a time can have the file open.
func Open(dir string, cfg Config) (*Store, error) {
	s := &Store{path: filepath.Join(dir, File), cfg: cfg, turn: make(chan struct{}, 1)}
	s.closing, s.end = context.WithCancel(context.Background())
	if s.cfg.Now == nil {
		s.cfg.Now = time.Now
	}

	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	// With 0, everything that a killed process may have left in the file is synced before it is used.
	if _, err := s.open(0); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}

	// An empty file in the place of one that was removed, or whose disk is not mounted any more, would look like the
	// loss of all rows.
	s.cfg.openFile = existing(s.cfg.openFile)

	// Sync the directory: a file whose name is not on disk is lost.
	if err := syncDir(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("data directory: %w", err), s.Close())
	}

	return s, nil
}

// existing returns an Opener that makes no file.
func existing(open boltfile.Opener) boltfile.Opener {
	if open == nil {
		open = os.OpenFile
	}

	return func(name string, flag int, perm os.FileMode) (*os.File, error) {
		return open(name, flag&^os.O_CREATE, perm)
	}
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}

	return errors.Join(d.Sync(), d.Close())
}

// open opens the file. If the file lacks the transaction with the number failed, it is used as it is. Otherwise the
// file may contain changes that are not on disk, after a failure or the death of a process, and it is used only after a
// successful fsync. open returns the number of the newest transaction.
func (s *Store) open(failed int) (newest int, err error) {
	db, err := boltfile.Open(s.path, s.cfg.openFile, format, buckets, func(db *bbolt.DB) error {
		err := db.View(func(tx *bbolt.Tx) error {
			newest = tx.ID()
			return nil
		})
		// The failed transaction is not there, so all that is there was acknowledged, and is on disk.
		if err != nil || newest < failed {
			return err
		}

		// An empty transaction writes a page and syncs the file, including all earlier pages.
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

// Close waits for the transaction in progress, and closes the file. Later calls fail with rows.ErrUnavailable.
func (s *Store) Close() error {
	s.end()
	defer s.healing.Wait() // runs last, after the turn was given back: heal may be waiting for it

	s.turn <- struct{}{}
	defer s.unlock()

	// Wait for readers here: bbolt would wait for them, too, but would keep admitting new ones.
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

// updateLocked makes a transaction, or abandons it if write returns errNothing. The error is rows.ErrFull if the disk
// is full and nothing was written.
func (s *Store) updateLocked(write func(tx *bbolt.Tx) error) error {
	if err := s.readyLocked(); err != nil {
		return err
	}

	// The number of the transaction shows after a failure whether the file has it.
	var id int
	err := s.db.Update(func(tx *bbolt.Tx) error {
		id = tx.ID()
		return write(tx)
	})
	switch {
	case errors.Is(err, errNothing):
		return nil
	case err != nil:
		return s.outcomeLocked(id, err)
	}

	return nil
}

// Writable returns nil if changes can be written to the file now, or the reason why not.
func (s *Store) Writable() error {
	if err := s.failed.Load(); err != nil {
		return fmt.Errorf("the data directory cannot be written: %w", *err)
	}

	return nil
}

// heal probes the disk until it can be written again or the store is closed.
func (s *Store) heal() {
	for s.failed.Load() != nil {
		select {
		case <-time.After(probeEvery):
		case <-s.closing.Done():
			return
		}

		if err := s.lock(s.closing); err != nil {
			return
		}
		if s.failed.Load() != nil { // another heal may have ended the failure
			s.probeLocked()
		}
		s.unlock()
	}
}

// probeLocked tests whether the file can be written, with room for further transactions.
func (s *Store) probeLocked() {
	key := []byte("probe")
	fill := func(tx *bbolt.Tx) error { return tx.Bucket(boltfile.Meta).Put(key, make([]byte, probeBytes)) }
	if s.updateLocked(fill) != nil {
		return
	}

	// The filler must not take the room that it has shown.
	if s.updateLocked(func(tx *bbolt.Tx) error { return tx.Bucket(boltfile.Meta).Delete(key) }) != nil {
		return
	}

	// A probe that failed on the way may count as made. Then outcomeLocked has begun a new pause.
	if time.Now().Before(s.next) {
		return
	}

	s.failed.Store(nil)
	s.cfg.Log.Info().Msg("counters: the data directory can be written again")
}

// outcomeLocked finds out whether a failed transaction was made, and returns its error if not. After a failure bbolt's
// memory is unreliable, so the file is opened again.
func (s *Store) outcomeLocked(id int, cause error) error {
	s.pauseLocked(cause)
	s.dropLocked()

	// Transactions are numbered consecutively, so the newest number in the file decides.
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

// dropLocked closes the file after a failure.
func (s *Store) dropLocked() {
	s.mu.Lock()
	defer s.mu.Unlock()

	if err := s.db.Close(); err != nil {
		s.cfg.Log.Warn().Err(err).
			Msg("counters: after a failed write the data directory's file could not be closed, either")
	}
	s.db = nil
}

// readyLocked opens the file if necessary.
func (s *Store) readyLocked() error {
	pausing := time.Now().Before(s.next)
	switch {
	case s.closed:
		return unavailable(errClosed)
	case pausing: // failed is set, see probeLocked
		// Each attempt may read the whole file, so while the disk is full there must not be one for each call.
		return refusal(*s.failed.Load())
	case s.db != nil:
		return nil
	}

	if _, err := s.open(0); err != nil {
		s.pauseLocked(err)
		return refusal(err)
	}

	return nil
}

// pauseLocked delays the next transaction after a failure.
func (s *Store) pauseLocked(err error) {
	// Log an outage only once, however many transactions fail in it.
	before := s.failed.Swap(&err)
	if before == nil {
		const refuses = "counters: the data directory cannot be written; changes are refused until it can"
		s.cfg.Log.Error().Err(err).Msg(refuses)
		s.healing.Go(s.heal)
	}

	s.next = time.Now().Add(healWait)
}

// refusal returns the error for changes that were certainly not made. bbolt passes some causes on as text only.
func refusal(failed error) error {
	// EFBIG is a limit of the process or the file system, which has the same effect as a full disk.
	isFull := func(full syscall.Errno) bool { return strings.Contains(failed.Error(), full.Error()) }
	if isFull(syscall.ENOSPC) || isFull(syscall.EDQUOT) || isFull(syscall.EFBIG) {
		return fmt.Errorf("rowsfile: %w: %w", rows.ErrFull, failed)
	}

	return unavailable(failed)
}

// view reads committed data. Slices that read gets are valid until it returns.
func (s *Store) view(ctx context.Context, read func(tx *bbolt.Tx) error) error {
	if err := s.reopen(ctx); err != nil {
		return err
	}

	// If a transaction fails in the meantime, it closes the file only after this read.
	s.mu.RLock()
	defer s.mu.RUnlock()

	// Close, or another failure, has come since.
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

	return s.readyLocked()
}
