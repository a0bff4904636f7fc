package exactpg

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/internal/postgres"
)

const (
	// lockRows creates missing rows and locks the others. ON CONFLICT ... WHERE false locks a row without writing it.
	lockRows = `insert into headcount_counters as c (key, kind)
		select key, '' from unnest($1::text[]) key order by key collate "C"
		on conflict (key) do update set kind = c.kind where false`
	readRows = `select ` + columns + `, deleted, date_trunc('milliseconds', clock_timestamp())
		from headcount_counters c, headcount_meta where c.key = any($1::text[])`
	// claimIDs returns the IDs that are new. An ID that has expired counts as new again. Each ID determines its
	// partition, see homeOf in package call.
	claimIDs = `insert into headcount_row_ids as i (partition, id, until)
		select get_byte(uuid_send(id), 0) & 63, id, clock_timestamp() + $2::interval from unnest($1::uuid[]) id order by id
		on conflict (partition, id) do update set until = excluded.until where i.until <= excluded.until - $2::interval
		returning id`

	writeRows = `update headcount_counters c
		set kind = 'exact', value = u.value, updated_at = u.updated, incarnation = u.incarnation, sequence = u.sequence,
			entries = u.entries, kept = u.kept, reserved = u.reserved, open = u.open
		from unnest($1::text[], $2::bigint[], $3::timestamptz[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[],
			$8::bigint[], $9::bigint[])
			u (key, value, updated, incarnation, sequence, entries, kept, reserved, open)
		where c.key = u.key`
	dropRows = `delete from headcount_counters where key = any($1::text[])`
	// Every element of an array costs time. So values that follow from others are not sent, and rare columns have empty
	// arrays.
	insertEntries = `insert into headcount_ledger
			(key, incarnation, seq, op, delta, before, reason, author, at, after)
		select key, incarnation, seq, coalesce(op, case when delta > 0 then 'increment' else 'decrement' end), delta, before,
			coalesce(reason, ''), coalesce(author, ''), coalesce(at, $9), before + delta
		from unnest($1::text[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[], $6::bigint[], $7::text[], $8::text[],
			$10::timestamptz[]) u(key, incarnation, seq, op, delta, before, reason, author, at)`
	writeSweeps = `insert into headcount_sweeps (key, incarnation, due, kept)
		select * from unnest($1::text[], $2::bigint[], $3::timestamptz[], $4::bigint[])
		on conflict (key, incarnation) do update set due = excluded.due, kept = excluded.kept`
	forgetIDs = `delete from headcount_row_ids
		where partition = any(array(select get_byte(uuid_send(id), 0) & 63 from unnest($1::uuid[]) id))
			and id = any($1::uuid[])`
	writeDeleted = `update headcount_meta set deleted = greatest(deleted, $1)`
)

// Apply implements counter.Writer, for operations on exact counters. They are one transaction, unless an application
// holds a lock on one of several counters.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results, err := s.transact(ctx, ops, false)
	// An application may hold one counter for long. Operations on the others must not fail with it.
	if isHeld(err) && len(ops) > 1 {
		s.applyAround(ctx, ops, results)
	}

	return results
}

// transact makes operations in one transaction, and returns why it failed. If brief is set, it waits for locks only for
// a moment.
func (s *Store) transact(ctx context.Context, ops []counter.Op, brief bool) ([]counter.Result, error) {
	d := newDraft(ops)
	if len(d.keys) == 0 {
		d.judge(ops) // judging refuses all of them
		return d.results, nil
	}

	tried := false
	err := s.do(ctx, "apply", func(ctx context.Context, c *pgxpool.Conn) error {
		// Drop the results of an earlier attempt.
		if tried {
			d = newDraft(ops)
		}
		tried = true
		d.brief = brief
		d.copiesLag = s.cfg.Elsewhere != nil
		return s.run(ctx, c, d, ops)
	})
	if err != nil {
		for i := range ops {
			d.results[i] = counter.Result{Err: err}
			// An invalid operation is refused in any case, so its caller learns that instead.
			if fault := ops[i].Check(); fault != nil {
				d.results[i].Err = fault
			}
		}
		return d.results, err
	}
	// Not before the commit: whoever is notified reads the counter at once.
	s.feed.committed(d.changed)

	return d.results, nil
}

// run executes the transaction.
func (s *Store) run(ctx context.Context, c *pgxpool.Conn, d *draft, ops []counter.Op) error {
	if err := d.read(ctx, c); err != nil {
		return fmt.Errorf("locking and reading: %w", postgres.First(ctx, err))
	}
	if err := s.findElsewhere(ctx, d); err != nil {
		return err
	}

	d.judge(ops)
	if !d.writes() {
		// This also takes back rows that were made only to be locked, and the keys of refused operations.
		_, err := c.Exec(ctx, "rollback")
		return err
	}

	if err := d.write(ctx, c); err != nil {
		return fmt.Errorf("writing: %w", err)
	}

	return nil
}

// record is a row of headcount_counters.
type record struct {
	counter.State
	kept int64 // retention of the ledger's entries, milliseconds
}

// row is a record within a draft.
type row struct {
	record
	was     record          // as in the table
	entries []counter.Entry // not written yet

	restored bool // the entries have times of their own
}

// ledger names a ledger.
type ledger struct {
	key         string
	incarnation uint64
}

