// Package share has the arithmetic by which regions share a counter: what a region knows of it, and how two regions'
// knowledge becomes one. It has no I/O.
//
// A [Share] is the whole knowledge of a region. [Mine.Hear] takes the newer of everything, part by part, so that it
// does not matter whether shares are lost, repeated, late or out of order. A region that lost its data gets it back
// from any share that has it, also its own parts.
//
//   - A sum has a part for each life of each region: a number that this region alone changes. The total is the sum of
//     all parts, less what resets subtracted. A reset notes the value that it knows of each part; an addition that it
//     did not know stays, whichever region made it, and two resets at the same time subtract nothing twice.
//   - A set has one part for each region: the size of that region's set in its newest life.
//   - A unique has the registers of all regions; of each, the greater value wins.
//   - A reset of a set or a unique has a number, Emptied, and a deletion of any counter has one, Died. A region that
//     learns of a greater number drops what it had, also what it added meanwhile.
//
// A life of a region begins when the region makes the counter, hears of it for the first time, or finds out that it has
// lost some of it: others know more of its part than the region itself. That part then stays as it is for ever, and the
// region goes on in a new one.
package share

import (
	"cmp"
	"slices"

	"headcount/counter"
	"headcount/hyperloglog"
)

// MaxParts is the number of parts that a counter has at most. Parts of further lives do not count.
const MaxParts = 100

// Part is what one region has contributed in one of its lives. Nobody else changes its Value.
type Part struct {
	Region   string
	Life     uint64 // later lives have greater numbers
	Sequence uint64 // grows with each change of Value
	Value    int64
	// Base is what resets subtract: the Value at the sequence At.
	Base int64
	At   uint64
}

// after reports whether p has a newer value than o. One sequence has two values if a region lost data and went on; then
// the greater value counts, so that all regions agree.
func (p *Part) after(o *Part) bool {
	return p.Sequence > o.Sequence || p.Sequence == o.Sequence && p.Value > o.Value
}

// join takes what is newer in o, and reports whether anything was.
func (p *Part) join(o *Part) (changed bool) {
	if o.after(p) {
		p.Sequence = o.Sequence
		p.Value = o.Value
		changed = true
	}
	if o.At > p.At {
		p.At = o.At
		p.Base = o.Base
		changed = true
	}

	return changed
}

// Share is what a region knows of a counter. The zero Share is that of a counter that never existed.
type Share struct {
	Kind    counter.Kind // zero if the counter does not exist
	Updated int64        // last change, unix milliseconds
	// Died is the number of the last deletion, and Emptied, for a set or a unique, that of the last reset. What was
	// recorded under a smaller number is gone.
	Died, Emptied uint64
	Parts         []Part // sorted by region and life
	Seen          hyperloglog.Registers
}

func order(a, b Part) int {
	return cmp.Or(cmp.Compare(a.Region, b.Region), cmp.Compare(a.Life, b.Life))
}

// find returns the index of the part of a life, or where it belongs.
func (s *Share) find(region string, life uint64) (at int, ok bool) {
	return slices.BinarySearchFunc(s.Parts, Part{Region: region, Life: life}, order)
}

// Newest returns the number of a region's newest life, 0 if there is none.
func (s *Share) Newest(region string) (life uint64) {
	for i := range s.Parts {
		if s.Parts[i].Region == region {
			life = max(life, s.Parts[i].Life)
		}
	}

	return life
}

// take takes what is newer in p, and reports whether anything was, and whether there was room for it.
func (s *Share) take(p *Part) (changed, room bool) {
	at, known := s.find(p.Region, p.Life)
	if known {
		return s.Parts[at].join(p), true
	}
	if !s.Kind.Number() {
		return s.takeNewest(p)
	}
	if len(s.Parts) >= MaxParts {
		return false, false
	}
	s.Parts = slices.Insert(s.Parts, at, *p)

	return true, true
}

// takeNewest takes a part of a set, if it is that of its region's newest life: the sets of former lives are lost.
func (s *Share) takeNewest(p *Part) (changed, room bool) {
	if p.Life < s.Newest(p.Region) {
		return false, true
	}

	s.Parts = slices.DeleteFunc(s.Parts, func(o Part) bool { return o.Region == p.Region })
	if len(s.Parts) >= MaxParts {
		return false, false
	}
	at, _ := s.find(p.Region, p.Life)
	s.Parts = slices.Insert(s.Parts, at, *p)

	return true, true
}
