// Package storetest is the contract of a store of counters, as tests. Every
// store runs all of it.
package storetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/presence"
)

// Instance is an empty store under test.
type Instance struct {
	Store counter.Store
	// Peer is the same store as another process sees it; nil when only one process
	// can open it.
	Peer counter.Store
	// Crash ends Store as kill -9 would and returns what is there after a start. It
	// is nil only for a store that promises to live as long as its process.
	Crash func(t testing.TB) counter.Store
	// Cut takes away what the store needs (its disk, its server) until heal. It is
	// nil only for a store that needs nothing.
	Cut func(t testing.TB) (heal func())
}

// Factory returns an empty store, cleaned up with the test.
type Factory func(t testing.TB) Instance

// Rules of the tests.
var (
	sum = &counter.Rule{Match: "s:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, Stale: time.Second, Dimensions: []string{"country", "os"},
		Buckets: []counter.Bucket{{Step: time.Second, Kept: time.Hour}, {Step: time.Minute, Kept: 24 * time.Hour}, {Step: time.Hour, Kept: 90 * 24 * time.Hour}}}
	exact   = &counter.Rule{Match: "e:*", Kind: counter.Exact, Ledger: counter.DefaultLedger}
	stock   = &counter.Rule{Match: "k:*", Kind: counter.Exact, Floor: number(0), Ceiling: number(100), Ledger: counter.DefaultLedger}
	members = &counter.Rule{Match: "m:*", Kind: counter.Members, Ledger: counter.DefaultLedger}
)

func number(n int64) *int64 { return &n }

// Run tests the contract, or only these parts of it.
func Run(t *testing.T, open Factory, only ...string) {
	parts := map[string]func(*testing.T, Instance){
		"never touched":                neverTouched,
		"numbers move":                 numbers,
		"64 bits are kept to the last": wide,
		"versions and times":           versions,
		"bounds":                       bounds,
		"a bound that comes later":     laterBound,
		"overflows":                    overflows,
		"an operation of many changes is all or none":  batches,
		"changes of one operation are judged in order": ordered,
		"one refused operation does not stop the rest": refusedAlone,
		"members":                                     sets,
		"many members and changes at once":            large,
		"uniques":                                     uniques,
		"a unique with many members":                  manyUniques,
		"members of a unique at the same time":        concurrentUniques,
		"unions":                                      unions,
		"histories add up":                            historiesAddUp,
		"a unique knows whom it saw in which step":    seenInSteps,
		"dimensions":                                  dimensions,
		"marks of what gained most":                   tops,
		"more values than are kept":                   manyValues,
		"dimensions at the same time add up":          concurrentDimensions,
		"reset":                                       resets,
		"adjust":                                      adjustments,
		"ledger":                                      ledgers,
		"ledger in pages":                             ledgerPages,
		"a kind is kept":                              kinds,
		"a merged change":                             merged,
		"an identity is made once":                    identities,
		"one identity at the same time":               identityRace,
		"delete":                                      deletes,
		"reads of several keys":                       reads,
		"keys are compared byte by byte":              bytewise,
		"aggregates":                                  aggregates,
		"sets are listed":                             listed,
		"an aggregate is of one moment":               aggregateMoment,
		"a peer reads what was acknowledged":          peers,
		"a watcher hears what it follows":             watch,
		"a watcher hears members":                     watchMembers,
		"a watcher hears a delete once":               watchDelete,
		"a slow watcher hears the newest":             watchSlow,
		"64 clients fight for the last 10":            fight,
		"changes at the same time add up":             concurrent,
		"members at the same time add up":             concurrentSets,
		"what no caller may ask for":                  badOps,
		"a crash loses nothing that was acknowledged": crash,
		"a store that is away":                        away,
		"any history ends with the model's counters":  model,
		"a closed store is unavailable, and says so":  closed,
		"limits":                         limits,
		"limits end as the model's":      limitModel,
		"limits come back":               limitReturns,
		"64 clients fight for 100":       limitFight,
		"limits outlive a crash":         limitCrash,
		"limits of a store that is away": limitAway,
	}
	if only == nil {
		only = slices.Collect(maps.Keys(parts))
	}
	for _, name := range only {
		t.Run(name, func(t *testing.T) { parts[name](t, open(t)) })
	}
}

func add(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}
}

func adjust(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Adjust, Delta: delta, Reason: "bots \"x\" \\ ü", By: "ops"}
}

func reset(rule *counter.Rule, key string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Reset, Reason: "a new year", By: "me"}
}

func edit(key string, join, leave []string) counter.Change {
	return counter.Change{Key: key, Rule: members, Verb: counter.Edit, Join: join, Leave: leave}
}

func drop(rule *counter.Rule, key string) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Delete}
}

func op(changes ...counter.Change) counter.Op { return counter.Op{Changes: changes} }

// apply makes one op of changes, which must succeed.
func apply(t testing.TB, s counter.Writer, changes ...counter.Change) []counter.Counter {
	t.Helper()
	r := do(t, s, op(changes...))[0]
	if r.Err != nil || r.Replay || len(r.Counters) != len(changes) {
		t.Fatalf("Apply(%+v) = %+v", changes, r)
	}
	return r.Counters
}

func one(t testing.TB, s counter.Writer, c counter.Change) counter.Counter {
	t.Helper()
	return apply(t, s, c)[0]
}

