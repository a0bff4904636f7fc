package call_test

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/counter/owner"
	"headcount/hyperloglog"
	"headcount/internal/rows/rowsmem"
)

// A history is a random sequence of operations, reads and waits. It runs on two stores: one keeps everything in memory,
// and the other encodes, forgets and reads again. Every answer must be the same. The seed decides everything.

var (
	histories    = flag.Int("histories", 300, "number of random histories")
	firstHistory = flag.Uint64("first-history", 1, "the seed of the first one")
)

func TestHistories(t *testing.T) {
	eachHistory(t, func(t *testing.T, seed uint64) { newHistory(t, seed).run() })
}

// eachHistory runs the history of each seed in a bubble, fewer with -short, until one fails.
func eachHistory(t *testing.T, run func(t *testing.T, seed uint64)) {
	t.Helper()
	n := *histories
	if testing.Short() {
		n = min(n, 60)
	}

	for i := range uint64(n) {
		seed := *firstHistory + i
		ok := t.Run(fmt.Sprint(seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { run(t, seed) })
		})
		if !ok {
			t.Fatalf("replay: go test ./counter/call -run '^%s$' -histories 1 -first-history %d", t.Name(), seed)
		}
	}
}

// historyRules has a rule for each kind, and one with bounds. A counter may also get operations of another kind than
// that of its prefix.
var historyRules = func() *counter.Rules {
	rules, err := counter.ParseRules([]byte(`{"rules":[
		{"match":"sum:*","kind":"sum","buckets":["1s:1m","1m:2h","1h:90d"],"dimensions":["country","os"],"top":true},
		{"match":"likes:*","kind":"members"},
		{"match":"seen:*","kind":"unique","buckets":["1m:2h","1h:90d"]},
		{"match":"stock:*","kind":"exact","floor":-3,"ceiling":20,"ledger":"1h"},
		{"match":"*","kind":"exact"}]}`))
	if err != nil {
		panic(err)
	}

	return rules
}()

type history struct {
	t     *testing.T
	rand  *rand.Rand
	is    counter.Store
	want  counter.Store
	many  []string // more members than one row of a set or of registers has
	steps int
}

func newHistory(t *testing.T, seed uint64) *history {
	h := &history{t: t, rand: rand.New(rand.NewPCG(seed, 0)), want: inMemory(t, historyRules), steps: 60}
	for i := range 400 {
		h.many = append(h.many, fmt.Sprint("member ", i))
	}

	// Some histories sweep often: an answer must not depend on whether expired rows are still there.
	sweep := time.Hour
	if h.rand.IntN(10) == 0 {
		sweep = time.Minute
	}
	switch seed % 2 {
	case 0: // a memory so small that the owner forgets all the time
		cfg := owner.Config{Name: "only", VerifyEvery: -1, SweepEvery: sweep, Memory: 4 << 10}
		h.is = openedOver(t, rowsmem.New(rowsmem.Config{}), historyRules, cfg)
	default:
		cfg := owner.Config{Name: "only", SweepEvery: sweep, VerifyEvery: time.Hour}
		h.is = calledBy(t, rowsmem.New(rowsmem.Config{}), historyRules, cfg)
	}

	return h
}

func (h *history) run() {
	for range h.steps {
		switch n := h.rand.IntN(20); {
		case n < 10:
			h.apply()
		case n < 12:
			h.limit()
		case n < 13:
			h.top()
		case n < 15:
			time.Sleep(h.pause())
		default:
			h.read()
		}
	}

	// A history may end before it has read what its last operations have broken.
	for _, key := range h.keys() {
		h.readKey(key)
	}
}

// pause returns a time to wait: none, or long enough for much to expire.
func (h *history) pause() time.Duration {
	most := []int{5_000, 5_000, 120_000, 120_000, 2 * 3_600_000, 26 * 3_600_000}[h.rand.IntN(6)]

	return time.Duration(1+h.rand.IntN(most)) * time.Millisecond
}

