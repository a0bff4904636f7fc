package redisstore

import (
	"context"
	"encoding/base64"
	"fmt"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
	"headcount/redisconn"
	"headcount/scripts"
)

// A claim says that PostgreSQL decides an operation under an identity of a batch. Redis remembers identities of what
// it decides itself, so without claims two different batches under one identity, at the same moment, could both be
// made: each by the store that does not know of the other. What Redis decides waits until a claim ends; what
// PostgreSQL decides does not, since PostgreSQL knows its own.

// decidedWithin is how long after a claim PostgreSQL may still commit: it ends statements after 10 s and transactions
// that do nothing after 5 s.
const decidedWithin = 30 * time.Second

// claimError says that an operation has to wait for PostgreSQL: its own error, and no other's that goes with it.
type claimError struct{ identity counter.Identity }

func (*claimError) Error() string {
	return "PostgreSQL decides another batch under the same Idempotency-Key, or is yet to say whether it has; try again, or use a new key"
}

func (*claimError) Unwrap() error { return counter.ErrUnavailable }

func claimKey(b int, id counter.Identity) string {
	return tag(b) + "k:" + base64.RawURLEncoding.EncodeToString(id[:])
}

// Claim notes for identities of batches that PostgreSQL is about to decide under them; who is a name of the caller's
// for this claim. known: one of them is remembered here, so its operation is a replay.
func (s *Store) Claim(ctx context.Context, ids []counter.Identity, who string) (known bool, err error) {
	calls := make([]*redisconn.Call, len(ids))
	for i, id := range ids {
		b := identityBucket(id)
		calls[i] = &redisconn.Call{
			Script: scripts.CounterClaim, Keys: []string{identityKey(b, id), claimKey(b, id)},
			Args: []any{who, counter.IdentityKept.Milliseconds()},
		}
	}
	if err := s.conn.Run(ctx, calls); err != nil {
		return false, err
	}
	for _, cl := range calls {
		n, _ := cl.Reply.(int64)
		known = known || n == 1
	}
	return known, nil
}

// EndClaim ends what who claimed, after Note, or when nothing was made.
func (s *Store) EndClaim(ctx context.Context, ids []counter.Identity, who string) error {
	return s.pipeline(ctx, len(ids), func(ctx context.Context, pipe redis.Pipeliner) func() error {
		for _, id := range ids {
			pipe.HDel(ctx, claimKey(identityBucket(id), id), who)
		}
		return func() error { return nil }
	})
}

// finishClaim ends the claims of an identity that their processes left: PostgreSQL knows whether an operation was made,
// once it cannot be on its way any more. Until then its error is a claimError.
func (s *Store) finishClaim(ctx context.Context, l lock) error {
	raw, err := base64.RawURLEncoding.DecodeString(l.id)
	var id counter.Identity
	if copy(id[:], raw); err != nil || len(raw) != len(id) {
		return fmt.Errorf("%w: %w", counter.ErrUnavailable, errReply)
	}
	if s.cfg.Decisions == nil {
		return errUndecided
	}
	known, err := s.cfg.Decisions.Known(ctx, []counter.Identity{id})
	if err == nil && len(known) > 0 {
		err = s.Note(ctx, known, nil, 0)
	}
	switch {
	case err != nil:
		return err
	case len(known) == 0 && l.age < decidedWithin:
		return &claimError{id}
	}
	key := claimKey(identityBucket(id), id)
	return s.conn.Do(ctx, func(ctx context.Context, c *redisconn.Client) error {
		s.conn.Metrics.Commands.Inc()
		claims, err := c.HGetAll(ctx, key).Result()
		if err != nil {
			return err
		}
		var over []string
		for who, text := range claims {
			if since, err := strconv.ParseInt(text, 10, 64); err != nil || len(known) > 0 || l.now.Sub(time.UnixMilli(since)) >= decidedWithin {
				over = append(over, who)
			}
		}
		if len(over) == 0 {
			return nil
		}
		s.conn.Metrics.Commands.Inc()
		return c.HDel(ctx, key, over...).Err()
	})
}