func do(t testing.TB, s counter.Writer, ops ...counter.Op) []counter.Result {
	t.Helper()
	results := s.Apply(t.Context(), ops)
	if len(results) != len(ops) {
		t.Fatalf("%d results of %d ops", len(results), len(ops))
	}
	for i, r := range results {
		if r.Err == nil && len(r.Counters) != len(ops[i].Changes) || r.Err != nil && (r.Counters != nil || r.Replay) {
			t.Fatalf("op %d: %+v", i, r)
		}
		for j, c := range r.Counters {
			if c.Key != ops[i].Changes[j].Key || c.Kind == 0 {
				t.Fatalf("op %d, change %d: %+v", i, j, c)
			}
		}
	}
	return results
}

// refused makes one op, which must be a conflict of the kind is, with the key and its value.
func refused(t testing.TB, s counter.Writer, is error, key string, value int64, changes ...counter.Change) {
	t.Helper()
	conflict(t, do(t, s, op(changes...))[0].Err, is, key, value)
}

func conflict(t testing.TB, err, is error, key string, value int64) {
	t.Helper()
	var c *counter.Conflict
	if !errors.As(err, &c) || !errors.Is(err, is) || c.Key != key || c.Value != value || c.Text == "" {
		t.Fatalf("got %+v, want a conflict %q of %q with value %d", err, is, key, value)
	}
}

func read(t testing.TB, s counter.Reader, key string) counter.Counter {
	t.Helper()
	return readAll(t, s, "", key)[0].Counter
}

func readAll(t testing.TB, s counter.Reader, member string, keys ...string) []counter.Reading {
	t.Helper()
	out, err := s.Read(t.Context(), keys, member, 0)
	if err != nil || len(out) != len(keys) {
		t.Fatalf("Read(%q) = %v, %v", keys, out, err)
	}
	for i := range out {
		if c := out[i].Counter; c.Key != keys[i] || c.Approx || c.Stale {
			t.Fatalf("an exact Read of %q: %+v", keys[i], c)
		}
	}
	return out
}

func value(t testing.TB, s counter.Reader, key string, want int64) counter.Counter {
	t.Helper()
	c := read(t, s, key)
	if c.Value != want {
		t.Fatalf("%q is %d, want %d", key, c.Value, want)
	}
	return c
}

// unchanged runs f, after which key must be as before, to the last entry.
func unchanged(t testing.TB, s counter.Store, key string, f func()) {
	t.Helper()
	before, entries := read(t, s, key), allEntries(t, s, key)
	f()
	if after := read(t, s, key); !same(after, before) {
		t.Fatalf("%q was %+v, is %+v", key, before, after)
	}
	if n := len(allEntries(t, s, key)); n != len(entries) {
		t.Fatalf("the ledger of %q had %d entries, has %d", key, len(entries), n)
	}
}

func same(a, b counter.Counter) bool {
	ok := a.Updated.Equal(b.Updated)
	a.Updated, b.Updated = time.Time{}, time.Time{}
	return ok && a == b
}

// allEntries is the whole ledger, which must have no gaps.
func allEntries(t testing.TB, s counter.Reader, key string) []counter.Entry {
	t.Helper()
	var all []counter.Entry
	for after := uint64(0); ; {
		page, err := s.Ledger(t.Context(), key, after, counter.MaxLedger)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.Entries {
			if e.Seq != after+1 || e.Before+e.Delta != e.After || e.At.IsZero() || e.Op.String() == "" {
				t.Fatalf("the ledger of %q after %d: %+v", key, after, e)
			}
			after = e.Seq
		}
		all = append(all, page.Entries...)
		if !page.More {
			return all
		}
		if len(page.Entries) == 0 {
			t.Fatal("more entries, and none came")
		}
	}
}

// chained says that an exact counter's ledger leads from 0 to its value.
func chained(t testing.TB, s counter.Reader, key string) []counter.Entry {
	t.Helper()
	all, at := allEntries(t, s, key), int64(0)
	for _, e := range all {
		if e.Before != at {
			t.Fatalf("the ledger of %q: entry %d begins at %d, the one before ends at %d", key, e.Seq, e.Before, at)
		}
		at = e.After
	}
	value(t, s, key, at)
	return all
}

func neverTouched(t *testing.T, i Instance) {
	if c := read(t, i.Store, "s:1"); c != (counter.Counter{Key: "s:1"}) {
		t.Errorf("%+v", c)
	}
	if n := len(allEntries(t, i.Store, "s:1")); n != 0 {
		t.Errorf("%d entries", n)
	}
	// What changes nothing makes no counter.
	for _, c := range []counter.Change{reset(sum, "s:1"), edit("m:1", nil, []string{"a"}), drop(sum, "s:1"), reset(members, "m:1")} {
		if got := one(t, i.Store, c); got.Touched() || got.Value != 0 || got.Kind != c.Rule.Kind || !got.Updated.IsZero() {
			t.Errorf("%+v: %+v", c, got)
		}
	}
	refused(t, i.Store, counter.ErrBound, "k:1", 0, add(stock, "k:1", -1))
	for _, key := range []string{"s:1", "m:1", "k:1"} {
		if c := read(t, i.Store, key); c != (counter.Counter{Key: key}) {
			t.Errorf("%+v", c)
		}
	}
	if a, err := i.Store.Aggregate(t.Context(), ""); err != nil || a != (counter.Aggregate{}) {
		t.Errorf("Aggregate = %+v, %v", a, err)
	}
}

func numbers(t *testing.T, i Instance) {
	for _, r := range []*counter.Rule{sum, exact} {
		key := r.Match[:2] + "n"
		for _, step := range []struct{ delta, want int64 }{{1, 1}, {5, 6}, {-6, 0}, {-7, -7}, {counter.MaxDelta, counter.MaxDelta - 7}} {
			c := one(t, i.Store, add(r, key, step.delta))
			if c.Value != step.want || c.Kind != r.Kind {
				t.Fatalf("%+v after %+d, want %d", c, step.delta, step.want)
			}
			if got := read(t, i.Store, key); !same(got, c) {
				t.Fatalf("answered %+v, read %+v", c, got)
			}
		}
	}
}

