// Package pncounter is the counter that regions share. It has one pair of
// increments and decrements for each page and region, and only that region writes
// the pair. Copies of pairs travel between regions; they may be lost, repeated and
// overtaken, and merging them in any order gives the same value. The package has no
// input or output: scripts/merge.lua does the same in Redis.
package pncounter

import (
	"cmp"
	"maps"
)

// Pair is one region's part of a page's counter. A region without any users so far
// has the zero Pair.
type Pair struct {
	// Incarnation grows whenever the region forgot the page or lost its data: a pair
	// of a higher incarnation replaces any of a lower one.
	Incarnation uint64
	Increments  int64 // users who came in this incarnation
	Decrements  int64 // users who left in this incarnation
}

// Merge returns what two copies of one region's pair know together. It is
// commutative, associative and idempotent.
func (p Pair) Merge(o Pair) Pair {
	switch cmp.Compare(p.Incarnation, o.Incarnation) {
	case -1:
		return o
	case 1:
		return p
	}
	return Pair{p.Incarnation, max(p.Increments, o.Increments), max(p.Decrements, o.Decrements)}
}

// Add returns p after delta more users, or fewer when delta is negative.
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

// Next returns the incarnation of a counter that begins at now (unix milliseconds).
// known is the highest incarnation that is remembered, or 0.
func Next(now, known uint64) uint64 { return max(now, known+1) }

// Counter is a page's counter: the pairs by region.
type Counter map[string]Pair

// Merge returns a new Counter of what both know.
func (c Counter) Merge(o Counter) Counter {
	m := maps.Clone(c)
	if m == nil {
		m = Counter{}
	}
	for region, p := range o {
		m[region] = m[region].Merge(p)
	}
	return m
}

// Value returns the total over all regions.
func (c Counter) Value() int64 {
	var n int64
	for _, p := range c {
		n += p.Value()
	}
	return n
}
