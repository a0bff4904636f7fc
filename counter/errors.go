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
	// ErrSharded means that a sum is sharded and has to be merged for such a change. The operation was not made.
	// ErrSharded is an ErrUnavailable.
	ErrSharded = fmt.Errorf("%w: the sum is sharded", ErrUnavailable)
	// ErrOp is wrapped by errors about an invalid operation: a bug of the caller.
	ErrOp = errors.New("bad operation")
)

// The conflicts. An operation with a conflict changes nothing and is not remembered.
var (
	ErrBound    = errors.New("a bound refuses the change")
	ErrOverflow = errors.New("the value would leave 64 bits")
	ErrKind     = errors.New("the counter's kind has no such operation")
)

// Conflict is the error of an operation that a counter refused: of a batch, the first counter that did.
type Conflict struct {
	Is    error  // ErrBound, ErrOverflow or ErrKind
	Key   string // for an aggregate, its match
	Value int64  // the counter's value before the operation
	Text  string // the reason, for a person: "its floor is 0"
}

// Error returns the conflict as one line.
func (c *Conflict) Error() string {
	return fmt.Sprintf("counter %q: %s: %s", c.Key, c.Is, c.Text)
}

// Unwrap returns ErrBound, ErrOverflow or ErrKind.
func (c *Conflict) Unwrap() error { return c.Is }

func unsupported(key string, value int64, have Kind, what string) *Conflict {
	return &Conflict{Is: ErrKind, Key: key, Value: value, Text: fmt.Sprintf("it is of kind %s; %s", have, what)}
}
