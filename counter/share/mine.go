package share

import "slices"

// Mine is a Share in the hands of one region, which changes its own part.
type Mine struct {
	Region string
	Share  // with the part of Life, once it has a sequence

	Life     uint64 // of the region's own part; 0: it has none
	Sequence uint64 // of the own part
	Value    int64  // of the own part
	// Changed says that the region has changed the counter in this life, not only heard of it. What a region only heard
	// of ends with a deletion that it hears of later, whatever their numbers.
	Changed bool
}

// Effect is what it meant to hear a share of another region.
type Effect struct {
	New     bool // the region knows more now
	Dropped bool // the counter was deleted, with everything that belongs to it
	Emptied bool // the region's own set, or its registers, were emptied
	Begun   bool // a new life began
	// Tell says that all regions need the share of this one.
	Tell bool
	// Odd says that the share cannot be merged, or not all of it: the kinds differ, or there are too many parts.
	Odd bool
}

// put makes the own part what Sequence and Value say. A life of mere hearing has none.
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

// Own gives the own part a sequence and a value.
func (m *Mine) Own(sequence uint64, value int64) {
	m.Sequence = sequence
	m.Value = value
	m.put()
}

// after returns now, or a greater number if that is needed to be greater than other and than all known lives. So a
// region whose clock is wrong can still delete and reset.
func (m *Mine) after(now, other uint64) uint64 {
	now = max(now, other+1, m.Life+1)
	for i := range m.Parts {
		now = max(now, m.Parts[i].Life+1)
	}

	return now
}

// Delete returns the number of a deletion that this region makes now.
func (m *Mine) Delete(now uint64) (died uint64) { return m.after(now, m.Died) }

// Reset makes the total 0. The own part is as it was before; a set or a unique is emptied by the caller.
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

// keep drops everything but the own part.
func (m *Mine) keep() {
	own := func(p Part) bool { return p.Region == m.Region && p.Life == m.Life }
	m.Parts = slices.DeleteFunc(m.Parts, func(p Part) bool { return !own(p) })
}

// Hear merges the share of another region. A life that begins gets the number life or a greater one.
func (m *Mine) Hear(from string, o *Share, life uint64) Effect {
	var e Effect
	if o.Died < m.Died {
		e.Tell = true // the sender does not know of the deletion
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
			e.Tell = true // the sender does not know of the reset
			return e
		}
		m.empty(o.Emptied, existed, &e)
	}

	m.takeAll(from, o, &e)
	m.begin(life, &e)

	return e
}

// die ends the counter by a deletion with that number, unless this region has made it anew after the deletion, without
// knowing of it: a region that lost its data did.
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

// empty empties a set or a unique by a reset with that number, unless this region has made it anew after the reset.
func (m *Mine) empty(number uint64, existed bool, e *Effect) {
	if number <= m.Emptied {
		return
	}

	m.Emptied = number
	if !existed {
		return
	}

	e.New = true
	e.Tell = true // of the own part, which is another one now
	if m.Life > number && m.Changed {
		m.keep()
		return
	}

	m.Parts = nil
	e.Emptied = true
	m.Own(m.Sequence+1, 0)
}

// takeAll takes the parts of a share.
func (m *Mine) takeAll(from string, o *Share, e *Effect) {
	for i := range o.Parts {
		p := &o.Parts[i]
		if m.outdated(from, p) {
			e.Tell = true // the sender has lost something of its own, or counts members that are lost
		}

		changed, room := m.take(p)
		if changed {
			e.New = true
		}
		if changed && p.Region == m.Region {
			e.Tell = true // others learn of this region's parts from this region
		}
		if !room {
			e.Odd = true
		}
	}

	if m.lacksOwn(from, o) {
		e.Tell = true
	}
}

// lacksOwn reports whether the sender does not know a part of its own any more that this region knows.
func (m *Mine) lacksOwn(from string, o *Share) bool {
	return slices.ContainsFunc(m.Parts, func(p Part) bool {
		_, known := o.find(p.Region, p.Life)

		return p.Region == from && !known
	})
}

// outdated reports whether the sender has an older value of a part of its own, or an older life of this region's set.
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

// begin begins a life if this region has none, or if others know more of the present one.
func (m *Mine) begin(life uint64, e *Effect) {
	newest := m.Newest(m.Region)
	if m.Life == 0 {
		m.Life = max(life, newest+1, m.Died+1)
		m.Changed = false
		e.Begun = true
		if newest > 0 && !m.Kind.Number() {
			m.Own(1, 0) // others have to learn that the former set is lost
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

	// What this region counted in the former life stays, as far as others know it.
	m.Life = max(life, newest+1, m.Life+1)
	m.Changed = false
	e.Begun = true
	e.Tell = true
	if m.Kind.Number() {
		m.Value = 0
	}
	m.Own(1, m.Value)
}

// dropFormer drops the parts of this region's former lives: of sets, the newest counts alone.
func (m *Mine) dropFormer() {
	former := func(p Part) bool { return p.Region == m.Region && p.Life != m.Life }
	m.Parts = slices.DeleteFunc(m.Parts, former)
}
