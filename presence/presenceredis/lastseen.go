package presenceredis

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/presence"
)

// seenMember returns a user as a member of seenKey.
func seenMember(u presence.User) []byte { return binary.BigEndian.AppendUint64(nil, uint64(u)) }

// appendDepartures appends the departures of one batch to the arguments of members.lua.
func (s *Store) appendDepartures(args []any, departures []presence.Departure) []any {
	// The bound of the whole store, shared among the partitions and rounded up.
	perPartition := (s.cfg.MaxLastSeen + s.cfg.Partitions - 1) / s.cfg.Partitions

	// The oldest time to keep is by the clock of this process, as the departures are.
	args = append(args, int(s.cfg.LastSeen.Seconds()), time.Now().Add(-s.cfg.LastSeen).Unix(), perPartition)
	for _, d := range departures {
		args = append(args, d.At.Unix(), seenMember(d.User))
	}

	return args
}

var _ presence.LastSeen = (*Store)(nil)

// LastSeen implements presence.LastSeen, with one command for each user.
func (s *Store) LastSeen(ctx context.Context, users []presence.User) ([]time.Time, error) {
	times := make([]time.Time, len(users))
	oldest := time.Now().Add(-s.cfg.LastSeen).Unix()

	err := s.do(ctx, func(ctx context.Context, c *client) error {
		pipe := c.Pipeline()
		answers := make([]*redis.FloatCmd, len(users))
		for i, u := range users {
			answers[i] = pipe.ZScore(ctx, s.at().seenKey(u.Partition(s.cfg.Partitions)), string(seenMember(u)))
		}
		s.conn.Metrics.Commands.Add(float64(len(users)))

		if _, err := pipe.Exec(ctx); err != nil && !errors.Is(err, redis.Nil) {
			return err
		}

		for i, a := range answers {
			if err := a.Err(); err != nil && !errors.Is(err, redis.Nil) {
				return err
			}

			// Redis drops old departures only while new ones are written, so their age is checked here as well.
			if at := int64(a.Val()); at >= oldest { // 0: not remembered
				times[i] = time.Unix(at, 0)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("presenceredis: when users were last here: %w", err)
	}

	return times, nil
}

// ForgetSeen implements presence.LastSeen.
func (s *Store) ForgetSeen(ctx context.Context, u presence.User) error {
	err := s.do(ctx, func(ctx context.Context, c *client) error {
		s.conn.Metrics.Commands.Inc()
		return c.ZRem(ctx, s.at().seenKey(u.Partition(s.cfg.Partitions)), seenMember(u)).Err()
	})
	if err != nil {
		return fmt.Errorf("presenceredis: forget when a user was last here: %w", err)
	}

	return nil
}
