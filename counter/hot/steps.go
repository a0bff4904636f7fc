package hot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
)

var (
	all = [counter.Shards]int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} // the numbers of all shards

	errRule   = errors.New("hot: no rule fits a sharded sum")
	errMerges = fmt.Errorf("%w: it is split faster than it is merged", counter.ErrSharded)
)

// step makes a step on the record of a sum, and returns the new sharding.
func (s *Store) step(ctx context.Context, key string, step counter.ReshardStep) (sharding counter.Sharding, err error) {
	op, err := s.stepOp(key, step)
	if err != nil {
		return sharding, err
	}
	r := s.Store.Apply(ctx, []counter.Op{op})[0]
	if r.Err != nil {
		return sharding, r.Err
	}
	s.mu.Lock()
	s.learn(r.Counters[0])
	s.mu.Unlock()
	return counter.ParseSharding(r.Counters[0].Sharding)
}

func (s *Store) stepOp(key string, step counter.ReshardStep) (counter.Op, error) {
	rule := s.cfg.Rules.Find(key)
	if rule == nil {
		return counter.Op{}, errRule
	}
	return counter.Op{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Reshard, Reshard: &step}}}, nil
}

// split makes a sum sharded, and opens its shards.
func (s *Store) split(ctx context.Context, key string) error {
	is, err := s.step(ctx, key, counter.ReshardStep{To: counter.ToSplit})
	if err != nil || !is.Active {
		return err
	}
	s.cfg.Log.Info().Msg("counters: a busy sum is split into shards") // keys are not logged
	return s.repair(ctx, key)
}

