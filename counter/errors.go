package counter

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable means that the store cannot be reached now. The operation was made as a whole or not at all, and
	// the caller cannot know which. Repeating it with the same idempotency key is safe.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrBusy means that too many operations are waiting. The operation was not made. ErrBusy is an ErrUnavailable.
	ErrBusy = fmt.Errorf("%w: too many changes are waiting", ErrUnavailable)
	// ErrOp is wrapped by errors about an invalid operation: a bug of the caller.
	ErrOp = errors.New("bad operation")
)

// ErrMalformed means that the store has data that none of our programs can have written. Nothing was changed. It is an
// ErrUnavailable with a text of its own, because the store becomes usable once the data is deleted.
var ErrMalformed error = malformed{}

type malformed struct{}

func (malformed) Error() string        { return "the store has malformed data" }
func (malformed) Is(target error) bool { return target == ErrUnavailable }

// FormatError means that the counters in a store are of another release. Nothing is read and nothing is changed.
type FormatError struct {
	Theirs string // the number of their format; empty: of before there were numbers
	Ours   int
}

// Error says what to do.
func (e *FormatError) Error() string {
	return fmt.Sprintf("the counters in this Redis are of another release (their format is %q, this one knows %d); "+
		"end all processes, then carry the counters over: \"headcount export --redis URL --file FILE\" of the "+
		"release that wrote them, then \"headcount import --redis URL --file FILE\" of this one", e.Theirs, e.Ours)
}

// The conflicts. An operation with a conflict changes nothing and is not remembered.
var (
	ErrBound    = errors.New("a bound refuses the change")
	ErrOverflow = errors.New("the value would leave 64 bits")
	ErrKind     = errors.New("the counter's kind has no such operation")

	ErrReservation   = errors.New("the reservation refuses the change")
	ErrNoReservation = errors.New("there is no such reservation")
)

// Conflict is the error of an operation that a counter refused: of a batch, the first counter that did.
type Conflict struct {
	Is    error  // ErrBound, ErrOverflow, ErrKind, ErrReservation or ErrNoReservation
	Key   string // for an aggregate, its match
	Value int64  // the counter's value before the operation
	Text  string // the reason, for a person: "its floor is 0"
}

// Error returns the conflict as one line.
func (c *Conflict) Error() string {
	return fmt.Sprintf("counter %q: %s: %s", c.Key, c.Is, c.Text)
}

// Unwrap returns what the conflict is.
func (c *Conflict) Unwrap() error { return c.Is }

// Refusal is why a counter refuses a change.
type Refusal string

// The refusals.
const (
	BelowFloor   Refusal = "floor"
	AboveCeiling Refusal = "ceiling"

	Overflows  Refusal = "overflow"
	TooFar     Refusal = "far"
	NoOpposite Refusal = "opposite"

	NoSuchVerb         Refusal = "verb"
	OneByOne           Refusal = "merged"
	NothingIsForgotten Refusal = "unique"
	IsElsewhere        Refusal = "elsewhere"

	OtherAmount   Refusal = "amount"
	TooManyOpen   Refusal = "open"
	HasEnded      Refusal = "ended"
	NoReservation Refusal = "unknown"
)

// refusals says what a refusal is, and why, for a person. The reasons of ErrKind follow the kind that the counter has.
var refusals = map[Refusal]struct {
	is  error
	why func(c *Change, have Counter) string
}{
	BelowFloor: {ErrBound, func(c *Change, _ Counter) string {
		return fmt.Sprintf("its floor is %d", *c.Rule.Floor)
	}},
	AboveCeiling: {ErrBound, func(c *Change, have Counter) string {
		text := fmt.Sprintf("its ceiling is %d", *c.Rule.Ceiling)
		if have.Reserved > 0 {
			text += fmt.Sprintf(", and %d are reserved and may come back", have.Reserved)
		}
		return text
	}},

	Overflows: {ErrOverflow, func(c *Change, have Counter) string {
		return fmt.Sprintf("%d and %d", have.Value, c.Delta)
	}},
	TooFar: {ErrOverflow, func(c *Change, have Counter) string {
		return fmt.Sprintf("%d is too far from %d for its ledger", c.Delta, have.Value)
	}},
	NoOpposite: {ErrOverflow, always("the least number has no opposite; adjust it by 1 first")},

	NoSuchVerb:         {ErrKind, func(c *Change, _ Counter) string { return onlyFor(c.Verb) }},
	OneByOne:           {ErrKind, always("its changes are made one by one")},
	NothingIsForgotten: {ErrKind, always("it does not know its members, they are only added")},
	IsElsewhere:        {ErrKind, always("give its rule that kind again, or delete it under that rule")},

	OtherAmount:   {ErrReservation, always("it is open with another amount")},
	TooManyOpen:   {ErrReservation, always(fmt.Sprintf("the counter has %d open ones", MaxOpen))},
	HasEnded:      {ErrReservation, always("it has ended")},
	NoReservation: {ErrNoReservation, always("it was never made, or it ended more than a day ago")},
}

func always(text string) func(*Change, Counter) string {
	return func(*Change, Counter) string { return text }
}

// onlyFor says which kinds take a verb.
func onlyFor(v Verb) string {
	does := map[Verb]string{
		Add: "is moved by numbers", Adjust: "is moved by numbers", Set: "is set", Reset: "is reset",
		Edit:    "has members",
		Reserve: "has reservations", Commit: "has reservations", Cancel: "has reservations", Expire: "has reservations",
	}

	return "only " + nounOf(kindsThat(func(k Kind) bool { return k.Takes(v) })) + " " + does[v]
}

// Refused returns the conflict of a change that a counter refuses.
func Refused(why Refusal, c *Change, have Counter) *Conflict {
	refusal := refusals[why]
	text := refusal.why(c, have)
	if refusal.is == ErrKind {
		text = fmt.Sprintf("it is of kind %s; %s", have.Kind, text)
	}

	return &Conflict{Is: refusal.is, Key: c.Key, Value: have.Value, Text: text}
}

// Misplaced returns the conflict for a change of a counter that exists, but is stored where its present rule does not
// look.
func Misplaced(have Counter) *Conflict { return Refused(IsElsewhere, &Change{Key: have.Key}, have) }