// wide finds stores that count in floating point.
func wide(t *testing.T, i Instance) {
	for _, r := range []*counter.Rule{sum, exact} {
		key := r.Match[:2] + "w"
		one(t, i.Store, adjust(r, key, 1<<53))
		if c := one(t, i.Store, add(r, key, 1)); c.Value != 1<<53+1 {
			t.Fatalf("2^53 + 1 = %d", c.Value)
		}
		one(t, i.Store, adjust(r, key, math.MaxInt64-(1<<53)-2))
		if c := one(t, i.Store, add(r, key, 1)); c.Value != math.MaxInt64 {
			t.Fatalf("got %d", c.Value)
		}
		value(t, i.Store, key, math.MaxInt64)
		one(t, i.Store, adjust(r, key, -math.MaxInt64))
		if c := one(t, i.Store, adjust(r, key, math.MinInt64)); c.Value != math.MinInt64 {
			t.Fatalf("got %d", c.Value)
		}
		value(t, i.Store, key, math.MinInt64)
		if all := chained2(t, i.Store, key, r); all[len(all)-1].Delta != math.MinInt64 {
			t.Fatalf("%+v", all[len(all)-1])
		}
	}
	limits := &counter.Rule{Match: "l", Kind: counter.Exact, Floor: number(-(1<<53 + 1)), Ceiling: number(1<<53 + 1)}
	one(t, i.Store, adjust(limits, "l", 1<<53+1))
	refused(t, i.Store, counter.ErrBound, "l", 1<<53+1, add(limits, "l", 1))
	one(t, i.Store, adjust(limits, "l", -2*(1<<53+1)))
	refused(t, i.Store, counter.ErrBound, "l", -(1<<53 + 1), add(limits, "l", -1))
}

// chained2 is chained for kinds whose ledger has every change. For other kinds it only
// returns the entries.
func chained2(t testing.TB, s counter.Reader, key string, r *counter.Rule) []counter.Entry {
	t.Helper()
	if r.Kind == counter.Exact {
		return chained(t, s, key)
	}
	return allEntries(t, s, key)
}

func versions(t *testing.T, i Instance) {
	began := time.Now().Add(-2 * time.Minute) // the clock of a server may differ a little
	var last counter.Counter
	for n, c := range []counter.Change{
		add(sum, "s:v", 1), add(sum, "s:v", -1), adjust(sum, "s:v", 5), reset(sum, "s:v"), add(sum, "s:v", 1),
	} {
		got := one(t, i.Store, c)
		if got.Version.Compare(last.Version) <= 0 || got.Version.Incarnation == 0 || n > 0 && got.Version.Incarnation != last.Version.Incarnation {
			t.Fatalf("version %s after %s", got.Version, last.Version)
		}
		if got.Updated.Before(began) || got.Updated.After(time.Now().Add(2*time.Minute)) || got.Updated.Before(last.Updated.Truncate(time.Second)) {
			t.Fatalf("updated at %s", got.Updated)
		}
		last = got
	}
	last = one(t, i.Store, edit("m:v", []string{"a"}, nil))
	for _, step := range []struct {
		join, leave []string
		moves       bool
	}{
		{[]string{"a"}, nil, false}, {nil, []string{"b"}, false}, {[]string{"b"}, []string{"a"}, true}, // who is in it changed
		{[]string{"b"}, []string{"a"}, false}, {nil, []string{"b"}, true},
	} {
		got := one(t, i.Store, edit("m:v", step.join, step.leave))
		if moved := got.Version.Compare(last.Version) > 0; moved != step.moves || !moved && !same(got, last) {
			t.Fatalf("%+v: %+v after %+v", step, got, last)
		}
		last = got
	}
	for _, r := range []*counter.Rule{sum, members} {
		key := r.Match[:2] + "v"
		one(t, i.Store, reset(r, key))
		unchanged(t, i.Store, key, func() { one(t, i.Store, reset(r, key)) })
	}
}

func bounds(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(stock, "k:b", 10))
	unchanged(t, s, "k:b", func() {
		refused(t, s, counter.ErrBound, "k:b", 10, add(stock, "k:b", -11))
		refused(t, s, counter.ErrBound, "k:b", 10, add(stock, "k:b", 91))
		refused(t, s, counter.ErrBound, "k:b", 10, adjust(stock, "k:b", -11))
		refused(t, s, counter.ErrBound, "k:b", 10, adjust(stock, "k:b", math.MinInt64))
	})
	one(t, s, add(stock, "k:b", 90))
	refused(t, s, counter.ErrBound, "k:b", 100, add(stock, "k:b", 1))
	one(t, s, add(stock, "k:b", -100))
	refused(t, s, counter.ErrBound, "k:b", 0, add(stock, "k:b", -1))
	if n := len(chained(t, s, "k:b")); n != 3 {
		t.Errorf("%d entries, want 3", n)
	}
	// Only an exact counter has bounds: a sum has none.
	loose := *stock
	loose.Kind = counter.Sum
	one(t, s, add(&loose, "s:b", -1000))
}

func laterBound(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(exact, "e:l", 200))
	narrow := &counter.Rule{Match: "e:*", Kind: counter.Exact, Floor: number(-10), Ceiling: number(100)}
	refused(t, s, counter.ErrBound, "e:l", 200, add(narrow, "e:l", 1))
	one(t, s, add(narrow, "e:l", -1)) // towards the bound, though not within it
	one(t, s, add(exact, "e:l", -399))
	one(t, s, add(narrow, "e:l", 1))
	refused(t, s, counter.ErrBound, "e:l", -199, add(narrow, "e:l", -1))
	chained(t, s, "e:l")
}