// repair repairs a sum with a shard that takes no additions: it opens shards that were never open in the epoch, and
// merges the sum if another shard takes no additions.
func (s *Store) repair(ctx context.Context, key string) error {
	is, err := s.look(ctx, key)
	if err != nil || !is.Active {
		return err
	}
	open, err := s.shards.OpenShards(ctx, key, is.Epoch, is.Shards == [counter.Shards]counter.Shard{}, all[:])
	if err != nil {
		return err
	}
	if !open {
		return s.mergeIn(ctx, key, is.Epoch)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.known[key]; k != nil && k.sharding.Epoch == is.Epoch {
		k.broken = false
	}
	return nil
}

// merge merges a sum, whatever its epoch. If it returns nil, the sum was not sharded at some moment of the call.
func (s *Store) merge(ctx context.Context, key string) error {
	for range tries {
		is, err := s.look(ctx, key)
		if err != nil || !is.Active {
			return err
		}
		if err := s.mergeIn(ctx, key, is.Epoch); err != nil {
			return err
		}
	}
	return errMerges
}

// mergeIn merges a sum that is sharded in that epoch.
func (s *Store) mergeIn(ctx context.Context, key string, e counter.Epoch) error {
	last, err := s.shards.CloseShards(ctx, key, e, 0, all[:])
	if err != nil {
		return err
	}
	is, err := s.step(ctx, key, counter.ReshardStep{To: counter.ToMerge, Epoch: e, Shards: last})
	if err != nil {
		return err
	}
	if !is.Active {
		s.cfg.Log.Info().Msg("counters: a sharded sum is merged again")
	}
	if _, err := s.shards.CloseShards(ctx, key, e, ended, all[:]); err != nil {
		s.cfg.Log.Debug().Err(err).Msg("counters: old shards of a sum stay until it is split and merged once more")
	}
	return nil
}

// look reads the record of a sum.
func (s *Store) look(ctx context.Context, key string) (is counter.Sharding, err error) {
	read, err := s.Store.Read(ctx, []string{key}, "", 0)
	if err != nil {
		return is, err
	}
	s.mu.Lock()
	s.learn(read[0].Counter)
	s.mu.Unlock()
	return counter.ParseSharding(read[0].Sharding)
}

// gather adds the increments of shards to the records of their sums.
func (s *Store) gather(ctx context.Context, sums []*sum) error {
	if len(sums) == 0 {
		return nil
	}
	keys := make([]string, len(sums))
	for i, k := range sums {
		keys[i] = k.record.Key
	}
	read, err := s.shards.Shards(ctx, keys)
	if err != nil {
		return err
	}
	var ops []counter.Op
	s.mu.Lock()
	for i, k := range sums {
		step := counter.ReshardStep{To: counter.ToGather, Epoch: k.sharding.Epoch, Shards: make([]counter.Shard, counter.Shards)}
		for p, is := range read[i] {
			k.take(p, is)
			if is.Epoch == k.sharding.Epoch {
				step.Shards[p] = is
			}
		}
		if !k.ahead() {
			continue
		}
		if op, err := s.stepOp(keys[i], step); err == nil {
			ops = append(ops, op)
		}
	}
	s.mu.Unlock()
	if len(ops) == 0 {
		return nil
	}
	for _, r := range s.Store.Apply(ctx, ops) {
		if err = errors.Join(err, r.Err); r.Err == nil {
			s.mu.Lock()
			s.learn(r.Counters[0])
			s.mu.Unlock()
		}
	}
	return err
}

// run splits, gathers and merges until ctx ends.
func (s *Store) run(ctx context.Context) {
	ticker := time.NewTicker(s.cfg.Gather)
	defer ticker.Stop()
	failed := false
	for swept := (time.Time{}); ; {
		var err error
		select {
		case <-ctx.Done():
			return
		case key := <-s.start:
			err = s.within(ctx, func(ctx context.Context) error { return s.split(ctx, key) })
		case <-ticker.C:
			err = s.within(ctx, s.tick)
			if time.Since(swept) >= sweeps {
				swept = time.Now()
				err = errors.Join(err, s.within(ctx, s.sweep))
			}
		}
		if ctx.Err() != nil {
			return
		}
		if (err != nil) != failed {
			level := zerolog.DebugLevel // no sum is sharded, and the store has logged the outage
			s.mu.Lock()
			if len(s.known) > 0 {
				level = zerolog.WarnLevel
			}
			s.mu.Unlock()
			if failed = err != nil; failed {
				s.cfg.Log.WithLevel(level).Err(err).Msg("counters: shards cannot be merged into their sums; trying again")
			} else {
				s.cfg.Log.WithLevel(min(level, zerolog.InfoLevel)).Msg("counters: shards are merged into their sums again")
			}
		}
	}
}

func (s *Store) within(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	return do(ctx)
}

// tick gathers what this process has added to shards, and repairs broken sums.
func (s *Store) tick(ctx context.Context) error {
	now := time.Now()
	var ahead, broken []string
	s.mu.Lock()
	for key, k := range s.known {
		switch {
		case now.Sub(k.used) > unused:
			delete(s.known, key)
		case k.broken:
			broken = append(broken, key)
		case k.ahead():
			ahead = append(ahead, key)
		}
	}
	s.mu.Unlock()
	err := s.gatherUnlessOthers(ctx, ahead)
	for _, key := range broken {
		err = errors.Join(err, s.repair(ctx, key))
	}
	return err
}

// gatherUnlessOthers gathers sums, except those that another process has gathered since this one last read their
// records. So one of many processes gathers, and if it dies, another one.
func (s *Store) gatherUnlessOthers(ctx context.Context, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	read, err := s.Store.Read(ctx, keys, "", 0)
	if err != nil {
		return err
	}
	var sums []*sum
	s.mu.Lock()
	for i, key := range keys {
		knew := s.known[key]
		if knew == nil {
			continue
		}
		before := knew.record.Sharding
		if k := s.learn(read[i].Counter); k == knew && k.record.Sharding == before {
			sums = append(sums, k)
		}
	}
	s.mu.Unlock()
	return s.gather(ctx, sums)
}

// sweep gathers what dead processes have added to shards, in this process's buckets.
func (s *Store) sweep(ctx context.Context) error {
	hot, err := s.shards.Sharded(ctx, counterredis.Owned(s.cfg.Owner))
	if err != nil {
		return err
	}
	var sums []*sum
	for _, c := range hot {
		sharding, fault := counter.ParseSharding(c.Sharding)
		switch {
		case fault != nil:
		case sharding.Active && c.Version.Sequence > 0:
			sums = append(sums, &sum{record: c, sharding: sharding})
		case sharding.Active: // it was deleted in another region
			fault = s.merge(ctx, c.Key)
		case c.Touched(): // it is merged, and the bucket still lists it
			_, fault = s.step(ctx, c.Key, counter.ReshardStep{To: counter.ToMerge})
		}
		err = errors.Join(err, fault)
	}
	for some := range slices.Chunk(sums, counter.MaxKeys) {
		err = errors.Join(err, s.gather(ctx, some))
	}
	return err
}
