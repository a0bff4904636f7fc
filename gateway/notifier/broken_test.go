package notifier

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/unread"
)

// brokenStore cannot read the follows of one user and the changes of one page, as when keys of them belong to another
// program, or to a master of a cluster that is away.
type brokenStore struct {
	unread.Store
	user unread.User
	page string
}

func (s *brokenStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	if slices.Contains(users, s.user) {
		return nil, fmt.Errorf("test: %w", presence.ErrUnavailable)
	}
	return s.Store.Records(ctx, users)
}

func (s *brokenStore) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	if page == s.page {
		return unread.Level{}, nil, fmt.Errorf("test: %w", presence.ErrUnavailable)
	}
	return s.Store.Authors(ctx, page, since, users)
}

// What of the store cannot be read holds up no other users and pages.
func TestOneThatCannotBeReadHoldsUpNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &brokenStore{Store: presencemem.New(presencemem.Config{}), user: unread.User{0}, page: "broken"}
		s := quiet(store)
		outside := unread.NewFollowService(store.Store)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}

		var sums []*Sum
		for n := range byte(200) {
			sums = append(sums, s.Enter(t.Context(), unread.User{n}))
		}
		sums = sums[1:] // without the broken one

		ctx, end := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { s.Run(ctx) })
		// change has the pages changed by an author, and publishes that.
		change := func() {
			for _, page := range []string{"broken", "p"} {
				must(store.Change(t.Context(), page, unread.Change{By: &unread.User{255}}))
				l, _, err := store.Store.Authors(t.Context(), page, 0, nil)
				must(err)
				s.Update(l.Update(page))
			}
		}
		want := func(sums []*Sum, n int64) {
			t.Helper()
			synctest.Wait()
			for _, f := range sums {
				if got, known := s.Unread(f); got != n || !known {
					t.Fatalf("user %x has %d unread (known: %t), want %d", f.user[0], got, known, n)
				}
			}
		}

		// Everybody's follows are read anew.
		for _, f := range sums {
			must(outside.Follow(t.Context(), f.user, "p"))
			must(outside.Follow(t.Context(), f.user, "broken"))
		}
		s.StoreBack()
		time.Sleep(30 * time.Second)
		change()
		time.Sleep(2 * time.Second)
		want(sums, 1)

		// A single one is read at once.
		for n := range int64(5) {
			must(outside.Follow(t.Context(), sums[n].user, "q"))
			must(store.Change(t.Context(), "q", unread.Change{}))
			must(outside.Unfollow(t.Context(), sums[n].user, "p"))
			records, err := store.Records(t.Context(), []unread.User{sums[n].user})
			must(err)
			s.Update(records[0].Update(sums[n].user))
			time.Sleep(time.Millisecond)
			want(sums[n:n+1], 2) // the page broken was read together with the follows
		}

		// When all can be read, all is right.
		store.user = unread.User{255}
		store.page = ""
		change()
		time.Sleep(10 * time.Second)
		want(sums[5:], 4)
		end()
		running.Wait()
	})
}
