package simulate

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"headcount/client"
)

// The tests of this file judge answers and frames without a server. The proxies in lies_test.go tell a lie in each kind
// of answer and frame, which shows that a run judges all of them.

// finds requires that the faults are exactly those that want names.
func (f *faults) finds(t *testing.T, want ...string) {
	t.Helper()
	n, texts := f.get()
	if n != len(want) {
		t.Fatalf("%d faults, want %d: %q", n, len(want), texts)
	}

	for i := range want {
		if !strings.Contains(texts[i], want[i]) {
			t.Errorf("%q, want %q", texts[i], want[i])
		}
	}
}

func version(sequence uint64) client.Version {
	return client.Version{Incarnation: 7, Sequence: sequence}
}

func TestFramesOfCountersAreJudged(t *testing.T) {
	frame := func(value int64, sequence uint64) client.Counter {
		return client.Counter{Key: "likes:1", Kind: "members", Value: value, Version: version(sequence), Mine: true}
	}

	told := func(all ...client.Counter) []client.Counter { return all }

	for name, tc := range map[string]struct {
		told   []client.Counter // the last one is what the client holds; the true value is 3
		change func(last *client.Counter)
		want   string // empty: nothing is wrong
	}{
		"all is right":   {told(frame(0, 0), frame(3, 2)), nil, ""},
		"the same twice": {told(frame(3, 2), frame(3, 2)), nil, ""},
		"a version falls": {
			told(frame(2, 3), frame(3, 2)), nil, "went back on one connection: from 7-3",
		},
		"a version twice": {told(frame(2, 2), frame(3, 2)), nil, "version 7-2 has the values 2 and 3"},
		"an old value":    {told(frame(2, 1)), nil, "holds 2 (stale: false); the true value is 3"},
		"nothing":         {nil, nil, "a WebSocket has not received it"},
		"it stays stale": {
			told(frame(3, 2)), func(l *client.Counter) { l.Stale = true }, "holds 3 (stale: true)",
		},
		"another kind": {
			told(frame(3, 1), frame(3, 2)), func(l *client.Counter) { l.Kind = "unique" },
			"a frame that cannot be of this counter",
		},
		"below the floor": {told(frame(3, 1), frame(-1, 2)), nil, "a frame that cannot be of this counter"},
		"another's like": {
			told(frame(3, 2)), func(l *client.Counter) { l.Mine = false }, `"mine":false; the truth is true`,
		},
		"nobody asked for it": {
			told(frame(3, 1), frame(3, 2)), func(l *client.Counter) { l.Key = "likes:2" },
			"received it without a subscription",
		},
	} {
		t.Run(name, func(t *testing.T) {
			likes := newTally("members", "likes:1")
			likes.start(3)
			likes.land(3)

			all := &lastingRun{crowd: &crowd{}}
			s := &subscriber{
				run: all, tallies: map[string]*tally{likes.key: likes}, like: &membership{t: likes, in: true},
				held: map[string]client.Counter{},
			}

			for i := range tc.told {
				if tc.change != nil && i == len(tc.told)-1 {
					tc.change(&tc.told[i])
				}
				s.take(tc.told[i])
			}

			s.compare(&all.faults)

			if tc.want == "" {
				all.faults.finds(t)
			} else {
				all.faults.finds(t, tc.want)
			}
		})
	}
}

// A server that is back after a loss begins anew. A counter that was deleted last has no version.
func TestVersionsThatMayFall(t *testing.T) {
	sum := newTally("sum", "a")
	all := &lastingRun{crowd: &crowd{}}
	s := &subscriber{run: all, tallies: map[string]*tally{"a": sum}, held: map[string]client.Counter{}}
	s.take(client.Counter{Key: "a", Kind: "sum", Value: 5, Version: version(9)})

	s.begin()
	s.take(client.Counter{Key: "a", Kind: "sum", Value: 5, Version: version(8)})
	all.deleting.Store(true)
	s.take(client.Counter{Key: "a", Kind: "sum"})
	all.faults.finds(t)
}

