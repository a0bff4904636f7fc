package countertest

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/counter"
	"headcount/internal/testkit"
)

// truth is the contract in its simplest form. It shares no code with a store, and its numbers have no limit.
type truth struct {
	counters map[string]*trueCounter
	ids      map[string]bool
	deleted  map[string]uint64 // by key: the highest incarnation that was deleted
}

type trueCounter struct {
	kind    counter.Kind
	value   *big.Int
	members map[string]bool // so few that even the value of a unique is their exact number
	ledger  []trueEntry
	gained  int64 // under rules with buckets, without adjustments and resets
	counted map[counter.Dimension]int64
	seen    map[string]bool // by a unique under rules with buckets, including before a reset
	changes int             // how many there were: versions must have the same order
}

type trueEntry struct {
	op            string
	before, after string
	reason, by    string
}

func (m truth) clone() truth {
	c := truth{map[string]*trueCounter{}, maps.Clone(m.ids), m.deleted}
	for k, v := range m.counters {
		one := *v
		one.value = new(big.Int).Set(v.value)
		one.members = maps.Clone(v.members)
		one.ledger = slices.Clone(v.ledger)
		one.counted = maps.Clone(v.counted)
		one.seen = maps.Clone(v.seen)
		c.counters[k] = &one
	}

	return c
}

func (m truth) get(key string, kind counter.Kind) *trueCounter {
	c := m.counters[key]
	if c != nil {
		return c
	}

	c = &trueCounter{
		kind: kind, value: new(big.Int), members: map[string]bool{},
		counted: map[counter.Dimension]int64{}, seen: map[string]bool{},
	}
	m.counters[key] = c

	return c
}

// make makes o. If o must be refused, it returns why and at which key, and m must not be used any more.
func (m truth) make(o counter.Op, id string) (replay bool, at string, why error) {
	if id != "" && m.ids[id] {
		return true, "", nil
	}

	for _, c := range o.Changes {
		if why := m.change(c); why != nil {
			return false, c.Key, why
		}
	}
	// Only now, because a refused operation leaves its idempotency key unused.
	if id != "" {
		m.ids[id] = true
	}

	return false, "", nil
}

func (m truth) change(c counter.Change) (why error) {
	if c.Verb == counter.Delete {
		delete(m.counters, c.Key)
		return nil
	}

	t := m.get(c.Key, c.Rule.Kind)
	switch c.Verb {
	case counter.Add, counter.Adjust:
		why = t.add(c)
	case counter.Set:
		why = t.set(c)
	case counter.Reset:
		why = t.reset(c)
	case counter.Edit:
		why = t.edit(c)
	}
	// A change that changes nothing does not create the counter.
	if t.changes == 0 {
		delete(m.counters, c.Key)
	}

	return why
}

// enter adds an entry to the ledger, of a change that has changed the value.
func (t *trueCounter) enter(op string, before *big.Int, c counter.Change) {
	t.ledger = append(t.ledger, trueEntry{op, before.String(), t.value.String(), c.Reason, c.By})
}

func (t *trueCounter) isSet() bool { return t.kind == counter.Members || t.kind == counter.Unique }

// bounded returns ErrBound if a change by that amount must not lead to the value to.
func (t *trueCounter) bounded(c counter.Change, by int, to int64) error {
	isLow := c.Rule.Floor != nil && by < 0 && to < *c.Rule.Floor
	isHigh := c.Rule.Ceiling != nil && by > 0 && to > *c.Rule.Ceiling
	if isLow || isHigh {
		return counter.ErrBound
	}

	return nil
}

