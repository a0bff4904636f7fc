package counterpg

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/counter/limit"
)

const (
	// Rows are locked in the order of their names, and those that are missing are made.
	lockLimits = `insert into headcount_limits as l (key, algorithm, time_ms)
		select * from unnest($1::text[], $2::smallint[], $3::bigint[]) u (key, algorithm, time_ms) order by key collate "C", algorithm, time_ms
		on conflict (key, algorithm, time_ms) do update set due = l.due where false`
	readLimits = `select l.key, l.algorithm, l.time_ms, l.state, ` + now + `
		from unnest($1::text[], $2::smallint[], $3::bigint[]) u (key, algorithm, time_ms)
		join headcount_limits l on l.key = u.key and l.algorithm = u.algorithm and l.time_ms = u.time_ms`
	writeLimits = `update headcount_limits l set state = u.state, ends = u.ends, due = case l.due when 0 then u.ends else l.due end
		from unnest($1::text[], $2::smallint[], $3::bigint[], $4::bytea[], $5::bigint[]) u (key, algorithm, time_ms, state, ends)
		where l.key = u.key and l.algorithm = u.algorithm and l.time_ms = u.time_ms`
	// A state that has not ended when somebody looks is due at its end.
	sweepLimits = `with looked as (
			select ctid, ends from headcount_limits where ctid = any(array(
				select ctid from headcount_limits where due <= ` + now + ` order by due limit $1 for update skip locked))),
		gone as (delete from headcount_limits where ctid = any(array(select ctid from looked where ends <= ` + now + `))),
		later as (update headcount_limits set due = ends where ctid = any(array(select ctid from looked where ends > ` + now + `)))
		select count(*) from looked`
)

// limitColumns are names of limits, a column each.
type limitColumns struct {
	keys       []string
	algorithms []int16
	windows    []int64
}

func (l *limitColumns) add(n limit.Name) {
	l.keys = append(l.keys, n.Key)
	l.algorithms = append(l.algorithms, int16(n.Algorithm))
	l.windows = append(l.windows, n.Window)
}

// Limit is as counter.Limiter says: one transaction of two round trips, as a step of counters
// is. Its clock is the server's.
func (s *Store) Limit(ctx context.Context, calls []limit.Call) []counter.LimitResult {
	results := make([]counter.LimitResult, len(calls))
	err := retry(func() error {
		return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error { return takeAll(ctx, c, calls, results) })
	})
	if err != nil {
		for i := range results {
			results[i] = counter.LimitResult{Err: during("limit", err)}
		}
	}
	return results
}

func takeAll(ctx context.Context, c *pgxpool.Conn, calls []limit.Call, results []counter.LimitResult) error {
	states := map[limit.Name]*limit.State{}
	var names limitColumns
	for i := range calls {
		if n := calls[i].Name; states[n] == nil {
			states[n] = &limit.State{}
			names.add(n)
		}
	}
	var millis int64
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	b.Queue(lockLimits, names.keys, names.algorithms, names.windows)
	b.Queue(readLimits, names.keys, names.algorithms, names.windows).Query(func(rows pgx.Rows) error {
		var n limit.Name
		var algorithm int16
		var state []byte
		_, err := pgx.ForEachRow(rows, []any{&n.Key, &algorithm, &n.Window, &state, &millis}, func() (err error) {
			n.Algorithm = limit.Algorithm(algorithm)
			if *states[n], err = limit.Parse(state); err != nil {
				return callers{fmt.Errorf("limit %q: %w", n.Key, err)}
			}
			return nil
		})
		return err
	})
	if err := dead(ctx, c.SendBatch(ctx, b).Close()); err != nil {
		return fmt.Errorf("locking and reading: %w", err)
	}
	var passed limitColumns
	changed := map[limit.Name]bool{}
	for i := range calls {
		n := calls[i].Name
		results[i] = counter.LimitResult{Answer: states[n].Take(calls[i], millis)}
		if results[i].Allowed && !changed[n] {
			changed[n] = true
			passed.add(n)
		}
	}
	if len(changed) == 0 {
		_, err := c.Exec(ctx, "rollback")
		return err
	}
	var texts [][]byte
	var ends []int64
	for i := range passed.keys {
		n := limit.Name{Key: passed.keys[i], Algorithm: limit.Algorithm(passed.algorithms[i]), Window: passed.windows[i]}
		texts, ends = append(texts, states[n].Append(nil)), append(ends, states[n].End(n))
	}
	b = &pgx.Batch{}
	b.Queue(writeLimits, passed.keys, passed.algorithms, passed.windows, texts, ends)
	b.Queue("commit")
	if err := c.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	return nil
}

// sweepEnded looks at some limits that are due.
func sweepEnded(ctx context.Context, c *pgxpool.Conn) (more bool, err error) {
	var looked int64
	err = c.QueryRow(ctx, sweepLimits, sweepRows).Scan(&looked)
	return looked == sweepRows, err
}