func overflows(t *testing.T, i Instance) {
	s := i.Store
	for _, r := range []*counter.Rule{sum, exact} {
		key := r.Match[:2] + "o"
		one(t, s, adjust(r, key, math.MaxInt64))
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, add(r, key, 1))
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, adjust(r, key, math.MaxInt64))
			refused(t, s, counter.ErrOverflow, key, math.MaxInt64, add(r, "z", 1), add(r, key, -1), add(r, key, 2))
		})
		one(t, s, adjust(r, key, math.MinInt64))
		one(t, s, adjust(r, key, -math.MaxInt64))
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrOverflow, key, math.MinInt64, add(r, key, -1))
		})
		value(t, s, "z", 0)
	}
}

func batches(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(stock, "k:1", 5))
	got := apply(t, s, add(sum, "s:1", 2), add(stock, "k:1", -3), add(sum, "s:1", 3), add(exact, "e:1", -7))
	for j, want := range []int64{5, 2, 5, -7} { // as they are after the whole
		if got[j].Value != want {
			t.Errorf("change %d: %d, want %d", j, got[j].Value, want)
		}
	}
	for _, key := range []string{"s:1", "k:1", "e:1", "s:new"} {
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrBound, "k:1", 2, add(sum, "s:new", 1), add(sum, "s:1", 1), add(exact, "e:1", 1), add(stock, "k:1", -2), add(stock, "k:1", -1), add(sum, "s:1", 1))
			refused(t, s, counter.ErrKind, "m:1", 0, add(sum, "s:1", 1), add(members, "m:1", 1))
		})
	}
	// The first change at fault is named.
	refused(t, s, counter.ErrBound, "k:2", 0, add(sum, "s:1", 1), add(stock, "k:2", -1), add(stock, "k:1", -9))
	chained(t, s, "k:1")
	chained(t, s, "e:1")
}

func ordered(t *testing.T, i Instance) {
	s := i.Store
	refused(t, s, counter.ErrBound, "k:1", 0, add(stock, "k:1", -1), add(stock, "k:1", 1))
	if c := apply(t, s, add(stock, "k:1", 1), add(stock, "k:1", -1)); c[0].Value != 0 || c[1].Value != 0 {
		t.Errorf("%+v", c)
	}
	if n := len(chained(t, s, "k:1")); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
	// Operations that come together are judged one after the other, too.
	r := do(t, s, op(add(stock, "k:2", -1)), op(add(stock, "k:2", 1)), op(add(stock, "k:2", -1)), op(add(stock, "k:2", -1)))
	conflict(t, r[0].Err, counter.ErrBound, "k:2", 0)
	conflict(t, r[3].Err, counter.ErrBound, "k:2", 0)
	if r[1].Err != nil || r[2].Err != nil {
		t.Errorf("%+v", r)
	}
	chained(t, s, "k:2")
}

func refusedAlone(t *testing.T, i Instance) {
	s := i.Store
	r := do(t, s,
		op(add(sum, "s:1", 1)), op(add(stock, "k:1", -1)), op(add(sum, "s:1", 2)), counter.Op{},
		op(add(members, "m:1", 1)), op(edit("m:1", []string{"a"}, nil)), op(add(sum, "s:2", 3), add(stock, "k:1", 101)), op(add(sum, "s:2", 1)))
	for j, bad := range []error{nil, counter.ErrBound, nil, counter.ErrOp, counter.ErrKind, nil, counter.ErrBound, nil} {
		if !errors.Is(r[j].Err, bad) || bad == nil && r[j].Err != nil {
			t.Errorf("op %d: %v, want %v", j, r[j].Err, bad)
		}
	}
	value(t, s, "s:1", 3)
	value(t, s, "s:2", 1)
	value(t, s, "k:1", 0)
	value(t, s, "m:1", 1)
}

func sets(t *testing.T, i Instance) {
	s := i.Store
	for _, step := range []struct {
		join, leave []string
		want        int64
	}{
		{[]string{"a"}, nil, 1}, {[]string{"a"}, nil, 1}, {[]string{"b", "c"}, []string{"a"}, 2}, {nil, []string{"a", "x"}, 2},
		{[]string{"a b", "ü", "A"}, []string{"b"}, 4}, {nil, []string{"a"}, 4}, {nil, []string{"a b", "ü", "A", "c"}, 0}, {[]string{"a"}, nil, 1},
	} {
		if c := one(t, s, edit("m:1", step.join, step.leave)); c.Value != step.want || c.Kind != counter.Members {
			t.Fatalf("%+v: %+v", step, c)
		}
		for m, in := range map[bool][]string{true: step.join, false: step.leave} {
			for _, member := range in {
				if got := readAll(t, s, member, "m:1", "m:2"); got[0].Mine != m || got[1].Mine {
					t.Fatalf("%q: %+v", member, got)
				}
			}
		}
	}
	// The sets of other keys are separate.
	one(t, s, edit("m:1\u0301", []string{"z"}, nil))
	if got := readAll(t, s, "z", "m:1", "m:1\u0301"); got[0].Mine || !got[1].Mine {
		t.Fatalf("%+v", got)
	}
	if n := len(allEntries(t, s, "m:1")); n != 0 {
		t.Errorf("%d entries: members are in no ledger", n)
	}
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
		changes = append(changes, add(exact, "e:"+strconv.Itoa(n%700), int64(n+1)))
	}
	apply(t, s, changes...)
	changes[999] = add(stock, "k:1", -1)
	refused(t, s, counter.ErrBound, "k:1", 0, changes...)
	var total int64
	for n := range 700 {
		want := int64(n + 1)
		if n < 300 {
			want += int64(n + 701)
		}
		total += want
		if n%100 == 0 {
			value(t, s, "e:"+strconv.Itoa(n), want)
			chained(t, s, "e:"+strconv.Itoa(n))
		}
	}
	if a, err := s.Aggregate(t.Context(), "e:"); err != nil || a != (counter.Aggregate{Counters: 700, Value: total}) {
		t.Fatalf("Aggregate = %+v, %v, want 700, %d", a, err, total)
	}
}

