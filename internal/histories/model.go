// Package histories lets clients change counters of real processes and records their calls, the answers and the times
// of both. An independent checker judges these histories: Porcupine looks for an order of the calls in which every
// answer is right and each call takes effect at one moment between its beginning and its answer.
//
// A call without an answer may take effect at any later moment, or never. After a few hundred calls other counters take
// the place of those that were used, so that no history becomes too long to judge.
package histories

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
)

// Verb is what a call does.
type Verb uint8

const (
	Read Verb = iota // one counter
	Look             // is a member in the set?
	Add              // Deltas, all of them or none
	Set              // a counter to a value
	Edit             // members join and leave a set
	Take             // from a limit; a negative cost gives back
)

// Delta is one change of an Add.
type Delta struct {
	At int // which counter of the subject
	By int64
}

// Call is a call about a subject: about a few counters that change together, a set or a limit.
type Call struct {
	Verb   Verb
	At     int     // the counter of a Read or Set, the member of a Look
	Deltas []Delta // of an Add
	Value  int64   // of a Set, or the cost of a Take

	Join, Leave uint8 // of an Edit: a bit for each member

	// ID numbers the changes of a subject from 1. Several calls have the same one if they have one Idempotency-Key.
	ID    int
	Keyed bool // the call has an Idempotency-Key
	One   bool // an Edit changes one member, by PUT or DELETE
	After int  // of a Read: the ID of a change that its answer must include; 0: none
}

// Answer is the answer to a call.
type Answer struct {
	Unknown bool    // there is none: the call may take effect later, or never
	Refused bool    // a bound refuses the change
	Fault   int     // the counter whose bound that is
	Replay  bool    // the change was made before
	Values  []int64 // of the counters, in the order of the changes; nil: any
}

// Bounds of the subjects.
const (
	numbers = 3   // counters of an Exact
	floor   = 0   // of an Exact
	ceiling = 40  // of an Exact
	members = 4   // of a set
	permits = 12  // of a limit
	changes = 512 // that a subject can tell apart, at most
)

// state is the state of a subject. It is comparable, so that Porcupine recognizes equal states.
type state struct {
	values [numbers]int64       // a set has its members in the bits of the first one, a limit the sum of its costs
	made   [changes / 64]uint64 // the changes that were made, a bit for each ID
}

func (s *state) has(id int) bool { return s.made[id/64]&(1<<(id%64)) != 0 }

func (s *state) keep(id int) { s.made[id/64] |= 1 << (id % 64) }

// Model defines what a subject answers when calls come one after the other.
type Model struct {
	Name string
	// apply makes a change. fault is the counter that refuses it, or none.
	apply func(s state, c *Call) (after state, fault int)
	// shows returns the values in the answer to a call after it was made.
	shows func(s *state, c *Call) []int64
}

// none is the fault of a change that nothing refuses.
const none = -1

var (
	// Exact is a few exact counters with bounds. A batch of changes takes effect at one moment.
	Exact = &Model{"exact", addWithin, showNumbers}
	// Sum is one counter without bounds. Its changes are combined, so an answer may include changes of other calls.
	Sum = &Model{"sum", addAny, showNumbers}
	// Members is a set of a few members.
	Members = &Model{"members", edit, showSet}
	// Limit is a limit with the algorithm log and a window that is longer than the test.
	Limit = &Model{"limit", take, showLimit}

	// Models are all of them.
	Models = []*Model{Exact, Sum, Members, Limit}
)

