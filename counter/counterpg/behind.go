package counterpg

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// This file is for package tiered, which says what stands in front.

const (
	// skipFront is for who persists, unless somebody does already; lockFront for who begins a generation. readFront is a
	// statement of its own: the one that waits for the lock sees everything else as it was before the wait.
	skipFront   = `select generation, epoch from headcount_front for no key update skip locked`
	lockFront   = `select from headcount_front for update`
	readFront   = `select generation, epoch, deleted, ` + now + `, exists (select from headcount_identities where until > ` + now + `) from headcount_front, headcount_meta`
	writeFront  = `update headcount_front set generation = $1, epoch = $2`
	writeNumber = `update headcount_front set epoch = $1`
	readMade    = `select id from headcount_identities where id = any($1::uuid[]) and until > ` + now
	readUnique  = `select c.key, c.kind, c.value, c.updated, c.incarnation, c.sequence, c.entries, c.set_id, c.ledger_id, c.kept, c.history_id, c.slots, r.registers
		from headcount_counters c left join headcount_registers r on r.set_id = c.set_id where c.key = $1`
	memberPage = `select member from headcount_members where set_id = $1 and member > $2 order by member limit $3`
	repeatable = "begin isolation level repeatable read read only"
	// A checkpoint may have a quarter of a million members of one set, written by one statement, and Redis may be slow to tell of it.
	takeTime    = `select set_config('statement_timeout', $1::bigint::text, true), set_config('idle_in_transaction_session_timeout', $2::bigint::text, true), set_config('lock_timeout', '0', true)`
	setPage     = 5000 // members of one page of a set
	persistFor  = 10 * time.Minute
	drainFor    = 30 * time.Second // from Redis, of a part
	setIn       = 10 * time.Minute
	aggregateIn = time.Minute
)

// misplaced refuses an operation on a counter that is not exact, when Redis has those.
func (w *step) misplaced(op *counter.Op) error {
	if !w.store.cfg.Behind || op.Check() != nil || op.IdempotencyKey != (counter.IdempotencyKey{}) && w.Remembered(op.IdempotencyKey) {
		return nil
	}
	for i := range op.Changes {
		key := op.Changes[i].Key
		if kind := w.records[key].Kind; kind != 0 && kind != counter.Exact {
			return counter.Misplaced(w.records[key].Counter(key))
		}
	}
	return nil
}

// Rows reads the states of counters; those without a row are zero.
func (s *Store) Rows(ctx context.Context, keys []string) (map[string]counter.State, error) {
	out := make(map[string]counter.State, len(keys))
	err := s.read(ctx, keys, "", func(key string, r *record, _ bool) { out[key] = r.State })
	return out, during("read", err)
}

// Registers reads a counter with its registers.
func (s *Store) Registers(ctx context.Context, key string) (st counter.State, registers hyperloglog.Registers, err error) {
	err = s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
		var bytes []byte
		rows, _ := c.Query(ctx, readUnique, key) // records returns the error
		if err := records(rows, func(_ string, r *record) { st = r.State }, &bytes); err != nil {
			return err
		}
		registers, err = parseRegisters(bytes)
		return err
	})
	return st, registers, err
}

// Set calls each with the members of a counter, a page at a time, and returns its state of
// that moment.
func (s *Store) Set(ctx context.Context, key string, each func([]string) error) (st counter.State, err error) {
	err = s.doLong(ctx, setIn, func(ctx context.Context, c *pgxpool.Conn) error {
		if _, err := c.Exec(ctx, repeatable); err != nil {
			return err
		}
		var set int64
		rows, _ := c.Query(ctx, readCounters, []string{key}, []string(nil)) // records returns the error
		if err := records(rows, func(_ string, r *record) { st, set = r.State, r.set }, new(bool)); err != nil {
			return err
		}
		for last := ""; set != 0; {
			rows, err := c.Query(ctx, memberPage, set, last, setPage)
			if err != nil {
				return err
			}
			page, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			if len(page) > 0 {
				last = page[len(page)-1]
				if err := each(page); err != nil {
					return callers{err}
				}
			}
			if len(page) < setPage {
				break
			}
		}
		_, err := c.Exec(ctx, "commit")
		return err
	})
	return st, err
}

// Known returns those of keys that are remembered.
func (s *Store) Known(ctx context.Context, keys []counter.IdempotencyKey) (known []counter.IdempotencyKey, err error) {
	var id [16]byte
	err = s.query(ctx, []any{&id}, func() error { known = append(known, id); return nil }, readMade, uuids(keys))
	return known, err
}

func uuids(idempotencyKeys []counter.IdempotencyKey) [][16]byte {
	ids := make([][16]byte, len(idempotencyKeys))
	for i, id := range idempotencyKeys {
		ids[i] = id
	}
	return ids
}

// Front is what PostgreSQL knows of Redis.
type Front struct {
	Generation, Checkpoint uint64
	Deleted                uint64 // highest incarnation that was deleted
	Now                    time.Time
	IdempotencyKeys        bool // some are remembered
}

// Regenerate locks the row of the front, so that no process persists meanwhile, and begins the generation that decide
// returns, unless that is 0. decide has ten minutes.
func (s *Store) Regenerate(ctx context.Context, decide func(ctx context.Context, f Front) (uint64, error)) error {
	return s.doLong(ctx, persistFor, func(ctx context.Context, c *pgxpool.Conn) error {
		b := &pgx.Batch{}
		b.Queue("begin isolation level read committed")
		b.Queue(takeTime, persistFor.Milliseconds(), persistFor.Milliseconds())
		b.Queue(lockFront)
		if err := c.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		var f Front
		var generation, epoch, deleted, millis int64
		if err := c.QueryRow(ctx, readFront).Scan(&generation, &epoch, &deleted, &millis, &f.IdempotencyKeys); err != nil {
			return err
		}
		f.Generation, f.Checkpoint, f.Deleted, f.Now = uint64(generation), uint64(epoch), uint64(deleted), time.UnixMilli(millis)
		next, err := decide(ctx, f)
		if err != nil {
			return callers{err}
		}
		if next != 0 {
			if _, err := c.Exec(ctx, writeFront, int64(next), int64(0)); err != nil {
				return err
			}
		}
		_, err = c.Exec(ctx, "commit")
		return err
	})
}

