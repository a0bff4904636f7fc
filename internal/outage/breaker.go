package outage

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"headcount/internal/wake"
)

// Bounds of a Breaker, which makes calls fail without trying while it is open.
const (
	TripAfter  = 3                      // failures in a row that open it
	ProbeEvery = 500 * time.Millisecond // between two calls that it lets through while it is open

	// refusalOver is for how long the server must have refused nothing when it accepts a probe's change, so that it
	// counts as usable again. The accepted change alone is not enough, because the server may still refuse others.
	refusalOver = time.Second
)

// ErrNotItsFault marks a failure that says nothing about the server, because the caller left.
var ErrNotItsFault = errors.New("the caller left")

// Breaker makes calls to a server fail at once while the server does not answer. After
// TripAfter failures in a row it opens and lets only one call through each ProbeEvery; the
// first call that succeeds closes it. Its methods may be called from any goroutine.
type Breaker struct {
	// Allow returns an error if the call must not be made. Otherwise the caller passes the
	// outcome of the call to done.
	*gobreaker.TwoStepCircuitBreaker[struct{}]

	Changed chan struct{} // holds one: the state may have changed

	cause   atomic.Pointer[error]
	refusal atomic.Pointer[time.Time] // when the server last refused something, and so counts as away; nil: not lately
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

// Closed reports whether the Breaker lets all calls through.
func (b *Breaker) Closed() bool { return b.State() == gobreaker.StateClosed }

// Up reports whether the server is usable: the Breaker is closed, and the server has not refused anything of late.
func (b *Breaker) Up() bool { return b.Closed() && b.refusal.Load() == nil }

// Refused records that the server answers and refuses. Reads may still work, so the Breaker alone would not open.
func (b *Breaker) Refused() {
	now := time.Now()
	// Each refusal has a pointer of its own, by which Probed recognizes a later one.
	b.refusal.Store(&now)
	b.Signal()
}

// Probed records that the server accepted a change that only probed it.
func (b *Breaker) Probed() {
	r := b.refusal.Load()
	if r == nil || time.Since(*r) < refusalOver {
		return
	}
	if b.refusal.CompareAndSwap(r, nil) { // unless it has refused something since
		b.Signal()
	}
}

// Signal makes the reader of Changed check the state.
func (b *Breaker) Signal() { wake.Signal(b.Changed) }

// Failed records why the server could not be used.
func (b *Breaker) Failed(why error) { b.cause.Store(&why) }

// LastFailure returns the reason of the last failure; nil: there was none.
func (b *Breaker) LastFailure() error {
	if why := b.cause.Load(); why != nil {
		return *why
	}
	return nil
}
