package counterpg

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	readSlots = `select key, slots from headcount_counters where key = any($1::text[])`
	// One statement is of one moment: a step that is over is in the history or in the slots.
	readHistories = `select ` + recordColumns + `, coalesce(g.numbers, '{}'), coalesce(g.gains, '{}'), coalesce(g.registers, '{}') from headcount_counters c
		left join lateral (select array_agg(number order by number) numbers, array_agg(gain order by number) gains, array_agg(registers order by number) registers
		from headcount_gains h where h.history_id = c.history_id and c.history_id <> 0 and h.step = $2 and h.number >= $3 and h.number < $4) g on true
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

// History is as counter.Reader says.
func (s *Store) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	states, gains, err := s.Gains(ctx, []string{key}, step, from, to)
	if err != nil {
		return counter.Counter{}, nil, fmt.Errorf("counterpg: history of %q: %w", key, err)
	}
	return states[0].Counter(key), states[0].With(gains[0], step, from, to), nil
}

// Histories is as counter.TopStore says.
func (s *Store) Histories(ctx context.Context, keys []string, step time.Duration, from, to int64) ([][]counter.Gain, error) {
	states, gains, err := s.Gains(ctx, keys, step, from, to)
	for i := range gains {
		gains[i] = states[i].With(gains[i], step, from, to)
	}
	return gains, during("top", err)
}

// Gains returns the states of distinct keys, and their histories without the running time buckets.
func (s *Store) Gains(ctx context.Context, keys []string, step time.Duration, from, to int64) ([]counter.State, [][]counter.Gain, error) {
	at := indexes(keys)
	states, gains := make([]counter.State, len(keys)), make([][]counter.Gain, len(keys))
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		var numbers, values []int64
		var registers [][]byte
		var invalid error
		rows, _ := c.Query(ctx, readHistories, keys, int32(step/time.Second), from, to) // records returns the error
		err := records(rows, func(key string, r *record) {
			i := at[key]
			states[i], gains[i] = r.State, make([]counter.Gain, len(numbers))
			for n, number := range numbers {
				seen, err := parseSeen(registers[n])
				invalid = cmp.Or(invalid, err)
				gains[i][n] = counter.Gain{Number: number, Value: values[n], Seen: seen}
			}
		}, &numbers, &values, &registers)
		return cmp.Or(err, invalid)
	})
	return states, gains, err
}
