package counterpg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

const (
	// now is the server's clock in unix milliseconds.
	now = `floor(extract(epoch from clock_timestamp()) * 1000)::bigint`

	// lockRows makes the rows that are missing and locks the others. ON CONFLICT
	// ... WHERE false locks a row and does not write it.
	lockRows = `insert into headcount_counters as c (key)
		select key from unnest($1::text[]) key order by key collate "C"
		on conflict (key) do update set kind = c.kind where false`
	readRows = `select key, kind, value, updated, incarnation, sequence, entries, set_id, ledger_id, kept, history_id, slots, deleted, ` + now + `
		from headcount_counters, headcount_meta where key = any($1::text[])`
	readMembers = `select c.key, m.member
		from unnest($1::text[], $2::text[]) u (key, member)
		join headcount_counters c on c.key = u.key
		join headcount_members m on m.set_id = c.set_id and m.member = u.member`
	readRegisters = `select c.key, r.registers
		from headcount_counters c join headcount_registers r on r.set_id = c.set_id where c.key = any($1::text[])`
	// readSeen finds the running steps by the server's clock, which may go on until it is read for
	// the judge, and steps of a checkpoint by their numbers.
	readSeen = `select c.key, g.step, g.number, g.registers from unnest($1::text[], $2::int[], $3::bigint[]) u (key, step, number)
		join headcount_counters c on c.key = u.key
		join headcount_gains g on g.history_id = c.history_id and g.step = u.step and `
	runningSeen = readSeen + `g.number >= ` + now + ` / 1000 / u.step - u.number where c.history_id <> 0`
	drainedSeen = readSeen + `g.number = u.number where c.history_id <> 0`
	// The empty value has all that are not kept, and how many are.
	readCounted = `select c.key, d.name, d.value, d.count, d.kept from unnest($1::text[], $2::text[], $3::text[]) u (key, name, value)
		join headcount_counters c on c.key = u.key
		join headcount_dimensions d on d.history_id = c.history_id and d.name = u.name and d.value = any(array['', u.value]) where c.history_id <> 0`
	writeCounted = `insert into headcount_dimensions (history_id, name, value, count, kept)
		select * from unnest($1::bigint[], $2::text[], $3::text[], $4::bigint[], $5::int[])
		on conflict (history_id, name, value) do update set count = excluded.count, kept = excluded.kept`
	// claimIdempotencyKeys returns those that are new; one whose day is over is new again.
	claimIdempotencyKeys = `insert into headcount_identities as i (id, until)
		select id, ` + now + ` + $2 from unnest($1::uuid[]) id order by id
		on conflict (id) do update set until = excluded.until where i.until <= excluded.until - $2
		returning id`
	nextIDs = `select nextval('headcount_ids')`

	writeRows = `update headcount_counters c
		set kind = u.kind, value = u.value, updated = u.updated, incarnation = u.incarnation, sequence = u.sequence,
			entries = u.entries, set_id = u.set_id, ledger_id = u.ledger_id, kept = u.kept, history_id = u.history_id, slots = u.slots
		from unnest($1::text[], $2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[],
			$11::bigint[], $12::text[]) u (key, kind, value, updated, incarnation, sequence, entries, set_id, ledger_id, kept, history_id, slots)
		where c.key = u.key`
	dropRows = `delete from headcount_counters where key = any($1::text[])`
	// A checkpoint names who is a member now; one who left and came back since the one before is one already.
	insertMembers  = `insert into headcount_members (set_id, member) select * from unnest($1::bigint[], $2::text[]) on conflict do nothing`
	writeRegisters = `insert into headcount_registers (set_id, registers) select * from unnest($1::bigint[], $2::bytea[])
		on conflict (set_id) do update set registers = excluded.registers`
	deleteMembers = `delete from headcount_members m using unnest($1::bigint[], $2::text[]) u (set_id, member)
		where m.set_id = u.set_id and m.member = u.member`
	insertEntries = `insert into headcount_ledger (ledger_id, seq, at, delta, before, op, reason, author)
		select * from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::smallint[], $7::text[], $8::text[])`
	writeGains = `insert into headcount_gains (history_id, step, number, gain, registers)
		select * from unnest($1::bigint[], $2::int[], $3::bigint[], $4::bigint[], $5::bytea[])
		on conflict (history_id, step, number) do update set gain = excluded.gain, registers = excluded.registers`
	// A history that is swept already is so no later, unless it is kept differently now.
	sweepGains = `insert into headcount_sweeps (id, step, due, kept, garbage)
		select distinct on (id, step) id, step, due, kept, false from unnest($1::bigint[], $2::int[], $3::bigint[], $4::bigint[]) u (id, step, due, kept)
		order by id, step, due
		on conflict (id, step) do update set due = least(headcount_sweeps.due, excluded.due), kept = excluded.kept
			where headcount_sweeps.kept <> excluded.kept`
	writeSweeps = `insert into headcount_sweeps (id, due, kept, garbage)
		select * from unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::boolean[])
		on conflict (id, step) do update set due = excluded.due, kept = excluded.kept, garbage = excluded.garbage`
	forgetIdempotencyKeys = `delete from headcount_identities where id = any($1::uuid[])`
	writeDeleted          = `update headcount_meta set deleted = greatest(deleted, $1)`
)

