package node

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	clockTick = 50 * time.Millisecond
	// clockStep is how far the clock advances without a tick. It leaves out the rest of
	// a longer suspension, in which the node could receive nothing, so no deadline may
	// pass. Thus a suspension takes at most clockStep from a session, whatever goroutine
	// runs first when the process resumes.
	clockStep = 4 * clockTick
)

// takeoverPossible is how long a suspension must last before another node may have
// claimed partitions of this one. Noticing a death takes longer.
const takeoverPossible = 2 * time.Second

// clock is the node's time, which stops while the process is suspended. Any goroutine
// may read the clock; only run moves it.
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

// behind returns how long ago the last tick was. After a suspension it is long until
// run ticks.
func (c *clock) behind() time.Duration { return time.Since(c.last.Load().real) }

// run ticks until ctx ends. It calls ticked, unless nil, at every tick, and suspended
// with the time that it left out.
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