func (t *trueCounter) add(c counter.Change) error {
	if t.isSet() {
		return counter.ErrKind
	}

	before := new(big.Int).Set(t.value)
	t.value.Add(t.value, big.NewInt(c.Delta))
	if !t.value.IsInt64() {
		return counter.ErrOverflow
	}
	if t.kind == counter.Exact {
		if why := t.bounded(c, big.NewInt(c.Delta).Sign(), t.value.Int64()); why != nil {
			return why
		}
	}

	t.changes++
	switch {
	case c.Verb == counter.Adjust:
		t.enter("adjust", before, c)
	case t.kind != counter.Exact:
	case c.Delta > 0:
		t.enter("increment", before, c)
	default:
		t.enter("decrement", before, c)
	}
	if t.kind != counter.Sum {
		return nil
	}

	for _, d := range c.Dimensions {
		t.counted[d] += c.Delta
	}
	if c.Verb == counter.Add && len(c.Rule.Resolutions) > 0 {
		t.gained += c.Delta
	}

	return nil
}

func (t *trueCounter) set(c counter.Change) error {
	if t.kind != counter.Exact {
		return counter.ErrKind
	}

	to := big.NewInt(c.Delta)
	by := new(big.Int).Sub(to, t.value)
	if !by.IsInt64() {
		return counter.ErrOverflow
	}
	// Setting the same value changes nothing, and has no entry.
	if why := t.bounded(c, by.Sign(), c.Delta); why != nil || by.Sign() == 0 {
		return why
	}

	before := new(big.Int).Set(t.value)
	t.value.Set(to)
	t.changes++
	t.enter("set", before, c)

	return nil
}

func (t *trueCounter) reset(c counter.Change) error {
	if !new(big.Int).Neg(t.value).IsInt64() { // no entry could have the delta
		return counter.ErrOverflow
	}
	if t.value.Sign() == 0 {
		return nil
	}

	before := new(big.Int).Set(t.value)
	t.value.SetInt64(0)
	clear(t.members)
	t.changes++
	t.enter("reset", before, c)

	return nil
}

func (t *trueCounter) edit(c counter.Change) error {
	isUnique := t.kind == counter.Unique
	if !t.isSet() || isUnique && len(c.Leave) > 0 {
		return counter.ErrKind
	}

	before := maps.Clone(t.members)
	for _, member := range c.Join {
		t.members[member] = true
		if isUnique && c.Rule.Kind == counter.Unique {
			t.seen[member] = true
		}
	}
	for _, member := range c.Leave {
		delete(t.members, member)
	}

	t.value.SetInt64(int64(len(t.members)))
	if !maps.Equal(before, t.members) {
		t.changes++
	}

	return nil
}

func (m truth) value(key string) int64 {
	if c := m.counters[key]; c != nil {
		return c.value.Int64()
	}

	return 0
}

// isLike reports whether c agrees with the counter in truth. t is nil if that does not exist.
func (t *trueCounter) isLike(c counter.Counter) bool {
	if t == nil {
		return !c.Touched() && c.Value == 0
	}

	return c.Touched() && c.Value == t.value.Int64() && c.Kind == t.kind
}

// seen is the last version that was read of a counter, and how often the counter had changed by then.
type seen struct {
	version counter.Version
	changes int
}

var runs atomic.Int64 // histories of this process: each has keys of its own

// modelled is a random history that is compared with truth.
type modelled struct {
	t     *testing.T
	rt    *rapid.T
	i     Instance
	s     counter.Store
	space string   // of its keys and idempotency keys
	pair  []string // names that look alike
	keys  []string
	truth truth
	last  map[string]seen // by key, of counters that were not deleted since
	lost  bool            // an operation had no answer, so nothing more is compared
}

var (
	// A store must compare keys and members byte by byte, so each history has a pair of names that look alike.
	alike = [][]string{
		{"a", "A"}, {"ä", "a\u0308"}, {"a", "a "}, {" a", "a"}, {"ß", "ss"}, {"A", "%41"}, {"a%", "a_"}, {"a'", "a\""},
		{"{a}", "a}"}, {"a\\", "😀"},
	}
	// A store must keep values of dimensions as they are. "" stands for no dimension.
	dimensionValues = []string{"", "", "x", "X", "a:b", ": # ü \\ \" % * {n1} 0\n"}

	modelVerbs = []string{
		"add", "add", "add", "edit", "edit", "see", "see", "batch", "batch", "adjust", "set", "reset", "delete",
	}
)

