// Package rowsmem is a store of rows in memory, for the lifetime of the process.
package rowsmem

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/rows"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Now func() time.Time // default time.Now; for tests
}

// Store is a rows.Store in memory. All methods may be called from any goroutine.
type Store struct {
	now        func() time.Time
	partitions [rows.Partitions]partition
	watches    rows.Watches
}

var _ rows.Store = (*Store)(nil)

// partition has the rows of one partition.
type partition struct {
	mu          sync.Mutex // guards the fields below
	ownership   rows.Ownership
	collections map[string]*collection // none of them is empty
	// last is the row that was looked up last, because a row is often written just after it was read.
	last     *value
	lastName rows.Name
	// ids are deleted after they expire. Each commit examines more of them than it can add, which is the only bound on
	// their number.
	ids    map[[16]byte]time.Time
	oldest []rows.ID // the same IDs in the order of insertion, unless the clock went back
}

// collection has values by field. They are pointers, so that a new value need not change the map: its existing key
// stays in use, while the field of a commit may be a part of a larger buffer.
type collection struct {
	values map[string]*value
	size   int // estimate of the memory, in bytes
}

type value struct{ bytes []byte }

// sizeOf estimates the memory of a row.
func sizeOf(field string, value []byte) int { return len(field) + len(value) + 100 }

// New returns an empty Store.
func New(cfg Config) *Store {
	s := &Store{now: cfg.Now}
	if s.now == nil {
		s.now = time.Now
	}

	for i := range s.partitions {
		p := &s.partitions[i]
		p.collections = map[string]*collection{}
		p.ids = map[[16]byte]time.Time{}
	}

	return s
}

// Claim implements rows.Store.
func (s *Store) Claim(_ context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	claims := make([]rows.Claim, len(partitions))
	for i, former := range partitions {
		p := &s.partitions[former.Partition]
		p.mu.Lock()
		claims[i] = p.ownership.Claim(owner, former.Epoch, s.now())
		p.mu.Unlock()
	}

	return claims, nil
}

// made is the shared result of commits without errors.
var made [rows.Partitions]error

// Commit implements rows.Store. No error is ErrUnavailable or ErrFull.
func (s *Store) Commit(_ context.Context, commits []rows.Commit) []error {
	// Callers must not modify the result, so most get the same slice.
	errs := made[:len(commits):len(commits)]
	own := false
	for i := range commits {
		err := s.commit(&commits[i])
		if err == nil {
			continue
		}

		if !own {
			errs = make([]error, len(commits))
			own = true
		}
		errs[i] = err
	}

	return errs
}

func (s *Store) commit(c *rows.Commit) error {
	p := &s.partitions[c.Partition]
	p.mu.Lock()
	defer p.mu.Unlock()

	if err := p.ownership.Refuses(c); err != nil || p.ownership.Has(c) {
		return err
	}

	// Some expired IDs may be left, which does no harm, because Remembered compares their times.
	p.forgetLocked(c.At, 2*len(c.IDs)+1)
	if err := c.Remembered(func(id rows.ID) time.Time { return p.ids[id.Bytes] }); err != nil {
		return err
	}

	p.ownership.Number = c.Number
	for _, id := range c.IDs {
		p.ids[id.Bytes] = id.Until
		p.oldest = append(p.oldest, id)
	}
	for i := range c.Rows {
		p.putLocked(&c.Rows[i])
	}

	// Publish while holding the partition's lock, because publications must be in the order of commits.
	s.watches.Publish(c)

	return nil
}

// forgetLocked examines at most n IDs, and deletes those that have expired.
func (p *partition) forgetLocked(now time.Time, n int) {
	for ; n > 0 && len(p.oldest) > 0; n-- {
		oldest, newest := p.oldest[0], p.oldest[len(p.oldest)-1]
		// It was used while the clock was ahead, and must not keep those behind it until then.
		if oldest.Until.After(newest.Until) {
			p.oldest = append(p.oldest[1:], oldest)
			continue
		}
		if oldest.Until.After(now) {
			return
		}

		p.oldest = p.oldest[1:]

		// An expired ID may have been used again, and then its expiry is later.
		if !p.ids[oldest.Bytes].After(now) {
			delete(p.ids, oldest.Bytes)
		}
	}
}

