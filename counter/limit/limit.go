// Package limit has the arithmetic of rate limits: so much may pass in so long. It knows neither clocks nor stores. A
// [State] is kept for each [Name]; State.Take judges one [Request] and counts its cost if it may pass. A refused
// request costs nothing. A request without a cost only looks. One with a negative cost gives back what others took: the
// limit holds for what has passed minus what was given back.
//
// # Three algorithms
//
// All times are unix milliseconds, rounded down, and all windows whole milliseconds.
//
//   - [Fixed]: windows begin at multiples of their length since the Unix epoch, and in each of them at most the limit
//     passes. Around the boundary of two windows twice the limit may pass within a short time.
//
//   - [Sliding]: the running window plus a decreasing part of the one before it. With last passed in the window before,
//     this in the running one, and elapsed of its length gone, a request passes if
//
//     last * (window - elapsed) / window + this + cost <= limit.
//
//     In each window at most the limit passes, and in any period as long as a window less than twice the limit. When
//     requests come evenly, it is the limit. The product has up to 72 bits; it is exact, and the quotient is rounded
//     up.
//
//   - [Log]: every request that passed is remembered for one window and a millisecond, so in any period as long as a
//     window at most the limit passes, by a finer clock, too. That takes memory for each request, so the limit is at
//     most MaxLog.
//
// A name has one state for requests with different limits. Each request is judged by its own limit against everything
// that passed.
//
// # Rates
//
// A [Rate] is a token bucket: after 20 requests at once, a rate of ten a second permits the next one after 100 ms,
// where a window or a log permits none until the 20 are old. The server's own limits per caller are rates, in the
// memory of each process. They are not an algorithm of requests, and no store keeps them.
//
// # Clocks
//
// When a clock goes back, time stands still here until the clock has caught up. So nothing passes twice. That takes a
// window at most: if a clock was further ahead, State.SetBack has everything count as if it had just passed.
package limit

import (
	"errors"
	"fmt"
	"time"
)

// Bounds of one request.
const (
	MaxLimit  = 1_000_000_000_000
	MaxLog    = 10_000 // for Log
	MinWindow = time.Second
	MaxWindow = 31 * 24 * time.Hour
)

// Algorithm is one of the three ways to count what passed.
type Algorithm uint8

// The algorithms. Stores keep their numbers, so these never change.
const (
	Fixed   Algorithm = 1
	Sliding Algorithm = 2
	Log     Algorithm = 3
)

var algorithmNames = [...]string{Fixed: "fixed", Sliding: "sliding", Log: "log"}

// String returns the algorithm's name in requests.
func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) && a != 0 {
		return algorithmNames[a]
	}

	return "none"
}

// ParseAlgorithm returns the algorithm with that name.
func ParseAlgorithm(s string) (Algorithm, bool) {
	for a, name := range algorithmNames {
		if name != "" && name == s {
			return Algorithm(a), true
		}
	}

	return 0, false
}

// Name identifies a State.
type Name struct {
	Key       string
	Algorithm Algorithm
	Window    int64 // ms
}

// Request asks whether Cost may pass now under Limit.
type Request struct {
	Name
	Limit int64
	Cost  int64 // 0 only looks, a negative one gives back
}

// Check returns an error that says what to send instead, or nil. It does not check the key.
func (r *Request) Check() error {
	if r.Algorithm < Fixed || r.Algorithm > Log {
		return errors.New("algorithm: send fixed, sliding or log")
	}
	if r.Window < MinWindow.Milliseconds() || r.Window > MaxWindow.Milliseconds() {
		return errors.New("window: send a duration from 1s to 31d")
	}
	if r.Limit < 1 || r.Limit > MaxLimit {
		return fmt.Errorf("limit: send a whole number from 1 to %d", int64(MaxLimit))
	}
	if r.Algorithm == Log && r.Limit > MaxLog {
		const what = "limit: the algorithm log remembers at most %d; send a smaller limit, or the algorithm sliding"
		return fmt.Errorf(what, MaxLog)
	}
	// More than the limit could never pass, so it is a mistake and no refusal.
	if r.Cost < -MaxLimit || r.Cost > r.Limit {
		const what = "cost: send a whole number up to the limit, %d; 0 only looks, and a negative one gives back"
		return fmt.Errorf(what, r.Limit)
	}

	return nil
}

// Answer is the answer to a request.
type Answer struct {
	Allowed   bool
	Remaining int64 // cost that may still pass now, at least 0
	// Reset is a time in ms. For a refused request, it is the time until the same request would pass if no other
	// request comes; for any other, until the whole limit is available again.
	Reset int64
}
