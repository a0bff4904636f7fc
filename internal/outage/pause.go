package outage

import (
	"context"
	"math/rand/v2"
	"time"

	"headcount/internal/wake"
)

const (
	firstPause = 100 * time.Millisecond
	MaxPause   = 2 * time.Second // the longest time that Pause returns
)

// Pause returns how long to wait after one or more failures in a row: 100 ms, doubled after each further failure up to
// MaxPause, with Jitter.
func Pause(failures int) time.Duration {
	// More doublings than these would overflow.
	return Jitter(min(firstPause<<min(failures-1, 10), MaxPause))
}

// Jitter returns a random time from half of d to d, so that processes that failed at the
// same moment do not all try again at the same moment.
func Jitter(d time.Duration) time.Duration { return d/2 + rand.N(d/2+1) }

// Sleep waits for d, or until ctx ends. It reports whether ctx has not ended.
func Sleep(ctx context.Context, d time.Duration) bool {
	return wake.Wait(ctx, d, nil)
}
