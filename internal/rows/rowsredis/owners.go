package rowsredis

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"headcount/internal/rows"
)

// Owners returns the owner of each partition by its newest claim, as it was named to Claim; empty: the partition was
// never claimed.
func (s *Store) Owners(ctx context.Context) ([]string, error) {
	owners := make([]string, rows.Partitions)
	err := s.reads.Do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		replies := make([]*redis.StringCmd, rows.Partitions)
		for p := range replies {
			replies[p] = pipe.HGet(ctx, s.ownerKey(p), "owner")
		}
		s.reads.Metrics.Commands.Add(rows.Partitions)
		// Each reply has its own error. That of the pipeline is the first one, which may only be about a missing key.
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
