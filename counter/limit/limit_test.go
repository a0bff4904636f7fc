package limit

import (
	"bytes"
	"math/big"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// passed is a call that passed, as the model remembers it.
type passed struct{ at, cost int64 }

// model judges by everything that ever passed, with numbers that cannot overflow.
type model struct {
	Name
	all []passed
}

func (m *model) sum(from, to int64) int64 {
	var n int64
	for _, p := range m.all {
		if p.at >= from && p.at < to {
			n += p.cost
		}
	}

	return n
}

// giveBack takes n back from what has passed, in the order that State documents.
func (m *model) giveBack(n, now int64) {
	start := now - now%m.Window
	take := func(p *passed) {
		less := min(n, p.cost)
		p.cost -= less
		n -= less
	}

	for i := range m.all {
		if m.Algorithm == Log && m.all[i].at >= now-m.Window { // the oldest first
			take(&m.all[i])
		}
	}

	for i := len(m.all) - 1; i >= 0; i-- {
		inWindow := m.all[i].at >= start
		inLast := m.Algorithm == Sliding && m.all[i].at >= start-m.Window
		if m.Algorithm != Log && (inWindow || inLast) {
			take(&m.all[i])
		}
	}
}

func (m *model) fits(c Request, now int64) bool {
	if c.Cost <= 0 {
		return true
	}

	start := now - now%m.Window
	switch m.Algorithm {
	case Fixed:
		return m.sum(start, start+m.Window)+c.Cost <= c.Limit
	case Log:
		return m.sum(now-m.Window, now+1)+c.Cost <= c.Limit
	}

	used := big.NewRat(m.sum(start-m.Window, start), m.Window)
	used.Mul(used, big.NewRat(start+m.Window-now, 1))
	used.Add(used, big.NewRat(m.sum(start, start+m.Window)+c.Cost, 1))

	return used.Cmp(big.NewRat(c.Limit, 1)) <= 0
}

// copied returns the state as a store reads it back.
func copied(t *rapid.T, s *State) *State {
	again, err := Parse(s.Append(nil))
	if err != nil {
		t.Fatal(err)
	}

	return &again
}

// TestJudgesAsTheModel: every algorithm judges random calls as a model that remembers everything.
func TestJudgesAsTheModel(t *testing.T) {
	for _, algorithm := range []Algorithm{Fixed, Sliding, Log} {
		t.Run(algorithm.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) { judge(t, algorithm) })
		})
	}
}

func judge(t *rapid.T, algorithm Algorithm) {
	window := rapid.SampledFrom([]int64{1000, 1001, 7919, 60_000, MaxWindow.Milliseconds()}).Draw(t, "window")
	most := rapid.SampledFrom([]int64{1, 2, 10, 100, MaxLog, MaxLimit}).Draw(t, "most")
	if algorithm == Log {
		most = min(most, MaxLog)
	}

	name := Name{"k", algorithm, window}
	m := &model{Name: name}
	s := &State{}
	one := rapid.Bool().Draw(t, "one limit")
	now := 1_700_000_000_000 + rapid.Int64Range(0, window).Draw(t, "begin")

	for range rapid.IntRange(1, 40).Draw(t, "calls") {
		now += rapid.OneOf(
			rapid.Just(int64(0)), rapid.Int64Range(0, window/10), rapid.Int64Range(0, 3*window),
		).Draw(t, "later")

		c := Request{Name: name, Limit: most}
		if !one {
			c.Limit = rapid.Int64Range(1, most).Draw(t, "limit")
		}
		c.Cost = rapid.OneOf(
			rapid.Int64Range(1, c.Limit), rapid.Int64Range(1, max(1, c.Limit/10)),
			rapid.Just(int64(0)), rapid.Int64Range(-c.Limit, -1), rapid.Just(int64(-MaxLimit)),
		).Draw(t, "cost")

		// The state and the model judge the same call.
		before := copied(t, s)
		fits := m.fits(c, now)
		a := s.Take(c, now)
		if a.Allowed != fits || a.Remaining < 0 || a.Remaining > c.Limit || a.Reset < 0 || a.Reset == 0 && c.Cost > 0 {
			t.Fatalf("%+v at %d is %+v, want allowed %t; %+v", c, now, a, fits, m.all)
		}

		took := a.Allowed && c.Cost > 0
		switch {
		case c.Cost < 0:
			m.giveBack(-c.Cost, now)
		case took:
			m.all = append(m.all, passed{now, c.Cost})
		case !bytes.Equal(s.Append(nil), before.Append(nil)):
			t.Fatalf("%+v took nothing, and %+v has become %+v", c, before, s)
		}

		// Remaining is exact: that much would pass, and no more.
		for _, more := range []int64{a.Remaining, a.Remaining + 1} {
			next := Request{name, c.Limit, more}
			if next.Check() == nil && copied(t, s).Take(next, now).Allowed != (more == a.Remaining) {
				t.Fatalf("%+v at %d is answered %+v, but of %d calls more that is not true", c, now, a, more)
			}
		}

		// Reset is exact: a call after Reset passes, and a sooner one does not.
		again := c
		if a.Allowed {
			again.Cost = c.Limit // by then all is back
		}
		if got := copied(t, s).Take(again, now+a.Reset); !got.Allowed {
			t.Fatalf("%+v at %d is answered %+v, but after the reset %+v is %+v", c, now, a, again, got)
		}
		if got := copied(t, s).Take(again, now+a.Reset-1); got.Allowed && a.Reset > 0 {
			t.Fatalf("%+v at %d is answered %+v, but already before the reset %+v is %+v", c, now, a, again, got)
		}

		end := s.End(name)
		full := Request{name, most, most}
		if end > 0 && copied(t, s).Take(full, end) != (&State{}).Take(full, end) {
			t.Fatalf("at its end %d the state still counts: %+v", end, s)
		}
	}

	// The calls that passed stay within the bound that the package promises for the algorithm.
	for _, p := range m.all {
		start := p.at - p.at%window
		if algorithm != Log && m.sum(start, start+window) > most {
			t.Fatalf("%d passed in the window at %d, the limit is %d", m.sum(start, start+window), start, most)
		}

		bound := map[Algorithm]int64{Log: most, Sliding: 2*most - 1, Fixed: 2 * most}[algorithm]
		if n := m.sum(p.at, p.at+window); n > bound {
			t.Fatalf("%d passed in the time of a window from %d, want %d at most", n, p.at, bound)
		}
	}
}

