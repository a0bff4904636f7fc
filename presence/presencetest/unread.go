package presencetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/unread"
)

var unreads = map[string]func(*testing.T, Store){
	"a page that never changed":                      neverChanged,
	"changes are counted":                            changes,
	"a change with a known key does not count":       keys,
	"own changes are noted":                          owns,
	"who changed what since":                         authors,
	"the authors of a page are bounded":              manyAuthors,
	"who follows nothing":                            noRecord,
	"records are saved":                              save,
	"a record is saved over the one that was read":   saveConflict,
	"a watcher hears changes and follows":            watchUnread,
	"attach returns levels and versions":             attachUnread,
	"a user follows at most 1,000 pages":             maxFollows,
	"follows begin with 0 and end with their unread": followUnfollow,
	"updated is the last time unread changed":        unreadUpdated,
	"what a user follows is forgotten":               forget,
	"notifications are read one by one":              notifications,
	"a change during a reset is not lost":            changeInReset,
	"edits at once all count":                        editsAtOnce,
	"resets and changes at once":                     resetsAtOnce,
	"a counter that lost its past":                   lostPast,
	"any history ends with the model's unread":       unreadModel,
}

var names struct {
	sync.Mutex
	n int
}

// freshName returns a name that no other test uses: every other one of another site.
func freshName() string {
	names.Lock()
	defer names.Unlock()
	names.n++
	name := fmt.Sprintf("%s %d", time.Now().Format("150405.000000000"), names.n)
	if names.n%2 == 0 {
		return presence.SiteOf("shop").Qualify(name)
	}
	return name
}

func freshUser() unread.User { return unread.User(unread.KeyHash("user", freshName())) }

func change(t testing.TB, s unread.Store, page string, c unread.Change) {
	t.Helper()
	if err := s.Change(t.Context(), page, c); err != nil {
		t.Fatalf("Change(%q, %+v): %v", page, c, err)
	}
}

func level(t testing.TB, s unread.Store, user unread.User, page string) (unread.Level, unread.Own) {
	t.Helper()
	levels, owns, err := s.Levels(t.Context(), user, []string{page})
	if err != nil || len(levels) != 1 || len(owns) != 1 {
		t.Fatalf("Levels(%q) = %v, %v, %v", page, levels, owns, err)
	}
	return levels[0], owns[0]
}

func neverChanged(t *testing.T, s Store) {
	if l, o := level(t, s, freshUser(), freshName()); l != (unread.Level{}) || o != (unread.Own{}) {
		t.Errorf("%+v, %+v", l, o)
	}
	if levels, owns, err := s.Levels(t.Context(), freshUser(), nil); err != nil || len(levels) != 0 || len(owns) != 0 {
		t.Errorf("Levels of no pages = %v, %v, %v", levels, owns, err)
	}
	if l, owns, err := s.Authors(t.Context(), freshName(), 0, []unread.User{freshUser()}); err != nil || l != (unread.Level{}) || len(owns) != 0 {
		t.Errorf("Authors = %+v, %v, %v", l, owns, err)
	}
}

func changes(t *testing.T, s Store) {
	user, pages := freshUser(), []string{freshName(), freshName() + ` "quoted" % \ ü 😀`, freshName()}
	begin := time.Now().Add(-time.Second)
	for i := range 5 {
		change(t, s, pages[0], unread.Change{})
		if i < 2 {
			change(t, s, pages[1], unread.Change{})
		}
	}
	levels, _, err := s.Levels(t.Context(), user, pages)
	if err != nil || len(levels) != 3 {
		t.Fatalf("%v, %v", levels, err)
	}
	for i, want := range []int64{5, 2, 0} {
		l := levels[i]
		if l.All != want || l.By != 0 {
			t.Errorf("level %d is %+v, want %d", i, l, want)
		}
		if want > 0 && (l.Incarnation == 0 || l.At.Before(begin) || time.Now().Before(l.At) || l.At != l.At.Truncate(time.Second).UTC()) {
			t.Errorf("level %d is %+v", i, l)
		}
	}
	change(t, s, pages[0], unread.Change{})
	if l, _ := level(t, s, user, pages[0]); !l.Newer(levels[0]) || l.Incarnation != levels[0].Incarnation {
		t.Errorf("%+v after %+v", l, levels[0])
	}
}

