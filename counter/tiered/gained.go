package tiered

import (
	"context"
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/counterredis"
)

// Running implements counter.TopStore.
func (s *Store) Running(ctx context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	slots, at, err := s.redis.RunningResident(ctx, keys, step)
	if err == nil && len(at) > 0 {
		rest := make([]string, len(at))
		for n, i := range at {
			rest[n] = keys[i]
		}
		var behind []counter.Slot
		if behind, err = s.pg.Running(ctx, rest, step); err == nil {
			for n, i := range at {
				slots[i] = behind[n]
			}
		}
	}
	return slots, during("top", err)
}

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	_, gains, err := s.histories(ctx, keys, step, from, to)
	return gains, during("top", err)
}

// histories returns the states of distinct keys, and their histories.
func (s *Store) histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([]counter.State, [][]counter.Gain, error) {
	// Redis first: whatever is persisted after this read is in PostgreSQL by the next one.
	var front []counterredis.ResidentHistory
	if err := s.mend(ctx, func() (err error) {
		front, err = s.redis.HistoriesResident(ctx, keys, step, from, to)
		return err
	}); err != nil {
		return nil, nil, err
	}
	states, gains := make([]counter.State, len(keys)), make([][]counter.Gain, len(keys))
	if slices.ContainsFunc(front, func(f counterredis.ResidentHistory) bool { return !f.Alone }) {
		var err error
		if states, gains, err = s.pg.Gains(ctx, keys, step, from, to); err != nil {
			return nil, nil, err
		}
	}
	for i := range front {
		f := &front[i]
		if f.Alone {
			gains[i] = nil
		}
		if f.Resident {
			states[i] = f.State
		}
		gains[i] = states[i].With(merged(f.Gained, gains[i]), step, from, to)
	}
	return states, gains, nil
}
