package counter

import (
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"time"

	"headcount/counter/hyperloglog"
)

// State is what a store keeps of one counter, beside its members, its ledger,
// its history and its key. The zero State is that of a counter never touched.
type State struct {
	Kind    Kind
	Value   int64
	Updated int64 // last change, unix milliseconds
	Version Version
	Entries uint64 // the Seq of the newest entry of its ledger; 0: none was made
	Slots   Slots  // what it gained in the steps of time that are running
	// Sharding is how a store in Redis has sharded the sum, see ParseSharding; nil: it never did. Others keep it as it is.
	Sharding *string
}

// Counter is the outside form.
func (s *State) Counter(key string) Counter {
	c := Counter{Key: key, Kind: s.Kind, Value: s.Value, Version: s.Version}
	if s.Version != (Version{}) {
		c.Updated = time.UnixMilli(s.Updated).UTC()
	}
	if s.Sharding != nil {
		c.Sharding, c.Approx = *s.Sharding, sharded(*s.Sharding)
	}
	return c
}

// Step is what Judge needs of a store while it judges operations that become
// safe together. Only one goroutine uses it. A store that meets a fault in a Step
// remembers it, answers anything, and fails the whole step in the end.
type Step interface {
	// State is the counter's, to be changed in place. The pointer is the same for
	// the whole step. A counter whose State is zero at the end does not exist.
	State(key string) *State
	// Deleted is the highest incarnation of any counter that was ever deleted.
	Deleted() uint64

	Remembered(id Identity) bool
	Remember(id Identity)

	// Join and Leave put member into the set of key, or take it out, and report
	// whether that changed anything.
	Join(key, member string) bool
	Leave(key, member string) bool
	// Registers are those of key, of kind Unique, to be changed in place. The pointer
	// is good until the next Empty or Drop of key.
	Registers(key string) *hyperloglog.Registers
	// Empty takes all members out of the set, or the registers, of key.
	Empty(key string)
	// Enter appends an entry to the ledger of key. kept is how long entries of that
	// ledger are kept; 0 is for ever.
	Enter(key string, e Entry, kept time.Duration)
	// Past keeps what a counter gained in a step of time that is over, as long as kept says.
	Past(key string, s Slot, kept time.Duration)
	// See adds members to those whom key, of kind Unique, has seen in a step of time, and
	// keeps these as long as kept says. s has no value.
	See(key string, s Slot, members []string, kept time.Duration)
	// Count counts delta under a value of a dimension of key, as Counted.Add does.
	Count(key, name, value string, delta int64)
	// Drop takes away members, registers, ledger, history and dimensions of a counter that existed with version;
	// Judge makes its State zero.
	Drop(key string, v Version)
	// Changed says that key has changed, joined and left are those whose place did.
	// all: more members left than are named. It is called once for each change
	// of an op that is made.
	Changed(key string, joined, left []string, all bool)
}

// Judge makes op in step, or refuses it and leaves step as it was. The
// counters of its result are as they are after op.
func Judge(step Step, op *Op, now time.Time) Result {
	if err := op.Check(); err != nil {
		return Result{Err: err}
	}
	known := op.Identity != Identity{}
	replay := known && step.Remembered(op.Identity)
	states := make([]*State, len(op.Changes)) // each is looked up once
	for i := range op.Changes {
		states[i] = step.State(op.Changes[i].Key)
	}
	if !replay {
		if err := makeOp(step, op, states, now); err != nil {
			return Result{Err: err}
		}
		if known {
			step.Remember(op.Identity)
		}
	}
	counters := make([]Counter, len(op.Changes))
	for i := range op.Changes {
		c := &op.Changes[i]
		counters[i] = states[i].Counter(c.Key).Or(c.Rule.Kind)
	}
	return Result{Counters: counters, Replay: replay}
}

