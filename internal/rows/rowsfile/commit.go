package rowsfile

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"headcount/internal/rows"
)

// What the file has. Numbers are big-endian.
//
//	meta       format -> "2"
//	partitions 1 byte: partition -> 8 bytes: epoch, 8 bytes: number, the owner's name
//	rows       see rowKey -> value
//	ids        1 byte: partition, 16 bytes: ID -> 8 bytes: unix ms when it is forgotten
//	forget     8 bytes: unix ms, 1 byte: partition, 16 bytes: ID -> nothing
var (
	partitionsBucket = []byte("partitions")
	rowsBucket       = []byte("rows")
	idsBucket        = []byte("ids")
	forgetBucket     = []byte("forget")

	buckets = [][]byte{partitionsBucket, rowsBucket, idsBucket, forgetBucket}
	format  = []byte("2")
)

// request is one call of Commit.
type request struct {
	commits []rows.Commit
	errs    []error       // in the order of commits, set before done is closed
	done    chan struct{} // closed with the outcome
}

// Commit implements rows.Store. When ctx ends, commits that are not under way are not made. What is being written
// cannot be called back: it is waited for.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	one := &request{commits: commits, errs: make([]error, len(commits)), done: make(chan struct{})}
	s.queue.Lock()
	s.queued = append(s.queued, one)
	s.queue.Unlock()

	// Whoever gets the turn writes what all have queued, so most callers find theirs written.
	select {
	case <-one.done:
	case s.turn <- struct{}{}:
		s.writeQueued()
		s.unlock()
	case <-ctx.Done():
		if s.withdraw(one) {
			fail(one.errs, unavailable(context.Cause(ctx)))
			return one.errs
		}
		<-one.done
	}

	return one.errs
}

// withdraw takes a request out of the queue. It reports whether the request was still there.
func (s *Store) withdraw(one *request) bool {
	s.queue.Lock()
	defer s.queue.Unlock()

	before := len(s.queued)
	s.queued = slices.DeleteFunc(s.queued, func(other *request) bool { return other == one })

	return len(s.queued) < before
}

// writeQueued makes all commits that are queued in one transaction, and publishes them. The caller has the turn.
func (s *Store) writeQueued() {
	s.queue.Lock()
	group := s.queued
	s.queued = nil
	s.queue.Unlock()
	if len(group) == 0 {
		return
	}

	var all []*rows.Commit // that are made, if the transaction is
	err := s.update(func(tx *bbolt.Tx) error {
		made, err := writeAll(tx, group)
		all = made
		return err
	})

	// Before the turn ends, because publications come in the order of commits.
	if err == nil {
		for _, c := range all {
			s.watches.Publish(c)
		}
	}

	for _, one := range group {
		if err != nil {
			fail(one.errs, err)
		}
		close(one.done)
	}
}

func fail(errs []error, err error) {
	for i := range errs {
		errs[i] = err
	}
}

// writeAll makes the commits of a group, and returns those that it made. The error is errNothing if there are none.
func writeAll(tx *bbolt.Tx, group []*request) ([]*rows.Commit, error) {
	t := &transaction{
		partitions: tx.Bucket(partitionsBucket),
		rows:       tx.Bucket(rowsBucket),
		ids:        tx.Bucket(idsBucket),
		forget:     tx.Bucket(forgetBucket),
	}

	for _, one := range group {
		for i := range one.commits {
			one.errs[i] = t.commit(&one.commits[i])
		}
	}

	// Refusals and repetitions need no fsync.
	if t.fault == nil && len(t.made) == 0 {
		return nil, errNothing
	}
	t.putRows()

	return t.made, t.fault
}

// transaction makes commits.
type transaction struct {
	partitions, rows, ids, forget *bbolt.Bucket

	made  []*rows.Commit
	fault error // the first one of a write; the transaction is given up then
}

func (t *transaction) check(err error) { t.fault = cmp.Or(t.fault, err) }

// commit makes a commit, apart from its rows, unless it is refused or made already.
func (t *transaction) commit(c *rows.Commit) error {
	partition := []byte{byte(c.Partition)}
	ownership := parseOwnership(t.partitions.Get(partition))
	if err := ownership.Refuses(c); err != nil || ownership.Has(c) {
		return err
	}

	// It forgets more than it adds, so the number of IDs has no other bound.
	t.forgetIDs(c.At, 2*len(c.IDs)+1)

	until := func(id rows.ID) time.Time { return parseTime(t.ids.Get(idKey(c.Partition, id))) }
	if err := c.Remembered(until); err != nil {
		return err
	}

	for _, id := range c.IDs {
		t.remember(c.Partition, id)
	}
	ownership.Number = c.Number
	t.check(t.partitions.Put(partition, appendOwnership(nil, ownership)))
	t.made = append(t.made, c)

	return nil
}

