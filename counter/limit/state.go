package limit

import (
	"encoding/binary"
	"errors"
	"math/bits"
	"sort"
)

// State is the state of one Name. The zero State has let nothing pass, and a State after its End is equivalent to it.
// Only one goroutine at a time may use it.
type State struct {
	// For Fixed and Sliding.
	start      int64 // start of the newest window, ms
	last, this int64 // cost that passed in the window before it (Sliding only), and in it

	// For Log: what passed, oldest first. It has at most MaxLog entries, because each has a cost of 1 or more.
	passed []entry
	gone   int64 // running sum before the first entry
}

// entry has the cost that passed in one millisecond, as a running sum, so that a range of entries is a difference.
type entry struct{ at, sum int64 }

// Take judges r, for which Check must return nil, and counts its cost if it passes. A refused request does not change
// the state, and neither does one that only looks. All requests on one state have the same Name.
func (s *State) Take(r Request, now int64) (a Answer) {
	// Judging moves the state on, and a refused request must leave it as it was, so a copy is judged.
	next := *s
	switch r.Algorithm {
	case Fixed:
		a = next.fixed(r, now)
	case Sliding:
		a = next.sliding(r, now)
	default:
		a = next.log(r, now)
	}

	if a.Allowed && r.Cost != 0 {
		*s = next
	}

	return a
}

// SetBack makes the state one of the present clock if its clock was ahead by more than a window, as a clock that was
// wrong and has been set. Otherwise time would stand still for as long. What passed counts as if it had passed just
// now, so no more passes than without a wrong clock. SetBack reports whether the state has changed.
func (s *State) SetBack(n Name, now int64) (changed bool) {
	if n.Algorithm == Log {
		return s.setBackLog(n.Window, now)
	}

	start := now - now%n.Window
	if s.start <= start+n.Window {
		return false
	}
	s.start = start
	// How much of the window before still counts is unknown, so all of it does.
	s.this += s.last
	s.last = 0

	return true
}

func (s *State) setBackLog(window, now int64) (changed bool) {
	newest := len(s.passed) - 1
	if newest < 0 || s.passed[newest].at <= now+window {
		return false
	}

	ahead := s.passed[newest].at - now
	for i := range s.passed {
		s.passed[i].at = max(s.passed[i].at-ahead, 0)
	}

	return true
}

// advance moves on to the window of now, and returns how much of it has elapsed. It never goes back to an earlier
// window.
func (s *State) advance(window, now int64) (elapsed int64) {
	start := now - now%window
	if start <= s.start {
		return max(now-s.start, 0)
	}

	// After a window without requests nothing is left of the one before it.
	s.last = 0
	if start == s.start+window {
		s.last = s.this
	}
	s.this = 0
	s.start = start

	return now - s.start
}

func (s *State) fixed(r Request, now int64) Answer {
	s.advance(r.Window, now)
	// What gives back or looks is never refused, even if more has passed than a smaller limit permits.
	passes := r.Cost <= 0 || s.this+r.Cost <= r.Limit
	if passes {
		s.this = max(s.this+r.Cost, 0)
	}

	a := Answer{Allowed: passes, Remaining: max(r.Limit-s.this, 0)}
	if s.this > 0 {
		a.Reset = s.start + r.Window - now
	}

	return a
}

func (s *State) sliding(r Request, now int64) Answer {
	elapsed := s.advance(r.Window, now)
	// Give back first, because that may reduce the window before, of which a share is computed next.
	s.giveBack(-r.Cost)
	// Rounded up, so that never more than the limit passes.
	before, over := share(s.last, r.Window-elapsed, r.Window)
	if over {
		before++
	}

	takes := max(r.Cost, 0)
	a := Answer{Allowed: takes == 0 || before+s.this+takes <= r.Limit}
	if a.Allowed {
		s.this += takes
		a.Reset = s.emptyAt(r.Window, now) - now
	} else {
		a.Reset = s.passes(r) - now
	}
	a.Remaining = max(r.Limit-before-s.this, 0)

	return a
}

// giveBack takes n off what passed for Sliding: off the running window, where a cost that was given back at once was
// counted, and then off the window before. Nothing is given back that has not passed. n may be negative: that is
// nothing.
func (s *State) giveBack(n int64) {
	if n <= 0 {
		return
	}

	recent := min(n, s.this)
	s.this -= recent
	s.last -= min(n-recent, s.last)
}

// emptyAt returns from when on nothing counts any more for Sliding.
func (s *State) emptyAt(window, now int64) int64 {
	switch {
	case s.this > 0:
		// The window that runs now counts in part throughout the next one.
		return s.start + 2*window
	case s.last > 0:
		return s.start + window
	default:
		return now
	}
}

// passes returns when a refused request would pass: in the running window, when the window before it counts for little
// enough, or in the next one, when the running one does.
func (s *State) passes(r Request) int64 {
	// Refused although the running window has room: then the window before it counts, and last is not 0.
	if room := r.Limit - r.Cost - s.this; room >= 0 {
		left, _ := share(room, r.Window, s.last)
		return s.start + r.Window - left
	}

	// A cost is at most the limit, so room is not negative, and s.this is not 0 where it is greater than room.
	next := s.start + r.Window
	if room := r.Limit - r.Cost; room < s.this {
		left, _ := share(room, r.Window, s.this)
		next += r.Window - left
	}

	return next
}

