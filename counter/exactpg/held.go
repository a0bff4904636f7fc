package exactpg

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	heldTimeout = `set local lock_timeout = 50`
	// freeKeys returns the keys that exist and that no transaction has locked.
	freeKeys = `select key from headcount_counters where key = any($1::text[]) order by key ` +
		`for no key update skip locked`
)

// applyAround makes operations of which at least one is on a counter that an application has locked. Operations on free
// counters are one transaction; the others are one transaction each, which waits only briefly. All operations have
// results already, which are kept if PostgreSQL becomes unavailable.
func (s *Store) applyAround(ctx context.Context, ops []counter.Op, results []counter.Result) {
	free, err := s.free(ctx, newDraft(ops).keys)
	if err != nil {
		return
	}

	var together []counter.Op
	var at []int // indexes in ops
	held := map[string]bool{}
	for i := range ops {
		// A counter that does not exist is not among the free ones, so its operations are tried one by one.
		if allIn(free, &ops[i]) {
			together = append(together, ops[i])
			at = append(at, i)
			continue
		}
		// One operation has waited for that lock in vain, and another wait would only delay the rest.
		if anyIn(held, &ops[i]) {
			continue
		}

		one, err := s.transact(ctx, ops[i:i+1], true)
		results[i] = one[0]
		// If the operation has several counters, the error does not tell which of them is locked.
		if isHeld(err) && len(ops[i].Changes) == 1 {
			held[ops[i].Changes[0].Key] = true
		}
	}
	if len(together) == 0 {
		return
	}

	// Wait only briefly here, too: one of these counters may have been locked since it was found to be free.
	some, _ := s.transact(ctx, together, true)
	for i, result := range some {
		results[at[i]] = result
	}
}

// free returns the keys that exist and are not locked.
func (s *Store) free(ctx context.Context, keys []string) (map[string]bool, error) {
	free := map[string]bool{}
	err := s.do(ctx, "apply", func(ctx context.Context, c *pgxpool.Conn) error {
		var key string
		found, _ := c.Query(ctx, freeKeys, keys) // ForEachRow returns the error
		_, err := pgx.ForEachRow(found, []any{&key}, func() error {
			free[key] = true
			return nil
		})
		return err
	})

	return free, err
}

func allIn(keys map[string]bool, op *counter.Op) bool {
	for i := range op.Changes {
		if !keys[op.Changes[i].Key] {
			return false
		}
	}

	return true
}

func anyIn(keys map[string]bool, op *counter.Op) bool {
	for i := range op.Changes {
		if keys[op.Changes[i].Key] {
			return true
		}
	}

	return false
}
