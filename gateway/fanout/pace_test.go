package fanout

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// When all pages change all the time, the deliveries approach the budget, whatever the sizes of the pages. Small pages
// keep the shortest interval, and no page waits for longer than the longest one.
func TestPaceFindsTheBudget(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const least = 250 * time.Millisecond
		sizes := rapid.SliceOfN(rapid.IntRange(1, 20_000), 1, 30).Draw(t, "sizes")
		p := pace{budget: float64(rapid.IntRange(2_000, 100_000).Draw(t, "budget")), least: least}
		sent := make([]time.Duration, len(sizes))
		now := time.Duration(0)
		rate, possible := 0.0, 0.0

		for range 4000 { // 100 s of ticks
			now += 25 * time.Millisecond
			n := 0
			for i, size := range sizes {
				if now-sent[i] >= p.interval(size) {
					sent[i], n = now, n+size
				}
			}
			p.spend(n, now)

			if now > 60*time.Second { // the pace has settled
				rate += float64(n) / 40
			}
		}

		// At least so many deliveries are due even at the longest interval.
		for _, size := range sizes {
			possible += float64(size) / maxInterval.Seconds()
		}

		// The deliveries of one page come in whole rounds of its subscribers, hence the slack.
		if limit := max(p.budget, possible); rate > 1.5*limit {
			t.Fatalf("%.0f deliveries/s, want at most 1.5 times %.0f", rate, limit)
		}

		for _, size := range sizes {
			if d := p.interval(size); d < least || d > maxInterval {
				t.Fatalf("the interval for %d subscribers is %s, want %s to %s", size, d, least, maxInterval)
			}
		}

		if total := sum(sizes); float64(total)/least.Seconds() < 0.5*p.budget && p.interval(20_000) != least {
			t.Fatalf("the interval is %s, want the least, since all fits the budget", p.interval(20_000))
		}
	})
}

func sum(sizes []int) (n int) {
	for _, s := range sizes {
		n += s
	}
	return n
}

// Under load the largest pages get longer intervals, and small ones do not.
func TestPaceTakesFromTheLargestPages(t *testing.T) {
	p := pace{budget: 1000, least: 250 * time.Millisecond, stretch: 4}
	if small, large := p.interval(10), p.interval(1000); small != p.least || large != 4*time.Second {
		t.Fatalf("intervals %s and %s, want the least and 4s", small, large)
	}
}
