package countertest

import (
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/testkit"
)

var algorithms = []limit.Algorithm{limit.Fixed, limit.Sliding, limit.Log}

// month is a window that does not end during a test, unless the test happens to run at its very end.
var month = limit.MaxWindow.Milliseconds()

func asks(key string, a limit.Algorithm, most, cost int64) limit.Request {
	return limit.Request{Name: limit.Name{Key: key, Algorithm: a, Window: month}, Limit: most, Cost: cost}
}

func take(t testing.TB, s counter.Limiter, calls ...limit.Request) []counter.LimitResult {
	t.Helper()
	results := s.Limit(t.Context(), calls)
	if len(results) != len(calls) {
		t.Fatalf("%d results of %d calls", len(results), len(calls))
	}

	for i, r := range results {
		// Nothing counts for longer than two windows.
		isInTime := r.Reset > 0 && r.Reset <= 2*calls[i].Window
		if r.Err != nil || r.Remaining < 0 || !isInTime {
			t.Fatalf("%+v: %+v", calls[i], r)
		}
	}

	return results
}

// takes makes one call, and compares its answer except for the time.
func takes(t testing.TB, s counter.Limiter, c limit.Request, allowed bool, remaining int64) {
	t.Helper()
	r := take(t, s, c)[0]
	if r.Allowed != allowed || r.Remaining != remaining {
		t.Fatalf("%+v: %+v, want allowed %t with %d remaining", c, r, allowed, remaining)
	}
}

// limitForgotten tests that one process sees and gives back what another one has taken, and that forgetting a limit
// forgets it for all windows and algorithms, but no other limit.
func limitForgotten(t *testing.T, i Instance) {
	s := i.Store
	look := func(when string, c limit.Request, remaining int64) {
		t.Helper()
		c.Cost = 0
		r := i.peer().Limit(t.Context(), []limit.Request{c})[0]
		if r.Err != nil || !r.Allowed || r.Remaining != remaining {
			t.Fatalf("%s: %+v: %+v, want %d remaining", when, c, r, remaining)
		}
	}

	other := asks("other", limit.Log, 10, 4)
	take(t, s, other)
	var all []limit.Request
	for _, a := range algorithms {
		for _, window := range []int64{month, month - 1} {
			c := asks("k", a, 10, 6)
			c.Window = window
			all = append(all, c)
		}
	}
	take(t, s, all...)

	for _, c := range all {
		look("taken", c, 4)
		c.Cost = -5
		takes(t, i.peer(), c, true, 9)
		look("given back", c, 9)
	}

	// Twice, as after a lost answer.
	for range 2 {
		if err := i.peer().ForgetLimit(t.Context(), "k"); err != nil {
			t.Fatal(err)
		}
	}
	if i.Crash != nil {
		i.Store = i.Crash(t)
		i.Peer = nil
	}
	for _, c := range all {
		look("forgotten", c, 10)
	}
	look("another limit", other, 6)
}

// limitModel compares limits with the arithmetic of package limit. Within one window the time must not matter, and
// neither must a counter of the same key or a crash.
func limitModel(t *testing.T, i Instance) {
	rng := rand.New(rand.NewPCG(3, 4))
	s := i.Store
	states := map[limit.Name]*limit.State{}
	keys := []string{"a{b}c", "{}", "ü %", "K", "k ", "s:1"} // a store must keep them as they are
	one(t, s, add(sum, "s:1", 5))
	judged := 0

	for n := range 100 {
		if n == 50 {
			value(t, s, "s:1", 5)
			one(t, s, drop(sum, "s:1"))
		}
		if n == 75 && i.Crash != nil {
			s = i.Crash(t)
		}

		var calls []limit.Request
		for range 1 + rng.IntN(4) {
			a := algorithms[rng.IntN(3)]
			most := []int64{1, 3, 7, limit.MaxLog, limit.MaxLimit}[rng.IntN(5)]
			if a == limit.Log {
				most = min(most, limit.MaxLog)
			}
			c := asks(keys[rng.IntN(len(keys))], a, most, 1+rng.Int64N(most))
			c.Window -= rng.Int64N(2) // another window is another limit
			calls = append(calls, c)
		}

		now := time.Now().UnixMilli()
		results := s.Limit(t.Context(), calls)
		unknown := map[string]bool{} // keys of calls without an answer, which a busy server may have made
		for n, got := range results {
			if errors.Is(got.Err, counter.ErrUnavailable) {
				unknown[calls[n].Name.Key] = true
			}
		}

		for n, got := range results {
			name := calls[n].Name
			if unknown[name.Key] {
				continue
			}

			if states[name] == nil {
				states[name] = &limit.State{}
			}
			want := states[name].Take(calls[n], now)
			isInTime := got.Reset > 0 && got.Reset <= 2*name.Window
			judged++
			if got.Err != nil || !isInTime || got.Allowed != want.Allowed || got.Remaining != want.Remaining {
				t.Fatalf("%+v: got %+v, want %+v", calls[n], got, want)
			}
		}

		// Nobody knows what these limits have counted, so both sides begin anew.
		for key := range unknown {
			testkit.Eventually(t, "a limit is forgotten", func() bool { return s.ForgetLimit(t.Context(), key) == nil })
			maps.DeleteFunc(states, func(name limit.Name, _ *limit.State) bool { return name.Key == key })
		}
	}

	if judged < 100 { // of about 250
		t.Errorf("only %d calls were answered", judged)
	}
}

