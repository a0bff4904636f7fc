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
	"headcount/internal/webhook"
)

// The file has a bucket meta, with format -> 1, and a bucket for each hook with these:
//
//	told   bucket: subject -> the state last reported
//	queue  bucket: number of an event, in order -> the event
//	sealed key -> how many of the oldest events are the sealed batch
var (
	reportedBucket = []byte("told")
	queueBucket    = []byte("queue")
	sealedKey      = []byte("sealed")

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
	sealed   int      // how many of the oldest events are the sealed batch
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

func (s *Store) load(tx *bbolt.Tx, hooks []*webhook.Hook) error {
	var gone [][]byte
	err := tx.ForEach(func(name []byte, _ *bbolt.Bucket) error {
		if !bytes.Equal(name, boltfile.Meta) && !slices.ContainsFunc(hooks, func(h *webhook.Hook) bool { return h.ID == string(name) }) {
			gone = append(gone, bytes.Clone(name))
		}
		return nil
	})
	for _, name := range gone {
		err = errors.Join(err, tx.DeleteBucket(name))
	}
	for _, h := range hooks {
		if err != nil {
			return err
		}
		var of *bbolt.Bucket
		if of, err = tx.CreateBucketIfNotExists([]byte(h.ID)); err == nil {
			err = s.state(h.ID).load(of)
		}
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
	if n := of.Get(sealedKey); len(n) == 8 {
		b.sealed = int(binary.BigEndian.Uint64(n))
	}
	return errors.Join(
		reported.ForEach(func(k, v []byte) error { b.reported[string(k)] = string(v); return nil }),
		queue.ForEach(func(k, v []byte) error {
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
	if s.db == nil {
		return nil
	}
	return s.db.Close()
}

// state returns the data of a hook. The caller holds mu, or has not shared s yet.
func (s *Store) state(hook string) *hookState {
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
	var undo []func() // in order
	var puts []put
	for i := range changes {
		c := &changes[i]
		b := s.state(c.Hook)
		if b.reported[c.Subject] != c.Was || c.Was == c.Is {
			reported = append(reported, b.reported[c.Subject])
			continue
		}
		queue, first, sealed := b.queue, b.first, b.sealed
		undo = append(undo, func() {
			b.set(c.Subject, c.Was)
			b.queue, b.first, b.sealed = queue, first, sealed
		})
		b.set(c.Subject, c.Is)
		puts = append(puts, put{c.Hook, reportedBucket, []byte(c.Subject), []byte(c.Is)})
		if c.Event != "" {
			puts = append(puts, put{c.Hook, queueBucket, number(b.first + uint64(len(b.queue))), []byte(c.Event)})
			b.queue = append(b.queue, c.Event)
		}
		reported = append(reported, c.Is)
		if len(b.queue) > webhook.MaxQueue {
			n := max(b.sealed, 1) // a sealed batch is dropped as a whole
			dropped += n
			puts = b.drop(c.Hook, n, puts)
		}
	}
	if err := s.write(puts); err != nil {
		for _, step := range slices.Backward(undo) {
			step()
		}
		return nil, 0, err
	}
	return reported, dropped, nil
}

func (b *hookState) set(subject, reported string) {
	if reported == "" {
		delete(b.reported, subject)
	} else {
		b.reported[subject] = reported
	}
}

// drop removes the oldest n events.
func (b *hookState) drop(hook string, n int, puts []put) []put {
	for i := range n {
		puts = append(puts, put{hook, queueBucket, number(b.first + uint64(i)), nil})
	}
	b.queue, b.first, b.sealed = b.queue[n:], b.first+uint64(n), 0
	return append(puts, put{hook, nil, sealedKey, nil})
}

// Reported implements webhook.Store.
func (s *Store) Reported(_ context.Context, hook string) (map[string]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.state(hook).reported), nil
}

// Take implements webhook.Store.
func (s *Store) Take(_ context.Context, hook string) (events []string, waiting int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.state(hook)
	if b.sealed == 0 && len(b.queue) > 0 {
		n := min(len(b.queue), webhook.MaxBatch)
		if err := s.write([]put{{hook, nil, sealedKey, number(uint64(n))}}); err != nil {
			return nil, 0, err
		}
		b.sealed = n
	}
	return slices.Clone(b.queue[:b.sealed]), len(b.queue), nil
}

// Acknowledge implements webhook.Store.
func (s *Store) Acknowledge(_ context.Context, hook, first string, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.state(hook)
	if b.sealed == 0 || b.queue[0] != first {
		return nil
	}
	was := *b
	if err := s.write(b.drop(hook, min(n, b.sealed), nil)); err != nil {
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
	if s.db == nil || len(puts) == 0 {
		return nil
	}
	err := s.db.Update(func(tx *bbolt.Tx) error {
		for _, p := range puts {
			b := tx.Bucket([]byte(p.hook))
			if p.bucket != nil {
				b = b.Bucket(p.bucket)
			}
			err := error(nil)
			if len(p.value) == 0 {
				err = b.Delete(p.key)
			} else {
				err = b.Put(p.key, p.value)
			}
			if err != nil {
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
