package rowsredis

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/rows"
)

// Contents calls each with names of collections and remembered IDs of a partition. Together the calls cover all
// partitions, in any order, perhaps repeatedly. It iterates over all keys of each master, so it is only for rare tasks.
// Collections and IDs that are created or deleted during the call may be missing. If a server restarts or is replaced
// meanwhile, the error is rows.ErrUnavailable.
func (s *Store) Contents(
	ctx context.Context, each func(partition int, collections []string, ids []rows.ID) error,
) error {
	masters, err := s.masters(ctx)
	if err != nil {
		return err
	}

	runs := s.conn.Marks.Runs()
	for _, master := range masters {
		cursor := uint64(0)
		for more := true; more; more = cursor != 0 {
			// Use a call for each page, so that others can use the connection in between.
			var keys []string
			err := s.reads.Do(ctx, func(ctx context.Context, _ *client) (err error) {
				s.reads.Metrics.Commands.Inc()
				keys, cursor, err = master.Scan(ctx, cursor, rowsPattern, scanCount).Result()
				return err
			})
			if err == nil {
				err = s.eachOf(ctx, keys, each)
			}
			if err != nil {
				return err
			}
		}
	}

	// A cursor is valid only on the server that returned it, see pairs. Callers rely on each key being among the calls.
	if runs != s.conn.Marks.Runs() {
		return fmt.Errorf("redis: %w: another server answered while its keys were listed", rows.ErrUnavailable)
	}

	return nil
}

// rowsPattern matches all keys of partitions, whose tags begin with r, and those of inboxes.
const rowsPattern = "hc:{r*"

// masters returns the servers that have partitions.
func (s *Store) masters(ctx context.Context) (masters []redis.Cmdable, err error) {
	err = s.reads.Do(ctx, func(ctx context.Context, c *client) error {
		masters = []redis.Cmdable{c.UniversalClient}
		if c.Cluster == nil {
			return nil
		}

		masters = nil
		for _, tag := range s.tags {
			master, err := c.Cluster.MasterForKey(ctx, tag)
			if err != nil {
				return err
			}
			if !slices.Contains(masters, redis.Cmdable(master)) {
				masters = append(masters, master)
			}
		}

		return nil
	})

	return masters, err
}

// contents are the collections and IDs of one partition within a page of keys.
type contents struct {
	collections []string
	ids         []rows.ID
}

// eachOf calls each with the collections and IDs to which the keys belong.
func (s *Store) eachOf(ctx context.Context, keys []string, each func(int, []string, []rows.ID) error) error {
	found := map[int]*contents{}
	for _, key := range keys {
		partition, rest, ok := s.cutTag(key)
		if !ok {
			continue
		}
		if found[partition] == nil {
			found[partition] = &contents{}
		}
		of := found[partition]

		name, isCollection := strings.CutPrefix(rest, "r:")
		id, isID := strings.CutPrefix(rest, "i:")
		isID = isID && len(id) == len(rows.ID{}.Bytes)
		switch {
		case isCollection:
			of.collections = append(of.collections, name)
		case isID:
			of.ids = append(of.ids, rows.ID{Bytes: [16]byte([]byte(id))})
		}
	}

	if err := s.readUntil(ctx, found); err != nil {
		return err
	}
	for partition, of := range found {
		if err := each(partition, of.collections, of.ids); err != nil {
			return err
		}
	}

	return nil
}

// cutTag returns the partition of a key, and the rest of the key after the partition's tag.
func (s *Store) cutTag(key string) (partition int, rest string, ok bool) {
	for partition, tag := range s.tags {
		if rest, ok := strings.CutPrefix(key, tag); ok {
			return partition, rest, true
		}
	}

	return 0, "", false
}

// readUntil reads the expiry times of IDs, and removes IDs that have expired in the meantime.
func (s *Store) readUntil(ctx context.Context, found map[int]*contents) error {
	replies := map[int]*redis.SliceCmd{}
	err := s.reads.Do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		for partition, of := range found {
			if len(of.ids) == 0 {
				continue
			}
			keys := make([]string, len(of.ids))
			for i := range keys {
				keys[i] = s.idKey(partition, &of.ids[i])
			}
			replies[partition] = pipe.MGet(ctx, keys...)
		}
		s.reads.Metrics.Commands.Add(float64(len(replies)))
		if len(replies) == 0 {
			return nil
		}
		_, err := pipe.Exec(ctx)

		return err
	})
	if err != nil {
		return err
	}

	for partition, reply := range replies {
		of := found[partition]
		remembered := of.ids[:0]
		for i, value := range reply.Val() {
			if value == nil {
				continue
			}
			ms, err := s.number(partition, "time of an ID", value)
			if err != nil {
				return err
			}
			remembered = append(remembered, rows.ID{Bytes: of.ids[i].Bytes, Until: time.UnixMilli(int64(ms))})
		}
		of.ids = remembered
	}

	return nil
}