// same compares the answers of the two stores.
func (h *history) same(what string, is, want any) {
	h.t.Helper()
	if !reflect.DeepEqual(is, want) {
		h.t.Fatalf("%s:\n is   %+v\n want %+v", what, is, want)
	}
}

// fault returns the part of an error that both stores must have in common.
func fault(err error) any {
	// Clients see what a conflict says. Of other errors only their kind matters, and the two stores word them
	// differently.
	var conflict *counter.Conflict
	if errors.As(err, &conflict) {
		return *conflict
	}

	return err != nil
}

// plain returns a counter without its incarnation, which differs: in one of the stores it is an epoch.
func plain(c counter.Counter) counter.Counter {
	c.Version.Incarnation = min(c.Version.Incarnation, 1)
	c.Updated = c.Updated.UTC()

	return c
}

func plainAll(all []counter.Counter) []counter.Counter {
	all = slices.Clone(all)
	for i := range all {
		all[i] = plain(all[i])
	}

	return all
}

func pick[T any](h *history, from ...T) T { return from[h.rand.IntN(len(from))] }

func (h *history) keys() []string {
	return []string{
		"sum:a", "sum:b", "sum:c", "likes:a", "likes:b", "seen:a", "seen:b", "stock:a", "stock:b", "other:a", "other:b",
	}
}

func (h *history) key() string { return pick(h, h.keys()...) }

// apply makes some operations in one call.
func (h *history) apply() {
	var ops []counter.Op
	for range 1 + h.rand.IntN(4) {
		ops = append(ops, h.op())
	}

	is := h.is.Apply(h.t.Context(), ops)
	want := h.want.Apply(h.t.Context(), ops)
	for i := range ops {
		what := fmt.Sprintf("op %d of %+v", i, ops)
		h.same(what, fault(is[i].Err), fault(want[i].Err))
		h.same(what, is[i].Replay, want[i].Replay)
		if len(ops) == 1 { // the answer to several may have what they lead to together
			h.same(what, plainAll(is[i].Counters), plainAll(want[i].Counters))
		}
	}
}

func (h *history) op() counter.Op {
	var op counter.Op
	key := h.key()
	space := key
	switch h.rand.IntN(8) {
	case 0, 1:
		op.Changes = h.batch()
		space = "*"
	case 2:
		op.Changes = []counter.Change{h.of(key, counter.Change{Verb: counter.Reset, Reason: "anew", By: "ops"})}
	case 3:
		op.Changes = []counter.Change{h.of(key, counter.Change{Verb: pick(h, counter.Delete, counter.Add), Delta: 1})}
	case 4:
		value := pick(h, 0, 7, 30, math.MaxInt64, h.rand.Int64())
		op.Changes = []counter.Change{h.of(key, counter.Change{Verb: counter.Set, Delta: value, Reason: "x", By: "y"})}
	case 5:
		delta := pick(h, 5, -5, math.MaxInt64-3, math.MinInt64+3, h.rand.Int64())
		op.Changes = []counter.Change{
			h.of(key, counter.Change{Verb: counter.Adjust, Delta: delta, Reason: "x", By: "y"}),
		}
	case 6:
		op.Changes = []counter.Change{h.edit(key)}
	default:
		op.Changes = []counter.Change{h.add(key)}
	}

	if h.rand.IntN(3) == 0 {
		op.IdempotencyKey = counter.NewIdempotencyKey(space, "", fmt.Sprint(h.rand.IntN(6)))
	}

	return op
}

// of completes a change with a rule for the key: its own, or now and then one of another kind that is stored in the
// same place.
func (h *history) of(key string, c counter.Change) counter.Change {
	c.Key = key
	c.Rule = historyRules.Find(key)
	if c.Rule.Kind != counter.Exact && h.rand.IntN(6) == 0 {
		c.Rule = historyRules.Find(pick(h, "sum:a", "likes:a", "seen:a"))
	}

	return c
}

