// Package countertest tests the contract of a store of counters. The store in memory and the one on a single Redis pass
// all of it, and every other set-up the parts in which it can differ.
package countertest

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/internal/testkit"
	"headcount/presence"
)

// Instance is an empty store under test.
type Instance struct {
	Store counter.Store
	// Peer is the same store, opened by another process. It is nil if only one process can open the store.
	Peer counter.Store
	// Crash ends Store like kill -9 and returns the store after a restart. It is nil only for a store whose data live
	// no longer than its process.
	Crash func(t testing.TB) counter.Store
	// Cut makes the store's disk or server unavailable until heal. It is nil only for a store that needs neither.
	Cut func(t testing.TB) (heal func())
}

// peer returns the store as another process has it, if there is one.
func (i Instance) peer() counter.Store {
	if i.Peer != nil {
		return i.Peer
	}
	return i.Store
}

// Factory returns an empty store, cleaned up with the test.
type Factory func(t testing.TB) Instance

// Rules of the tests.
var (
	sum = &counter.Rule{Match: "s:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, MaxAge: time.Second,
		Dimensions: []string{"country", "os"},
		Resolutions: []counter.Resolution{
			{Step: time.Second, Kept: time.Hour}, {Step: time.Minute, Kept: 24 * time.Hour},
			{Step: time.Hour, Kept: 90 * 24 * time.Hour},
		}}
	exact = &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
	stock = &counter.Rule{
		Match: "k:*", Kind: counter.Exact, Floor: number(0), Ceiling: number(100), Ledger: counter.DefaultLedger,
	}
	members = &counter.Rule{Match: "m:*", Kind: counter.Members, Ledger: counter.DefaultLedger}
)

// Rules are the rules for stores that place a counter by its kind. They agree with the rules in the tests' changes.
var Rules = func() *counter.Rules {
	rules, err := counter.ParseRules([]byte(`{"rules":[{"match":"e:*","kind":"exact"},{"match":"k:*",` +
		`"kind":"exact"},{"match":"exact *","kind":"exact"},{"match":"l","kind":"exact"},{"match":"*","kind":"sum"}]}`))
	if err != nil {
		panic(err)
	}
	others := rules.Find("s:1")
	others.Resolutions = sum.Resolutions
	others.Dimensions = sum.Dimensions

	return rules
}()

func number(n int64) *int64 { return &n }

// part is one test of the contract.
type part struct {
	name   string
	test   func(*testing.T, Instance)
	atOnce bool // it waits for nothing: neither for time nor for updates or restarts
}

// parts has all tests. The model covers operations one after the other. The other parts cover the rest: bounds of
// numbers and sizes, concurrent clients, crashes, and updates.
var parts = []part{
	{"any history ends with the model's counters", model, false},
	{"64 bits are kept to the last", wide, true},
	{"many members and changes at once", large, true},
	{"a unique with many members", manyUniques, true},
	{"steps of time add up", histories, false},
	{"marks of what gained most", tops, false},
	{"more values than are kept", manyValues, true},
	{"ledger in pages", ledgerPages, true},
	{"a merged change", merged, true},
	{"reservations", reservations, true},
	{"reservations in pages", manyReservations, true},
	{"reservations expire", expiring, false},
	{"free, reserved and committed add up", holdings, false},
	{"aggregates", aggregates, false},
	{"sets are listed", listed, true},
	{"a watcher hears what it follows", watch, false},
	{"a watcher hears members", watchMembers, false},
	{"a watcher hears a delete once", watchDelete, false},
	{"a slow watcher hears the newest", watchSlow, false},
	{"64 clients fight for the last 10", fight, false},
	{"changes at the same time add up", concurrent, false},
	{"what no caller may ask for", badOps, true},
	{"a store that is away", away, false},
	{"a closed store is unavailable, and says so", closed, true},
	{"limits end as the model's", limitModel, false},
	{"limits come back", limitReturns, false},
	{"limits are looked at, given back and forgotten", limitForgotten, false},
	{"64 clients fight for 100", limitFight, false},
}