// modelRules returns the rules of changes. Only Rules decides where a store places a key.
func modelRules() []*counter.Rule {
	bounded := &counter.Rule{
		Match: "*", Kind: counter.Exact, Floor: number(-3), Ceiling: number(12), Ledger: counter.DefaultLedger,
	}
	// Only sums have steps and dimensions.
	idle := &counter.Rule{
		Match: "*", Kind: counter.Exact, Ledger: counter.DefaultLedger, Resolutions: sum.Resolutions,
		Dimensions: sum.Dimensions,
	}

	return []*counter.Rule{sum, exact, stock, members, unique, bounded, idle}
}

// model compares random histories with truth. They have single operations and several together, repetitions under an
// idempotency key, and crashes in between.
func model(t *testing.T, i Instance) {
	s := i.Store
	decided := 0
	rapid.Check(testkit.ForRapid(t), func(rt *rapid.T) {
		h := &modelled{
			t: t, rt: rt, i: i, s: s,
			space: fmt.Sprintf(" of run %d ", runs.Add(1)),
			pair:  rapid.SampledFrom(alike).Draw(rt, "names"),
			truth: truth{map[string]*trueCounter{}, map[string]bool{}, map[string]uint64{}},
			last:  map[string]seen{},
		}
		h.keys = []string{"any" + h.space} // by Rules, the keys that begin with "exact" are exact
		for _, kind := range []string{"sum", "exact"} {
			h.keys = append(h.keys, kind+h.space+h.pair[0], kind+h.space+h.pair[1])
		}

		rt.Repeat(map[string]func(*rapid.T){
			"apply": func(*rapid.T) { h.apply() },
			"crash": h.crash,
			"":      func(*rapid.T) { h.check() },
		})
		s = h.s // after a crash the next history uses the restarted store
		if !h.lost {
			decided++
		}
	})

	if decided == 0 && !t.Failed() {
		t.Error("in each history an operation had no answer")
	}
}

func (h *modelled) key() string { return rapid.SampledFrom(h.keys).Draw(h.rt, "key") }

// set returns the key of a counter that may be a set.
func (h *modelled) set() string { return rapid.SampledFrom(h.keys[:3]).Draw(h.rt, "key") }

func (h *modelled) ruleOf(key string) *counter.Rule {
	fits := func(rule *counter.Rule) bool {
		return strings.HasPrefix(key, "exact") == (rule.Kind == counter.Exact)
	}

	return rapid.SampledFrom(modelRules()).Filter(fits).Draw(h.rt, "rule")
}

func isNotZero(n int64) bool { return n != 0 }

// adds returns an addition, perhaps under dimensions.
func (h *modelled) adds(key string) counter.Change {
	c := add(h.ruleOf(key), key, rapid.Int64Range(-9, 9).Filter(isNotZero).Draw(h.rt, "delta"))
	for _, name := range c.Rule.Dimensions {
		value := rapid.SampledFrom(dimensionValues).Draw(h.rt, "value of "+name)
		if value != "" {
			c = under(c, name, value)
		}
	}

	return c
}

func (h *modelled) someMembers() []string {
	names := rapid.SampledFrom(append([]string{"w", "x"}, h.pair...))

	return rapid.SliceOfNDistinct(names, 1, 3, func(s string) string { return s }).Draw(h.rt, "members")
}

