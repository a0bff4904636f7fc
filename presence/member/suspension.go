package member

import (
	"context"
	"sync/atomic"
	"time"

	"headcount/presence"
)

const (
	suspensionCheck = 250 * time.Millisecond // from one look at the clock to the next
	// resumePeriod is how long after a standstill the process may still find what came
	// meanwhile.
	resumePeriod = time.Second
)

// suspensionWatch notices that the process stood still for longer than anybody waits for a hold:
// it was suspended by a signal, or with its machine. What it is asked first when it goes on
// may have waited in the buffers of the system, nobody knows for how long; who asked may
// have given up, and have said the opposite elsewhere. Any goroutine may ask waking; only
// run looks.
type suspensionWatch struct {
	looked    atomic.Int64 // when run looked last, in unix nanoseconds; 0: not yet
	resumedAt atomic.Int64 // when run last found that the process had stood still
}

// resumed reports whether the process has just stood still, also before run has found out.
// It goes by the time of day, which goes on while a machine sleeps; a clock that is set
// looks like a standstill at worst.
func (s *suspensionWatch) resumed() bool {
	now := time.Now().UnixNano()
	if s.suspended(now) {
		return true
	}
	return time.Duration(now-s.resumedAt.Load()).Abs() < resumePeriod // after stood: run sets woke first
}

// suspended reports whether the process has stood still since the last look.
func (s *suspensionWatch) suspended(now int64) bool {
	looked := s.looked.Load()
	return looked != 0 && time.Duration(now-looked) > presence.HoldTimeout
}

// run looks at the clock until ctx ends. It calls ticked, unless that is nil, before each
// look.
func (s *suspensionWatch) run(ctx context.Context, ticked func()) {
	tick := time.NewTicker(suspensionCheck)
	defer tick.Stop()
	for {
		if ticked != nil {
			ticked()
		}
		now := time.Now().UnixNano()
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