// limitReturns tests that a refused call passes after the time that the answer gives.
func limitReturns(t *testing.T, i Instance) {
	var wg sync.WaitGroup
	for _, a := range algorithms {
		wg.Go(func() {
			c := limit.Request{Name: limit.Name{Key: "r", Algorithm: a, Window: 1000}, Limit: 2, Cost: 2}
			// Both calls may pass if a window ends between them.
			var wait time.Duration
			for wait == 0 {
				for _, r := range i.Store.Limit(t.Context(), []limit.Request{c, c}) {
					if r.Err != nil {
						t.Error(r.Err)
						return
					}
					if !r.Allowed {
						wait = time.Duration(r.Reset) * time.Millisecond
					}
				}
			}

			time.Sleep(wait)
			r := i.Store.Limit(t.Context(), []limit.Request{c})[0]
			if r.Err != nil || !r.Allowed {
				t.Errorf("%s: %+v after the time that the answer gave", a, r)
			}
		})
	}
	wg.Wait()
}

// limitFight lets clients of two processes compete for limits. The processes combine calls, as the program does, so the
// same limits are in calls in any order.
func limitFight(t *testing.T, i Instance) {
	const clients, left, tries = 64, 100, 3
	doors := []*counter.Limits{
		counter.NewLimits(i.Store, counter.CombinerConfig{}), counter.NewLimits(i.peer(), counter.CombinerConfig{}),
	}

	var passed, unanswered [limit.Log + 1]atomic.Int64
	var wg sync.WaitGroup
	start := make(chan struct{})
	for c := range clients {
		wg.Go(func() {
			<-start
			for n := range tries * len(algorithms) {
				// Clients begin with different algorithms, so that all three are in use all the time.
				a := algorithms[(c+n)%len(algorithms)]
				answer, err := doors[c%len(doors)].Do(t.Context(), asks("f", a, left, 1))
				// On a busy machine the server may not answer a call that it has counted.
				for errors.Is(err, counter.ErrUnavailable) {
					unanswered[a].Add(1)
					time.Sleep(5 * time.Millisecond)
					answer, err = doors[c%len(doors)].Do(t.Context(), asks("f", a, left, 1))
				}

				if err != nil {
					t.Error(err)
				} else if answer.Allowed {
					passed[a].Add(1)
				}
			}
		})
	}
	close(start)
	wg.Wait()
	for _, door := range doors {
		door.Close()
	}

	for _, a := range algorithms {
		n := passed[a].Load()
		u := unanswered[a].Load()
		// Calls without an answer may have been counted.
		if n > left || n+u < left {
			t.Errorf("%s: %d passed and %d were not answered, the limit is %d", a, n, u, left)
		}
	}
}

// limitsBeforeCut, limitsMeanwhile and limitsAfterwards test limits over an outage of the store. Meanwhile a call is an
// error, and afterwards no more has passed than the limit.
func limitsBeforeCut(t *testing.T, s counter.Limiter) {
	for _, a := range algorithms {
		takes(t, s, asks("a", a, 10, 6), true, 4)
	}
}

func limitsMeanwhile(t *testing.T, s counter.Limiter) {
	for _, a := range algorithms {
		r := s.Limit(t.Context(), []limit.Request{asks("a", a, 10, 1)})[0]
		if !errors.Is(r.Err, counter.ErrUnavailable) || r.Allowed {
			t.Errorf("%s: the store is away, and Limit says %+v", a, r)
		}
	}
}

func limitsAfterwards(t *testing.T, s counter.Limiter) {
	for _, a := range algorithms {
		passed, unanswered := 6, 1 // some of these may be counted
		for passed < 20 {
			r := s.Limit(t.Context(), []limit.Request{asks("a", a, 10, 1)})[0]
			if errors.Is(r.Err, counter.ErrUnavailable) {
				unanswered++
				time.Sleep(5 * time.Millisecond)
				continue
			}
			if r.Err != nil {
				t.Fatal(r.Err)
			}

			if !r.Allowed {
				break
			}
			passed++
		}

		if passed > 10 || passed+unanswered < 10 {
			t.Errorf("%s: %d passed and %d were not answered, the limit is 10", a, passed, unanswered)
		}
	}
}
