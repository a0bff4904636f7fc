package owner

import (
	"slices"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/counter/limit"
	"headcount/internal/rows"
)

// Collections of rows.
const (
	heads   = "heads"   // key -> counter.State
	streams = "streams" // stream -> number and answer of its last call
	meta    = "meta"
)

// deletedRow has the highest incarnation of all counters of the partition that were deleted.
var deletedRow = rows.Name{Collection: meta, Field: "deleted"}

// draft is what the calls of a turn change in a partition. It reads through to the rows in memory, which stay as they
// are until the store has the draft. It implements counter.Step.
type draft struct {
	p        *partition
	now      time.Time
	rows     map[rows.Name][]byte
	heads    map[string]*head // by key
	ids      []rows.ID
	asked    []rows.ID // of refused operations: one that was made before is a replay, and not refused
	news     []counter.Notification
	outcomes []outcome
	writes   int // so far, also those to the same row

	// The draft is void if one of these is set.
	missing   map[rows.Name]struct{} // rows that are not in memory
	malformed error                  // a row that an operation needed
}

// head is the row of a counter: its state, and where its other rows are.
type head struct {
	counter.State
	// life names the rows of the counter. It is the first incarnation of its version, so a counter that is made again after
	// its deletion has another one.
	life    uint64
	emptied uint64 // sequence of the version at which the set was emptied last; the rows of a set have it in their name
	members uint64 // of a set
	shards  uint64 // how many rows the members are in; 0: one

	registers *hyperloglog.Registers // of a unique, nil until they are needed

	err     error // the row is malformed
	changed bool
}

var _ counter.Step = (*draft)(nil)

func newDraft(p *partition, now time.Time) *draft {
	return &draft{
		p:       p,
		now:     now,
		rows:    map[rows.Name][]byte{},
		heads:   map[string]*head{},
		missing: map[rows.Name]struct{}{},
	}
}

// judge makes a call, unless the stream's last call was this one or a later one.
func (d *draft) judge(call *Call) {
	stream := rows.Name{Collection: streams, Field: call.Stream}
	last, answer, err := decodeAnswer(d.get(stream), call)
	switch {
	case err != nil:
		d.outcomes = append(d.outcomes, outcome{err: err})
		return
	case last == call.Number:
		d.outcomes = append(d.outcomes, outcome{Answer: answer})
		return
	case last > call.Number:
		d.outcomes = append(d.outcomes, outcome{err: ErrOld})
		return
	}

	writes := d.writes
	answer = d.make(call)
	d.outcomes = append(d.outcomes, outcome{Answer: answer})

	// What changed nothing may be judged again, unless an earlier copy of the call may come after the answer.
	if call.Repeated || d.writes > writes {
		d.put(stream, encodeAnswer(call.Number, &answer))
	}
}

func (d *draft) make(call *Call) Answer {
	answer := Answer{Results: make([]counter.Result, len(call.Ops)), Limits: make([]limit.Answer, len(call.Limits))}
	for i := range call.Ops {
		answer.Results[i] = d.judgeOp(&call.Ops[i])
	}
	for i := range call.Limits {
		answer.Limits[i] = d.limit(&call.Limits[i])
	}
	for _, row := range call.Rows {
		d.put(row.Name, row.Value)
	}

	return answer
}

// judgeOp makes one operation, unless the row of one of its counters is malformed.
func (d *draft) judgeOp(op *counter.Op) counter.Result {
	for i := range op.Changes {
		if err := d.head(op.Changes[i].Key).err; err != nil {
			return counter.Result{Err: err}
		}
	}

	result := counter.Judge(d, op, d.now)
	if result.Err != nil && op.IdempotencyKey != (counter.IdempotencyKey{}) {
		d.asked = append(d.asked, rows.ID{Bytes: op.IdempotencyKey})
	}

	return result
}

// headOf returns the name of a counter's row.
func headOf(key string) rows.Name { return rows.Name{Collection: heads, Field: key} }

// empty reports whether the draft changes nothing.
func (d *draft) empty() bool { return len(d.rows)+len(d.ids)+len(d.asked)+len(d.news) == 0 }

