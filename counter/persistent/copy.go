package persistent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/redisstore"
)

const (
	settleEvery = 20 * time.Millisecond
	settleMost  = time.Minute
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// persistAll returns when Redis is good, and PostgreSQL has everything that was changed before.
// Changes that go on meanwhile may keep it from that.
func (s *Store) persistAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, settleMost)
	defer cancel()
	for {
		all, err := s.redis.Status(ctx)
		if err == nil && !slices.ContainsFunc(all, func(b redisstore.Bucket) bool {
			return !b.Good || !b.Since.IsZero() || b.Taken != 0 || b.Loose > 0
		}) {
			return nil
		}
		s.hurry()
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("%w: what is in Redis could not be persisted", counter.ErrUnavailable), err, ctx.Err())
		case <-time.After(settleEvery):
		}
	}
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

// DumpIdentities is as counter.Dumper says.
func (s *Store) DumpIdentities(ctx context.Context, each func([]counter.IdentityCopy) error) error {
	return s.pg.DumpIdentities(ctx, each)
}

// Restore is as counter.Restorer says. It writes to PostgreSQL. Redis begins anew before, so it
// knows of no counter that it would have to forget; no other process may use it meanwhile.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	if err := s.empty(ctx); err != nil {
		return 0, err
	}
	return s.pg.Restore(ctx, copies, rules)
}

// RestoreIdentities is as counter.Restorer says. Whether Redis asks PostgreSQL about identities, and what was deleted, is
// settled when its generation begins, and the one of Restore began before these came. So another one begins.
func (s *Store) RestoreIdentities(ctx context.Context, identities []counter.IdentityCopy, deleted uint64) error {
	if err := s.empty(ctx); err != nil {
		return err
	}
	if err := s.pg.RestoreIdentities(ctx, identities, deleted); err != nil {
		return err
	}
	if deleted == 0 && (len(identities) == 0 || s.asking.Load()) {
		return nil
	}
	s.emptied.Store(false)
	if err := s.empty(ctx); err != nil {
		return err
	}
	if len(identities) > 0 { // once is enough: it asks for a day
		s.asking.Store(true)
	}
	return nil
}

// empty has Redis begin a new generation, in which all counters are cold, unless they are already.
func (s *Store) empty(ctx context.Context) error {
	if s.emptied.Load() {
		return nil
	}
	if err := s.persistAll(ctx); err != nil {
		return err
	}
	if err := s.redis.Forget(ctx); err != nil {
		return err
	}
	if err := s.persistAll(ctx); err != nil { // the worker finds it and heals
		return err
	}
	s.emptied.Store(true)
	return nil
}

// Leases is as redisstore.Store has it.
func (s *Store) Leases(ctx context.Context) ([]string, error) { return s.redis.Leases(ctx) }
