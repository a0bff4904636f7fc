package exactpg

import (
	"time"

	"github.com/jackc/pgx/v5"

	"headcount/counter"
	"headcount/hyperloglog"
)

// State implements counter.Tx.
func (d *draft) State(key string) *counter.State { return &d.rows[key].State }

// Deleted implements counter.Tx.
func (d *draft) Deleted() uint64 { return uint64(d.deleted) }

// Remembered implements counter.Tx.
func (d *draft) Remembered(id counter.IdempotencyKey) bool { return !d.fresh[id] || d.taken[id] }

// Remember implements counter.Tx.
func (d *draft) Remember(id counter.IdempotencyKey) { d.taken[id] = true }

// Changed implements counter.Tx.
func (d *draft) Changed(key string, _, _ []string, _ bool) {
	last := len(d.changed) - 1
	if last < 0 || d.changed[last] != key {
		d.changed = append(d.changed, key)
	}
}

// Enter implements counter.Tx. It also schedules a sweep of the ledger for when the retention of its first entry ends,
// or at once if the retention has changed.
func (d *draft) Enter(key string, e counter.Entry, kept time.Duration) {
	r := d.rows[key]
	r.entries = append(r.entries, e)

	millis := kept.Milliseconds()
	begins := e.Seq == 1
	if begins && millis > 0 {
		d.sweep(key, r.Version, sweep{due: d.now.Add(kept), kept: millis})
	}
	if !begins && millis != r.kept {
		d.sweep(key, r.Version, sweep{due: d.now, kept: millis})
	}
	r.kept = millis
}

func (d *draft) sweep(key string, v counter.Version, at sweep) {
	if d.sweeps == nil {
		d.sweeps = map[ledger]sweep{}
	}
	d.sweeps[ledger{key, v.Incarnation}] = at
}

// Drop implements counter.Tx.
func (d *draft) Drop(key string, v counter.Version) {
	d.deleted = max(d.deleted, int64(v.Incarnation))

	r := d.rows[key]
	// Entries that are not written yet go with the counter.
	r.entries = nil
	r.kept = 0
	d.dropReservations(key)

	// A sweep of a ledger without entries does no harm.
	d.sweep(key, v, sweep{due: d.now})
}

// An exact counter has no members, registers, history and dimensions: Judge refuses such changes before it calls these.

// Join implements counter.Tx.
func (d *draft) Join(string, string) bool { return false }

// Leave implements counter.Tx.
func (d *draft) Leave(string, string) bool { return false }

// Registers implements counter.Tx.
func (d *draft) Registers(string) counter.Registers { return &hyperloglog.Registers{} }

// Empty implements counter.Tx.
func (d *draft) Empty(string) {}

// Past implements counter.Tx.
func (d *draft) Past(string, counter.Slot, time.Duration) {}

// See implements counter.Tx.
func (d *draft) See(string, counter.Slot, []string, time.Duration) {}

// Count implements counter.Tx.
func (d *draft) Count(string, string, string, int64) {}

// writtenAtOnce is the maximum number of entries of one statement, so that each ends before its timeout.
const writtenAtOnce = 10_000

// queueWrites queues the statements that write all changes: one for each table, and more for a ledger that is restored
// with many entries.
func (d *draft) queueWrites(b *pgx.Batch) {
	var put rowColumns
	var gone []string
	entries := entryColumns{now: d.now}
	for _, key := range d.keys {
		r := d.rows[key]
		switch {
		case r.State == (counter.State{}):
			gone = append(gone, key) // also a row that lockRows created and that is not needed
		case r.record != r.was:
			put.add(key, &r.record)
		}
		for i := range r.entries {
			entries.add(key, r.Version, &r.entries[i])
		}
		if r.restored {
			entries.addTimes(r.entries)
		}
	}

	var sweeps sweepColumns
	// In any order: the locks of the counters keep all other writers from these rows.
	for of, at := range d.sweeps {
		sweeps.add(of, at)
	}
	var unneeded [][16]byte
	for _, id := range d.ids {
		// A refused operation may be made later under its key, so the claim is taken back.
		if d.fresh[id] && !d.taken[id] {
			unneeded = append(unneeded, id)
		}
	}

	queue := func(n int, sql string, args ...any) {
		if n > 0 {
			b.Queue(sql, args...)
		}
	}
	queue(len(put.key), writeRows,
		put.key, put.value, put.updated, put.incarnation, put.sequence, put.entries, put.kept, put.reserved, put.open)
	queue(len(gone), dropRows, gone)
	for first := 0; first < len(entries.key); first += writtenAtOnce {
		some := entries.from(first)
		b.Queue(insertEntries, some.args()...)
	}
	d.queueKept(b)
	queue(len(sweeps.key), writeSweeps, sweeps.key, sweeps.incarnation, sweeps.due, sweeps.kept)
	queue(len(unneeded), forgetIDs, unneeded)
	if d.deleted != d.wasDeleted {
		b.Queue(writeDeleted, d.deleted)
	}
}

