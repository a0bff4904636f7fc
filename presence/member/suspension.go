package member

import (
	"context"
	"sync/atomic"
	"time"

	"headcount/presence"
)

const (
	suspensionCheck = 250 * time.Millisecond // between two readings of the clock
	// resumePeriod is how long after a suspension the process may still receive requests
	// that were sent before or during it.
	resumePeriod = time.Second
)

// suspensionWatch notices that the process was suspended, by a signal or with its
// machine, for longer than any caller waits for a hold. The first requests after that may
// have waited in the system's buffers for any time; their clients may have given up and
// asked for the opposite elsewhere. Any goroutine may call resumed.
type suspensionWatch struct {
	// elapsed is a clock that goes on while the machine sleeps, as Go's monotonic one does not. Where it can be set, that
	// looks like a suspension at worst.
	elapsed   func() time.Duration
	looked    atomic.Int64 // when run last read the clock; 0: not yet
	resumedAt atomic.Int64 // when run last found that the process had been suspended
}

// resumed reports whether the process was suspended until a moment ago, even before run
// has noticed the suspension.
func (s *suspensionWatch) resumed() bool {
	now := int64(s.elapsed())
	if s.suspended(now) {
		return true
	}
	return time.Duration(now-s.resumedAt.Load()).Abs() < resumePeriod // read after looked: run sets it first
}

// suspended reports whether the process was suspended since run last read the clock.
func (s *suspensionWatch) suspended(now int64) bool {
	looked := s.looked.Load()
	return looked != 0 && time.Duration(now-looked) > presence.HoldTimeout
}

// run reads the clock until ctx ends. It calls ticked, unless nil, before each reading.
func (s *suspensionWatch) run(ctx context.Context, ticked func()) {
	tick := time.NewTicker(suspensionCheck)
	defer tick.Stop()
	for {
		if ticked != nil {
			ticked()
		}
		now := int64(s.elapsed())
		if s.suspended(now) {
			s.resumedAt.Store(now)
		}
		s.looked.Store(now)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