func (t *transaction) remember(partition int, id rows.ID) {
	// The one finds it by its name, the other by its time.
	key := idKey(partition, id)
	ends := appendTime(nil, id.Until)
	t.check(t.ids.Put(key, ends))
	t.check(t.forget.Put(append(ends[:8:8], key...), nil))
}

// forgetIDs forgets at most n IDs whose time has come.
func (t *transaction) forgetIDs(now time.Time, n int) {
	oldest := t.forget.Cursor()
	for range n {
		key, _ := oldest.First()
		if key == nil || parseTime(key).After(now) {
			return
		}

		// An ID that was used again has a later time, and another row in forget.
		if bytes.Equal(t.ids.Get(key[8:]), key[:8]) {
			t.check(t.ids.Delete(key[8:]))
		}
		t.check(oldest.Delete())
	}
}

// putRows writes the rows of all commits. Of a row that several of them have, the last one counts.
func (t *transaction) putRows() {
	type keyed struct {
		key   []byte
		value []byte
	}
	var all []keyed
	for _, c := range t.made {
		for _, row := range c.Rows {
			all = append(all, keyed{rowKey(c.Partition, row.Name), row.Value})
		}
	}

	// Neighbours share pages of the file.
	slices.SortStableFunc(all, func(a, b keyed) int { return bytes.Compare(a.key, b.key) })
	for _, row := range all {
		if row.value == nil {
			t.check(t.rows.Delete(row.key))
		} else {
			t.check(t.rows.Put(row.key, row.value))
		}
	}
}

// Claim implements rows.Store.
func (s *Store) Claim(ctx context.Context, owner string, partitions []rows.Former) ([]rows.Claim, error) {
	if err := s.lock(ctx); err != nil {
		return nil, err
	}
	defer s.unlock()

	// A claim that is made although its answer was lost is harmless: the next one of the same owner is greater.
	claims := make([]rows.Claim, len(partitions))
	err := s.update(func(tx *bbolt.Tx) error {
		all := tx.Bucket(partitionsBucket)
		for i, former := range partitions {
			partition := []byte{byte(former.Partition)}
			ownership := parseOwnership(all.Get(partition))
			claims[i] = ownership.Claim(owner, former.Epoch, s.cfg.Now())
			if err := all.Put(partition, appendOwnership(nil, ownership)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, unavailable(err)
	}

	return claims, nil
}

func parseOwnership(b []byte) (o rows.Ownership) {
	if b != nil {
		o.Epoch = binary.BigEndian.Uint64(b)
		o.Number = binary.BigEndian.Uint64(b[8:])
		o.Owner = string(b[16:])
	}

	return o
}

func appendOwnership(b []byte, o rows.Ownership) []byte {
	b = binary.BigEndian.AppendUint64(b, o.Epoch)
	b = binary.BigEndian.AppendUint64(b, o.Number)

	return append(b, o.Owner...)
}

// collectionKey begins the keys of all rows of a collection: 2 bytes: length of its name, its name, 1 byte: partition.
// The collection comes first because commits write rows of the same small collections again and again, such as the
// answers to calls. Those of all partitions share a page then.
func collectionKey(partition int, collection string) []byte {
	key := make([]byte, 0, 64)
	key = binary.BigEndian.AppendUint16(key, uint16(len(collection)))
	key = append(key, collection...)

	return append(key, byte(partition))
}

// rowKey sorts as the field within a collection.
func rowKey(partition int, name rows.Name) []byte {
	return append(collectionKey(partition, name.Collection), name.Field...)
}

func idKey(partition int, id rows.ID) []byte { return append([]byte{byte(partition)}, id.Bytes[:]...) }

func appendTime(b []byte, t time.Time) []byte {
	return binary.BigEndian.AppendUint64(b, uint64(t.UnixMilli()))
}

func parseTime(b []byte) (t time.Time) {
	if len(b) >= 8 {
		t = time.UnixMilli(int64(binary.BigEndian.Uint64(b)))
	}

	return t
}
