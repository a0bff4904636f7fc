package counterredis

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"headcount/counter"
)

// fieldsAtOnce is the number of states that one command reads.
const fieldsAtOnce = 1000

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
	by := map[int][]int{} // indexes of keys, by bucket
	for i, key := range keys {
		b := hashBucket(key)
		by[b] = append(by[b], i)
	}
	type some struct {
		at   []int
		read *redis.SliceCmd
	}
	slots = make([]counter.Slot, len(keys))
	err = s.pipeline(ctx, func(pipe redis.Pipeliner) func() error {
		var all []some
		absent = nil
		for b, at := range by {
			for at := range slices.Chunk(at, fieldsAtOnce) {
				fields := make([]string, len(at))
				for n, i := range at {
					fields[n] = keys[i]
				}
				all = append(all, some{at, pipe.HMGet(ctx, countersKey(b), fields...)})
			}
		}
		return func() error {
			for _, some := range all {
				texts, err := some.read.Result()
				if err != nil {
					return err
				}
				for n, i := range some.at {
					text, _ := texts[n].(string)
					if text == "" {
						absent = append(absent, i)
						continue
					}
					_, st, err := parseState(keys[i], text)
					if err != nil {
						return fmt.Errorf("%w: %w", counter.ErrUnavailable, err)
					}
					slots[i] = st.Slots.At(step)
				}
			}
			return nil
		}
	})
	return slots, absent, err
}

// Histories implements counter.TopStore.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	_, gains, err := s.histories(ctx, keys, step, from, to)
	if err != nil {
		return nil, fmt.Errorf("counterredis: top: %w", err)
	}
	return gains, nil
}
