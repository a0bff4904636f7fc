package regions_test

import (
	"maps"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// This file has the replica state of a counter and its merge as pure arithmetic: the model with which the tests compare
// scripts/counter_merge.lua.

// Incarnation is a period in which a region did not lose the counter. A later one has a greater Number.
type Incarnation struct {
	Region string
	Number uint64
}

// Part is the contribution of one incarnation to a sum, or the size of a region's set. Only its region changes it.
type Part struct {
	Value    int64
	Sequence uint64 // grows with each change of Value
	// Base is what resets subtract: the Value at the sequence At.
	Base int64
	At   uint64
}

// Merge merges two versions of one part. One sequence has two values if a region lost data and went on; then the
// greater value wins, so that all regions agree.
func (p Part) Merge(o Part) Part {
	if o.Sequence > p.Sequence || o.Sequence == p.Sequence && o.Value > p.Value {
		p.Value, p.Sequence = o.Value, o.Sequence
	}
	if o.At > p.At {
		p.Base, p.At = o.Base, o.At
	}
	return p
}

// Share is the replica state of a counter in one region. The zero Share is that of a counter that never existed. Kind
// is zero if the counter was deleted and does not exist again.
type Share struct {
	Kind counter.Kind
	// Died is the number of the last DELETE, and Emptied, for a set or a unique, that of the last reset. Whatever was
	// recorded under a smaller number is gone.
	Died, Emptied uint64
	Parts         map[Incarnation]Part // of a sum or a set; immutable
	Seen          hyperloglog.Registers
}

// Merge merges two shares. It is commutative, associative and idempotent. Both have the same kind, or one has none.
func (s Share) Merge(o Share) Share {
	switch {
	case s.Died != o.Died:
		if s.Died > o.Died {
			return s
		}
		return o
	case s.Kind == 0:
		return o
	case o.Kind == 0:
		return s
	case s.Kind != counter.Sum && s.Emptied != o.Emptied:
		if s.Emptied > o.Emptied {
			return s
		}
		return o
	}
	parts := maps.Clone(s.Parts)
	if parts == nil {
		parts = map[Incarnation]Part{}
	}
	for incarnation, p := range o.Parts {
		parts[incarnation] = parts[incarnation].Merge(p)
	}
	seen := s.Seen.Clone()
	seen.Merge(o.Seen)
	s.Parts, s.Seen, s.Emptied = parts, seen, max(s.Emptied, o.Emptied)
	return s
}

// Value returns the total.
func (s Share) Value() (n int64) {
	switch s.Kind {
	case counter.Unique:
		return s.Seen.Count()
	case counter.Members:
		for incarnation, p := range s.Parts {
			if incarnation.Number == s.newest(incarnation.Region) { // the sets of former incarnations are lost
				n += p.Value
			}
		}
	default:
		for _, p := range s.Parts {
			n += p.Value - p.Base
		}
	}
	return n
}

// newest returns the number of a region's newest incarnation.
func (s Share) newest(region string) (n uint64) {
	for incarnation := range s.Parts {
		if incarnation.Region == region {
			n = max(n, incarnation.Number)
		}
	}
	return n
}

// Region is a region with one counter. The parameter now of its methods is a clock that may go back.
type Region struct {
	Name string
	Share

	incarnation uint64 // number of its incarnation; 0: none
	changed     bool   // in this incarnation the region has changed the counter, not only received it
	ended       uint64 // new incarnations are greater than this
	sequence    uint64
	size        int64 // of its set
}

// own changes the region's own part, and begins an incarnation if it has none.
func (r *Region) own(kind counter.Kind, now uint64, change func(*Part)) {
	if r.Kind == 0 {
		r.Kind = kind
	}
	if r.incarnation == 0 {
		r.incarnation, r.sequence = max(now, r.newest(r.Name)+1, r.ended+1), 0
	}
	parts := maps.Clone(r.Parts)
	if parts == nil {
		parts = map[Incarnation]Part{}
	}
	r.sequence++
	p := parts[Incarnation{r.Name, r.incarnation}]
	p.Sequence = r.sequence
	change(&p)
	parts[Incarnation{r.Name, r.incarnation}] = p
	r.Parts = parts
}

// Add adds to a sum.
func (r *Region) Add(delta int64, now uint64) {
	r.own(counter.Sum, now, func(p *Part) { p.Value += delta })
	r.changed = true
}

// Join adds members to the region's set, or removes them if members is negative.
func (r *Region) Join(members int64, now uint64) {
	r.size += members
	r.own(counter.Members, now, func(p *Part) { p.Value = r.size })
	r.changed = true
}

// Size returns the number of members in the region's set.
func (r *Region) Size() int64 { return r.size }

// See adds members to a unique.
func (r *Region) See(now uint64, members ...string) {
	seen := r.Seen.Clone()
	if !seen.Add(members...) {
		return
	}
	r.Seen = seen
	r.own(counter.Unique, now, func(*Part) {})
	r.changed = true
}

// Reset makes the value 0.
func (r *Region) Reset(now uint64) {
	r.changed = r.Kind != 0
	switch r.Kind {
	case 0:
	case counter.Sum:
		parts := maps.Clone(r.Parts)
		for incarnation, p := range parts {
			p.Base, p.At = p.Value, p.Sequence
			parts[incarnation] = p
		}
		r.Parts = parts
	default:
		r.empty(r.after(now, r.Emptied))
		r.own(r.Kind, now, func(*Part) {})
	}
}

// after returns now, or more if that is needed to be greater than other and all known incarnations.
func (r *Region) after(now, other uint64) uint64 {
	now = max(now, other+1, r.incarnation+1)
	for incarnation := range r.Parts {
		now = max(now, incarnation.Number+1)
	}
	return now
}

// empty removes all members under a new number of Emptied.
func (r *Region) empty(number uint64) {
	r.Emptied, r.size, r.Seen, r.Parts = number, 0, hyperloglog.Registers{}, nil
}

// Delete deletes the counter.
func (r *Region) Delete(now uint64) {
	if r.Kind != 0 {
		r.drop(r.after(now, r.Died))
	}
}

// drop forgets the counter under a new number of Died.
func (r *Region) drop(number uint64) {
	*r = Region{Name: r.Name, Share: Share{Died: number}, ended: max(r.ended, number)}
}

// keep keeps only the region's own part. It is for a region that lost data and began a new incarnation after a delete
// or reset that it did not know: what it counted since then stays.
func (r *Region) keep() {
	incarnation := Incarnation{r.Name, r.incarnation}
	own := r.Parts[incarnation]
	r.Parts = map[Incarnation]Part{incarnation: own}
}

// Lose makes the region lose its data.
func (r *Region) Lose() { *r = Region{Name: r.Name} }

// Receive merges the state of another region.
func (r *Region) Receive(s Share, now uint64) {
	switch {
	case s.Died > r.Died && r.incarnation > s.Died && r.changed:
		r.Died, r.Emptied, r.ended = s.Died, 0, max(r.ended, s.Died)
		r.keep()
	case s.Died > r.Died:
		r.drop(s.Died)
	}
	if s.Died == r.Died && s.Kind != 0 && r.Kind != 0 && r.Kind != counter.Sum && s.Emptied > r.Emptied {
		if r.incarnation > s.Emptied && r.changed {
			r.Emptied = s.Emptied
			r.keep()
		} else {
			r.empty(s.Emptied)
			r.own(r.Kind, now, func(*Part) {})
		}
	}
	own := r.Parts[Incarnation{r.Name, r.incarnation}].Value
	r.Share = r.Share.Merge(s)
	top := r.newest(r.Name)
	is := r.Parts[Incarnation{r.Name, top}]
	if r.Kind == 0 || r.incarnation != 0 && top == r.incarnation && is.Sequence <= r.sequence && is.Value == own {
		return
	}
	// The region receives the counter for the first time, or others know more of this region than it does, because it
	// lost data. A new incarnation begins.
	r.incarnation, r.changed = 0, false
	r.own(r.Kind, now, func(p *Part) { p.Value = r.size })
}