func keys(t *testing.T, s Store) {
	user, p, q := freshUser(), freshName(), freshName()
	for range 3 {
		change(t, s, p, unread.Change{Key: "k1"})
		change(t, s, p, unread.Change{Key: "k2 with \x00 and ü", By: &user})
		change(t, s, q, unread.Change{Key: "k1"})
	}
	if l, o := level(t, s, user, p); l.All != 2 || l.By != 1 || o.Changes != 1 {
		t.Errorf("two keys three times each: %+v, %+v", l, o)
	}
	if l, _ := level(t, s, user, q); l.All != 1 {
		t.Errorf("a key is one page's: %+v", l)
	}
}

func owns(t *testing.T, s Store) {
	a, b, page := freshUser(), freshUser(), freshName()
	change(t, s, page, unread.Change{By: &a})
	if l, o := level(t, s, a, page); l.All != 1 || l.By != 1 || o != (unread.Own{Changes: 1, Last: 1}) {
		t.Errorf("%+v, %+v", l, o)
	}
	change(t, s, page, unread.Change{})
	l2, _ := level(t, s, a, page)
	change(t, s, page, unread.Change{By: &a})
	change(t, s, page, unread.Change{By: &a})
	if l, o := level(t, s, a, page); l.All != 4 || l.By != 3 || o != (unread.Own{Changes: 3, Last: 4, Before: l2.At}) {
		t.Errorf("%+v, %+v", l, o)
	}
	if _, o := level(t, s, b, page); o != (unread.Own{}) {
		t.Errorf("who changed nothing has %+v", o)
	}
}

func authors(t *testing.T, s Store) {
	page := freshName()
	users := make([]unread.User, 30)
	for i := range users {
		users[i] = freshUser()
	}
	silent := freshUser()
	all := append(slices.Clone(users), silent)
	for i := range users {
		change(t, s, page, unread.Change{By: &users[i]})
		change(t, s, page, unread.Change{})
		change(t, s, page, unread.Change{By: &users[0]})
	}
	now, _ := level(t, s, silent, page)
	for _, since := range []int64{0, 1, 40, 51, 52, 53, 58, 59, 60} {
		l, owns, err := s.Authors(t.Context(), page, since, all)
		if err != nil || l != now {
			t.Fatalf("Authors since %d = %+v, %v; want %+v", since, l, err, now)
		}
		for i, u := range users {
			last := int64(2*i + 1) // Level.By after the change
			if i == 0 {
				last = 60
			}
			own, ok := owns[u]
			if last > since && !ok {
				t.Errorf("since %d: user %d is missing", since, i)
			}
			if want := map[bool]int64{true: 31, false: 1}[i == 0]; ok && own.Changes != want {
				t.Errorf("since %d: user %d has %+v, want %d", since, i, own, want)
			}
		}
		if _, ok := owns[silent]; ok {
			t.Errorf("since %d: who changed nothing is an author", since)
		}
	}
	if l, owns, err := s.Authors(t.Context(), page, 0, nil); err != nil || l != now {
		t.Errorf("Authors of nobody = %+v, %v, %v", l, owns, err)
	}
}

