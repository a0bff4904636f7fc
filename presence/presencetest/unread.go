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
	"the authors of a page are bounded":        manyAuthors,
	"records are saved":                        save,
	"a watcher hears changes and follows":      watchUnread,
	"attach returns levels and versions":       attachUnread,
	"a user follows at most 1,000 pages":       maxFollows,
	"updated is the last time unread changed":  unreadUpdated,
	"notifications are read one by one":        notifications,
	"a change during a reset is not lost":      changeInReset,
	"edits at once all count":                  editsAtOnce,
	"an answer outdates the saves before it":   lateSaves,
	"any history ends with the model's unread": unreadModel,
}

var names struct {
	sync.Mutex
	n int
}

// freshName returns a name that no other test uses. Every second one is of another site.
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

func level(t tb, s unread.Store, user unread.User, page string) (unread.Level, unread.Own) {
	t.Helper()
	levels, owns, err := s.Levels(t.Context(), user, []string{page})
	if err != nil || len(levels) != 1 || len(owns) != 1 {
		t.Fatalf("Levels(%q) = %v, %v, %v", page, levels, owns, err)
	}
	return levels[0], owns[0]
}

func manyAuthors(t *testing.T, s Store) {
	page := freshName()
	users := make([]unread.User, unread.MaxAuthors+1)
	for i := range users {
		users[i] = freshUser()
	}

	var wg sync.WaitGroup
	// Fifty at once, because one after the other would take long on a server.
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
	l, o := level(t, s, *last, page)
	if l.All != unread.MaxAuthors+1 || l.By != unread.MaxAuthors || o != (unread.Own{}) {
		t.Errorf("one author too many: %+v, %+v", l, o)
	}

	// No further author fits, but the changes of a known one are still counted.
	change(t, s, page, unread.Change{By: &users[7]})
	if l, o := level(t, s, users[7], page); l.All != unread.MaxAuthors+2 || o.Changes != 2 {
		t.Errorf("an author again: %+v, %+v", l, o)
	}
}

func record(t tb, s unread.Store, u unread.User) unread.Record {
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

// save tests that a record can be saved over the one that was read, and over no other.
func save(t *testing.T, s Store) {
	u := freshUser()
	old := unread.Record{}
	put := func(r unread.Record) {
		t.Helper()

		r.Version = saved(t, s, u, old, r)
		// The store must refuse every version but its own.
		later := r.Version
		later.Sequence++
		raised := r.Version
		raised.Incarnation++

		for _, stale := range []presence.Version{old.Version, later, raised} {
			_, err := s.Save(t.Context(), u, unread.Record{Version: stale}, unread.Record{})
			if !errors.Is(err, unread.ErrConflict) {
				t.Errorf("over %s, while it is %s: %v", stale, r.Version, err)
			}
		}

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
	put(unread.Record{
		Updated: old.Updated, Follows: []unread.Follow{{Page: "a", Incarnation: 2, Seen: 1}, {Page: "c"}},
	})
	put(unread.Record{Follows: many, Updated: old.Updated.Add(time.Second)})
	put(unread.Record{Updated: old.Updated})
	put(unread.Record{Follows: []unread.Follow{{Page: "a"}}, Updated: old.Updated})

	other := freshUser()
	records, err := s.Records(t.Context(), []unread.User{other, u, other})
	if err != nil || len(records) != 3 {
		t.Fatalf("Records = %+v, %v", records, err)
	}
	for i, want := range []unread.Record{{}, old, {}} {
		if !sameRecord(records[i], want) {
			t.Errorf("record %d is %+v, want %+v", i, records[i], want)
		}
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

func watchUnread(t *testing.T, s Store) {
	u, page := freshUser(), freshName()
	e := listen(t, s, allBuckets())

	for range 3 {
		change(t, s, page, unread.Change{By: &u})
	}
	// The second change with the key is a repetition, so it is not published.
	change(t, s, page, unread.Change{Key: "k"})
	change(t, s, page, unread.Change{Key: "k"})

	v := saved(t, s, u, unread.Record{}, unread.Record{Follows: []unread.Follow{{Page: "a"}}})
	if _, err := s.Save(t.Context(), u, unread.Record{}, unread.Record{}); err == nil {
		t.Fatal("a conflict passed")
	}

	// An update that must not be published would arrive before these.
	change(t, s, page, unread.Change{})
	last := saved(t, s, u, unread.Record{Version: v, Follows: []unread.Follow{{Page: "a"}}}, unread.Record{})
	now, _ := level(t, s, u, page)

	var levels, records []presence.Update
	e.until(t, "the last change and the last follows", func() bool {
		levels, records = e.received[unread.LevelTopic(page)], e.received[unread.RecordTopic(u)]
		if len(levels) == 0 || len(records) == 0 {
			return false
		}
		return levels[len(levels)-1] == now.Update(page) && records[len(records)-1].Version == last
	})

	first, ok := unread.LevelOf(levels[0])
	want := unread.Level{Incarnation: now.Incarnation, All: 1, By: 1, At: first.At}
	if len(levels) != 5 || !ok || first != want {
		t.Errorf("changes were published as %+v", levels)
	}
	if len(records) != 2 || records[0].Version != v || records[0].Stale {
		t.Errorf("follows were published as %+v, want versions %s and %s", records, v, last)
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
		if err != nil || len(updates) != 3 {
			t.Fatalf("%s: %+v, %v", what, updates, err)
		}

		if updates[0] != now.Update(page) || updates[1].Version != (presence.Version{}) {
			t.Errorf("%s: %+v", what, updates)
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
