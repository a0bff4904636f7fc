// Package webhookmem is the webhook.Store of one process: in memory, and with a data directory also
// in a file there. A step is in the file before its call returns.
package webhookmem

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"

	"go.etcd.io/bbolt"

	"headcount/internal/boltfile"
	"headcount/webhook"
)

// The file has a bucket meta, with format -> 1, and a bucket for each hook with these:
//
//	told   bucket: subject -> the state last reported
//	queue  bucket: number of an event, in order -> the event
//	sealed key -> how many of the oldest events are the frozen batch
var (
	reportedBucket = []byte("told")
	queueBucket    = []byte("queue")
	frozenKey      = []byte("sealed")

	format = []byte("1")
)

const fileName = "webhooks.db"

// Store is a webhook.Store. Its methods may be called from any goroutine.
type Store struct {
	db *bbolt.DB // nil: there is no directory

	mu    sync.Mutex // guards hooks; held while a step is written
	hooks map[string]*hookState
}

// hookState is the data of one hook.
type hookState struct {
	reported map[string]string
	queue    []string // oldest first, at most webhook.MaxQueue
	first    uint64   // number of queue[0]
	frozen   int      // how many of the oldest events are the frozen batch
}

var _ webhook.Store = (*Store)(nil)

// New returns a Store in memory.
func New() *Store { return &Store{hooks: map[string]*hookState{}} }

// Open returns a Store whose file is in a directory. It deletes the data of other hooks.
func Open(dir string, hooks []*webhook.Hook) (*Store, error) {
	s := New()

	var err error
	s.db, err = boltfile.Open(filepath.Join(dir, fileName), nil, format, nil, func(db *bbolt.DB) error {
		return db.Update(func(tx *bbolt.Tx) error { return s.load(tx, hooks) })
	})
	if err != nil {
		return nil, err
	}

	return s, nil
}

// load reads the data of hooks, and deletes that of others.
func (s *Store) load(tx *bbolt.Tx, hooks []*webhook.Hook) error {
	if err := deleteOthers(tx, hooks); err != nil {
		return err
	}

	for _, h := range hooks {
		of, err := tx.CreateBucketIfNotExists([]byte(h.ID))
		if err != nil {
			return err
		}
		if err := s.stateLocked(h.ID).load(of); err != nil {
			return err
		}
	}

	return nil
}

func deleteOthers(tx *bbolt.Tx, hooks []*webhook.Hook) error {
	// A hook that is not set up any more would keep its events for ever.
	stay := map[string]bool{string(boltfile.Meta): true}
	for _, h := range hooks {
		stay[h.ID] = true
	}

	var gone [][]byte // a bucket must not be deleted while they are listed
	err := tx.ForEach(func(name []byte, _ *bbolt.Bucket) error {
		if !stay[string(name)] {
			gone = append(gone, bytes.Clone(name))
		}
		return nil
	})
	for _, name := range gone {
		err = errors.Join(err, tx.DeleteBucket(name))
	}

	return err
}

func (b *hookState) load(of *bbolt.Bucket) error {
	reported, err := of.CreateBucketIfNotExists(reportedBucket)
	if err != nil {
		return err
	}
	queue, err := of.CreateBucketIfNotExists(queueBucket)
	if err != nil {
		return err
	}

	if n := of.Get(frozenKey); len(n) == 8 {
		b.frozen = int(binary.BigEndian.Uint64(n))
	}

	return errors.Join(
		reported.ForEach(func(k, v []byte) error { b.reported[string(k)] = string(v); return nil }),
		queue.ForEach(func(k, v []byte) error {
			// Keys are in the order of their numbers.
			if len(b.queue) == 0 {
				b.first = binary.BigEndian.Uint64(k)
			}
			b.queue = append(b.queue, string(v))
			return nil
		}),
	)
}

// Close closes the file.
func (s *Store) Close() error {
	// In memory there is nothing to close.
	if s.db == nil {
		return nil
	}

	return s.db.Close()
}

// stateLocked returns the data of a hook. Open calls it without the lock, since nobody else has s yet.
func (s *Store) stateLocked(hook string) *hookState {
	b := s.hooks[hook]
	if b == nil {
		b = &hookState{reported: map[string]string{}}
		s.hooks[hook] = b
	}

	return b
}

