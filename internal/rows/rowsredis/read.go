package rowsredis

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/redis/go-redis/v9"

	"headcount/internal/rows"
)

// read is one command: the rows of one collection.
type read struct {
	key    string
	fields []string
	places []int // indexes of the rows in the result
	cmd    *redis.SliceCmd
}

// readsOf returns the commands for addresses.
func (s *Store) readsOf(addresses []rows.Address) []*read {
	type place struct {
		partition  int
		collection string
	}

	var all []*read
	at := map[place]*read{}
	for i := range addresses {
		address := &addresses[i]
		// One command for each collection, however many of its rows are asked for.
		where := place{address.Partition, address.Collection}
		one := at[where]
		if one == nil {
			one = &read{key: s.collectionKey(address.Partition, address.Collection)}
			at[where] = one
			all = append(all, one)
		}

		one.fields = append(one.fields, address.Field)
		one.places = append(one.places, i)
	}

	return all
}

// Read implements rows.Store.
func (s *Store) Read(ctx context.Context, addresses []rows.Address) []rows.Found {
	found := make([]rows.Found, len(addresses))
	reads := s.readsOf(addresses)
	if len(reads) == 0 {
		return found
	}

	err := s.reads.Do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		for _, one := range reads {
			one.cmd = pipe.HMGet(ctx, one.key, one.fields...)
		}
		s.reads.Metrics.Commands.Add(float64(len(reads)))

		_, err := pipe.Exec(ctx)
		if slices.ContainsFunc(reads, func(one *read) bool { return one.err() == nil }) {
			return nil // Redis works, even if some of its masters may not
		}
		return cmp.Or(err, errNoReply)
	})

	for _, one := range reads {
		one.finish(err, found)
	}

	return found
}

var errNoReply = errors.New("redis: no reply")

// err returns the error of a command that was sent. If a connection is refused, go-redis may set no error. And if the
// time is over before go-redis retries one master of a Cluster, it sets that master's error for all commands of the
// pipeline, including those with a reply. So a reply takes precedence over an error.
func (r *read) err() error {
	if len(r.cmd.Val()) == len(r.fields) {
		return nil
	}

	return cmp.Or(r.cmd.Err(), errNoReply)
}

// finish sets the rows of a read, or their errors. Failed is the error of the whole call.
func (r *read) finish(failed error, found []rows.Found) {
	if failed == nil && r.err() != nil {
		failed = classify(r.err())
	}
	if failed != nil {
		for _, i := range r.places {
			found[i].Err = failed
		}
		return
	}

	// A row that does not exist keeps the value nil.
	for n, value := range r.cmd.Val() {
		if text, ok := value.(string); ok {
			found[r.places[n]].Value = []byte(text)
		}
	}
}

// Scan implements rows.Store. Each sees every row that exists during the whole call, and perhaps others. All rows of
// the collection are held in memory during the call, because a hash has no order.
func (s *Store) Scan(
	ctx context.Context, partition int, collection, after string, each func(field string, value []byte) error,
) error {
	key := s.collectionKey(partition, collection)
	pairs, err := s.pairs(ctx, key)
	if err != nil {
		return err
	}

	// HSCAN has no order, so it also returns the fields up to after.
	pairs = slices.DeleteFunc(pairs, func(p pair) bool { return p.field <= after })
	slices.SortFunc(pairs, func(a, b pair) int { return cmp.Compare(a.field, b.field) })

	// A hash that grows during the scan may return a field twice.
	pairs = slices.CompactFunc(pairs, func(a, b pair) bool { return a.field == b.field })

	for _, p := range pairs {
		if err := each(p.field, []byte(p.value)); err != nil {
			return err
		}
	}

	return nil
}

type pair struct{ field, value string }

// pairs returns all fields of a hash and their values.
func (s *Store) pairs(ctx context.Context, key string) ([]pair, error) {
	for {
		// A cursor is valid only on the server that returned it, not even on its replica. If another server answered in
		// between, the result lacks fields.
		runs := s.conn.Marks.Runs()
		pairs, err := s.scan(ctx, key)
		if err != nil || runs == s.conn.Marks.Runs() {
			return pairs, err
		}
	}
}

// scanCount is roughly the number of fields that one command returns. Redis is blocked for that long.
const scanCount = 1000

func (s *Store) scan(ctx context.Context, key string) (pairs []pair, err error) {
	for cursor := uint64(0); ; {
		// Use a call for each page, so that others can use the connection in between.
		var page []string
		err := s.reads.Do(ctx, func(ctx context.Context, c *client) (err error) {
			s.reads.Metrics.Commands.Inc()
			page, cursor, err = c.HScan(ctx, key, cursor, "", scanCount).Result()
			return err
		})
		if err != nil {
			return nil, err
		}

		for ; len(page) > 1; page = page[2:] {
			pairs = append(pairs, pair{page[0], page[1]})
		}
		if cursor == 0 {
			return pairs, nil
		}
	}
}
