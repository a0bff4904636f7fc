// Package presencetest tests the contract of a store of presence. The store in memory and the one on a single Redis
// pass all of it, and every other set-up the parts in which it can differ.
package presencetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/unread"
)

// Store is a complete store, with all contracts that the tests cover.
type Store interface {
	presence.Store
	presence.Lister
	presence.Processes
	presence.LastSeen
	minutes.Store
	minutes.DayStore
	unread.Store
	Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error)
}

// Factory returns an empty store of the region "local", without peers, with the default numbers of partitions and
// buckets. The store remembers minutes, and departures for an hour. It ends with the test.
type Factory func(t testing.TB) Store

// Run tests the whole contract of a store on a server.
func Run(t *testing.T, open Factory) { onServer(t, partNames(), open) }

// RunInBubble tests the whole contract of a store within the process, with the clock of synctest.
func RunInBubble(t *testing.T, open Factory) {
	for _, name := range partNames() {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { run(t, name, open(t)) })
		})
	}
}

// completed has the parts that need a store whose partitions are complete.
var completed = map[string]func(*testing.T, Store){
	"a claim says how old the one before is":         claimed,
	"a hold has its end":                             holds,
	"load names the pages of an unfinished write":    loadedPages,
	"many members and pages in one write are listed": large,
	"topics that are not known are carried":          unknownTopics,
	"endpoints come and go":                          endpoints,
	"a watcher hears only its buckets":               watchBuckets,
	"partitions written at once add up":              concurrent,
	"the region has all of a count":                  parts,
	"the running minute is remembered":               runningMinute,
	"the running day is remembered":                  runningDay,
	"a departure is remembered":                      departed,
	"many departures in one write":                   manyDeparted,
	"an old departure is forgotten":                  departedLongAgo,
	"a user is forgotten":                            forgotten,
	"any history of owners equals the model":         model,
}

// partNames returns the names of all parts, sorted.
func partNames() (names []string) {
	for _, tests := range []map[string]func(*testing.T, Store){completed, incompletes, processes, unreads} {
		names = slices.AppendSeq(names, maps.Keys(tests))
	}
	slices.Sort(names)

	return names
}

func run(t *testing.T, name string, s Store) {
	if test, ok := completed[name]; ok {
		complete(t, s)
		test(t, s)
		return
	}

	for _, tests := range []map[string]func(*testing.T, Store){incompletes, processes, unreads} {
		if test, ok := tests[name]; ok {
			test(t, s)
		}
	}
}

var incompletes = map[string]func(*testing.T, Store){"counts are stale until all partitions are complete": incomplete}

// complete claims every partition and writes to it, as a running cluster does. These are the largest calls of most
// parts, so it repeats them when a busy server does not answer in time.
func complete(t testing.TB, s presence.Store) {
	t.Helper()
	testkit.Eventually(t, "every partition is complete", func() bool {
		claims, err := s.Claim(t.Context(), "node", upTo(presence.DefaultPartitions), false)
		for _, o := range s.Write(t.Context(), completing(claims)) {
			err = errors.Join(err, o.Err)
		}
		if err != nil && !errors.Is(err, presence.ErrUnavailable) {
			t.Fatal(err)
		}

		return err == nil && len(claims) == presence.DefaultPartitions
	})
}

// completing returns the changes that complete partitions.
func completing(claims []presence.Claim) (changes []presence.Change) {
	for _, c := range claims {
		changes = append(changes, presence.Change{Claim: c, Sequence: 1, Complete: true})
	}

	return changes
}

// upTo returns the numbers from 0 to n-1.
func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}

	return all
}

func claimAll(t testing.TB, s presence.Store, again bool) []presence.Claim {
	t.Helper()
	partitions := upTo(presence.DefaultPartitions)
	claims, err := s.Claim(t.Context(), "node", partitions, again)
	if err != nil || len(claims) != len(partitions) {
		t.Fatalf("Claim of all = %d claims, %v", len(claims), err)
	}
	return claims
}

func finish(t testing.TB, s presence.Store, claims []presence.Claim) {
	t.Helper()
	for i, o := range s.Write(t.Context(), completing(claims)) {
		if o.Err != nil {
			t.Fatalf("completing partition %d: %v", claims[i].Partition, o.Err)
		}
	}
}