// makeOp makes op; states are those of its changes.
func makeOp(step Step, op *Op, states []*State, now time.Time) error {
	if len(op.Changes) == 1 {
		c, s := &op.Changes[0], states[0]
		switch c.Verb {
		case Add, Adjust:
			before := s.Value
			if err := add(s, c, step.Deleted(), now); err != nil {
				return err
			}
			s.Gain(step, c, now)
			count(step, s, c)
			enter(step, s, c, before, now)
			step.Changed(c.Key, nil, nil, false)
			return nil
		case Set:
			return set(step, s, c, now)
		case Reset:
			return reset(step, s, c, now)
		case Edit:
			return edit(step, s, c, now)
		case Reshard:
			return fmt.Errorf("%w: only a store in Redis shards %q", ErrOp, c.Key)
		default:
			if s.Version != (Version{}) {
				step.Drop(c.Key, s.Version)
				*s = State{}
				step.Changed(c.Key, nil, nil, true)
			}
			return nil
		}
	}
	// Numbers first: when one is refused, those before it go back.
	before := make([]moves, len(op.Changes))
	for i := range op.Changes {
		c, s := &op.Changes[i], states[i]
		before[i] = moves{s.Kind, s.Value, s.Updated, s.Version}
		if err := add(s, c, step.Deleted(), now); err != nil {
			for j := i; j >= 0; j-- {
				s, b := states[j], &before[j]
				s.Kind, s.Value, s.Updated, s.Version = b.kind, b.value, b.updated, b.version
			}
			// The counter at fault is told as it is, not as the changes before would have made it.
			err.Value = s.Value
			return err
		}
	}
	for i := range op.Changes {
		c := &op.Changes[i]
		s := states[i]
		s.Gain(step, c, now)
		count(step, s, c)
		enter(step, s, c, before[i].value, now)
		step.Changed(c.Key, nil, nil, false)
	}
	return nil
}

// set moves an exact counter to a value. One that has it already is not changed, and that is not in the ledger.
func set(step Step, s *State, c *Change, now time.Time) error {
	if kind := kindFor(s, c); kind != Exact {
		return unsupported(c.Key, s.Value, kind, "only an exact counter is set")
	}
	by := *c
	var over bool
	if by.Delta, over = minus(c.Delta, s.Value); over {
		return &Conflict{Is: ErrOverflow, Key: c.Key, Value: s.Value, Text: fmt.Sprintf("%d is too far from %d for its ledger", c.Delta, s.Value)}
	}
	if by.Delta == 0 {
		return nil
	}
	before := s.Value
	if err := add(s, &by, step.Deleted(), now); err != nil {
		return err
	}
	enter(step, s, &by, before, now)
	step.Changed(c.Key, nil, nil, false)
	return nil
}

// moves is what add changes of a State.
type moves struct {
	kind           Kind
	value, updated int64
	version        Version
}

// begin gives a counter never touched its kind and its first version; moved
// gives the next version to a counter that changed.
func begin(s *State, c *Change, deleted uint64, now time.Time) {
	if s.Kind == 0 {
		s.Kind = c.Rule.Kind
		s.Version.Incarnation = NewIncarnation(now, deleted)
	}
}

func moved(s *State, now time.Time) {
	s.Version.Sequence++
	s.Updated = now.UnixMilli()
}

// kindFor is the kind by which c is judged: that which the counter was made with.
func kindFor(s *State, c *Change) Kind {
	if s.Kind != 0 {
		return s.Kind
	}
	return c.Rule.Kind
}

// add moves a number; s is unchanged with an error.
func add(s *State, c *Change, deleted uint64, now time.Time) *Conflict {
	kind := kindFor(s, c)
	switch {
	case !kind.Number():
		return unsupported(c.Key, s.Value, kind, "only a sum or an exact counter is moved by numbers")
	case c.Merged > 1 && kind != Sum:
		return unsupported(c.Key, s.Value, kind, "its changes are made one by one")
	}
	after, over := plus(s.Value, c.Delta)
	if over {
		return &Conflict{Is: ErrOverflow, Key: c.Key, Value: s.Value, Text: fmt.Sprintf("%d and %d", s.Value, c.Delta)}
	}
	if kind == Exact {
		// A bound that came later than the value refuses only what leads further out.
		if f := c.Rule.Floor; f != nil && c.Delta < 0 && after < *f {
			return &Conflict{Is: ErrBound, Key: c.Key, Value: s.Value, Text: fmt.Sprintf("its floor is %d", *f)}
		}
		if f := c.Rule.Ceiling; f != nil && c.Delta > 0 && after > *f {
			return &Conflict{Is: ErrBound, Key: c.Key, Value: s.Value, Text: fmt.Sprintf("its ceiling is %d", *f)}
		}
	}
	begin(s, c, deleted, now)
	s.Value = after
	moved(s, now)
	return nil
}

