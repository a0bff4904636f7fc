package counterpg

import (
	"time"

	"github.com/jackc/pgx/v5"

	"headcount/counter"
)

// writes are what is to be written of rows.
type writes struct {
	rows         columns
	uniques      registerColumns
	gone         []string
	joined, left pairs
	entries      entryColumns
	gains        gainColumns
	counts       countColumns
}

// gather adds what has changed of a row.
func (w *step) gather(to *writes, key string, r *row) {
	if r.Kind == counter.Unique && r.record != r.was && !r.unique.Empty() {
		if r.set == 0 {
			r.set = w.id()
		}
		to.uniques.set, to.uniques.registers = append(to.uniques.set, r.set), append(to.uniques.registers, r.unique.Bytes())
	}
	switch {
	case r.State == (counter.State{}):
		to.gone = append(to.gone, key) // also one that was made by lockRows and is not needed
		r.record = record{}
	case r.record != r.was:
		to.rows.add(key, &r.record)
	}
	same := r.set == r.was.set
	for m, in := range r.members {
		if in && !(same && r.had[m]) {
			to.joined.add(r.set, m)
		}
	}
	if same {
		for m, in := range r.had {
			if in && !r.members[m] {
				to.left.add(r.set, m)
			}
		}
	}
	for i := range r.entries {
		to.entries.add(r.ledger, &r.entries[i])
	}
	for d, is := range r.counted {
		if is.changed {
			to.counts.add(r.history, d, is)
		}
	}
	for i := range r.past {
		p := &r.past[i]
		known := r.seen[counter.Slot{Number: p.Number, Step: p.Step}]
		to.gains.add(r.history, p, known == nil || !known.known)
	}
}

// queueWrites writes what has changed.
func (w *step) queueWrites(b *pgx.Batch) {
	var all writes
	for _, key := range w.keys {
		w.gather(&all, key, w.records[key])
	}
	var sweeps sweepColumns
	for id, r := range w.sweeps {
		sweeps.add(id, r)
	}
	var forget [][16]byte
	for id, fresh := range w.fresh {
		if fresh && !w.taken[id] {
			forget = append(forget, id)
		}
	}
	queue := func(rows int, sql string, args ...any) {
		if rows > 0 {
			b.Queue(sql, args...)
		}
	}
	r, e, g, c := &all.rows, &all.entries, &all.gains, &all.counts
	queue(len(r.key), writeRows, r.key, r.kind, r.value, r.updated, r.incarnation, r.sequence, r.entries,
		r.set, r.ledger, r.kept, r.history, r.slots)
	queue(len(all.gone), dropRows, all.gone)
	queue(len(all.left.id), deleteMembers, all.left.id, all.left.name)
	queue(len(all.joined.id), insertMembers, all.joined.id, all.joined.name)
	queue(len(all.uniques.set), writeRegisters, all.uniques.set, all.uniques.registers)
	queue(len(e.id), insertEntries, e.id, e.seq, e.at, e.delta, e.before, e.op, e.reason, e.by)
	queue(len(g.id), writeGains, g.id, g.step, g.number, g.gain, g.registers)
	queue(len(g.swept), sweepGains, g.swept, g.sweptStep, g.due, g.kept)
	queue(len(c.id), writeCounted, c.id, c.name, c.value, c.count, c.kept)
	queue(len(sweeps.id), writeSweeps, sweeps.id, sweeps.due, sweeps.kept, sweeps.garbage)
	queue(len(forget), forgetIdempotencyKeys, forget)
	if w.deleted != w.wasDeleted {
		b.Queue(writeDeleted, w.deleted)
	}
}

// The columns that arrays are made of.
type (
	columns struct {
		key                                                                        []string
		kind                                                                       []int16
		value, updated, incarnation, sequence, entries, set, ledger, kept, history []int64
		slots                                                                      []string
	}
	gainColumns struct {
		id, number, gain []int64
		step             []int32
		registers        [][]byte
		// Of those that are new: they are to be swept some day.
		swept, due, kept []int64
		sweptStep        []int32
	}
	memberColumns    struct{ key, member []string }
	dimensionColumns struct{ key, name, value []string }
	countColumns     struct {
		id, count   []int64
		name, value []string
		kept        []int32
	}
	stepColumns struct {
		key    []string
		step   []int32
		number []int64
	}
	pairs struct {
		id   []int64
		name []string
	}
	registerColumns struct {
		set       []int64
		registers [][]byte
	}
	sweepColumns struct {
		id, due, kept []int64
		garbage       []bool
	}
	entryColumns struct {
		id, seq, at, delta, before []int64
		op                         []int16
		reason, by                 []string
	}
)

func (c *columns) add(key string, r *record) {
	c.key, c.kind = append(c.key, key), append(c.kind, int16(r.Kind))
	c.value, c.updated = append(c.value, r.Value), append(c.updated, r.Updated)
	c.incarnation, c.sequence = append(c.incarnation, int64(r.Version.Incarnation)), append(c.sequence, int64(r.Version.Sequence))
	c.entries = append(c.entries, int64(r.Entries))
	c.set, c.ledger, c.kept = append(c.set, r.set), append(c.ledger, r.ledger), append(c.kept, r.kept)
	c.history, c.slots = append(c.history, r.history), append(c.slots, string(r.AppendRest(nil)))
}

func (c *memberColumns) add(key, member string) {
	c.key, c.member = append(c.key, key), append(c.member, member)
}

func (c *dimensionColumns) add(key, name, value string) {
	c.key, c.name, c.value = append(c.key, key), append(c.name, name), append(c.value, value)
}

func (c *countColumns) add(history int64, d counter.Dimension, is *counted) {
	c.id, c.name, c.value = append(c.id, history), append(c.name, d.Name), append(c.value, d.Value)
	c.count, c.kept = append(c.count, is.count), append(c.kept, is.kept)
}

func (c *stepColumns) add(key string, step int32, number int64) {
	c.key, c.step, c.number = append(c.key, key), append(c.step, step), append(c.number, number)
}

func (c *gainColumns) add(history int64, p *counter.Past, fresh bool) {
	c.id, c.step = append(c.id, history), append(c.step, int32(p.Step))
	c.number, c.gain = append(c.number, int64(p.Number)), append(c.gain, p.Value)
	var registers []byte
	if p.Seen != nil {
		registers = p.Seen.Bytes()
	}
	c.registers = append(c.registers, registers)
	if !fresh {
		return
	}
	c.swept, c.sweptStep = append(c.swept, history), append(c.sweptStep, int32(p.Step))
	due := counter.ForgetAt(int64(p.Number), time.Duration(p.Step)*time.Second, p.Kept)
	c.kept, c.due = append(c.kept, p.Kept.Milliseconds()), append(c.due, due.UnixMilli())
}

func (p *pairs) add(id int64, name string) { p.id, p.name = append(p.id, id), append(p.name, name) }

func (c *sweepColumns) add(id int64, r sweepRow) {
	c.id, c.due = append(c.id, id), append(c.due, r.due)
	c.kept, c.garbage = append(c.kept, r.kept), append(c.garbage, r.garbage)
}

func (c *entryColumns) add(ledger int64, e *counter.Entry) {
	c.id, c.seq, c.at = append(c.id, ledger), append(c.seq, int64(e.Seq)), append(c.at, e.At.UnixMilli())
	c.delta, c.before, c.op = append(c.delta, e.Delta), append(c.before, e.Before), append(c.op, int16(e.Op))
	c.reason, c.by = append(c.reason, e.Reason), append(c.by, e.By)
}