// Persisting is a checkpoint that is being written.
type Persisting struct {
	Generation, Checkpoint uint64 // the front's, before

	s      *Store
	c      *pgxpool.Conn
	failed bool // because of PostgreSQL, and not of Redis, which is drained meanwhile
	// Refused are counters that were not written, because their rows are exact.
	Refused []string
}

// Persist calls write, which writes a checkpoint and returns its number, or 0 when there is nothing to
// write. All of it is committed together. busy: somebody else persists.
func (s *Store) Persist(ctx context.Context, write func(ctx context.Context, p *Persisting) (number, deleted uint64, err error)) (busy bool, err error) {
	err = s.doLong(ctx, persistFor, func(ctx context.Context, c *pgxpool.Conn) error {
		b := &pgx.Batch{}
		b.Queue("begin isolation level read committed")
		b.Queue(takeTime, persistFor.Milliseconds(), drainFor.Milliseconds())
		if err := c.SendBatch(ctx, b).Close(); err != nil {
			return err
		}
		var generation, epoch int64
		err := c.QueryRow(ctx, skipFront).Scan(&generation, &epoch)
		if errors.Is(err, pgx.ErrNoRows) {
			busy = true
			return nil
		}
		if err != nil {
			return err
		}
		p := &Persisting{Generation: uint64(generation), Checkpoint: uint64(epoch), s: s, c: c}
		next, deleted, err := write(ctx, p)
		if err != nil && !p.failed {
			return callers{err}
		}
		if err != nil || next == 0 {
			return err
		}
		b = &pgx.Batch{}
		b.Queue(writeNumber, int64(next))
		if deleted > 0 {
			b.Queue(writeDeleted+" where deleted < $1", int64(deleted))
		}
		b.Queue("commit")
		return c.SendBatch(ctx, b).Close()
	})
	return busy, err
}

// IdempotencyKeys writes idempotency keys.
func (p *Persisting) IdempotencyKeys(ctx context.Context, idempotencyKeys []counter.IdempotencyKey) error {
	ids := uuids(idempotencyKeys)
	slices.SortFunc(ids, func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) })
	_, err := p.c.Exec(ctx, claimIdempotencyKeys, slices.Compact(ids), counter.IdempotencyKeyKept.Milliseconds())
	p.failed = p.failed || err != nil
	return err
}

// Write writes counters: absolute values, one row each.
func (p *Persisting) Write(ctx context.Context, drained []counter.Drained) (err error) {
	defer func() { p.failed = p.failed || err != nil }()
	w := p.s.newStep(nil)
	for i := range drained {
		w.records[drained[i].Key] = &row{}
		for _, c := range drained[i].Counted {
			w.dimensions.add(drained[i].Key, c.Name, c.Value)
		}
		for j := range drained[i].Past {
			if p := &drained[i].Past[j]; p.Seen != nil {
				w.steps.add(drained[i].Key, int32(p.Step), int64(p.Number))
			}
		}
	}
	w.keys = sortedKeys(w.records)
	b := &pgx.Batch{}
	w.queueRows(b)
	w.queueSeen(b, drainedSeen)
	w.queueCounted(b)
	if err := w.send(ctx, p.c, b, 3*int64(len(drained))); err != nil {
		return err
	}
	for i := range drained {
		if !w.put(&drained[i]) {
			p.Refused = append(p.Refused, drained[i].Key)
		}
	}
	b = &pgx.Batch{}
	w.queueWrites(b)
	if b.Len() == 0 {
		return nil
	}
	return p.c.SendBatch(ctx, b).Close()
}

// put makes the row what a checkpoint says.
func (w *step) put(d *counter.Drained) bool {
	r := w.records[d.Key]
	if r.Kind == counter.Exact {
		return false
	}
	if (d.Deleted || d.State == (counter.State{})) && r.was.Kind != 0 {
		w.Drop(d.Key, r.was.Version)
	}
	if d.State != (counter.State{}) && d.State.Version.Compare(r.Version) < 0 {
		return true // Redis has an older memory than what was persisted
	}
	r.State = d.State
	if d.State == (counter.State{}) {
		return true
	}
	if (d.Emptied || r.Kind == counter.Unique && d.Registers.Empty()) && r.set != 0 {
		w.Empty(d.Key)
	}
	r.unique = d.Registers
	if len(d.Joined) > 0 && r.set == 0 {
		r.set = w.id()
	}
	r.had, r.members = map[string]bool{}, map[string]bool{}
	for _, m := range d.Joined {
		r.members[m], r.had[counter.Nameless(counter.MemberHash(m))] = true, true
	}
	for _, m := range d.Left {
		r.had[m], r.had[counter.Nameless(counter.MemberHash(m))] = true, true
	}
	for _, c := range d.Counted {
		w.Count(d.Key, c.Name, c.Value, c.Count)
	}
	for _, p := range d.Past {
		if p.Seen == nil {
			w.past(d.Key, p)
			continue
		}
		seen := r.step(p.Slot, &seen{})
		seen.registers.Merge(*p.Seen)
		w.keep(d.Key, p.Slot, seen, p.Kept)
	}
	for _, e := range d.Entries {
		w.Enter(d.Key, e, counter.DefaultLedger)
	}
	return true
}