func manyAuthors(t *testing.T, s Store) {
	page := freshName()
	users := make([]unread.User, unread.MaxAuthors+1)
	for i := range users {
		users[i] = freshUser()
	}
	var wg sync.WaitGroup
	for w := range 50 {
		wg.Go(func() {
			for i := w; i < unread.MaxAuthors; i += 50 {
				if err := s.Change(t.Context(), page, unread.Change{By: &users[i]}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	last := &users[unread.MaxAuthors]
	change(t, s, page, unread.Change{By: last})
	if l, o := level(t, s, *last, page); l.All != unread.MaxAuthors+1 || l.By != unread.MaxAuthors || o != (unread.Own{}) {
		t.Errorf("one author too many: %+v, %+v", l, o)
	}
	change(t, s, page, unread.Change{By: &users[7]})
	if l, o := level(t, s, users[7], page); l.All != unread.MaxAuthors+2 || o.Changes != 2 {
		t.Errorf("an author again: %+v, %+v", l, o)
	}
}

func record(t testing.TB, s unread.Store, u unread.User) unread.Record {
	t.Helper()
	records, err := s.Records(t.Context(), []unread.User{u})
	if err != nil || len(records) != 1 {
		t.Fatalf("Records = %v, %v", records, err)
	}
	return records[0]
}

func sameRecord(a, b unread.Record) bool {
	set, gone := a.Differences(b)
	return a.Version == b.Version && a.Updated.Equal(b.Updated) && len(set) == 0 && len(gone) == 0
}

func noRecord(t *testing.T, s Store) {
	if r := record(t, s, freshUser()); !sameRecord(r, unread.Record{}) {
		t.Errorf("%+v", r)
	}
	if records, err := s.Records(t.Context(), nil); err != nil || len(records) != 0 {
		t.Errorf("Records of nobody = %v, %v", records, err)
	}
}

func save(t *testing.T, s Store) {
	u := freshUser()
	old := unread.Record{}
	put := func(r unread.Record) {
		t.Helper()
		v, err := s.Save(t.Context(), u, old, r)
		if err != nil || v.Compare(old.Version) <= 0 {
			t.Fatalf("Save after %s = %s, %v", old.Version, v, err)
		}
		r.Version = v
		if got := record(t, s, u); !sameRecord(got, r) {
			t.Fatalf("saved %+v, read %+v", r, got)
		}
		old = r
	}
	var many []unread.Follow
	for i := range unread.MaxFollows {
		many = append(many, unread.Follow{Page: fmt.Sprintf("page %04d", i), Incarnation: uint64(i), Seen: int64(i)})
	}
	put(unread.Record{Updated: time.Unix(1700000000, 0).UTC(), Follows: []unread.Follow{
		{Page: "a", Incarnation: 1<<53 - 1, Seen: 1 << 40},
		{Page: "b", Incarnation: 7, Seen: 3},
		{Page: "ü \"😀\" \\", Seen: 0},
	}})
	put(unread.Record{Updated: old.Updated, Follows: []unread.Follow{{Page: "a", Incarnation: 2, Seen: 1}, {Page: "c"}}})
	put(unread.Record{Follows: many, Updated: old.Updated.Add(time.Second)})
	put(unread.Record{Updated: old.Updated})
	put(unread.Record{Follows: []unread.Follow{{Page: "a"}}, Updated: old.Updated})
	other := freshUser()
	records, err := s.Records(t.Context(), []unread.User{other, u, other})
	if err != nil || len(records) != 3 || !sameRecord(records[1], old) || !sameRecord(records[0], unread.Record{}) || !sameRecord(records[2], unread.Record{}) {
		t.Errorf("Records = %+v, %v", records, err)
	}
}

func saveConflict(t *testing.T, s Store) {
	u := freshUser()
	one := unread.Record{Follows: []unread.Follow{{Page: "a"}}}
	v1, err := s.Save(t.Context(), u, unread.Record{}, one)
	if err != nil {
		t.Fatal(err)
	}
	for _, stale := range []presence.Version{{}, {Incarnation: v1.Incarnation, Sequence: v1.Sequence + 1}, {Incarnation: v1.Incarnation + 1, Sequence: v1.Sequence}} {
		if _, err := s.Save(t.Context(), u, unread.Record{Version: stale}, unread.Record{}); !errors.Is(err, unread.ErrConflict) {
			t.Errorf("over %s, while it is %s: %v", stale, v1, err)
		}
	}
	one.Version = v1
	if got := record(t, s, u); !sameRecord(got, one) {
		t.Errorf("after conflicts: %+v", got)
	}
}

func watchUnread(t *testing.T, s Store) {
	u, page := freshUser(), freshName()
	topics := []presence.Topic{unread.LevelTopic(page), unread.RecordTopic(u)}
	var mu sync.Mutex
	heard := map[presence.Topic][]presence.Update{}
	lost := map[int]bool{}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Watch(ctx, []int{topics[0].Bucket(presence.DefaultBuckets), topics[1].Bucket(presence.DefaultBuckets)}, func(p presence.Publication) {
			mu.Lock()
			defer mu.Unlock()
			if p.Lost {
				lost[p.Bucket] = true
			}
			for _, u := range p.Updates {
				heard[u.Topic] = append(heard[u.Topic], u)
			}
		})
	}()
	t.Cleanup(func() { stop(); <-done })
	until := func(what string, ok func() bool) {
		t.Helper()
		testkit.Eventually(t, "the watcher hears "+what, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return ok()
		})
	}
	until("the subscription", func() bool {
		return lost[topics[0].Bucket(presence.DefaultBuckets)] && lost[topics[1].Bucket(presence.DefaultBuckets)]
	})
	for range 3 {
		change(t, s, page, unread.Change{By: &u})
	}
	change(t, s, page, unread.Change{Key: "k"})
	change(t, s, page, unread.Change{Key: "k"})
	v, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "a"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{}); err == nil {
		t.Fatal("a conflict passed")
	}
	// An update that must not be published would be published before these.
	change(t, s, page, unread.Change{})
	last, err := s.Save(t.Context(), u, unread.Record{Version: v, Follows: []unread.Follow{{Page: "a"}}}, unread.Record{})
	if err != nil {
		t.Fatal(err)
	}
	now, _ := level(t, s, u, page)
	until("the last change", func() bool { n := len(heard[topics[0]]); return n > 0 && heard[topics[0]][n-1] == now.Update(page) })
	until("the last follows", func() bool { n := len(heard[topics[1]]); return n > 0 && heard[topics[1]][n-1].Version == last })
	mu.Lock()
	defer mu.Unlock()
	got := heard[topics[0]]
	if first, ok := unread.LevelOf(got[0]); len(got) != 5 || !ok || first != (unread.Level{Incarnation: now.Incarnation, All: 1, By: 1, At: first.At}) {
		t.Errorf("changes were told as %+v", got)
	}
	if got := heard[topics[1]]; len(got) != 2 || got[0].Version != v || got[0].Stale {
		t.Errorf("follows were told as %+v, want versions %s and %s", got, v, last)
	}
}

func attachUnread(t *testing.T, s Store) {
	u, page := freshUser(), freshName()
	topics := []presence.Topic{unread.LevelTopic(page), presence.CountTopic(page), unread.RecordTopic(u)}
	complete(t, s)
	updates, err := s.Attach(t.Context(), "g", topics)
	if err != nil || len(updates) != 3 {
		t.Fatalf("%+v, %v", updates, err)
	}
	for i, u := range updates {
		if u.Topic != topics[i] || u.Version != (presence.Version{}) || u.Stale {
			t.Errorf("nothing there: %+v", u)
		}
	}
	change(t, s, page, unread.Change{})
	change(t, s, page, unread.Change{By: &u})
	v, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "a"}}})
	if err != nil {
		t.Fatal(err)
	}
	now, _ := level(t, s, u, page)
	for what, read := range map[string]func() ([]presence.Update, error){
		"attach":  func() ([]presence.Update, error) { return s.Attach(t.Context(), "g2", topics) },
		"updates": func() ([]presence.Update, error) { return s.Updates(t.Context(), topics) },
	} {
		updates, err := read()
		if err != nil || len(updates) != 3 || updates[0] != now.Update(page) || updates[1].Version != (presence.Version{}) {
			t.Fatalf("%s: %+v, %v", what, updates, err)
		}
		if user, ok := unread.UserOf(updates[2]); !ok || user != u || updates[2].Version != v {
			t.Errorf("%s: %+v", what, updates[2])
		}
	}
	for _, topic := range topics {
		var gateways []string
		ends, err := s.Attached(t.Context(), topic.Bucket(presence.DefaultBuckets))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range ends {
			if e.Topic == topic {
				gateways = append(gateways, e.Gateway)
			}
		}
		slices.Sort(gateways)
		if !slices.Equal(gateways, []string{"g", "g2"}) {
			t.Errorf("%q is attached to %q", topic, gateways)
		}
	}
	if err := errors.Join(s.Detach(t.Context(), "g", topics), s.Detach(t.Context(), "g2", topics)); err != nil {
		t.Error(err)
	}
}

