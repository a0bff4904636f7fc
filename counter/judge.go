package counter

import (
	"math/bits"
	"time"

	"headcount/hyperloglog"
)

// State is the record of one counter. Stores keep members, registers, ledger and history apart from it, so that an
// increment reads and writes the record alone. The zero State is that of a counter that does not exist.
type State struct {
	Kind     Kind
	Open     int32 // how many reservations are open; beside Kind it takes no memory
	Value    int64
	Reserved int64 // of these reservations, together
	Updated  int64 // last change, unix milliseconds
	Version  Version
	Entries  uint64 // Seq of the newest ledger entry; 0: there never was one
	Slots    Slots  // increments of the running time buckets
}

// Counter returns the counter that s records.
func (s *State) Counter(key string) Counter {
	c := Counter{Key: key, Kind: s.Kind, Value: s.Value, Version: s.Version, Reserved: s.Reserved}
	if s.Version != (Version{}) {
		c.Updated = time.UnixMilli(s.Updated).UTC()
	}

	return c
}

// Tx is one transaction of a store, as Judge sees it: the store keeps all of its writes or none. Only one goroutine
// uses it. Its methods return no errors, so that Judge has no half-finished work to undo: a store that meets an error
// in a Tx remembers it, returns any value, and fails the whole transaction at its end.
type Tx interface {
	// State returns the state of a counter, which Judge changes in place. The pointer is the same for the whole Tx. A
	// counter whose State is zero at the end does not exist.
	State(key string) *State
	// Deleted returns the highest incarnation of all counters that were ever deleted.
	Deleted() uint64

	Remembered(id IdempotencyKey) bool
	Remember(id IdempotencyKey)

	// Join adds member to the set of key, Leave removes it. Both report whether the set changed.
	Join(key, member string) bool
	Leave(key, member string) bool
	// Registers returns the registers of key, of kind Unique, to which Judge adds members. They are valid until the
	// next Empty or Drop of key.
	Registers(key string) Registers
	// Empty removes all members, or clears the registers, of key.
	Empty(key string)
	// Reservation returns a reservation of key, which is open or has ended within EndedKept; otherwise the zero one.
	Reservation(key, id string) Reservation
	// Keep stores a reservation of key in the place of the one with its ID.
	Keep(key string, r Reservation)
	// Enter appends an entry to the ledger of key, whose entries are kept that long; 0 means for ever.
	Enter(key string, e Entry, kept time.Duration)
	// Past stores the increment of a completed time bucket, to be kept that long.
	Past(key string, s Slot, kept time.Duration)
	// See adds members to the registers that key, of kind Unique, has for one time bucket, and keeps these that long. s
	// has no value.
	See(key string, s Slot, members []string, kept time.Duration)
	// Count adds delta to a value of a dimension of key, as Counted.Add does.
	Count(key, name, value string, delta int64)
	// Drop deletes members, registers, ledger, history, dimensions and reservations of a counter that existed with that
	// version. Judge makes its State zero.
	Drop(key string, v Version)
	// Changed notes that key changed, and the members that joined and left, for the feed. all means that further
	// members left. Judge calls it once for each change of an operation that it makes.
	Changed(key string, joined, left []string, all bool)
}

// Registers are those of a counter of kind Unique, such as *hyperloglog.Registers.
type Registers interface {
	// Add adds members and reports whether a register changed.
	Add(members ...string) bool
	// Count returns the estimate.
	Count() int64
}

// Judge makes op in tx, or refuses it and leaves tx unchanged. The counters of the result are those after op. A replay
// also returns the present counters, not those of the first time: results are not remembered, idempotency keys are.
func Judge(tx Tx, op *Op, now time.Time) Result {
	if err := op.Check(); err != nil {
		return Result{Err: err}
	}

	hasID := op.IdempotencyKey != IdempotencyKey{}
	isReplay := hasID && tx.Remembered(op.IdempotencyKey)
	// Each is looked up once: that may be a read of a file.
	states := make([]*State, len(op.Changes))
	for i := range op.Changes {
		states[i] = tx.State(op.Changes[i].Key)
	}

	entries := states[0].Entries
	if !isReplay {
		if err := makeOp(tx, op, states, now); err != nil {
			return Result{Err: err}
		}
	}
	if hasID && !isReplay {
		// A refused operation was left above: its caller may try it again under the same idempotency key.
		tx.Remember(op.IdempotencyKey)
	}

	counters := make([]Counter, len(op.Changes))
	for i := range op.Changes {
		c := &op.Changes[i]
		counters[i] = states[i].Counter(c.Key).Or(c.Rule.Kind)
	}

	result := Result{Counters: counters, Replay: isReplay}
	if c := &op.Changes[0]; c.Verb.Holds() {
		r := tx.Reservation(c.Key, c.Hold.ID)
		result.Reservation = &r
		result.Replay = states[0].Entries == entries // each change of a reservation is in the ledger
	}

	return result
}

