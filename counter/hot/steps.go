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
	all [counter.SubCounters]int // the numbers of all parts

	errRule  = errors.New("hot: no rule fits a hot sum")
	errFolds = fmt.Errorf("%w: it is spread faster than it is folded", counter.ErrSpread)
)

func init() {
	for i := range all {
		all[i] = i
	}
}

// step makes a step on the record of a sum, and returns what the record says then.
func (s *Store) step(ctx context.Context, key string, step counter.SpreadStep) (spread counter.Spread, err error) {
	op, err := s.stepOp(key, step)
	if err != nil {
		return spread, err
	}
	r := s.Store.Apply(ctx, []counter.Op{op})[0]
	if r.Err != nil {
		return spread, r.Err
	}
	s.mu.Lock()
	s.learn(r.Counters[0])
	s.mu.Unlock()
	return counter.ParseSpread(r.Counters[0].Spread)
}

func (s *Store) stepOp(key string, step counter.SpreadStep) (counter.Op, error) {
	rule := s.cfg.Rules.Find(key)
	if rule == nil {
		return counter.Op{}, errRule
	}
	return counter.Op{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Divide, Spread: &step}}}, nil
}

// spread has the record of a sum say that it is spread, and opens its parts.
func (s *Store) spread(ctx context.Context, key string) error {
	is, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToSpread})
	if err != nil || !is.Active {
		return err
	}
	s.cfg.Log.Info().Msg("counters: a hot sum is spread over parts") // keys are not logged
	return s.mend(ctx, key)
}

// mend sees to a sum of which a part took nothing: it opens the parts that were never open in its epoch, and folds the sum
// when another one takes nothing.
func (s *Store) mend(ctx context.Context, key string) error {
	is, err := s.look(ctx, key)
	if err != nil || !is.Active {
		return err
	}
	open, err := s.parts.OpenParts(ctx, key, is.Epoch, is.Parts == [counter.SubCounters]counter.Part{}, all[:])
	if err != nil {
		return err
	}
	if !open {
		return s.foldIn(ctx, key, is.Epoch)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.known[key]; k != nil && k.spread.Epoch == is.Epoch {
		k.broken = false
	}
	return nil
}

// fold makes a sum whole, in whichever epoch it is. When it returns nil the sum was whole.
func (s *Store) fold(ctx context.Context, key string) error {
	for range tries {
		is, err := s.look(ctx, key)
		if err != nil || !is.Active {
			return err
		}
		if err := s.foldIn(ctx, key, is.Epoch); err != nil {
			return err
		}
	}
	return errFolds
}

// foldIn makes a sum whole that is spread in that epoch.
func (s *Store) foldIn(ctx context.Context, key string, e counter.Epoch) error {
	last, err := s.parts.CloseParts(ctx, key, e, 0, all[:])
	if err != nil {
		return err
	}
	is, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToFold, Epoch: e, Parts: last})
	if err != nil {
		return err
	}
	if !is.Active {
		s.cfg.Log.Info().Msg("counters: a sum that was spread is whole again")
	}
	if _, err := s.parts.CloseParts(ctx, key, e, ended, all[:]); err != nil {
		s.cfg.Log.Debug().Err(err).Msg("counters: the parts of a sum stay until it is spread and whole again")
	}
	return nil
}

// look reads the record of a sum.
func (s *Store) look(ctx context.Context, key string) (is counter.Spread, err error) {
	read, err := s.Store.Read(ctx, []string{key}, "", 0)
	if err != nil {
		return is, err
	}
	s.mu.Lock()
	s.learn(read[0].Counter)
	s.mu.Unlock()
	return counter.ParseSpread(read[0].Spread)
}

// gather brings what the parts of sums have gained to their records.
func (s *Store) gather(ctx context.Context, sums []*sum) error {
	if len(sums) == 0 {
		return nil
	}
	keys := make([]string, len(sums))
	for i, k := range sums {
		keys[i] = k.record.Key
	}
	read, err := s.parts.Parts(ctx, keys)
	if err != nil {
		return err
	}
	var ops []counter.Op
	s.mu.Lock()
	for i, k := range sums {
		step := counter.SpreadStep{To: counter.ToGather, Epoch: k.spread.Epoch, Parts: make([]counter.Part, counter.SubCounters)}
		for p, is := range read[i] {
			k.take(p, is)
			if is.Epoch == k.spread.Epoch {
				step.Parts[p] = is
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

// run spreads, gathers and folds until ctx ends.
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
			err = s.within(ctx, func(ctx context.Context) error { return s.spread(ctx, key) })
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
			level := zerolog.DebugLevel // nothing is hot, and the store has said that it is away
			s.mu.Lock()
			if len(s.known) > 0 {
				level = zerolog.WarnLevel
			}
			s.mu.Unlock()
			if failed = err != nil; failed {
				s.cfg.Log.WithLevel(level).Err(err).Msg("counters: hot sums cannot be gathered now")
			} else {
				s.cfg.Log.WithLevel(min(level, zerolog.InfoLevel)).Msg("counters: hot sums are gathered again")
			}
		}
	}
}

func (s *Store) within(ctx context.Context, do func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, stepTime)
	defer cancel()
	return do(ctx)
}

// tick gathers what this process has added to parts, and mends what is broken.
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
		err = errors.Join(err, s.mend(ctx, key))
	}
	return err
}

// gatherUnlessOthers gathers those of sums that no other process has gathered since this one has last seen their records.
// So one of many processes gathers, and when it dies another one.
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
		before := knew.record.Spread
		if k := s.learn(read[i].Counter); k == knew && k.record.Spread == before {
			sums = append(sums, k)
		}
	}
	s.mu.Unlock()
	return s.gather(ctx, sums)
}

// sweep gathers what processes that died have left in the parts of sums in this process's buckets.
func (s *Store) sweep(ctx context.Context) error {
	var buckets []int
	for b := range counterredis.Buckets {
		if s.cfg.Owner == nil || s.cfg.Owner.Owns(b) {
			buckets = append(buckets, b)
		}
	}
	hot, err := s.parts.Hot(ctx, buckets)
	if err != nil {
		return err
	}
	var sums []*sum
	for _, c := range hot {
		spread, fault := counter.ParseSpread(c.Spread)
		switch {
		case fault != nil:
		case spread.Active && c.Version.Sequence > 0:
			sums = append(sums, &sum{record: c, spread: spread})
		case spread.Active: // it was deleted in another region
			fault = s.fold(ctx, c.Key)
		case c.Touched(): // it is whole, and its bucket has not heard of that
			_, fault = s.step(ctx, c.Key, counter.SpreadStep{To: counter.ToFold})
		}
		err = errors.Join(err, fault)
	}
	for some := range slices.Chunk(sums, counter.MaxKeys) {
		err = errors.Join(err, s.gather(ctx, some))
	}
	return err
}
