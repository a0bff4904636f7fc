package simulate

import (
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// maxLatencies bounds how many durations latencies keep. Of more they keep a random choice, and the longest.
const maxLatencies = 1 << 20

// latencies are durations. Any goroutine may use them.
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

// ms returns the q-quantile in milliseconds, such as the median for 0.5.
func (l *latencies) ms(q float64) float64 {
	l.mu.Lock()
	defer l.mu.Unlock()

	d := l.longest
	if q < 1 && len(l.kept) > 0 {
		slices.Sort(l.kept)
		d = l.kept[int(q*float64(len(l.kept)))]
	}

	return float64(d.Microseconds()) / 1000
}