func follow(t testing.TB, b *unread.FollowService, u unread.User, page string) {
	t.Helper()
	if err := b.Follow(t.Context(), u, page); err != nil {
		t.Fatalf("Follow(%q): %v", page, err)
	}
}

func wantUnread(t testing.TB, b *unread.FollowService, u unread.User, want int64) time.Time {
	t.Helper()
	n, updated, err := b.Unread(t.Context(), u)
	if err != nil || n != want {
		t.Fatalf("unread = %d, %v; want %d", n, err, want)
	}
	return updated
}

// notifications checks the list of unread pages: the newest first, each with the note of its
// newest unread change that has a note.
func notifications(t *testing.T, s Store) {
	b, u, a, z := unread.NewFollowService(s), freshUser(), freshName(), freshName()
	is := func(most int, all int64, want ...unread.Notification) {
		t.Helper()
		got, n, err := b.Notifications(t.Context(), u, most)
		if err != nil || n != all || len(got) != len(want) {
			t.Fatalf("%+v, %d unread, %v; want %+v", got, n, err, want)
		}
		for i := range got {
			if since := time.Since(got[i].At); since < -time.Second || since > time.Minute {
				t.Errorf("%+v is of %s", got[i], got[i].At)
			}
			if got[i].At = (time.Time{}); !slices.Contains(want, got[i]) {
				t.Errorf("%+v, want %+v", got[i], want)
			}
		}
	}
	change(t, s, a, unread.Change{Title: "before", URL: "/before"})
	follow(t, b, u, a)
	follow(t, b, u, z)
	is(9, 0)
	change(t, s, a, unread.Change{})
	is(9, 1, unread.Notification{Page: a, Count: 1}) // the note is of a change before the follow
	change(t, s, a, unread.Change{Title: "ü 😀", URL: "https://a.example/?b=c d"})
	change(t, s, a, unread.Change{})
	change(t, s, z, unread.Change{By: &u, Title: "own"})
	change(t, s, z, unread.Change{URL: "/z"})
	first, second := unread.Notification{Page: a, Count: 3, Title: "ü 😀", URL: "https://a.example/?b=c d"}, unread.Notification{Page: z, Count: 1, URL: "/z"}
	is(9, 4, first, second)
	if got, n, err := b.Notifications(t.Context(), u, 1); err != nil || len(got) != 1 || n != 4 {
		t.Errorf("%+v, %d, %v", got, n, err)
	}
	if _, err := b.Reset(t.Context(), u, a, freshName()); err != nil {
		t.Fatal(err)
	}
	is(9, 1, second)
	change(t, s, a, unread.Change{})
	is(9, 2, unread.Notification{Page: a, Count: 1}, second)
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	is(9, 0)
	change(t, s, z, unread.Change{})
	change(t, s, z, unread.Change{By: &u, Title: "own"})
	is(9, 1, unread.Notification{Page: z, Count: 1})
}

