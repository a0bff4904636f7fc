package counterpg

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	dumpRows = 500            // counters read at once, with all that is kept of them
	dumpFor  = 24 * time.Hour // that an export may take

	// Behind a Redis, clients see no version of a counter from before its generation: see since in package tiered.
	dumpCounters = `select key, kind, value, updated,
			case kind when 2 then incarnation else greatest(incarnation, (select generation from headcount_front)) end,
			sequence, entries, set_id, ledger_id, kept, history_id, slots
		from headcount_counters where key > $1 order by key limit $2`
	dumpMembers   = `select set_id, member from headcount_members where set_id = any($1) order by set_id, member`
	dumpRegisters = `select set_id, registers from headcount_registers where set_id = any($1)`
	dumpEntries   = `select ledger_id, seq, at, delta, before, op, reason, author from headcount_ledger where ledger_id = any($1) order by ledger_id, seq`
	dumpGains     = `select history_id, step, number, gain, registers from headcount_gains where history_id = any($1) order by history_id, step, number`
	dumpCounted   = `select history_id, name, value, count from headcount_dimensions where history_id = any($1) order by history_id, name, value`

	restoreIDs = `insert into headcount_identities as i (id, until) select * from unnest($1::uuid[], $2::bigint[])
		on conflict (id) do update set until = excluded.until where i.until < excluded.until`
)

var (
	_ counter.Dumper   = (*Store)(nil)
	_ counter.Restorer = (*Store)(nil)
)

// Deleted is as counter.Dumper says.
func (s *Store) Deleted(ctx context.Context) (uint64, error) {
	var deleted int64
	err := s.query(ctx, []any{&deleted}, func() error { return nil }, `select deleted from headcount_meta`)
	return uint64(deleted), during("dump", err)
}

// moment runs read in a transaction that sees one moment and may take long.
func (s *Store) moment(ctx context.Context, read func(ctx context.Context, c *pgxpool.Conn) error) error {
	err := s.doLong(ctx, dumpFor, func(ctx context.Context, c *pgxpool.Conn) error {
		for _, sql := range []string{
			`begin isolation level repeatable read read only`, `set local statement_timeout = 0`, `set local idle_in_transaction_session_timeout = 0`,
		} {
			if _, err := c.Exec(ctx, sql); err != nil {
				return err
			}
		}
		if err := read(ctx, c); err != nil {
			return err
		}
		_, err := c.Exec(ctx, "commit")
		return err
	})
	var said callers // what a caller's function has said is not about PostgreSQL
	if errors.As(err, &said) {
		return said.error
	}
	return during("dump", err)
}

// Dump is as counter.Dumper says: all is of one moment.
func (s *Store) Dump(ctx context.Context, after string, each func(counter.Copy) error) error {
	return s.moment(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		for {
			copies, err := dumpSome(ctx, c, after)
			if err != nil || len(copies) == 0 {
				return err
			}
			for _, one := range copies {
				if err := each(*one); err != nil {
					return callers{err}
				}
			}
			after = copies[len(copies)-1].Key
		}
	})
}

// dumpSome reads the counters after a key.
func dumpSome(ctx context.Context, c *pgxpool.Conn, after string) (copies []*counter.Copy, err error) {
	sets, ledgers, histories := map[int64]*counter.Copy{}, map[int64]*counter.Copy{}, map[int64]*counter.Copy{}
	rows, _ := c.Query(ctx, dumpCounters, after, dumpRows) // records returns the error
	if err := records(rows, func(key string, r *record) {
		one := &counter.Copy{Key: key, State: r.State}
		copies = append(copies, one)
		sets[r.set], ledgers[r.ledger], histories[r.history] = one, one, one
	}); err != nil {
		return nil, err
	}
	var id, number, gained, counted int64
	var step int32
	var member, name, value string
	var bytes []byte
	var e entryRow
	for _, part := range []struct {
		of   map[int64]*counter.Copy
		sql  string
		to   []any
		each func() error
	}{
		{sets, dumpMembers, []any{&id, &member}, func() error {
			sets[id].AddMember(member)
			return nil
		}},
		{sets, dumpRegisters, []any{&id, &bytes}, func() (err error) {
			sets[id].Registers, err = parseRegisters(bytes)
			bytes = nil // they are the copy's now
			return err
		}},
		{ledgers, dumpEntries, append([]any{&id}, e.columns()...), func() error {
			ledgers[id].Ledger = append(ledgers[id].Ledger, e.entry())
			return nil
		}},
		{histories, dumpGains, []any{&id, &step, &number, &gained, &bytes}, func() error {
			seen, err := parseSeen(bytes)
			bytes = nil // they are the copy's now
			histories[id].Steps = append(histories[id].Steps, counter.StepCopy{Step: uint32(step), Number: number, Value: gained, Seen: seen})
			return err
		}},
		{histories, dumpCounted, []any{&id, &name, &value, &counted}, func() error {
			if d := histories[id].Dimension(name); value == "" {
				d.Other = counted
			} else {
				d.Values[value] = counted
			}
			return nil
		}},
	} {
		delete(part.of, 0)
		if len(part.of) == 0 {
			continue
		}
		rows, _ := c.Query(ctx, part.sql, slices.Collect(maps.Keys(part.of))) // ForEachRow returns the error
		if _, err := pgx.ForEachRow(rows, part.to, part.each); err != nil {
			return nil, err
		}
	}
	return copies, nil
}

