package owner_test

import (
	"context"
	"testing"
	"testing/synctest"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// failing acknowledges commits and loses them, while it is told to, as a Redis does just before a failover.
type failing struct {
	*rowsmem.Store
	loses bool
}

// Commit implements rows.Store.
func (f *failing) Commit(ctx context.Context, commits []rows.Commit) []error {
	if f.loses {
		return make([]error, len(commits))
	}

	return f.Store.Commit(ctx, commits)
}

// begin returns an owner of partition 0.
func begin(t *testing.T, name string, store rows.Store) *owner.Owner {
	t.Helper()
	o := owner.New(store, owner.Config{Name: name})
	if err := o.Own(t.Context(), 0); err != nil {
		t.Fatal(err)
	}

	return o
}

// makes makes operations in partition 0, and returns the counter as the last one left it.
func makes(t *testing.T, o *owner.Owner, ops []counter.Op) counter.Counter {
	t.Helper()
	answer, err := o.Do(t.Context(), owner.Call{Partition: 0, Ops: ops})
	if err != nil {
		t.Fatal(err)
	}
	last := answer.Results[len(ops)-1]
	if last.Err != nil {
		t.Fatal(last.Err)
	}

	return last.Counters[0]
}

// TestVersionsAfterALoss: the store loses what an owner has acknowledged, and the owner dies. The values of the next
// owner have greater versions than those that clients have seen; otherwise clients would keep the old values.
func TestVersionsAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &failing{Store: rowsmem.New(rowsmem.Config{})}
		a := begin(t, "a", store)
		for range 3 {
			makes(t, a, increment("k"))
		}

		store.loses = true
		var seen counter.Counter
		for range 3 {
			seen = makes(t, a, increment("k"))
		}

		// The owner dies before it has noticed the loss, so nobody writes the three increments again.
		a.Close()
		store.loses = false

		b := begin(t, "b", store)
		defer b.Close()
		is := makes(t, b, increment("k"))
		if seen.Value != 6 || is.Value != 4 || is.Version.Compare(seen.Version) <= 0 {
			t.Errorf("clients saw %d with version %v, now it is %d with %v; want 6, then 4 with a greater version",
				seen.Value, seen.Version, is.Value, is.Version)
		}
	})
}

// TestVersionsAfterADeletion: a counter that was deleted is imported again, at another owner. Its version is greater
// than those from before the deletion.
func TestVersionsAfterADeletion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := rowsmem.New(rowsmem.Config{})
		a := begin(t, "a", store)
		first := makes(t, a, increment("k"))
		seen := makes(t, a, increment("k"))
		gone := increment("k")
		gone[0].Changes[0].Verb = counter.Delete
		gone[0].Changes[0].Delta = 0
		makes(t, a, gone)
		a.Close()

		b := begin(t, "b", store)
		defer b.Close()
		// An export from before the deletion has the version that clients have seen long ago.
		state := counter.State{Kind: counter.Sum, Value: first.Value, Version: first.Version}
		export := &owner.Restore{Rules: &counter.Rules{}, Copies: []counter.Copy{{Key: "k", State: state}}}
		answer, err := b.Do(t.Context(), owner.Call{Partition: 0, More: &owner.More{Restore: export}})
		if err != nil || answer.More.Restored != 1 {
			t.Fatalf("the import has %+v, %v; want one restored counter", answer.More, err)
		}

		read, err := owner.NewReader(store, func(string) int { return 0 }).Read(t.Context(), []string{"k"}, "", 0)
		if err != nil {
			t.Fatal(err)
		}
		if is := read[0]; is.Value != 1 || is.Version.Compare(seen.Version) <= 0 {
			t.Errorf("the counter is %d with version %v, want 1 with one greater than %v",
				is.Value, is.Version, seen.Version)
		}
	})
}
