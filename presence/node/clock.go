package node

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	clockTick = 50 * time.Millisecond
	// clockStep is how far the clock goes without a tick. A process that stood
	// still for longer loses that time: nobody could be heard in it, so nobody's
	// deadline may pass in it. It bounds what a suspension of any length takes
	// from a session, whatever runs first when the process wakes up.
	clockStep = 4 * clockTick
)

// clock is the node's time, which stands still while the process does. Any
// goroutine may read it; run alone moves it.
type clock struct{ last atomic.Pointer[reading] }

// reading is what the clock showed at a tick.
type reading struct {
	real time.Time
	at   time.Duration
}

func (c *clock) now() time.Duration {
	l := c.last.Load()
	return l.at + min(time.Since(l.real), clockStep)
}

// run ticks until ctx ends; it tells suspended of the time left out.
func (c *clock) run(ctx context.Context, suspended func(time.Duration)) {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		l := c.last.Load()
		now := time.Now()
		step := now.Sub(l.real)
		c.last.Store(&reading{now, l.at + min(step, clockStep)})
		if step > 2*clockStep {
			suspended(step - clockStep)
		}
	}
}