// Even by a finer clock than that of the states no window has more than its limit: no window at all of log, and no
// window of fixed that begins at a multiple of its length.
func TestNoWindowHasMoreByAFinerClock(t *testing.T) {
	const window, millisecond = 1000, 1000 // ms, µs

	for _, algorithm := range []Algorithm{Fixed, Log} {
		t.Run(algorithm.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				s := &State{}
				most := rapid.Int64Range(1, 3).Draw(t, "limit")
				m := &model{Name: Name{"k", algorithm, window * millisecond}} // in µs
				now := int64(1_700_000_000_000)*millisecond + rapid.Int64Range(0, window*millisecond).Draw(t, "begin")
				for range rapid.IntRange(1, 60).Draw(t, "calls") {
					now += rapid.OneOf(
						rapid.Int64Range(0, 400), rapid.Int64Range(0, 400*millisecond),
						rapid.Int64Range(m.Window-millisecond, m.Window),
					).Draw(t, "later")

					if s.Take(Request{Name{"k", algorithm, window}, most, 1}, now/millisecond).Allowed {
						m.all = append(m.all, passed{now, 1})
					}
				}

				for _, p := range m.all {
					start := p.at
					if algorithm == Fixed {
						start -= start % m.Window
					}
					if n := m.sum(start, start+m.Window); n > most {
						t.Fatalf("%d passed in the window at %d µs, the limit is %d: %v", n, start, most, m.all)
					}
				}
			})
		})
	}
}

// A clock that jumps back lets nothing pass that was refused before.
func TestTheClockGoesBack(t *testing.T) {
	for _, algorithm := range []Algorithm{Fixed, Sliding, Log} {
		t.Run(algorithm.String(), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				name := Name{"k", algorithm, 1000}
				s := &State{}

				var furthest, sum int64 // sum: what passed while the clock was behind furthest
				now := int64(1_700_000_000_000)

				for range rapid.IntRange(1, 30).Draw(t, "calls") {
					now += rapid.Int64Range(-5000, 1500).Draw(t, "by")
					if now > furthest {
						furthest, sum = now, 0
					}
					c := Request{name, 10, rapid.Int64Range(1, 5).Draw(t, "cost")}
					a := s.Take(c, now)
					if a.Reset <= 0 {
						t.Fatalf("%+v at %d is %+v", c, now, a)
					}

					if a.Allowed && now < furthest {
						sum += c.Cost
					}
					if sum > c.Limit {
						t.Fatalf("%d passed while the clock was behind", sum)
					}
				}
			})
		})
	}
}

