package owner

import (
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/rows"
)

// Collections of rows.
const (
	heads   = "heads"   // key -> counter.State
	streams = "streams" // stream -> number and answer of its last call
)

// draft has the changes that the calls of a turn make to a partition. It reads through to the rows in memory, which
// stay unchanged until the store has committed the draft. It implements counter.Tx.
type draft struct {
	p      *partition
	near   *residents // the counters, if the store is in this process's memory; else nil
	now    time.Time
	region string // name of this region; empty: no other region shares the counters

	rows    table // rows that the calls need, with their changes
	missing int   // number of rows to read from the store; if any, the results are void and judging is repeated
	heads   []*head
	byKey   map[string]*head // heads by key; empty while there are few

	meta         meta
	metaChanged  bool
	room         []byte                // buffer in which a head is encoded
	changes      []rows.Row            // rows of the commit
	ids          []rows.ID             // IDs that the commit uses up
	used         map[[16]byte]struct{} // ids as a set; empty while there are few
	asked        []rows.ID             // IDs of refused operations, which may be repetitions of made ones
	news         []counter.Notification
	sharesToSend []string // keys of the counters whose shares must be sent to other regions
	judged       bool
	writes       int // number of writes so far, including repeated ones of one row

	malformed error // an operation needed a malformed row, so the judgement is void
	full      bool  // the limits in memory have no room for the call that is judged
}

var _ counter.Tx = (*draft)(nil)

// large is the number of rows above which a draft is not reused, so that one large turn does not keep its memory for
// good.
const large = 1024

// reset empties the draft, and reports whether it may be reused.
func (d *draft) reset() bool {
	if cap(d.rows.list) > large || cap(d.heads) > large || cap(d.news) > large {
		return false
	}

	d.unjudge()
	d.rows.reset()
	d.p = nil
	d.missing = 0

	return true
}

// clear drops all results of judging, but keeps the rows that were read.
func (d *draft) clear() {
	d.unjudge()
	for at := range d.rows.list {
		// Operations modify copies, so the committed value is still intact.
		e := &d.rows.list[at]
		e.value = e.committed
		e.written = false
		e.own = false
	}
}

// unjudge drops all results of judging that are not in rows.
func (d *draft) unjudge() {
	for _, h := range d.heads {
		*h = head{}
	}
	// The slices and maps keep their memory, because the draft is reused at once.
	d.heads = d.heads[:0]
	clear(d.byKey)
	d.meta = meta{}
	d.metaChanged = false

	clear(d.changes)
	d.changes = d.changes[:0]
	d.ids = d.ids[:0]
	d.asked = d.asked[:0]
	clear(d.used)

	clear(d.news)
	d.news = d.news[:0]
	d.sharesToSend = nil
	d.judged = false
	d.writes = 0
	d.malformed = nil
}

// prepare looks up the rows that the calls name, so that one read of the store is enough for most drafts.
func (d *draft) prepare(calls []*pending) {
	if !d.p.meta.loaded {
		d.row(metaRow)
	}

	// These are the heads of all changes, the streams and the limits. Which further rows are needed depends on their
	// contents.
	for _, one := range calls {
		if one.Stream != "" {
			d.row(rows.Name{Collection: streams, Field: one.Stream})
		}
		for i := range one.Ops {
			for j := range one.Ops[i].Changes {
				d.row(headOf(one.Ops[i].Changes[j].Key))
			}
		}
		if one.More == nil {
			continue
		}
		for i := range one.More.Limits {
			d.row(limitName(one.More.Limits[i].Name))
		}
	}
}

// appendMissing appends the addresses of the rows that have to be read.
func (d *draft) appendMissing(to []rows.Address) []rows.Address {
	for at := range d.rows.list {
		if e := &d.rows.list[at]; e.missing {
			to = append(to, d.address(e.name))
		}
	}

	return to
}

