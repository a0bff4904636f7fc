package counterpg

import (
	"context"
	"time"

	"headcount/counter"
)

const (
	readSlots = `select key, slots from headcount_counters where key = any($1::text[])`
	// One statement is of one moment: a step that is over is in the history or in the slots.
	readHistories = `select c.key, c.slots, coalesce(g.numbers, '{}'), coalesce(g.gains, '{}') from headcount_counters c left join lateral (
		select array_agg(number order by number) numbers, array_agg(gain order by number) gains from headcount_gains h
		where h.history_id = c.history_id and c.history_id <> 0 and h.step = $2 and h.number >= $3 and h.number < $4) g on true
		where c.key = any($1::text[])`
)

// Running is as counter.TopStore says.
func (s *Store) Running(ctx context.Context, keys []string, step time.Duration) ([]counter.Slot, error) {
	at := indexes(keys)
	out := make([]counter.Slot, len(keys))
	var key, text string
	err := s.query(ctx, []any{&key, &text}, func() error {
		var st counter.State
		err := st.ParseRest(text)
		out[at[key]] = st.Slots.At(step)
		return err
	}, readSlots, keys)
	return out, during("top", err)
}

func indexes(keys []string) map[string]int {
	at := make(map[string]int, len(keys))
	for i, key := range keys {
		at[key] = i
	}
	return at
}

// Histories is as counter.TopStore says.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	out, states, err := s.GainsOf(ctx, keys, step, from, to)
	for i := range out {
		out[i] = states[i].With(out[i], step, from, to)
	}
	return out, during("top", err)
}

// GainsOf is Gains of several sums. Of states only the slots are read.
func (s *Store) GainsOf(ctx context.Context, keys []string, step time.Duration, from, to int64) (gains [][]counter.Gain, states []counter.State, err error) {
	at := indexes(keys)
	gains, states = make([][]counter.Gain, len(keys)), make([]counter.State, len(keys))
	var key, text string
	var numbers, values []int64
	err = s.query(ctx, []any{&key, &text, &numbers, &values}, func() error {
		i := at[key]
		for n, number := range numbers {
			gains[i] = append(gains[i], counter.Gain{Number: number, Value: values[n]})
		}
		return states[i].ParseRest(text)
	}, readHistories, keys, int32(step/time.Second), from, to)
	return gains, states, err
}
