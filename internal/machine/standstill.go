package machine

import (
	"context"
	"sync/atomic"
	"time"
)

const lookEvery = 250 * time.Millisecond

// Standstill notices that the process stood still for longer than a limit: it was suspended, by a signal or with its
// machine. What it has received from others is older than it looks then, by as much. So each part that keeps such
// things has a Standstill, whose limit is how old they may be. Whoever measures the time since an event of its own (a
// sweep, a renewal, a read of the store) does not need one. Any goroutine may use it.
type Standstill struct {
	limit   time.Duration
	elapsed func() time.Duration
	looked  atomic.Int64 // when Run last read the clock; 0: Run does not run
	resumed atomic.Int64 // when Run last noticed a standstill; 0: never
}

// NewStandstill returns a Standstill that does nothing until Run. The clock, elapsed, goes on while the machine sleeps,
// as SinceBoot does; nil: the wall clock, which looks like a standstill when it is set forward.
func NewStandstill(limit time.Duration, elapsed func() time.Duration) *Standstill {
	if elapsed == nil {
		elapsed = func() time.Duration { return time.Duration(time.Now().UnixNano()) }
	}

	return &Standstill{limit: limit, elapsed: elapsed}
}

// Ended reports whether the process stood still, and what Run calls then has not returned since. A goroutine may run
// before Run does when the process goes on.
func (s *Standstill) Ended() bool { return s.endedAt(s.elapsed()) }

func (s *Standstill) endedAt(now time.Duration) bool {
	looked := time.Duration(s.looked.Load())
	return looked != 0 && now-looked > s.limit
}

// EndedWithin reports whether the process stood still until a moment ago: for less than period since Run noticed.
func (s *Standstill) EndedWithin(period time.Duration) bool {
	now := s.elapsed()
	// Run has not noticed yet, so resumed is still that of an earlier standstill.
	if s.endedAt(now) {
		return true
	}

	resumed := time.Duration(s.resumed.Load()) // after looked, which Run sets last
	return resumed != 0 && (now-resumed).Abs() < period
}

// Run reads the clock until ctx ends. It calls resumed, unless nil, when the process stood still.
func (s *Standstill) Run(ctx context.Context, resumed func()) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()

	s.looked.Store(int64(s.elapsed())) // the time before Run is no standstill
	defer s.looked.Store(0)

	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		now := s.elapsed()
		// Noted before resumed is called, so that EndedWithin is true while it works, and looked after it.
		if s.endedAt(now) {
			s.resumed.Store(int64(now))
			if resumed != nil {
				resumed()
			}
		}
		s.looked.Store(int64(now))
	}
}