// draw returns an operation, and its idempotency key.
func (h *modelled) draw() (o counter.Op, id string) {
	switch rapid.SampledFrom(modelVerbs).Draw(h.rt, "verb") {
	case "add":
		o = op(h.adds(h.key()))
	case "batch":
		// A batch must have only exact counters, or none.
		of := rapid.SampledFrom([][]string{h.keys[1:3], h.keys[3:]}).Draw(h.rt, "batch")
		for range rapid.IntRange(2, 5).Draw(h.rt, "changes") {
			o.Changes = append(o.Changes, h.adds(rapid.SampledFrom(of).Draw(h.rt, "key")))
		}
	case "adjust":
		key := h.key()
		o = op(adjust(h.ruleOf(key), key, rapid.Int64().Filter(isNotZero).Draw(h.rt, "delta")))
	case "set":
		key := h.key()
		to := rapid.OneOf(rapid.Int64Range(-9, 9), rapid.Int64()).Draw(h.rt, "value")
		o = op(counter.Change{
			Key: key, Rule: h.ruleOf(key), Verb: counter.Set, Delta: to, Reason: "counted", By: "ops",
		})
	case "reset":
		key := h.key()
		o = op(reset(h.ruleOf(key), key))
	case "delete":
		key := h.key()
		o = op(drop(h.ruleOf(key), key))
	case "see":
		o = op(see(h.set(), h.someMembers()...))
	case "edit":
		all := h.someMembers()
		split := rapid.IntRange(0, len(all)).Draw(h.rt, "joining")
		o = op(edit(h.set(), all[:split], all[split:]))
		if rapid.Bool().Draw(h.rt, "under another rule") {
			o.Changes[0].Rule = h.ruleOf(o.Changes[0].Key)
		}
	}

	if rapid.IntRange(0, 2).Draw(h.rt, "idempotency key") == 0 {
		id = h.space + strconv.Itoa(rapid.IntRange(1, 6).Draw(h.rt, "key of it"))
		o.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
	}

	return o, id
}

// apply makes some operations together.
func (h *modelled) apply() {
	var ops []counter.Op
	var ids []string
	for range rapid.IntRange(1, 4).Draw(h.rt, "ops") {
		o, id := h.draw()
		ops = append(ops, o)
		ids = append(ids, id)
	}

	if h.lost {
		return
	}

	results := h.s.Apply(h.t.Context(), ops)
	// On a busy machine the server may not answer in time.
	h.lost = slices.ContainsFunc(results, func(r counter.Result) bool {
		return errors.Is(r.Err, counter.ErrUnavailable)
	})
	if h.lost {
		return
	}

	after := make([]truth, len(ops)) // truth after each op
	for j, o := range ops {
		h.compare(o, ids[j], results[j])
		after[j] = h.truth
	}

	// A counter in an answer is as after its op, or as after a later op of the same call.
	for j, r := range results {
		for k, c := range r.Counters {
			isLike := func(m truth) bool { return m.counters[c.Key].isLike(c) }
			if !slices.ContainsFunc(after[j:], isLike) {
				h.rt.Fatalf("op %d, change %d: answered %+v, after it truth was %+v", j, k, c, after[j].counters[c.Key])
			}
		}
	}
}

// compare makes an operation in truth, and compares its result.
func (h *modelled) compare(o counter.Op, id string, r counter.Result) {
	m := h.truth
	// A copy, because a refused operation leaves no trace.
	next := m.clone()
	replay, at, why := next.make(o, id)
	if why != nil {
		var c *counter.Conflict
		isThat := errors.As(r.Err, &c) && errors.Is(r.Err, why) && c.Key == at && c.Value == m.value(at)
		if !isThat {
			h.rt.Fatalf("%+v: %+v with %#v, want %v of %q with %d", o, r, c, why, at, m.value(at))
		}
		return
	}
	if r.Err != nil || r.Replay != replay || len(r.Counters) != len(o.Changes) {
		h.rt.Fatalf("%+v: %+v, want replay %v", o, r, replay)
	}

	// When a deleted counter is created again, its versions must be higher.
	for key := range m.counters {
		l, wasAnswered := h.last[key]
		if next.counters[key] == nil && wasAnswered {
			m.deleted[key] = max(m.deleted[key], l.version.Incarnation)
			delete(h.last, key)
		}
	}
	h.truth = next
}

func (h *modelled) crash(rt *rapid.T) {
	if h.i.Crash == nil || rapid.IntRange(0, 9).Draw(rt, "seldom") > 0 {
		rt.Skip()
	}
	h.s = h.i.Crash(h.t)
}

// answered reads until the server answers, which must be without an error.
func (h *modelled) answered(read func() error) {
	h.rt.Helper()
	if err := answered(h.t, read); err != nil {
		h.rt.Fatal(err)
	}
}