// makeOp makes op. states has the State of each change.
func makeOp(tx Tx, op *Op, states []*State, now time.Time) error {
	c := &op.Changes[0]
	s := states[0]
	switch c.Verb {
	case Set:
		return set(tx, s, c, now)
	case Reset:
		return reset(tx, s, c, now)
	case Edit:
		return edit(tx, s, c, now)
	case Reserve, Commit, Cancel, Expire:
		return hold(tx, s, c, now)
	case Delete:
		drop(tx, s, c)
		return nil
	}

	// Only additions come several at a time, as Check says.
	return addAll(tx, op.Changes, states, now)
}

// drop deletes a counter. One that does not exist stays as it is.
func drop(tx Tx, s *State, c *Change) {
	if s.Version == (Version{}) {
		return
	}

	// Before the state is gone, because that says which rows the counter has.
	tx.Drop(c.Key, s.Version)
	*s = State{}
	// The members that left are not named, because there may be any number of them.
	tx.Changed(c.Key, nil, nil, true)
}

// addAll makes additions. It changes all numbers first, since only these can be refused. After a refusal the
// numbers before it are restored, in reverse order: a key may occur several times. Slots, dimensions and ledgers follow
// when nothing can fail any more.
func addAll(tx Tx, changes []Change, states []*State, now time.Time) error {
	// A lone change, which most are, needs no memory for this.
	var one [1]formerNumbers
	before := one[:]
	if len(changes) > 1 {
		before = make([]formerNumbers, len(changes))
	}

	for i := range changes {
		before[i].keep(states[i])
		err := add(states[i], &changes[i], tx.Deleted(), now)
		if err == nil {
			continue
		}

		for j := i; j >= 0; j-- {
			before[j].restore(states[j])
		}
		// The conflict names the value before the batch, not the one that earlier changes of the batch led to.
		err.Value = states[i].Value
		return err
	}

	for i := range changes {
		c := &changes[i]
		s := states[i]
		s.Gain(tx, c, now)
		count(tx, s, c)
		enter(tx, s, c, before[i].value, now)
		tx.Changed(c.Key, nil, nil, false)
	}

	return nil
}

// set gives an exact counter a value, as an addition of the difference. A counter that already has the value does not
// change, and its ledger gets no entry.
func set(tx Tx, s *State, c *Change, now time.Time) error {
	// This asks only whether the kind has the verb. The bounds are checked by the addition.
	if refused := c.Refusal(s.Counter(c.Key)); refused != nil {
		return refused
	}

	difference, over := minus(c.Delta, s.Value)
	if over {
		return Refused(TooFar, c, s.Counter(c.Key))
	}
	if difference == 0 {
		return nil
	}

	// A copy, because the caller may repeat the change.
	by := *c
	by.Delta = difference

	return addAll(tx, []Change{by}, []*State{s}, now)
}

// formerNumbers has those fields of a State that the function add changes, as they were before.
type formerNumbers struct {
	kind           Kind
	value, updated int64
	version        Version
}

func (m *formerNumbers) keep(s *State) { *m = formerNumbers{s.Kind, s.Value, s.Updated, s.Version} }

func (m *formerNumbers) restore(s *State) {
	s.Kind = m.kind
	s.Value = m.value
	s.Updated = m.updated
	s.Version = m.version
}

// begin gives a counter that does not exist yet its kind and its incarnation.
func begin(s *State, c *Change, deleted uint64, now time.Time) {
	if s.Kind == 0 {
		s.Kind = c.Rule.Kind
		s.Version.Incarnation = NewIncarnation(now, deleted)
	}
}

// moved gives a changed counter its next version.
func moved(s *State, now time.Time) {
	s.Version.Sequence++
	s.Updated = now.UnixMilli()
}

// kindFor returns the kind by which c is judged. A counter keeps the kind that it was created with, also when its
// rule has another one now.
func kindFor(s *State, c *Change) Kind {
	if s.Kind != 0 {
		return s.Kind
	}

	return c.Rule.Kind
}

// add adds a change's delta to s. With an error s is unchanged.
func add(s *State, c *Change, deleted uint64, now time.Time) *Conflict {
	after, over := plus(s.Value, c.Delta)
	if why := refusalOfAdd(s, c, after, over); why != "" {
		return Refused(why, c, s.Counter(c.Key).Or(c.Rule.Kind))
	}

	// Only now, because a refused change makes no counter.
	begin(s, c, deleted, now)
	s.Value = after
	moved(s, now)

	return nil
}