// findLocked returns the named row, or nil.
func (p *partition) findLocked(name rows.Name) *value {
	if p.last == nil || p.lastName != name {
		p.last = nil
		p.lastName = name
		if of := p.collections[name.Collection]; of != nil {
			p.last = of.values[name.Field]
		}
	}

	return p.last
}

func (p *partition) putLocked(row *rows.Row) {
	// The owner has usually read the row just before, so findLocked finds it in last.
	is := p.findLocked(row.Name)
	switch {
	case row.Value == nil:
		p.removeLocked(row.Name)
	case is != nil:
		p.collections[row.Collection].size += len(row.Value) - len(is.bytes)
		is.bytes = row.Value
	default:
		p.addLocked(row)
	}
}

// addLocked adds a row that does not exist yet.
func (p *partition) addLocked(row *rows.Row) {
	of := p.collections[row.Collection]
	if of == nil {
		of = &collection{values: map[string]*value{}}
		// Names may be parts of a request's buffer, which must not be kept alive.
		p.collections[strings.Clone(row.Collection)] = of
	}
	of.values[strings.Clone(row.Field)] = &value{row.Value}
	of.size += sizeOf(row.Field, row.Value)
}

func (p *partition) removeLocked(name rows.Name) {
	// The row that last points to may be the one that goes.
	p.last = nil
	of := p.collections[name.Collection]
	if of == nil || of.values[name.Field] == nil {
		return
	}

	of.size -= sizeOf(name.Field, of.values[name.Field].bytes)
	delete(of.values, name.Field)
	// Collections come and go, so an empty one must not stay.
	if len(of.values) == 0 {
		delete(p.collections, name.Collection)
	}
}

// Read implements rows.Store.
func (s *Store) Read(_ context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	for i, at := range addresses {
		found[i].Value = s.partitions[at.Partition].read(at.Name)
	}

	return found
}

func (p *partition) read(name rows.Name) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()

	is := p.findLocked(name)
	if is == nil {
		return nil
	}

	return is.bytes
}

// Get returns the value of a row, nil if there is none. It never blocks, so a caller that needs single rows need not
// gather them for a Read.
func (s *Store) Get(partition int, name rows.Name) []byte { return s.partitions[partition].read(name) }

// Size returns an estimate of the memory of a collection, in bytes.
func (s *Store) Size(partition int, collection string) int {
	p := &s.partitions[partition]
	p.mu.Lock()
	defer p.mu.Unlock()

	of := p.collections[collection]
	if of == nil {
		return 0
	}

	return of.size
}

// Scan implements rows.Store. Each sees the rows as of one moment.
func (s *Store) Scan(_ context.Context, at int, collection, after string, each func(string, []byte) error) error {
	// These are copies, so each may call the store.
	for _, row := range s.partitions[at].after(collection, after) {
		if err := each(row.Field, row.Value); err != nil {
			return err
		}
	}

	return nil
}

// after returns a copy of the rows of a collection whose fields are greater than after, in their order.
func (p *partition) after(collection, after string) []rows.Row {
	var found []rows.Row
	// A copy, so that the lock is free while the caller looks at the rows.
	p.mu.Lock()
	if of := p.collections[collection]; of != nil {
		found = make([]rows.Row, 0, len(of.values))
		for field, is := range of.values {
			if field > after {
				found = append(found, rows.Row{Name: rows.Name{Collection: collection, Field: field}, Value: is.bytes})
			}
		}
	}
	p.mu.Unlock()

	slices.SortFunc(found, func(a, b rows.Row) int { return cmp.Compare(a.Field, b.Field) })

	return found
}

// Watch implements rows.Store. It has no gaps. The publishing owner calls received, which must not block.
func (s *Store) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) error {
	s.watches.Watch(ctx, received, missed)

	return nil
}