// check compares what can be read with truth.
func (h *modelled) check() {
	if h.lost {
		return
	}

	for _, member := range h.pair {
		var got []counter.Reading
		h.answered(func() (err error) {
			got, err = h.s.Read(h.t.Context(), h.keys, member, 0)
			return err
		})

		for _, r := range got {
			h.checkCounter(r.Counter)
			want := h.truth.counters[r.Key]
			isMine := want != nil && want.kind == counter.Members && want.members[member]
			if r.Mine != isMine {
				h.rt.Fatalf("%q in %q: %v", member, r.Key, r.Mine)
			}
		}
	}

	h.checkHistory(rapid.SampledFrom(h.keys).Draw(h.rt, "whose history"))
	for _, key := range h.keys {
		h.checkLedger(key)
	}
}

func (h *modelled) checkCounter(c counter.Counter) {
	h.rt.Helper()
	want := h.truth.counters[c.Key]
	if !want.isLike(c) {
		h.rt.Fatalf("read %+v, want %+v", c, want)
	}
	if want == nil {
		if !c.Updated.IsZero() {
			h.rt.Fatalf("read %+v, want it never touched", c)
		}
		return
	}

	if time.Since(c.Updated).Abs() > time.Hour {
		h.rt.Fatalf("read %+v", c)
	}
	if c.Version.Incarnation <= h.truth.deleted[c.Key] {
		h.rt.Fatalf("read %+v, an incarnation as high as %d was deleted", c, h.truth.deleted[c.Key])
	}

	// Versions order as changes do.
	before, wasAnswered := h.last[c.Key]
	order := c.Version.Compare(before.version)
	if wasAnswered && order != cmp.Compare(want.changes, before.changes) {
		const what = "read %+v after %d changes, version %s after %d"
		h.rt.Fatalf(what, c, want.changes, before.version, before.changes)
	}
	h.last[c.Key] = seen{c.Version, want.changes}
}

// checkHistory checks the time buckets and the dimensions of a counter.
func (h *modelled) checkHistory(key string) {
	c := h.truth.counters[key]
	if c == nil {
		c = &trueCounter{}
	}

	step := rapid.SampledFrom(sum.Resolutions).Draw(h.rt, "bucket").Step
	var gains []counter.Gain
	h.answered(func() (err error) {
		_, gains, err = h.s.History(h.t.Context(), key, step, 0, math.MaxUint32)
		return err
	})
	if total(gains) != c.gained || distinct(gains) != int64(len(c.seen)) {
		const what = "the history of %q in steps of %s: %v, want %d in all and %d distinct"
		h.rt.Fatalf(what, key, step, gains, c.gained, len(c.seen))
	}

	for _, name := range []string{"country", "os", "o"} {
		of := map[string]int64{}
		for d, n := range c.counted {
			if d.Name == name {
				of[d.Value] = n
			}
		}

		var all counter.Counted
		h.answered(func() (err error) {
			_, all, err = h.s.Dimension(h.t.Context(), key, name)
			return err
		})
		if !maps.Equal(all.Values, of) || all.Other != 0 {
			h.rt.Fatalf("%q counted %+v under %q, want %v", key, all, name, of)
		}
	}
}

func (h *modelled) checkLedger(key string) {
	var page counter.Ledger
	h.answered(func() (err error) {
		page, err = h.s.Ledger(h.t.Context(), key, 0, counter.MaxLedger)
		return err
	})

	var want []trueEntry
	if c := h.truth.counters[key]; c != nil {
		want = c.ledger
	}
	got := make([]trueEntry, 0, len(want))
	for n, e := range page.Entries {
		if e.Seq != uint64(n+1) || e.Before+e.Delta != e.After {
			h.rt.Fatalf("entry %d of %q: %+v", n+1, key, e)
		}
		got = append(got, trueEntry{e.Op.String(), fmt.Sprint(e.Before), fmt.Sprint(e.After), e.Reason, e.By})
	}
	if page.More || !slices.Equal(got, want) {
		h.rt.Fatalf("the ledger of %q: %v, want %v", key, got, want)
	}
}