// TestTheClockWasFarAhead: a clock that was hours ahead is set. What passed until then counts as if it had just passed,
// and after two windows at most the whole limit is there again.
func TestTheClockWasFarAhead(t *testing.T) {
	const window, most, ahead = 60_000, 10, 3 * 3600_000
	for a := Fixed; a <= Log; a++ {
		t.Run(a.String(), func(t *testing.T) {
			r := Request{Name: Name{Algorithm: a, Window: window}, Limit: most, Cost: 1}
			now := int64(1_900_000_020_000)
			var s State
			for i := range int64(most) {
				if !s.Take(r, now+ahead+i).Allowed {
					t.Fatalf("request %d is refused, want that the limit passes", i)
				}
			}

			if s.SetBack(r.Name, now+ahead-window/2) {
				t.Error("a clock that goes back by less than a window changes the state, want that time stands still")
			}
			if !s.SetBack(r.Name, now) || s.SetBack(r.Name, now+1) {
				t.Error("want that the state is set back once")
			}
			if is := s.Take(r, now+1); is.Allowed || is.Reset > 2*window {
				t.Errorf("one more is answered by %+v, want a refusal for two windows at most", is)
			}

			passed := 0
			for range most {
				if s.Take(r, now+2*window).Allowed {
					passed++
				}
			}
			if passed != most {
				t.Errorf("two windows later %d pass, want %d", passed, most)
			}
		})
	}
}

// TestNoMorePassesWhenTheClockIsSet: around the moment at which a clock is set no more passes than the limit. Fixed
// windows of the two clocks have other beginnings, so there it may be more.
func TestNoMorePassesWhenTheClockIsSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const window, most = 1000, 20
		a := rapid.SampledFrom([]Algorithm{Sliding, Log}).Draw(t, "algorithm")
		r := Request{Name: Name{Algorithm: a, Window: window}, Limit: most, Cost: 1}
		now := rapid.Int64Range(1e12, 1e12+window).Draw(t, "now")
		ahead := rapid.Int64Range(2*window, 1e9).Draw(t, "ahead")

		var s State
		passed := 0
		for i := range int64(2 * most) {
			at := now + i
			if i < most {
				at += ahead
			} else {
				s.SetBack(r.Name, at)
			}
			if s.Take(r, at).Allowed {
				passed++
			}
		}
		if passed != most {
			t.Fatalf("%d pass, want %d", passed, most)
		}
	})
}

func TestCheck(t *testing.T) {
	day := (24 * time.Hour).Milliseconds()
	for want, c := range map[string]Request{
		"":                        {Name{"k", Sliding, 60_000}, 100, 1},
		"algorithm: send fixed":   {Name{"k", 0, 60_000}, 100, 1},
		"from 1s to 31d":          {Name{"k", Fixed, 999}, 100, 1},
		"window: ":                {Name{"k", Fixed, 31*day + 1}, 100, 1},
		"window: send a duration": {Name{"k", Fixed, 1 << 62}, 100, 1},
		"from 1 to 1000000000000": {Name{"k", Fixed, 31 * day}, 0, 1},
		"limit: send a whole":     {Name{"k", Fixed, 31 * day}, MaxLimit + 1, 1},
		"remembers at most 10000": {Name{"k", Log, 1000}, MaxLog + 1, 1},
		"up to the limit, 100":    {Name{"k", Log, 1000}, 100, 101},
		"cost: send a whole":      {Name{"k", Log, 1000}, 100, -MaxLimit - 1},
	} {
		err := c.Check()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}

func TestAlgorithmsHaveNames(t *testing.T) {
	for _, a := range []Algorithm{Fixed, Sliding, Log} {
		if got, ok := ParseAlgorithm(a.String()); !ok || got != a {
			t.Errorf("%d is %q, which is %d", a, a, got)
		}
	}

	for _, text := range []string{"", "none", "Fixed", "gcra"} {
		if a, ok := ParseAlgorithm(text); ok {
			t.Errorf("%q is %d", text, a)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 1, 2, 3})
	f.Add([]byte{2, 5, 1, 3, 9})
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := Parse(b)
		if err != nil {
			return
		}

		again, err := Parse(s.Append(nil))
		if err != nil || len(again.passed) != len(s.passed) {
			t.Fatalf("%+v, then %+v, %v", s, again, err)
		}
		if len(s.passed) > 0 {
			s.Take(Request{Name{"k", Log, 1000}, 10, 10}, 1_700_000_000_000) // whatever it says
		}
	})
}
