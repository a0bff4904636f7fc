package call_test

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/counter/owner"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsmem"
)

// ledgerOfRows is a store that remembers which rows it has.
type ledgerOfRows struct {
	*rowsmem.Store

	mu      sync.Mutex // guards the fields below
	rows    map[rows.Address]int
	deletes int // the most rows that one commit deleted
	longest int // the longest value of a row so far, in bytes
}

func newLedgerOfRows() *ledgerOfRows {
	return &ledgerOfRows{Store: rowsmem.New(rowsmem.Config{}), rows: map[rows.Address]int{}}
}

// Commit implements rows.Store.
func (l *ledgerOfRows) Commit(ctx context.Context, commits []rows.Commit) []error {
	errs := l.Store.Commit(ctx, commits)

	l.mu.Lock()
	defer l.mu.Unlock()

	for i, c := range commits {
		deletes := 0
		for _, row := range c.Rows {
			at := rows.Address{Partition: c.Partition, Name: row.Name}
			switch {
			case errs[i] != nil:
			case row.Value == nil:
				delete(l.rows, at)
				deletes++
			default:
				l.rows[at] = len(row.Value)
				l.longest = max(l.longest, len(row.Value))
			}
		}
		l.deletes = max(l.deletes, deletes)
	}

	return errs
}

func (l *ledgerOfRows) mostDeletes() int {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.deletes
}

// left returns the number of rows in each collection that has any.
func (l *ledgerOfRows) left() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()

	left := map[string]int{}
	for at := range l.rows {
		left[at.Collection]++
	}

	return left
}

func must(t *testing.T, s counter.Writer, key string, c counter.Change) {
	t.Helper()
	c.Key = key
	c.Rule = historyRules.Find(key)
	result := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{c}}})[0]
	if result.Err != nil {
		t.Fatalf("%+v: %v", c, result.Err)
	}
}

// fill gives a counter of each kind all sorts of rows that it can have.
func fill(t *testing.T, s counter.Store) {
	t.Helper()
	country := []counter.Dimension{{Name: "country", Value: "de"}}
	const rounds = 60 // enough members for more rows than a sweep deletes at once
	for round := range rounds {
		if round == rounds/2 {
			must(t, s, "likes:1", counter.Change{Verb: counter.Reset, Reason: "x", By: "y"})
			must(t, s, "seen:1", counter.Change{Verb: counter.Reset, Reason: "x", By: "y"})
		}

		var members []string
		for i := range counter.MaxMembers {
			members = append(members, fmt.Sprint(round, " ", i))
		}

		must(t, s, "likes:1", counter.Change{Verb: counter.Edit, Join: members})
		must(t, s, "seen:1", counter.Change{Verb: counter.Edit, Join: members})
		must(t, s, "sum:1", counter.Change{Verb: counter.Add, Delta: 1, Dimensions: country})
		must(t, s, "stock:1", counter.Change{Verb: counter.Adjust, Delta: 1, Reason: "x", By: "y"})
		must(t, s, "stock:1", counter.Change{Verb: counter.Reset, Reason: "x", By: "y"})
		time.Sleep(time.Minute)
	}
}

// TestDeletedCountersLeaveNoRows: the rows of a deleted counter are deleted later, and no commit deletes more than some
// of them.
func TestDeletedCountersLeaveNoRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedgerOfRows()
		cfg := owner.InMemory
		cfg.SweepEvery = 30 * time.Minute
		s := openedOver(t, store, historyRules, cfg)
		fill(t, s)
		before := store.left()
		for _, key := range []string{"likes:1", "seen:1", "sum:1", "stock:1"} {
			must(t, s, key, counter.Change{Verb: counter.Delete})
		}

		// The next sweep deletes all but the rows that note what expires when. They name rows that are gone.
		time.Sleep(time.Hour)
		soon := store.left()
		maps.DeleteFunc(soon, func(collection string, _ int) bool {
			return collection == "meta" || strings.HasPrefix(collection, "expiry:")
		})
		// Longer than the 90 days for which history is kept, so the notes of what expires are due as well.
		time.Sleep(100 * 24 * time.Hour)
		late := store.left()
		delete(late, "meta")
		if len(soon)+len(late) > 0 || len(before) < 10 {
			t.Errorf("of the rows %v, %v are left after an hour and %v in the end, want none", before, soon, late)
		}

		const most = 256 + 10 // rows of a sweep, and of other calls in its turn
		if n := store.mostDeletes(); n > most {
			t.Errorf("one commit deleted %d rows, want at most %d", n, most)
		}
	})
}

