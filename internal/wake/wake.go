// Package wake has signals that never block their sender, and a wait for them.
package wake

import (
	"context"
	"time"
)

// Signal sends to c unless c is full. If c has room for one, all signals since the last receipt count as one.
func Signal(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Replace puts v into c, which has room for one value, in place of an older value that nobody has received.
func Replace[T any](c chan T, v T) {
	for {
		select {
		case c <- v:
			return
		default:
		}
		// A receiver may have been faster, and then c has room again.
		select {
		case <-c:
		default:
		}
	}
}

// Wait waits for a signal from c, or for d, or until ctx ends. It reports whether ctx has not ended.
func Wait(ctx context.Context, d time.Duration, c <-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()

	select {
	case <-ctx.Done():
	case <-t.C:
	case <-c:
	}

	return ctx.Err() == nil
}
