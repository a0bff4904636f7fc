package counterpg

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

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
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, err := c.Query(ctx, readSlots, keys)
		if err != nil {
			return err
		}
		var key, text string
		_, err = pgx.ForEachRow(rows, []any{&key, &text}, func() error {
			var st counter.State
			err := st.ParseRest(text)
			out[at[key]] = st.Slots.At(step)
			return err
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("counterpg: top: %w", err)
	}
	return out, nil
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
	if err != nil {
		return nil, fmt.Errorf("counterpg: top: %w", err)
	}
	for i := range out {
		out[i] = states[i].With(out[i], step, from, to)
	}
	return out, nil
}

// GainsOf is Gains of several sums. Of states only the slots are read.
func (s *Store) GainsOf(ctx context.Context, keys []string, step time.Duration, from, to int64) (gains [][]counter.Gain, states []counter.State, err error) {
	at := indexes(keys)
	err = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		gains, states = make([][]counter.Gain, len(keys)), make([]counter.State, len(keys))
		rows, err := c.Query(ctx, readHistories, keys, int32(step/time.Second), from, to)
		if err != nil {
			return err
		}
		var key, text string
		var numbers, values []int64
		_, err = pgx.ForEachRow(rows, []any{&key, &text, &numbers, &values}, func() error {
			i := at[key]
			for n, number := range numbers {
				gains[i] = append(gains[i], counter.Gain{Number: number, Value: values[n]})
			}
			return states[i].ParseRest(text)
		})
		return err
	})
	return gains, states, err
}
