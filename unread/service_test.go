package unread_test

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/unread"
)

// slowStore takes a while for each save, like a disk.
type slowStore struct{ unread.Store }

func (s slowStore) Save(ctx context.Context, u unread.User, old, r unread.Record) (presence.Version, error) {
	time.Sleep(10 * time.Millisecond)
	return s.Store.Save(ctx, u, old, r)
}

// However many calls of one user wait for each other, those of another user do not wait for them.
func TestUsersDoNotWaitForEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		follows := unread.NewFollowService(slowStore{presencemem.New(presencemem.Config{})})
		busy := unread.User{1}

		var calls sync.WaitGroup
		for range 1000 {
			calls.Go(func() {
				if err := follows.Follow(t.Context(), busy, "p"); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()

		for n := range byte(255) {
			began := time.Now()
			other := unread.User{n, 1}
			if err := follows.Follow(t.Context(), other, "p"); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took > time.Second {
				t.Errorf("a follow of another user took %s", took)
			}
		}
		calls.Wait()
	})
}
