package gateway

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/rs/zerolog"
	"pgregory.net/rapid"

	"headcount/presence"
	"headcount/presence/memstore"
	"headcount/presence/unread"
)

// busyStore is a store in which others do something before and after each read.
type busyStore struct {
	unread.Store
	meanwhile func()
}

func (s *busyStore) Levels(ctx context.Context, u unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Levels(ctx, u, pages)
}

func (s *busyStore) Authors(ctx context.Context, page string, since int64, users []unread.User) (unread.Level, map[unread.User]unread.Own, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Authors(ctx, page, since, users)
}

func (s *busyStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	s.meanwhile()
	defer s.meanwhile()
	return s.Store.Records(ctx, users)
}

func quietFollowers(store unread.Store) *followers {
	g := &Gateway{hub: &hub{wake: make(chan struct{}, 1), pages: map[string]*watched{}}, cfg: Config{Log: zerolog.Nop()}}
	return newFollowers(g, "g/1", store, nil)
}

// TestSumsFollowTheStore: publications come late, twice, in any order or not at
// all but for the last, while users come and go and others change everything.
// When it is quiet the sums are those of the store; none ever was negative.
func TestSumsFollowTheStore(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := memstore.New(memstore.Config{})
		users := []unread.User{{1}, {2}, {3}}
		pages := []string{"p", "q", "r"}
		outside := unread.NewBook(store, nil)
		var waiting []presence.Count
		must := func(err error) {
			if err != nil {
				rt.Fatal(err)
			}
		}
		published := func(topic string) {
			counts, err := store.Counts(t.Context(), []string{topic})
			must(err)
			waiting = append(waiting, counts...)
		}
		act := func() {
			u, page := rapid.SampledFrom(users).Draw(rt, "user"), rapid.SampledFrom(pages).Draw(rt, "page")
			switch rapid.SampledFrom([]string{"change", "own", "follow", "unfollow", "reset"}).Draw(rt, "act") {
			case "change":
				must(store.Change(t.Context(), page, unread.Change{}))
				published(presence.ChangesTopic(page))
			case "own":
				must(store.Change(t.Context(), page, unread.Change{By: &u}))
				published(presence.ChangesTopic(page))
			case "follow":
				must(outside.Follow(t.Context(), u, page, false))
				published(presence.FollowsTopic(u))
			case "unfollow":
				must(outside.Unfollow(t.Context(), u, page))
				published(presence.FollowsTopic(u))
			case "reset":
				_, err := outside.Reset(t.Context(), u)
				must(err)
				published(presence.FollowsTopic(u))
			}
		}
		var fs *followers
		here := map[unread.User]*follower{}
		deliver := func() {
			if len(waiting) == 0 {
				return
			}
			i := rapid.IntRange(0, len(waiting)-1).Draw(rt, "which")
			fs.update(waiting[i])
			if rapid.Bool().Draw(rt, "lost or late") {
				waiting = append(waiting[:i], waiting[i+1:]...)
			}
		}
		move := func() {
			u := rapid.SampledFrom(users).Draw(rt, "who")
			if f := here[u]; f != nil {
				delete(here, u)
				fs.leave(f, nil, nil)
			} else if f := fs.enter(t.Context(), u); here[u] == nil {
				here[u] = f
			} else {
				fs.leave(f, nil, nil)
			}
		}
		depth := 0 // of things that happen while others are under way
		fs = quietFollowers(&busyStore{store, func() {
			if depth == 2 {
				return
			}
			depth++
			switch rapid.IntRange(0, 5).Draw(rt, "meanwhile") {
			case 0:
				act()
			case 1:
				act()
				deliver()
			case 2:
				move()
			}
			depth--
		}})
		check := func() {
			for _, f := range here {
				if f.sum < 0 {
					rt.Fatalf("a sum of %d", f.sum)
				}
			}
		}
		for range rapid.IntRange(1, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 5).Draw(rt, "step") {
			case 0:
				move()
			case 1, 2:
				act()
			case 3, 4:
				deliver()
			case 5:
				must(fs.catchUp(t.Context()))
			}
			check()
		}
		depth = 2
		for _, u := range users { // the last word of each topic comes
			published(presence.FollowsTopic(u))
		}
		for _, page := range pages {
			published(presence.ChangesTopic(page))
		}
		for _, c := range waiting {
			fs.update(c)
		}
		must(fs.catchUp(t.Context()))
		check()
		for _, u := range users {
			f := here[u]
			if f == nil {
				continue
			}
			want, _, err := outside.Unread(t.Context(), u)
			must(err)
			if !f.known || f.sum != want {
				rt.Fatalf("user %x has %d (%v), want %d", u[0], f.sum, f.known, want)
			}
		}
		for _, f := range here {
			fs.leave(f, nil, nil)
		}
		if len(fs.users)+len(fs.pages)+len(fs.staleUsers)+len(fs.stalePages) != 0 {
			rt.Fatalf("%d users and %d pages are left", len(fs.users), len(fs.pages))
		}
		for topic, w := range fs.hub.pages {
			if w.refs != 0 {
				rt.Fatalf("%d still want %q", w.refs, topic)
			}
		}
	})
}

