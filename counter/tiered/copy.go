package tiered

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
	"headcount/internal/outage"
)

const (
	settleEvery = 20 * time.Millisecond
	settleMost  = time.Minute
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

var (
	errAlone  = errors.New("PostgreSQL does not have the counters of this Redis; leave --postgres out, or start a server with both, which carries them over")
	errNobody = errors.New("Redis has changes that are not in PostgreSQL, and no server runs that persists them; start one with both for a moment")
)

// persistAll returns when all buckets are good and PostgreSQL has every change from before the call.
func (s *Store) persistAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleMost)
	defer cancel()
	if s.cfg.ReadOnly {
		unmarked, err := s.redis.Unmarked(ctx)
		if unmarked {
			err = errAlone
		}
		if err != nil {
			return err
		}
	}
	var first []counterredis.Bucket
	waits := func(b counterredis.Bucket) bool {
		return !b.Good && !s.cfg.ReadOnly || !b.Since.IsZero() && !b.Since.After(first[b.Number].Now)
	}
	for {
		all, err := s.redis.Status(ctx)
		if err == nil {
			if first == nil {
				first = all
			}
			if !slices.ContainsFunc(all, waits) {
				return nil
			}
		}
		if err := s.urge(ctx); err != nil {
			return err
		}
		if !outage.Sleep(ctx, settleEvery) {
			return errors.Join(fmt.Errorf("%w: what is in Redis could not be persisted", counter.ErrUnavailable), err, ctx.Err())
		}
	}
}

// urge makes the worker persist soon. A read-only store has no worker, so urge fails unless a server is running.
func (s *Store) urge(ctx context.Context) error {
	if s.cfg.ReadOnly {
		running, err := s.redis.Leases(ctx)
		if err == nil && len(running) == 0 {
			err = errNobody
		}
		return err
	}
	if err := s.Ready(); err != nil && !errors.Is(err, errCarrying) {
		return err
	}
	s.hurry()
	return nil
}

// Deleted implements counter.Dumper.
func (s *Store) Deleted(ctx context.Context) (uint64, error) {
	if err := s.persistAll(ctx); err != nil {
		return 0, err
	}
	return s.pg.Deleted(ctx)
}

// Dump implements counter.Dumper: PostgreSQL has everything, once Redis is persisted.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	if err := s.persistAll(ctx); err != nil {
		return err
	}
	return s.pg.Dump(ctx, after, each)
}

// Restore implements counter.Restorer. It writes to PostgreSQL, and evicts the counters of copies from Redis before, so
// that the next call loads what was restored. Nobody else may use the store meanwhile.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	keys := make([]string, len(copies))
	for i := range copies {
		keys[i] = copies[i].Key
	}
	if err := s.persistAll(ctx); err != nil {
		return 0, err
	}
	if err := s.redis.Leave(ctx, keys); err != nil {
		return 0, err
	}
	return s.pg.Restore(ctx, copies, rules)
}

// RestoreDeleted implements counter.Restorer.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	if err := s.pg.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}
	return s.redis.NoteDeleted(ctx, deleted)
}

// Leases returns the leases of the processes that use the Redis.
func (s *Store) Leases(ctx context.Context) ([]string, error) { return s.redis.Leases(ctx) }
