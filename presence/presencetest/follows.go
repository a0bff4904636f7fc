package presencetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/unread"
)

func follow(t testing.TB, b *unread.FollowService, u unread.User, page string) {
	t.Helper()
	if err := b.Follow(t.Context(), u, page); err != nil {
		t.Fatalf("Follow(%q): %v", page, err)
	}
}

func reset(t testing.TB, b *unread.FollowService, u unread.User, pages ...string) {
	t.Helper()
	if _, err := b.Reset(t.Context(), u, pages...); err != nil {
		t.Fatalf("Reset(%q): %v", pages, err)
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

// notifications tests the list of unread pages: the newest first, each with the note of its newest unread change that
// has one.
func notifications(t *testing.T, s Store) {
	b, u := unread.NewFollowService(s), freshUser()
	a, z := freshName(), freshName()
	is := func(most int, all int64, want ...unread.Notification) {
		t.Helper()
		got, n, err := b.Notifications(t.Context(), u, most)
		if err != nil || n != all || len(got) != len(want) {
			t.Fatalf("%+v, %d unread, %v; want %+v", got, n, err, want)
		}

		for i := range got {
			// The store's clock may differ a little.
			if since := time.Since(got[i].At); since < -time.Second || since > time.Minute {
				t.Errorf("%+v is of %s", got[i], got[i].At)
			}
			got[i].At = time.Time{}
			if !slices.Contains(want, got[i]) {
				t.Errorf("%+v, want %+v", got[i], want)
			}
		}
	}

	change(t, s, a, unread.Change{Title: "before", URL: "/before"})
	follow(t, b, u, a)
	follow(t, b, u, z)
	is(9, 0)

	change(t, s, a, unread.Change{})
	is(9, 1, unread.Notification{Page: a, Count: 1}) // without the note of the change before the follow

	change(t, s, a, unread.Change{Title: "ü 😀", URL: "https://a.example/?b=c d"})
	change(t, s, a, unread.Change{})
	change(t, s, z, unread.Change{By: &u, Title: "own"})
	change(t, s, z, unread.Change{URL: "/z"})
	first := unread.Notification{Page: a, Count: 3, Title: "ü 😀", URL: "https://a.example/?b=c d"}
	second := unread.Notification{Page: z, Count: 1, URL: "/z"}
	is(9, 4, first, second)
	if got, n, err := b.Notifications(t.Context(), u, 1); err != nil || len(got) != 1 || n != 4 {
		t.Errorf("%+v, %d, %v", got, n, err)
	}

	reset(t, b, u, a, freshName())
	is(9, 1, second)

	change(t, s, a, unread.Change{})
	is(9, 2, unread.Notification{Page: a, Count: 1}, second)

	reset(t, b, u)
	is(9, 0)

	change(t, s, z, unread.Change{})
	change(t, s, z, unread.Change{By: &u, Title: "own"})
	is(9, 1, unread.Notification{Page: z, Count: 1})

	// Nor is the title of an own change shown after one more own change.
	change(t, s, z, unread.Change{})
	change(t, s, z, unread.Change{By: &u, Title: "own"})
	change(t, s, z, unread.Change{By: &u})
	is(9, 2, unread.Notification{Page: z, Count: 2})
}

func maxFollows(t *testing.T, s Store) {
	b, u := unread.NewFollowService(s), freshUser()
	var r unread.Record
	for i := range unread.MaxFollows - 1 {
		r.Follows = append(r.Follows, unread.Follow{Page: fmt.Sprintf("p%04d", i)})
	}

	// One save is faster than 999 follows.
	saved(t, s, u, unread.Record{}, r)

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

func unreadUpdated(t *testing.T, s Store) {
	b := unread.NewFollowService(s)
	u, page := freshUser(), freshName()
	change(t, s, page, unread.Change{})
	follow(t, b, u, page)

	if at := wantUnread(t, b, u, 0); !at.IsZero() {
		t.Errorf("it was updated at %s, but there was no unread change", at)
	}

	change(t, s, page, unread.Change{By: &u})
	if at := wantUnread(t, b, u, 0); !at.IsZero() {
		t.Errorf("the user's own change updated it, at %s", at)
	}

	change(t, s, page, unread.Change{})
	l, _ := level(t, s, u, page)

	if at := wantUnread(t, b, u, 1); !at.Equal(l.At) {
		t.Errorf("updated %s, the change was %s", at, l.At)
	}

	time.Sleep(time.Until(l.At.Add(time.Second))) // times are in whole seconds
	change(t, s, page, unread.Change{By: &u})
	if at := wantUnread(t, b, u, 1); !at.Equal(l.At) {
		t.Errorf("updated %s by the own change, the last of others was %s", at, l.At)
	}

	reset(t, b, u)
	reset := wantUnread(t, b, u, 0)
	if !reset.After(l.At) {
		t.Errorf("updated %s by a reset after %s", reset, l.At)
	}
}

// interrupted calls before once, before the first Save.
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
	b := unread.NewFollowService(s)
	u, page := freshUser(), freshName()
	follow(t, b, u, page)
	change(t, s, page, unread.Change{})

	// A change comes between the reading of the levels and the save: the reset must not cover it.
	slow := unread.NewFollowService(&interrupted{s, func() { change(t, s, page, unread.Change{}) }})
	reset(t, slow, u)
	wantUnread(t, b, u, 1)

	// A reset during which there was another reset does not undo that one.
	slow = unread.NewFollowService(&interrupted{s, func() {
		change(t, s, page, unread.Change{})
		reset(t, b, u)
	}})
	reset(t, slow, u)
	wantUnread(t, b, u, 0)
	change(t, s, page, unread.Change{})
	wantUnread(t, b, u, 1)
}

func editsAtOnce(t *testing.T, s Store) {
	u := freshUser()
	var wg sync.WaitGroup
	for w := range 8 {
		b := unread.NewFollowService(s) // as another gateway has it
		wg.Go(func() {
			for i := range 10 {
				page := fmt.Sprintf("p%d-%d", w, i)
				err := b.Follow(t.Context(), u, page)
				// On a busy machine another edit may win each attempt, and then that one is done.
				for errors.Is(err, presence.ErrUnavailable) {
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

// changed is the expected state of a page with unread changes.
type changed struct {
	level unread.Level // with the times and the incarnation that the store gave it
	keys  map[string]bool
	owns  map[unread.User]unread.Own
	last  map[unread.User]int64 // Level.By after the user's last change
}

// make makes a change, and reports whether it is counted.
func (c *changed) make(t tb, s unread.Store, page string, change unread.Change) bool {
	began := time.Now()
	if err := s.Change(t.Context(), page, change); err != nil {
		t.Fatal(err)
	}

	if c.keys[change.Key] {
		return false
	}

	// A change without a key is never a repetition.
	c.keys[change.Key] = change.Key != ""
	if change.By != nil {
		own := c.owns[*change.By]
		// Others have changed the page since the user's own last change.
		if own.Changes == 0 || own.Last != c.level.All {
			own.Before = c.level.At
		}
		own.Changes++
		own.Last = c.level.All + 1
		c.owns[*change.By] = own
		c.level.By++
		c.last[*change.By] = c.level.By
	}

	c.level.All++
	is, _ := level(t, s, unread.User{}, page)

	if is.Incarnation == 0 || c.level.All > 1 && is.Incarnation != c.level.Incarnation ||
		is.At.Before(began.Add(-time.Second)) || is.At.After(time.Now()) || is.At != is.At.Truncate(time.Second).UTC() {
		t.Fatalf("%+v after %+v", is, c.level)
	}

	c.level.Incarnation, c.level.At = is.Incarnation, is.At

	return true
}

// check compares the level and the authors of a page with the model. Authors must return the users who have changed the
// page after Level.By was equal to since.
func (c *changed) check(t tb, s unread.Store, page string, since int64, users []unread.User) {
	for _, u := range users {
		if l, own := level(t, s, u, page); l != c.level || own != c.owns[u] {
			t.Fatalf("Levels of %q = %+v, %+v, want %+v, %+v", page, l, own, c.level, c.owns[u])
		}
	}

	l, authors, err := s.Authors(t.Context(), page, since, users)
	if err != nil || l != c.level {
		t.Fatalf("Authors since %d = %+v, %v; want %+v", since, l, err, c.level)
	}
	for _, u := range users {
		own, ok := authors[u]
		isMissing := !ok && c.last[u] > since
		isWrong := ok && (own.Changes == 0 || own.Changes != c.owns[u].Changes)
		if isMissing || isWrong {
			t.Fatalf("Authors since %d have %+v, %t, want %+v of change %d", since, own, ok, c.owns[u], c.last[u])
		}
	}
}

// unreadHistory is a random history of unread changes, with the expected state.
type unreadHistory struct {
	*rapid.T
	s      Store
	b      *unread.FollowService
	users  []unread.User
	pages  []string
	past   []*changed             // by page
	unread map[followedPage]int64 // the number of unread changes of each followed page
}

// followedPage is a page that a user follows, by their numbers.
type followedPage struct{ user, page int }

// unreadModel compares random histories of the store with a model.
func unreadModel(t *testing.T, s Store) {
	rapid.Check(testkit.ForRapid(t), func(rt *rapid.T) {
		h := &unreadHistory{
			T: rt, s: s, b: unread.NewFollowService(s),
			users:  []unread.User{freshUser(), freshUser()},
			pages:  []string{freshName(), freshName() + ` "quoted" % \ ü 😀`, freshName()},
			unread: map[followedPage]int64{},
		}
		for range h.pages {
			h.past = append(h.past, &changed{
				keys: map[string]bool{}, owns: map[unread.User]unread.Own{}, last: map[unread.User]int64{},
			})
		}

		if r := record(rt, s, h.users[0]); !sameRecord(r, unread.Record{}) {
			rt.Fatalf("who follows nothing has %+v", r)
		}

		for range rapid.IntRange(1, 25).Draw(rt, "events") {
			at := followedPage{rapid.IntRange(0, 1).Draw(rt, "user"), rapid.IntRange(0, 2).Draw(rt, "page")}
			h.step(at)
			h.check(at.page)
		}
	})
}

func (h *unreadHistory) must(err error) {
	if err != nil {
		h.Fatal(err)
	}
}

// step makes a random event of a user and a page, in the store and in the model.
func (h *unreadHistory) step(at followedPage) {
	ctx, u, page := h.Context(), h.users[at.user], h.pages[at.page]
	_, follows := h.unread[at]

	events := []string{
		"change", "change", "own change", "follow", "follow", "unfollow", "forget", "reset", "reset of a page",
	}
	switch rapid.SampledFrom(events).Draw(h.T, "event") {
	case "change":
		h.change(at.page, nil)
	case "own change":
		h.change(at.page, &at.user)
	case "follow":
		h.must(h.b.Follow(ctx, u, page))
		if !follows {
			h.unread[at] = 0
		}
	case "unfollow":
		h.must(h.b.Unfollow(ctx, u, page))
		delete(h.unread, at)
	case "forget":
		before := record(h.T, h.s, u)
		h.must(h.b.Forget(ctx, u))
		r := record(h.T, h.s, u)
		if len(r.Follows) != 0 || !r.Updated.IsZero() || r.Version.Compare(before.Version) <= 0 {
			h.Fatalf("%+v became %+v", before, r)
		}
		// The other users still follow their pages.
		maps.DeleteFunc(h.unread, func(f followedPage, _ int64) bool { return f.user == at.user })
	case "reset":
		is, err := h.b.Reset(ctx, u)
		h.must(err)
		if stored := record(h.T, h.s, u); !sameRecord(is.Record, stored) {
			h.Fatalf("Reset returns %+v, stored is %+v", is.Record, stored)
		}
		for f := range h.unread {
			if f.user == at.user {
				h.unread[f] = 0
			}
		}
	case "reset of a page":
		_, err := h.b.Reset(ctx, u, page)
		h.must(err)
		if follows {
			h.unread[at] = 0
		}
	}
}

// change changes a page. by is the number of the user who does so; nil: nobody whom the store knows.
func (h *unreadHistory) change(page int, by *int) {
	c := unread.Change{Key: rapid.SampledFrom([]string{"", "", "k1", "k2 with \x00 and ü"}).Draw(h.T, "key")}
	if by != nil {
		c.By = &h.users[*by]
	}

	if !h.past[page].make(h.T, h.s, h.pages[page], c) {
		return
	}
	for f := range h.unread {
		isOwn := by != nil && f.user == *by
		if f.page == page && !isOwn {
			h.unread[f]++
		}
	}
}

// check checks that the store agrees with the model about a page, and about the sums of all users.
func (h *unreadHistory) check(page int) {
	since := rapid.Int64Range(0, h.past[page].level.By).Draw(h.T, "since")
	h.past[page].check(h.T, h.s, h.pages[page], since, h.users)

	for i, u := range h.users {
		want := int64(0)
		for f, n := range h.unread {
			if f.user == i {
				want += n
			}
		}

		got, _, err := h.b.Unread(h.Context(), u)
		h.must(err)
		if got != want {
			h.Fatalf("user %d has %d unread, want %d", i, got, want)
		}
	}
}

// lateSaves tests saves that arrive after their caller has given up. When a later call has been answered, even one that
// changed nothing, such a save must have no effect.
func lateSaves(t *testing.T, s Store) {
	b, page := unread.NewFollowService(s), freshName()
	following := unread.Record{Follows: []unread.Follow{{Page: page}}}
	follows := func(u unread.User) error { return b.Follow(t.Context(), u, page) }
	unfollows := func(u unread.User) error { return b.Unfollow(t.Context(), u, page) }
	forgets := func(u unread.User) error { return b.Forget(t.Context(), u) }

	for name, tc := range map[string]struct {
		follows bool                      // the user follows the page at first
		late    unread.Record             // the record that the late save brings
		call    func(u unread.User) error // is answered before the save arrives
	}{
		"a follow after an unfollow": {false, following, unfollows},
		"a follow after an erasure":  {false, following, forgets},
		"an unfollow after a follow": {true, unread.Record{}, follows},
	} {
		u := freshUser()
		if tc.follows {
			follow(t, b, u, page)
		}
		before := record(t, s, u)
		if err := tc.call(u); err != nil {
			t.Fatalf("%s: %v", name, err)
		}

		if _, err := s.Save(t.Context(), u, before, tc.late); !errors.Is(err, unread.ErrConflict) {
			t.Errorf("%s: %v, want ErrConflict", name, err)
		}
		if r := record(t, s, u); (len(r.Follows) > 0) != tc.follows {
			t.Errorf("%s: the record is %+v", name, r)
		}
	}
}
