package counterpg

import (
	"context"
	"encoding/json"
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
	return during("top", s.exec(ctx, writeMarks, match, number, keys))
}

// Marked is as counter.TopStore says.
func (s *Store) Marked(ctx context.Context, match string) (out map[int64][]string, err error) {
	out = map[int64][]string{}
	var number int64
	var key string
	err = s.query(ctx, []any{&number, &key}, func() error { out[number] = append(out[number], key); return nil }, readMarks, match)
	return out, during("top", err)
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
	return during("top", err)
}

// TopLists is as counter.TopStore says.
func (s *Store) TopLists(ctx context.Context, match string, step time.Duration, from, to int64) (out []counter.TopList, err error) {
	var number int64
	var text []byte
	err = s.query(ctx, []any{&number, &text}, func() error {
		l := counter.TopList{Number: number}
		if err := json.Unmarshal(text, &l.Most); err != nil {
			return callers{err}
		}
		out = append(out, l)
		return nil
	}, readTops, match, int32(step/time.Second), from, to)
	return out, during("top", err)
}
