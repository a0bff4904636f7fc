package countertest

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/counter"
	"headcount/internal/testkit"
)

// truth is the contract in its plainest form. It shares nothing with a store, and its
// numbers have no limit.
type truth struct {
	counters map[string]*trueCounter
	ids      map[string]bool
	deleted  map[string]uint64 // by key: the highest incarnation that was deleted
}

type trueCounter struct {
	kind    counter.Kind
	value   *big.Int
	members map[string]bool // so few that also the value of a unique is their number
	ledger  []trueEntry
	gained  int64 // under rules with buckets, but adjustments and resets
	counted map[counter.Dimension]int64
	seen    map[string]bool // by a unique under rules with buckets, also before a reset
	changes int             // how often it changed: versions that were answered must order like this
}

type trueEntry struct {
	op            string
	before, after string
	reason, by    string
}

func (m truth) clone() truth {
	c := truth{map[string]*trueCounter{}, maps.Clone(m.ids), m.deleted}
	for k, v := range m.counters {
		c.counters[k] = &trueCounter{v.kind, new(big.Int).Set(v.value), maps.Clone(v.members), slices.Clone(v.ledger), v.gained, maps.Clone(v.counted), maps.Clone(v.seen), v.changes}
	}
	return c
}

func (m truth) get(key string, kind counter.Kind) *trueCounter {
	c := m.counters[key]
	if c == nil {
		c = &trueCounter{kind: kind, value: new(big.Int), members: map[string]bool{}, counted: map[counter.Dimension]int64{}, seen: map[string]bool{}}
		m.counters[key] = c
	}
	return c
}

// make makes o, or says why it cannot and at which key; m must not be used then.
func (m truth) make(o counter.Op, id string) (replay bool, at string, why error) {
	if id != "" && m.ids[id] {
		return true, "", nil
	}
	for _, c := range o.Changes {
		if why := m.change(c); why != nil {
			return false, c.Key, why
		}
	}
	if id != "" {
		m.ids[id] = true
	}
	return false, "", nil
}

func (m truth) change(c counter.Change) error {
	if c.Verb == counter.Delete {
		delete(m.counters, c.Key)
		return nil
	}
	t := m.get(c.Key, c.Rule.Kind)
	before := new(big.Int).Set(t.value)
	enter := func(op string) {
		t.ledger = append(t.ledger, trueEntry{op, before.String(), t.value.String(), c.Reason, c.By})
	}
	switch c.Verb {
	case counter.Add, counter.Adjust:
		if t.kind == counter.Members || t.kind == counter.Unique {
			return counter.ErrKind
		}
		t.value.Add(t.value, big.NewInt(c.Delta))
		if !t.value.IsInt64() {
			return counter.ErrOverflow
		}
		if t.kind == counter.Exact {
			if f := c.Rule.Floor; f != nil && c.Delta < 0 && t.value.Int64() < *f {
				return counter.ErrBound
			}
			if f := c.Rule.Ceiling; f != nil && c.Delta > 0 && t.value.Int64() > *f {
				return counter.ErrBound
			}
		}
		t.changes++
		for _, d := range c.Dimensions {
			if t.kind == counter.Sum {
				t.counted[d] += c.Delta
			}
		}
		if t.kind == counter.Sum && c.Verb == counter.Add && len(c.Rule.Buckets) > 0 {
			t.gained += c.Delta
		}
		switch {
		case c.Verb == counter.Adjust:
			enter("adjust")
		case t.kind == counter.Exact && c.Delta > 0:
			enter("increment")
		case t.kind == counter.Exact:
			enter("decrement")
		}
	case counter.Set:
		to := big.NewInt(c.Delta)
		by := new(big.Int).Sub(to, t.value)
		switch {
		case t.kind != counter.Exact:
			return counter.ErrKind
		case !by.IsInt64():
			return counter.ErrOverflow
		case by.Sign() < 0 && c.Rule.Floor != nil && c.Delta < *c.Rule.Floor,
			by.Sign() > 0 && c.Rule.Ceiling != nil && c.Delta > *c.Rule.Ceiling:
			return counter.ErrBound
		case by.Sign() != 0:
			t.value.Set(to)
			t.changes++
			enter("set")
		}
	case counter.Reset:
		if !new(big.Int).Neg(t.value).IsInt64() { // no entry can say what it took
			return counter.ErrOverflow
		}
		if t.value.Sign() != 0 {
			t.value.SetInt64(0)
			clear(t.members)
			t.changes++
			enter("reset")
		}
	case counter.Edit:
		if t.kind != counter.Members && (t.kind != counter.Unique || len(c.Leave) > 0) {
			return counter.ErrKind
		}
		was := maps.Clone(t.members)
		for _, member := range c.Join {
			t.members[member] = true
			if t.kind == counter.Unique && c.Rule.Kind == counter.Unique {
				t.seen[member] = true
			}
		}
		for _, member := range c.Leave {
			delete(t.members, member)
		}
		t.value.SetInt64(int64(len(t.members)))
		if !maps.Equal(was, t.members) {
			t.changes++
		}
	}
	if t.changes == 0 {
		delete(m.counters, c.Key)
	}
	return nil
}

