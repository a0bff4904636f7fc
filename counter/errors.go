package counter

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable says that the store cannot be reached now. The operation was
	// not made, or it is unknown whether it was, never in part. It is safe to
	// repeat with the same identity.
	ErrUnavailable = errors.New("store is unavailable")
	// ErrBusy says that too many operations wait already. The operation was not
	// made. It is ErrUnavailable too.
	ErrBusy = fmt.Errorf("%w: too many changes are waiting", ErrUnavailable)
	// ErrSharded says that a sum is sharded, and has to be whole for such a
	// change. The operation was not made. It is ErrUnavailable too.
	ErrSharded = fmt.Errorf("%w: the sum is sharded", ErrUnavailable)
	// ErrOp is in errors about an operation that no caller may make: a fault of
	// the program, not of the store.
	ErrOp = errors.New("bad operation")
)

// The conflicts. An operation that meets one changes nothing and is not
// remembered.
var (
	ErrBound    = errors.New("a bound refuses the change")
	ErrOverflow = errors.New("the value would leave 64 bits")
	ErrKind     = errors.New("the counter's kind has no such operation")
)

// Conflict says that a counter, the first at fault, refused an operation.
type Conflict struct {
	Is    error  // ErrBound, ErrOverflow or ErrKind
	Key   string // of an aggregate: its match
	Value int64  // the counter's, unchanged: as it was before the operation
	Text  string // what refused, for a person: "floor 0", "kind sum"
}

// Error is one line.
func (c *Conflict) Error() string {
	return fmt.Sprintf("counter %q: %s: %s", c.Key, c.Is, c.Text)
}

// Unwrap is the kind of conflict.
func (c *Conflict) Unwrap() error { return c.Is }

func unsupported(key string, value int64, have Kind, what string) *Conflict {
	return &Conflict{Is: ErrKind, Key: key, Value: value, Text: fmt.Sprintf("it is of kind %s; %s", have, what)}
}
