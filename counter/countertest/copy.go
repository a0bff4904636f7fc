package countertest

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"
	"time"

	"headcount/counter"
)

// CopyStore is a store that can export and import its counters.
type CopyStore interface {
	counter.Store
	counter.Dumper
	counter.Restorer
}

// Fill creates counters of every kind in a store, with everything that a store can keep of a counter.
func Fill(t testing.TB, s counter.Writer, counters int) {
	t.Helper()
	rules := counter.BuiltinRules()
	sales := &counter.Rule{
		Match: "sales:*", Kind: counter.Sum, Ledger: counter.DefaultLedger, Dimensions: []string{"country", "by"},
	}

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
		c.Rule = rules.Find(key)
		if len(c.Dimensions) > 0 {
			c.Rule = sales
		}
		// The store has idempotency keys as well, which must not be in an export.
		id := counter.NewIdempotencyKey(key, "", fmt.Sprint(len(ops)))
		ops = append(ops, counter.Op{Changes: []counter.Change{c}, IdempotencyKey: id})
		if len(ops) == 2000 {
			flush()
		}
	}

	for i := range counters {
		views := fmt.Sprint("views:", i)
		do(views, counter.Change{Verb: counter.Add, Delta: int64(i + 1)})
		switch i % 10 {
		case 0:
			likes := fmt.Sprint("likes:", i)
			do(likes, counter.Change{Verb: counter.Edit, Join: []string{"a", "é/ü", fmt.Sprint("user ", i)}})
			do(likes, counter.Change{Verb: counter.Edit, Leave: []string{"a"}})
		case 1:
			do(fmt.Sprint("visitors:", i), counter.Change{Verb: counter.Edit, Join: []string{"x", fmt.Sprint(i)}})
		case 2:
			stock := fmt.Sprint("stock:", i)
			do(stock, counter.Change{Verb: counter.Add, Delta: 5})
			do(stock, counter.Change{Verb: counter.Adjust, Delta: -2, Reason: "a \"broken\" one", By: "ops"})
			do(stock, counter.Change{
				Verb: counter.Reserve, Delta: 2, Hold: &counter.Hold{ID: "cart/7", For: time.Hour},
			})
		case 3:
			do(views, counter.Change{Verb: counter.Reset, Reason: "anew", By: "ops"})
		case 4:
			sold := fmt.Sprint("sales:", i)
			do(sold, under(counter.Change{Verb: counter.Add, Delta: 3}, "country", "de", "by", "a:b"))
			do(sold, under(counter.Change{Verb: counter.Add, Delta: 2}, "country", "fr"))
		}
	}
	flush()
}

