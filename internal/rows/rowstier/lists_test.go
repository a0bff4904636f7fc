package rowstier

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/rows"
)

// countLists returns the number of rows of dirtyRows in a store.
func countLists(t *testing.T, store rows.Store) (n int) {
	t.Helper()
	err := store.Scan(t.Context(), 7, dirtyRows, "", func(string, []byte) error { n++; return nil })
	if err != nil {
		t.Fatal(err)
	}

	return n
}

// TestListsAreMerged: while the durable store is away, commits change a few rows again and again. The fast store keeps
// as many lists of names as Config.Lists says, not one for each commit, and the next owner finds in them everything
// that is not drained.
func TestListsAreMerged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fast, durable := newFast(), newDurable()
		o := newOwned(t, "a", fast, durable)
		durable.away.Store(true)

		put := func(field string, c rows.Commit) {
			t.Helper()
			c.Rows[0].Name.Field = field
			if err := o.commit(t, c); err != nil {
				t.Fatal(err)
			}
		}

		// An ID, a row that changes once, and a deletion: a merged list that has only what changes often would lose
		// them.
		first := o.next("0")
		first.IDs = []rows.ID{{Bytes: [16]byte{1}, Until: time.Now().Add(time.Hour)}}
		put("once", first)
		put("deleted", o.next("0"))
		deletion := o.next("")
		deletion.Rows[0].Value = nil
		put("deleted", deletion)

		most := 0
		for i := range 5000 {
			put(fmt.Sprint("often", i%10), o.next(fmt.Sprint(i)))
			if i%100 == 0 {
				most = max(most, countLists(t, fast))
			}
		}
		// The lists that a merged one replaces go with the next commits.
		if most > 2*1000+1 {
			t.Errorf("the fast store had %d lists, want at most two for each of 1,000", most)
		}

		// The process dies, and what its memory had is in the lists alone.
		end(o)
		durable.away.Store(false)
		next := newOwned(t, "b", fast, durable)
		time.Sleep(time.Second)
		defer next.close(t)

		// The next owner finds the names in the lists, and their newest values in the fast store.
		for i := range 10 {
			next.name.Field = fmt.Sprint("often", i)
			next.wants(t, durable, fmt.Sprint(4990+i))
		}
		next.name.Field = "once"
		next.wants(t, durable, "0")
		next.name.Field = "deleted"
		next.wants(t, durable, "")
		if known, err := durable.Remembered(t.Context(), 7, first.IDs); err != nil || len(known) != 1 {
			t.Errorf("the durable store remembers %v, %v; want the ID of the first commit", known, err)
		}
	})
}

// end ends the goroutines of a store as a kill does, without a drain.
func end(o *owned) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	_ = o.Close(ctx)
}

// largest is a fast store that knows the size of its largest commit.
type largest struct {
	*fastStore
	rows int
}

// Commit implements rows.Store.
func (l *largest) Commit(ctx context.Context, commits []rows.Commit) []error {
	for i := range commits {
		l.rows = max(l.rows, len(commits[i].Rows))
	}

	return l.fastStore.Commit(ctx, commits)
}

// TestTombstonesGoInPieces: many rows were deleted while the durable store was away. When it is back, their tombstones
// go with many commits, since a large one would hold up the fast store.
func TestTombstonesGoInPieces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const deletions, each = 20_000, 500
		fast, durable := &largest{fastStore: newFast()}, newDurable()
		o := newOwned(t, "a", fast, durable)
		defer o.close(t)

		// From the first eviction on the fast store keeps tombstones.
		o.must(t, o.next("evicted"))
		o.Evict(7, []rows.Name{o.name})
		o.name.Field = "other"
		o.must(t, o.next("1"))

		durable.away.Store(true)
		for from := 0; from < deletions; from += each {
			c := o.next("1")
			for i := range each {
				c.Rows = append(c.Rows, rows.Row{Name: rows.Name{Collection: "set", Field: fmt.Sprint(from + i)}})
			}
			if err := o.commit(t, c); err != nil {
				t.Fatal(err)
			}
		}
		durable.away.Store(false)
		time.Sleep(time.Minute)

		// Each commit takes a piece with it, and one more is needed for what was drained last.
		for range deletions/removedAtOnce + 2 {
			o.must(t, o.next("2"))
		}
		if fast.rows > removedAtOnce+10 {
			t.Errorf("a commit had %d rows, want at most about %d", fast.rows, removedAtOnce)
		}
		left := 0
		count := func(string, []byte) error { left++; return nil }
		if err := fast.Scan(t.Context(), 7, "set", "", count); err != nil || left != 0 {
			t.Errorf("%d tombstones are left, %v; want none", left, err)
		}
	})
}
