package storetest

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"headcount/counter"
)

// CopyStore is a store that can be exported and imported into.
type CopyStore interface {
	counter.Store
	counter.Dumper
	counter.Restorer
}

// Fill gives a store some counters of every kind, with all that can be kept of them.
func Fill(t testing.TB, s counter.Writer, counters int) {
	t.Helper()
	rules := counter.BuiltinRules()
	sales := &counter.Rule{Match: "sales:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, Dimensions: []string{"country", "by"}}
	var ops []counter.Op
	flush := func() {
		t.Helper()
		for i, r := range s.Apply(t.Context(), ops) {
			if r.Err != nil {
				t.Fatalf("%+v: %v", ops[i], r.Err)
			}
		}
		ops = nil
	}
	do := func(key string, c counter.Change) {
		c.Key = key
		if c.Rule = rules.Find(key); len(c.Dimensions) > 0 {
			c.Rule = sales
		}
		ops = append(ops, counter.Op{Changes: []counter.Change{c}, Identity: counter.IdentityOf(key, "", fmt.Sprint(len(ops)))})
		if len(ops) == 2000 {
			flush()
		}
	}
	for i := range counters {
		views, likes, visitors, stock := fmt.Sprint("views:", i), fmt.Sprint("likes:", i), fmt.Sprint("visitors:", i), fmt.Sprint("stock:", i)
		do(views, counter.Change{Verb: counter.Add, Delta: int64(i + 1)})
		switch i % 10 {
		case 0:
			do(likes, counter.Change{Verb: counter.Edit, Join: []string{"a", "é/ü", fmt.Sprint("user ", i)}})
			do(likes, counter.Change{Verb: counter.Edit, Leave: []string{"a"}})
		case 1:
			do(visitors, counter.Change{Verb: counter.Edit, Join: []string{"x", fmt.Sprint(i)}})
		case 2:
			do(stock, counter.Change{Verb: counter.Add, Delta: 5})
			do(stock, counter.Change{Verb: counter.Adjust, Delta: -2, Reason: "a \"broken\" one", By: "ops"})
		case 4:
			do(fmt.Sprint("sales:", i), counter.Change{Verb: counter.Add, Delta: 3, Dimensions: []counter.Dimension{{Name: "country", Value: "de"}, {Name: "by", Value: "a:b"}}})
			do(fmt.Sprint("sales:", i), counter.Change{Verb: counter.Add, Delta: 2, Dimensions: []counter.Dimension{{Name: "country", Value: "fr"}}})
		case 3:
			do(views, counter.Change{Verb: counter.Reset, Reason: "anew", By: "ops"})
		}
	}
	flush()
}

// Everything is all that an export of the store has.
func Everything(t testing.TB, s counter.Dumper) (copies []counter.Copy, identities map[counter.Identity]time.Time) {
	t.Helper()
	if err := s.Dump(t.Context(), "", func(c counter.Copy) error {
		slices.Sort(c.Members)
		slices.Sort(c.Hashes)
		copies = append(copies, c)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	identities = map[counter.Identity]time.Time{}
	if err := s.DumpIdentities(t.Context(), func(some []counter.IdentityCopy) error {
		for _, id := range some {
			identities[id.Identity] = id.Until.Truncate(time.Second)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return copies, identities
}

// Transfer puts all of one store into another, some counters at a time.
func Transfer(t testing.TB, from counter.Dumper, to counter.Restorer) (restored int) {
	t.Helper()
	put := func(some []counter.Copy) {
		t.Helper()
		n, err := to.Restore(t.Context(), some, counter.BuiltinRules())
		if err != nil {
			t.Fatal(err)
		}
		restored += n
	}
	var some []counter.Copy
	if err := from.Dump(t.Context(), "", func(c counter.Copy) error {
		text, err := c.MarshalJSON()
		if err != nil {
			return err
		}
		var read counter.Copy
		if err := read.UnmarshalJSON(text); err != nil {
			return err
		}
		if some = append(some, read); len(some) == 50 {
			put(some)
			some = nil
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	put(some)
	deleted, err := from.Deleted(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := from.DumpIdentities(t.Context(), func(some []counter.IdentityCopy) error { return to.RestoreIdentities(t.Context(), some, deleted) }); err != nil {
		t.Fatal(err)
	}
	return restored
}

// RunCopies tests that what a store gives and takes is whole. open returns an empty store.
func RunCopies(t *testing.T, open func(t testing.TB) CopyStore) {
	from, to, back := open(t), open(t), open(t)
	Fill(t, from, 60)
	rules := counter.BuiltinRules()
	drop := counter.Op{Changes: []counter.Change{{Key: "views:5", Rule: rules.Find("views:5"), Verb: counter.Delete}}}
	if r := from.Apply(t.Context(), []counter.Op{drop}); r[0].Err != nil {
		t.Fatal(r[0].Err)
	}
	want, ids := Everything(t, from)
	if len(want) < 70 || len(ids) < 80 {
		t.Fatalf("%d counters, %d identities", len(want), len(ids))
	}
	same := func(what string, s counter.Dumper) {
		t.Helper()
		copies, identities := Everything(t, s)
		if !reflect.DeepEqual(copies, want) {
			for i := range min(len(copies), len(want)) {
				if !reflect.DeepEqual(copies[i], want[i]) {
					t.Fatalf("%s: %+v, want %+v", what, copies[i], want[i])
				}
			}
			t.Fatalf("%s: %d counters, want %d", what, len(copies), len(want))
		}
		if len(identities) != len(ids) {
			t.Errorf("%s: %d identities, want %d", what, len(identities), len(ids))
		}
		for id, until := range ids {
			if off := identities[id].Sub(until).Abs(); off > 2*time.Second { // a store may know only how long is left
				t.Fatalf("%s: an identity is remembered %s longer or shorter", what, off)
			}
		}
	}
	if n := Transfer(t, from, to); n != len(want) {
		t.Errorf("%d counters were restored, want %d", n, len(want))
	}
	same("once", to)
	if n := Transfer(t, from, to); n != 0 {
		t.Errorf("twice: %d counters were restored", n)
	}
	same("twice", to)
	Transfer(t, to, back)
	same("and back", back)

	// The store goes on where the other one was.
	add := counter.Op{Changes: []counter.Change{{Key: "views:1", Rule: rules.Find("views:1"), Verb: counter.Add, Delta: 1}}}
	if r := to.Apply(t.Context(), []counter.Op{add}); r[0].Err != nil || r[0].Counters[0].Value != 3 {
		t.Errorf("an increment after: %+v", r)
	}
	if n := Transfer(t, from, to); n != 0 {
		t.Error("an older copy came in the place of a counter that changed since")
	}
	again := counter.Op{Changes: []counter.Change{{Key: "views:5", Rule: rules.Find("views:5"), Verb: counter.Add, Delta: 1}}}
	deleted, err := from.Deleted(context.Background())
	if r := to.Apply(t.Context(), []counter.Op{again}); err != nil || r[0].Err != nil || r[0].Counters[0].Version.Incarnation <= deleted {
		t.Errorf("a counter that was deleted comes back as %+v, %v", r, err)
	}
	// What was deleted here comes back with a greater incarnation.
	gone := counter.Op{Changes: []counter.Change{{Key: "views:2", Rule: rules.Find("views:2"), Verb: counter.Delete}}}
	if r := to.Apply(t.Context(), []counter.Op{gone}); r[0].Err != nil {
		t.Fatal(r[0].Err)
	}
	before, err := to.Deleted(t.Context())
	if n := Transfer(t, from, to); n != 1 || err != nil {
		t.Errorf("%d counters were restored after one was deleted, %v", n, err)
	}
	got, err := to.Read(t.Context(), []string{"views:2"}, "", 0)
	if err != nil || got[0].Value != 3 || got[0].Version.Incarnation <= before {
		t.Errorf("%+v, %v", got, err)
	}
}
