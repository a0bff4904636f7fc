package rowsfile

import (
	"bytes"
	"context"

	"go.etcd.io/bbolt"

	"headcount/internal/rows"
)

// scanAtOnce is how many rows one transaction reads. A longer transaction would keep outdated pages from being reused,
// and a transaction that extends the file would have to wait for it.
const scanAtOnce = 256

// Read implements rows.Store.
func (s *Store) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	err := s.view(ctx, func(tx *bbolt.Tx) error {
		all := tx.Bucket(rowsBucket)
		for i, at := range addresses {
			// bbolt's memory is valid only during the transaction.
			found[i].Value = bytes.Clone(all.Get(rowKey(at.Partition, at.Name)))
		}
		return nil
	})
	if err != nil {
		return rows.Unread(len(addresses), err)
	}

	return found
}

// Scan implements rows.Store. Each may call the store.
func (s *Store) Scan(ctx context.Context, at int, collection, after string, each func(string, []byte) error) error {
	part := func(after string) ([]rows.Row, error) { return s.scan(ctx, at, collection, after) }

	return rows.ScanInParts(after, scanAtOnce, part, each)
}

// scan returns the first rows of a collection whose fields are greater than after.
func (s *Store) scan(ctx context.Context, at int, collection, after string) ([]rows.Row, error) {
	var some []rows.Row
	prefix := collectionKey(at, collection)
	// Capacity is cut, so that the append leaves the prefix alone.
	start := append(prefix[:len(prefix):len(prefix)], after...)

	err := s.view(ctx, func(tx *bbolt.Tx) error {
		// Seek returns the first key that is not smaller, which may be after itself.
		c := tx.Bucket(rowsBucket).Cursor()
		key, value := c.Seek(start)
		if bytes.Equal(key, start) {
			key, value = c.Next()
		}

		for len(some) < scanAtOnce && bytes.HasPrefix(key, prefix) {
			name := rows.Name{Collection: collection, Field: string(key[len(prefix):])}
			some = append(some, rows.Row{Name: name, Value: bytes.Clone(value)})
			key, value = c.Next()
		}
		return nil
	})

	return some, err
}

// Watch implements rows.Store. It has no gaps. A committing caller calls received, which must not block.
func (s *Store) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) error {
	s.watches.Watch(ctx, received, missed)

	return nil
}