// Report implements webhook.Store.
func (s *Store) Report(_ context.Context, changes []webhook.Change) (reported []string, dropped int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	var d draft
	for i := range changes {
		c := &changes[i]
		b := s.stateLocked(c.Hook)
		// Otherwise c only asks for the state, or another change was faster.
		if c.Was != c.Is && b.reported[c.Subject] == c.Was {
			dropped += d.change(b, c)
		}
		reported = append(reported, b.reported[c.Subject])
	}

	// One transaction for all changes, so that a failure leaves none of them.
	if err := s.write(d.puts); err != nil {
		d.undoAll()
		return nil, 0, err
	}

	return reported, dropped, nil
}

// draft is what a step has changed in memory, before it is in the file.
type draft struct {
	puts []put
	undo []func() // in order
}

// change makes a change of a hook, and returns how many of the oldest events it has dropped.
func (d *draft) change(b *hookState, c *webhook.Change) (dropped int) {
	was := *b
	// was has the queue with its former length, so what is appended does not count after an undo.
	d.undo = append(d.undo, func() {
		*b = was
		b.set(c.Subject, c.Was)
	})

	b.set(c.Subject, c.Is)
	d.puts = append(d.puts, put{c.Hook, reportedBucket, []byte(c.Subject), []byte(c.Is)})
	if c.Event != "" {
		d.puts = append(d.puts, put{c.Hook, queueBucket, number(b.first + uint64(len(b.queue))), []byte(c.Event)})
		b.queue = append(b.queue, c.Event)
	}
	if len(b.queue) <= webhook.MaxQueue {
		return 0
	}

	dropped = max(b.frozen, 1) // a frozen batch is dropped as a whole
	d.puts = append(d.puts, b.drop(c.Hook, dropped)...)

	return dropped
}

// undoAll restores in memory what the file has.
func (d *draft) undoAll() {
	// Backward, because two of the changes may concern one subject.
	for _, undo := range slices.Backward(d.undo) {
		undo()
	}
}

func (b *hookState) set(subject, reported string) {
	if reported == "" {
		delete(b.reported, subject)
	} else {
		b.reported[subject] = reported
	}
}

// drop removes the oldest n events, and returns what the file has to change for that.
func (b *hookState) drop(hook string, n int) (puts []put) {
	for i := range n {
		puts = append(puts, put{hook, queueBucket, number(b.first + uint64(i)), nil})
	}
	// Without its first events there is no frozen batch any more.
	puts = append(puts, put{hook, nil, frozenKey, nil})

	b.queue = b.queue[n:]
	b.first += uint64(n)
	b.frozen = 0

	return puts
}

// Reported implements webhook.Store.
func (s *Store) Reported(_ context.Context, hook string) (map[string]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// The caller reads it without the lock.
	return maps.Clone(s.stateLocked(hook).reported), nil
}

// Take implements webhook.Store.
func (s *Store) Take(_ context.Context, hook string) (events []string, waiting int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	b := s.stateLocked(hook)
	if b.frozen == 0 && len(b.queue) > 0 {
		n := min(len(b.queue), webhook.MaxBatch)
		// Before anybody gets the batch: after a restart it has to be the same one.
		if err := s.write([]put{{hook, nil, frozenKey, number(uint64(n))}}); err != nil {
			return nil, 0, err
		}
		b.frozen = n
	}

	return slices.Clone(b.queue[:b.frozen]), len(b.queue), nil
}

// Acknowledge implements webhook.Store.
func (s *Store) Acknowledge(_ context.Context, hook, first string, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	b := s.stateLocked(hook)
	// The batch is acknowledged already, or was dropped while it was sent.
	if b.frozen == 0 || b.queue[0] != first {
		return nil
	}

	was := *b
	if err := s.write(b.drop(hook, min(n, b.frozen))); err != nil {
		// The step fails as a whole: the next Take returns the same batch.
		*b = was
		return err
	}

	return nil
}

// put sets or deletes one entry of the file, in a bucket of the hook or, if bucket is nil, in
// the hook's own bucket.
type put struct {
	hook       string
	bucket     []byte
	key, value []byte // empty value: delete
}

func number(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func (s *Store) write(puts []put) error {
	// A step that changes nothing costs no sync of the disk.
	if s.db == nil || len(puts) == 0 {
		return nil
	}

	err := s.db.Update(func(tx *bbolt.Tx) error {
		for i := range puts {
			if err := puts[i].in(tx); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("%w: %w", webhook.ErrUnavailable, err)
	}

	return nil
}

// in makes the put in a transaction.
func (p *put) in(tx *bbolt.Tx) error {
	b := tx.Bucket([]byte(p.hook))
	if p.bucket != nil {
		b = b.Bucket(p.bucket)
	}
	if len(p.value) == 0 {
		return b.Delete(p.key)
	}

	return b.Put(p.key, p.value)
}
