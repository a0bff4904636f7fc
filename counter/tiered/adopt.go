package tiered

import (
	"context"
	"fmt"

	"headcount/counter"
)

const carryBatch = 500 // counters carried in one transaction

var errCarrying = fmt.Errorf("%w: the counters in Redis are being carried into PostgreSQL", counter.ErrUnavailable)

// Ready returns why no counter can be served although both servers answer, or nil.
func (s *Store) Ready() error {
	if p := s.unready.Load(); p != nil {
		return *p
	}
	return nil
}

// adopt copies the counters of a Redis that had no PostgreSQL into PostgreSQL. Nothing changes them meanwhile, because
// Redis has no generation yet. Counters that PostgreSQL has already, from a process that died, are skipped.
func (s *Store) adopt(ctx context.Context) (err error) {
	defer func() {
		if s.unready.Store(nil); err != nil {
			s.unready.Store(&err)
		}
	}()
	if err := s.redis.Adoptable(ctx); err != nil {
		return err
	}
	s.unready.Store(&errCarrying)
	s.cfg.Log.Info().Msg("counters: carrying what is in Redis into PostgreSQL")
	n := 0
	var batch []counter.Copy
	carry := func() error {
		n += len(batch)
		err := s.carry(ctx, batch)
		batch = batch[:0]
		return err
	}
	err = s.redis.Dump(ctx, "", func(c counter.Copy) error {
		if batch = append(batch, c); len(batch) == carryBatch {
			return carry()
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := carry(); err != nil {
		return err
	}
	if err := s.redis.DumpIdempotencyKeys(ctx, func(some []counter.IdempotencyKeyCopy) error { return s.pg.RestoreIdempotencyKeys(ctx, some) }); err != nil {
		return err
	}
	deleted, err := s.redis.Deleted(ctx)
	if err != nil {
		return err
	}
	if err := s.pg.RestoreDeleted(ctx, deleted); err != nil {
		return err
	}
	s.cfg.Log.Info().Int("counters", n).Msg("counters: PostgreSQL has all that was in Redis")
	return nil
}

// carry copies counters into PostgreSQL. It fails if one has a different row there, because either may be right.
func (s *Store) carry(ctx context.Context, batch []counter.Copy) error {
	keys := make([]string, len(batch))
	for i := range batch {
		keys[i] = batch[i].Key
	}
	rows, err := s.pg.Rows(ctx, keys)
	if err != nil {
		return err
	}
	var missing []counter.Copy
	for i := range batch {
		c := &batch[i]
		switch is := rows[c.Key]; {
		case is.Kind == 0:
			missing = append(missing, *c)
		case is.Kind != c.Kind || is.Value != c.Value || is.Updated != c.Updated || is.Version.Sequence != c.Version.Sequence:
			return fmt.Errorf("%w: Redis and PostgreSQL each have a counter %q, of %d and of %d; give a database that has none of the counters of this Redis (headcount import can put both together)",
				counter.ErrUnavailable, c.Key, c.Value, is.Value)
		}
	}
	_, err = s.pg.Restore(ctx, missing, s.rules)
	return err
}