func (h *history) add(key string) counter.Change {
	c := h.of(key, counter.Change{Verb: counter.Add, Delta: pick[int64](h, 1, 2, -1, 9, -9, counter.MaxDelta)})
	if c.Rule.Kind == counter.Sum {
		for _, name := range c.Rule.Dimensions[:h.rand.IntN(3)] {
			c.Dimensions = append(c.Dimensions,
				counter.Dimension{Name: name, Value: pick(h, "x", "X", "a:b", "ü \x00")})
		}
	}

	return c
}

// batch returns additions, either of exact counters alone or of none.
func (h *history) batch() (changes []counter.Change) {
	keys := pick(h, []string{"sum:a", "sum:b", "sum:c", "likes:a"}, []string{"stock:a", "stock:b", "other:a"})
	for range 1 + h.rand.IntN(6) {
		changes = append(changes, h.add(pick(h, keys...)))
	}

	return changes
}

func (h *history) edit(key string) counter.Change {
	c := counter.Change{Verb: counter.Edit}
	if h.rand.IntN(4) == 0 { // many at once
		from := h.rand.IntN(len(h.many))
		c.Join = h.many[from:]
		c.Leave = h.many[:h.rand.IntN(from+1)]
	} else {
		some := []string{"a", "A", "ä", "a\u0308", "{a}"}
		h.rand.Shuffle(len(some), func(i, j int) { some[i], some[j] = some[j], some[i] })
		n := h.rand.IntN(len(some))
		c.Join = some[:n]
		c.Leave = some[n:]
	}

	if h.rand.IntN(2) == 0 && len(c.Join) > 0 {
		c.Leave = nil
	}

	return h.of(key, c)
}

// limit asks some limits.
func (h *history) limit() {
	var calls []limit.Request
	for range 1 + h.rand.IntN(4) {
		name := limit.Name{Key: pick(h, "a", "b", "sum:a"), Algorithm: pick(h, limit.Fixed, limit.Sliding, limit.Log)}
		name.Window = pick[int64](h, 1000, 60_000, 7_200_000)
		calls = append(calls, limit.Request{Name: name, Limit: 10, Cost: 1 + h.rand.Int64N(5)})
	}

	is := h.is.Limit(h.t.Context(), calls)
	want := h.want.Limit(h.t.Context(), calls)
	h.same(fmt.Sprintf("%+v", calls), is, want)
}

// top marks candidates of a top list, ends a step, and reads both.
func (h *history) top() {
	ctx := h.t.Context()
	match := pick(h, "sum:*", "other")
	number := time.Now().Unix() - h.rand.Int64N(3)
	keys := []string{h.key(), "never"}
	list := counter.TopList{Number: number, Most: []counter.Gained{{Key: h.key(), Value: h.rand.Int64N(9)}}}
	closes := h.rand.IntN(2) == 0

	for _, s := range []counter.Store{h.is, h.want} {
		if err := s.Mark(ctx, match, number, keys); err != nil {
			h.t.Fatal(err)
		}
		if closes {
			if err := s.KeepTop(ctx, match, time.Second, list, time.Minute, keys[:1]); err != nil {
				h.t.Fatal(err)
			}
		}
	}

	h.same("marks", h.marked(h.is, match), h.marked(h.want, match))
	h.same("lists", h.lists(h.is, match), h.lists(h.want, match))
}

func (h *history) marked(s counter.Store, match string) map[int64][]string {
	marked, err := s.Marked(h.t.Context(), match)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, keys := range marked {
		slices.Sort(keys)
	}

	return marked
}

// lists returns the lists that are kept.
func (h *history) lists(s counter.Store, match string) []counter.TopList {
	now := time.Now()
	lists, err := s.TopLists(h.t.Context(), match, time.Second, now.Unix()-100, now.Unix()+1)
	if err != nil {
		h.t.Fatal(err)
	}
	lists = slices.DeleteFunc(lists, func(l counter.TopList) bool {
		return !counter.ForgetAt(l.Number, time.Second, time.Minute).After(now)
	})
	slices.SortFunc(lists, func(a, b counter.TopList) int { return int(a.Number - b.Number) })

	return append([]counter.TopList{}, lists...)
}