// refusalOfAdd returns why a counter refuses an addition after which it had the value after, or nothing.
func refusalOfAdd(s *State, c *Change, after int64, over bool) Refusal {
	kind := kindFor(s, c)
	if !kind.Takes(c.Verb) {
		return NoSuchVerb
	}
	// The Combiner goes by the rule, and the counter may have been created with another kind.
	if c.Merged > 1 && !kind.Gains() {
		return OneByOne
	}
	// What is reserved may come back, so an increase leaves room for it.
	full, tooFull := plus(after, s.Reserved)
	if over || tooFull {
		return Overflows
	}
	// A sum whose rule has become one of exact counters remains a sum, without bounds.
	if !kind.IsExact() {
		return ""
	}

	// A rule may get a bound that the value already exceeds: then changes back towards the bound must pass.
	floor, ceiling := c.Rule.Floor, c.Rule.Ceiling
	if floor != nil && c.Delta < 0 && after < *floor {
		return BelowFloor
	}
	if ceiling != nil && c.Delta > 0 && full > *ceiling {
		return AboveCeiling
	}

	return ""
}

// Refusal returns the conflict with which the counter have would refuse c, or nil. It does not look at members or
// texts.
func (c *Change) Refusal(have Counter) *Conflict {
	s := State{Kind: have.Kind, Value: have.Value, Version: have.Version, Reserved: have.Reserved}
	kind := kindFor(&s, c)
	have.Kind = kind
	if !kind.Takes(c.Verb) {
		return Refused(NoSuchVerb, c, have)
	}
	if c.Verb == Edit && len(c.Leave) > 0 && !kind.KnowsMembers() {
		return Refused(NothingIsForgotten, c, have)
	}
	if c.Verb == Add || c.Verb == Adjust {
		// This changes a copy alone.
		return add(&s, c, 0, time.Time{})
	}

	return nil
}

// plus returns a + b, and whether it overflows: the operands have one sign and the sum the other.
func plus(a, b int64) (sum int64, over bool) {
	u, _ := bits.Add64(uint64(a), uint64(b), 0)
	sum = int64(u)

	return sum, (a >= 0) == (b >= 0) && (sum >= 0) != (a >= 0)
}

// minus returns a - b, and whether it overflows.
func minus(a, b int64) (difference int64, over bool) {
	u, _ := bits.Sub64(uint64(a), uint64(b), 0)
	difference = int64(u)

	return difference, (a >= 0) != (b >= 0) && (difference >= 0) != (a >= 0)
}

// ledgerOps are the ops of verbs whose entries are all alike.
var ledgerOps = [...]LedgerOp{
	Adjust: LedgerAdjust, Set: LedgerSet,
	Reserve: LedgerReserve, Commit: LedgerCommit, Cancel: LedgerCancel, Expire: LedgerExpire,
}

// enter writes the ledger entry for what add did. A sum has entries only for adjustments.
func enter(tx Tx, s *State, c *Change, before int64, now time.Time) {
	// Not s.Value, which already has what later changes of a batch did.
	e := Entry{At: now, Delta: c.Delta, Before: before, After: before + c.Delta, Reason: c.Reason, By: c.By}
	named := ledgerOps[c.Verb]
	switch {
	case named != 0:
		e.Op = named
	case !s.Kind.IsExact():
		return
	case c.Delta > 0:
		e.Op = LedgerIncrement
	default:
		e.Op = LedgerDecrement
	}

	s.Entries++
	e.Seq = s.Entries
	tx.Enter(c.Key, e, c.Rule.ledgerKept(s.Kind))
}

// reset makes a counter 0. A counter that is 0 already does not change, and its ledger gets no entry.
func reset(tx Tx, s *State, c *Change, now time.Time) error {
	if refused := c.Refusal(s.Counter(c.Key)); refused != nil {
		return refused
	}
	if s.Value == 0 { // true of an empty set, too, because the value of a set is its size
		return nil
	}

	// The least number has no opposite.
	opposite, over := minus(0, s.Value)
	if over {
		return Refused(NoOpposite, c, s.Counter(c.Key))
	}

	// A reset of a negative value is an increase.
	kind := kindFor(s, c)
	ceiling := c.Rule.Ceiling
	isHigh := ceiling != nil && opposite > 0 && s.Reserved > *ceiling
	if kind.IsExact() && isHigh {
		return Refused(AboveCeiling, c, s.Counter(c.Key))
	}
	if !kind.Number() {
		// Before moved, because stores name the rows of the emptied set after the version that follows this one.
		tx.Empty(c.Key)
	}
	e := Entry{At: now, Op: LedgerReset, Delta: opposite, Before: s.Value, Reason: c.Reason, By: c.By}
	s.Value = 0
	moved(s, now)

	s.Entries++
	e.Seq = s.Entries
	tx.Enter(c.Key, e, c.Rule.ledgerKept(kind))
	tx.Changed(c.Key, nil, nil, kind.KnowsMembers())

	return nil
}

