// Package storetest tests the contract of a store. Every store runs all its tests.
package storetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/presence"
)

// Factory returns an empty store with the default numbers of partitions and
// buckets. The test's cleanup removes the store.
type Factory func(t testing.TB) presence.Store

// Run tests the contract.
func Run(t *testing.T, open Factory) {
	for name, test := range map[string]func(*testing.T, presence.Store){
		"a page nobody ever joined":                   neverJoined,
		"counts are sums over partitions":             sums,
		"a count keeps the time of its change":        updated,
		"versions grow with every change":             versions,
		"writing twice is writing once":               repeated,
		"an overtaken write changes nothing":          overtaken,
		"a newer claim fences the older":              fenced,
		"one fenced change does not stop the others":  fencedAlone,
		"load returns the members":                    members,
		"load returns holds":                          holds,
		"load names the pages of an unfinished write": loadedPages,
		"a reset drops the members it does not name":  reset,
		"many members and pages in one write":         large,
		"pages are compared byte by byte":             bytewise,
		"all pages that have users are listed":        listed,
		"attach returns the counts":                   attach,
		"topics that are not known are carried":       unknownTopics,
		"sites have nothing to do with each other":    sitesApart,
		"endpoints come and go":                       endpoints,
		"a watcher hears what changes":                watch,
		"a watcher hears endpoints":                   watchEndpoints,
		"a watcher hears only its buckets":            watchBuckets,
		"a change that changes no total is not told":  quiet,
		"watch ends with its context":                 watchEnds,
		"a slow watcher is told to read again":        slowWatcher,
		"partitions written at once add up":           concurrent,
		"any history ends with the model's counts":    model,
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t)
			complete(t, s)
			test(t, s)
		})
	}
	t.Run("counts are stale until all partitions are complete", func(t *testing.T) { incomplete(t, open(t)) })
}

// complete claims and writes every partition once, as a running cluster does.
func complete(t testing.TB, s presence.Store) {
	t.Helper()
	finish(t, s, claimAll(t, s, false))
}

func claimAll(t testing.TB, s presence.Store, again bool) []presence.Claim {
	t.Helper()
	partitions := make([]int, presence.DefaultPartitions)
	for i := range partitions {
		partitions[i] = i
	}
	claims, err := s.Claim(t.Context(), "node", partitions, again)
	if err != nil || len(claims) != len(partitions) {
		t.Fatalf("Claim of all = %d claims, %v", len(claims), err)
	}
	return claims
}

func finish(t testing.TB, s presence.Store, claims []presence.Claim) {
	t.Helper()
	var changes []presence.Change
	for _, c := range claims {
		changes = append(changes, presence.Change{Claim: c, Sequence: 1, Complete: true})
	}
	for i, o := range s.Write(t.Context(), changes) {
		if o.Err != nil {
			t.Fatalf("completing partition %d: %v", claims[i].Partition, o.Err)
		}
	}
}

func incomplete(t *testing.T, s presence.Store) {
	e := listen(t, s, allBuckets())
	claims := claimAll(t, s, false)
	wantMissing := func(want ...int) {
		t.Helper()
		ids := make([]int, presence.DefaultPartitions)
		for i := range ids {
			ids[i] = i
		}
		for _, everywhere := range []bool{true, false} {
			if got, err := s.Incomplete(t.Context(), ids, everywhere); err != nil || !slices.Equal(got, want) {
				t.Errorf("Incomplete(everywhere %t) = %v, %v; want %v", everywhere, got, err, want)
			}
		}
	}
	for _, c := range claims {
		if c.Whole {
			t.Fatalf("partition %d is whole before anybody has completed it", c.Partition)
		}
	}
	if c := count(t, s, "p"); !c.Stale {
		t.Errorf("before any partition is complete: %+v, want stale", c)
	}
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
	for range 2 { // complete stays complete from owner to owner
		if w := claim(t, s, 3); !w.claim.Whole {
			t.Error("a partition that was completed is not whole for its next owner")
		}
	}
	if c := count(t, s, "p"); c.Stale {
		t.Errorf("a partition changed hands: %+v, want it not stale", c)
	}
	wantMissing()
}