// fill takes the rows that were read, in the order of appendMissing.
func (d *draft) fill(found []rows.Found) error {
	next := 0
	for at := range d.rows.list {
		e := &d.rows.list[at]
		if !e.missing {
			continue
		}
		// One unreadable row fails all calls of the partition: nothing records which of them needed it.
		if err := found[next].Err; err != nil {
			return err
		}

		e.committed = found[next].Value
		e.value = e.committed
		e.missing = false
		next++
	}
	d.missing = 0

	return nil
}

// judge judges the calls from the beginning.
func (d *draft) judge(calls []*pending) {
	// The judgement before treated the rows that it lacked as if they did not exist, so none of it may stay.
	if d.judged {
		d.clear()
	}
	d.judged = true
	d.loadMeta()
	for _, one := range calls {
		d.judgeCall(one)
	}
}

// judgeCall judges a call, unless the stream's last call was this one or a later one. The caller gets the answer once
// the store has committed the draft.
func (d *draft) judgeCall(one *pending) {
	one.answer = Answer{}
	one.err = nil
	if one.Stream == "" {
		// Calls within a process are neither lost nor repeated, so nobody asks for this answer again.
		d.make(one)
		return
	}

	stream := rows.Name{Collection: streams, Field: one.Stream}
	row := d.get(stream)
	last, answer, err := decodeAnswer(row, &one.Call)
	switch {
	case err != nil:
		one.err = err
		return
	case last == one.Number:
		// The call was made before, perhaps by the former owner, which stored this answer in the same commit.
		one.answer = answer
		return
	case last > one.Number:
		one.err = ErrOld
		return
	}

	// The answer goes into the same commit as the changes.
	writes := d.writes
	d.make(one)

	// A call that changed nothing can be judged again if it is repeated, so its answer is not stored. But if the call
	// was sent before, an earlier copy may arrive after this answer, and must be recognized.
	if one.Repeated || d.writes > writes {
		d.put(stream, encodeAnswer(one.Number, d.now, &one.answer))
		if row == nil {
			d.expire(stream, d.now.Add(streamKept))
		}
	}
}

// make judges everything in a call.
func (d *draft) make(one *pending) {
	if len(one.Ops) > 0 {
		one.answer.Results = make([]counter.Result, len(one.Ops))
	}
	for i := range one.Ops {
		d.judgeOp(&one.Ops[i], &one.answer.Results[i])
	}

	if one.More == nil {
		return
	}

	d.full = false
	one.answer.More = d.makeMore(one.More)
	if d.full {
		one.answer = Answer{}
		one.err = counter.ErrBusy
	}
}

func (d *draft) makeMore(m *More) *MoreAnswer {
	answer := &MoreAnswer{Limits: make([]limit.Answer, len(m.Limits)), Known: d.ask(m.Asked)}
	for i := range m.Limits {
		answer.Limits[i] = d.limit(&m.Limits[i])
	}

	for i := range m.Rows {
		row := &m.Rows[i]
		d.put(row.Name, row.Value)
		if !row.Until.IsZero() {
			d.expire(row.Name, row.Until)
		}
	}
	// Another batch with the same key may have been committed meanwhile.
	for _, id := range m.Remembered {
		if !d.Remembered(id) {
			d.Remember(id)
		}
	}
	if m.Restore != nil {
		answer.Restored = d.restore(m.Restore)
	}
	d.makeShares(m, answer)
	if m.sweep != nil {
		d.sweep(m.sweep)
	}

	return answer
}

