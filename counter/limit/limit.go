// Package limit is the arithmetic of limits: so much may pass in so long. It knows
// neither clocks nor stores. A [State] is what is kept of one [Name]; State.Take judges
// one [Call] and, when the call may pass, counts its cost. What is refused costs nothing.
//
// # Three algorithms
//
// All times are unix milliseconds, all windows whole milliseconds.
//
//   - [Fixed]: windows of the clock, which begin at multiples of their length since the Unix
//     epoch. In each of them at most the limit passes. Over the boundary of two windows twice
//     the limit may pass within a short time.
//
//   - [Sliding]: the window of the clock and the one before it, which counts for less and less:
//     with last passed in the one before, this in the running one, and elapsed of its length
//     gone, a call passes when
//
//     last * (window - elapsed) / window + this + cost <= limit.
//
//     In each window of the clock at most the limit passes, and in any stretch of time as long
//     as a window less than twice the limit. When calls come evenly it is the limit. The
//     product has up to 72 bits; it is exact, and what is left over counts as used.
//
//   - [Log]: every call that passed is remembered for as long as the window, so in no stretch of
//     time as long as a window more than the limit passes. It takes memory for each of them, so the
//     limit is at most MaxLog.
//
// A name has one state whatever limits its calls have: a call is judged by its own limit. So
// what one limit let through counts for the next.
//
// # Rates
//
// A [Rate] gives back little by little what it let through: after 20 at once, ten a second let one
// pass after 100 ms, where a window or a log lets none until those are old. In any stretch of time
// at most its burst passes, and what comes back meanwhile. The server's own limits of callers are
// rates, in the memory of each process: calls on limits do not know them, so no store keeps one.
//
// # Clocks
//
// A clock that goes back stands still here until it has caught up: nothing passes twice.
//
// # Why it stands here and in Lua
//
// A store that holds a state still while Go looks at it (memory, a file, a row that is locked)
// uses this package. Redis has the same in scripts/counter_limit.lua, whose numbers have 53
// bits; a test compares the two.
package limit

import (
	"errors"
	"fmt"
	"time"
)

// Bounds of one call.
const (
	MaxLimit  = 1_000_000_000_000
	MaxLog    = 10_000 // the limit of Log
	MinWindow = time.Second
	MaxWindow = 31 * 24 * time.Hour
)

// Algorithm says how what has passed is counted.
type Algorithm uint8

// The algorithms. Their numbers are kept by stores: they never change.
const (
	Fixed   Algorithm = 1
	Sliding Algorithm = 2
	Log     Algorithm = 3
)

var algorithmNames = [...]string{Fixed: "fixed", Sliding: "sliding", Log: "log"}

// String is the algorithm's outside name.
func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) && a != 0 {
		return algorithmNames[a]
	}
	return "none"
}

// ParseAlgorithm reads what String wrote.
func ParseAlgorithm(s string) (Algorithm, bool) {
	for a, name := range algorithmNames {
		if name != "" && name == s {
			return Algorithm(a), true
		}
	}
	return 0, false
}

// Name is what has a state of its own.
type Name struct {
	Key       string
	Algorithm Algorithm
	Window    int64 // ms
}

// Call asks whether Cost may pass now.
type Call struct {
	Name
	Limit, Cost int64
}

// Check says what is wrong with a call, and what to send instead, or nil. It does not look
// at the key.
func (c *Call) Check() error {
	switch window := time.Duration(c.Window) * time.Millisecond; {
	case c.Algorithm < Fixed || c.Algorithm > Log:
		return errors.New("algorithm: send fixed, sliding or log")
	case c.Window > MaxWindow.Milliseconds() || window < MinWindow:
		return errors.New("window: send a duration from 1s to 31d")
	case c.Limit < 1 || c.Limit > MaxLimit:
		return fmt.Errorf("limit: send a whole number from 1 to %d", int64(MaxLimit))
	case c.Algorithm == Log && c.Limit > MaxLog:
		return fmt.Errorf("limit: the algorithm log remembers at most %d; send a smaller limit, or the algorithm sliding", MaxLog)
	case c.Cost < 1 || c.Cost > c.Limit:
		return fmt.Errorf("cost: send a whole number from 1 to the limit, %d", c.Limit)
	}
	return nil
}

// Answer is what became of a call.
type Answer struct {
	Allowed   bool
	Remaining int64 // what may still pass now, at least 0
	// Reset is, in ms: of a call that was refused, how long until the same call would pass
	// if nobody else calls; of one that passed, until all of its limit is back.
	Reset int64
}
