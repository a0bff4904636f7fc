package owner

import (
	"encoding/binary"
	"slices"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// head is the row of a counter in a draft.
type head struct {
	key string
	at  int // index of its row in the draft, unless the counter is resident

	record

	err     error // the row is malformed
	changed bool
}

// record is the decoded row of a counter: its state, and what its other rows are.
type record struct {
	counter.State
	// life is part of the names of the counter's other rows. It is the first incarnation of the counter's version, so a
	// counter that is created again after its deletion has a different life.
	life    uint64
	parts   parts
	*extent // of a set or a unique; nil for a number
}

// extent describes the rows of a set.
type extent struct {
	emptied uint64 // sequence of the version at which the set was last emptied; part of the names of its rows
	members uint64
	shards  uint64 // number of rows that hold the members; 0: one
	ranks   *ranks // of a unique whose registers take several rows
}

// extend makes the record that of a set.
func (h *record) extend() {
	if h.extent == nil {
		h.extent = &extent{}
	}
}

// size returns the number of members that a set has in this region.
func (h *record) size() int64 {
	if h.extent == nil {
		return 0
	}

	return int64(h.members)
}

func (e *extent) clone() *extent {
	if e == nil {
		return nil
	}

	own := *e
	if e.ranks != nil {
		ranks := *e.ranks
		own.ranks = &ranks
	}

	return &own
}

// parts lists which other rows a counter has besides its head, so that a deletion knows what to discard. Bit i stands
// for a history with time buckets of counter.ResolutionSteps[i].
type parts uint64

const (
	hasDimensions parts = 1 << 32 << iota
	hasSet              // members, or registers
	hasReservations
)

// historyPart returns the part for a history whose time buckets have a length, in seconds.
func historyPart(step uint32) parts {
	at := slices.Index(counter.ResolutionSteps, time.Duration(step)*time.Second)
	if at < 0 {
		return 0 // no rule has time buckets of this length any more, so those that are left only expire
	}

	return 1 << at
}

// headOf returns the name of the row that is the head of a counter.
func headOf(key string) rows.Name { return rows.Name{Collection: heads, Field: key} }

// State implements counter.Tx.
func (d *draft) State(key string) *counter.State { return &d.head(key).State }

// head returns the head of a counter. If the counter does not exist yet, it gets a life.
func (d *draft) head(key string) *head {
	h := d.findHead(key)
	if h == nil {
		h = d.addHead(key)
	}
	if h.life == 0 {
		h.life = d.incarnation()
	}

	return h
}

func (d *draft) findHead(key string) *head {
	if len(d.heads) > short {
		return d.byKey[key]
	}

	for _, h := range d.heads {
		if h.key == key {
			return h
		}
	}

	return nil
}

// addHead reads the head of a counter into a head of an earlier draft, if one can be reused.
func (d *draft) addHead(key string) *head {
	// The slice has pointers, so that callers may keep a head while the slice grows.
	n := len(d.heads)
	if n == cap(d.heads) {
		d.heads = append(d.heads, nil)
	}
	d.heads = d.heads[:n+1]
	if d.heads[n] == nil {
		d.heads[n] = &head{}
	}

	h := d.heads[n]
	h.key = key
	if d.near != nil {
		h.record = d.near.record(d.p.id, key)
	} else {
		h.at = d.row(headOf(key))
		h.err = h.decode(d.rows.list[h.at].value)
	}

	if len(d.heads) <= short {
		return h
	}
	if d.byKey == nil {
		d.byKey = make(map[string]*head, 4*short)
	}
	if len(d.byKey) == 0 { // until now the list was short enough to be searched
		for _, one := range d.heads {
			d.byKey[one.key] = one
		}
	}
	d.byKey[key] = h

	return h
}

// counter returns a counter with the changes of the draft.
func (d *draft) counter(key string) counter.Counter { return d.head(key).Counter(key) }

// incarnation returns the incarnation of a counter that is created now. It is the epoch, or greater if a counter with a
// greater incarnation was deleted. It never depends on the clock of this process.
func (d *draft) incarnation() uint64 { return max(d.p.epoch, d.meta.deleted+1) }

// Deleted implements counter.Tx.
func (d *draft) Deleted() uint64 { return d.meta.deleted }

// change records that a head must be written.
func (d *draft) change(h *head) {
	h.changed = true
	d.writes++
}

// Changed implements counter.Tx.
func (d *draft) Changed(key string, joined, left []string, all bool) {
	h := d.head(key)
	d.change(h)
	d.raise(h)

	d.news = append(d.news, counter.Notification{Key: key, Joined: joined, Left: left, All: all})
}

// raise raises the incarnation of a changed counter's version to the epoch.
func (d *draft) raise(h *head) {
	switch v := &h.Version; v.Sequence {
	case 0: // deleted
	case 1:
		// Judge took an incarnation from the clock. The life comes from the epoch, so it exceeds all that were deleted.
		v.Incarnation = h.life
	default:
		// Under the former epoch the next sequences may have been used by commits that the store has lost since.
		v.Incarnation = max(d.p.epoch, v.Incarnation)
	}
}

// Drop implements counter.Tx.
func (d *draft) Drop(key string, v counter.Version) {
	h := d.head(key)
	d.discardParts(h)
	// The greatest deleted incarnation is remembered, so that a counter which is created again under this key gets a
	// greater one, and thereby rows with other names.
	d.meta.deleted = max(v.Incarnation, h.life, d.meta.deleted)
	d.metaChanged = true

	h.life = 0
	h.parts = 0
	h.extent = nil
}

// discardParts discards all rows of a counter except its head.
func (d *draft) discardParts(h *head) {
	for _, collection := range h.collections() {
		d.discard(collection)
	}
}

// collections returns the collections that have the counter's rows besides its head.
func (h *head) collections() (all []string) {
	if h.Entries > 0 {
		all = append(all, ledgerCollection(h))
	}
	if h.parts&hasSet != 0 {
		all = append(all, setCollection(h))
	}
	if h.parts&hasDimensions != 0 {
		all = append(all, dimensionsOf(h))
	}
	if h.parts&hasReservations != 0 {
		all = append(all, openCollection(h), endedCollection(h))
	}

	// Histories with lengths that no rule has any more need not be discarded, because they expire.
	for _, step := range counter.ResolutionSteps {
		seconds := uint32(step / time.Second)
		if h.parts&historyPart(seconds) != 0 {
			all = append(all, historyCollection(h, seconds))
		}
	}

	return all
}

// append appends the encoded row of a counter, and nothing for a counter that does not exist.
func (h *record) append(b []byte) []byte {
	if h.Version == (counter.Version{}) {
		return b
	}

	b = append(b, byte(h.Kind))
	b = binary.AppendVarint(b, h.Value)
	b = binary.AppendVarint(b, h.Updated)
	b = binary.AppendUvarint(b, h.Version.Incarnation)
	b = binary.AppendUvarint(b, h.Version.Sequence)
	b = binary.AppendUvarint(b, h.Version.Incarnation-h.life) // mostly 0
	b = binary.AppendUvarint(b, h.Entries)
	b = binary.AppendUvarint(b, uint64(h.parts))

	// Only exact counters have reservations, and these have no time buckets, so the two need no mark to tell them
	// apart.
	if h.Open > 0 {
		b = binary.AppendVarint(b, h.Reserved)
		return binary.AppendVarint(b, int64(h.Open))
	}
	if h.Kind.Number() {
		return h.appendSlots(b)
	}

	// A set that never had a member has no extent.
	var e extent
	if h.extent != nil {
		e = *h.extent
	}
	b = binary.AppendUvarint(b, e.emptied)
	b = binary.AppendUvarint(b, e.members)
	b = binary.AppendUvarint(b, e.shards)

	return e.ranks.append(b)
}

func (h *record) appendSlots(b []byte) []byte {
	for i := range h.Slots {
		slot := &h.Slots[i]
		if slot.Step == 0 {
			continue
		}

		b = binary.AppendUvarint(b, uint64(slot.Step))
		b = binary.AppendUvarint(b, uint64(slot.Number))
		b = binary.AppendVarint(b, slot.Value)
	}

	return b
}

// decode reads the row of a counter.
func (h *record) decode(b []byte) error {
	if len(b) == 0 {
		return nil
	}

	r := reader{rest: b}
	h.Kind = counter.Kind(r.byte())
	h.Value = r.int()
	h.Updated = r.int()
	h.Version.Incarnation = r.uint()
	h.Version.Sequence = r.uint()
	// Stored as a difference, which is 0 until an epoch raises the incarnation.
	h.life = h.Version.Incarnation - r.uint()
	h.Entries = r.uint()
	h.parts = parts(r.uint())

	if !h.Kind.Number() {
		h.extend()
		h.emptied = r.uint()
		h.members = r.uint()
		h.shards = r.uint()
		h.ranks = r.ranks()
		return r.end("a counter")
	}

	// Without open reservations the row of an exact counter ends here.
	hasOpen := h.Kind.IsExact() && len(r.rest) > 0
	if hasOpen {
		h.Reserved = r.int()
		h.Open = int32(r.int())
	}
	for i := 0; len(r.rest) > 0 && i < len(h.Slots); i++ {
		h.Slots[i].Step = uint32(r.uint())
		h.Slots[i].Number = uint32(r.uint())
		h.Slots[i].Value = r.int()
	}

	return r.end("a counter")
}
