package outage

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"
)

// When a Breaker has calls fail without trying.
const (
	TripAfter  = 3                      // failures in a row until they do
	ProbeEvery = 500 * time.Millisecond // between two calls that it lets through while they do
)

// ErrNotItsFault marks a failure that says nothing about the server: the caller left.
var ErrNotItsFault = errors.New("the caller left")

// Breaker has calls to a server fail at once while the server does not answer. After TripAfter
// failures in a row it lets one call through each ProbeEvery; the first one that succeeds ends
// that, whoever makes it. Its methods may be called from any goroutine.
type Breaker struct {
	// Allow reports an error while calls fail without trying. Else the caller gives done what
	// became of the call.
	*gobreaker.TwoStepCircuitBreaker[struct{}]

	Changed chan struct{} // holds one: the state may have changed

	cause atomic.Pointer[error]
}

// NewBreaker returns a Breaker that lets calls through.
func NewBreaker(name string) *Breaker {
	b := &Breaker{Changed: make(chan struct{}, 1)}
	b.TwoStepCircuitBreaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name:          name,
		Timeout:       ProbeEvery,
		ReadyToTrip:   func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= TripAfter },
		OnStateChange: func(string, gobreaker.State, gobreaker.State) { b.Signal() },
		IsExcluded:    func(err error) bool { return errors.Is(err, ErrNotItsFault) },
	})
	return b
}

// Closed reports whether calls go through.
func (b *Breaker) Closed() bool { return b.State() == gobreaker.StateClosed }

// Signal has the reader of Changed look at the state.
func (b *Breaker) Signal() {
	select {
	case b.Changed <- struct{}{}:
	default:
	}
}

// Failed notes why the server could not be used.
func (b *Breaker) Failed(why error) { b.cause.Store(&why) }

// LastFailure returns why the server could last not be used; nil: it always could.
func (b *Breaker) LastFailure() error {
	if why := b.cause.Load(); why != nil {
		return *why
	}
	return nil
}
