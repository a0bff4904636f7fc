package exactpg

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/internal/outage"
)

// sweepAtOnce is how many entries one transaction deletes.
const sweepAtOnce = 2000

const (
	// Skip ledgers that another process is sweeping.
	nextSweep = `select s.key, s.incarnation, s.kept, clock_timestamp(),
			not exists (select from headcount_counters c
				where c.key = s.key and c.incarnation = s.incarnation and c.kind = 'exact')
		from headcount_sweeps s where s.due <= clock_timestamp() order by s.due limit 1 for update skip locked`
	// Entries are in order, so the first one that is too young ends the sweep. An array of row locations keeps the
	// planner from reading all rows.
	sweepEntries = `delete from headcount_ledger where ctid = any(array(
		select ctid from (select ctid, at from headcount_ledger
			where key = $1 and incarnation = $2 order by seq limit $3) oldest
		where at <= $4))`
	endSweep = `delete from headcount_sweeps where key = $1 and incarnation = $2`
	// The next sweep of a ledger is when the retention of its oldest entry ends, but not before a hundredth of the
	// retention, and a minute, have passed, so that not every single entry causes a sweep.
	laterSweep = `update headcount_sweeps s set due = greatest($3::timestamptz + s.kept * interval '10 microseconds',
			$3::timestamptz + interval '1 minute',
			coalesce((select at from headcount_ledger l
				where l.key = s.key and l.incarnation = s.incarnation order by seq limit 1), $3)
				+ s.kept * interval '1 millisecond')
		where s.key = $1 and s.incarnation = $2`
)

// sweepEach sweeps ledgers until ctx ends.
func (s *Store) sweepEach(ctx context.Context) {
	for outage.Sleep(ctx, s.cfg.SweepEvery) {
		if err := s.sweepReservations(ctx); err != nil {
			s.cfg.Log.Debug().Err(err).Msg("counters: sweeping reservations failed; retrying")
		}
		for more := true; more && ctx.Err() == nil; {
			err := s.do(ctx, "sweep", func(ctx context.Context, c *pgxpool.Conn) (err error) {
				more, err = sweepOne(ctx, c)
				return err
			})
			if err != nil {
				s.cfg.Log.Debug().Err(err).Msg("counters: sweeping ledgers failed; retrying")
				break
			}
		}
	}
}

// sweepOne deletes some entries of the ledger that has been due for the longest time. It reports whether any ledger was
// due.
func sweepOne(ctx context.Context, c *pgxpool.Conn) (more bool, err error) {
	tx, err := c.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // after a commit it has no effect

	var of ledger
	var kept int64
	var now time.Time
	var garbage bool
	err = tx.QueryRow(ctx, nextSweep).Scan(&of.key, &of.incarnation, &kept, &now, &garbage)
	if err == pgx.ErrNoRows {
		return false, nil
	}
	if err != nil {
		return false, err
	}

	// If the counter is gone, all its entries are deleted. If its rule keeps entries forever by now, none are.
	var ended, dropped int64
	forEver := !garbage && kept == 0
	if !forEver {
		until := now.Add(-time.Duration(kept) * time.Millisecond)
		if garbage {
			until = now.Add(time.Hour) // delete all entries
			tag, err := tx.Exec(ctx, dropReservations, of.key, of.incarnation, sweepAtOnce)
			if err != nil {
				return false, err
			}
			dropped = tag.RowsAffected()
		}
		tag, err := tx.Exec(ctx, sweepEntries, of.key, of.incarnation, sweepAtOnce, until)
		if err != nil {
			return false, err
		}
		ended = tag.RowsAffected()
	}

	// A ledger of which more is left stays due, so the next call goes on with it.
	isMore := max(ended, dropped) == sweepAtOnce
	switch {
	case isMore:
	case garbage, forEver:
		_, err = tx.Exec(ctx, endSweep, of.key, of.incarnation)
	default:
		_, err = tx.Exec(ctx, laterSweep, of.key, of.incarnation, now)
	}
	if err != nil {
		return false, err
	}

	return true, tx.Commit(ctx)
}
