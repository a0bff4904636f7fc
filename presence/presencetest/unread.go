package presencetest

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"headcount/presence"
	"headcount/unread"
)

var unreads = map[string]func(*testing.T, Store){
	"a page that never changed":                    neverChanged,
	"changes are counted":                          changes,
	"a change with a known key does not count":     keys,
	"own changes are noted":                        owns,
	"who changed what since":                       authors,
	"the authors of a page are bounded":            manyAuthors,
	"who follows nothing":                          noRecord,
	"records are saved":                            save,
	"a record is saved over the one that was read": saveConflict,
	"a watcher hears changes and follows":          watchUnread,
	"attach returns levels and versions":           attachUnread,
	"a user follows at most 1,000 pages":           maxFollows,
	"updated is the last time unread changed":      unreadUpdated,
	"notifications are read one by one":            notifications,
	"a change during a reset is not lost":          changeInReset,
	"edits at once all count":                      editsAtOnce,
	"any history ends with the model's unread":     unreadModel,
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
		r.Version = saved(t, s, u, old, r)
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

func saved(t testing.TB, s Store, u unread.User, old, r unread.Record) presence.Version {
	t.Helper()
	v, err := s.Save(t.Context(), u, old, r)
	if err != nil || v.Compare(old.Version) <= 0 {
		t.Fatalf("Save after %s = %s, %v", old.Version, v, err)
	}
	return v
}

func saveConflict(t *testing.T, s Store) {
	u := freshUser()
	one := unread.Record{Follows: []unread.Follow{{Page: "a"}}}
	v1 := saved(t, s, u, unread.Record{}, one)
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
	e := listen(t, s, allBuckets())
	for range 3 {
		change(t, s, page, unread.Change{By: &u})
	}
	change(t, s, page, unread.Change{Key: "k"})
	change(t, s, page, unread.Change{Key: "k"})
	v := saved(t, s, u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "a"}}})
	if _, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{}); err == nil {
		t.Fatal("a conflict passed")
	}
	// An update that must not be published would be published before these.
	change(t, s, page, unread.Change{})
	last := saved(t, s, u, unread.Record{Version: v, Follows: []unread.Follow{{Page: "a"}}}, unread.Record{})
	now, _ := level(t, s, u, page)
	var levels, records []presence.Update
	e.until(t, "the last change and the last follows", func() bool {
		levels, records = e.heard[unread.LevelTopic(page)], e.heard[unread.RecordTopic(u)]
		return len(levels) > 0 && levels[len(levels)-1] == now.Update(page) && len(records) > 0 && records[len(records)-1].Version == last
	})
	if first, ok := unread.LevelOf(levels[0]); len(levels) != 5 || !ok || first != (unread.Level{Incarnation: now.Incarnation, All: 1, By: 1, At: first.At}) {
		t.Errorf("changes were told as %+v", levels)
	}
	if len(records) != 2 || records[0].Version != v || records[0].Stale {
		t.Errorf("follows were told as %+v, want versions %s and %s", records, v, last)
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
	v := saved(t, s, u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "a"}}})
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