func TestLedgersAreJudged(t *testing.T) {
	at := time.Now()
	second := client.Entry{Seq: 2, At: at, Op: "decrement", Before: 5, Delta: -2, After: 3}

	for name, tc := range map[string]struct {
		change func(e *client.Entry)
		want   string // empty: nothing is wrong
	}{
		"right":          {func(*client.Entry) {}, ""},
		"one is missing": {func(e *client.Entry) { e.Seq = 3 }, "entry 3 of its ledger follows entry 1"},
		"it begins wrongly": {
			func(e *client.Entry) { e.Before, e.After = 6, 4 }, "has 6 before; the entry before has 5 after",
		},
		"it does not add up": {func(e *client.Entry) { e.After++ }, "5 and -2 is not 4"},
		"below the floor":    {func(e *client.Entry) { e.Delta, e.After = -6, -1 }, "or is below 0"},
		"nobody signed it":   {func(e *client.Entry) { e.Op = "adjust" }, "cannot be"},
		"signed by nobody":   {func(e *client.Entry) { e.Op, e.Reason = "adjust", "a correction" }, "cannot be"},
		"an adjust":          {func(e *client.Entry) { e.Op, e.Reason, e.By = "adjust", "a correction", "me" }, ""},
		"another operation":  {func(e *client.Entry) { e.Op = "increment" }, "cannot be"},
		"unknown":            {func(e *client.Entry) { e.Op = "reset" }, "cannot be"},
		"without a time":     {func(e *client.Entry) { e.At = time.Time{} }, "has no time"},
	} {
		t.Run(name, func(t *testing.T) {
			stock := newTally("exact", "stock:1")
			all := &lastingRun{crowd: &crowd{}}
			all.checkEntry(stock, client.Entry{Seq: 1, At: at, Op: "increment", Delta: 5, After: 5})

			e := second
			tc.change(&e)
			all.checkEntry(stock, e)

			if tc.want == "" {
				all.faults.finds(t)
			} else {
				all.faults.finds(t, tc.want)
			}

			// Each fault is reported once.
			all.faults.take()
			all.checkEntry(stock, client.Entry{
				Seq: e.Seq + 1, At: at, Op: "increment", Before: e.After, Delta: 7, After: e.After + 7,
			})
			all.faults.finds(t)
		})
	}
}

// An answer may have any value that was right at some moment since the call began, but no version from before the call.
func TestAnswersAreJudged(t *testing.T) {
	for name, tc := range map[string]struct {
		value    int64
		sequence uint64
		changed  bool
		want     string // empty: nothing is wrong
	}{
		"as before":           {5, 4, false, ""},
		"with what is begun":  {7, 5, true, ""},
		"too low":             {4, 4, false, "an answer says 4; it was from 5 to 7 all the time"},
		"too high":            {8, 5, true, "an answer says 8; it was from 5 to 7 all the time"},
		"an earlier version":  {5, 3, false, "an answer has version 7-3; an earlier change had 7-4"},
		"changed, and it had": {7, 4, true, "an answer has version 7-4; an earlier change had 7-4"},
	} {
		t.Run(name, func(t *testing.T) {
			sum := newTally("sum", "a")
			sum.start(5)
			sum.land(5)
			sum.saw(version(4))
			since := sum.start(2)

			all := &lastingRun{crowd: &crowd{}}
			l := client.Counter{Key: "a", Kind: "sum", Exact: true, Value: tc.value, Version: version(tc.sequence)}
			all.bounded(sum, since, &l, tc.changed)

			if tc.want == "" {
				all.faults.finds(t)
			} else {
				all.faults.finds(t, tc.want)
			}
		})
	}
}