func resets(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(sum, "s:1", -4))
	one(t, s, add(stock, "k:1", 7))
	one(t, s, edit("m:1", []string{"a", "b"}, nil))
	for key, before := range map[string]int64{"s:1": -4, "k:1": 7, "m:1": 2} {
		rule := map[string]*counter.Rule{"s:1": sum, "k:1": stock, "m:1": members}[key]
		last := read(t, s, key)
		c := one(t, s, reset(rule, key))
		if c.Value != 0 || c.Version.Compare(last.Version) <= 0 || c.Version.Incarnation != last.Version.Incarnation {
			t.Errorf("%+v after %+v", c, last)
		}
		all := allEntries(t, s, key)
		e := all[len(all)-1]
		if e.Op != counter.LedgerReset || e.Before != before || e.After != 0 || e.Reason != "a new year" || e.By != "me" {
			t.Errorf("%q: %+v", key, e)
		}
	}
	if got := readAll(t, s, "a", "m:1"); got[0].Mine {
		t.Error("a is a member after the reset")
	}
	if c := one(t, s, edit("m:1", []string{"b"}, nil)); c.Value != 1 {
		t.Errorf("%+v", c)
	}
	chained(t, s, "k:1")
}

func adjustments(t *testing.T, i Instance) {
	s := i.Store
	for _, r := range []*counter.Rule{sum, stock} {
		key := r.Match[:2] + "a"
		one(t, s, add(r, key, 50))
		if c := one(t, s, adjust(r, key, -30)); c.Value != 20 {
			t.Fatal(c)
		}
		all := allEntries(t, s, key)
		e := all[len(all)-1]
		if e.Op != counter.LedgerAdjust || e.Delta != -30 || e.Before != 50 || e.Reason != "bots \"x\" \\ ü" || e.By != "ops" {
			t.Errorf("%+v", e)
		}
		if want := map[*counter.Rule]int{sum: 1, stock: 2}[r]; len(all) != want {
			t.Errorf("%d entries, want %d", len(all), want)
		}
	}
}

func ledgers(t *testing.T, i Instance) {
	s := i.Store
	// Operations that come together have one entry each.
	var ops []counter.Op
	for n := range 20 {
		ops = append(ops, op(add(exact, "e:1", int64(n%2*2-1))), op(add(sum, "s:1", 1)))
	}
	do(t, s, ops...)
	one(t, s, reset(exact, "e:1")) // of 0: no entry
	apply(t, s, add(exact, "e:1", 5), add(exact, "e:1", -2), add(exact, "e:2", 1))
	one(t, s, reset(exact, "e:1"))
	one(t, s, adjust(exact, "e:1", 9))
	all := chained(t, s, "e:1")
	if len(all) != 24 {
		t.Fatalf("%d entries, want 24", len(all))
	}
	for n, want := range []counter.LedgerOp{20: counter.LedgerIncrement, 21: counter.LedgerDecrement, 22: counter.LedgerReset, 23: counter.LedgerAdjust} {
		if n < 20 {
			want = []counter.LedgerOp{counter.LedgerDecrement, counter.LedgerIncrement}[n%2]
		}
		if all[n].Op != want || (all[n].Reason != "") != (n >= 22) || (all[n].By != "") != (n >= 22) {
			t.Errorf("entry %d: %+v, want %s", n+1, all[n], want)
		}
		if at := all[n].At; at.Before(time.Now().Add(-5*time.Minute)) || at.After(time.Now().Add(5*time.Minute)) {
			t.Errorf("entry %d at %s", n+1, at)
		}
	}
	if n := len(allEntries(t, s, "s:1")); n != 0 {
		t.Errorf("%d entries of a sum", n)
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
		{0, 1, 1, 1, true}, {249, 1, 250, 1, false}, {250, 1, 0, 0, false}, {251, 1000, 0, 0, false}, {math.MaxInt64, 10, 0, 0, false}, {math.MaxUint64, 10, 0, 0, false}, {0, 1000, 1, 250, false},
	} {
		page, err := i.Store.Ledger(t.Context(), "e:1", tc.after, tc.limit)
		if err != nil || len(page.Entries) != tc.n || page.More != tc.more || tc.n > 0 && page.Entries[0].Seq != tc.first {
			t.Errorf("after %d, %d: %d entries, more %v, %v", tc.after, tc.limit, len(page.Entries), page.More, err)
		}
	}
}

