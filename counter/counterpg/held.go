package counterpg

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	heldTimeout = `set local lock_timeout = 50`
	// freeKeys returns those that exist and that no transaction holds.
	freeKeys = `select key from headcount_counters where key = any($1::text[]) order by key for no key update skip locked`
)

// isHeld reports whether a transaction failed because an application holds the lock of a counter, as it does between
// a call of headcount.change and its commit.
func isHeld(err error) bool { return code(err) == "55P03" }

// applyAround makes operations of which at least one is on a counter that an application holds. Those on counters that
// nobody holds are one transaction, and the others one each, which does not wait long.
func (s *Store) applyAround(ctx context.Context, ops []counter.Op, results []counter.Result) {
	free := map[string]bool{}
	err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		rows, _ := c.Query(ctx, freeKeys, s.newStep(ops).keys) // ForEachRow returns the error
		var key string
		_, err := pgx.ForEachRow(rows, []any{&key}, func() error {
			free[key] = true
			return nil
		})
		return err
	})
	if err != nil {
		return // all have their results
	}
	var together []counter.Op
	var at []int // where they are in ops
	held := map[string]bool{}
	for i, op := range ops {
		all, waits := true, false
		for _, c := range op.Changes {
			all, waits = all && free[c.Key], waits || held[c.Key]
		}
		switch {
		case all:
			together, at = append(together, op), append(at, i)
		case !waits:
			one, err := s.transact(ctx, ops[i:i+1], true)
			results[i] = one[0]
			if isHeld(err) && len(op.Changes) == 1 {
				held[op.Changes[0].Key] = true
			}
		}
	}
	if len(together) > 0 {
		some, _ := s.transact(ctx, together, true)
		for i, r := range some {
			results[at[i]] = r
		}
	}
}
