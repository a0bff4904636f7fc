package node

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	clockTick = 50 * time.Millisecond
	// clockStep is how far the clock goes without a tick. When the process stood
	// still for longer, the clock leaves that time out: the node could not hear
	// anybody, so no deadline may pass. A suspension of any length thus takes at most
	// clockStep from a session, whatever runs first when the process wakes up.
	clockStep = 4 * clockTick
)

// takeoverPossible is how long a process may stand still until another one may have taken its
// partitions over; noticing a death takes longer.
const takeoverPossible = 2 * time.Second

// clock is the node's time. It stands still while the process stands still. Any
// goroutine may read the clock; only run moves it.
type clock struct{ last atomic.Pointer[clockReading] }

// clockReading is what the clock showed at a tick.
type clockReading struct {
	real time.Time
	at   time.Duration
}

func (c *clock) now() time.Duration {
	l := c.last.Load()
	return l.at + min(time.Since(l.real), clockStep)
}

// behind returns how long ago the last tick was: long, while the process has not yet
// noticed that it stood still.
func (c *clock) behind() time.Duration { return time.Since(c.last.Load().real) }

// run ticks until ctx ends. It calls ticked, unless that is nil, at every tick, and
// suspended with the time that it left out.
func (c *clock) run(ctx context.Context, ticked func(), suspended func(time.Duration)) {
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
		step := now.Sub(l.real)
		c.last.Store(&clockReading{now, l.at + min(step, clockStep)})
		if step > 2*clockStep {
			suspended(step - clockStep)
		}
	}
}