// awayStore is a store that is away while away is set.
type awayStore struct {
	unread.Store
	away bool
}

func (s *awayStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	if s.away {
		return nil, fmt.Errorf("test: %w", presence.ErrUnavailable)
	}
	return s.Store.Records(ctx, users)
}

// While the store is away nobody is told 0, and what is not known is read later.
func TestUnreadIsNotKnownWhileTheStoreIsAway(t *testing.T) {
	store := &awayStore{Store: memstore.New(memstore.Config{}), away: true}
	fs := quietFollowers(store)
	f := fs.enter(t.Context(), unread.User{1})
	if _, known := fs.unread(f); known {
		t.Error("an unread count is known that nobody could read")
	}
	if err := fs.catchUp(t.Context()); err == nil {
		t.Error("caught up with a store that is away")
	}
	store.away = false
	if err := fs.catchUp(t.Context()); err != nil {
		t.Error(err)
	}
	if n, known := fs.unread(f); n != 0 || !known {
		t.Errorf("unread %d, %v", n, known)
	}
	fs.leave(f, nil, nil)
}

// A presence is told again while the page changes, and its end after the grace.
func TestPresencesAreTold(t *testing.T) {
	store := memstore.New(memstore.Config{})
	fs := quietFollowers(store)
	fs.grace = 50 * time.Millisecond
	u := unread.User{1}
	if err := fs.book.Follow(t.Context(), u, "p", true); err != nil {
		t.Fatal(err)
	}
	f := fs.enter(t.Context(), u)
	s := newShard(fs.hub, time.Second, 1, liveness{})
	c := &conn{shard: s, follower: f}
	s.add(c)
	fs.add(c)
	if _, err := s.join(c, "p"); err != nil {
		t.Fatal(err)
	}
	read := func() unread.Follow {
		t.Helper()
		if err := fs.catchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		counts, err := store.Counts(t.Context(), []string{presence.FollowsTopic(u), presence.ChangesTopic("p")})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range counts {
			fs.update(c)
		}
		if err := fs.catchUp(t.Context()); err != nil {
			t.Fatal(err)
		}
		r, err := store.Records(t.Context(), []unread.User{u})
		if err != nil {
			t.Fatal(err)
		}
		return r[0].Follows[0]
	}
	fs.moved(c, "p")
	if got := read(); len(got.Through) != 1 || got.Through[0] != "g/1" {
		t.Fatalf("a join: %+v", got)
	}
	if err := store.Change(t.Context(), "p", unread.Change{}); err != nil {
		t.Fatal(err)
	}
	if got := read(); got.Held != 0 {
		t.Errorf("told again at once: %+v", got)
	}
	fs.lasting()
	if got := read(); got.Held != 1 || got.Seen != 1 {
		t.Errorf("not told again: %+v", got)
	}
	fs.leave(f, c, s.remove(c))
	fs.graceEnded()
	if got := read(); len(got.Through) != 1 {
		t.Errorf("gone within the grace: %+v", got)
	}
	time.Sleep(60 * time.Millisecond)
	fs.graceEnded()
	if got := read(); len(got.Through) != 0 {
		t.Errorf("here after the grace: %+v", got)
	}
	if len(fs.told)+len(fs.presences)+len(fs.graces) != 0 {
		t.Errorf("%d %d %d are left", len(fs.told), len(fs.presences), len(fs.graces))
	}
}
