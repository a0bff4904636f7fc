package limit

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// tokens is a textbook token bucket: it holds a burst, and gets one token per Every.
type tokens struct {
	Rate
	level time.Duration // its content; a token is worth Every
	at    time.Duration
}

func (b *tokens) take(now time.Duration, n int) bool {
	b.level = min(b.level+now-b.at, b.RefillTime())
	b.at = now

	cost := time.Duration(n) * b.Every
	if b.level < cost {
		return false
	}
	b.level -= cost
	return true
}

func TestRatesAreTokenBuckets(t *testing.T) {
	type taken struct {
		at time.Duration
		n  int
	}
	rapid.Check(t, func(t *rapid.T) {
		r := PerSecond(rapid.SampledFrom([]int{1, 3, 7, 10, 500, 1e9}).Draw(t, "a second"),
			rapid.SampledFrom([]int{1, 2, 20, 2000}).Draw(t, "burst"))
		now := time.Duration(rapid.Int64Range(0, 1e12).Draw(t, "begin"))

		model := &tokens{r, r.RefillTime(), now}
		var back time.Duration
		var all []taken

		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			now += time.Duration(rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, int64(2*r.Every)),
				rapid.Int64Range(0, int64(2*r.RefillTime()))).Draw(t, "later"))
			n := rapid.OneOf(rapid.Just(1), rapid.IntRange(1, r.Burst)).Draw(t, "n")

			after, wait := r.Take(back, now, n)
			if passes := model.take(now, n); passes != (wait == 0) || wait < 0 {
				t.Fatalf("%d tokens at %s have to wait %s, want them to pass: %t", n, now, wait, passes)
			}

			// The wait is exact: it is long enough, and one nanosecond less is not.
			if wait > 0 {
				if _, more := r.Take(back, now+wait, n); more != 0 {
					t.Fatalf("%d at %s waited %s, and then have to wait %s", n, now, wait, more)
				}
				if _, more := r.Take(back, now+wait-1, n); more != 1 {
					t.Fatalf("%d at %s are told to wait %s, which is longer than need be", n, now, wait)
				}
				continue
			}
			back = after
			all = append(all, taken{now, n})

			// All tokens are back at this time, and no sooner.
			if _, wait := r.Take(back, back, r.Burst); wait != 0 {
				t.Fatalf("at %s all tokens should be back, but one has to wait %s", back, wait)
			}
			if _, wait := r.Take(back, back-1, r.Burst); wait != 1 {
				t.Fatalf("all is back sooner than at %s", back)
			}
		}

		// In any stretch of time at most the burst and what comes back in the stretch passes.
		for i, first := range all {
			sum := 0
			for _, last := range all[i:] {
				sum += last.n
				if time.Duration(sum-r.Burst)*r.Every > last.at-first.at {
					t.Fatalf("%d passed from %s to %s, of %+v", sum, first.at, last.at, r)
				}
			}
		}
	})
}

// A clock that jumps back and forth lets no more pass than one that goes straight to the furthest time.
func TestTheClockOfARateGoesBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := Rate{Every: 100 * time.Millisecond, Burst: 5}
		var back, now, furthest time.Duration
		passed := 0
		for range rapid.IntRange(1, 60).Draw(t, "calls") {
			now = max(0, now+time.Duration(rapid.Int64Range(-2e9, 1e9).Draw(t, "by")))
			furthest = max(furthest, now)

			if after, wait := r.Take(back, now, 1); wait == 0 {
				back = after
				passed++
			}

			if most := r.Burst + int(furthest/r.Every); passed > most {
				t.Fatalf("%d passed within %s, %d may", passed, furthest, most)
			}
		}
	})
}

// A caller that always waits as long as it is told gets exactly its rate.
func TestWaitingIsAsFastAsTheRate(t *testing.T) {
	r := PerSecond(10, 20)
	var back, now, wait time.Duration
	for range 10 {
		back, wait = r.Take(back, now, 15)
		now += wait
	}

	if want := (150 - 20) * r.Every; now != want {
		t.Errorf("150 took %s, want %s", now, want)
	}
}

// A rate that does not divide a second is never exceeded, not even by the rounding of a nanosecond.
func TestPerSecond(t *testing.T) {
	for n, every := range map[int]time.Duration{1: time.Second, 3: 333_333_334, 10: 100 * time.Millisecond, 1e9: 1} {
		if r := PerSecond(n, 20); r.Every != every || r.Burst != 20 || r.RefillTime() != 20*every {
			t.Errorf("%d a second: %+v, all back in %s", n, r, r.RefillTime())
		}
	}
}
