package share

import "slices"

// Local is the Share of a region that changes its own part in it.
type Local struct {
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
	// Send says that this region must send its share to all others.
	Send bool
	// Rejected says that the share could not be merged completely: the kinds differ, or there are too many parts.
	Rejected bool
}

// putOwn stores Sequence and Value in the own part. A life in which the region has not changed the counter has no part.
func (l *Local) putOwn() {
	if !l.Kind.Number() {
		l.dropFormer()
	}

	at, known := l.find(l.Region, l.Life)
	switch {
	case known: // its base stays
		l.Parts[at].Sequence = l.Sequence
		l.Parts[at].Value = l.Value
	case l.Sequence > 0:
		l.Parts = slices.Insert(l.Parts, at, Part{Region: l.Region, Life: l.Life, Sequence: l.Sequence, Value: l.Value})
	}
}

// SetOwn sets the sequence and the value of the own part.
func (l *Local) SetOwn(sequence uint64, value int64) {
	l.Sequence = sequence
	l.Value = value
	l.putOwn()
}

// nextNumber returns now, or if necessary a greater number, so that it exceeds other and all known lives. So a region
// whose clock is slow can still delete and reset.
func (l *Local) nextNumber(now, other uint64) uint64 {
	now = max(now, other+1, l.Life+1)
	for i := range l.Parts {
		now = max(now, l.Parts[i].Life+1)
	}

	return now
}

// Delete returns the number of a deletion that this region makes at the given time.
func (l *Local) Delete(now uint64) (deletion uint64) { return l.nextNumber(now, l.Deletion) }

// Reset makes the total 0 without changing the own part. The caller empties a set or a unique.
func (l *Local) Reset(now uint64) {
	if !l.Kind.Number() {
		// The others drop their parts as well when they merge the greater number.
		l.Emptied = l.nextNumber(now, l.Emptied)
		l.Parts = nil
		return
	}

	for i := range l.Parts {
		p := &l.Parts[i]
		// What other regions add meanwhile has a greater sequence, so it is not subtracted.
		p.At = p.Sequence
		p.Base = p.Value
	}
}

// keepOwn drops all parts except the own one.
func (l *Local) keepOwn() {
	own := func(p Part) bool { return p.Region == l.Region && p.Life == l.Life }
	l.Parts = slices.DeleteFunc(l.Parts, func(p Part) bool { return !own(p) })
}

// Merge merges the share of another region. If that begins a new life, the life gets the number life or a greater one.
func (l *Local) Merge(from string, o *Share, life uint64) Effect {
	// Deletions and resets come before the parts, because they end parts on either side.
	var e Effect
	if o.Deletion < l.Deletion {
		e.Send = true // the sender does not know about the deletion
		return e
	}
	if o.Deletion > l.Deletion {
		l.applyDeletion(o.Deletion, &e)
	}
	// The sender knows nothing but the deletion.
	if o.Kind == 0 {
		return e
	}
	if l.Kind != 0 && l.Kind != o.Kind {
		e.Rejected = true
		return e
	}

	existed := l.Kind != 0
	l.Kind = o.Kind
	l.Updated = max(l.Updated, o.Updated)
	if !o.Kind.Number() {
		// What the sender has added since without knowing about the reset is dropped there as well.
		if existed && o.Emptied < l.Emptied {
			e.Send = true // the sender does not know about the reset
			return e
		}
		l.applyReset(o.Emptied, existed, &e)
	}

	l.mergeParts(from, o, &e)
	// After the parts, which may show that this region has lost data.
	l.beginLife(life, &e)

	return e
}

// applyDeletion applies a deletion. If this region created the counter again after the deletion without knowing about
// it, as a region does that lost its data, only the other regions' parts are dropped.
func (l *Local) applyDeletion(number uint64, e *Effect) {
	e.New = true
	if l.Kind != 0 && l.Life > number && l.Changed {
		l.Deletion = number
		// Resets from before the deletion say nothing about the counter that was made after it.
		l.Emptied = 0
		l.keepOwn()
		e.Send = true
		return
	}

	e.Dropped = l.Kind != 0
	*l = Local{Region: l.Region, Share: Share{Deletion: number}}
}

// applyReset applies a reset to a set or a unique. If this region created the counter again after the reset, only the
// other regions' parts are dropped.
func (l *Local) applyReset(number uint64, existed bool, e *Effect) {
	if number <= l.Emptied {
		return
	}

	l.Emptied = number
	if !existed {
		return
	}

	e.New = true
	e.Send = true // the own part has changed
	if l.Life > number && l.Changed {
		l.keepOwn()
		return
	}

	l.Parts = nil
	e.Emptied = true
	// The others drop the size that they know, because the sequence has grown.
	l.SetOwn(l.Sequence+1, 0)
}

// mergeParts merges the parts of a share.
func (l *Local) mergeParts(from string, o *Share, e *Effect) {
	for i := range o.Parts {
		p := &o.Parts[i]
		// This is asked before the merge, which takes the newer value on this side.
		if l.outdated(from, p) {
			e.Send = true // the sender has lost data of its own, or counts members that this region has lost
		}

		changed, room := l.mergePart(p)
		if changed {
			e.New = true
		}
		if changed && p.Region == l.Region {
			e.Send = true // only this region passes on news about its own parts
		}
		if !room {
			e.Rejected = true
		}
	}

	if l.lacksOwn(from, o) {
		e.Send = true
	}
}

// lacksOwn reports whether this region knows a part of the sender that the sender itself does not have any more.
func (l *Local) lacksOwn(from string, o *Share) bool {
	return slices.ContainsFunc(l.Parts, func(p Part) bool {
		_, known := o.find(p.Region, p.Life)

		return p.Region == from && !known
	})
}

// outdated reports whether the sender has an older value of its own part than this region, or an older life of this
// region's set.
func (l *Local) outdated(from string, p *Part) bool {
	if !l.Kind.Number() && p.Region == l.Region {
		return p.Life < l.Life
	}
	if p.Region != from {
		return false
	}

	at, known := l.find(p.Region, p.Life)

	return known && l.Parts[at].newerThan(p)
}

// beginLife begins a life if this region has none, or if other regions know a newer state of the current one: then this
// region has lost data.
func (l *Local) beginLife(life uint64, e *Effect) {
	newest := l.Newest(l.Region)
	if l.Life == 0 {
		l.Life = max(life, newest+1, l.Deletion+1)
		l.Changed = false
		e.Begun = true
		if newest > 0 && !l.Kind.Number() {
			l.SetOwn(1, 0) // tells the others that the set of the former life is lost
			e.Send = true
		}
		return
	}

	own := Part{Sequence: l.Sequence, Value: l.Value}
	at, known := l.find(l.Region, l.Life)
	lost := newest > l.Life || known && l.Parts[at].newerThan(&own)
	if !lost {
		return
	}

	// The part of the former life stays in the total as the other regions know it.
	l.Life = max(life, newest+1, l.Life+1)
	l.Changed = false
	e.Begun = true
	e.Send = true
	// The members of a set are still here, so they count in the new life.
	if l.Kind.Number() {
		l.Value = 0
	}
	l.SetOwn(1, l.Value)
}

// dropFormer drops the parts of this region's former lives. A set counts only the newest life.
func (l *Local) dropFormer() {
	former := func(p Part) bool { return p.Region == l.Region && p.Life != l.Life }
	l.Parts = slices.DeleteFunc(l.Parts, former)
}