// commit returns the commit of the draft. It follows the partition's newest one.
func (d *draft) commit() rows.Commit {
	for key, h := range d.heads {
		if h.changed {
			d.put(headOf(key), h.encode())
		}
	}

	commit := rows.Commit{
		Partition: d.p.id,
		Epoch:     d.p.epoch,
		After:     d.p.number,
		Number:    d.p.number + 1,
		At:        d.now,
		IDs:       d.ids,
		Asked:     d.distinctAsked(),
		Rows:      make([]rows.Row, 0, len(d.rows)),
	}
	for name, value := range d.rows {
		commit.Rows = append(commit.Rows, rows.Row{Name: name, Value: value})
	}
	if len(d.news) > 0 {
		commit.Publication = d.publication()
	}

	return commit
}

// distinctAsked returns the IDs to ask for, each once, without those that the commit uses.
func (d *draft) distinctAsked() []rows.ID {
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

// notifyAll has the publication name every counter of the draft.
func (d *draft) notifyAll() {
	for name := range d.rows {
		if name.Collection == heads {
			d.news = append(d.news, counter.Notification{Key: name.Field, All: true})
		}
	}
}

// get returns the value of a row, nil if it does not exist.
func (d *draft) get(name rows.Name) []byte {
	if value, ok := d.rows[name]; ok {
		return value
	}

	is, ok := d.p.rows.get(name, func(name rows.Name, is row) int { return rowSize(name, is.value) })
	if !ok {
		d.missing[name] = struct{}{}
	}

	return is.value
}

// put writes a row; nil deletes it.
func (d *draft) put(name rows.Name, value []byte) {
	d.rows[name] = value
	d.writes++
}

// State implements counter.Step.
func (d *draft) State(key string) *counter.State { return &d.head(key).State }

func (d *draft) head(key string) *head {
	h := d.heads[key]
	if h == nil {
		h = &head{}
		h.err = h.decode(d.get(headOf(key)))
		d.heads[key] = h
	}
	if h.life == 0 {
		h.life = d.incarnation()
	}

	return h
}

// incarnation returns that of a counter that is made now. A clock of this process never counts: the epoch does, unless a
// counter with a greater incarnation was deleted.
func (d *draft) incarnation() uint64 { return max(d.p.epoch, d.Deleted()+1) }

// Deleted implements counter.Step.
func (d *draft) Deleted() uint64 { return decodeNumber(d.get(deletedRow)) }

// Remembered implements counter.Step. An ID that this owner does not know may still be remembered by the store. Then the
// store refuses the commit, and the calls are judged again.
func (d *draft) Remembered(id counter.IdempotencyKey) bool {
	for i := range d.ids {
		if d.ids[i].Bytes == id {
			return true
		}
	}

	is, ok := d.p.ids.get(id, func([16]byte, remembered) int { return idSize })

	return ok && is.until.After(d.now)
}

// Remember implements counter.Step.
func (d *draft) Remember(id counter.IdempotencyKey) {
	d.ids = append(d.ids, rows.ID{Bytes: id, Until: d.now.Add(counter.IdempotencyKeyKept)})
	d.writes++
}

// Changed implements counter.Step.
func (d *draft) Changed(key string, joined, left []string, all bool) {
	h := d.head(key)
	h.changed = true
	d.writes++
	d.raise(h)
	if h.registers != nil {
		d.put(registersName(h, key), h.registers.Bytes())
	}

	d.news = append(d.news, counter.Notification{Key: key, Joined: joined, Left: left, All: all})
}

// raise gives the version of a changed counter the incarnation of the epoch.
func (d *draft) raise(h *head) {
	switch v := &h.Version; v.Sequence {
	case 0: // deleted
	case 1:
		v.Incarnation = h.life
	default:
		v.Incarnation = max(d.p.epoch, v.Incarnation)
	}
}

// Drop implements counter.Step.
func (d *draft) Drop(key string, v counter.Version) {
	h := d.head(key)
	for _, collection := range h.collections(key) {
		d.discard(collection)
	}
	d.put(deletedRow, encodeNumber(max(v.Incarnation, h.life, d.Deleted())))

	h.life = 0
	h.emptied = 0
	h.members = 0
	h.shards = 0
	h.registers = nil
}

// collections returns all that the rows of a counter may be in.
func (h *head) collections(key string) []string {
	all := []string{setCollection(h, key), ledgerCollection(h, key), dimensionsOf(h, key)}
	for _, step := range counter.BucketSteps {
		all = append(all, historyCollection(h, key, uint32(step/time.Second)))
	}

	return all
}
