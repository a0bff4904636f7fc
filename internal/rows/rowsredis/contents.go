package rowsredis

import (
	"context"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/internal/rows"
)

// Contents returns the names of all collections of a partition, and the IDs that it remembers. It goes through all keys of
// the partition's master, so it is for what is seldom done. What is made or deleted meanwhile may be missing.
func (s *Store) Contents(ctx context.Context, partition int) (collections []string, ids []rows.ID, err error) {
	prefix := s.tags[partition]
	seen := map[string]bool{} // a cursor may return a key twice
	for cursor := uint64(0); ; {
		// A call of its own for each page: between two of them others have the connection.
		var keys []string
		err := s.reads.Do(ctx, func(ctx context.Context, c *client) (err error) {
			master, err := masterOf(ctx, c, prefix)
			if err != nil {
				return err
			}
			s.reads.Metrics.Commands.Inc()
			keys, cursor, err = master.Scan(ctx, cursor, pattern(prefix), scanCount).Result()
			return err
		})
		if err != nil {
			return nil, nil, err
		}

		for _, key := range keys {
			name, isCollection := strings.CutPrefix(key, prefix+"r:")
			id, isID := strings.CutPrefix(key, prefix+"i:")
			switch {
			case seen[key]:
			case isCollection:
				collections = append(collections, name)
			case isID && len(id) == len(rows.ID{}.Bytes):
				ids = append(ids, rows.ID{Bytes: [16]byte([]byte(id))})
			}
			seen[key] = true
		}
		if cursor == 0 {
			break
		}
	}

	ids, err = s.until(ctx, partition, ids)

	return collections, ids, err
}

// masterOf returns the server that has the keys of a partition.
func masterOf(ctx context.Context, c *client, prefix string) (redis.Cmdable, error) {
	if c.Cluster != nil {
		return c.Cluster.MasterForKey(ctx, prefix)
	}

	return c.UniversalClient, nil
}

// pattern returns a pattern of keys with a prefix.
func pattern(prefix string) string {
	return strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(prefix) + "*"
}

// until returns those of ids that are still remembered, with the time until which they are.
func (s *Store) until(ctx context.Context, partition int, ids []rows.ID) (known []rows.ID, err error) {
	for ; len(ids) > 0; ids = ids[min(scanCount, len(ids)):] {
		some := ids[:min(scanCount, len(ids))]
		keys := make([]string, len(some))
		for i := range some {
			keys[i] = s.idKey(partition, &some[i])
		}

		var values []any
		err := s.reads.Do(ctx, func(ctx context.Context, c *client) (err error) {
			s.reads.Metrics.Commands.Inc()
			values, err = c.MGet(ctx, keys...).Result()
			return err
		})
		if err != nil {
			return nil, err
		}

		for i, value := range values {
			if value == nil {
				continue // forgotten meanwhile
			}
			ms, err := s.number(partition, "time of an ID", value)
			if err != nil {
				return nil, err
			}
			known = append(known, rows.ID{Bytes: some[i].Bytes, Until: time.UnixMilli(int64(ms))})
		}
	}

	return known, nil
}
