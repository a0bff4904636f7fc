package counter_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/presence"
)

var (
	topRules, _ = counter.ParseRules([]byte(`{"rules":[{"match":"v:*","kind":"sum","buckets":["1m:1h","1h:30d"],` +
		`"top":true},{"match":"w:*","kind":"sum","buckets":["1m:1h"]}]}`))
	topRule = topRules.All()[0]
)

// tracked is a store whose changes are tracked before they are answered.
type tracked struct {
	*counter.TopTracker
	store counter.Store
}

func track(store counter.Store, rules *counter.Rules) tracked {
	return tracked{counter.NewTopTracker(store, rules, zerolog.Nop()), store}
}

// Apply implements counter.Writer.
func (s tracked) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := s.store.Apply(ctx, ops)
	s.Note(ctx, ops, results)
	return results
}

func gain(t testing.TB, w counter.Writer, key string, n int64) {
	t.Helper()
	gainUnder(t, w, topRule, key, n)
}

func gainUnder(t testing.TB, w counter.Writer, rule *counter.Rule, key string, n int64) {
	t.Helper()
	o := counter.Op{Changes: []counter.Change{{Key: key, Rule: rule, Verb: counter.Add, Delta: n}}}
	if r := w.Apply(t.Context(), []counter.Op{o})[0]; r.Err != nil {
		t.Fatal(r.Err)
	}
}

// TestTop: every key with more than a thousandth of all gains is found, with its exact gain, among more keys than a
// summary can hold: in the running minute, over ended minutes, in hours, and by a process that has just started.
func TestTop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := countertest.InMemory(t, nil)
		tops := track(store, topRules)
		g := contest{rand: rand.New(rand.NewPCG(1, 2)), truth: map[string]int64{}}

		// An increment and a decrement add up.
		gain(t, tops, "v:hot 1", 5)
		gain(t, tops, "v:hot 1", -3)
		g.truth["v:hot 1"] = 2

		for round := range 3 {
			g.minute(t, tops, round)
			g.check(t, fmt.Sprint("after minute ", round), tops, 30*time.Minute)
		}

		// The minute has ended, and its list is made a moment later. From then on its marks are of no use.
		time.Sleep(10 * time.Second)
		if marked, err := store.Marked(t.Context(), "v:*"); err != nil || len(marked) != 0 {
			t.Errorf("%d steps are not closed, want none; %v", len(marked), err)
		}
		g.check(t, "all are closed", tops, 30*time.Minute)

		g.minute(t, tops, 3)
		if err := tops.Close(); err != nil {
			t.Fatal(err)
		}

		// A process that has just started knows only what the store has.
		tops = track(store, topRules)
		g.check(t, "after a start", tops, 30*time.Minute)
		g.check(t, "in hours", tops, 24*time.Hour)

		time.Sleep(2 * time.Hour)
		g.check(t, "in hours that are closed", tops, 24*time.Hour)
		if got, err := tops.Top(t.Context(), topRule, time.Hour, 10); err != nil || len(got) != 0 {
			t.Errorf("the list is %v, %v; want it empty, since nothing was gained in the last hour", got, err)
		}

		if r := tops.Apply(t.Context(), []counter.Op{
			{Changes: []counter.Change{{Key: "v:hot 1", Rule: topRule, Verb: counter.Delete}}},
		})[0]; r.Err != nil {
			t.Fatal(r.Err)
		}

		// Its gains are in lists that are closed. They must not be shown of a counter that does not exist.
		delete(g.truth, "v:hot 1")
		g.check(t, "after a delete", tops, 24*time.Hour)
		if err := tops.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// contest is what keys have gained.
type contest struct {
	rand  *rand.Rand
	truth map[string]int64
}

// minute makes the gains of a minute: many keys have small ones, and some gain more, in each minute others.
func (g contest) minute(t *testing.T, tops tracked, round int) {
	t.Helper()
	for range 6_000 {
		key := fmt.Sprint("v:", g.rand.IntN(100_000))
		if g.rand.IntN(50) == 0 {
			key = fmt.Sprint("v:hot ", g.rand.IntN(8)+round)
		}
		gain(t, tops, key, 1)
		g.truth[key]++
	}
	time.Sleep(time.Minute)
}