// Columns that are sent as arrays.
type (
	rowColumns struct {
		key                                         []string
		value, incarnation, sequence, entries, kept []int64
		reserved, open                              []int64
		updated                                     []time.Time
	}
	entryColumns struct {
		key, op, reason, author         []string
		incarnation, seq, delta, before []int64
		hasTexts                        bool        // an entry has more than numbers
		now                             time.Time   // the time of entries without a time of their own
		at                              []time.Time // empty, or one for each
	}
	sweepColumns struct {
		key               []string
		incarnation, kept []int64
		due               []time.Time
	}
)

func (c *rowColumns) add(key string, r *record) {
	c.key = append(c.key, key)
	c.value = append(c.value, r.Value)
	c.updated = append(c.updated, time.UnixMilli(r.Updated))
	c.incarnation = append(c.incarnation, int64(r.Version.Incarnation))
	c.sequence = append(c.sequence, int64(r.Version.Sequence))
	c.entries = append(c.entries, int64(r.Entries))
	c.kept = append(c.kept, r.kept)
	c.reserved = append(c.reserved, r.Reserved)
	c.open = append(c.open, int64(r.Open))
}

func (c *entryColumns) add(key string, v counter.Version, e *counter.Entry) {
	c.key = append(c.key, key)
	c.incarnation = append(c.incarnation, int64(v.Incarnation))
	c.seq = append(c.seq, int64(e.Seq))
	c.op = append(c.op, e.Op.String())
	c.delta = append(c.delta, e.Delta)
	c.before = append(c.before, e.Before)
	c.reason = append(c.reason, e.Reason)
	c.author = append(c.author, e.By)

	// As long as all entries are plain, half of the columns need not be sent.
	isPlain := e.Op == counter.LedgerIncrement || e.Op == counter.LedgerDecrement
	c.hasTexts = c.hasTexts || !isPlain || e.Reason != "" || e.By != ""
}

// addTimes adds the times of restored entries, which differ from now. The columns then have no other entries.
func (c *entryColumns) addTimes(of []counter.Entry) {
	for i := range of {
		c.at = append(c.at, of[i].At)
	}
}

// from returns the entries of one statement, beginning with first.
func (c *entryColumns) from(first int) entryColumns {
	end := min(first+writtenAtOnce, len(c.key))
	some := entryColumns{
		key: c.key[first:end], op: c.op[first:end], reason: c.reason[first:end], author: c.author[first:end],
		incarnation: c.incarnation[first:end], seq: c.seq[first:end],
		delta: c.delta[first:end], before: c.before[first:end],
		hasTexts: c.hasTexts, now: c.now,
	}
	// Only restored entries have times of their own.
	if len(c.at) > 0 {
		some.at = c.at[first:end]
	}

	return some
}

func (c *entryColumns) args() []any {
	// PostgreSQL fills columns without an array with nulls, for which the statement has defaults.
	if !c.hasTexts {
		return []any{c.key, c.incarnation, c.seq, nil, c.delta, c.before, nil, nil, c.now, c.at}
	}

	return []any{c.key, c.incarnation, c.seq, c.op, c.delta, c.before, c.reason, c.author, c.now, c.at}
}

func (c *sweepColumns) add(of ledger, at sweep) {
	c.key = append(c.key, of.key)
	c.incarnation = append(c.incarnation, int64(of.incarnation))
	c.due = append(c.due, at.due)
	c.kept = append(c.kept, at.kept)
}

// columns are the columns of a scanned row.
const columns = `c.key, c.kind, c.value, c.updated_at, c.incarnation, c.sequence, c.entries, c.kept,
	c.reserved, c.open`

// scanned is a row of headcount_counters as a query returns it.
type scanned struct {
	key, kind                                   string
	value, incarnation, sequence, entries, kept int64
	reserved, open                              int64
	updated                                     time.Time
}

func (r *scanned) to(more ...any) []any {
	own := []any{
		&r.key, &r.kind, &r.value, &r.updated, &r.incarnation, &r.sequence, &r.entries, &r.kept, &r.reserved, &r.open,
	}

	return append(own, more...)
}

// record returns the record, the zero one for a row that was only created to be locked.
func (r *scanned) record() record {
	if r.kind == "" {
		return record{}
	}

	kind, _ := counter.ParseKind(r.kind)
	is := record{kept: r.kept, State: counter.State{
		Kind:    kind,
		Value:   r.value,
		Updated: r.updated.UnixMilli(),
		Entries: uint64(r.entries),
		Version: counter.Version{Incarnation: uint64(r.incarnation), Sequence: uint64(r.sequence)},

		Reserved: r.reserved,
		Open:     int32(r.open),
	}}

	return is
}
