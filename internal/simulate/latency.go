package simulate

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// A histogram counts durations in buckets that are at most 1/32 wider than what
// they hold, in constant memory. It may be used by many goroutines.
type histogram struct {
	buckets [histogramBuckets]atomic.Int64
	n       atomic.Int64
	longest atomic.Int64
}

// 32 buckets a power of two over 40 bits of microseconds: twelve days.
const (
	subBits          = 5
	histogramBuckets = (40 - subBits + 1) << subBits
)

func (h *histogram) add(d time.Duration) {
	us := max(d.Microseconds(), 0)
	h.buckets[bucketOf(us)].Add(1)
	h.n.Add(1)
	for {
		old := h.longest.Load()
		if us <= old || h.longest.CompareAndSwap(old, us) {
			return
		}
	}
}

// bucketOf is exact below 64 µs; longer than it can hold goes to the last one.
func bucketOf(us int64) int {
	shift := max(bits.Len64(uint64(us))-subBits-1, 0)
	return min(shift<<subBits+int(us>>shift), histogramBuckets-1)
}

// bucketTop is the longest duration in a bucket.
func bucketTop(b int) int64 {
	shift := max(b>>subBits-1, 0)
	return int64(b-shift<<subBits+1)<<shift - 1
}

// quantile returns a duration that the fraction q of all is not longer than.
func (h *histogram) quantile(q float64) time.Duration {
	rank, seen := int64(q*float64(h.n.Load())), int64(0)
	for b := range h.buckets {
		if seen += h.buckets[b].Load(); seen > rank || seen > 0 && seen == h.n.Load() {
			return time.Duration(min(bucketTop(b), h.longest.Load())) * time.Microsecond
		}
	}
	return 0
}

func (h *histogram) max() time.Duration { return time.Duration(h.longest.Load()) * time.Microsecond }