// Under a limit of 8 two calls with a cost of 3 pass at a time.
func TestLimitsAreJudged(t *testing.T) {
	for _, algorithm := range []string{"fixed", "sliding", "log"} {
		for name, tc := range map[string]struct {
			calls int
			pause time.Duration // between two calls
			want  string        // empty: nothing is wrong
		}{
			"as many as fit":       {2, 100 * time.Millisecond, ""},
			"one too many":         {3, 100 * time.Millisecond, ": 9 have passed in "},
			"each in its own time": {3, time.Second, ""},
		} {
			t.Run(algorithm+", "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := &quota{key: "q", algorithm: algorithm, window: time.Second}
					for range tc.calls {
						q.passed(q.send(3), time.Until(time.Now().Truncate(time.Second).Add(time.Second)))
						time.Sleep(tc.pause)
					}

					var found faults
					q.check(found.add)
					if tc.want == "" {
						found.finds(t)
					} else {
						found.finds(t, tc.want)
					}

					// A refused call shows that at most this much had passed.
					if most := q.refused(q.send(3)); most > int64(3*tc.calls) || tc.pause < time.Second && most == 0 {
						t.Errorf("at most %d had passed, and %d calls did", most, tc.calls)
					}
				})
			})
		}
	}
}

// A tab has joined /a, and watches the whole site and a page whose name is not allowed.
func TestCountsAreJudged(t *testing.T) {
	long := strings.Repeat("x", 129)
	count := func(page string, n int64, sequence uint64) client.Count {
		return client.Count{Page: page, Count: n, Version: version(sequence)}
	}
	counts := func(all ...client.Count) []client.Count { return all }

	for name, tc := range map[string]struct {
		counts []client.Count
		want   string // empty: nothing is wrong
	}{
		"all is right":    {counts(count("/a", 1, 1), count("/a", 2, 2)), ""},
		"negative":        {counts(count("/a", 1, 1), count("/a", -1, 2)), "the count -1 is negative"},
		"a version falls": {counts(count("/a", 1, 2), count("/a", 1, 1)), "the version went back from 7-2 to 7-1"},
		"not counted":     {counts(count("/a", 0, 1)), "does not include the user who joined"},
		"stale, at first": {counts(client.Count{Page: "/a", Version: version(1), Stale: true}), ""},
		"not allowed":     {counts(count(long, 1, 1)), "accepts a page that is not allowed"},
		"a page it left":  {counts(count("/b", 9, 1)), ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := &crowd{}
			l := &link{}
			one := &tab{crowd: c, link: l, joined: joining("/a"), watched: []holding{joining(long)}}
			one.joined.arrival = true
			for i := range tc.counts {
				one.count(l, &tc.counts[i])
			}

			if tc.want == "" {
				c.faults.finds(t)
			} else {
				c.faults.finds(t, tc.want)
			}
		})
	}
}

// At a checkpoint each client has the true counts, also that of the whole site, unless other users are on it.
func TestHeldCountsAreJudged(t *testing.T) {
	const site, page = `page "*": a client of x holds the count 4; the true count is 3`,
		`page "/a": a client of x holds the count 2; the true count is 1`

	for name, tc := range map[string]struct {
		onPage, onSite int64
		alone          bool
		want           []string
	}{
		"all is right":           {1, 3, true, nil},
		"the page is off":        {2, 3, true, []string{page}},
		"the site is off":        {1, 4, true, []string{site}},
		"others are on the site": {1, 4, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c := &crowd{cfg: &Command{URL: []string{"x"}}, truth: newTruth(), baseline: 2}
			c.result.SiteChecked = tc.alone
			c.truth.enter(newUser("u"), "/a")

			l := &link{}
			one := &tab{crowd: c, link: l, joined: joining("/a"), watched: []holding{{}}}
			one.watched[0].Page = wholeSite
			one.count(l, &client.Count{Page: "/a", Count: tc.onPage, Version: version(1)})
			one.count(l, &client.Count{Page: wholeSite, Count: tc.onSite, Version: version(1)})
			c.held([]*tab{one}).finds(t, tc.want...)

			one.link = nil
			c.held([]*tab{one}).finds(t, append(tc.want, "not connected or holds no count")...)
		})
	}
}