// Refusal is why a counter that is as have would refuse c, or nil. It looks at no
// members and at no text.
func (c *Change) Refusal(have Counter) *Conflict {
	s := State{Kind: have.Kind, Value: have.Value, Version: have.Version}
	switch kind := kindFor(&s, c); {
	case c.Verb == Add || c.Verb == Adjust:
		return add(&s, c, 0, time.Time{})
	case c.Verb == Edit && kind == Unique && len(c.Leave) > 0:
		return unsupported(c.Key, s.Value, kind, "it does not know its members, they are only added")
	case c.Verb == Edit && kind.Number():
		return unsupported(c.Key, s.Value, kind, "only a counter of kind members or unique has members")
	}
	return nil
}

// Misplaced is the refusal of a change of a counter that exists, but not where its rule of now would have it.
func Misplaced(have Counter) *Conflict {
	return unsupported(have.Key, have.Value, have.Kind, "give its rule that kind again, or delete it under that rule")
}

// plus is a + b, and whether that leaves 64 bits.
func plus(a, b int64) (sum int64, over bool) {
	u, _ := bits.Add64(uint64(a), uint64(b), 0)
	sum = int64(u)
	return sum, (a >= 0) == (b >= 0) && (sum >= 0) != (a >= 0)
}

// minus is a - b, and whether that leaves 64 bits.
func minus(a, b int64) (difference int64, over bool) {
	u, _ := bits.Sub64(uint64(a), uint64(b), 0)
	difference = int64(u)
	return difference, (a >= 0) != (b >= 0) && (difference >= 0) != (a >= 0)
}

// enter writes the ledger of what add did.
func enter(step Step, s *State, c *Change, before int64, now time.Time) {
	e := Entry{At: now, Delta: c.Delta, Before: before, After: before + c.Delta, Reason: c.Reason, By: c.By}
	switch {
	case c.Verb == Adjust:
		e.Op = LedgerAdjust
	case c.Verb == Set:
		e.Op = LedgerSet
	case s.Kind != Exact:
		return
	case c.Delta > 0:
		e.Op = LedgerIncrement
	default:
		e.Op = LedgerDecrement
	}
	s.Entries++
	e.Seq = s.Entries
	step.Enter(c.Key, e, c.Rule.ledgerKept(s.Kind))
}

// reset makes a counter 0. What is 0 already is not changed, and is not in the ledger.
func reset(step Step, s *State, c *Change, now time.Time) error {
	if refused := c.Refusal(s.Counter(c.Key)); refused != nil {
		return refused
	}
	kind := kindFor(s, c)
	if s.Value == 0 { // also a set: its value is its size
		return nil
	}
	e := Entry{At: now, Op: LedgerReset, Before: s.Value, Reason: c.Reason, By: c.By}
	var over bool
	if e.Delta, over = plus(^s.Value, 1); over { // -value; of the least number there is none
		return &Conflict{Is: ErrOverflow, Key: c.Key, Value: s.Value, Text: "the least number has no opposite; adjust it by 1 first"}
	}
	if !kind.Number() {
		step.Empty(c.Key)
	}
	s.Value = 0
	moved(s, now)
	s.Entries++
	e.Seq = s.Entries
	step.Enter(c.Key, e, c.Rule.ledgerKept(kind))
	step.Changed(c.Key, nil, nil, kind == Members)
	return nil
}