// tries is how often a transaction is made that was surely rolled back.
const tries = 4

// Apply is as counter.Writer says: one transaction, unless an application holds one of several counters.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results, err := s.transact(ctx, ops, false)
	if isHeld(err) && len(ops) > 1 {
		s.applyAround(ctx, ops, results)
	}
	return results
}

// transact makes operations in one transaction, and returns why it failed. If brief is set, it hardly waits for locks.
func (s *Store) transact(ctx context.Context, ops []counter.Op, brief bool) ([]counter.Result, error) {
	w := s.newStep(ops)
	if len(w.keys) == 0 {
		w.judge(ops) // it refuses all of them
		return w.results, nil
	}
	err := retry(func() error {
		w = s.newStep(ops)
		w.brief = brief
		return s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error { return w.run(ctx, c, ops) })
	})
	if err != nil {
		for i := range w.results {
			w.results[i] = counter.Result{Err: during("apply", err)}
			if fault := ops[i].Check(); fault != nil {
				w.results[i].Err = fault
			}
		}
		return w.results, err
	}
	if len(w.told) > 0 {
		s.feed.committed(w.told)
	}
	return w.results, nil
}

// record is a row of headcount_counters.
type record struct {
	counter.State
	set     int64 // its members or registers; 0: it never had any
	ledger  int64 // 0: it never had one
	kept    int64 // how long entries of the ledger are kept, milliseconds
	history int64 // 0: it never had one
}

// row is a record with what belongs to it.
type row struct {
	record
	was     record          // as the table has it
	had     map[string]bool // of the members that are named: which were in the set was.set
	members map[string]bool // which are in the set now
	unique  hyperloglog.Registers
	entries []counter.Entry // of the ledger, not written yet
	past    []counter.Past  // of the history, not written yet
	seen    map[counter.Slot]*seen
	counted map[counter.Dimension]*counted // an empty value stands for those that are not kept
}

// counted is a row of headcount_dimensions.
type counted struct {
	count   int64
	kept    int32
	changed bool
}

// seen are the registers of a step of time.
type seen struct {
	registers hyperloglog.Registers
	known     bool // the table has it
	changed   bool // it is in past
}

// step is the counter.Step of one transaction: what the first round trip read,
// changed by Judge, to be written by the second.
type step struct {
	store *Store
	named
	results []counter.Result
	brief   bool // it hardly waits for locks

	records    map[string]*row
	fresh      map[counter.IdempotencyKey]bool // idempotency keys claimed by this transaction
	taken      map[counter.IdempotencyKey]bool // those of them that were needed
	deleted    int64
	wasDeleted int64
	now        time.Time
	nextID     int64              // the next free id of a set, a ledger or a history
	lastID     int64              // the one after the last that is free
	sweeps     map[int64]sweepRow // by id
	told       changes
	changed    bool // there is something to write
}

// named is what the operations of a step name.
type named struct {
	keys            []string // sorted, and so are idempotencyKeys: rows are locked in this order
	edited          memberColumns
	observed        []string    // counters whose registers may be asked for
	steps           stepColumns // their running steps
	dimensions      dimensionColumns
	idempotencyKeys [][16]byte
}

// sweepRow is a row of headcount_sweeps.
type sweepRow struct {
	due, kept int64
	garbage   bool
}