// share returns a * b / c, rounded down, and whether there is a remainder. The quotient fits in 64 bits, because a or
// b is at most c.
func share(a, b, c int64) (quotient int64, over bool) {
	high, low := bits.Mul64(uint64(a), uint64(b))
	q, rest := bits.Div64(high, low, uint64(c))

	return int64(q), rest > 0
}

// expiry returns the time from which what passed at a time no longer counts for Log. Times are rounded down to
// milliseconds: of two that differ by exactly a window, the true ones may differ by less.
func expiry(at, window int64) int64 { return at + window + 1 }

// log judges a request for Log. A clock that went back is replaced by the time of the newest entry.
func (s *State) log(r Request, now int64) Answer {
	at := now
	sum := s.gone
	if n := len(s.passed); n > 0 {
		at = max(now, s.passed[n-1].at)
		sum = s.passed[n-1].sum
	}

	// What is too old does not count any more.
	young := sort.Search(len(s.passed), func(i int) bool { return expiry(s.passed[i].at, r.Window) > at })
	if young > 0 {
		// The sums of the others include what is dropped here, and stay as they are.
		s.gone = s.passed[young-1].sum
		s.passed = s.passed[young:]
	}

	used := sum - s.gone
	if r.Cost <= 0 {
		return s.giveBackOldest(r, min(-r.Cost, used), now)
	}
	if used+r.Cost > r.Limit {
		need := sum + r.Cost - r.Limit // the entries up to this sum have to expire first
		i := sort.Search(len(s.passed), func(i int) bool { return s.passed[i].sum >= need })
		return Answer{Remaining: max(r.Limit-used, 0), Reset: expiry(s.passed[i].at, r.Window) - now}
	}

	newest := len(s.passed) - 1
	// The former State shares the memory of this entry, but is not used any more: from here on the request passes.
	if newest >= 0 && s.passed[newest].at == at {
		s.passed[newest].sum += r.Cost
	} else {
		s.passed = append(s.passed, entry{at, sum + r.Cost})
	}

	return Answer{Allowed: true, Remaining: r.Limit - used - r.Cost, Reset: expiry(at, r.Window) - now}
}

// giveBackOldest takes n off what passed for Log, and answers r. It takes the oldest first, because the oldest would
// expire first in any case: so no more passes than if the giver's own cost were taken off.
func (s *State) giveBackOldest(r Request, n, now int64) Answer {
	s.gone += n
	kept := sort.Search(len(s.passed), func(i int) bool { return s.passed[i].sum > s.gone })
	s.passed = s.passed[kept:]

	a := Answer{Allowed: true, Remaining: r.Limit}
	newest := len(s.passed) - 1
	if newest >= 0 {
		a.Remaining = max(r.Limit-(s.passed[newest].sum-s.gone), 0)
		a.Reset = expiry(s.passed[newest].at, r.Window) - now
	}

	return a
}

// End returns the time from which the state no longer affects any request.
func (s *State) End(n Name) int64 {
	newest := len(s.passed) - 1
	switch {
	case n.Algorithm == Fixed:
		return s.start + n.Window
	case n.Algorithm == Sliding:
		return s.start + 2*n.Window
	case newest >= 0:
		return expiry(s.passed[newest].at, n.Window)
	}

	return 0
}

// Append appends the binary form of the state: for Fixed and Sliding three numbers, for Log two for each entry. All are
// varints, and those of entries are differences.
func (s *State) Append(b []byte) []byte {
	b = binary.AppendUvarint(b, uint64(len(s.passed)))
	// An empty Log has this form, too, with three zeros.
	if len(s.passed) == 0 {
		for _, n := range [...]int64{s.start, s.last, s.this} {
			b = binary.AppendUvarint(b, uint64(n))
		}
		return b
	}

	before := entry{sum: s.gone}
	for _, e := range s.passed {
		b = binary.AppendUvarint(b, uint64(e.at-before.at))
		b = binary.AppendUvarint(b, uint64(e.sum-before.sum))
		before = e
	}

	return b
}

var errState = errors.New("the state of a limit is not valid")

// Parse parses what Append wrote. No bytes are the zero State.
func Parse(b []byte) (State, error) {
	var s State
	if len(b) == 0 {
		return s, nil
	}

	valid := true
	next := func() int64 {
		// No time in ms and no sum of costs is larger than 2^50.
		n, size := binary.Uvarint(b)
		if size <= 0 || n > 1<<50 {
			valid = false
			b = nil
			return 0
		}
		b = b[size:]
		return int64(n)
	}

	entries := next()
	if entries > int64(len(b)/2) { // of two bytes at least
		return State{}, errState
	}
	if entries == 0 {
		s = State{start: next(), last: next(), this: next()}
	}
	var e entry
	for range entries {
		e.at += next()
		e.sum += next()
		s.passed = append(s.passed, e)
	}

	// After a fault next returns zeros, so it is enough to look here.
	if !valid || len(b) > 0 {
		return State{}, errState
	}

	return s, nil
}