func kinds(t *testing.T, i Instance) {
	s := i.Store
	one(t, s, add(sum, "s:1", 3))
	one(t, s, edit("m:1", []string{"a"}, nil))
	one(t, s, add(exact, "e:1", 3))
	for _, key := range []string{"s:1", "m:1", "e:1"} {
		unchanged(t, s, key, func() {
			refused(t, s, counter.ErrKind, "m:1", 1, add(members, "m:1", 1))
			refused(t, s, counter.ErrKind, "m:1", 1, adjust(members, "m:1", 1))
			refused(t, s, counter.ErrKind, "m:1", 1, add(sum, "m:1", 1)) // whatever the rule says now
			e := edit("s:1", []string{"a"}, nil)
			refused(t, s, counter.ErrKind, "s:1", 3, e)
			e.Key = "e:1"
			refused(t, s, counter.ErrKind, "e:1", 3, e)
			e.Key, e.Rule = "e:9", exact
			refused(t, s, counter.ErrKind, "e:9", 0, e)
			refused(t, s, counter.ErrKind, "u:1", 0, add(unique, "u:1", 1))
		})
	}
	// The counter keeps the kind that it was made with.
	if c := one(t, s, add(sum, "e:1", 1)); c.Kind != counter.Exact {
		t.Errorf("%+v", c)
	}
	if c := one(t, s, add(stock, "s:1", 1000)); c.Kind != counter.Sum { // a sum has no ceiling
		t.Errorf("%+v", c)
	}
	if c := one(t, s, edit("m:1", []string{"b"}, nil)); c.Kind != counter.Members {
		t.Errorf("%+v", c)
	}
	if n := len(chained(t, s, "e:1")); n != 2 {
		t.Errorf("%d entries", n)
	}
	if n := len(allEntries(t, s, "s:1")); n != 0 {
		t.Errorf("%d entries", n)
	}
	// That holds until it is deleted.
	one(t, s, drop(sum, "m:1"))
	if c := one(t, s, add(sum, "m:1", 1)); c.Kind != counter.Sum || c.Value != 1 {
		t.Errorf("%+v", c)
	}
}

func merged(t *testing.T, i Instance) {
	c := add(sum, "s:1", 3*counter.MaxDelta) // three of them may be more than one
	c.Merged = 3
	if got := one(t, i.Store, c); got.Value != 3*counter.MaxDelta {
		t.Errorf("%+v", got)
	}
	one(t, i.Store, add(exact, "e:1", 1))
	c.Key = "e:1"
	unchanged(t, i.Store, "e:1", func() { refused(t, i.Store, counter.ErrKind, "e:1", 1, c) })
}

func with(key string, o counter.Op) counter.Op {
	o.Identity = counter.IdentityOf("space", "", key)
	return o
}

func identities(t *testing.T, i Instance) {
	s := i.Store
	replay := func(o counter.Op, want int64) {
		t.Helper()
		r := do(t, s, o)[0]
		if r.Err != nil || !r.Replay || r.Counters[0].Value != want {
			t.Fatalf("%+v, want a replay with %d", r, want)
		}
	}
	fresh := func(o counter.Op, want int64) {
		t.Helper()
		r := do(t, s, o)[0]
		if r.Err != nil || r.Replay || r.Counters[0].Value != want {
			t.Fatalf("%+v, want %d, new", r, want)
		}
	}
	fresh(with("1", op(add(sum, "s:1", 5))), 5)
	unchanged(t, s, "s:1", func() { replay(with("1", op(add(sum, "s:1", 5))), 5) })
	one(t, s, add(sum, "s:1", 1))
	replay(with("1", op(add(sum, "s:1", 700))), 6) // bodies are not compared; the counter is as it is
	fresh(with("2", op(add(sum, "s:1", 5))), 11)
	if counter.IdentityOf("s:1", "", "1") == counter.IdentityOf("s:2", "", "1") || counter.IdentityOf("a", "b", "c") == counter.IdentityOf("a", "", "bc") {
		t.Fatal("two identities are the same")
	}
	// An operation that was refused is not remembered.
	refused := with("3", op(add(stock, "k:1", -1)))
	conflict(t, do(t, s, refused)[0].Err, counter.ErrBound, "k:1", 0)
	one(t, s, add(stock, "k:1", 2))
	fresh(refused, 1)
	replay(refused, 1)
	if n := len(chained(t, s, "k:1")); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
	// Of two that come together, one makes the change.
	r := do(t, s, with("4", op(add(sum, "s:2", 1))), with("4", op(add(sum, "s:2", 1))), op(add(sum, "s:2", 1)))
	if r[0].Replay || !r[1].Replay || r[2].Replay {
		t.Errorf("%+v", r)
	}
	value(t, s, "s:2", 2)
	// The same for batches, sets and resets, and for operations that changed nothing.
	batch := with("5", op(add(sum, "s:3", 1), add(exact, "e:3", 2), add(sum, "s:3", 1)))
	fresh(batch, 2)
	replay(batch, 2)
	if n := len(chained(t, s, "e:3")); n != 1 {
		t.Errorf("%d entries, want 1", n)
	}
	fresh(with("6", op(edit("m:1", []string{"a", "b"}, nil))), 2)
	one(t, s, edit("m:1", nil, []string{"a"}))
	replay(with("6", op(edit("m:1", []string{"a", "b"}, nil))), 1)
	fresh(with("7", op(reset(sum, "s:4"))), 0)
	one(t, s, add(sum, "s:4", 4))
	replay(with("7", op(reset(sum, "s:4"))), 4)
	// The identity outlives the counter.
	one(t, s, drop(sum, "s:1"))
	replay(with("1", op(add(sum, "s:1", 5))), 0)
	if c := read(t, s, "s:1"); c.Touched() {
		t.Errorf("%+v", c)
	}
	// A replay checks nothing else.
	replay(with("1", op(add(members, "m:1", 5))), 1)
}

func identityRace(t *testing.T, i Instance) {
	const clients, rounds = 16, 20
	for round := range rounds {
		var made atomic.Int64
		var wg sync.WaitGroup
		for range clients {
			wg.Go(func() {
				r := i.Store.Apply(t.Context(), []counter.Op{with(strconv.Itoa(round), op(add(exact, "e:1", 1)))})[0]
				if r.Err != nil {
					t.Error(r.Err)
				} else if !r.Replay {
					made.Add(1)
				} else if r.Counters[0].Value < int64(round+1) {
					t.Errorf("a replay that does not see what it repeats: %+v", r)
				}
			})
		}
		wg.Wait()
		if made.Load() != 1 {
			t.Fatalf("made %d times", made.Load())
		}
	}
	value(t, i.Store, "e:1", rounds)
	chained(t, i.Store, "e:1")
}

