package counterpg

import (
	"context"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// sweepRows is how many rows of a kind one transaction clears away.
const sweepRows = 2000

// Rows that somebody has locked are left for the next time. An array of the
// rows' places is the one form that keeps the planner from reading all.
const (
	sweepIdempotencyKeys = `delete from headcount_identities where ctid = any(array(
		select ctid from headcount_identities where until <= ` + now + ` order by until limit $1 for update skip locked))`
	nextSweep      = `select id, step, kept, garbage, ` + now + ` from headcount_sweeps where due <= ` + now + ` order by due limit 1 for update skip locked`
	sweepMembers   = `delete from headcount_members where ctid = any(array(select ctid from headcount_members where set_id = $1 limit $2))`
	sweepRegisters = `delete from headcount_registers where set_id = $1`
	// Entries go in order: those after one that is young enough are younger.
	sweepEntries = `delete from headcount_ledger where ctid = any(array(
		select ctid from (select ctid, at from headcount_ledger where ledger_id = $1 order by seq limit $2) oldest where at <= $3))`
	endSweep     = `delete from headcount_sweeps where id = $1 and step = $2`
	sweepGarbage = `delete from headcount_sweeps where id = $1 and step <> 0`
	sweepHistory = `delete from headcount_gains where ctid = any(array(
		select ctid from headcount_gains where history_id = $1 order by history_id, step, number limit $2))`
	sweepCounted = `delete from headcount_dimensions where ctid = any(array(select ctid from headcount_dimensions where history_id = $1 limit $2))`
	// Those after one that is young enough are younger.
	sweepOld = `delete from headcount_gains where ctid = any(array(select ctid from
		(select ctid, number from headcount_gains where history_id = $1 and step = $2 order by number limit $3) oldest where number <= $4))`
	readOldest = `select number from headcount_gains where history_id = $1 and step = $2 order by number limit 1`
	laterGains = `update headcount_sweeps set due = greatest($3 + kept / 100, $3 + 60000, $4 + kept) where id = $1 and step = $2`
	// A ledger is looked at again when its oldest entry has been kept long enough,
	// and not for every single entry: a hundredth of the time later, a minute at least.
	laterSweep = `update headcount_sweeps set due = greatest($2 + kept / 100, $2 + 60000,
		coalesce((select at from headcount_ledger where ledger_id = $1 order by seq limit 1), $2) + kept) where id = $1 and step = 0`
)

// sweep clears away until ctx ends.
func (s *Store) sweep(ctx context.Context) {
	ticker := time.NewTicker(s.cfg.SweepEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		for _, one := range []func(context.Context, *pgxpool.Conn) (more bool, err error){sweepSome, sweepEnded, sweepOne} {
			for more := true; more && ctx.Err() == nil; {
				more = false
				err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) (err error) {
					more, err = one(ctx, c)
					return err
				})
				if err != nil {
					s.cfg.Log.Debug().Err(err).Msg("counters: clearing away")
					break
				}
			}
		}
	}
}

// sweepSome forgets some idempotency keys.
func sweepSome(ctx context.Context, c *pgxpool.Conn) (more bool, err error) {
	tag, err := c.Exec(ctx, sweepIdempotencyKeys, sweepRows)
	return tag.RowsAffected() == sweepRows, err
}

// sweepOne takes the next set or ledger that is due and clears away a part of it.
func sweepOne(ctx context.Context, c *pgxpool.Conn) (more bool, err error) {
	tx, err := c.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // after a commit there is nothing to roll back
	var id, kept, millis int64
	var step int32
	var garbage bool
	switch err := tx.QueryRow(ctx, nextSweep).Scan(&id, &step, &kept, &garbage, &millis); err {
	case nil:
	case pgx.ErrNoRows:
		return false, nil
	default:
		return false, err
	}
	if step != 0 {
		if err := sweepStep(ctx, tx, id, step, kept, millis); err != nil {
			return false, err
		}
		return true, tx.Commit(ctx)
	}
	until := millis - kept
	if garbage {
		until = math.MaxInt64
	}
	more, err = sweepOf(ctx, tx, sweepEntries, id, sweepRows, until)
	if garbage {
		for _, sql := range []string{sweepMembers, sweepHistory, sweepCounted} {
			if err == nil {
				var left bool
				left, err = sweepOf(ctx, tx, sql, id, sweepRows)
				more = more || left
			}
		}
		for _, sql := range []string{sweepRegisters, sweepGarbage} {
			if err == nil {
				_, err = tx.Exec(ctx, sql, id)
			}
		}
	}
	switch {
	case err != nil || more:
	case garbage:
		_, err = tx.Exec(ctx, endSweep, id, 0)
	default:
		_, err = tx.Exec(ctx, laterSweep, id, millis)
	}
	if err != nil {
		return false, err
	}
	return true, tx.Commit(ctx)
}

// sweepOf clears away what one statement finds, and reports whether there may be more.
func sweepOf(ctx context.Context, tx pgx.Tx, sql string, args ...any) (more bool, err error) {
	tag, err := tx.Exec(ctx, sql, args...)
	return tag.RowsAffected() == sweepRows, err
}

// sweepStep clears away a part of what a counter gained in steps that are not kept any more.
func sweepStep(ctx context.Context, tx pgx.Tx, id int64, step int32, kept, millis int64) error {
	length := int64(step) * 1000
	tag, err := tx.Exec(ctx, sweepOld, id, step, sweepRows, (millis-kept)/length-2) // as counter.Over has it
	if err != nil || tag.RowsAffected() == sweepRows {
		return err
	}
	var oldest int64
	switch err := tx.QueryRow(ctx, readOldest, id, step).Scan(&oldest); err {
	case nil:
		_, err = tx.Exec(ctx, laterGains, id, step, millis, (oldest+2)*length)
		return err
	case pgx.ErrNoRows:
		_, err = tx.Exec(ctx, endSweep, id, step)
		return err
	default:
		return err
	}
}
