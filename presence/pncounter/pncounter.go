// Package pncounter is the counter that regions share: per page and region one
// pair of increments and decrements, which its region alone writes. Copies of
// pairs travel between regions, may be lost, repeated and overtaken, and come to
// the same value in every order. The package is pure: scripts/merge.lua does the
// same in Redis.
package pncounter

import (
	"cmp"
	"maps"
)

// Pair is one region's part of a page's counter. The zero Pair is that of a
// region where nobody has ever been.
type Pair struct {
	// Incarnation grows whenever the region forgot the page or lost its data: a
	// pair of a higher one replaces any of a lower one.
	Incarnation uint64
	Increments  int64 // users who came, of this incarnation
	Decrements  int64 // users who went
}

// Merge is the newer of two copies of one region's pair: commutative,
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

// Add is p after delta more users.
func (p Pair) Add(delta int64) Pair {
	if delta > 0 {
		p.Increments += delta
	} else {
		p.Decrements -= delta
	}
	return p
}

// Value is the number of users, never negative.
func (p Pair) Value() int64 { return max(p.Increments-p.Decrements, 0) }

// Next is the incarnation of what begins anew now, in unix milliseconds, when
// known is the highest that anybody remembers: 0 when nobody does.
func Next(now, known uint64) uint64 { return max(now, known+1) }

// Counter is a page's counter: the pairs by region.
type Counter map[string]Pair

// Merge is a new Counter of what both know.
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

// Value is the total over all regions.
func (c Counter) Value() int64 {
	var n int64
	for _, p := range c {
		n += p.Value()
	}
	return n
}
