package counterredis

import (
	"context"
	"fmt"
	"time"

	"headcount/counter"
)

// Running implements counter.TopStore.
func (s *Store) Running(ctx context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	slots, _, err := s.RunningResident(ctx, keys, step)
	if err != nil {
		return nil, fmt.Errorf("counterredis: top: %w", err)
	}
	return slots, nil
}

// RunningResident is Running. It also returns the indexes of keys for which PostgreSQL has to be read.
func (s *Store) RunningResident(ctx context.Context, keys []string, step time.Duration) (slots []counter.Slot, absent []int, err error) {
	at := make([]located, len(keys))
	for i, key := range keys {
		at[i] = located{key, hashBucket(key)}
	}
	texts, err := s.states(ctx, at)
	if err != nil {
		return nil, nil, err
	}
	slots = make([]counter.Slot, len(keys))
	for i, text := range texts {
		if text == "" {
			absent = append(absent, i)
			continue
		}
		_, st, err := parseState(keys[i], text)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
		}
		slots[i] = st.Slots.At(step)
	}
	return slots, absent, nil
}

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	_, gains, err := s.histories(ctx, keys, step, from, to)
	if err != nil {
		return nil, fmt.Errorf("counterredis: top: %w", err)
	}
	return gains, nil
}
