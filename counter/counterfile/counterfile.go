// Package counterfile keeps counters in one file of a data directory.
//
// The file is read on demand: a counter that nobody asks for costs no memory
// but what the kernel likes to cache. All operations that come together are one
// transaction; one transaction is written at a time. What is acknowledged is
// on disk.
//
// When a transaction fails (a full disk, a disk that is gone) nothing of it is
// told to anybody: the file is opened anew, which shows what is in it and
// nothing else. Whether the failed transaction is in it is unknown to its
// callers; they repeat it under the same idempotency keys.
package counterfile

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/rs/zerolog"
	"go.etcd.io/bbolt"

	"headcount/counter"
	"headcount/internal/boltfile"
)

// File is the name of the file in the data directory.
const File = "counters.db"

// What the file holds. Numbers are big-endian.
//
//	meta      format -> "1"; deleted -> 8 bytes: the highest incarnation ever deleted
//	counters  key -> see record; its sequence numbers sets and ledgers
//	members   8 bytes: set, member -> nothing
//	registers 8 bytes: set -> registers, see package hyperloglog
//	ledgers   8 bytes: ledger, 8 bytes: seq -> see appendEntry
//	gains     8 bytes: history, 4 bytes: seconds of a step, 8 bytes: its number -> 8 bytes: gained in it; of a
//	          unique registers
//	counted   8 bytes: history, 1 byte: length of a dimension's name, the name, a value -> 8 bytes: what was
//	          counted under it; without a value all that are not kept, and 8 bytes: how many are
//	kept      8 bytes: history, 4 bytes: seconds of a step -> 8 bytes: how long gains are kept, seconds,
//	          8 bytes: when somebody looks for those to forget, unix seconds
//	due       8 bytes: unix seconds, 8 bytes: history, 4 bytes: seconds of a step -> nothing
//	marks     2 bytes: length of a match, the match, 8 bytes: number of a step, key -> nothing
//	tops      2 bytes: length of a match, the match, 4 bytes: seconds of a step, 8 bytes: its number -> JSON: what
//	          gained most
//	ids       16 bytes: idempotency key -> 8 bytes: unix seconds when it is forgotten
//	forget    8 bytes: unix seconds, 16 bytes: idempotency key -> nothing
//	garbage   8 bytes: a set, ledger or history that is no counter's any more -> nothing
//	limits    algorithm, 8 bytes: window in ms, key -> its state, as package limit writes it
//	limitends 8 bytes: unix ms when somebody looks whether it has ended, key in limits -> nothing
var (
	countersBucket  = []byte("counters")
	membersBucket   = []byte("members")
	registersBucket = []byte("registers")
	ledgersBucket   = []byte("ledgers")
	gainsBucket     = []byte("gains")
	countedBucket   = []byte("counted")
	keptBucket      = []byte("kept")
	dueBucket       = []byte("due")
	marksBucket     = []byte("marks")
	topsBucket      = []byte("tops")
	idsBucket       = []byte("ids")
	forgetBucket    = []byte("forget")
	garbageBucket   = []byte("garbage")
	limitsBucket    = []byte("limits")
	limitEndsBucket = []byte("limitends")

	buckets = [][]byte{
		countersBucket, membersBucket, registersBucket, ledgersBucket, gainsBucket, countedBucket, keptBucket, dueBucket, marksBucket, topsBucket, idsBucket, forgetBucket,
		garbageBucket, limitsBucket, limitEndsBucket,
	}

	deletedKey = []byte("deleted")
	format     = []byte("1")
)

const (
	healWait = 100 * time.Millisecond // after a transaction that failed, until the next is tried
	calm     = 5 * time.Second        // without one that failed, until the file counts as mended: on a full disk small ones still fit
	// What a transaction clears away beside its own work: so much at most, and
	// more than operations can bring, so that it stays ahead of them.
	forgetPerOp     = 2
	forgetAtMost    = 4096
	garbageAtOnce   = 512
	entriesPerEntry = 4
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Log zerolog.Logger
	Now func() time.Time // default time.Now; tests put another

	openFile func(name string, flag int, perm os.FileMode) (*os.File, error) // tests put one that fails
}

// Store is a counter.Store in a file. All methods may be called from any goroutine.
type Store struct {
	path string
	cfg  Config
	hub  counter.Hub

	write  sync.Mutex // held by the one transaction under way; guards failed and next
	failed bool       // a transaction, not long ago; it was logged
	next   time.Time  // before it no transaction is tried

	mu     sync.RWMutex // guards db and closed; taken after write, held while db is read
	db     *bbolt.DB    // nil: the file could not be opened again
	closed bool
}

var _ counter.Store = (*Store)(nil)

// Open opens the file in dir, and makes both when there are none.
func Open(dir string, cfg Config) (*Store, error) {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	s := &Store{path: filepath.Join(dir, File), cfg: cfg}
	var err error
	if s.db, err = s.open(); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if err := syncDir(dir); err != nil { // a file whose name is lost is lost
		return nil, errors.Join(fmt.Errorf("data directory: %w", err), s.db.Close())
	}
	return s, nil
}