func forget(t *testing.T, s Store) {
	b, u, other, page := unread.NewFollowService(s), freshUser(), freshUser(), freshName()
	if err := b.Forget(t.Context(), u); err != nil { // who follows nothing
		t.Fatal(err)
	}
	for _, user := range []unread.User{u, other} {
		follow(t, b, user, page)
		follow(t, b, user, page+"2")
	}
	change(t, s, page, unread.Change{})
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	change(t, s, page, unread.Change{})
	before := record(t, s, u).Version
	if err := b.Forget(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	if r := record(t, s, u); len(r.Follows) != 0 || !r.Updated.IsZero() || r.Version.Compare(before) <= 0 {
		t.Errorf("%+v", r)
	}
	wantUnread(t, b, u, 0)
	wantUnread(t, b, other, 2)
	follow(t, b, u, page) // as a new one
	wantUnread(t, b, u, 0)
	change(t, s, page, unread.Change{})
	wantUnread(t, b, u, 1)
}

func maxFollows(t *testing.T, s Store) {
	b, u := unread.NewFollowService(s), freshUser()
	var r unread.Record
	for i := range unread.MaxFollows - 1 {
		r.Follows = append(r.Follows, unread.Follow{Page: fmt.Sprintf("p%04d", i)})
	}
	if _, err := s.Save(t.Context(), u, unread.Record{}, r); err != nil {
		t.Fatal(err)
	}
	follow(t, b, u, "the last")
	if err := b.Follow(t.Context(), u, "one more"); !errors.Is(err, presence.ErrTooMany) {
		t.Errorf("the 1,001st follow: %v", err)
	}
	follow(t, b, u, "the last") // again
	if err := b.Unfollow(t.Context(), u, "p0000"); err != nil {
		t.Fatal(err)
	}
	follow(t, b, u, "one more")
	if got := record(t, s, u); len(got.Follows) != unread.MaxFollows {
		t.Errorf("%d follows", len(got.Follows))
	}
}

func followUnfollow(t *testing.T, s Store) {
	b, u, p, q := unread.NewFollowService(s), freshUser(), freshName(), freshName()
	change(t, s, p, unread.Change{})
	follow(t, b, u, p)
	follow(t, b, u, q)
	wantUnread(t, b, u, 0)
	change(t, s, p, unread.Change{})
	change(t, s, q, unread.Change{})
	change(t, s, q, unread.Change{})
	follow(t, b, u, p) // again: nothing changes
	wantUnread(t, b, u, 3)
	if err := b.Unfollow(t.Context(), u, q); err != nil {
		t.Fatal(err)
	}
	wantUnread(t, b, u, 1)
	if err := b.Unfollow(t.Context(), u, q); err != nil {
		t.Fatal(err)
	}
	follow(t, b, u, q)
	wantUnread(t, b, u, 1)
	change(t, s, q, unread.Change{})
	wantUnread(t, b, u, 2)
	if st, err := b.Reset(t.Context(), u); err != nil || !sameRecord(st.Record, record(t, s, u)) {
		t.Errorf("Reset = %+v, %v; it is %+v", st.Record, err, record(t, s, u))
	}
	wantUnread(t, b, u, 0)
}

func unreadUpdated(t *testing.T, s Store) {
	b, u, page := unread.NewFollowService(s), freshUser(), freshName()
	change(t, s, page, unread.Change{})
	follow(t, b, u, page)
	if at := wantUnread(t, b, u, 0); !at.IsZero() {
		t.Errorf("there never was one, but it was updated %s", at)
	}
	change(t, s, page, unread.Change{By: &u})
	if at := wantUnread(t, b, u, 0); !at.IsZero() {
		t.Errorf("the own change moved it, %s", at)
	}
	change(t, s, page, unread.Change{})
	l, _ := level(t, s, u, page)
	if at := wantUnread(t, b, u, 1); !at.Equal(l.At) {
		t.Errorf("updated %s, the change was %s", at, l.At)
	}
	time.Sleep(time.Until(l.At.Add(time.Second))) // it is another second
	change(t, s, page, unread.Change{By: &u})
	if at := wantUnread(t, b, u, 1); !at.Equal(l.At) {
		t.Errorf("updated %s by the own change, the last of others was %s", at, l.At)
	}
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	reset := wantUnread(t, b, u, 0)
	if !reset.After(l.At) {
		t.Errorf("updated %s by a reset after %s", reset, l.At)
	}
}

// interrupted calls its function before once, before the first Save.
type interrupted struct {
	unread.Store
	before func()
}

func (i *interrupted) Save(ctx context.Context, u unread.User, old, r unread.Record) (presence.Version, error) {
	if f := i.before; f != nil {
		i.before = nil
		f()
	}
	return i.Store.Save(ctx, u, old, r)
}

func changeInReset(t *testing.T, s Store) {
	b, u, page := unread.NewFollowService(s), freshUser(), freshName()
	follow(t, b, u, page)
	change(t, s, page, unread.Change{})
	slow := unread.NewFollowService(&interrupted{s, func() { change(t, s, page, unread.Change{}) }})
	if _, err := slow.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	wantUnread(t, b, u, 1)
	// A reset that another reset overtakes does not undo the other one.
	slow = unread.NewFollowService(&interrupted{s, func() {
		change(t, s, page, unread.Change{})
		if _, err := b.Reset(t.Context(), u); err != nil {
			t.Error(err)
		}
	}})
	if _, err := slow.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	wantUnread(t, b, u, 0)
	change(t, s, page, unread.Change{})
	wantUnread(t, b, u, 1)
}

func editsAtOnce(t *testing.T, s Store) {
	u := freshUser()
	var wg sync.WaitGroup
	for w := range 8 {
		b := unread.NewFollowService(s) // of another gateway
		wg.Go(func() {
			for i := range 10 {
				page := fmt.Sprintf("p%d-%d", w, i)
				err := b.Follow(t.Context(), u, page)
				for errors.Is(err, presence.ErrUnavailable) { // on a busy machine others may win every attempt; one of them ends each time
					err = b.Follow(t.Context(), u, page)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := len(record(t, s, u).Follows); n != 80 {
		t.Errorf("%d follows, want 80", n)
	}
}

func resetsAtOnce(t *testing.T, s Store) {
	const n = 100
	b, u, page := unread.NewFollowService(s), freshUser(), freshName()
	follow(t, b, u, page)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for range n {
				if err := s.Change(t.Context(), page, unread.Change{}); err != nil {
					t.Error(err)
				}
			}
		})
		b := unread.NewFollowService(s)
		wg.Go(func() {
			last := int64(0)
			for range 20 {
				st, err := b.Reset(t.Context(), u)
				if err != nil {
					t.Error(err)
					return
				}
				if seen := st.Follows[0].Seen; seen < last {
					t.Errorf("seen went from %d to %d", last, seen)
				} else {
					last = seen
				}
			}
		})
	}
	wg.Wait()
	l, _ := level(t, s, u, page)
	wantUnread(t, b, u, l.All-record(t, s, u).Follows[0].Seen)
	if l.All != 2*n {
		t.Errorf("%d changes of %d", l.All, 2*n)
	}
	if _, err := b.Reset(t.Context(), u); err != nil {
		t.Fatal(err)
	}
	wantUnread(t, b, u, 0)
}

func lostPast(t *testing.T, s Store) {
	b, u, page := unread.NewFollowService(s), freshUser(), freshName()
	if _, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: page, Incarnation: 1, Seen: 1000}}}); err != nil {
		t.Fatal(err)
	}
	wantUnread(t, b, u, 0)
	change(t, s, page, unread.Change{})
	wantUnread(t, b, u, 1)
}

