package counterpg

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	writeMarks = `insert into headcount_marks (match, number, key) select $1, $2, unnest($3::text[]) on conflict do nothing`
	readMarks  = `select number, key from headcount_marks where match = $1`
	dropMarks  = `delete from headcount_marks where match = $1 and number = $2 and key = any($3::text[])`
	writeTop   = `insert into headcount_tops (match, step, number, list) values ($1, $2, $3, $4) on conflict (match, step, number) do update set list = excluded.list`
	dropTops   = `delete from headcount_tops where match = $1 and step = $2 and number < $3`
	readTops   = `select number, list from headcount_tops where match = $1 and step = $2 and number >= $3 and number < $4`
)

// Mark is as counter.TopStore says.
func (s *Store) Mark(ctx context.Context, match string, number int64, keys []string) error {
	keys = slices.Sorted(slices.Values(keys)) // two that mark the same do not wait for each other
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, writeMarks, match, number, keys)
		return err
	})
	if err != nil {
		return fmt.Errorf("counterpg: top: %w", err)
	}
	return nil
}

// Marked is as counter.TopStore says.
func (s *Store) Marked(ctx context.Context, match string) (out map[int64][]string, err error) {
	err = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		out = map[int64][]string{}
		rows, err := c.Query(ctx, readMarks, match)
		if err != nil {
			return err
		}
		var number int64
		var key string
		_, err = pgx.ForEachRow(rows, []any{&number, &key}, func() error { out[number] = append(out[number], key); return nil })
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("counterpg: top: %w", err)
	}
	return out, nil
}

// KeepTop is as counter.TopStore says.
func (s *Store) KeepTop(ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string) error {
	text, err := json.Marshal(list.Most)
	if err != nil { // strings and numbers always marshal
		panic(err)
	}
	slices.Sort(marks)
	err = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		b := &pgx.Batch{}
		b.Queue("begin isolation level read committed")
		b.Queue(writeTop, match, int32(step/time.Second), list.Number, text)
		b.Queue(dropTops, match, int32(step/time.Second), list.Number-int64(kept/step)-2)
		b.Queue(dropMarks, match, list.Number, marks)
		b.Queue("commit")
		return c.SendBatch(ctx, b).Close()
	})
	if err != nil {
		return fmt.Errorf("counterpg: top: %w", err)
	}
	return nil
}

// TopLists is as counter.TopStore says.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) (out []counter.TopList, err error) {
	err = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		out = nil
		rows, err := c.Query(ctx, readTops, match, int32(step/time.Second), from, to)
		if err != nil {
			return err
		}
		var number int64
		var text []byte
		_, err = pgx.ForEachRow(rows, []any{&number, &text}, func() error {
			l := counter.TopList{Number: number}
			if err := json.Unmarshal(text, &l.Most); err != nil {
				return callers{err}
			}
			out = append(out, l)
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("counterpg: top: %w", err)
	}
	return out, nil
}