func incomplete(t *testing.T, s Store) {
	e := listen(t, s, allBuckets())
	claims := claimAll(t, s, false)

	wantMissing := func(want ...int) {
		t.Helper()
		// The store may look at one bucket or at all of them. Both answers agree while nobody writes.
		for _, everywhere := range []bool{true, false} {
			got, err := s.Incomplete(t.Context(), upTo(presence.DefaultPartitions), everywhere)
			if err != nil || !slices.Equal(got, want) {
				t.Errorf("Incomplete(everywhere %t) = %v, %v; want %v", everywhere, got, err, want)
			}
		}
	}

	// Nobody has completed a partition yet.
	for _, c := range claims {
		if c.Whole {
			t.Fatalf("partition %d is whole before anybody has completed it", c.Partition)
		}
	}

	if c := count(t, s, "p"); !c.Stale {
		t.Errorf("before any partition is complete: %+v, want stale", c)
	}

	// All partitions but one are complete. A claim does not complete one.
	last := len(claims) - 1
	finish(t, s, claims[:last])
	wantMissing(claims[last].Partition)
	if w := claim(t, s, claims[last].Partition); w.claim.Whole {
		t.Error("a partition that was claimed twice and never completed is whole")
	} else {
		claims[last] = w.claim
	}

	if c := count(t, s, "p"); !c.Stale {
		t.Errorf("one partition is missing: %+v, want stale", c)
	}
	if updates, err := s.Attach(t.Context(), "g", topics("p")); err != nil || !updates[0].Stale {
		t.Errorf("Attach = %+v, %v; want stale", updates, err)
	}

	finish(t, s, claims[last:])
	if c := count(t, s, "p"); c.Stale {
		t.Errorf("all are complete: %+v, want it not stale", c)
	}

	e.until(t, "to read every bucket again when all are complete", func() bool {
		for _, n := range e.lost {
			if n < 2 {
				return false
			}
		}
		return true
	})

	wantMissing()

	// A partition stays complete when its owner changes.
	for range 2 {
		if w := claim(t, s, 3); !w.claim.Whole {
			t.Error("a partition that was completed is not whole for its next owner")
		}
	}

	if c := count(t, s, "p"); c.Stale {
		t.Errorf("a partition changed hands: %+v, want it not stale", c)
	}
	wantMissing()
}

func load(t tb, s presence.Store, c presence.Claim) presence.Snapshot {
	t.Helper()
	snaps, err := s.Load(t.Context(), []presence.Claim{c})
	if err != nil || len(snaps) != 1 {
		t.Fatalf("Load = %d snapshots, %v", len(snaps), err)
	}
	return snaps[0]
}

// tb is a test, or one history of a rapid.Check.
type tb interface {
	rapid.TB
	Context() context.Context
}

// writer writes as a node does: under one claim, with increasing sequences.
type writer struct {
	t     tb
	s     presence.Store
	claim presence.Claim
	seq   uint64
}

func claim(t tb, s presence.Store, partition int) *writer {
	t.Helper()
	claims, err := s.Claim(t.Context(), "node", []int{partition}, false)
	if err != nil {
		t.Fatalf("Claim(%d): %v", partition, err)
	}

	if len(claims) != 1 || claims[0].Partition != partition {
		t.Fatalf("Claim(%d) = %+v", partition, claims)
	}
	return &writer{t: t, s: s, claim: claims[0]}
}

func (w *writer) change(members []presence.MemberChange, counts ...presence.PageUsers) presence.Change {
	w.seq++
	return presence.Change{Claim: w.claim, Sequence: w.seq, Members: members, Counts: counts}
}

// write writes a change, and returns the counts in the answer.
func (w *writer) write(c presence.Change) []presence.Count {
	w.t.Helper()
	o := w.s.Write(w.t.Context(), []presence.Change{c})
	if len(o) != 1 || o[0].Err != nil || len(o[0].Counts) != len(c.Counts) {
		w.t.Fatalf("Write(%+v) = %+v", c, o)
	}

	return o[0].Counts
}

func (w *writer) set(page string, users int64) presence.Count {
	w.t.Helper()
	c := w.write(w.change(nil, presence.PageUsers{Page: page, Users: users}))[0]
	if c.Page != page {
		w.t.Fatalf("a write of %q made %+v", page, c)
	}
	return c
}

// setMany sets all pages in one write.
func (w *writer) setMany(pages []string, users int64) {
	w.t.Helper()
	counts := make([]presence.PageUsers, len(pages))
	for i, page := range pages {
		counts[i] = presence.PageUsers{Page: page, Users: users}
	}

	w.write(w.change(nil, counts...))
}

func count(t tb, s presence.Store, page string) presence.Count {
	t.Helper()
	counts, err := s.Counts(t.Context(), []string{page})
	if err != nil || len(counts) != 1 || counts[0].Page != page {
		t.Fatalf("Counts(%q) = %+v, %v", page, counts, err)
	}
	return counts[0]
}