// Restore is as counter.Restorer says: one transaction.
func (s *Store) Restore(ctx context.Context, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	if len(copies) == 0 {
		return 0, nil
	}
	for i := range copies {
		copies[i].NameAll()
	}
	err = retry(func() error {
		return s.doLong(ctx, dumpFor, func(ctx context.Context, c *pgxpool.Conn) error {
			restored, err = s.restore(ctx, c, copies, rules)
			return err
		})
	})
	return restored, during("restore", err)
}

func (s *Store) restore(ctx context.Context, c *pgxpool.Conn, copies []counter.Copy, rules *counter.Rules) (restored int, err error) {
	w := &step{store: s, records: make(map[string]*row, len(copies))}
	for _, one := range copies {
		w.records[one.Key] = &row{}
	}
	w.keys = sortedKeys(w.records)
	b := &pgx.Batch{}
	b.Queue("begin isolation level read committed")
	b.Queue("set local statement_timeout = 0")
	w.queueRows(b)
	if err := w.send(ctx, c, b, int64(3*len(copies))); err != nil {
		return 0, dead(ctx, err)
	}
	for i := range copies {
		if one := copies[i]; one.Replaces(&w.records[one.Key].State, uint64(w.deleted)) {
			w.restore(&one, rules)
			restored++
		}
	}
	if restored == 0 {
		_, err := c.Exec(ctx, "rollback")
		return 0, err
	}
	return restored, w.write(ctx, c)
}

// restore puts a copy in the place of what is there.
func (w *step) restore(one *counter.Copy, rules *counter.Rules) {
	w.Drop(one.Key, counter.Version{})
	r := w.records[one.Key]
	r.State, r.unique = one.State, one.Registers
	if len(one.Members) > 0 {
		r.set, r.had, r.members = w.id(), nil, make(map[string]bool, len(one.Members))
		for _, m := range one.Members {
			r.members[m] = true
		}
	}
	ledger, kept := one.Kept(rules)
	if r.entries = one.Ledger; len(one.Ledger) > 0 {
		r.ledger, r.kept = w.id(), ledger.Milliseconds()
		if r.kept > 0 {
			w.sweep(r.ledger, sweepRow{due: one.Ledger[0].At.UnixMilli() + r.kept, kept: r.kept})
		}
	}
	for _, st := range one.Steps {
		w.past(one.Key, counter.Past{Slot: counter.Slot{Value: st.Value, Number: uint32(st.Number), Step: st.Step}, Kept: kept(st.Step), Seen: st.Seen})
	}
	for _, d := range one.Dimensions {
		if r.history == 0 {
			r.history = w.id()
		}
		r.count(counter.Dimension{Name: d.Name}, &counted{count: d.Other, kept: int32(len(d.Values)), changed: true})
		for value, n := range d.Values {
			r.count(counter.Dimension{Name: d.Name, Value: value}, &counted{count: n, changed: true})
		}
	}
}

// RestoreDeleted is as counter.Restorer says.
func (s *Store) RestoreDeleted(ctx context.Context, deleted uint64) error {
	return during("restore", s.exec(ctx, writeDeleted, int64(deleted)))
}

// RestoreIdempotencyKeys remembers idempotency keys of another store.
func (s *Store) RestoreIdempotencyKeys(ctx context.Context, idempotencyKeys []counter.IdempotencyKeyCopy) error {
	ids, until := make([][16]byte, len(idempotencyKeys)), make([]int64, len(idempotencyKeys))
	for i, id := range idempotencyKeys {
		ids[i], until[i] = id.IdempotencyKey, id.Until.UnixMilli()
	}
	return during("restore", s.exec(ctx, restoreIDs, ids, until))
}
