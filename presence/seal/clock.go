package seal

import (
	"sync"
	"time"
)

// Clock is the time of the cluster, by which messages between its processes are signed and judged. It is the time of
// the store, as the renewals of the lease show it; between two of them the monotonic clock of this process counts on.
// So neither a wall clock that is wrong nor one that is set has any effect on messages. While the machine sleeps the
// monotonic clock stops, so afterwards a Clock is behind until the next renewal. Any goroutine may use a Clock.
type Clock struct {
	mu     sync.Mutex // guards all below
	shared time.Time  // the time of the store at the time local; zero: not known yet
	local  time.Time
}

// Now returns the time of the cluster, or the zero time while the store has not shown it.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()

	return c.now()
}

func (c *Clock) now() time.Time {
	if c.shared.IsZero() {
		return time.Time{}
	}

	return c.shared.Add(time.Since(c.local))
}

// Observe takes a time that the store read during a call that began at asked and has ended now. The Clock moves only as
// far as that reading proves it wrong: a slow call leaves a clock alone that it does not contradict.
func (c *Clock) Observe(store, asked time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()

	earliest := store.Round(0) // without a monotonic reading, which would be that of another process
	latest := earliest.Add(time.Since(asked))
	now := c.now()

	// The store read its clock after asked and before now, so its time is now between these two.
	switch {
	case now.Before(earliest):
		now = earliest
	case now.After(latest):
		now = latest
	}

	c.shared = now
	c.local = time.Now()
}
