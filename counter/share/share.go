// Package share has the arithmetic by which regions share a counter: what a region knows about the counter, and how to
// merge the knowledge of two regions. It has no I/O.
//
// A [Share] is everything that a region knows about a counter. [Local.Merge] takes the newer version of each part, so
// shares may be lost, repeated, delayed or reordered. A region that lost its data gets it back, including its own
// parts, from any share that has it.
//
//   - A sum has one part for each life of each region: a number that only this region changes. The total is the sum of
//     all parts minus what resets subtract. A reset records the value that it has seen of each part. So an addition
//     that the reset had not seen survives it, whichever region made it, and two concurrent resets subtract nothing
//     twice.
//   - A set has one part for each region: the size of that region's set in its newest life.
//   - A unique has the registers of all regions, merged by taking the maximum of each.
//   - The last reset of a set or a unique has a number, Emptied, and the last deletion of any counter has one,
//     Deletion. A region that learns of a greater number drops what it had, including what it added in the meantime.
//
// A life of a counter in a region begins when the region creates the counter, receives it for the first time, or finds
// out that it has lost data, because other regions know a newer state of its part. After a loss the old part never
// changes again, and the region continues in a new one.
package share

import (
	"cmp"
	"slices"

	"headcount/counter"
	"headcount/hyperloglog"
)

// MaxParts is the maximum number of parts of a counter. Parts of further lives are not counted.
const MaxParts = 100

// Part is the contribution of one region in one of its lives. Only that region changes its Value.
type Part struct {
	Region   string
	Life     uint64 // later lives have greater numbers
	Sequence uint64 // grows with each change of Value
	Value    int64
	// Base is what resets subtract: the Value that the part had at the sequence At.
	Base int64
	At   uint64
}

// newerThan reports whether p has a newer value than o. If a region lost data and continued, one sequence may have two
// values. Then all regions agree on the greater one.
func (p *Part) newerThan(o *Part) bool {
	return p.Sequence > o.Sequence || p.Sequence == o.Sequence && p.Value > o.Value
}

// merge takes the newer of each field from o, and reports whether anything changed.
func (p *Part) merge(o *Part) (changed bool) {
	if o.newerThan(p) {
		p.Sequence = o.Sequence
		p.Value = o.Value
		changed = true
	}
	// A reset may be newer than a value, and the other way round, so each is compared by itself.
	if o.At > p.At {
		p.At = o.At
		p.Base = o.Base
		changed = true
	}

	return changed
}

// Share is what a region knows about a counter. The zero Share is that of a counter that never existed.
type Share struct {
	Kind    counter.Kind // zero if the counter does not exist
	Updated int64        // last change, unix milliseconds
	// Deletion is the number of the last deletion. Emptied is that of the last reset of a set or a unique. Everything
	// recorded under a lower number has been dropped.
	Deletion, Emptied uint64
	Parts             []Part // sorted by region and life
	Seen              hyperloglog.Registers
}

func order(a, b Part) int {
	return cmp.Or(cmp.Compare(a.Region, b.Region), cmp.Compare(a.Life, b.Life))
}

// find returns the index of the part of a life, or the index at which to insert it.
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

// mergePart merges p into the share. It reports whether anything changed, and whether there was room for the part.
func (s *Share) mergePart(p *Part) (changed, room bool) {
	at, known := s.find(p.Region, p.Life)
	if known {
		return s.Parts[at].merge(p), true
	}
	if !s.Kind.Number() {
		return s.mergeNewest(p)
	}
	// A row must not grow for ever by a region that loses its data again and again.
	if len(s.Parts) >= MaxParts {
		return false, false
	}
	s.Parts = slices.Insert(s.Parts, at, *p)

	return true, true
}

// mergeNewest merges a part of a set if it belongs to its region's newest life. The sets of former lives are lost.
func (s *Share) mergeNewest(p *Part) (changed, room bool) {
	if p.Life < s.Newest(p.Region) {
		return false, true
	}

	// The region's part of a former life makes room for this one.
	s.Parts = slices.DeleteFunc(s.Parts, func(o Part) bool { return o.Region == p.Region })
	if len(s.Parts) >= MaxParts {
		return false, false
	}
	at, _ := s.find(p.Region, p.Life)
	s.Parts = slices.Insert(s.Parts, at, *p)

	return true, true
}
