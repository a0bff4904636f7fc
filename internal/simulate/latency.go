package simulate

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// maxLatencies bounds what latencies keep: of more, a random choice, with the longest.
const maxLatencies = 1 << 20

// latencies are durations. They may be used by many goroutines.
type latencies struct {
	mu      sync.Mutex
	kept    []time.Duration
	n       int64 // added so far
	longest time.Duration
}

func (l *latencies) add(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.n++
	l.longest = max(l.longest, d)

	if len(l.kept) < maxLatencies {
		l.kept = append(l.kept, d)
		return
	}
	if i := rand.Int64N(l.n); i < maxLatencies { // each latency is kept with the same probability
		l.kept[i] = d
	}
}

func (l *latencies) count() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.n
}

// ms returns the duration that a fraction q of all is not longer than, in milliseconds.
func (l *latencies) ms(q float64) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()

	// The longest is kept apart, because a random choice may lose it.
	d := l.longest
	if q < 1 && len(l.kept) > 0 {
		slices.Sort(l.kept)
		d = l.kept[int(q*float64(len(l.kept)))]
	}

	return float64(d.Microseconds()) / 1000
}