// Everything returns all counters of an export of the store.
func Everything(t testing.TB, s counter.Dumper) (copies []counter.Copy) {
	t.Helper()
	err := s.Dump(t.Context(), "", func(c counter.Copy) error {
		// Members come in any order.
		slices.Sort(c.Members)
		slices.Sort(c.Hashes)
		copies = append(copies, c)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}

	return copies
}

// Transfer copies all of one store into another, some counters at a time. It returns how many the other one has taken.
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
	err := from.Dump(t.Context(), "", func(c counter.Copy) error {
		// As JSON, like an export.
		text, err := c.MarshalJSON()
		if err != nil {
			return err
		}
		var read counter.Copy
		if err := read.UnmarshalJSON(text); err != nil {
			return err
		}

		some = append(some, read)
		if len(some) == 50 {
			put(some)
			some = nil
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	put(some)

	deleted, err := from.Deleted(t.Context())
	if err == nil {
		err = to.RestoreDeleted(t.Context(), deleted)
	}
	if err != nil {
		t.Fatal(err)
	}

	return restored
}

// sameCopies checks that s has the counters want. s may have raised an incarnation, but then its answers must have the
// same one.
func sameCopies(t *testing.T, what string, s CopyStore, want []counter.Copy) {
	t.Helper()
	copies := Everything(t, s)
	for i := range min(len(copies), len(want)) {
		if copies[i].Version.Compare(want[i].Version) > 0 {
			read, err := s.Read(t.Context(), []string{copies[i].Key}, "", 0)
			if err != nil || read[0].Version != copies[i].Version {
				t.Fatalf("%s: %+v is %+v in a read, %v", what, copies[i], read, err)
			}
			copies[i].Version.Incarnation = want[i].Version.Incarnation
		}

		if !reflect.DeepEqual(copies[i], want[i]) {
			t.Fatalf("%s: %+v, want %+v", what, copies[i], want[i])
		}
	}
	if len(copies) != len(want) {
		t.Fatalf("%s: %d counters, want %d", what, len(copies), len(want))
	}
}

// RunCopies tests that exports and imports of a store are complete. open returns an empty store.
func RunCopies(t *testing.T, open func(t testing.TB) CopyStore) {
	from := open(t)
	to := open(t)
	back := open(t)
	Fill(t, from, 60)
	rules := counter.BuiltinRules()
	one(t, from, drop(rules.Find("views:5"), "views:5"))
	want := Everything(t, from)
	if len(want) < 70 {
		t.Fatalf("%d counters", len(want))
	}

	if n := Transfer(t, from, to); n != len(want) {
		t.Errorf("%d counters were restored, want %d", n, len(want))
	}
	sameCopies(t, "once", to, want)
	if n := Transfer(t, from, to); n != 0 {
		t.Errorf("twice: %d counters were restored", n)
	}
	sameCopies(t, "twice", to, want)
	Transfer(t, to, back)
	sameCopies(t, "and back", back, want)

	// The store goes on where the other one stopped.
	if c := one(t, to, add(rules.Find("views:1"), "views:1", 1)); c.Value != 3 {
		t.Errorf("an increment after: %+v", c)
	}
	if n := Transfer(t, from, to); n != 0 {
		t.Error("an older copy has replaced a counter that has changed since")
	}
	deleted, err := from.Deleted(t.Context())
	if c := one(t, to, add(rules.Find("views:5"), "views:5", 1)); err != nil || c.Version.Incarnation <= deleted {
		t.Errorf("a counter that was deleted comes back as %+v, %v", c, err)
	}

	// A counter that was deleted in the importing store comes back with a greater incarnation.
	one(t, to, drop(rules.Find("views:2"), "views:2"))
	before, err := to.Deleted(t.Context())
	if n := Transfer(t, from, to); n != 1 || err != nil {
		t.Errorf("%d counters were restored after one was deleted, %v", n, err)
	}
	got, err := to.Read(t.Context(), []string{"views:2"}, "", 0)
	if err != nil || got[0].Value != 3 || got[0].Version.Incarnation <= before {
		t.Errorf("%+v, %v", got, err)
	}

	longHistories(t, to)
}

// longHistories tests that any part of a long history is complete, in a read of one sum and of many at once.
func longHistories(t *testing.T, s CopyStore) {
	now := time.Now()
	newest := now.Unix()/60 - 1
	var keys []string
	var copies []counter.Copy
	for i, steps := range []int64{0, 1, 7, 600} {
		c := counter.Copy{Key: fmt.Sprint("views:long ", i), State: counter.State{
			Kind: counter.Sum, Updated: now.UnixMilli(),
			Version: counter.Version{Incarnation: uint64(now.UnixMilli()), Sequence: 1},
		}}
		// With gaps, like a counter that sometimes does not change for a while.
		for n := newest - 2*steps; n < newest; n += 2 {
			c.Steps = append(c.Steps, counter.StepCopy{Step: 60, Number: n, Value: n%1000 - 100})
			c.Value += n%1000 - 100
		}
		// The current step is in the state of the counter, and not among those that have ended.
		c.Slots[0] = counter.Slot{Step: 60, Number: uint32(newest), Value: int64(i) + 1}
		keys = append(keys, c.Key)
		copies = append(copies, c)
	}
	if _, err := s.Restore(t.Context(), copies, counter.BuiltinRules()); err != nil {
		t.Fatal(err)
	}

	keys = append(keys, "views:never", "views:7")
	for _, span := range [][2]int64{
		{0, math.MaxUint32}, {newest, newest + 1}, {newest - 1, newest + 1}, {newest - 2, newest},
		{newest - 40, newest + 5}, {newest - 333, newest - 300}, {newest + 1, newest + 2},
	} {
		for i, c := range copies {
			running := counter.StepCopy{Step: 60, Number: newest, Value: int64(i) + 1}
			var want []counter.Gain
			for _, st := range append(slices.Clone(c.Steps), running) {
				if st.Number >= span[0] && st.Number < span[1] {
					want = append(want, counter.Gain{Number: st.Number, Value: st.Value})
				}
			}
			_, got, err := s.History(t.Context(), c.Key, time.Minute, span[0], span[1])
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("%q from %d: %v, want %v, %v", c.Key, span[0]-newest, got, want, err)
			}
		}
		sameAsOneByOne(t, s, keys, time.Minute, span[0], span[1])
	}
}

// sameAsOneByOne compares a read of many sums at once with a read of each.
func sameAsOneByOne(t *testing.T, s counter.Store, keys []string, step time.Duration, from, to int64) {
	t.Helper()
	all, err := s.Histories(t.Context(), keys, step, from, to)
	if err != nil {
		t.Fatal(err)
	}
	slots, err := s.Running(t.Context(), keys, step)
	if err != nil {
		t.Fatal(err)
	}

	for i, key := range keys {
		_, want, err := s.History(t.Context(), key, step, from, to)
		if err != nil || !slices.Equal(all[i], want) {
			t.Errorf("%q among others: %v, want %v, %v", key, all[i], want, err)
		}

		_, ever, err := s.History(t.Context(), key, step, 0, math.MaxUint32)
		if err != nil {
			t.Fatal(err)
		}
		newest := counter.Gain{}
		if len(ever) > 0 {
			newest = ever[len(ever)-1]
		}
		got := slots[i]
		if int64(got.Number) != newest.Number || got.Value != newest.Value {
			t.Errorf("%q gained %+v in the newest step, want %+v", key, got, newest)
		}
	}
}
