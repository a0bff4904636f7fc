// Package shares is what regions share of one counter, as pure arithmetic: what package regions and
// scripts/counter_merge.lua have to do. It has no input or output, and no store uses it; the tests compare the two.
package shares

import (
	"maps"

	"headcount/counter"
	"headcount/counter/hyperloglog"
)

// Life is a time in which a region lost nothing of the counter. A later one has a greater Number.
type Life struct {
	Region string
	Number uint64
}

// Part is what one life gave a sum, or the size of a region's set. Only its region moves it.
type Part struct {
	Value    int64
	Sequence uint64 // of Value: it grows with each change of it
	// Base is what resets have taken away: Value as it was at sequence At.
	Base int64
	At   uint64
}

// Merge returns what two tellings of one part know together. One sequence has two values when a region went on from an
// older memory: then the greater value holds.
func (p Part) Merge(o Part) Part {
	if o.Sequence > p.Sequence || o.Sequence == p.Sequence && o.Value > p.Value {
		p.Value, p.Sequence = o.Value, o.Sequence
	}
	if o.At > p.At {
		p.Base, p.At = o.Base, o.At
	}
	return p
}

// Share is what is known of a counter. The zero Share is that of a counter never touched. Its Kind is zero when it was
// deleted, and not touched since.
type Share struct {
	Kind counter.Kind
	// What stands under a smaller Died is gone, as DELETE has it; under a smaller Emptied, of a set or a
	// unique, its members are.
	Died, Emptied uint64
	Parts         map[Life]Part // of a sum or a set; nobody changes it
	Seen          hyperloglog.Registers
}

// Merge returns what two shares know together. It is commutative, associative and idempotent. Both are of one kind, or
// one has none.
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
		parts = map[Life]Part{}
	}
	for life, p := range o.Parts {
		parts[life] = parts[life].Merge(p)
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
		for life, p := range s.Parts {
			if life.Number == s.newest(life.Region) { // the set of a former life is lost
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

// newest is the number of a region's newest life.
func (s Share) newest(region string) (n uint64) {
	for life := range s.Parts {
		if life.Region == region {
			n = max(n, life.Number)
		}
	}
	return n
}

// Region is a region with one counter. Moments are numbers that may go back.
type Region struct {
	Name string
	Share

	life     uint64 // of this region; 0: it has not begun
	changed  bool   // it has changed the counter itself in this life, and not only heard of it
	ended    uint64 // lives begin after this
	sequence uint64
	size     int64 // of its set
}

// own changes the region's own part, and begins its life when it has none.
func (r *Region) own(kind counter.Kind, now uint64, change func(*Part)) {
	if r.Kind == 0 {
		r.Kind = kind
	}
	if r.life == 0 {
		r.life, r.sequence = max(now, r.newest(r.Name)+1, r.ended+1), 0
	}
	parts := maps.Clone(r.Parts)
	if parts == nil {
		parts = map[Life]Part{}
	}
	r.sequence++
	p := parts[Life{r.Name, r.life}]
	p.Sequence = r.sequence
	change(&p)
	parts[Life{r.Name, r.life}] = p
	r.Parts = parts
}

// Add adds to a sum.
func (r *Region) Add(delta int64, now uint64) {
	r.own(counter.Sum, now, func(p *Part) { p.Value += delta })
	r.changed = true
}

// Join has so many members join the region's set, or leave it.
func (r *Region) Join(members int64, now uint64) {
	r.size += members
	r.own(counter.Members, now, func(p *Part) { p.Value = r.size })
	r.changed = true
}

// Size is how many members the region's set has.
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
		for life, p := range parts {
			p.Base, p.At = p.Value, p.Sequence
			parts[life] = p
		}
		r.Parts = parts
	default:
		r.empty(r.after(now, r.Emptied))
		r.own(r.Kind, now, func(*Part) {})
	}
}

// after is a moment after now, after another one, and after all lives that are known.
func (r *Region) after(now, other uint64) uint64 {
	now = max(now, other+1, r.life+1)
	for life := range r.Parts {
		now = max(now, life.Number+1)
	}
	return now
}

// empty begins under a new number of Emptied.
func (r *Region) empty(number uint64) {
	r.Emptied, r.size, r.Seen, r.Parts = number, 0, hyperloglog.Registers{}, nil
}

// Delete is DELETE.
func (r *Region) Delete(now uint64) {
	if r.Kind != 0 {
		r.drop(r.after(now, r.Died))
	}
}

// drop begins under a new number of Died.
func (r *Region) drop(number uint64) {
	*r = Region{Name: r.Name, Share: Share{Died: number}, ended: max(r.ended, number)}
}

// keep is what this life of the region has given itself: of a life that began after an end, without knowing of it,
// for its memory was lost, that stays. A life that was made by hearing alone has given nothing, and ends.
func (r *Region) keep() {
	life := Life{r.Name, r.life}
	own := r.Parts[life]
	r.Parts = map[Life]Part{life: own}
}

// Lose has the region lose its memory.
func (r *Region) Lose() { *r = Region{Name: r.Name} }

// Hear takes what another region tells.
func (r *Region) Hear(s Share, now uint64) {
	switch {
	case s.Died > r.Died && r.life > s.Died && r.changed:
		r.Died, r.Emptied, r.ended = s.Died, 0, max(r.ended, s.Died)
		r.keep()
	case s.Died > r.Died:
		r.drop(s.Died)
	}
	if s.Died == r.Died && s.Kind != 0 && r.Kind != 0 && r.Kind != counter.Sum && s.Emptied > r.Emptied {
		if r.life > s.Emptied && r.changed {
			r.Emptied = s.Emptied
			r.keep()
		} else {
			r.empty(s.Emptied)
			r.own(r.Kind, now, func(*Part) {})
		}
	}
	own := r.Parts[Life{r.Name, r.life}].Value
	r.Share = r.Share.Merge(s)
	top := r.newest(r.Name)
	is := r.Parts[Life{r.Name, top}]
	if r.Kind == 0 || r.life != 0 && top == r.life && is.Sequence <= r.sequence && is.Value == own {
		return
	}
	// It hears of the counter for the first time; or others know more of this region than it does, so it has lost its
	// memory. A new life begins.
	r.life, r.changed = 0, false
	r.own(r.Kind, now, func(p *Part) { p.Value = r.size })
}
