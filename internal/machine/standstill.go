package machine

import (
	"context"
	"sync/atomic"
	"time"
)

const lookEvery = 250 * time.Millisecond

// Standstill notices that the process stood still for longer than a limit: it was suspended, by a signal or with its
// machine. What it had received from others is older than it looks then, by as much. Any goroutine may use it.
type Standstill struct {
	limit  time.Duration
	looked atomic.Pointer[time.Time] // when Run last read the clock; nil: Run does not run
}

// NewStandstill returns a Standstill that does nothing until Run.
func NewStandstill(limit time.Duration) *Standstill {
	return &Standstill{limit: limit}
}

func (s *Standstill) look() {
	now := time.Now()
	s.looked.Store(&now)
}

// Ended reports whether the process stood still, and Run has not called resumed since. A goroutine may run before Run does
// when the process goes on.
func (s *Standstill) Ended() bool {
	looked := s.looked.Load()
	if looked == nil {
		return false
	}

	// The monotonic clock may stop while a machine sleeps. A wall clock that is set forward looks the same, which costs
	// little and is rare.
	now := time.Now()
	asleep := now.Round(0).Sub(looked.Round(0))
	return max(now.Sub(*looked), asleep) > s.limit
}

// Run reads the clock until ctx ends. It calls resumed when the process stood still.
func (s *Standstill) Run(ctx context.Context, resumed func()) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	s.look() // the time before Run is no standstill
	defer s.looked.Store(nil)

	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		if s.Ended() {
			resumed()
		}
		s.look()
	}
}
