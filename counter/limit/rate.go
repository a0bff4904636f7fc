package limit

import "time"

// Rate permits one request each Every, and up to Burst at once after a pause: a token bucket, by the generic cell rate
// algorithm. The whole state is one time, kept by the caller: when the full burst is available again. Times are
// non-negative readings of a clock; the initial state is 0, or any time in the past.
type Rate struct {
	Every time.Duration
	Burst int
}

// PerSecond returns a Rate of at most n requests a second.
func PerSecond(n, burst int) Rate {
	// Rounded up, so that never more than n pass in a second.
	return Rate{Every: (time.Second + time.Duration(n) - 1) / time.Duration(n), Burst: burst}
}

// RefillTime returns the time after which an exhausted burst is available again.
func (r Rate) RefillTime() time.Duration { return time.Duration(r.Burst) * r.Every }

// Take takes n requests, at most Burst, from the state back. If wait is 0 they pass, and the caller keeps after as the
// new state. Otherwise they would pass after wait; a caller that refuses them keeps back, and a caller that delays them
// keeps after.
func (r Rate) Take(back, now time.Duration, n int) (after, wait time.Duration) {
	after = max(back, now) + time.Duration(n)*r.Every
	return after, max(0, after-now-r.RefillTime())
}