// Holds reports whether the file in dir has counters. It makes no file.
func Holds(dir string) (holds bool, err error) {
	if _, err := os.Stat(filepath.Join(dir, File)); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	s, err := Open(dir, Config{})
	if err != nil {
		return false, err
	}
	err = s.db.View(func(tx *bbolt.Tx) error {
		key, _ := tx.Bucket(countersBucket).Cursor().First()
		holds = key != nil
		return nil
	})
	return holds, errors.Join(err, s.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (s *Store) open() (*bbolt.DB, error) {
	return boltfile.Open(s.path, s.cfg.openFile, format, buckets, func(*bbolt.DB) error { return nil })
}

// Close waits for the transaction under way and closes the file.
func (s *Store) Close() error {
	s.write.Lock()
	defer s.write.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	db := s.db
	s.db = nil
	if db == nil {
		return nil
	}
	return db.Close()
}

// Apply implements counter.Writer: one transaction. It waits for the disk,
// whatever becomes of ctx: what is being written is not called back.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	s.write.Lock() // watchers are told before the next transaction
	defer s.write.Unlock()
	var t *step
	results := make([]counter.Result, len(ops))
	err := s.transact(ctx, "apply", func(tx *bbolt.Tx) error {
		t = s.begin(tx)
		for i := range ops {
			results[i] = counter.Judge(t, &ops[i], t.now)
		}
		return t.end(len(ops))
	})
	if err != nil {
		for i := range results {
			results[i] = counter.Result{Err: err}
		}
		return results
	}
	s.hub.Publish(t.told, func(key string) counter.Counter { return t.records[key].Counter(key) })
	return results
}

var (
	errClosed  = errors.New("it is closed")
	errPause   = errors.New("the file could not be written a moment ago")
	errNothing = errors.New("nothing is to be written")
)

// update makes a transaction. One that ends with errNothing is given up, and nothing is wrong.
func (s *Store) update(ctx context.Context, what string, transaction func(tx *bbolt.Tx) error) error {
	s.write.Lock()
	defer s.write.Unlock()
	return s.transact(ctx, what, transaction)
}

// transact is update, with write held.
func (s *Store) transact(ctx context.Context, what string, transaction func(tx *bbolt.Tx) error) error {
	err := context.Cause(ctx) // while it waited for others
	if err == nil {
		err = s.ready()
	}
	if err != nil {
		return unavailable(what, err)
	}
	switch err := s.db.Update(transaction); {
	case errors.Is(err, errNothing):
		return nil
	case err != nil:
		s.fail(err)
		return unavailable(what, err)
	}
	if s.failed && time.Since(s.next) >= calm {
		s.cfg.Log.Info().Msg("counters: the data directory can be written again")
		s.failed = false
	}
	return nil
}

// ready opens the file again when that is due. It is called with write.
func (s *Store) ready() error {
	switch {
	case s.closed:
		return errClosed
	case time.Now().Before(s.next):
		return errPause
	case s.db != nil:
		return nil
	}
	db, err := s.open()
	if err != nil {
		s.next = time.Now().Add(healWait)
		return err
	}
	s.mu.Lock()
	s.db = db
	s.mu.Unlock()
	return nil
}

// fail is called with write after a transaction failed. A page that says which
// transaction holds may be half written by now, so the file is opened anew: it
// tells by checksums what holds.
func (s *Store) fail(err error) {
	if !s.failed {
		s.cfg.Log.Error().Err(err).Msg("counters: the data directory cannot be written; changes are refused until it can")
	}
	s.failed, s.next = true, time.Now().Add(healWait)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.db.Close(); err != nil {
		s.cfg.Log.Warn().Err(err).Msg("counters: closing a file that could not be written")
	}
	if s.db, err = s.open(); err != nil {
		s.db = nil
		s.cfg.Log.Error().Err(err).Msg("counters: the data directory cannot be read")
	}
}

func unavailable(what string, err error) error {
	return fmt.Errorf("counterfile: %s: %w: %w", what, counter.ErrUnavailable, err)
}

// view reads what is on disk.
func (s *Store) view(what string, read func(tx *bbolt.Tx) error) error {
	s.mu.RLock()
	if s.db == nil && !s.closed {
		s.mu.RUnlock()
		s.write.Lock()
		err := s.ready()
		s.write.Unlock()
		if err != nil {
			return unavailable(what, err)
		}
		s.mu.RLock()
	}
	defer s.mu.RUnlock()
	err := errClosed
	if s.db != nil {
		err = s.db.View(read)
	}
	var refused *counter.Conflict
	if err != nil && !errors.As(err, &refused) {
		return unavailable(what, err)
	}
	return err
}

// Watch implements counter.Feed.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return s.hub.Watch(told, lost)
}
