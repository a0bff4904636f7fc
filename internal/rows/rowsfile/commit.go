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

// Buckets of the file. Numbers are big-endian.
//
//	meta       format -> "2"
//	partitions 1 byte: partition -> 8 bytes: epoch, 8 bytes: number, the owner's name
//	rows       see rowKey -> value
//	ids        1 byte: partition, 16 bytes: ID -> 8 bytes: unix ms when it expires
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

// Commit implements rows.Store. When ctx ends, commits that are still queued are not made. A transaction in progress
// cannot be stopped, so Commit waits for it.
func (s *Store) Commit(ctx context.Context, commits []rows.Commit) []error {
	one := &request{commits: commits, errs: make([]error, len(commits)), done: make(chan struct{})}
	// Queue the request before asking for the turn, so that whoever has the turn may write it.
	s.queue.Lock()
	s.queued = append(s.queued, one)
	s.queue.Unlock()

	// The caller that gets the turn writes all queued commits, so most callers find theirs written.
	select {
	case <-one.done:
	case s.turn <- struct{}{}:
		s.writeQueuedLocked()
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

// withdraw removes a request from the queue. It reports whether the request was still there.
func (s *Store) withdraw(one *request) bool {
	s.queue.Lock()
	defer s.queue.Unlock()

	before := len(s.queued)
	s.queued = slices.DeleteFunc(s.queued, func(other *request) bool { return other == one })

	return len(s.queued) < before
}

// writeQueuedLocked makes all queued commits in one transaction, and publishes them.
func (s *Store) writeQueuedLocked() {
	s.queue.Lock()
	group := s.queued
	s.queued = nil
	s.queue.Unlock()
	if len(group) == 0 {
		return
	}

	var all []*rows.Commit // the commits that the transaction makes
	err := s.updateLocked(func(tx *bbolt.Tx) error {
		made, err := writeAll(tx, group)
		all = made
		return err
	})

	// Publish while holding the turn, because publications must be in the order of commits.
	if err == nil {
		for _, c := range all {
			s.watches.Publish(c)
		}
	}

	for _, one := range group {
		// Refusals were judged within the transaction, so without it they say nothing either.
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

	// In the order of arrival, since a commit may follow another one of the same group.
	for _, one := range group {
		for i := range one.commits {
			one.errs[i] = t.commit(&one.commits[i])
		}
	}

	// Refusals and repetitions change nothing, and need no fsync.
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
	fault error // the first failed write, after which the transaction is abandoned
}

func (t *transaction) check(err error) { t.fault = cmp.Or(t.fault, err) }

// commit makes a commit except for its rows, unless it is refused or was made before.
func (t *transaction) commit(c *rows.Commit) error {
	partition := []byte{byte(c.Partition)}
	ownership := parseOwnership(t.partitions.Get(partition))
	if err := ownership.Refuses(c); err != nil || ownership.Has(c) {
		return err
	}

	// Deleting more than are added is the only bound on the number of IDs.
	t.forgetIDs(c.At, 2*len(c.IDs)+1)

	until := func(id rows.ID) time.Time { return parseTime(t.ids.Get(idKey(c.Partition, id))) }
	if err := c.Remembered(until); err != nil {
		return err
	}

	for _, id := range c.IDs {
		t.remember(c.Partition, id)
	}
	ownership.Number = c.Number
	// Later commits of this group read the number from here.
	t.check(t.partitions.Put(partition, appendOwnership(nil, ownership)))
	t.made = append(t.made, c)

	return nil
}

func (t *transaction) remember(partition int, id rows.ID) {
	// The first entry is found by the ID, the second by the time.
	key := idKey(partition, id)
	ends := appendTime(nil, id.Until)
	t.check(t.ids.Put(key, ends))
	t.check(t.forget.Put(append(ends[:8:8], key...), nil))
}

// forgetIDs deletes at most n expired IDs.
func (t *transaction) forgetIDs(now time.Time, n int) {
	oldest := t.forget.Cursor()
	// First again after each deletion, because a deletion moves bbolt's cursor.
	for range n {
		key, _ := oldest.First()
		if key == nil || parseTime(key).After(now) {
			return
		}

		// An ID that was used again has a later expiry, and another entry in forget.
		if bytes.Equal(t.ids.Get(key[8:]), key[:8]) {
			t.check(t.ids.Delete(key[8:]))
		}
		t.check(oldest.Delete())
	}
}

// putRows writes the rows of all commits. If several commits have the same row, the last one wins.
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

	// Write in the order of keys, because neighbours share pages of the file.
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

	// If a claim is made but its answer is lost, that is harmless: the owner's next claim gets a greater epoch.
	claims := make([]rows.Claim, len(partitions))
	err := s.updateLocked(func(tx *bbolt.Tx) error {
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

// collectionKey is the prefix of the keys of all rows of a collection: 2 bytes: length of the name, the name, 1 byte:
// partition. The name precedes the partition because commits keep writing rows of the same small collections, such as
// the answers to calls. This way the rows of all partitions share pages.
func collectionKey(partition int, collection string) []byte {
	key := make([]byte, 0, 64)
	key = binary.BigEndian.AppendUint16(key, uint16(len(collection)))
	key = append(key, collection...)

	return append(key, byte(partition))
}

// rowKey returns the key of a row. Within a collection, keys sort like the fields.
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