func wantUsers(t tb, s presence.Store, page string, want int64) {
	t.Helper()
	if got := count(t, s, page); got.Users != want {
		t.Fatalf("count of %q = %d, want %d", page, got.Users, want)
	}
}

// claimed tests the age of a former claim against the clock of this machine. Stores round it to milliseconds.
func claimed(t *testing.T, s Store) {
	const some = 20 * time.Millisecond
	begun := time.Now()
	claim(t, s, 3)
	time.Sleep(some)
	next := claim(t, s, 3)

	if held, took := next.claim.Held, time.Since(begun); held < some/2 || held > took+some/2 {
		t.Fatalf("the former claim is %s old, in a test that has run for %s", held, took)
	}
}

func holds(t *testing.T, s Store) {
	w := claim(t, s, 3)
	began := time.Now()
	until := began.Add(20 * time.Second)
	m := presence.MemberChange{Member: presence.Member{User: 1, Page: "p"}}

	write := func(hold time.Time, alone bool) {
		t.Helper()
		m.Hold = hold
		m.Alone = alone
		w.write(w.change([]presence.MemberChange{m}))
	}

	one := func() presence.Member {
		snap := load(t, s, w.claim)
		if len(snap.Members) != 1 {
			t.Fatalf("Load = %+v; want one member", snap)
		}

		return snap.Members[0]
	}

	for _, alone := range []bool{false, true} {
		write(until, alone)
		// The store may compute the end by a clock of its own, which it reads a little later.
		got := one()
		tolerance := time.Since(began) + 2*time.Millisecond
		if got.Hold.Sub(until).Abs() > tolerance || got.Alone != alone {
			t.Fatalf("%+v; want a hold until %s, alone %t", got, until, alone)
		}
	}

	write(time.Time{}, false)
	if got := one(); !got.Hold.IsZero() || got.Alone {
		t.Fatalf("%+v; want no hold any more", got)
	}

	// A hold may have ended before its write arrives.
	write(began.Add(-time.Second), false)
	if got := one(); got.Hold.After(began) {
		t.Fatalf("%+v; want no hold that lasts", got)
	}
}

// loadedPages tests the case of a node that dies between its writes and leaves pages with wrong counts. The members or
// pages of the snapshot must name these pages, so that the next owner corrects them.
func loadedPages(t *testing.T, s Store) {
	w := claim(t, s, 3)
	m := presence.MemberChange{Member: presence.Member{User: 1, Page: "p"}}

	w.write(w.change([]presence.MemberChange{m}, presence.PageUsers{Page: "p", Users: 1}))

	// The first owner dies here. It has written the count of p, but no later change has confirmed it.
	next := claim(t, s, 3)
	snap := load(t, s, next.claim)

	named := slices.Contains(snap.Pages, "p")
	for _, m := range snap.Members {
		named = named || m.Page == "p"
	}

	if !named {
		t.Fatalf("Load = %+v; nobody would ever count p anew", snap)
	}
}

func large(t *testing.T, s Store) {
	const n = 3000
	w := claim(t, s, 3)
	// Some names contain the separators of Redis's keys.
	pages := []string{presence.SiteOf("shop").Qualify("page 1"), "a:c:b", "}:c:"}
	for i := range n {
		pages = append(pages, fmt.Sprintf("page %d", i))
	}

	var ms []presence.MemberChange
	var counts []presence.PageUsers
	for i, page := range pages {
		ms = append(ms, presence.MemberChange{Member: presence.Member{User: presence.User(i), Page: page}})
		counts = append(counts, presence.PageUsers{Page: page, Users: int64(i%7) + 1})
	}

	for i, c := range w.write(w.change(ms, counts...)) {
		if c.Page != counts[i].Page || c.Users != counts[i].Users {
			t.Fatalf("count %d = %+v, want %+v", i, c, counts[i])
		}
	}

	if snap := load(t, s, w.claim); len(snap.Members) != len(pages) {
		t.Fatalf("Load = %d members, want %d", len(snap.Members), len(pages))
	}

	w.set("page 7", 0) // an empty page may be listed or not
	found := map[string]bool{}
	err := s.Pages(t.Context(), func(pages []string) {
		for _, page := range pages {
			found[page] = true
		}
	})
	if err != nil {
		t.Fatal(err)
	}

	// The site has a count as well. A store may list it or not.
	delete(found, presence.AllPages)
	for _, page := range pages {
		if !found[page] && page != "page 7" {
			t.Errorf("%q is not listed", page)
		}
		delete(found, page)
	}

	if len(found) > 0 {
		t.Errorf("%v are listed", found)
	}
}