// draft is the counter.Tx of one transaction: the first round trip reads it, Judge changes it, and the second round
// trip writes it.
type draft struct {
	keys  []string   // sorted, like ids, because rows are locked in this order
	ids   [][16]byte // idempotency keys
	brief bool       // wait for locks only for a moment
	// copiesLag says that the table's copies of other counters may be outdated, so another store must be asked for
	// these.
	copiesLag bool

	rows       map[string]*row
	misplaced  map[string]counter.Counter      // counters of another kind among keys
	fresh      map[counter.IdempotencyKey]bool // IDs that this transaction has claimed
	taken      map[counter.IdempotencyKey]bool // IDs that its operations use
	deleted    int64
	wasDeleted int64
	now        time.Time

	reservations map[held]counter.Reservation // reservations that operations name; the zero value for an unknown one
	kept         []held                       // those that have changed

	results []counter.Result
	changed []string // keys
	sweeps  map[ledger]sweep
}

// sweep schedules the next sweep of a ledger.
type sweep struct {
	due  time.Time
	kept int64
}

func newDraft(ops []counter.Op) *draft {
	d := &draft{
		rows:    make(map[string]*row, len(ops)),
		results: make([]counter.Result, len(ops)),
	}
	for i := range ops {
		op := &ops[i]
		if op.Check() != nil {
			continue // Judge reports the error
		}
		if op.IdempotencyKey != (counter.IdempotencyKey{}) {
			d.claim(op.IdempotencyKey)
		}
		for j := range op.Changes {
			key := op.Changes[j].Key
			if d.rows[key] == nil {
				d.rows[key] = &row{}
				d.keys = append(d.keys, key)
			}
			if hold := op.Changes[j].Hold; hold != nil {
				d.asks(key, hold.ID)
			}
		}
	}
	// Transactions that lock in one order never wait for each other in a circle.
	slices.Sort(d.keys)
	slices.SortFunc(d.ids, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })

	return d
}

// claim makes the transaction claim an idempotency key.
func (d *draft) claim(id counter.IdempotencyKey) {
	if d.fresh == nil {
		d.fresh = map[counter.IdempotencyKey]bool{}
		d.taken = map[counter.IdempotencyKey]bool{}
	}
	if _, again := d.fresh[id]; again {
		return
	}

	// The key counts as remembered until the statement that claims it returns it.
	d.fresh[id] = false
	d.ids = append(d.ids, id)
}

// read makes the first round trip.
func (d *draft) read(ctx context.Context, c *pgxpool.Conn) error {
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	if d.brief {
		b.Queue(heldTimeout)
	}
	d.queueRows(b)
	d.queueReservations(b)
	if len(d.ids) > 0 {
		var id [16]byte
		// headcount.change locks in the same order: first the counter, then the idempotency key.
		b.Queue(claimIDs, d.ids, counter.IdempotencyKeyKept).Query(func(found pgx.Rows) error {
			_, err := pgx.ForEachRow(found, []any{&id}, func() error {
				// An ID that is not returned is remembered from before.
				d.fresh[id] = true
				return nil
			})
			return err
		})
	}

	return c.SendBatch(ctx, b).Close()
}

// queueRows queues the statements that lock and read the rows of keys.
func (d *draft) queueRows(b *pgx.Batch) {
	b.Queue(lockRows, d.keys)
	// As a separate statement, it sees what was committed while the one before waited for the locks.
	b.Queue(readRows, d.keys).Query(func(found pgx.Rows) error {
		var r scanned
		_, err := pgx.ForEachRow(found, r.to(&d.deleted, &d.now), func() error {
			is := r.record()
			isCopy := is.Kind != 0 && !is.Kind.IsExact()
			// The row counts as missing, so findElsewhere asks the store that has the counter itself.
			if isCopy && d.copiesLag {
				return nil
			}

			d.rows[r.key].record = is
			d.rows[r.key].was = is
			if isCopy {
				d.misplace(is.Counter(r.key))
			}
			return nil
		})
		d.wasDeleted = d.deleted
		d.now = d.now.UTC()
		return err
	})
}

func (d *draft) misplace(c counter.Counter) {
	if d.misplaced == nil {
		d.misplaced = map[string]counter.Counter{}
	}
	d.misplaced[c.Key] = c
}

// findElsewhere looks for counters of another kind before one is created.
func (s *Store) findElsewhere(ctx context.Context, d *draft) error {
	var begun []string
	for _, key := range d.keys {
		if d.rows[key].Kind == 0 {
			begun = append(begun, key)
		}
	}
	// Most changes are of counters that exist, and cost no question to the other store.
	if s.cfg.Elsewhere == nil || len(begun) == 0 {
		return nil
	}

	found, err := s.cfg.Elsewhere(ctx, begun)
	for _, one := range found {
		d.misplace(one)
	}

	return err
}

func (d *draft) judge(ops []counter.Op) {
	for i := range ops {
		d.results[i] = counter.Result{Err: d.refuses(&ops[i])}
		if d.results[i].Err == nil {
			d.results[i] = counter.Judge(d, &ops[i], d.now)
		}
	}
}

// refuses returns the conflict of an operation on a counter of another kind, unless the operation is a replay.
func (d *draft) refuses(op *counter.Op) error {
	// A replay changes nothing, so it does not matter where the counter is by now.
	replay := op.IdempotencyKey != (counter.IdempotencyKey{}) && d.Remembered(op.IdempotencyKey)
	if len(d.misplaced) == 0 || replay || op.Check() != nil {
		return nil
	}

	for i := range op.Changes {
		if have, is := d.misplaced[op.Changes[i].Key]; is {
			return counter.Misplaced(have)
		}
	}

	return nil
}

// writes reports whether there is anything to write.
func (d *draft) writes() bool { return len(d.changed) > 0 || len(d.taken) > 0 }

// write makes the second round trip.
func (d *draft) write(ctx context.Context, c *pgxpool.Conn) error {
	b := &pgx.Batch{}
	d.queueWrites(b)
	b.Queue("commit")

	// After a failed statement the rest of the batch is skipped, including the commit.
	return c.SendBatch(ctx, b).Close()
}