func reset(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	in := func(u presence.User) presence.MemberChange {
		return presence.MemberChange{Member: presence.Member{User: u, Page: "p"}}
	}
	changes := []presence.Change{w.change([]presence.MemberChange{in(1), in(2)}), w.change([]presence.MemberChange{in(2), in(3)})}
	changes[1].Reset = true
	for _, c := range changes {
		if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
	var got []presence.User
	for _, m := range load(t, s, w.claim).Members {
		got = append(got, m.User)
	}
	slices.Sort(got)
	if want := []presence.User{2, 3}; !slices.Equal(got, want) {
		t.Fatalf("members %v, want %v", got, want)
	}
}

func load(t testing.TB, s presence.Store, c presence.Claim) presence.Snapshot {
	t.Helper()
	snaps, err := s.Load(t.Context(), []presence.Claim{c})
	if err != nil || len(snaps) != 1 {
		t.Fatalf("Load = %d snapshots, %v", len(snaps), err)
	}
	return snaps[0]
}

// writer writes as a node does: one claim, growing sequences.
type writer struct {
	t     testing.TB
	s     presence.Store
	claim presence.Claim
	seq   uint64
}

func claim(t testing.TB, s presence.Store, partition int) *writer {
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

func (w *writer) set(page string, users int64) presence.Count {
	w.t.Helper()
	o := w.s.Write(w.t.Context(), []presence.Change{w.change(nil, presence.PageUsers{Page: page, Users: users})})
	if len(o) != 1 || o[0].Err != nil || len(o[0].Counts) != 1 || o[0].Counts[0].Page != page {
		w.t.Fatalf("Write(%q, %d) = %+v", page, users, o)
	}
	return o[0].Counts[0]
}

// setMany sets all pages in one write.
func (w *writer) setMany(pages []string, users int64) {
	w.t.Helper()
	counts := make([]presence.PageUsers, len(pages))
	for i, page := range pages {
		counts[i] = presence.PageUsers{Page: page, Users: users}
	}
	if o := w.s.Write(w.t.Context(), []presence.Change{w.change(nil, counts...)}); o[0].Err != nil {
		w.t.Fatal(o[0].Err)
	}
}

func count(t testing.TB, s presence.Store, page string) presence.Count {
	t.Helper()
	counts, err := s.Counts(t.Context(), []string{page})
	if err != nil || len(counts) != 1 || counts[0].Page != page {
		t.Fatalf("Counts(%q) = %+v, %v", page, counts, err)
	}
	return counts[0]
}

func wantUsers(t testing.TB, s presence.Store, page string, want int64) {
	t.Helper()
	if got := count(t, s, page); got.Users != want {
		t.Fatalf("count of %q = %d, want %d", page, got.Users, want)
	}
}

func neverJoined(t *testing.T, s presence.Store) {
	pages := []string{"b", presence.Site, "a"}
	counts, err := s.Counts(t.Context(), pages)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range counts {
		if c != (presence.Count{Page: pages[i]}) {
			t.Errorf("Counts()[%d] = %+v, want the zero count of %q", i, c, pages[i])
		}
	}
	w := claim(t, s, 1)
	if c := w.set("a", 0); c != (presence.Count{Page: "a"}) {
		t.Errorf("nobody on a page nobody ever joined = %+v, want the zero count", c)
	}
	if counts, err := s.Counts(t.Context(), nil); err != nil || len(counts) != 0 {
		t.Errorf("Counts of no pages = %v, %v", counts, err)
	}
}

func sums(t *testing.T, s presence.Store) {
	a, b := claim(t, s, 3), claim(t, s, 4)
	a.set("p", 2)
	if c := b.set("p", 5); c.Users != 7 {
		t.Errorf("2 and 5 are %d", c.Users)
	}
	a.set("p", 1)
	wantUsers(t, s, "p", 6)
	a.set("p", 0)
	b.set("p", 0)
	wantUsers(t, s, "p", 0)
	wantUsers(t, s, "q", 0)
}

func updated(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	before := time.Now().Add(-time.Second)
	c := w.set("p", 2)
	if after := time.Now().Add(time.Second); c.Updated.Before(before) || c.Updated.After(after) {
		t.Errorf("updated at %s, want between %s and %s", c.Updated, before, after)
	}
	if c.Updated != c.Updated.Truncate(time.Second).UTC() {
		t.Errorf("updated at %s, want whole seconds of UTC", c.Updated)
	}
	w.set("p", 0)
	if c := count(t, s, "p"); c.Updated.IsZero() {
		t.Error("the time of the last change is lost when the last user leaves")
	}
}

func versions(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	last := presence.Count{Page: "p"}
	for _, n := range []int64{1, 2, 1, 0, 1} {
		c := w.set("p", n)
		if !c.Newer(last) {
			t.Fatalf("version %s after %s", c.Version, last.Version)
		}
		if got := count(t, s, "p"); got != c {
			t.Fatalf("read %+v, the write said %+v", got, c)
		}
		last = c
	}
}

func repeated(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	c := w.change([]presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}}}, presence.PageUsers{Page: "p", Users: 1})
	var first presence.Count
	for i := range 3 {
		o := s.Write(t.Context(), []presence.Change{c})
		if o[0].Err != nil || len(o[0].Counts) != 1 {
			t.Fatalf("write %d = %+v", i, o[0])
		}
		if i == 0 {
			first = o[0].Counts[0]
		}
		if o[0].Counts[0] != first {
			t.Fatalf("write %d = %+v, the first said %+v", i, o[0].Counts[0], first)
		}
	}
	wantUsers(t, s, "p", 1)
}