// TestExpiredRowsAreSwept: of counters that are not used any more only the values are left in the end. Nothing is left
// of limits and of the gateways' streams.
func TestExpiredRowsAreSwept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedgerOfRows()
		s := calledBy(t, store, historyRules, owner.Config{Name: "only", VerifyEvery: -1, SweepEvery: 30 * time.Minute})

		for round := range 60 {
			must(t, s, "sum:1", counter.Change{Verb: counter.Add, Delta: 1})
			must(t, s, "seen:1", counter.Change{Verb: counter.Edit, Join: []string{"a"}})
			name := limit.Name{Key: "l", Algorithm: limit.Log, Window: 40 * 60_000}
			ask := limit.Request{Name: name, Limit: 5, Cost: 5}
			r := s.Limit(t.Context(), []limit.Request{ask})[0]
			if r.Err != nil || r.Allowed != (round%21 == 0) {
				t.Fatalf("round %d: %+v", round, r)
			}

			time.Sleep(2 * time.Minute)
		}

		// The limit was asked two minutes ago, so its row is still needed. Three hours later it is not.
		busy := store.left()
		time.Sleep(3 * time.Hour)
		quiet := store.left()
		time.Sleep(100 * 24 * time.Hour)
		end := store.left()

		if busy["limits"] != 1 || busy["streams"] == 0 {
			t.Errorf("in use the store has %v, want one limit, and streams", busy)
		}
		if quiet["limits"]+quiet["streams"] > 0 || len(quiet) < 4 {
			t.Errorf("after hours without use the store has %v, want no limits and no streams", quiet)
		}
		if end["heads"] != 2 || len(end) != 3 { // heads, meta rows and the registers of the unique
			t.Errorf("in the end the store has %v, want two heads in one of three collections", end)
		}
	})
}

// TestRowsOfUniquesAreSmall: a new member never causes a write of all registers.
func TestRowsOfUniquesAreSmall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := newLedgerOfRows()
		s := openedOver(t, store, historyRules, owner.InMemory)
		for round := range 30 {
			var members []string
			for i := range counter.MaxMembers {
				members = append(members, fmt.Sprint(round, " ", i))
			}

			// From one member to hundreds at a time, so that the set is small at first and large in the end.
			must(t, s, "seen:1", counter.Change{Verb: counter.Edit, Join: members[:1+round*round]})
		}

		if store.longest > 1024 || len(store.rows) < 16 {
			t.Errorf("the longest of %d rows had %d bytes, want at least 16 rows, and 1024 bytes at most",
				len(store.rows), store.longest)
		}
	})
}

// TestMisplaced: a counter whose rule has got another kind is refused in its new place. It does not begin anew there.
func TestMisplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inMemory(t, countertest.Rules)
		was := *historyRules.Find("stock:1")
		now := *historyRules.Find("sum:1")
		for _, key := range []string{"a", "b"} {
			// In both directions: an exact counter lies in a partition of its own, so each kind can be looked for in
			// the wrong place.
			before, after := &was, &now
			if key == "b" {
				before, after = after, before
			}

			first := counter.Change{Key: key, Rule: before, Verb: counter.Add, Delta: 7}
			if r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{first}}})[0]; r.Err != nil {
				t.Fatal(r.Err)
			}

			first.Rule = after
			r := s.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{first}}})[0]
			// fault returns a conflict as it is, and true or false for any other outcome.
			if fault(r.Err) == true || fault(r.Err) == false {
				t.Errorf("%q after its rule changed: %+v, want a conflict", key, r)
			}
		}
	})
}