// Run tests the whole contract of a store on a server.
func Run(t *testing.T, open Factory) { onServer(t, parts, open) }

// onServer tests parts in real time. Those that wait for nothing are one test, whose log names each part: they take
// milliseconds, and cannot fail because the machine is busy.
func onServer(t *testing.T, some []part, open Factory) {
	var atOnce []part
	for _, p := range some {
		if p.atOnce {
			atOnce = append(atOnce, p)
			continue
		}
		t.Run(p.name, func(t *testing.T) { p.test(t, open(t)) })
	}
	if len(atOnce) == 0 {
		return
	}

	t.Run("what waits for nothing", func(t *testing.T) {
		for _, p := range atOnce {
			t.Log(p.name)
			testkit.Part(t, func(of testing.TB) { p.test(t, open(of)) })
		}
	})
}

// RunInBubble tests the whole contract of a store within the process, with the clock of synctest.
func RunInBubble(t *testing.T, open Factory) {
	for _, p := range parts {
		t.Run(p.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { p.test(t, open(t)) })
		})
	}
}

// Parts has parts of the contract, by name, with the reason why a set-up of a store can differ in each from a store
// that passes the whole contract.
type Parts map[string]string

// RunParts tests parts of the contract, with fewer histories of the model.
func RunParts(t *testing.T, some Parts, open Factory) {
	FewHistories(t)

	var named []part
	for _, p := range parts {
		if some[p.name] != "" {
			named = append(named, p)
		}
	}

	// A mistyped name would leave its part out.
	if len(named) != len(some) {
		t.Errorf("%d parts of %v are parts of the contract", len(named), some)
	}
	onServer(t, named, open)
}

// FewChecks is the number of random histories of the model for a set-up that tests only parts. A package with several
// such set-ups sets rapid.checks to it before its tests.
const FewChecks = 20

// FewHistories sets rapid.checks to FewChecks until the test ends.
func FewHistories(t testing.TB) {
	t.Helper()

	checks := flag.Lookup("rapid.checks")
	if all := checks.Value.String(); all != strconv.Itoa(FewChecks) {
		setFlag(t, checks, strconv.Itoa(FewChecks))
		t.Cleanup(func() { setFlag(t, checks, all) })
	}
}

func setFlag(t testing.TB, f *flag.Flag, to string) {
	t.Helper()
	if err := f.Value.Set(to); err != nil {
		t.Fatal(err)
	}
}

// wide finds stores that compute with floats, or overflow 64 bits.
func wide(t *testing.T, i Instance) {
	s := i.Store
	for _, r := range []*counter.Rule{sum, exact} {
		key := r.Match[:2] + "w"
		other := r.Match[:2] + "z"
		// The number after 2^53 is the first that a float64 cannot hold.
		one(t, s, adjust(r, key, 1<<53))
		if c := one(t, s, add(r, key, 1)); c.Value != 1<<53+1 {
			t.Fatalf("2^53 + 1 = %d", c.Value)
		}

		one(t, s, adjust(r, key, math.MaxInt64-(1<<53)-2))
		if c := one(t, s, add(r, key, 1)); c.Value != math.MaxInt64 {
			t.Fatalf("got %d", c.Value)
		}
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, add(r, key, 1))
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, adjust(r, key, math.MaxInt64))
			// The first change of these two would pass, and must be undone.
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, add(r, key, -1), add(r, key, 2))
			if r == exact { // batches of sums are made counter by counter
				refused(t, s, counter.ErrOverflow, key, math.MaxInt64, add(r, other, 1), add(r, key, 1))
			}
		})

		one(t, s, adjust(r, key, -math.MaxInt64))
		if c := one(t, s, adjust(r, key, math.MinInt64)); c.Value != math.MinInt64 {
			t.Fatalf("got %d", c.Value)
		}
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrOverflow, key, math.MinInt64, add(r, key, -1))
			refused(t, s, counter.ErrOverflow, key, math.MinInt64, reset(r, key)) // no entry can have the delta
		})
		value(t, s, other, 0)
	}

	// No float64 holds these bounds.
	limits := &counter.Rule{Match: "l", Kind: counter.Exact, Floor: number(-(1<<53 + 1)), Ceiling: number(1<<53 + 1)}
	one(t, s, adjust(limits, "l", 1<<53+1))
	refused(t, s, counter.ErrBound, "l", 1<<53+1, add(limits, "l", 1))
	one(t, s, adjust(limits, "l", -2*(1<<53+1)))
	refused(t, s, counter.ErrBound, "l", -(1<<53 + 1), add(limits, "l", -1))
	chained(t, s, "l")

	unbounded := *stock
	unbounded.Kind = counter.Sum // a sum ignores the bounds of its rule
	one(t, s, add(&unbounded, "s:b", -1000))
}