// judgeOp judges one operation, unless the row of one of its counters is malformed or in another partition.
func (d *draft) judgeOp(op *counter.Op, result *counter.Result) {
	// All counters are looked at before anything is judged, so an operation with one bad counter changes none.
	for i := range op.Changes {
		h := d.head(op.Changes[i].Key)
		if result.Err == nil {
			result.Err = h.err
		}
		// A counter that was never made here may exist in another partition.
		if result.Err == nil && h.Version == (counter.Version{}) {
			result.Err = d.misplaced(h.key)
		}
	}

	if result.Err == nil {
		*result = d.judgeShared(op)
	}
	// If an expiry finds no such reservation, the row that says when it is due is deleted. Otherwise gateways would
	// find it due for ever.
	for i := range op.Changes {
		if op.Changes[i].Verb == counter.Expire {
			d.discardDue(&op.Changes[i])
		}
	}
	// A repetition may be refused by the very change that it repeats, such as the one that took the last seat. So the
	// store is asked whether it knows the key; if it does, the operation is judged again, as a replay.
	if result.Err != nil && op.IdempotencyKey != (counter.IdempotencyKey{}) {
		d.asked = append(d.asked, rows.ID{Bytes: op.IdempotencyKey})
	}
}

// ask reports which idempotency keys are remembered. For a key that is not in memory it assumes no. If the store does
// remember the key, it refuses the commit, and the calls are judged again.
func (d *draft) ask(ids []counter.IdempotencyKey) []bool {
	if len(ids) == 0 {
		return nil
	}

	known := make([]bool, len(ids))
	for i, id := range ids {
		known[i] = d.Remembered(id)
		if !known[i] {
			d.asked = append(d.asked, rows.ID{Bytes: id})
		}
	}

	return known
}

// empty reports whether the draft changes nothing.
func (d *draft) empty() bool {
	return d.writes == 0 && len(d.ids)+len(d.asked)+len(d.news) == 0
}

// stays reports whether the draft changes only residents, which are as durable as the store in memory, so that there is
// nothing to commit.
func (d *draft) stays() bool {
	return d.near != nil && !d.metaChanged && len(d.rows.list) == 0 && len(d.ids)+len(d.asked) == 0
}

// commit sets c to the commit of the draft, which follows the partition's newest commit.
func (d *draft) commit(c *rows.Commit, publish bool) {
	// Each head is encoded once, however many operations of the turn changed it. Residents are not written.
	for _, h := range d.heads {
		if h.changed && d.near == nil {
			d.room = h.append(d.room[:0])
			d.putAt(h.at, exactly(d.room))
		}
	}
	if d.metaChanged {
		d.put(metaRow, d.meta.encode())
	}
	c.Partition = d.p.id
	c.Epoch = d.p.epoch
	c.After = d.p.number
	c.Number = d.p.number + 1
	// The store judges IDs by this time, too, so it need not know the owner's clock.
	c.At = d.now
	c.IDs = d.ids
	c.Asked = d.distinctAsked()
	c.Rows = d.writtenRows()

	// Without watchers in other processes, the news go through memory instead.
	if publish && len(d.news) > 0 {
		c.Publication = d.publication()
	}
}

// writtenRows returns the rows that the draft has written. They are valid until the draft is judged again or reset.
func (d *draft) writtenRows() []rows.Row {
	changes := d.changes[:0]
	for at := range d.rows.list {
		e := &d.rows.list[at]
		if !e.written {
			continue
		}

		// append has left spare capacity in a value that grew; do not keep it.
		if cap(e.value) > len(e.value)+slack {
			e.value = exactly(e.value)
		}
		changes = append(changes, rows.Row{Name: e.name, Value: e.value})
	}
	d.changes = changes

	return changes
}

// exactly returns a copy of a value without spare capacity, nil for an empty one.
func exactly(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}

	value := make([]byte, len(b))
	copy(value, b)

	return value
}

// slack is the spare capacity of a value, in bytes, up to which a copy is not worthwhile.
const slack = 32

// distinctAsked returns the IDs to ask the store about, each once, without the IDs that the commit uses itself.
func (d *draft) distinctAsked() []rows.ID {
	if len(d.asked) == 0 {
		return nil
	}

	// The store checks the IDs that the commit uses in any case.
	seen := map[[16]byte]bool{}
	for _, id := range d.ids {
		seen[id.Bytes] = true
	}

	return slices.DeleteFunc(d.asked, func(id rows.ID) bool {
		again := seen[id.Bytes]
		seen[id.Bytes] = true
		return again
	})
}