// unreadModel runs random sequences of events on the store and on a model that
// lists the unread changes of each page one by one.
func unreadModel(t *testing.T, s Store) {
	type place struct {
		user, page int
	}
	rapid.Check(t, func(rt *rapid.T) {
		b := unread.NewFollowService(s)
		users, pages := []unread.User{freshUser(), freshUser()}, []string{freshName(), freshName(), freshName()}
		model := map[place]int64{} // what is unread of a page that is followed
		must := func(err error) {
			if err != nil {
				rt.Fatal(err)
			}
		}
		ctx := t.Context()
		for range rapid.IntRange(1, 25).Draw(rt, "events") {
			at := place{rapid.IntRange(0, 1).Draw(rt, "user"), rapid.IntRange(0, 2).Draw(rt, "page")}
			u, page := users[at.user], pages[at.page]
			_, follows := model[at]
			switch rapid.SampledFrom([]string{"change", "change", "own change", "follow", "follow", "unfollow", "reset", "reset of a page"}).Draw(rt, "event") {
			case "change":
				must(s.Change(ctx, page, unread.Change{}))
				for pl := range model {
					if pl.page == at.page {
						model[pl]++
					}
				}
			case "own change":
				must(s.Change(ctx, page, unread.Change{By: &u}))
				for pl := range model {
					if pl.page == at.page && pl.user != at.user {
						model[pl]++
					}
				}
			case "follow":
				must(b.Follow(ctx, u, page))
				if !follows {
					model[at] = 0
				}
			case "unfollow":
				must(b.Unfollow(ctx, u, page))
				delete(model, at)
			case "reset":
				_, err := b.Reset(ctx, u)
				must(err)
				for pl := range model {
					if pl.user == at.user {
						model[pl] = 0
					}
				}
			case "reset of a page":
				_, err := b.Reset(ctx, u, page)
				must(err)
				if follows {
					model[at] = 0
				}
			}
			for i, u := range users {
				want := int64(0)
				for pl, n := range model {
					if pl.user == i {
						want += n
					}
				}
				got, _, err := b.Unread(ctx, u)
				must(err)
				if got != want {
					rt.Fatalf("user %d has %d unread, want %d", i, got, want)
				}
			}
		}
	})
}
