package countertest

import (
	"errors"
	"testing"
	"time"

	"headcount/counter"
	"headcount/internal/testkit"
)

func add(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{Key: key, Rule: rule, Verb: counter.Add, Delta: delta}
}

func adjust(rule *counter.Rule, key string, delta int64) counter.Change {
	return counter.Change{
		Key: key, Rule: rule, Verb: counter.Adjust, Delta: delta, Reason: "bots \"x\" \\ ü", By: "ops",
	}
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

// apply makes one operation, which must succeed.
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
		// A result has a counter for each change, or an error and nothing else.
		isWhole := len(r.Counters) == len(ops[i].Changes)
		isNothing := r.Counters == nil && !r.Replay
		if r.Err == nil && !isWhole || r.Err != nil && !isNothing {
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

// refused makes one operation, which must fail with the conflict is about the key and its value.
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

// answered reads until the server answers, and returns the error of the answer: on a busy machine a server may not
// answer for a while.
func answered(t testing.TB, read func() error) (err error) {
	t.Helper()
	testkit.Eventually(t, "a read", func() bool {
		err = read()
		return !errors.Is(err, counter.ErrUnavailable)
	})

	return err
}

func readAll(t testing.TB, s counter.Reader, member string, keys ...string) []counter.Reading {
	t.Helper()
	var out []counter.Reading
	err := answered(t, func() (err error) {
		out, err = s.Read(t.Context(), keys, member, 0)
		return err
	})

	if err != nil || len(out) != len(keys) {
		t.Fatalf("Read(%q) = %v, %v", keys, out, err)
	}
	for i := range out {
		c := out[i].Counter
		if c.Key != keys[i] || c.Approx || c.Stale {
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

// unchanged runs f, which must not change the counter key nor its ledger.
func unchanged(t testing.TB, s counter.Store, key string, f func()) {
	t.Helper()
	before := read(t, s, key)
	entries := allEntries(t, s, key)
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
	a.Updated = time.Time{}
	b.Updated = time.Time{}

	return ok && a == b
}

// allEntries returns the whole ledger, which must have no gaps.
func allEntries(t testing.TB, s counter.Reader, key string) []counter.Entry {
	t.Helper()
	var all []counter.Entry
	for after := uint64(0); ; {
		page, err := s.Ledger(t.Context(), key, after, counter.MaxLedger)
		if err != nil {
			t.Fatal(err)
		}

		for _, e := range page.Entries {
			isWhole := e.Before+e.Delta == e.After && !e.At.IsZero() && e.Op.String() != ""
			if e.Seq != after+1 || !isWhole {
				t.Fatalf("the ledger of %q after %d: %+v", key, after, e)
			}
			after = e.Seq
		}

		all = append(all, page.Entries...)
		if !page.More {
			return all
		}
		if len(page.Entries) == 0 {
			t.Fatal("an empty page of the ledger says that there are more entries")
		}
	}
}

// chained checks that an exact counter's ledger leads from 0 to its value.
func chained(t testing.TB, s counter.Reader, key string) []counter.Entry {
	t.Helper()
	all := allEntries(t, s, key)
	at := int64(0)
	for _, e := range all {
		if e.Before != at {
			t.Fatalf("the ledger of %q: entry %d begins at %d, but the one before ends at %d", key, e.Seq, e.Before, at)
		}
		at = e.After
	}
	value(t, s, key, at)

	return all
}

// Moved returns the operations of an idempotency key, id: they add one to e:1, and move one from e:2 to e:3.
func Moved(id string) []counter.Op {
	return []counter.Op{with(id, op(add(exact, "e:1", 1), add(exact, "e:2", -1), add(exact, "e:3", 1)))}
}

// Whole checks that the operations of n ids were made, each of them once.
func Whole(t testing.TB, s counter.Reader, n int64) {
	t.Helper()
	for key, want := range map[string]int64{"e:1": n, "e:2": -n, "e:3": n} {
		value(t, s, key, want)
		if entries := chained(t, s, key); int64(len(entries)) != n {
			t.Errorf("%q has %d entries, want %d", key, len(entries), n)
		}
	}
}
