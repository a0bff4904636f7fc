package fanout

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// Whatever the sizes of pages that change all the time, the deliveries come
// down to the budget, small pages keep the least interval and nobody starves.
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

			if now > 60*time.Second { // by then the pace has settled
				rate += float64(n) / 40
			}
		}

		// Even at the longest interval these pages need as much.
		for _, size := range sizes {
			possible += float64(size) / maxInterval.Seconds()
		}

		// The deliveries of one page come in whole rounds of its subscribers, hence the slack.
		if limit := max(p.budget, possible); rate > 1.5*limit {
			t.Fatalf("%.0f deliveries/s with a budget of %.0f", rate, p.budget)
		}

		for _, size := range sizes {
			if d := p.interval(size); d < least || d > maxInterval {
				t.Fatalf("interval of %d subscribers is %s", size, d)
			}
		}

		if total := sum(sizes); float64(total)/least.Seconds() < 0.5*p.budget && p.interval(20_000) != least {
			t.Fatalf("interval %s though all fits", p.interval(20_000))
		}
	})
}

func sum(sizes []int) (n int) {
	for _, s := range sizes {
		n += s
	}
	return n
}

func TestPaceTakesFromTheLargestPages(t *testing.T) {
	p := pace{budget: 1000, least: 250 * time.Millisecond, stretch: 4}
	if small, large := p.interval(10), p.interval(1000); small != p.least || large != 4*time.Second {
		t.Fatalf("intervals %s and %s, want the least and 4s", small, large)
	}
}