func deletes(t *testing.T, i Instance) {
	s := i.Store
	for _, c := range []counter.Change{add(sum, "s:1", 5), add(exact, "e:1", 5), edit("m:1", []string{"a", "b"}, nil)} {
		var last counter.Version
		for range 5 {
			if c.Verb == counter.Add {
				one(t, s, adjust(c.Rule, c.Key, 1))
			}
			made := one(t, s, c)
			if made.Version.Incarnation <= last.Incarnation {
				t.Fatalf("incarnation %d after %d", made.Version.Incarnation, last.Incarnation)
			}
			last = made.Version
			if got := one(t, s, drop(c.Rule, c.Key)); got.Touched() || got.Value != 0 || !got.Updated.IsZero() {
				t.Fatalf("%+v", got)
			}
			one(t, s, drop(c.Rule, c.Key)) // repeatable
			if got := readAll(t, s, "a", c.Key)[0]; got != (counter.Reading{Counter: counter.Counter{Key: c.Key}}) {
				t.Fatalf("%+v", got)
			}
			if n := len(allEntries(t, s, c.Key)); n != 0 {
				t.Fatalf("%d entries are left", n)
			}
		}
	}
	// Its members are gone, also for those who come later; the ledger begins with 1
	// again.
	one(t, s, edit("m:1", []string{"c"}, nil))
	if got := readAll(t, s, "a", "m:1"); got[0].Mine || got[0].Value != 1 {
		t.Errorf("%+v", got)
	}
	one(t, s, add(exact, "e:1", 2))
	if n := len(chained(t, s, "e:1")); n != 1 {
		t.Errorf("%d entries", n)
	}
	if a, err := s.Aggregate(t.Context(), "s:"); err != nil || a.Counters != 0 {
		t.Errorf("%+v, %v", a, err)
	}
	// The same in one step with what comes before and after.
	r := do(t, s, op(add(exact, "e:2", 1)), op(drop(exact, "e:2")), op(add(exact, "e:2", 7)), op(drop(exact, "e:2")), op(add(exact, "e:2", 9)))
	for j := range r {
		if r[j].Err != nil {
			t.Fatal(r[j].Err)
		}
	}
	value(t, s, "e:2", 9)
	if n := len(chained(t, s, "e:2")); n != 1 {
		t.Errorf("%d entries", n)
	}
}

func reads(t *testing.T, i Instance) {
	s := i.Store
	var keys []string
	for n := range counter.MaxKeys {
		keys = append(keys, "s:"+strconv.Itoa(n))
		if n%2 == 0 {
			one(t, s, add(sum, keys[n], int64(n+1)))
		}
	}
	one(t, s, edit("m:1", []string{"me"}, nil))
	one(t, s, edit("m:2", []string{"you"}, nil))
	keys[5], keys[6], keys[7] = "m:2", "m:1", "m:3"
	for n, got := range readAll(t, s, "me", keys...) {
		want := int64(0)
		switch {
		case n == 5, n == 6:
			want = 1
		case n%2 == 0:
			want = int64(n + 1)
		}
		if got.Value != want || got.Mine != (n == 6) || got.Touched() != (want != 0) {
			t.Errorf("%+v, want %d", got, want)
		}
	}
	if got := readAll(t, s, "", "m:1"); got[0].Mine {
		t.Error("nobody is in the set")
	}
	lagging, err := s.Read(t.Context(), keys[:1], "", time.Minute)
	if err != nil || lagging[0].Key != keys[0] {
		t.Errorf("%+v, %v", lagging, err)
	}
}

func bytewise(t *testing.T, i Instance) {
	s := i.Store
	keys := []string{"s:a", "s:A", "s:ä", "s:a\u0308", "s:a ", "s:a  ", " s:a", "s:ß", "s:ss", "s:%41", "s:a%", "s:a_", "s:a\\", "s:a'", "s:a\"", "s:{a}", "s:a}", "s:😀"}
	for n, key := range keys {
		one(t, s, add(exact, key, int64(n+1)))
		one(t, s, edit("m"+key, []string{key}, nil))
	}
	for n, key := range keys {
		value(t, s, key, int64(n+1))
		if got := chained(t, s, key); len(got) != 1 {
			t.Errorf("%q has %d entries", key, len(got))
		}
		for _, other := range keys {
			if got := readAll(t, s, other, "m"+key)[0]; got.Mine != (other == key) || got.Value != 1 {
				t.Errorf("%q of %q: %+v", other, key, got)
			}
		}
	}
	one(t, s, drop(exact, "s:a"))
	for n, key := range keys[1:] {
		value(t, s, key, int64(n+2))
	}
}