// check compares the list of a window that includes all gains with the truth.
func (g contest) check(t *testing.T, what string, tops tracked, last time.Duration) {
	t.Helper()

	total := int64(0)
	var want []counter.Gained
	for key, n := range g.truth {
		total += n
		want = append(want, counter.Gained{Key: key, Value: n})
	}
	slices.SortFunc(want, func(a, b counter.Gained) int { return int(b.Value - a.Value) })

	got, err := tops.Top(t.Context(), topRule, last, 100)
	if err != nil {
		t.Fatal(err)
	}

	found := map[string]int64{}
	for _, one := range got {
		found[one.Key] = one.Value
		if g.truth[one.Key] == 0 {
			t.Errorf("%s: %q is listed with %d, want only keys that have gained", what, one.Key, one.Value)
		}
	}

	// Every key above a thousandth must be found, with its exact gain.
	for _, one := range want {
		if one.Value*1000 <= total {
			break
		}
		if found[one.Key] != one.Value {
			t.Errorf("%s: %q gained %d, want %d of %d", what, one.Key, found[one.Key], one.Value, total)
		}
	}

	if !slices.IsSortedFunc(got, func(a, b counter.Gained) int { return int(b.Value - a.Value) }) {
		t.Errorf("%s: the list %v is not in order", what, got)
	}

	// Several keys may have the same gain, so only the gain of the last one is compared.
	few, err := tops.Top(t.Context(), topRule, last, 3)
	if err != nil || len(few) != 3 || few[2].Value < want[2].Value {
		t.Errorf("%s: %v, %v, want %v", what, few, err, want[:3])
	}
}

// TestTopKeepsTheGreatest: a counter gains a million early in a long step, and later little or nothing. It leads the
// list as long as the window includes that time, however short the finest step is kept.
func TestTopKeepsTheGreatest(t *testing.T) {
	for _, buckets := range []string{`"1s:10s","1m:1h"`, `"10s:10m","1h:30d"`, `"1s:10s","10s:1m","1m:1h"`} {
		t.Run(buckets, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rules, err := counter.ParseRules(
					[]byte(`{"rules":[{"match":"v:*","kind":"sum","buckets":[` + buckets + `],"top":true}]}`))
				if err != nil {
					t.Fatal(err)
				}

				rule := rules.All()[0]
				tops := track(countertest.InMemory(t, nil), rules)
				defer tops.Close()
				long := rule.Resolutions[len(rule.Resolutions)-1]

				gainUnder(t, tops, rule, "v:a", 1_000_000)
				// Three long steps: the million is in the running step, in the one that has just ended, and then in an
				// older one.
				for range 30 {
					time.Sleep(long.Step / 10)
					gainUnder(t, tops, rule, "v:b", 1)
					top, err := tops.Top(t.Context(), rule, 10*long.Step, 10)
					if err != nil || len(top) != 2 || top[0] != (counter.Gained{Key: "v:a", Value: 1_000_000}) {
						t.Fatalf("Top = %v, %v; want v:a first with 1,000,000", top, err)
					}
				}
			})
		})
	}
}

// topFaults is a store whose calls for top lists may fail. It counts marks.
type topFaults struct {
	counter.Store
	marks              atomic.Int64
	noMarks, noKeeping atomic.Bool
}

func (s *topFaults) Mark(ctx context.Context, match string, number int64, keys []string) error {
	if s.noMarks.Load() {
		return counter.ErrUnavailable
	}

	s.marks.Add(int64(len(keys)))
	return s.Store.Mark(ctx, match, number, keys)
}

func (s *topFaults) KeepTop(
	ctx context.Context, match string, step time.Duration, list counter.TopList, kept time.Duration, marks []string,
) error {
	if s.noKeeping.Load() {
		return counter.ErrUnavailable
	}
	return s.Store.KeepTop(ctx, match, step, list, kept, marks)
}