// row returns the index of a row, which is marked as missing if it is not in memory.
func (d *draft) row(name rows.Name) int {
	at := d.rows.find(name)
	if at < 0 && d.near != nil {
		// A store in memory answers at once, so no row is ever missing.
		value, _ := d.lookUp(name)
		return d.rows.add(entry{name: name, committed: value, value: value, cached: true})
	}
	if at < 0 {
		at = d.rows.add(entry{name: name, unknown: true})
	}

	// A row that this judgement has overwritten needs no committed value. If clear drops that write, the value is
	// looked up after all.
	e := &d.rows.list[at]
	if !e.unknown || e.written {
		return at
	}

	value, ok := d.lookUp(name)
	e.committed = value
	e.value = value
	e.unknown = false
	e.cached = ok
	e.missing = !ok
	if e.missing {
		d.missing++
	}

	return at
}

// lookUp returns the value of a row in memory, and whether the memory knows the row.
func (d *draft) lookUp(name rows.Name) (value []byte, ok bool) {
	if d.near != nil {
		at := d.address(name)
		return d.near.Get(at.Partition, at.Name), true
	}

	is, ok := d.p.rows.get(name)

	return is.value, ok
}

// get returns the value of a row, nil if it does not exist.
func (d *draft) get(name rows.Name) []byte { return d.rows.list[d.row(name)].value }

// own returns a copy of a row's value that the caller may modify before it puts it.
func (d *draft) own(name rows.Name) []byte {
	e := &d.rows.list[d.row(name)]
	// An earlier change of this draft has made a copy.
	if e.own {
		return e.value
	}

	// The committed value stays as it is, because the store may refuse this commit.
	return slices.Clone(e.value)
}

// put writes a row; nil deletes it.
func (d *draft) put(name rows.Name, value []byte) {
	at := d.rows.find(name)
	if at < 0 {
		at = d.rows.add(entry{name: name, unknown: true}) // its old value was not looked up
	}
	d.putAt(at, value)
}

// putAt writes the row with that index.
func (d *draft) putAt(at int, value []byte) {
	e := &d.rows.list[at]
	e.value = value
	e.written = true
	e.own = true
	d.writes++
}

// Remembered implements counter.Tx. For an ID that is not in memory it returns false. If the store does remember the
// ID, it refuses the commit, and the calls are judged again.
func (d *draft) Remembered(id counter.IdempotencyKey) bool {
	// An earlier operation of the turn may have used the ID, or the store has just refused it.
	if d.uses(id) || d.p.known[id].After(d.now) {
		return true
	}

	is, ok := d.p.ids.get(id)

	return ok && is.until.After(d.now)
}

// uses reports whether the draft uses an ID.
func (d *draft) uses(id [16]byte) bool {
	if len(d.ids) > short {
		_, ok := d.used[id]
		return ok
	}

	return slices.ContainsFunc(d.ids, func(one rows.ID) bool { return one.Bytes == id })
}

// Remember implements counter.Tx.
func (d *draft) Remember(id counter.IdempotencyKey) {
	d.remember(rows.ID{Bytes: id, Until: d.now.Add(counter.IdempotencyKeyKept)})
	d.writes++
}

func (d *draft) remember(id rows.ID) {
	d.ids = append(d.ids, id)
	if len(d.ids) <= short {
		return
	}

	// The list has just become too long to search, so the set begins with all IDs so far.
	if len(d.used) == 0 {
		d.used = map[[16]byte]struct{}{}
		for _, one := range d.ids {
			d.used[one.Bytes] = struct{}{}
		}
	}
	d.used[id.Bytes] = struct{}{}
}
