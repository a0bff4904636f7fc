package tiered

import (
	"context"
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
	// Redis first: whatever is persisted after this read is in PostgreSQL by the next one.
	var front []counterredis.ResidentHistory
	err := s.mend(ctx, func() (err error) {
		front, err = s.redis.HistoriesResident(ctx, keys, step, from, to)
		return err
	})
	var out [][]counter.Gain
	var states []counter.State
	if err == nil {
		out, states, err = s.pg.GainsOf(ctx, keys, step, from, to)
	}
	if err != nil {
		return nil, during("top", err)
	}
	for i := range keys {
		f := &front[i]
		if f.Alone {
			out[i] = nil
		}
		if !f.Resident {
			f.State = states[i]
		}
		out[i] = f.State.With(merged(f.Gained, out[i]), step, from, to)
	}
	return out, nil
}