func aggregates(t *testing.T, i Instance) {
	s := i.Store
	for key, delta := range map[string]int64{"s:a1": 1, "s:a2": 10, "s:b": -100, "s:a%": 1000, "s:aé": 10_000, "s:A1": 100_000, "s:a_x": 1_000_000} {
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
		if got, err := s.Aggregate(t.Context(), prefix); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", prefix, got, err, want)
		}
	}
	shop := presence.NamespaceOf("s") // the aggregates of another site have nothing to do with these
	one(t, s, add(sum, shop.Name("s:a1"), 3))
	one(t, s, add(sum, shop.Name("t"), 4))
	one(t, s, add(sum, presence.NamespaceOf("st").Name("s:a1"), 9))
	for prefix, want := range map[string]counter.Aggregate{
		"": {Counters: 10, Value: 1_110_918}, "s": {Counters: 8, Value: 1_110_911},
		shop.Name(""): {Counters: 2, Value: 7}, shop.Name("s:"): {Counters: 1, Value: 3}, shop.Name("x"): {},
	} {
		if got, err := s.Aggregate(t.Context(), prefix); err != nil || got != want {
			t.Errorf("%q: %+v, %v, want %+v", prefix, got, err, want)
		}
	}
	one(t, s, adjust(sum, "o:1", math.MaxInt64))
	one(t, s, adjust(sum, "o:2", math.MaxInt64))
	_, err := s.Aggregate(t.Context(), "o:")
	conflict(t, err, counter.ErrOverflow, "o:*", 0)
	one(t, s, adjust(sum, "o:3", math.MinInt64)) // it leaves 64 bits and comes back
	if got, err := s.Aggregate(t.Context(), "o:"); err != nil || got != (counter.Aggregate{Counters: 3, Value: math.MaxInt64 - 1}) {
		t.Errorf("%+v, %v", got, err)
	}
}

// listed finds every set, whatever else there is, and none that was deleted.
func listed(t *testing.T, i Instance) {
	s, want := i.Store, map[string]bool{}
	for n := range 30 {
		key := fmt.Sprintf("m:%d", n)
		one(t, s, edit(key, []string{"a"}, nil))
		one(t, s, add(sum, fmt.Sprintf("s:%d", n), 1))
		want[key] = true
	}
	one(t, s, drop(members, "m:7"))
	delete(want, "m:7")
	found := map[string]bool{}
	for cursor, n := "", 0; ; n++ {
		keys, next, err := s.Sets(t.Context(), cursor)
		if err != nil || n > 1000 {
			t.Fatalf("call %d: %v", n, err)
		}
		for _, key := range keys {
			if readAll(t, s, "a", key)[0].Mine {
				found[key] = true
			}
		}
		if cursor = next; cursor == "" {
			break
		}
	}
	if !maps.Equal(found, want) {
		t.Errorf("found %v, want %v", found, want)
	}
}

// aggregateMoment moves a number from key to key. However it is moved, their
// sum is what it was.
func aggregateMoment(t *testing.T, i Instance) {
	const keys = 20
	for n := range keys {
		one(t, i.Store, add(stock, fmt.Sprintf("k:%02d", n), 50))
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for g := range 3 {
		wg.Go(func() {
			for n := g; ctx.Err() == nil; n++ {
				from, to := fmt.Sprintf("k:%02d", n%keys), fmt.Sprintf("k:%02d", (n*7+3)%keys)
				r := i.Store.Apply(t.Context(), []counter.Op{op(add(stock, from, -1), add(stock, to, 1))})[0]
				if r.Err != nil && !errors.Is(r.Err, counter.ErrBound) {
					t.Error(r.Err)
					return
				}
			}
		})
	}
	for range 30 {
		got, err := i.Store.Aggregate(t.Context(), "k:")
		if err != nil || got != (counter.Aggregate{Counters: keys, Value: 50 * keys}) {
			t.Errorf("%+v, %v, want %d", got, err, 50*keys)
			break
		}
	}
	cancel()
	wg.Wait()
}

func peers(t *testing.T, i Instance) {
	peer := i.Peer
	if peer == nil {
		peer = i.Store
	}
	for n := range 50 {
		a := one(t, i.Store, add(exact, "e:1", 1))
		if b := value(t, peer, "e:1", int64(2*n+1)); !same(a, b) {
			t.Fatalf("one process has %+v, the other %+v", a, b)
		}
		one(t, peer, add(exact, "e:1", 1))
		value(t, i.Store, "e:1", int64(2*n+2))
	}
	one(t, peer, edit("m:1", []string{"a"}, nil))
	if !readAll(t, i.Store, "a", "m:1")[0].Mine {
		t.Error("a is a member")
	}
	o := with("p", op(add(exact, "e:1", 1)))
	do(t, i.Store, o)
	if r := do(t, peer, o)[0]; !r.Replay {
		t.Errorf("%+v", r)
	}
	if n := len(chained(t, peer, "e:1")); n != 101 {
		t.Errorf("%d entries", n)
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
	if c := read(t, i.Store, "s:1"); c.Touched() {
		t.Errorf("%+v", c)
	}
}

func closed(t *testing.T, i Instance) {
	one(t, i.Store, add(sum, "s:1", 1))
	if err := i.Store.Close(); err != nil {
		t.Fatal(err)
	}
	if err := do(t, i.Store, op(add(sum, "s:1", 1)))[0].Err; !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("Apply: %v", err)
	}
	if _, err := i.Store.Read(t.Context(), []string{"s:1"}, "", 0); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("Read: %v", err)
	}
	if _, err := i.Store.Ledger(t.Context(), "s:1", 0, 1); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("Ledger: %v", err)
	}
	if _, _, err := i.Store.History(t.Context(), "s:1", time.Second, 0, 1); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("History: %v", err)
	}
	if _, err := i.Store.Aggregate(t.Context(), ""); !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("Aggregate: %v", err)
	}
	if err := i.Store.Limit(t.Context(), []limit.Call{asks("k", limit.Log, 1, 1)})[0].Err; !errors.Is(err, counter.ErrUnavailable) {
		t.Errorf("Limit: %v", err)
	}
}

// AwaitServed waits until a store has noticed that all of its servers are back.
func AwaitServed(t testing.TB, s counter.Reader) {
	t.Helper()
	keys := make([]string, 64) // some on each master of a Cluster
	for n := range keys {
		keys[n] = fmt.Sprint("probe ", n)
	}
	deadline := time.Now().Add(30 * time.Second)
	for {
		_, err := s.Read(t.Context(), keys, "", 0)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