func overtaken(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	old := w.change([]presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}}}, presence.PageUsers{Page: "p", Users: 1})
	gone := w.change([]presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}, Gone: true}}, presence.PageUsers{Page: "p", Users: 3})
	for _, c := range []presence.Change{gone, old} {
		if o := s.Write(t.Context(), []presence.Change{c}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
	wantUsers(t, s, "p", 3)
	if snap := load(t, s, w.claim); len(snap.Members) != 0 {
		t.Fatalf("Load = %+v; want no members", snap)
	}
}

func fenced(t *testing.T, s presence.Store) {
	const some = 20 * time.Millisecond
	begun := time.Now()
	zombie := claim(t, s, 3)
	zombie.set("p", 2)
	time.Sleep(some)
	owner := claim(t, s, 3)
	if held, took := owner.claim.Held, time.Since(begun); held < some/2 || held > took+some/2 {
		t.Fatalf("the claim before is said to have been made %s ago, in a test that has run for %s", held, took)
	}
	if owner.claim.Epoch <= zombie.claim.Epoch {
		t.Fatalf("epoch %d after %d", owner.claim.Epoch, zombie.claim.Epoch)
	}
	if owner.claim.Former != zombie.claim.Epoch {
		t.Fatalf("the epoch before %d is said to be %d, not %d", owner.claim.Epoch, owner.claim.Former, zombie.claim.Epoch)
	}
	change := zombie.change(
		[]presence.MemberChange{{Member: presence.Member{User: 1, Page: "p"}}},
		presence.PageUsers{Page: "p", Users: 9}, presence.PageUsers{Page: "a page the owner never wrote", Users: 9},
	)
	if o := s.Write(t.Context(), []presence.Change{change}); !errors.Is(o[0].Err, presence.ErrFenced) {
		t.Fatalf("the zombie's write = %+v, want ErrFenced", o[0])
	}
	if _, err := s.Load(t.Context(), []presence.Claim{zombie.claim}); !errors.Is(err, presence.ErrFenced) {
		t.Fatalf("the zombie's load: %v, want ErrFenced", err)
	}
	wantUsers(t, s, "p", 2)
	wantUsers(t, s, "a page the owner never wrote", 0)
	owner.set("p", 1)
	wantUsers(t, s, "p", 1)
	if snap := load(t, s, owner.claim); len(snap.Members) != 0 {
		t.Fatalf("Load = %+v; want no members", snap)
	}
}

func fencedAlone(t *testing.T, s presence.Store) {
	zombie, other := claim(t, s, 3), claim(t, s, 4)
	claim(t, s, 3)
	o := s.Write(t.Context(), []presence.Change{
		zombie.change(nil, presence.PageUsers{Page: "p", Users: 9}),
		other.change(nil, presence.PageUsers{Page: "p", Users: 1}),
	})
	if !errors.Is(o[0].Err, presence.ErrFenced) || o[1].Err != nil {
		t.Fatalf("Write = %+v, want the first alone fenced", o)
	}
	wantUsers(t, s, "p", 1)
}

func members(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	in := func(u presence.User, page string) presence.MemberChange {
		return presence.MemberChange{Member: presence.Member{User: u, Page: page}}
	}
	out := in(2, "p")
	out.Gone = true
	big := presence.User(1<<64 - 1)
	for _, ms := range [][]presence.MemberChange{
		{in(1, "p"), in(1, "q|:{}\"é"), in(2, "p"), in(big, "p")},
		{out},
	} {
		if o := s.Write(t.Context(), []presence.Change{w.change(ms)}); o[0].Err != nil {
			t.Fatal(o[0].Err)
		}
	}
	next := claim(t, s, 3)
	snap := load(t, s, next.claim)
	got := map[presence.Member]bool{}
	for _, m := range snap.Members {
		got[m] = true
	}
	want := map[presence.Member]bool{
		{User: 1, Page: "p"}: true, {User: 1, Page: "q|:{}\"é"}: true, {User: big, Page: "p"}: true,
	}
	if !maps.Equal(got, want) || len(snap.Members) != len(want) {
		t.Fatalf("Load = %+v, want %+v", snap.Members, want)
	}
}

func holds(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	until := time.Now().Add(20 * time.Second).Truncate(time.Millisecond)
	m := presence.MemberChange{Member: presence.Member{User: 1, Page: "p", Hold: until}}
	if o := s.Write(t.Context(), []presence.Change{w.change([]presence.MemberChange{m})}); o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	one := func() presence.Member {
		snap := load(t, s, w.claim)
		if len(snap.Members) != 1 {
			t.Fatalf("Load = %+v; want one member", snap)
		}
		return snap.Members[0]
	}
	if got := one(); !got.Hold.Equal(until) {
		t.Fatalf("hold until %s, want %s", got.Hold, until)
	}
	m.Hold = time.Time{}
	if o := s.Write(t.Context(), []presence.Change{w.change([]presence.MemberChange{m})}); o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	if got := one(); !got.Hold.IsZero() {
		t.Fatalf("hold until %s, want none any more", got.Hold)
	}
}

// A node that dies between its writes leaves pages with wrong counts. The members or
// pages of the snapshot must name these pages, so that the next owner corrects them.
func loadedPages(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	m := presence.MemberChange{Member: presence.Member{User: 1, Page: "p"}}
	if o := s.Write(t.Context(), []presence.Change{w.change([]presence.MemberChange{m}, presence.PageUsers{Page: "p", Users: 1})}); o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
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

func large(t *testing.T, s presence.Store) {
	const n = 3000
	w := claim(t, s, 3)
	var ms []presence.MemberChange
	var counts []presence.PageUsers
	for i := range n {
		page := fmt.Sprintf("page %d", i)
		ms = append(ms, presence.MemberChange{Member: presence.Member{User: presence.User(i), Page: page}})
		counts = append(counts, presence.PageUsers{Page: page, Users: int64(i%7) + 1})
	}
	o := s.Write(t.Context(), []presence.Change{w.change(ms, counts...)})
	if o[0].Err != nil || len(o[0].Counts) != n {
		t.Fatalf("Write = %d counts, %v", len(o[0].Counts), o[0].Err)
	}
	for i, c := range o[0].Counts {
		if c.Page != counts[i].Page || c.Users != counts[i].Users {
			t.Fatalf("count %d = %+v, want %+v", i, c, counts[i])
		}
	}
	if snap := load(t, s, w.claim); len(snap.Members) != n {
		t.Fatalf("Load = %d members, want %d", len(snap.Members), n)
	}
}

func bytewise(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	pages := []string{"é", "e\u0301", "E", "e", "e ", " e", "{e}", "a:b", "a b", "a|b", "日本", "*x", "\U0001F600"}
	for i, p := range pages {
		w.set(p, int64(i+1))
	}
	for i, p := range pages {
		wantUsers(t, s, p, int64(i+1))
	}
}

func listed(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	var want []string
	for i := range 1200 {
		want = append(want, fmt.Sprint("page ", i))
	}
	want = append(want, presence.NamespaceOf("shop").Name("page 1"), "a:c:b", "}:c:")
	w.setMany(want, 1)
	w.set("page 7", 0) // it may be listed
	found := map[string]bool{}
	if err := s.(presence.Lister).Pages(t.Context(), func(pages []string) {
		for _, page := range pages {
			found[page] = true
		}
	}); err != nil {
		t.Fatal(err)
	}
	delete(found, presence.Site)
	for _, page := range want {
		if !found[page] && page != "page 7" {
			t.Errorf("%q is not listed", page)
		}
		delete(found, page)
	}
	if len(found) > 0 {
		t.Errorf("%v are listed", found)
	}
}

func attach(t *testing.T, s presence.Store) {
	w := claim(t, s, 3)
	p := w.set("p", 4)
	want := []presence.Count{{Page: "q"}, p, {Page: presence.Site}}
	for what, read := range map[string]func([]presence.Topic) ([]presence.Update, error){
		"Attach":  func(list []presence.Topic) ([]presence.Update, error) { return s.Attach(t.Context(), "g1", list) },
		"Updates": func(list []presence.Topic) ([]presence.Update, error) { return s.Updates(t.Context(), list) },
	} {
		updates, err := read(topics("q", "p", presence.Site))
		if err != nil || len(updates) != len(want) {
			t.Fatalf("%s = %+v, %v", what, updates, err)
		}
		for i, u := range updates {
			if c, ok := presence.CountOf(u); !ok || c != want[i] || u.Check() != nil {
				t.Errorf("%s = %+v, want %+v", what, u, want[i])
			}
		}
	}
}

// unknownTopics checks that a store carries topics of a kind that only a newer
// process knows.
func unknownTopics(t *testing.T, s presence.Store) {
	list := []presence.Topic{
		{Kind: presence.KindOf("later"), Key: "p"}, {Kind: presence.KindCount, Key: "p"}, {Site: presence.NamespaceOf("other"), Kind: presence.KindOf("later"), Key: "p"},
	}
	e := listen(t, s, allBuckets())
	claim(t, s, 3).set("p", 4)
	updates, err := s.Attach(t.Context(), "g", list)
	if err != nil || len(updates) != len(list) {
		t.Fatalf("Attach = %+v, %v", updates, err)
	}
	for i, u := range updates {
		if known := i == 1; u.Topic != list[i] || (u.Version != presence.Version{}) != known || (u.Value != "") != known {
			t.Errorf("%s reads as %+v", list[i], u)
		}
	}
	e.until(t, "the count's endpoint", func() bool { return e.ends[presence.Endpoint{Topic: list[1], Gateway: "g"}] })
	if err := s.Detach(t.Context(), "g", list); err != nil {
		t.Error(err)
	}
}

// sitesApart checks that what has the same key on several sites is counted, read, told and
// kept apart.
func sitesApart(t *testing.T, s presence.Store) {
	shop, blog := presence.NamespaceOf("shop"), presence.NamespaceOf("blog")
	sites := []presence.Namespace{presence.DefaultSite, shop, blog}
	e := listen(t, s, allBuckets())
	w := claim(t, s, 3)
	var list []presence.Topic
	for _, site := range sites {
		for _, key := range []string{"p", "a/b", presence.Site} {
			list = append(list, presence.Topic{Site: site, Kind: presence.KindCount, Key: key})
		}
	}
	if _, err := s.Attach(t.Context(), "g", list); err != nil {
		t.Fatal(err)
	}
	var members []presence.MemberChange
	var counts []presence.PageUsers
	users := map[string]int64{}
	for i, topic := range list[:len(list)-1] { // nobody is in the last
		users[topic.Name()] = int64(i + 1)
		counts = append(counts, presence.PageUsers{Page: topic.Name(), Users: int64(i + 1)})
		if topic.Key != presence.Site {
			members = append(members, presence.MemberChange{Member: presence.Member{User: 3, Page: topic.Name()}})
		}
	}
	o := s.Write(t.Context(), []presence.Change{w.change(members, counts...)})
	if o[0].Err != nil {
		t.Fatal(o[0].Err)
	}
	for i, c := range o[0].Counts {
		if c.Page != counts[i].Page || c.Users != counts[i].Users {
			t.Errorf("written %+v, answered %+v", counts[i], c)
		}
	}
	updates, err := s.Updates(t.Context(), list)
	if err != nil {
		t.Fatal(err)
	}
	for i, topic := range list {
		wantUsers(t, s, topic.Name(), users[topic.Name()])
		if c, ok := presence.CountOf(updates[i]); !ok || updates[i].Topic != topic || c.Page != topic.Name() || c.Users != users[topic.Name()] {
			t.Errorf("%s reads as %+v", topic, updates[i])
		}
	}
	e.until(t, "the counts of all sites", func() bool {
		for name, n := range users {
			if e.counts[name].Users != n {
				return false
			}
		}
		return true
	})
	e.until(t, "the endpoints of all sites", func() bool {
		for _, topic := range list {
			if !e.ends[presence.Endpoint{Topic: topic, Gateway: "g"}] {
				return false
			}
		}
		return true
	})
	for _, topic := range list {
		if got := attached(t, s, topic.Name()); !slices.Equal(got, []string{"g"}) {
			t.Errorf("attached to %s: %v", topic, got)
		}
	}
	if missing, err := s.Missing(t.Context(), "g", list); err != nil || len(missing) != 0 {
		t.Errorf("Missing = %v, %v", missing, err)
	}
	var pages []string
	for _, m := range load(t, s, claim(t, s, 3).claim).Members {
		pages = append(pages, m.Page)
	}
	slices.Sort(pages)
	var want []string
	for _, m := range members {
		want = append(want, m.Page)
	}
	slices.Sort(want)
	if !slices.Equal(pages, want) {
		t.Errorf("members on %q, want %q", pages, want)
	}
	if err := s.Detach(t.Context(), "g", list[3:4]); err != nil {
		t.Fatal(err)
	}
	if missing, err := s.Missing(t.Context(), "g", list); err != nil || !slices.Equal(missing, list[3:4]) {
		t.Errorf("Missing = %v, %v; want %v", missing, err, list[3:4])
	}
}

func topics(pages ...string) []presence.Topic { return presence.CountTopics(pages) }

func attached(t testing.TB, s presence.Store, page string) []string {
	t.Helper()
	all, err := s.Attached(t.Context(), presence.Bucket(page, presence.DefaultBuckets))
	if err != nil {
		t.Fatal(err)
	}
	var gws []string
	for _, e := range all {
		if e.Topic == presence.CountTopic(page) && !e.Gone {
			gws = append(gws, e.Gateway)
		}
	}
	slices.Sort(gws)
	return gws
}

func endpoints(t *testing.T, s presence.Store) {
	for _, step := range []struct {
		gateway string
		gone    bool
		want    []string
	}{
		{"g1", false, []string{"g1"}},
		{"g1", false, []string{"g1"}},
		{"g2", false, []string{"g1", "g2"}},
		{"g1", true, []string{"g2"}},
		{"g1", true, []string{"g2"}},
		{"g2", true, nil},
	} {
		var err error
		if step.gone {
			err = s.Detach(t.Context(), step.gateway, topics("p"))
		} else {
			_, err = s.Attach(t.Context(), step.gateway, topics("p"))
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := attached(t, s, "p"); !slices.Equal(got, step.want) {
			t.Fatalf("after %+v: %v", step, got)
		}
		for _, gw := range []string{"g1", "g2", "g"} {
			missing, err := s.Missing(t.Context(), gw, topics("p", "never"))
			want := topics("p", "never")
			if slices.Contains(step.want, gw) {
				want = topics("never")
			}
			slices.SortFunc(missing, func(a, b presence.Topic) int { return cmp.Compare(b.Key, a.Key) })
			if err != nil || !slices.Equal(missing, want) {
				t.Fatalf("after %+v %s misses %v, %v; want %v", step, gw, missing, err, want)
			}
		}
	}
}

// ear collects the publications that a watcher gets.
type ear struct {
	mu     sync.Mutex
	counts map[string]presence.Count
	told   map[string]int
	ends   map[presence.Endpoint]bool
	lost   map[int]int
	more   chan struct{}
}

func listen(t testing.TB, s presence.Store, buckets []int) *ear {
	t.Helper()
	e := &ear{
		counts: map[string]presence.Count{}, told: map[string]int{},
		ends: map[presence.Endpoint]bool{}, lost: map[int]int{}, more: make(chan struct{}, 1),
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Watch(ctx, buckets, func(p presence.Publication) {
			e.mu.Lock()
			defer e.mu.Unlock()
			for _, u := range p.Updates {
				if u.Topic.Bucket(presence.DefaultBuckets) != p.Bucket || u.Check() != nil {
					t.Errorf("bucket %d told %+v", p.Bucket, u)
				}
				c, ok := presence.CountOf(u)
				if !ok {
					continue
				}
				if old, ok := e.counts[c.Page]; !ok || c.Newer(old) {
					e.counts[c.Page] = c
				}
				e.told[c.Page]++
			}
			for _, ep := range p.Endpoints {
				e.ends[presence.Endpoint{Topic: ep.Topic, Gateway: ep.Gateway}] = !ep.Gone
			}
			if p.Lost {
				e.lost[p.Bucket]++
			}
			select {
			case e.more <- struct{}{}:
			default:
			}
		})
	}()
	t.Cleanup(func() { stop(); <-done })
	e.until(t, "the first Lost of every bucket", func() bool { return len(e.lost) == len(buckets) })
	return e
}

// until waits until ok returns true. It calls ok with the ear's lock held.
func (e *ear) until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	limit := time.After(10 * time.Second)
	for {
		e.mu.Lock()
		done := ok()
		e.mu.Unlock()
		if done {
			return
		}
		select {
		case <-e.more:
		case <-limit:
			t.Fatalf("the watcher was not told: %s", what)
		}
	}
}

func allBuckets() []int {
	all := make([]int, presence.DefaultBuckets)
	for i := range all {
		all[i] = i
	}
	return all
}

func watch(t *testing.T, s presence.Store) {
	e := listen(t, s, allBuckets())
	w := claim(t, s, 3)
	for i := range 20 {
		w.set(fmt.Sprint("p", i%3), int64(i))
	}
	for i, want := range []int64{18, 19, 17} {
		page := fmt.Sprint("p", i)
		var told presence.Count
		e.until(t, page, func() bool { told = e.counts[page]; return told.Users == want })
		if got := count(t, s, page); told != got {
			t.Errorf("told %+v, read %+v", told, got)
		}
	}
}

func watchEndpoints(t *testing.T, s presence.Store) {
	e := listen(t, s, allBuckets())
	if _, err := s.Attach(t.Context(), "g", topics("p", "q")); err != nil {
		t.Fatal(err)
	}
	for _, page := range []string{"p", "q"} {
		e.until(t, "g on "+page, func() bool { return e.ends[presence.Endpoint{Topic: presence.CountTopic(page), Gateway: "g"}] })
	}
	if err := s.Detach(t.Context(), "g", topics("p")); err != nil {
		t.Fatal(err)
	}
	e.until(t, "g gone from p", func() bool { return !e.ends[presence.Endpoint{Topic: presence.CountTopic("p"), Gateway: "g"}] })
}

func watchBuckets(t *testing.T, s presence.Store) {
	b := presence.Bucket("p", presence.DefaultBuckets)
	e := listen(t, s, []int{b})
	w := claim(t, s, 3)
	for i := range 200 {
		w.set(fmt.Sprint("other", i), 1)
	}
	w.set("p", 1)
	e.until(t, "p", func() bool { return e.counts["p"].Users == 1 })
	e.mu.Lock()
	defer e.mu.Unlock()
	for page := range e.counts {
		if presence.Bucket(page, presence.DefaultBuckets) != b {
			t.Errorf("told of %q of another bucket", page)
		}
	}
}

func quiet(t *testing.T, s presence.Store) {
	e := listen(t, s, allBuckets())
	w := claim(t, s, 3)
	first := w.set("p", 1)
	if again := w.set("p", 1); again != first {
		t.Errorf("a write that changes nothing made %+v of %+v", again, first)
	}
	w.set("p", 2)
	told := 0
	e.until(t, "2 on p", func() bool { told = e.told["p"]; return e.counts["p"].Users == 2 })
	if told != 2 {
		t.Errorf("told %d times of two changes", told)
	}
}

func watchEnds(t *testing.T, s presence.Store) {
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Watch(ctx, allBuckets(), func(presence.Publication) {}) }()
	stop()
	select {
	case err := <-done:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Watch = %v, want the context's error", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("Watch goes on after its context")
	}
}

// slowWatcher does not check which publications were dropped. It checks that the
// watcher gets a Lost after each gap. The watcher is blocked until far more was
// published than any store keeps for it. So there is a gap with the last
// publications in it, and only a Lost can make up for them.
func slowWatcher(t *testing.T, s presence.Store) {
	b := presence.Bucket("p", presence.DefaultBuckets)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	begun, release, heard := make(chan struct{}), make(chan struct{}), make(chan presence.Publication)
	first := true
	go func() {
		_ = s.Watch(ctx, []int{b}, func(p presence.Publication) {
			if first { // the first word, which says to read: from here on what comes waits
				first = false
				close(begun)
				<-release
				return
			}
			select {
			case heard <- p:
			case <-ctx.Done():
			}
		})
	}()
	<-begun
	var long []string // pages of the bucket, with names as long as they may be
	for i := 0; len(long) < 300; i++ {
		if page := fmt.Sprintf("%0128d", i); presence.Bucket(page, presence.DefaultBuckets) == b {
			long = append(long, page)
		}
	}
	w := claim(t, s, 3)
	published := 0
	next := func() {
		published++
		w.set("p", int64(published))
	}
	for range 4500 { // more publications than the embedded store keeps
		next()
	}
	for range 250 { // more bytes than the one in Redis keeps
		w.setMany(long, int64(published))
		next()
	}
	close(release)
	limit := time.After(30 * time.Second)
	told := 0
	for {
		select {
		case p := <-heard:
			for _, u := range p.Updates {
				if c, ok := presence.CountOf(u); ok && c.Page == "p" {
					told++
				}
			}
			if p.Lost {
				if told >= published {
					t.Fatalf("all of %d publications were kept: this is no slow watcher", published)
				}
				wantUsers(t, s, "p", int64(published))
				return
			}
			if told >= published {
				t.Fatalf("all of %d publications were kept: this is no slow watcher", published)
			}
		case <-limit:
			t.Fatalf("the slow watcher was told %d of %d counts, and never to read again", told, published)
		}
	}
}

func concurrent(t *testing.T, s presence.Store) {
	const partitions, rounds = 8, 50
	var wg sync.WaitGroup
	for p := range partitions {
		w := claim(t, s, p)
		wg.Go(func() {
			for i := range rounds {
				change := w.change(nil, presence.PageUsers{Page: "p", Users: int64(i)}, presence.PageUsers{Page: fmt.Sprint(p), Users: 1})
				if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
					t.Error(o[0].Err)
				}
			}
		})
	}
	wg.Wait()
	wantUsers(t, s, "p", partitions*(rounds-1))
}