// TestTopMarks: an acknowledged change is marked, even if the acknowledgement is a replay. A counter is marked once per
// step, and of many counters with small gains only a few are.
func TestTopMarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &topFaults{Store: countertest.InMemory(t, nil)}
		tops := track(store, topRules)
		defer tops.Close()
		other := track(store, topRules)
		defer other.Close()

		expect := func(want ...counter.Gained) {
			t.Helper()
			for _, tops := range []tracked{tops, other} {
				got, err := tops.Top(t.Context(), topRule, 30*time.Minute, len(want))
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%v, %v, want %v", got, err, want)
				}
			}
		}

		// A change whose mark fails is made, but not acknowledged. Its repetition is marked.
		op := counter.Op{
			Changes: []counter.Change{
				{Key: "v:a", Rule: topRule, Verb: counter.Add, Delta: 1000},
			}, IdempotencyKey: counter.NewIdempotencyKey("v:a", "", "1"),
		}

		// Without its mark, a change must not be acknowledged.
		store.noMarks.Store(true)
		if r := tops.Apply(t.Context(), []counter.Op{op})[0]; !errors.Is(r.Err, counter.ErrUnavailable) {
			t.Fatalf("a change whose counter cannot be marked is answered %+v, want ErrUnavailable", r)
		}
		store.noMarks.Store(false)
		if r := other.Apply(t.Context(), []counter.Op{op})[0]; r.Err != nil || !r.Replay {
			t.Fatalf("the repetition is answered %+v, want a replay", r)
		}

		expect(counter.Gained{Key: "v:a", Value: 1000})

		for range 10 {
			gain(t, tops, "v:a", 1)
			gain(t, tops, "v:a", -1)
			gainUnder(t, tops, topRules.All()[1], "w:1", 1)
		}
		if n := store.marks.Load(); n != 2 { // one by each process
			t.Errorf("%d marks, want 2", n)
		}

		time.Sleep(time.Minute)
		gain(t, tops, "v:a", 1)
		if n := store.marks.Load(); n != 3 {
			t.Errorf("%d marks after a minute, want 3", n)
		}

		gain(t, tops, "v:b", 100_000)
		for n := range 20_000 {
			gain(t, tops, fmt.Sprint("v:", n%10_000), 1)
		}

		expect(counter.Gained{Key: "v:b", Value: 100_000}, counter.Gained{Key: "v:a", Value: 1001})
		if n := store.marks.Load(); n != 4 {
			t.Errorf("%d marks, want 4, since the others gained less than a thousandth", n)
		}
	})
}

// TestTopMarksAgain: a mark that the store loses, for instance in a failover, is made again within a minute, however
// long the step is.
func TestTopMarksAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rules, err := counter.ParseRules(
			[]byte(`{"rules":[{"match":"v:*","kind":"sum","buckets":["1d:30d"],"top":true}]}`))
		if err != nil {
			t.Fatal(err)
		}

		rule := rules.All()[0]
		store := countertest.InMemory(t, nil)
		tops := track(store, rules)
		defer tops.Close()

		gainUnder(t, tops, rule, "v:a", 10)
		marked, err := store.Marked(t.Context(), rule.Match)
		for number, keys := range marked { // the store loses the marks
			none := counter.TopList{Number: number}
			if err := store.KeepTop(t.Context(), rule.Match, 24*time.Hour, none, time.Hour, keys); err != nil {
				t.Fatal(err)
			}
		}

		// A process notes which counters it has marked, and would otherwise not mark this one again for a day.
		time.Sleep(time.Minute)
		gainUnder(t, tops, rule, "v:a", 10)
		got, err1 := tops.Top(t.Context(), rule, 24*time.Hour, 10)
		want := []counter.Gained{{Key: "v:a", Value: 20}}
		if err := errors.Join(err, err1); len(marked) == 0 || err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
	})
}