func (m truth) value(key string) int64 {
	if c := m.counters[key]; c != nil {
		return c.value.Int64()
	}
	return 0
}

// seen lists the versions that were answered in one life of a counter, and how often the
// counter had changed by then.
type seen struct {
	version counter.Version
	changes int
}

var runs atomic.Int64 // histories of this process: each has keys of its own

// model runs random histories against truth: operations one by one and many
// together, repeated under their idempotency key, with crashes between.
func model(t *testing.T, i Instance) {
	s := i.Store
	rules := []*counter.Rule{
		sum, exact, stock, members, unique,
		{Match: "*", Kind: counter.Exact, Floor: number(-3), Ceiling: number(12), Ledger: counter.DefaultLedger},
		// Only sums have steps and dimensions.
		{Match: "*", Kind: counter.Exact, Ledger: counter.DefaultLedger, Buckets: sum.Buckets, Dimensions: sum.Dimensions},
	}
	// Keys and members are compared byte by byte, so each history has a pair of names that look alike.
	alike := [][]string{
		{"a", "A"}, {"ä", "a\u0308"}, {"a", "a "}, {" a", "a"}, {"ß", "ss"}, {"A", "%41"}, {"a%", "a_"}, {"a'", "a\""}, {"{a}", "a}"}, {"a\\", "😀"},
	}
	values := []string{"", "", "x", "X", "a:b", ": # ü \\ \" % * {n1} 0\n"} // they are taken as they are; "": none
	fits := func(key string, rule *counter.Rule) bool {
		return strings.HasPrefix(key, "exact") == (rule.Kind == counter.Exact)
	}
	rapid.Check(testkit.ForRapid(t), func(rt *rapid.T) {
		space := fmt.Sprintf(" of run %d ", runs.Add(1))
		pair := rapid.SampledFrom(alike).Draw(rt, "names")
		keys := []string{"any" + space} // Rules says which of the others are exact
		for _, kind := range []string{"sum", "exact"} {
			keys = append(keys, kind+space+pair[0], kind+space+pair[1])
		}
		m := truth{map[string]*trueCounter{}, map[string]bool{}, map[string]uint64{}}
		last := map[string]seen{}

		// check compares what was read of key with truth.
		check := func(what string, c counter.Counter, m truth) {
			rt.Helper()
			want := m.counters[c.Key]
			if want == nil {
				if c.Touched() || c.Value != 0 || !c.Updated.IsZero() {
					rt.Fatalf("%s: %+v, want it never touched", what, c)
				}
				return
			}
			if c.Value != want.value.Int64() || c.Kind != want.kind || !c.Touched() || time.Since(c.Updated).Abs() > time.Hour {
				rt.Fatalf("%s: %+v, want %s of %s", what, c, want.value, want.kind)
			}
			if c.Version.Incarnation <= m.deleted[c.Key] {
				rt.Fatalf("%s: %+v, an incarnation as high as %d was deleted", what, c, m.deleted[c.Key])
			}
			if l, ok := last[c.Key]; ok {
				if order := c.Version.Compare(l.version); (want.changes == l.changes) != (order == 0) || want.changes > l.changes && order < 0 {
					rt.Fatalf("%s: %+v after %d changes, version %s after %d", what, c, want.changes, l.version, l.changes)
				}
			}
			last[c.Key] = seen{c.Version, want.changes}
		}

		draw := func() (counter.Op, string) {
			key := func() string { return rapid.SampledFrom(keys).Draw(rt, "key") }
			ruleOf := func(key string) *counter.Rule {
				return rapid.SampledFrom(rules).Filter(func(r *counter.Rule) bool { return fits(key, r) }).Draw(rt, "rule")
			}
			set := func() string { // which is no exact counter
				return rapid.SampledFrom(keys[:3]).Draw(rt, "key")
			}
			small := rapid.Int64Range(-9, 9).Filter(func(n int64) bool { return n != 0 })
			member := rapid.SliceOfNDistinct(rapid.SampledFrom(append([]string{"w", "x"}, pair...)), 1, 3, func(s string) string { return s })
			adds := func(key string) counter.Change {
				c := add(ruleOf(key), key, small.Draw(rt, "delta"))
				for _, name := range c.Rule.Dimensions {
					if v := rapid.SampledFrom(values).Draw(rt, "value of "+name); v != "" {
						c = under(c, name, v)
					}
				}
				return c
			}
			var o counter.Op
			switch rapid.SampledFrom([]string{"add", "add", "add", "edit", "edit", "see", "see", "batch", "batch", "adjust", "set", "reset", "delete"}).Draw(rt, "verb") {
			case "add":
				o = op(adds(key()))
			case "batch":
				of := rapid.SampledFrom([][]string{keys[1:3], keys[3:]}).Draw(rt, "batch")
				for range rapid.IntRange(2, 5).Draw(rt, "changes") {
					o.Changes = append(o.Changes, adds(rapid.SampledFrom(of).Draw(rt, "key")))
				}
			case "adjust":
				key := key()
				o = op(adjust(ruleOf(key), key, rapid.Int64().Filter(func(n int64) bool { return n != 0 }).Draw(rt, "delta")))
			case "set":
				key := key()
				value := rapid.OneOf(rapid.Int64Range(-9, 9), rapid.Int64()).Draw(rt, "value")
				o = op(counter.Change{Key: key, Rule: ruleOf(key), Verb: counter.Set, Delta: value, Reason: "counted", By: "ops"})
			case "reset":
				key := key()
				o = op(reset(ruleOf(key), key))
			case "delete":
				key := key()
				o = op(drop(ruleOf(key), key))
			case "see":
				o = op(see(set(), member.Draw(rt, "members")...))
			case "edit":
				all := member.Draw(rt, "members")
				split := rapid.IntRange(0, len(all)).Draw(rt, "joining")
				o = op(edit(set(), all[:split], all[split:]))
				if rapid.Bool().Draw(rt, "under another rule") {
					o.Changes[0].Rule = ruleOf(o.Changes[0].Key)
				}
			}
			id := ""
			if rapid.IntRange(0, 2).Draw(rt, "idempotency key") == 0 {
				id = space + rapid.SampledFrom([]string{"1", "2", "3", "4", "5", "6"}).Draw(rt, "key of it")
				o.IdempotencyKey = counter.NewIdempotencyKey("*", "", id)
			}
			return o, id
		}

		rt.Repeat(map[string]func(*rapid.T){
			"apply": func(*rapid.T) {
				var ops []counter.Op
				var ids []string
				for range rapid.IntRange(1, 4).Draw(rt, "ops") {
					o, id := draw()
					ops, ids = append(ops, o), append(ids, id)
				}
				results := s.Apply(t.Context(), ops)
				history := make([]truth, len(ops)) // truth after each op
				for j, o := range ops {
					next := m.clone()
					replay, at, why := next.make(o, ids[j])
					r := results[j]
					if why != nil {
						var c *counter.Conflict
						if !errors.As(r.Err, &c) || !errors.Is(r.Err, why) || c.Key != at || c.Value != m.value(at) {
							rt.Fatalf("op %d, %+v: %+v with %#v, want %v of %q with %d", j, o, r, c, why, at, m.value(at))
						}
						history[j] = m
						continue
					}
					if r.Err != nil || r.Replay != replay || len(r.Counters) != len(o.Changes) {
						rt.Fatalf("op %d, %+v: %+v, want replay %v", j, o, r, replay)
					}
					for key := range m.counters { // deleted: its next life has higher versions
						if next.counters[key] == nil {
							if l, ok := last[key]; ok {
								m.deleted[key] = max(m.deleted[key], l.version.Incarnation)
								delete(last, key)
							}
						}
					}
					m = next
					history[j] = m
				}
				for j, r := range results {
					for k, c := range r.Counters {
						// This is as after its op, or after an op that came together
						// with it.
						ok := slices.ContainsFunc(history[j:], func(h truth) bool {
							want := h.counters[c.Key]
							return want == nil && !c.Touched() && c.Value == 0 || want != nil && c.Touched() && c.Value == want.value.Int64() && c.Kind == want.kind
						})
						if !ok {
							rt.Fatalf("op %d, change %d: answered %+v, after it truth was %+v", j, k, c, history[j].counters[c.Key])
						}
					}
				}
			},
			"crash": func(rt *rapid.T) {
				if i.Crash == nil || rapid.IntRange(0, 9).Draw(rt, "seldom") > 0 {
					rt.Skip()
				}
				s = i.Crash(t)
			},
			"": func(*rapid.T) {
				for _, member := range pair {
					got, err := s.Read(t.Context(), keys, member, 0)
					if err != nil {
						rt.Fatal(err)
					}
					for _, r := range got {
						check("read", r.Counter, m)
						if want := m.counters[r.Key]; r.Mine != (want != nil && want.kind == counter.Members && want.members[member]) {
							rt.Fatalf("%q in %q: %v", member, r.Key, r.Mine)
						}
					}
				}
				key, step, gained := rapid.SampledFrom(keys).Draw(rt, "whose history"), rapid.SampledFrom(sum.Buckets).Draw(rt, "bucket").Step, int64(0)
				seen := map[string]bool{}
				if c := m.counters[key]; c != nil {
					gained, seen = c.gained, c.seen
				}
				if _, gains, err := s.History(t.Context(), key, step, 0, math.MaxUint32); err != nil || total(gains) != gained || distinct(gains) != int64(len(seen)) {
					rt.Fatalf("the history of %q in steps of %s: %v, %v, want %d in all and %d distinct", key, step, gains, err, gained, len(seen))
				}
				for _, name := range []string{"country", "os", "o"} {
					of := map[string]int64{}
					if c := m.counters[key]; c != nil {
						for d, n := range c.counted {
							if d.Name == name {
								of[d.Value] = n
							}
						}
					}
					if _, all, err := s.Dimension(t.Context(), key, name); err != nil || !maps.Equal(all.Values, of) || all.Other != 0 {
						rt.Fatalf("%q counted %+v under %q, %v, want %v", key, all, name, err, of)
					}
				}
				for _, key := range keys {
					page, err := s.Ledger(t.Context(), key, 0, counter.MaxLedger)
					if err != nil {
						rt.Fatal(err)
					}
					var want []trueEntry
					if c := m.counters[key]; c != nil {
						want = c.ledger
					}
					got := make([]trueEntry, 0, len(want))
					for n, e := range page.Entries {
						if e.Seq != uint64(n+1) || e.Before+e.Delta != e.After {
							rt.Fatalf("entry %d of %q: %+v", n+1, key, e)
						}
						got = append(got, trueEntry{e.Op.String(), fmt.Sprint(e.Before), fmt.Sprint(e.After), e.Reason, e.By})
					}
					if page.More || !slices.Equal(got, want) {
						rt.Fatalf("the ledger of %q: %v, want %v", key, got, want)
					}
				}
			},
		})
	})
}
