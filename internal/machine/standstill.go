package machine

import (
	"context"
	"sync/atomic"
	"time"
)

const lookEvery = 250 * time.Millisecond

// Standstill notices that the process stood still for longer than a limit: it was suspended, by a signal or with its
// machine. Whatever it has received from others is then older than it seems. So each part that keeps received data has
// a Standstill, whose limit is how old that data may be. A part that measures the time since an event of its own (a
// sweep, a renewal, a read of the store) does not need one. Any goroutine may use it.
type Standstill struct {
	limit   time.Duration
	elapsed func() time.Duration
	looked  atomic.Int64 // when Run last read the clock; 0: Run does not run
	resumed atomic.Int64 // when Run last noticed a standstill; 0: never
}

// NewStandstill returns a Standstill that does nothing until Run. elapsed is a clock that goes on while the machine
// sleeps, as SinceBoot does. Without one it reads the wall clock, which looks like a standstill when it is set forward.
func NewStandstill(limit time.Duration, elapsed func() time.Duration) *Standstill {
	if elapsed == nil {
		elapsed = func() time.Duration { return time.Duration(time.Now().UnixNano()) }
	}

	return &Standstill{limit: limit, elapsed: elapsed}
}

// Ended reports whether the process stood still and Run has not finished its callback since. When the process goes on,
// other goroutines may run before Run notices.
func (s *Standstill) Ended() bool { return s.endedAt(s.elapsed()) }

func (s *Standstill) endedAt(now time.Duration) bool {
	looked := time.Duration(s.looked.Load())
	return looked != 0 && now-looked > s.limit
}

// EndedWithin reports whether a standstill has ended that Run has not noticed yet, or noticed less than period ago.
func (s *Standstill) EndedWithin(period time.Duration) bool {
	now := s.elapsed()
	// Run has not noticed yet, so s.resumed is still that of an earlier standstill.
	if s.endedAt(now) {
		return true
	}

	resumed := time.Duration(s.resumed.Load()) // read after s.looked, which Run sets last
	return resumed != 0 && (now-resumed).Abs() < period
}

// Run reads the clock until ctx ends. After each standstill it calls onResume, unless nil.
func (s *Standstill) Run(ctx context.Context, onResume func()) {
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
		// s.resumed is stored before the callback, so that EndedWithin is true while the callback works, and s.looked
		// after it, because Ended is true until then.
		if s.endedAt(now) {
			s.resumed.Store(int64(now))
			if onResume != nil {
				onResume()
			}
		}
		s.looked.Store(int64(now))
	}
}