// TestTopIsClosedLate: lists that could not be made for a while are in the answers as soon as they are made.
func TestTopIsClosedLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &topFaults{Store: countertest.InMemory(t, nil)}
		store.noKeeping.Store(true)
		tops := track(store, topRules)
		defer tops.Close()
		other := track(store, topRules)

		defer other.Close()

		want := []counter.Gained{{Key: "v:a", Value: 30}, {Key: "v:b", Value: 20}}
		expect := func() {
			t.Helper()
			for _, tops := range []tracked{tops, other} {
				got, err := tops.Top(t.Context(), topRule, 55*time.Minute, 10)
				if err != nil || !slices.Equal(got, want) {
					t.Errorf("%v, %v, want %v", got, err, want)
				}
			}
		}

		gain(t, tops, "v:a", 30)
		gain(t, tops, "v:b", 20)

		// Forty minutes cannot be closed. Until they can, each answer has to be made from the marks.
		for range 40 {
			time.Sleep(time.Minute)
			expect()
		}

		// The lists of all missed minutes are closed.
		store.noKeeping.Store(false)
		time.Sleep(2 * time.Minute)
		if marked, err := store.Marked(t.Context(), "v:*"); err != nil || len(marked) != 0 {
			t.Fatalf("the steps %v are not closed, want none; %v", marked, err)
		}
		expect()
	})
}

// Under the same rules every site has its own lists.
func TestTopOfSites(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		shop := presence.SiteOf("shop")
		rules := topRules.For([]presence.Site{presence.DefaultSite, shop})
		tops := track(countertest.InMemory(t, nil), rules)
		defer tops.Close()

		for _, of := range []struct {
			key string
			n   int64
		}{{"v:1", 1}, {"v:2", 2}, {shop.Qualify("v:1"), 30}, {shop.Qualify("v:3"), 40}} {
			gainUnder(t, tops, rules.Find(of.key), of.key, of.n)
		}

		for minutes := range 3 { // the time bucket is running, and later has ended
			for site, want := range map[presence.Site][]counter.Gained{
				presence.DefaultSite: {{Key: "v:2", Value: 2}, {Key: "v:1", Value: 1}},
				shop:                 {{Key: shop.Qualify("v:3"), Value: 40}, {Key: shop.Qualify("v:1"), Value: 30}},
			} {
				rule, err := rules.In(site).TopRule("v:*")
				if err != nil || rule.Written() != "v:*" {
					t.Fatal(rule, err)
				}
				if got, err := tops.Top(t.Context(), rule, time.Hour, 10); err != nil || !slices.Equal(got, want) {
					t.Errorf("after %d minutes on %s: %v, %v, want %v", minutes, site.Name(), got, err, want)
				}
			}

			time.Sleep(time.Minute + 10*time.Second)
		}
	})
}

// A site that the settings do not name has the rules as they are written.
func TestRulesOfSites(t *testing.T) {
	shop, other := presence.SiteOf("shop"), presence.SiteOf("other")
	rules := counter.BuiltinRules().For([]presence.Site{shop})

	for key, match := range map[string]string{"views:1": "views:*", "x": "*"} {
		for _, site := range []presence.Site{presence.DefaultSite, shop, other} {
			rule := rules.Find(site.Qualify(key))
			if rule == nil || rule.Written() != match || rule != rules.In(site).Find(key) {
				t.Errorf("%q of the site %s has the rule %+v", key, site.Name(), rule)
			}
		}
	}

	if a, b := rules.Find("views:1"), rules.Find(shop.Qualify("views:1")); a == b || a.Match == b.Match {
		t.Error("two sites share a rule, and so a list")
	}

	if n := len(rules.All()); n != 2*len(counter.BuiltinRules().All()) {
		t.Errorf("there are %d rules, want those of both sites", n)
	}
}

func TestTopRules(t *testing.T) {
	for match, ok := range map[string]bool{"v:*": true, "w:*": false, "v:1": false, "*": false, "": false} {
		if rule, err := topRules.TopRule(match); (err == nil) != ok || ok && rule != topRule {
			t.Errorf("TopRule(%q) = %v, %v; want it accepted: %t", match, rule, err, ok)
		}
	}
}