// step reports whether a call may have this answer in this state, and returns the state after it.
func (m *Model) step(s state, c *Call, a *Answer) (state, bool) {
	if c.Verb == Read || c.Verb == Look {
		known := c.After == 0 || s.has(c.After)
		return s, known && m.agrees(&s, c, a)
	}

	// A change with an idempotency key is made once. The answers to repetitions say that it was made before.
	if c.Keyed && s.has(c.ID) {
		return s, a.Unknown || a.Replay && m.agrees(&s, c, a)
	}

	after, fault := m.apply(s, c)
	if fault != none {
		asked := *c
		if c.Verb != Take { // the answer has the unchanged value of the counter at fault
			asked = Call{Verb: Read, At: fault}
		}
		return s, a.Unknown || a.Refused && a.Fault == fault && m.agrees(&s, &asked, a)
	}

	// Kept even without a key, because a read may have to include this change.
	after.keep(c.ID)
	made := !a.Refused && !a.Replay

	return after, a.Unknown || made && m.agrees(&after, c, a)
}

func (m *Model) agrees(s *state, c *Call, a *Answer) bool {
	return a.Values == nil || slices.Equal(a.Values, m.shows(s, c))
}

func addAny(s state, c *Call) (state, int) {
	for _, d := range c.Deltas {
		s.values[d.At] += d.By
	}

	return s, none
}

// addWithin judges the changes in order.
func addWithin(s state, c *Call) (state, int) {
	if c.Verb == Set {
		s.values[c.At] = c.Value
		return s, outside(c.Value, c.At)
	}

	// A copy, because the change is made as a whole or not at all.
	after := s
	for _, d := range c.Deltas {
		after.values[d.At] += d.By
		if fault := outside(after.values[d.At], d.At); fault != none {
			return s, fault
		}
	}

	return after, none
}

// outside returns at if a value is not within the bounds.
func outside(value int64, at int) int {
	if value < floor || value > ceiling {
		return at
	}

	return none
}

func edit(s state, c *Call) (state, int) {
	s.values[0] = (s.values[0] | int64(c.Join)) &^ int64(c.Leave)

	return s, none
}

func take(s state, c *Call) (state, int) {
	if c.Value > 0 && s.values[0]+c.Value > permits {
		return s, 0
	}
	// Nobody can give back more than was taken.
	s.values[0] = max(s.values[0]+c.Value, 0)

	return s, none
}

func showNumbers(s *state, c *Call) []int64 {
	if c.Verb != Add {
		return []int64{s.values[c.At]}
	}

	values := make([]int64, len(c.Deltas))
	for i, d := range c.Deltas {
		values[i] = s.values[d.At]
	}

	return values
}

// showSet returns the size of the set, or whether a member is in it.
func showSet(s *state, c *Call) []int64 {
	if c.Verb == Look {
		return []int64{s.values[0] >> c.At & 1}
	}

	return []int64{int64(bits.OnesCount64(uint64(s.values[0])))}
}

func showLimit(s *state, _ *Call) []int64 { return []int64{permits - s.values[0]} }

// String returns the call for people.
func (c *Call) String() string {
	var b strings.Builder
	switch c.Verb {
	case Read:
		fmt.Fprintf(&b, "read %d", c.At)
	case Look:
		fmt.Fprintf(&b, "look at member %d", c.At)
	case Add:
		b.WriteString("add")
		for _, d := range c.Deltas {
			fmt.Fprintf(&b, " %+d to %d", d.By, d.At)
		}
	case Set:
		fmt.Fprintf(&b, "set %d to %d", c.At, c.Value)
	case Edit:
		fmt.Fprintf(&b, "edit +%04b -%04b", c.Join, c.Leave)
	case Take:
		fmt.Fprintf(&b, "take %d", c.Value)
	}
	if c.Keyed {
		fmt.Fprintf(&b, ", key %d", c.ID)
	}
	if c.After > 0 {
		fmt.Fprintf(&b, ", with change %d", c.After)
	}

	return b.String()
}

// String returns the answer for people.
func (a *Answer) String() string {
	switch {
	case a.Unknown:
		return "no answer"
	case a.Refused:
		return fmt.Sprintf("refused by %d, %v", a.Fault, a.Values)
	case a.Replay:
		return fmt.Sprint("made before, ", a.Values)
	default:
		return fmt.Sprint(a.Values)
	}
}
