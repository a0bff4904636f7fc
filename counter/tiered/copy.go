package tiered

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
)

const (
	settleEvery = 20 * time.Millisecond
	settleMost  = time.Minute
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// persistAll returns when Redis is good, and PostgreSQL has everything that was changed before the call.
func (s *Store) persistAll(ctx context.Context) error {
	if s.cfg.ReadOnly {
		return s.persisted(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, settleMost)
	defer cancel()
	var first []counterredis.Bucket
	for {
		if err := s.Ready(); err != nil && !errors.Is(err, errCarrying) {
			return err
		}
		all, err := s.redis.Status(ctx)
		if err == nil {
			if first == nil {
				first = all
			}
			if !slices.ContainsFunc(all, func(b counterredis.Bucket) bool { return !b.Good || waits(b, first) }) {
				return nil
			}
		}
		s.hurry()
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%w: what is in Redis could not be persisted", counter.ErrUnavailable), err, ctx.Err())
		case <-time.After(settleEvery):
		}
	}
}

// waits reports whether b has changes that are not persisted from before first was read.
func waits(b counterredis.Bucket, first []counterredis.Bucket) bool {
	return !b.Since.IsZero() && !b.Since.After(first[b.Number].Now)
}

var (
	errAlone  = errors.New("PostgreSQL does not have the counters of this Redis; leave --postgres out, or start a server with both, which carries them over")
	errNobody = errors.New("Redis has changes that are not in PostgreSQL, and no server runs that persists them; start one with both for a moment")
)

// persisted returns when servers have persisted everything that was changed before.
func (s *Store) persisted(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleMost)
	defer cancel()
	unmarked, err := s.redis.Unmarked(ctx)
	if err != nil {
		return err
	}
	if unmarked {
		return errAlone
	}
	first, err := s.redis.Status(ctx)
	for all := first; err == nil; all, err = s.redis.Status(ctx) {
		if !slices.ContainsFunc(all, func(b counterredis.Bucket) bool { return waits(b, first) }) {
			return nil
		}
		running, err := s.redis.Leases(ctx)
		if err != nil {
			return err
		}
		if len(running) == 0 {
			return errNobody
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: the servers did not persist what is in Redis within %s", counter.ErrUnavailable, settleMost)
		case <-time.After(settleEvery):
		}
	}
	return err
}

// Deleted is as counter.Dumper says.
func (s *Store) Deleted(ctx context.Context) (uint64, error) {
	if err := s.persistAll(ctx); err != nil {
		return 0, err
	}
	return s.pg.Deleted(ctx)
}

// Dump is as counter.Dumper says: PostgreSQL has everything, once Redis is persisted.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	if err := s.persistAll(ctx); err != nil {
		return err
	}
	return s.pg.Dump(ctx, after, each)
}

// Restore is as counter.Restorer says. It writes to PostgreSQL, while nobody changes a counter; Redis lets those of copies
// go, so who asks for them next finds what was restored.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	keys := make([]string, len(copies))
	for i := range copies {
		keys[i] = copies[i].Key
	}
	err = s.redis.Still(ctx, func() error {
		if err := s.persistAll(ctx); err != nil {
			return err
		}
		if err := s.redis.Leave(ctx, keys); err != nil {
			return err
		}
		n, err := s.pg.Restore(ctx, copies, rules)
		if restored += n; err != nil {
			return err
		}
		return s.redis.Leave(ctx, keys)
	})
	return restored, err
}

// RestoreDeleted is as counter.Restorer says.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	if err := s.pg.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}
	return s.redis.NoteDeleted(ctx, deleted)
}

// Leases is as counterredis.Store has it.
func (s *Store) Leases(ctx context.Context) ([]string, error) { return s.redis.Leases(ctx) }
