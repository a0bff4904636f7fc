package node

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	clockTick = 50 * time.Millisecond
	// maxAdvance is the most that the clock advances between two ticks. While the process
	// is suspended, the node receives no heartbeats, so no deadline may pass. The bound
	// applies to reads too, so a suspension costs a session at most maxAdvance, whichever
	// goroutine runs first when the process resumes.
	maxAdvance = 4 * clockTick
)

// takeoverPossible is shorter than other processes take to notice a death. Only during a
// longer suspension can another node have claimed partitions of this one.
const takeoverPossible = 2 * time.Second

// clock is the node's time, which stops while the process is suspended, and for good with stop.
// Any goroutine may read it; only run moves it. It is no machine.Standstill, which notices a
// suspension afterwards: a deadline must not pass before anybody has noticed.
type clock struct {
	last   atomic.Pointer[clockReading]
	ending atomic.Bool // run stops the clock at the next tick
}

// clockReading is what the clock showed at a tick.
type clockReading struct {
	real    time.Time
	at      time.Duration
	stopped bool
}

func (c *clock) now() time.Duration {
	l := c.last.Load()

	if l.stopped {
		return l.at
	}
	// run may be late, so a reader bounds the advance as run does.
	return l.at + min(time.Since(l.real), maxAdvance)
}

// stop stops the clock for good, at the next tick.
func (c *clock) stop() { c.ending.Store(true) }

func (c *clock) stopped() bool { return c.last.Load().stopped }

// run ticks until ctx ends. It calls ticked, unless nil, at every tick. After a
// suspension it calls leftOut with the time that the clock left out.
func (c *clock) run(ctx context.Context, ticked func(), leftOut func(time.Duration)) {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()

	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		if ticked != nil {
			ticked()
		}

		l := c.last.Load()
		now := time.Now()
		passed := now.Sub(l.real)

		at := l.at
		if !l.stopped {
			at += min(passed, maxAdvance)
		}

		c.last.Store(&clockReading{now, at, c.ending.Load()})

		if passed > 2*maxAdvance {
			leftOut(passed - maxAdvance)
		}
	}
}