// read reads something of both stores.
func (h *history) read() {
	ctx := h.t.Context()
	switch h.rand.IntN(4) {
	case 0:
		prefix := pick(h, "sum:", "seen:", "stock:", "likes:a", "", "s")
		is, errIs := h.is.Aggregate(ctx, prefix)
		want, errWant := h.want.Aggregate(ctx, prefix)
		h.same("aggregate of "+prefix, is, want)
		h.same("aggregate of "+prefix, fault(errIs), fault(errWant))

		size, _ := h.is.Size(ctx, prefix)
		wantSize, _ := h.want.Size(ctx, prefix)
		h.same("size of "+prefix, size, wantSize)

	case 1:
		is, _, _ := h.is.Sets(ctx, "")
		want, _, _ := h.want.Sets(ctx, "")
		slices.Sort(is)
		slices.Sort(want)
		h.same("sets", is, want)

	case 2:
		is, _ := h.is.Running(ctx, h.keys(), time.Minute)
		want, _ := h.want.Running(ctx, h.keys(), time.Minute)
		h.same("running", is, want)

	default:
		h.readKey(h.key())
	}
}

// readKey reads everything about one counter.
func (h *history) readKey(key string) {
	ctx := h.t.Context()
	for _, member := range []string{"", "a", "member 7", "member 390"} {
		is, errIs := h.is.Read(ctx, []string{key}, member, 0)
		want, errWant := h.want.Read(ctx, []string{key}, member, 0)
		is[0].Counter = plain(is[0].Counter)
		want[0].Counter = plain(want[0].Counter)
		h.same(key+" and "+member, is, want)
		h.same(key, errIs, errWant)
	}

	h.same("ledger of "+key, h.ledger(h.is, key), h.ledger(h.want, key))
	for _, name := range []string{"country", "os"} {
		_, is, errIs := h.is.Dimension(ctx, key, name)
		_, want, errWant := h.want.Dimension(ctx, key, name)
		h.same(name+" of "+key, len(is.Values), len(want.Values))
		for value, n := range want.Values {
			h.same(name+" of "+key+": "+value, is.Values[value], n)
		}

		h.same(name+" of "+key, is.Other, want.Other)
		h.same(name+" of "+key, errIs, errWant)
	}

	for _, step := range []time.Duration{time.Second, time.Minute, time.Hour} {
		h.same(fmt.Sprint(step, " of ", key), h.gains(h.is, key, step), h.gains(h.want, key, step))
	}
}

// ledger returns the entries of a counter that must exist under every rule.
func (h *history) ledger(s counter.Store, key string) []counter.Entry {
	page, err := s.Ledger(h.t.Context(), key, 0, counter.MaxLedger)
	if err != nil {
		h.t.Fatal(err)
	}

	// An expired entry is there until the next sweep, which the two stores make at different times.
	kept := historyRules.Find(key).Ledger
	entries := slices.DeleteFunc(page.Entries, func(e counter.Entry) bool { return !e.At.Add(kept).After(time.Now()) })
	for i := range entries {
		entries[i].At = entries[i].At.UTC()
	}

	return append([]counter.Entry{}, entries...)
}

// gains returns what a counter gained in each step that is kept; for a unique, the estimates.
func (h *history) gains(s counter.Store, key string, step time.Duration) map[int64]int64 {
	_, gains, err := s.History(h.t.Context(), key, step, 0, math.MaxUint32)
	if err != nil {
		h.t.Fatal(err)
	}

	// How long a time bucket is kept depends on the rule it was made under. All rules agree for buckets of one length.
	kept := map[time.Duration]time.Duration{
		time.Second: time.Minute,
		time.Minute: 2 * time.Hour,
		time.Hour:   90 * 24 * time.Hour,
	}

	all := map[int64]int64{}
	for _, gain := range gains {
		if !counter.ForgetAt(gain.Number, step, kept[step]).After(time.Now()) {
			continue
		}
		all[gain.Number] = gain.Value
		if gain.Seen != nil {
			var union hyperloglog.Union
			union.Merge(*gain.Seen)
			all[gain.Number] = union.Count()
		}
	}

	return all
}
