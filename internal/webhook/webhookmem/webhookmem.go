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

// What the file holds: a bucket meta, with format -> 1, and a bucket for each hook, of these.
//
//	told   subject -> what was told last
//	queue  number of an event, in order -> the event
//	sealed one entry: how many of the oldest events are a batch that is under way
var (
	toldBucket  = []byte("told")
	queueBucket = []byte("queue")
	sealedKey   = []byte("sealed")

	format = []byte("1")
)

const fileName = "webhooks.db"

// Store is a webhook.Store. Its methods may be called from any goroutine.
type Store struct {
	db *bbolt.DB // nil: there is no directory

	mu    sync.Mutex // guards boxes, and is held while a step is written
	boxes map[string]*box
}

// box is what is kept of one hook.
type box struct {
	told   map[string]string
	queue  []string // oldest first, at most webhook.MaxQueue
	first  uint64   // number of the first of queue
	sealed int      // of queue
}

var _ webhook.Store = (*Store)(nil)

// New returns a Store in memory.
func New() *Store { return &Store{boxes: map[string]*box{}} }

// Open returns a Store whose file is in a directory. What it has of other hooks than these goes.
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
			err = s.box(h.ID).load(of)
		}
	}
	return err
}

func (b *box) load(of *bbolt.Bucket) error {
	told, err := of.CreateBucketIfNotExists(toldBucket)
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
		told.ForEach(func(k, v []byte) error { b.told[string(k)] = string(v); return nil }),
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

// box is that of a hook. It is called with mu, or before anybody else has s.
func (s *Store) box(hook string) *box {
	b := s.boxes[hook]
	if b == nil {
		b = &box{told: map[string]string{}}
		s.boxes[hook] = b
	}
	return b
}

// Tell is as webhook.Store says.
func (s *Store) Tell(_ context.Context, changes []webhook.Change) (told []string, dropped int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var undo []func() // in order
	var puts []put
	for i := range changes {
		c := &changes[i]
		b := s.box(c.Hook)
		if b.told[c.Subject] != c.Was || c.Was == c.Is {
			told = append(told, b.told[c.Subject])
			continue
		}
		queue, first, sealed := b.queue, b.first, b.sealed
		undo = append(undo, func() {
			b.set(c.Subject, c.Was)
			b.queue, b.first, b.sealed = queue, first, sealed
		})
		b.set(c.Subject, c.Is)
		puts = append(puts, put{c.Hook, toldBucket, []byte(c.Subject), []byte(c.Is)})
		if c.Event != "" {
			puts = append(puts, put{c.Hook, queueBucket, number(b.first + uint64(len(b.queue))), []byte(c.Event)})
			b.queue = append(b.queue, c.Event)
		}
		told = append(told, c.Is)
		if len(b.queue) > webhook.MaxQueue {
			n := max(b.sealed, 1) // a batch goes as a whole
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
	return told, dropped, nil
}

func (b *box) set(subject, told string) {
	if told == "" {
		delete(b.told, subject)
	} else {
		b.told[subject] = told
	}
}

// drop removes the oldest n events.
func (b *box) drop(hook string, n int, puts []put) []put {
	for i := range n {
		puts = append(puts, put{hook, queueBucket, number(b.first + uint64(i)), nil})
	}
	b.queue, b.first, b.sealed = b.queue[n:], b.first+uint64(n), 0
	return append(puts, put{hook, nil, sealedKey, nil})
}

// Told is as webhook.Store says.
func (s *Store) Told(_ context.Context, hook string) (map[string]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.box(hook).told), nil
}

// Take is as webhook.Store says.
func (s *Store) Take(_ context.Context, hook string) (events []string, waiting int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.box(hook)
	if b.sealed == 0 && len(b.queue) > 0 {
		n := min(len(b.queue), webhook.MaxBatch)
		if err := s.write([]put{{hook, nil, sealedKey, number(uint64(n))}}); err != nil {
			return nil, 0, err
		}
		b.sealed = n
	}
	return slices.Clone(b.queue[:b.sealed]), len(b.queue), nil
}

// Done is as webhook.Store says.
func (s *Store) Done(_ context.Context, hook, first string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.box(hook)
	if b.sealed == 0 || b.queue[0] != first {
		return nil
	}
	was := *b
	if err := s.write(b.drop(hook, b.sealed, nil)); err != nil {
		*b = was
		return err
	}
	return nil
}

// put sets or deletes one entry of the file: of a bucket of a hook's, or of the hook's itself.
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