func (s *Store) newStep(ops []counter.Op) *step {
	w := &step{store: s, results: make([]counter.Result, len(ops)), records: map[string]*row{}}
	for i := range ops {
		op := &ops[i]
		if op.Check() != nil {
			continue // Judge says so
		}
		if op.IdempotencyKey != (counter.IdempotencyKey{}) {
			if w.fresh == nil {
				w.fresh, w.taken = map[counter.IdempotencyKey]bool{}, map[counter.IdempotencyKey]bool{}
			}
			if _, ok := w.fresh[op.IdempotencyKey]; !ok {
				w.fresh[op.IdempotencyKey] = false
				w.idempotencyKeys = append(w.idempotencyKeys, op.IdempotencyKey)
			}
		}
		for j := range op.Changes {
			c := &op.Changes[j]
			if w.records[c.Key] == nil {
				w.records[c.Key] = &row{}
			}
			for _, d := range c.Dimensions {
				w.dimensions.add(c.Key, d.Name, d.Value)
			}
			if c.Verb == counter.Edit {
				w.observed = append(w.observed, c.Key)
				if c.Rule.Kind == counter.Unique {
					for k := range c.Rule.Buckets {
						w.steps.add(c.Key, int32(c.Rule.Buckets[k].Step/time.Second), 1)
					}
				}
			}
			for _, members := range [...][]string{c.Join, c.Leave} {
				for _, m := range members {
					w.edited.add(c.Key, m)
					w.edited.add(c.Key, nameless(m)) // of an import
				}
			}
		}
	}
	w.keys = sortedKeys(w.records)
	slices.SortFunc(w.idempotencyKeys, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	return w
}

// run makes the transaction.
func (w *step) run(ctx context.Context, c *pgxpool.Conn, ops []counter.Op) error {
	if err := dead(ctx, w.read(ctx, c, ops)); err != nil {
		return fmt.Errorf("locking and reading: %w", err)
	}
	w.judge(ops)
	if !w.changed {
		_, err := c.Exec(ctx, "rollback")
		return err
	}
	if err := w.write(ctx, c); err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	return nil
}

func (w *step) judge(ops []counter.Op) {
	for i := range ops {
		if err := w.misplaced(&ops[i]); err != nil {
			w.results[i] = counter.Result{Err: err}
			continue
		}
		w.results[i] = counter.Judge(w, &ops[i], w.now)
	}
}

// read is the first round trip.
func (w *step) read(ctx context.Context, c *pgxpool.Conn, ops []counter.Op) error {
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	if w.brief {
		b.Queue(heldTimeout)
	}
	w.queueRows(b)
	if len(w.edited.key) > 0 {
		b.Queue(readMembers, w.edited.key, w.edited.member).Query(func(rows pgx.Rows) error {
			var key, member string
			_, err := pgx.ForEachRow(rows, []any{&key, &member}, func() error {
				row := w.records[key]
				if row.had == nil {
					row.had, row.members = map[string]bool{}, map[string]bool{}
				}
				row.had[member], row.members[member] = true, true
				return nil
			})
			return err
		})
	}
	if len(w.observed) > 0 {
		b.Queue(readRegisters, w.observed).Query(func(rows pgx.Rows) error {
			var key string
			var bytes []byte
			_, err := pgx.ForEachRow(rows, []any{&key, &bytes}, func() (err error) {
				w.records[key].unique, err = parseRegisters(bytes)
				bytes = nil // they are the row's now
				return err
			})
			return err
		})
	}
	w.queueSeen(b, runningSeen)
	w.queueCounted(b)
	if len(w.idempotencyKeys) > 0 {
		b.Queue(claimIdempotencyKeys, w.idempotencyKeys, counter.IdempotencyKeyKept.Milliseconds()).Query(func(rows pgx.Rows) error {
			var id [16]byte
			_, err := pgx.ForEachRow(rows, []any{&id}, func() error { w.fresh[id] = true; return nil })
			return err
		})
	}
	need := int64(0) // a change makes at most a set, a ledger and a history
	for i := range ops {
		need += 3 * int64(len(ops[i].Changes))
	}
	return w.send(ctx, c, b, need)
}

// queueSeen reads whom uniques saw in steps.
func (w *step) queueSeen(b *pgx.Batch, statement string) {
	if len(w.steps.key) == 0 {
		return
	}
	b.Queue(statement, w.steps.key, w.steps.step, w.steps.number).Query(func(rows pgx.Rows) error {
		var key string
		var step int32
		var number int64
		var bytes []byte
		_, err := pgx.ForEachRow(rows, []any{&key, &step, &number, &bytes}, func() error {
			registers, err := parseRegisters(bytes)
			bytes = nil // they are the row's now
			w.records[key].step(counter.Slot{Number: uint32(number), Step: uint32(step)}, &seen{registers: registers, known: true})
			return err
		})
		return err
	})
}

// queueCounted reads what was counted under the values that are named.
func (w *step) queueCounted(b *pgx.Batch) {
	if len(w.dimensions.key) == 0 {
		return
	}
	b.Queue(readCounted, w.dimensions.key, w.dimensions.name, w.dimensions.value).Query(func(rows pgx.Rows) error {
		var key string
		var d counter.Dimension
		var is counted
		_, err := pgx.ForEachRow(rows, []any{&key, &d.Name, &d.Value, &is.count, &is.kept}, func() error {
			found := is
			w.records[key].count(d, &found)
			return nil
		})
		return err
	})
}

// count puts down what was counted.
func (r *row) count(d counter.Dimension, is *counted) {
	if r.counted == nil {
		r.counted = map[counter.Dimension]*counted{}
	}
	r.counted[d] = is
}

// step is what is known of a step of time; what is not known yet is found.
func (r *row) step(at counter.Slot, found *seen) *seen {
	if r.seen == nil {
		r.seen = map[counter.Slot]*seen{}
	}
	if r.seen[at] == nil {
		r.seen[at] = found
	}
	return r.seen[at]
}

// queueRows locks and reads the rows of keys.
func (w *step) queueRows(b *pgx.Batch) {
	b.Queue(lockRows, w.keys)
	b.Queue(readRows, w.keys).Query(func(rows pgx.Rows) error {
		var millis int64
		return records(rows, func(key string, r *record) {
			w.now = time.UnixMilli(millis).UTC()
			w.records[key].record, w.records[key].was = *r, *r
		}, &w.deleted, &millis)
	})
}

// send makes the first round trip b, and takes as many ids as are needed.
func (w *step) send(ctx context.Context, c *pgxpool.Conn, b *pgx.Batch, need int64) error {
	var got bool
	if w.nextID, got = w.store.ids.take(need); !got {
		b.Queue(nextIDs).QueryRow(func(row pgx.Row) error { return row.Scan(&w.nextID) })
	}
	if err := c.SendBatch(ctx, b).Close(); err != nil {
		return err
	}
	if !got {
		w.store.ids.add(w.nextID)
		if w.nextID, got = w.store.ids.take(need); !got {
			return errors.New("too many changes for one block of ids")
		}
	}
	w.lastID, w.wasDeleted = w.nextID+need, w.deleted
	return nil
}

// records calls each with the counter of each row. Columns that come after it are in more by then.
func records(rows pgx.Rows, each func(key string, r *record), more ...any) error {
	var key, slots string
	var kind int16
	var value, updated, incarnation, sequence, entries, set, ledger, kept, history int64
	to := append([]any{&key, &kind, &value, &updated, &incarnation, &sequence, &entries, &set, &ledger, &kept, &history, &slots}, more...)
	_, err := pgx.ForEachRow(rows, to, func() error {
		r := record{counter.State{
			Kind: counter.Kind(kind), Value: value, Updated: updated, Entries: uint64(entries),
			Version: counter.Version{Incarnation: uint64(incarnation), Sequence: uint64(sequence)},
		}, set, ledger, kept, history}
		if err := r.ParseRest(slots); err != nil {
			return callers{err}
		}
		each(key, &r)
		return nil
	})
	return err
}

// write is the second round trip.
func (w *step) write(ctx context.Context, c *pgxpool.Conn) error {
	b := &pgx.Batch{}
	w.queueWrites(b)
	b.Queue("commit")
	return c.SendBatch(ctx, b).Close()
}

// parseRegisters reads registers of a row.
func parseRegisters(bytes []byte) (hyperloglog.Registers, error) {
	r, err := hyperloglog.Parse(bytes)
	if err != nil {
		err = callers{fmt.Errorf("registers in a row: %w", err)}
	}
	return r, err
}

// parseSeen reads registers of a row that may have none.
func parseSeen(bytes []byte) (*hyperloglog.Registers, error) {
	if bytes == nil {
		return nil, nil
	}
	r, err := parseRegisters(bytes)
	return &r, err
}