func edit(step Step, s *State, c *Change, now time.Time) error {
	if refused := c.Refusal(s.Counter(c.Key)); refused != nil {
		return refused
	}
	if kindFor(s, c) == Unique {
		observe(step, s, c, now)
		return nil
	}
	var joined, left []string
	for i, m := range c.Join {
		if step.Join(c.Key, m) {
			joined = grow(joined, c.Join, i)
		}
	}
	for i, m := range c.Leave {
		if step.Leave(c.Key, m) {
			left = grow(left, c.Leave, i)
		}
	}
	if len(joined)+len(left) == 0 {
		return nil
	}
	// A set that changed has changed, also when its size has not: who is in it
	// is what some look at.
	begin(s, c, step.Deleted(), now)
	s.Value += int64(len(joined)) - int64(len(left))
	moved(s, now)
	step.Changed(c.Key, joined, left, false)
	return nil
}

// observe adds members to registers. Nobody can tell which of them are new.
func observe(step Step, s *State, c *Change, now time.Time) {
	if r := step.Registers(c.Key); r.Add(c.Join...) {
		begin(s, c, step.Deleted(), now)
		s.Value = r.Count()
		moved(s, now)
		step.Changed(c.Key, nil, nil, false)
	}
	if c.Rule.Kind != Unique {
		return
	}
	for i := range c.Rule.Buckets {
		b := &c.Rule.Buckets[i]
		seconds := int64(b.Step / time.Second)
		step.See(c.Key, Slot{Number: uint32(now.Unix() / seconds), Step: uint32(seconds)}, c.Join, b.Kept)
	}
}

// grow appends all[i] to some. As long as some are the first of all, it is a
// part of all and costs nothing.
func grow(some, all []string, i int) []string {
	if len(some) == i {
		return all[: i+1 : i+1]
	}
	return append(some, all[i])
}

// Total adds up an Aggregate. The zero Total is ready.
type Total struct {
	counters int64
	uniques  int64 // those of them that are of kind Unique
	union    hyperloglog.Union
	high     int64 // with low the sum, in 128 bits: a sum may leave 64 and come back
	low      uint64
}

// Add adds a counter; one never touched is none. Of kind Unique its registers come
// with Merge.
func (t *Total) Add(s State) {
	if s.Version.Sequence == 0 {
		return
	}
	t.counters++
	if s.Kind == Unique {
		t.uniques++
		return
	}
	var carry uint64
	t.low, carry = bits.Add64(t.low, uint64(s.Value), 0)
	t.high += s.Value>>63 + int64(carry)
}

// Merge adds the registers of a counter that was added.
func (t *Total) Merge(r hyperloglog.Registers) { t.union.Merge(r) }

// AddSum adds counters of which uniques are of kind Unique, and sum is that of the others.
func (t *Total) AddSum(counters, uniques int64, sum *big.Int) {
	t.counters += counters
	t.uniques += uniques
	words := new(big.Int).Add(sum, new(big.Int).Lsh(big.NewInt(t.high), 64))
	words.Add(words, new(big.Int).SetUint64(t.low))
	t.low = new(big.Int).And(words, new(big.Int).SetUint64(math.MaxUint64)).Uint64()
	t.high = words.Rsh(words, 64).Int64()
}

// Mixed reports whether there are counters of kind Unique beside others, so that there is
// neither a sum nor a union.
func (t *Total) Mixed() bool { return t.uniques > 0 && t.uniques < t.counters }

// Aggregate is the sum or the union, or why there is none.
func (t *Total) Aggregate(prefix string) (Aggregate, error) {
	switch value := int64(t.low); {
	case t.Mixed():
		return Aggregate{}, &Conflict{Is: ErrKind, Key: prefix + "*", Text: "it has counters of kind unique and of other kinds, of which there is neither a sum nor a union"}
	case t.uniques > 0:
		return Aggregate{Counters: t.counters, Value: t.union.Count()}, nil
	case t.high != value>>63:
		return Aggregate{}, &Conflict{Is: ErrOverflow, Key: prefix + "*", Text: "the sum does not fit 64 bits"}
	default:
		return Aggregate{Counters: t.counters, Value: value}, nil
	}
}
