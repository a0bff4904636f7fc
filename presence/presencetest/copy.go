package presencetest

import (
	"cmp"

	"headcount/presence/pncounter"
)

// Copy is one region's copy of another region's bucket. It is the specification of merge.lua. The zero Copy is empty.
// One goroutine at a time may use a Copy.
type Copy struct {
	Log, Cursor uint64
	Floor, High uint64
	Done        bool
	Pairs       map[string]pncounter.Pair
}

// Merge merges a batch and returns the reply to it.
func (c *Copy) Merge(b pncounter.Batch) pncounter.Ack {
	highest := max(c.High, c.Floor)
	switch cmp.Compare(b.Log, c.Log) {
	case -1:
		return c.ack(pncounter.Behind)
	case 0:
		if b.From > c.Cursor {
			return c.ack(pncounter.Gap)
		}
	case 1: // a new log begins above all incarnations that the copy knows, and is read from its start
		if b.Log <= highest {
			return c.ack(pncounter.Behind)
		}
		if b.From > 0 {
			return pncounter.Ack{Status: pncounter.Gap, Log: b.Log, High: highest}
		}

		c.Log = b.Log
		c.Cursor = 0
		c.Done = false
		c.High = max(c.High, b.Log)
	}

	var refused []int
	if b.To > c.Cursor { // otherwise the copy already has the whole batch
		if c.Pairs == nil {
			c.Pairs = map[string]pncounter.Pair{}
		}

		for i, p := range b.Pages {
			c.High = max(c.High, p.Incarnation)
			old, known := c.Pairs[p.Page]
			if p.Incarnation < max(old.Incarnation, c.Floor) {
				refused = append(refused, i)
				continue
			}
			if known || value(p.Pair) > 0 { // an empty page that the copy does not know need not be stored
				c.Pairs[p.Page] = mergePairs(old, p.Pair)
			}
		}

		if len(refused) == 0 { // otherwise the region raises these pairs, and sends the batch again
			c.Cursor = b.To
		}
	}

	// Once the copy has the whole log, pairs that the log does not name are void.
	if b.Complete && b.To == c.Cursor && !c.Done {
		c.Done = true
		c.Floor = max(c.Floor, b.Floor)
	}

	a := c.ack(pncounter.Merged)
	a.Refused = refused
	return a
}

func (c *Copy) ack(s pncounter.Status) pncounter.Ack {
	return pncounter.Ack{Status: s, Log: c.Log, Cursor: c.Cursor, High: max(c.High, c.Floor), Done: c.Done}
}

// Value returns the number of the region's users on the page.
func (c *Copy) Value(page string) int64 {
	if p := c.Pairs[page]; p.Incarnation >= c.Floor {
		return value(p)
	}

	return 0
}

// mergePairs returns the newest state that two copies of one region's pair know. It is commutative, associative and
// idempotent.
func mergePairs(p, o pncounter.Pair) pncounter.Pair {
	switch cmp.Compare(p.Incarnation, o.Incarnation) {
	case -1:
		return o
	case 1:
		return p
	}

	p.Increments = max(p.Increments, o.Increments)
	p.Decrements = max(p.Decrements, o.Decrements)

	return p
}

// value returns how many users a pair stands for, never a negative number.
func value(p pncounter.Pair) int64 { return max(p.Increments-p.Decrements, 0) }
