package owner

import (
	"encoding/binary"
	"time"

	"headcount/counter"
	"headcount/internal/rows"
)

// Restore is one portion of an import.
type Restore struct {
	Copies  []counter.Copy // with different keys
	Rules   *counter.Rules // rules that say how long ledgers and histories are kept
	Deleted uint64         // counters with incarnations up to this one have been deleted
}

// restore replaces older counters by copies, and returns how many it replaced or created.
func (d *draft) restore(r *Restore) (restored int) {
	if r.Deleted > d.meta.deleted {
		d.meta.deleted = r.Deleted
		d.metaChanged = true
		d.writes++
	}

	for i := range r.Copies {
		c := r.Copies[i]
		h := d.head(c.Key)
		if h.err != nil {
			d.malformed = h.err
			return 0
		}
		// Copies that are not newer are skipped, so an import that failed halfway can be repeated as a whole.
		if !c.Replaces(&h.State, d.meta.deleted) {
			continue
		}

		restored++
		d.restoreOne(h, &c, r.Rules)
	}

	return restored
}

// restoreOne replaces the counter with that head by c.
func (d *draft) restoreOne(h *head, c *counter.Copy, rules *counter.Rules) {
	d.discardParts(h)
	before := h.life
	*h = head{key: h.key, at: h.at, record: record{State: c.State}}
	// The rows of the former life are garbage now, so the new rows need other names.
	h.life = max(d.incarnation(), before+1)

	// The value of a set includes the members in other regions. If the copy does not say how many those are, the value
	// becomes the number of its own members.
	alone := d.region == "" || c.Elsewhere == ""
	if alone && h.Kind.KnowsMembers() {
		h.Value = int64(len(c.Members) + len(c.Hashes))
	}
	d.restoreMembers(h, c)
	d.restoreRegisters(h, c)
	d.restoreDimensions(h, c)
	d.restoreReservations(h, c.Reservations)

	ledgerKept, stepKept := c.Kept(rules)
	d.restoreLedger(h, c.Ledger, ledgerKept)
	for i := range c.Steps {
		d.restoreStep(h, &c.Steps[i], stepKept(c.Steps[i].Step))
	}

	d.restoreShares(h, c)
	d.sendShare(h.key)
	d.change(h) // the copy keeps its version
	d.news = append(d.news, counter.Notification{Key: c.Key, All: true})
}

// restoreMembers distributes the members of a set over rows in the same way as linear hashing.
func (d *draft) restoreMembers(h *head, c *counter.Copy) {
	n := uint64(len(c.Members) + len(c.Hashes))
	if n == 0 {
		return
	}

	h.extend()
	h.parts |= hasSet
	h.members = n
	// As many rows as the set would have grown to.
	h.shards = (n + membersFull - 1) / membersFull
	s := set{d: d, h: h}
	shards := make([][]byte, h.shards)
	add := func(hash []byte) {
		at := shardOf(hash, h.shards)
		shards[at] = append(shards[at], hash...)
	}

	for _, member := range c.Members {
		hash := hashOf(member)
		add(hash[:])
	}
	for _, text := range c.Hashes {
		hash := hashOf(counter.Nameless(text))
		add(hash[:])
	}

	for shard, row := range shards {
		d.put(s.row(uint64(shard)), row)
	}
}

func (d *draft) restoreRegisters(h *head, c *counter.Copy) {
	if c.Registers.Empty() {
		return
	}

	h.extend()
	h.parts |= hasSet
	all := registers{d: d, collection: setCollection(h), counts: true}
	c.Registers.Each(func(index int, rank uint8) { all.raise(index, rank) })
	h.ranks = all.ranks
}

func (d *draft) restoreDimensions(h *head, c *counter.Copy) {
	collection := dimensionsOf(h)
	for _, dimension := range c.Dimensions {
		h.parts |= hasDimensions
		rest := binary.AppendUvarint(nil, uint64(len(dimension.Values)))
		d.put(rows.Name{Collection: collection, Field: dimension.Name}, binary.AppendVarint(rest, dimension.Other))
		for value, n := range dimension.Values {
			name := rows.Name{Collection: collection, Field: dimension.Name + "\x00" + value}
			d.put(name, binary.AppendVarint(nil, n))
		}
	}
}

// restoreLedger writes consecutive entries. The first ones of a ledger may be missing.
func (d *draft) restoreLedger(h *head, entries []counter.Entry, kept time.Duration) {
	if len(entries) == 0 {
		return
	}

	first := entries[0].Seq
	for seq := first - (first-1)%ledgerRow; seq < first; seq++ {
		// Entries are found by their place in the row, so those that are missing before the first one leave
		// placeholders.
		name := ledgerName(h, seq)
		d.put(name, appendEntry(d.own(name), &counter.Entry{}))
	}
	for i := range entries {
		d.Enter(h.key, entries[i], kept)
	}
}

func (d *draft) restoreStep(h *head, s *counter.StepCopy, kept time.Duration) {
	slot := counter.Slot{Step: s.Step, Number: uint32(s.Number), Value: s.Value}
	if s.Seen == nil {
		d.Past(h.key, slot, kept)
		return
	}

	h.parts |= historyPart(s.Step)
	bucket := d.timeBucket(h, slot, kept)
	s.Seen.Each(func(index int, rank uint8) { bucket.raise(index, rank) })
}
