package rowsredis

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"headcount/internal/rows"
)

// Owners returns who has the newest claim of each partition, as it was named to Claim; empty: nobody has ever claimed
// it.
func (s *Store) Owners(ctx context.Context) ([]string, error) {
	owners := make([]string, rows.Partitions)
	err := s.reads.Do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		replies := make([]*redis.StringCmd, rows.Partitions)
		for p := range replies {
			replies[p] = pipe.HGet(ctx, s.ownerKey(p), "owner")
		}
		s.reads.Metrics.Commands.Add(rows.Partitions)
		// Each reply has an error of its own; that of the pipeline is the first one, which may be a missing key's.
		_, _ = pipe.Exec(ctx)

		for p, reply := range replies {
			err := reply.Err()
			if err != nil && !errors.Is(err, redis.Nil) {
				return err
			}
			owners[p] = reply.Val()
		}

		return nil
	})
	if err != nil {
		return nil, err
	}

	return owners, nil
}