// model plays random histories of several owners against a map.
func model(t *testing.T, s presence.Store) {
	run := 0
	rapid.Check(t, func(rt *rapid.T) {
		run++
		partitions := []int{run % presence.DefaultPartitions, (run + 1) % presence.DefaultPartitions}
		writers := map[int]*writer{}
		want := map[string]map[int]int64{}
		page := func(i int) string { return fmt.Sprintf("run %d page %d", run, i) }
		for range rapid.IntRange(1, 30).Draw(rt, "steps") {
			p := rapid.SampledFrom(partitions).Draw(rt, "partition")
			if writers[p] == nil || rapid.IntRange(0, 9).Draw(rt, "claim") == 0 {
				writers[p] = claim(t, s, p)
			}
			var counts []presence.PageUsers
			for i := range rapid.IntRange(1, 4).Draw(rt, "pages") {
				n := rapid.Int64Range(0, 5).Draw(rt, "users")
				counts = append(counts, presence.PageUsers{Page: page(i), Users: n})
				if want[page(i)] == nil {
					want[page(i)] = map[int]int64{}
				}
				want[page(i)][p] = n
			}
			change := writers[p].change(nil, counts...)
			for range rapid.IntRange(1, 2).Draw(rt, "times") {
				if o := s.Write(t.Context(), []presence.Change{change}); o[0].Err != nil {
					rt.Fatal(o[0].Err)
				}
			}
		}
		for name, parts := range want {
			sum := int64(0)
			for _, n := range parts {
				sum += n
			}
			if got := count(t, s, name); got.Users != sum {
				rt.Fatalf("count of %q = %d, want %d", name, got.Users, sum)
			}
		}
	})
}