// edit changes the members of a set, or adds members to registers.
func edit(tx Tx, s *State, c *Change, now time.Time) error {
	if refused := c.Refusal(s.Counter(c.Key)); refused != nil {
		return refused
	}
	if kindFor(s, c).Estimates() {
		observe(tx, s, c, now)
		return nil
	}

	// From here on nothing refuses the change, so the set itself may change member by member.
	var joined, left []string
	for i, m := range c.Join {
		if tx.Join(c.Key, m) {
			joined = grow(joined, c.Join, i)
		}
	}
	for i, m := range c.Leave {
		if tx.Leave(c.Key, m) {
			left = grow(left, c.Leave, i)
		}
	}
	if len(joined)+len(left) == 0 {
		return nil
	}

	// A set whose size stays the same gets a new version, too: watchers may follow a member.
	begin(s, c, tx.Deleted(), now)
	s.Value += int64(len(joined)) - int64(len(left))
	moved(s, now)
	tx.Changed(c.Key, joined, left, false)

	return nil
}

// observe adds members to the registers of a counter and of its running time buckets. A member that the counter knows
// may be new in a time bucket, so these are updated even when the counter does not change.
func observe(tx Tx, s *State, c *Change, now time.Time) {
	r := tx.Registers(c.Key)
	changed := r.Add(c.Join...)
	if changed {
		begin(s, c, tx.Deleted(), now)
		s.Value = r.Count()
		moved(s, now)
		tx.Changed(c.Key, nil, nil, false)
	}

	// The rule may have another kind by now, and then its time buckets are not for registers.
	if !c.Rule.Kind.Estimates() {
		return
	}
	for i := range c.Rule.Resolutions {
		b := &c.Rule.Resolutions[i]
		seconds := int64(b.Step / time.Second)
		tx.See(c.Key, Slot{Number: uint32(now.Unix() / seconds), Step: uint32(seconds)}, c.Join, b.Kept)
	}
}

// grow appends all[i] to some. In the usual case that every element is taken, the result is a slice of all and costs no
// allocation.
func grow(some, all []string, i int) []string {
	if len(some) == i {
		// The capacity is cut, so that a later append copies and does not write into the caller's list.
		return all[: i+1 : i+1]
	}

	return append(some, all[i])
}

// Total adds up an Aggregate. The zero Total is ready for use.
type Total struct {
	counters int64
	uniques  int64 // how many of the counters are of kind Unique
	union    hyperloglog.Union
	sum      Wide // a partial sum may overflow 64 bits, and the whole sum fit again
}

// Add adds a counter that exists. The registers of a unique follow with Merge.
func (t *Total) Add(s State) {
	if s.Version.Sequence == 0 {
		return
	}

	t.counters++
	if s.Kind.Estimates() {
		// The sum leaves out uniques: a member of two of them counts once, in the union.
		t.uniques++
	} else {
		t.sum = t.sum.Plus(s.Value)
	}
}

// Merge adds the registers of a counter that was added.
func (t *Total) Merge(r hyperloglog.Registers) { t.union.Merge(r) }

// AddSum adds numbers whose sum is upper × 2^32 + lower, of which there are so many.
func (t *Total) AddSum(counters, upper, lower int64) {
	t.counters += counters
	t.sum = t.sum.add(shifted(upper)).Plus(lower)
}

// Aggregate returns the sum or the size of the union, or a *Conflict when there is neither.
func (t *Total) Aggregate(prefix string) (Aggregate, error) {
	isMixed := t.uniques > 0 && t.uniques < t.counters
	sum, fits := t.sum.Value()
	switch {
	case isMixed:
		text := "it has counters of kind unique and of other kinds, of which there is neither a sum nor a union"
		return Aggregate{}, &Conflict{Is: ErrKind, Key: prefix + "*", Text: text}
	// The union, because a sum would count a member of several counters as often.
	case t.uniques > 0:
		return Aggregate{Counters: t.counters, Value: t.union.Count()}, nil
	case !fits:
		return Aggregate{}, &Conflict{Is: ErrOverflow, Key: prefix + "*", Text: "the sum does not fit 64 bits"}
	}

	return Aggregate{Counters: t.counters, Value: sum}, nil
}
