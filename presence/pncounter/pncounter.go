// Package pncounter is the counter that regions share. It has one pair of increments and
// decrements for each page and region, and only that region writes the pair. Copies of
// pairs travel between regions; they may be lost, repeated and reordered, and merging them
// in any order gives the same value. The package only defines the arithmetic:
// scripts/merge.lua does the same in Redis.
package pncounter

import "cmp"

// Pair is one region's part of a page's counter. A region that never had a user there has
// the zero Pair.
type Pair struct {
	// Incarnation grows whenever the region forgot the page or lost its data: a pair
	// of a higher incarnation replaces any of a lower one.
	Incarnation uint64
	Increments  int64 // users who came in this incarnation
	Decrements  int64 // users who left in this incarnation
}

// Merge returns the newest that two copies of one region's pair know. It is commutative,
// associative and idempotent.
func (p Pair) Merge(o Pair) Pair {
	switch cmp.Compare(p.Incarnation, o.Incarnation) {
	case -1:
		return o
	case 1:
		return p
	}
	return Pair{p.Incarnation, max(p.Increments, o.Increments), max(p.Decrements, o.Decrements)}
}

// Add returns p after delta users came, or left if delta is negative.
func (p Pair) Add(delta int64) Pair {
	if delta > 0 {
		p.Increments += delta
	} else {
		p.Decrements -= delta
	}
	return p
}

// Value returns the number of users, never negative.
func (p Pair) Value() int64 { return max(p.Increments-p.Decrements, 0) }
