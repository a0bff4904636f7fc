package limit

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
)

// State is what is kept of one Name. The zero State has let nothing through, and a
// state whose End is over is as good as that. One goroutine at a time uses it.
type State struct {
	// Of Fixed and Sliding.
	start      int64 // when the newest window began, ms
	last, this int64 // what passed in the window before it (of Sliding), and in it

	// Of Log: what passed, oldest first, at most MaxLog entries, because each has a cost.
	passed []entry
	gone   int64 // the sum before the first of passed
}

// entry is what passed in one millisecond.
type entry struct{ at, sum int64 } // sum: all that ever passed until then

// Take judges c, which Check must approve, and counts its cost when it passes. What it refuses
// leaves the state as it was. All calls on one state have the same Name.
func (s *State) Take(c Call, now int64) (a Answer) {
	next := *s
	switch c.Algorithm {
	case Fixed:
		a = next.fixed(c, now)
	case Sliding:
		a = next.sliding(c, now)
	default:
		a = next.log(c, now)
	}
	if a.Allowed {
		*s = next
	}
	return a
}

// turn makes the window in which now is the newest, and returns how much of it is over.
func (s *State) turn(window, now int64) (elapsed int64) {
	if start := now - now%window; start > s.start {
		if s.last = 0; start == s.start+window {
			s.last = s.this
		}
		s.this, s.start = 0, start
	}
	return max(now-s.start, 0)
}

func (s *State) fixed(c Call, now int64) Answer {
	s.turn(c.Window, now)
	a := Answer{Reset: s.start + c.Window - now}
	if a.Allowed = s.this+c.Cost <= c.Limit; a.Allowed {
		s.this += c.Cost
	}
	a.Remaining = max(c.Limit-s.this, 0)
	return a
}

func (s *State) sliding(c Call, now int64) Answer {
	elapsed := s.turn(c.Window, now)
	before, over := share(s.last, c.Window-elapsed, c.Window)
	if over {
		before++
	}
	a := Answer{Allowed: before+s.this+c.Cost <= c.Limit}
	if a.Allowed {
		s.this += c.Cost
		a.Reset = s.start + 2*c.Window - now // then the running window counts for nothing
	} else {
		a.Reset = s.passes(c) - now
	}
	a.Remaining = max(c.Limit-before-s.this, 0)
	return a
}

// passes is when a call that was refused would pass: in the running window, when enough of
// the one before it is over, or in the next one, when enough of the running one is.
func (s *State) passes(c Call) int64 {
	if room := c.Limit - c.Cost - s.this; room >= 0 {
		left, _ := share(room, c.Window, s.last)
		return s.start + c.Window - left
	}
	next := s.start + c.Window
	if room := c.Limit - c.Cost; room < s.this {
		left, _ := share(room, c.Window, s.this)
		next += c.Window - left
	}
	return next
}

// share is a * b / c, rounded down, and whether something is left over. It fits 64 bits:
// a or b is at most c.
func share(a, b, c int64) (quotient int64, over bool) {
	high, low := bits.Mul64(uint64(a), uint64(b))
	q, rest := bits.Div64(high, low, uint64(c))
	return int64(q), rest > 0
}

func (s *State) log(c Call, now int64) Answer {
	at, sum := now, s.gone
	if n := len(s.passed); n > 0 {
		at, sum = max(now, s.passed[n-1].at), s.passed[n-1].sum
	}
	young, _ := slices.BinarySearchFunc(s.passed, at, func(e entry, at int64) int {
		if e.at+c.Window <= at {
			return -1
		}
		return 1
	})
	if young > 0 {
		s.gone, s.passed = s.passed[young-1].sum, s.passed[young:]
	}
	used := sum - s.gone
	if used+c.Cost > c.Limit {
		need := s.gone + used + c.Cost - c.Limit // all that passed until this sum has to go
		i, _ := slices.BinarySearchFunc(s.passed, need, func(e entry, need int64) int {
			if e.sum < need {
				return -1
			}
			return 1
		})
		return Answer{Remaining: max(c.Limit-used, 0), Reset: s.passed[i].at + c.Window - now}
	}
	if n := len(s.passed); n > 0 && s.passed[n-1].at == at {
		s.passed[n-1].sum += c.Cost
	} else {
		s.passed = append(s.passed, entry{at, sum + c.Cost})
	}
	return Answer{Allowed: true, Remaining: c.Limit - used - c.Cost, Reset: at + c.Window - now}
}

// End is when a state counts for nothing any more.
func (s *State) End(n Name) int64 {
	switch {
	case n.Algorithm == Fixed:
		return s.start + n.Window
	case n.Algorithm == Sliding:
		return s.start + 2*n.Window
	case len(s.passed) > 0:
		return s.passed[len(s.passed)-1].at + n.Window
	}
	return 0
}

// Entries is how many calls the state remembers one by one.
func (s *State) Entries() int { return len(s.passed) }

// Append appends the state as Parse reads it: of Fixed and Sliding three numbers, of Log
// two for each millisecond in which something passed. They are varints, the times after the
// first as differences.
func (s *State) Append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(s.passed)))
	if len(s.passed) == 0 {
		for _, n := range [...]int64{s.start, s.last, s.this} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		return b
	}
	at, sum := int64(0), s.gone
	for _, e := range s.passed {
		b = binary.AppendUvarint(b, uint64(e.at-at))
		b = binary.AppendUvarint(b, uint64(e.sum-sum))
		at, sum = e.at, e.sum
	}
	return b
}

var errState = errors.New("a limit's state that cannot be read")

// Parse reads what Append wrote. Nothing is the zero State.
func Parse(b []byte) (State, error) {
	var s State
	if len(b) == 0 {
		return s, nil
	}
	fine := true
	next := func() int64 {
		n, size := binary.Uvarint(b)
		if size <= 0 || n > 1<<50 {
			fine, b = false, nil
			return 0
		}
		b = b[size:]
		return int64(n)
	}
	entries := next()
	if entries > int64(len(b)/2) {
		return State{}, errState
	}
	if entries == 0 {
		s = State{start: next(), last: next(), this: next()}
	} else {
		s.passed = make([]entry, entries)
		var e entry
		for i := range s.passed {
			e.at += next()
			e.sum += next()
			s.passed[i] = e
		}
	}
	if !fine || len(b) > 0 {
		return State{}, errState
	}
	return s, nil
}
