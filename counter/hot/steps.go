package hot

import (
	"context"
	"errors"
	"fmt"
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

// spread brings a sum from whole to open: steps 1 to 3 of the package doc.
func (s *Store) spread(ctx context.Context, key string) error {
	is, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToOpening})
	if err != nil {
		return err
	}
	return s.open(ctx, key, is)
}

// open brings a sum from opening to open, if that is where it is: steps 2 and 3.
func (s *Store) open(ctx context.Context, key string, is counter.Spread) error {
	if is.Phase != counter.Opening {
		return nil
	}
	if err := s.parts.OpenParts(ctx, key, is.Epoch, all[:]); err != nil {
		return err
	}
	is, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToOpen, Epoch: is.Epoch})
	if err == nil && is.Phase == counter.Open {
		s.cfg.Log.Info().Msg("counters: a hot sum is spread over parts") // keys are not logged
	}
	return err
}

// fold brings a sum from wherever it is to whole: steps 4 to 8. When it returns nil the sum was
// whole.
func (s *Store) fold(ctx context.Context, key string) error {
	for range tries {
		is, err := s.look(ctx, key)
		switch {
		case err != nil:
			return err
		case !is.Active():
			return nil
		case is.Phase != counter.Closing:
			if is, err = s.step(ctx, key, counter.SpreadStep{To: counter.ToClosing, Epoch: is.Epoch}); err != nil {
				return err
			}
			if is.Phase != counter.Closing {
				continue
			}
		}
		last, updated, err := s.parts.CloseParts(ctx, key, is.Epoch, all[:])
		if err != nil {
			return err
		}
		after, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToFolded, Epoch: is.Epoch, Parts: last, Updated: updated})
		if err != nil {
			return err
		}
		if after.Phase == counter.Folded && after.Epoch == is.Epoch {
			s.cfg.Log.Info().Msg("counters: a sum that was spread is whole again")
			if err := s.forget(ctx, key, is.Epoch); err != nil {
				s.cfg.Log.Debug().Err(err).Msg("counters: the parts of a sum do not end yet") // its owner sees to it
			}
			return nil
		}
	}
	return errFolds
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

// forget makes steps 7 and 8.
func (s *Store) forget(ctx context.Context, key string, e counter.Epoch) error {
	if e != (counter.Epoch{}) {
		if err := s.parts.EndParts(ctx, key, e, all[:]); err != nil {
			return err
		}
	}
	_, err := s.step(ctx, key, counter.SpreadStep{To: counter.ToForget, Epoch: e})
	return err
}

// gather brings what the parts of sums have gained to their records.
func (s *Store) gather(ctx context.Context, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	read, err := s.parts.Parts(ctx, keys)
	if err != nil {
		return err
	}
	var ops []counter.Op
	s.mu.Lock()
	for i, key := range keys {
		k := s.known[key]
		if k == nil {
			continue
		}
		step := counter.SpreadStep{To: counter.ToGather, Epoch: k.spread.Epoch, Parts: make([]counter.Part, counter.SubCounters)}
		moved := false
		for p := range read[i] {
			is := &read[i][p]
			if is.Epoch != k.spread.Epoch {
				k.broken = k.broken || k.spread.Phase == counter.Open
				continue
			}
			k.broken = k.broken || k.spread.Phase == counter.Open && !is.Open
			k.take(p, *is)
			step.Parts[p] = is.Part
			moved = moved || is.Sequence > k.spread.Parts[p].Sequence
		}
		k.looked, step.Updated = time.Now(), k.updated
		if !moved {
			continue
		}
		if op, err := s.stepOp(key, step); err == nil {
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
	for looked := (time.Time{}); ; {
		var err error
		select {
		case <-ctx.Done():
			return
		case key := <-s.start:
			err = s.within(ctx, func(ctx context.Context) error { return s.spread(ctx, key) })
		case <-ticker.C:
			err = s.within(ctx, s.tick)
			if time.Since(looked) >= looks {
				looked = time.Now()
				err = errors.Join(err, s.within(ctx, s.lookAround))
			}
		}
		if ctx.Err() != nil {
			return
		}
		if (err != nil) != failed {
			level := zerolog.DebugLevel // nothing is hot, and the store has said that it is away
			if s.some.Load() {
				level = zerolog.WarnLevel
			}
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

func (s *Store) owns(key string) bool {
	return s.cfg.Owner == nil || s.cfg.Owner.Owns(counterredis.BucketOf(key))
}

// tick makes the next steps of all sums that are known, as far as they are this process's.
func (s *Store) tick(ctx context.Context) error {
	now := time.Now()
	var gather, fold, open, missing []string
	s.mu.Lock()
	for key, k := range s.known {
		mine, late := s.owns(key), now.Sub(k.looked) > missed
		switch {
		case !mine && now.Sub(k.used) > unused:
			delete(s.known, key)
		case k.broken || k.spread.Phase == counter.Closing && (mine || late):
			fold = append(fold, key)
		case k.spread.Phase == counter.Opening && (mine || late):
			open = append(open, key)
		case k.spread.Phase != counter.Open:
		case mine:
			gather = append(gather, key)
		case late:
			missing = append(missing, key)
		}
	}
	s.some.Store(len(s.known) > 0)
	s.mu.Unlock()
	var err error
	for _, key := range missing {
		_, fault := s.look(ctx, key)
		err = errors.Join(err, fault)
		s.mu.Lock()
		if k := s.known[key]; k != nil && k.looked.Before(now) { // nobody else gathers
			gather = append(gather, key)
		}
		s.mu.Unlock()
	}
	err = errors.Join(err, s.gather(ctx, gather))
	fold = append(fold, s.cool(gather)...)
	for _, key := range fold {
		err = errors.Join(err, s.fold(ctx, key))
	}
	for _, key := range open {
		is, fault := s.look(ctx, key)
		if fault == nil {
			fault = s.open(ctx, key, is)
		}
		err = errors.Join(err, fault)
	}
	return err
}

// cool returns those of keys that have had a low rate for long.
func (s *Store) cool(keys []string) (cold []string) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range keys {
		k := s.known[key]
		if k == nil {
			continue
		}
		total := k.counter().Version.Sequence
		took := now.Sub(k.rateAt)
		switch {
		case k.rateAt.IsZero():
			k.rateAt, k.rateOf = now, total
		case took < rateOver && took < s.cfg.Cool:
		case float64(total-k.rateOf) >= float64(s.cfg.Rate)/10*took.Seconds():
			k.rateAt, k.rateOf, k.cool = now, total, time.Time{}
		default:
			if k.cool.IsZero() {
				k.cool = k.rateAt
			}
			k.rateAt, k.rateOf = now, total
			if now.Sub(k.cool) >= s.cfg.Cool {
				cold = append(cold, key)
			}
		}
	}
	return cold
}

// lookAround finds hot sums of this process's buckets that others have left.
func (s *Store) lookAround(ctx context.Context) error {
	var buckets []int
	for b := range counterredis.Buckets {
		if s.cfg.Owner == nil || s.cfg.Owner.Owns(b) {
			buckets = append(buckets, b)
		}
	}
	keys, err := s.parts.Hot(ctx, buckets)
	if err != nil {
		return err
	}
	for _, key := range keys {
		s.mu.Lock()
		k := s.known[key]
		s.mu.Unlock()
		if k != nil {
			continue
		}
		is, fault := s.look(ctx, key)
		if err = errors.Join(err, fault); fault == nil && !is.Active() {
			err = errors.Join(err, s.forget(ctx, key, is.Epoch))
		}
	}
	return err
}