func large(t *testing.T, i Instance) {
	s := i.Store
	var join, leave []string
	for n := range counter.MaxMembers {
		join = append(join, fmt.Sprintf("member %d of a set that is large", n))
	}
	leave = join[:counter.MaxMembers/2]

	if c := one(t, s, edit("m:1", join, nil)); c.Value != counter.MaxMembers {
		t.Fatal(c)
	}
	if c := one(t, s, edit("m:1", join[:1], leave[1:])); c.Value != counter.MaxMembers/2+1 {
		t.Fatal(c)
	}

	var changes []counter.Change
	for n := range counter.MaxChanges {
		// Some keys occur twice.
		changes = append(changes, add(exact, "e:"+strconv.Itoa(n%700), int64(n+1)))
	}
	apply(t, s, changes...)
	// If one of a thousand changes is refused, so are all.
	changes[999] = add(stock, "k:1", -1)
	refused(t, s, counter.ErrBound, "k:1", 0, changes...)

	var keys []string // of every seventh counter
	for n := range counter.MaxKeys {
		keys = append(keys, "e:"+strconv.Itoa(7*n))
	}

	is := readAll(t, s, "", keys...)
	var total int64
	for n := range 700 {
		want := int64(n + 1)
		if n < 300 {
			want += int64(n + 701)
		}
		total += want
		if n%7 == 0 && is[n/7].Value != want {
			t.Errorf("%+v, want %d", is[n/7], want)
		}
		if n%100 == 0 {
			chained(t, s, "e:"+strconv.Itoa(n))
		}
	}

	a, err := s.Aggregate(t.Context(), "e:")
	if err != nil || a != (counter.Aggregate{Counters: 700, Value: total}) {
		t.Fatalf("Aggregate = %+v, %v, want 700, %d", a, err, total)
	}
}

func ledgerPages(t *testing.T, i Instance) {
	var ops []counter.Op
	for range 250 {
		ops = append(ops, op(add(exact, "e:1", 1)))
	}
	do(t, i.Store, ops...)

	for _, tc := range []struct {
		after uint64
		limit int
		first uint64
		n     int
		more  bool
	}{
		{0, 100, 1, 100, true}, {100, 100, 101, 100, true}, {200, 100, 201, 50, false}, {150, 100, 151, 100, false},
		{0, 1, 1, 1, true}, {249, 1, 250, 1, false}, {250, 1, 0, 0, false}, {251, 1000, 0, 0, false},
		{math.MaxInt64, 10, 0, 0, false}, {math.MaxUint64, 10, 0, 0, false}, {0, 1000, 1, 250, false},
	} {
		page, err := i.Store.Ledger(t.Context(), "e:1", tc.after, tc.limit)
		isThat := err == nil && len(page.Entries) == tc.n && page.More == tc.more
		if !isThat || tc.n > 0 && page.Entries[0].Seq != tc.first {
			t.Errorf("after %d, %d: %d entries, more %v, %v", tc.after, tc.limit, len(page.Entries), page.More, err)
		}
		for _, e := range page.Entries {
			// The server may have another clock.
			if time.Since(e.At).Abs() > 5*time.Minute {
				t.Errorf("entry %d at %s", e.Seq, e.At)
			}
		}
	}
}

