package share

import "slices"

// Mine is the Share of a region that changes its own part in it.
type Mine struct {
	Region string
	Share  // includes the own part once that has a sequence

	Life     uint64 // of the own part; 0: the region has none
	Sequence uint64 // of the own part
	Value    int64  // of the own part
	// Changed says that the region has changed the counter in this life, and not only merged changes of others. A
	// counter that the region has not changed ends with any later deletion that it receives, whatever their numbers.
	Changed bool
}

// Effect is the result of merging another region's share.
type Effect struct {
	New     bool // the share contained anything new
	Dropped bool // the counter was deleted, with all its rows
	Emptied bool // the region's own set, or its registers, were emptied
	Begun   bool // the region began a new life of the counter
	// Tell says that this region must send its share to all others.
	Tell bool
	// Odd says that the share could not be merged completely: the kinds differ, or there are too many parts.
	Odd bool
}

// put stores Sequence and Value in the own part. A life in which the region has not changed the counter has no part.
func (m *Mine) put() {
	if !m.Kind.Number() {
		m.dropFormer()
	}

	at, known := m.find(m.Region, m.Life)
	switch {
	case known:
		m.Parts[at].Sequence = m.Sequence
		m.Parts[at].Value = m.Value
	case m.Sequence > 0:
		m.Parts = slices.Insert(m.Parts, at, Part{Region: m.Region, Life: m.Life, Sequence: m.Sequence, Value: m.Value})
	}
}

// Own sets the sequence and the value of the own part.
func (m *Mine) Own(sequence uint64, value int64) {
	m.Sequence = sequence
	m.Value = value
	m.put()
}

// after returns now, or if necessary a greater number, so that it exceeds other and all known lives. So a region whose
// clock is slow can still delete and reset.
func (m *Mine) after(now, other uint64) uint64 {
	now = max(now, other+1, m.Life+1)
	for i := range m.Parts {
		now = max(now, m.Parts[i].Life+1)
	}

	return now
}

// Delete returns the number of a deletion that this region makes at the given time.
func (m *Mine) Delete(now uint64) (died uint64) { return m.after(now, m.Died) }

// Reset makes the total 0 without changing the own part. The caller empties a set or a unique.
func (m *Mine) Reset(now uint64) {
	if !m.Kind.Number() {
		m.Emptied = m.after(now, m.Emptied)
		m.Parts = nil
		return
	}

	for i := range m.Parts {
		p := &m.Parts[i]
		p.At = p.Sequence
		p.Base = p.Value
	}
}

// keep drops all parts except the own one.
func (m *Mine) keep() {
	own := func(p Part) bool { return p.Region == m.Region && p.Life == m.Life }
	m.Parts = slices.DeleteFunc(m.Parts, func(p Part) bool { return !own(p) })
}

// Hear merges the share of another region. If that begins a new life, the life gets the number life or a greater one.
func (m *Mine) Hear(from string, o *Share, life uint64) Effect {
	var e Effect
	if o.Died < m.Died {
		e.Tell = true // the sender does not know about the deletion
		return e
	}
	if o.Died > m.Died {
		m.die(o.Died, &e)
	}
	if o.Kind == 0 {
		return e
	}
	if m.Kind != 0 && m.Kind != o.Kind {
		e.Odd = true
		return e
	}

	existed := m.Kind != 0
	m.Kind = o.Kind
	m.Updated = max(m.Updated, o.Updated)
	if !o.Kind.Number() {
		if existed && o.Emptied < m.Emptied {
			e.Tell = true // the sender does not know about the reset
			return e
		}
		m.empty(o.Emptied, existed, &e)
	}

	m.takeAll(from, o, &e)
	m.begin(life, &e)

	return e
}

// die applies a deletion. If this region created the counter again after the deletion without knowing about it, as a
// region does that lost its data, only the other regions' parts are dropped.
func (m *Mine) die(number uint64, e *Effect) {
	e.New = true
	if m.Kind != 0 && m.Life > number && m.Changed {
		m.Died = number
		m.Emptied = 0
		m.keep()
		e.Tell = true
		return
	}

	e.Dropped = m.Kind != 0
	*m = Mine{Region: m.Region, Share: Share{Died: number}}
}

// empty applies a reset to a set or a unique. If this region created the counter again after the reset, only the other
// regions' parts are dropped.
func (m *Mine) empty(number uint64, existed bool, e *Effect) {
	if number <= m.Emptied {
		return
	}

	m.Emptied = number
	if !existed {
		return
	}

	e.New = true
	e.Tell = true // the own part has changed
	if m.Life > number && m.Changed {
		m.keep()
		return
	}

	m.Parts = nil
	e.Emptied = true
	m.Own(m.Sequence+1, 0)
}

// takeAll merges the parts of a share.
func (m *Mine) takeAll(from string, o *Share, e *Effect) {
	for i := range o.Parts {
		p := &o.Parts[i]
		if m.outdated(from, p) {
			e.Tell = true // the sender has lost data of its own, or counts members that this region has lost
		}

		changed, room := m.take(p)
		if changed {
			e.New = true
		}
		if changed && p.Region == m.Region {
			e.Tell = true // only this region passes on news about its own parts
		}
		if !room {
			e.Odd = true
		}
	}

	if m.lacksOwn(from, o) {
		e.Tell = true
	}
}

// lacksOwn reports whether this region knows a part of the sender that the sender itself does not have any more.
func (m *Mine) lacksOwn(from string, o *Share) bool {
	return slices.ContainsFunc(m.Parts, func(p Part) bool {
		_, known := o.find(p.Region, p.Life)

		return p.Region == from && !known
	})
}

// outdated reports whether the sender has an older value of its own part than this region, or an older life of this
// region's set.
func (m *Mine) outdated(from string, p *Part) bool {
	if !m.Kind.Number() && p.Region == m.Region {
		return p.Life < m.Life
	}
	if p.Region != from {
		return false
	}

	at, known := m.find(p.Region, p.Life)

	return known && m.Parts[at].after(p)
}

// begin begins a life if this region has none, or if other regions know a newer state of the current one: then this
// region has lost data.
func (m *Mine) begin(life uint64, e *Effect) {
	newest := m.Newest(m.Region)
	if m.Life == 0 {
		m.Life = max(life, newest+1, m.Died+1)
		m.Changed = false
		e.Begun = true
		if newest > 0 && !m.Kind.Number() {
			m.Own(1, 0) // tells the others that the set of the former life is lost
			e.Tell = true
		}
		return
	}

	own := Part{Sequence: m.Sequence, Value: m.Value}
	at, known := m.find(m.Region, m.Life)
	lost := newest > m.Life || known && m.Parts[at].after(&own)
	if !lost {
		return
	}

	// The part of the former life stays in the total as the other regions know it.
	m.Life = max(life, newest+1, m.Life+1)
	m.Changed = false
	e.Begun = true
	e.Tell = true
	if m.Kind.Number() {
		m.Value = 0
	}
	m.Own(1, m.Value)
}

// dropFormer drops the parts of this region's former lives. A set counts only the newest life.
func (m *Mine) dropFormer() {
	former := func(p Part) bool { return p.Region == m.Region && p.Life != m.Life }
	m.Parts = slices.DeleteFunc(m.Parts, former)
}