func merged(t *testing.T, i Instance) {
	c := add(sum, "s:1", 3*counter.MaxDelta) // together, merged changes may be more than MaxDelta
	c.Merged = 3
	if got := one(t, i.Store, c); got.Value != 3*counter.MaxDelta {
		t.Errorf("%+v", got)
	}

	one(t, i.Store, add(exact, "e:1", 1))
	c.Key = "e:1"
	unchanged(t, i.Store, "e:1", func() { refused(t, i.Store, counter.ErrKind, "e:1", 1, c) })
}

func with(key string, o counter.Op) counter.Op {
	o.IdempotencyKey = counter.NewIdempotencyKey("space", "", key)

	return o
}

func aggregates(t *testing.T, i Instance) {
	s := i.Store
	// In SQL % and _ are wildcards, and some collations treat a, A and é as the same letter.
	for key, delta := range map[string]int64{
		"s:a1": 1, "s:a2": 10, "s:b": -100, "s:a%": 1000, "s:aé": 10_000, "s:A1": 100_000, "s:a_x": 1_000_000,
	} {
		one(t, s, add(sum, key, delta))
	}
	one(t, s, add(exact, "e:1", 5))
	one(t, s, edit("m:1", []string{"a", "b"}, nil))
	one(t, s, add(sum, "s:a9", 7))
	one(t, s, drop(sum, "s:a9"))
	one(t, s, add(sum, "s:a0", 1))
	one(t, s, add(sum, "s:a0", -1)) // it exists, with 0

	for prefix, want := range map[string]counter.Aggregate{
		"":      {Counters: 10, Value: 1_110_918},
		"s:":    {Counters: 8, Value: 1_110_911},
		"s:a":   {Counters: 6, Value: 1_011_011},
		"s:a1":  {Counters: 1, Value: 1},
		"s:a%":  {Counters: 1, Value: 1000},
		"s:a_":  {Counters: 1, Value: 1_000_000},
		"s:A":   {Counters: 1, Value: 100_000},
		"s:aé":  {Counters: 1, Value: 10_000},
		"m":     {Counters: 1, Value: 2},
		"x":     {},
		"s:a11": {},
	} {
		got, err := s.Aggregate(t.Context(), prefix)
		if err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", prefix, got, err, want)
		}
		// A size may miss recent changes for a while.
		testkit.Eventually(t, fmt.Sprintf("the size of %q is %d", prefix, want.Counters), func() bool {
			n, err := s.Size(t.Context(), prefix)
			return err == nil && n == want.Counters
		})
	}

	// Counters of another site have aggregates of their own.
	shop := presence.SiteOf("s")
	one(t, s, add(sum, shop.Qualify("s:a1"), 3))
	one(t, s, add(sum, shop.Qualify("t"), 4))
	one(t, s, add(sum, presence.SiteOf("st").Qualify("s:a1"), 9))
	for prefix, want := range map[string]counter.Aggregate{
		"": {Counters: 10, Value: 1_110_918}, "s": {Counters: 8, Value: 1_110_911},
		shop.Qualify(""): {Counters: 2, Value: 7}, shop.Qualify("s:"): {Counters: 1, Value: 3}, shop.Qualify("x"): {},
	} {
		if got, err := s.Aggregate(t.Context(), prefix); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", prefix, got, err, want)
		}
	}

	one(t, s, adjust(sum, "o:1", math.MaxInt64))
	one(t, s, adjust(sum, "o:2", math.MaxInt64))
	_, err := s.Aggregate(t.Context(), "o:")
	conflict(t, err, counter.ErrOverflow, "o:*", 0)

	// A partial sum overflows 64 bits, but not the whole sum.
	one(t, s, adjust(sum, "o:3", math.MinInt64))
	got, err := s.Aggregate(t.Context(), "o:")
	if err != nil || got != (counter.Aggregate{Counters: 3, Value: math.MaxInt64 - 1}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// listed tests that Sets finds every set among other counters, and no deleted one.
func listed(t *testing.T, i Instance) {
	s := i.Store
	want := map[string]bool{}
	for n := range 30 {
		key := fmt.Sprintf("m:%d", n)
		one(t, s, edit(key, []string{"a"}, nil))
		one(t, s, add(sum, fmt.Sprintf("s:%d", n), 1))
		want[key] = true
	}
	one(t, s, drop(members, "m:7"))
	delete(want, "m:7")

	found := map[string]bool{}
	cursor := ""
	for n := 0; n == 0 || cursor != ""; n++ {
		keys, next, err := s.Sets(t.Context(), cursor)
		// A bound on the calls, because the cursors might never end.
		if err != nil || n > 1000 {
			t.Fatalf("call %d: %v", n, err)
		}

		for _, key := range keys {
			// Keys of other kinds may be among them.
			if readAll(t, s, "a", key)[0].Mine {
				found[key] = true
			}
		}
		cursor = next
	}
	if !maps.Equal(found, want) {
		t.Errorf("found %v, want %v", found, want)
	}
}

func badOps(t *testing.T, i Instance) {
	many := make([]counter.Change, counter.MaxChanges+1)
	for n := range many {
		many[n] = add(sum, "s:1", 1)
	}

	for name, o := range map[string]counter.Op{
		"no change":          {},
		"no rule":            op(counter.Change{Key: "s:1", Verb: counter.Add, Delta: 1}),
		"no verb":            op(counter.Change{Key: "s:1", Rule: sum, Delta: 1}),
		"a change by 0":      op(add(sum, "s:1", 0)),
		"two resets":         op(reset(sum, "s:1"), reset(sum, "s:1")),
		"too many changes":   op(many...),
		"no member":          op(edit("m:1", nil, nil)),
		"too many members":   op(edit("m:1", make([]string, 600), make([]string, 401))),
		"a verb that is not": op(counter.Change{Key: "s:1", Rule: sum, Verb: 200, Delta: 1}),
	} {
		if err := do(t, i.Store, o)[0].Err; !errors.Is(err, counter.ErrOp) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// A refused operation must not create a counter.
	if c := read(t, i.Store, "s:1"); c.Touched() {
		t.Errorf("%+v", c)
	}
}

func closed(t *testing.T, i Instance) {
	one(t, i.Store, add(sum, "s:1", 1))
	if err := i.Store.Close(); err != nil {
		t.Fatal(err)
	}

	unavailable := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, counter.ErrUnavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}

	unavailable("Apply", do(t, i.Store, op(add(sum, "s:1", 1)))[0].Err)
	_, err := i.Store.Read(t.Context(), []string{"s:1"}, "", 0)
	unavailable("Read", err)
	_, err = i.Store.Ledger(t.Context(), "s:1", 0, 1)
	unavailable("Ledger", err)
	_, _, err = i.Store.History(t.Context(), "s:1", time.Second, 0, 1)
	unavailable("History", err)
	_, err = i.Store.Aggregate(t.Context(), "")
	unavailable("Aggregate", err)
	unavailable("ForgetLimit", i.Store.ForgetLimit(t.Context(), "k"))
	unavailable("Limit", i.Store.Limit(t.Context(), []limit.Request{asks("k", limit.Log, 1, 1)})[0].Err)
}

// AwaitServed waits until a store can use all of its servers again.
func AwaitServed(t testing.TB, s counter.Reader) {
	t.Helper()
	keys := make([]string, 64) // some on each master of a Cluster
	for n := range keys {
		keys[n] = fmt.Sprint("probe ", n)
	}

	testkit.Eventually(t, "all servers are back", func() bool {
		_, err := s.Read(t.Context(), keys, "", 0)
		return err == nil
	})
}
