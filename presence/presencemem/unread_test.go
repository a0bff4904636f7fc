package presencemem

import (
	"context"
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/bbolt"

	"headcount/unread"
)

func numberedUser(n int) (u unread.User) {
	binary.BigEndian.PutUint64(u[:], uint64(n)+1)
	return u
}

// TestRecordsWithoutFollowsAreForgotten: anybody may end follows that do not exist, for new users without end. Records
// without follows are bounded in time and number. The record of a user who follows something is never forgotten.
func TestRecordsWithoutFollowsAreForgotten(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) *Store{
		"memory":         func(*testing.T) *Store { return New(Config{}) },
		"data directory": func(t *testing.T) *Store { return reopen(t, t.TempDir()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := open(t)
				if s.dir != "" {
					defer s.Close()
				}

				follows := unread.NewFollowService(s)
				must := func(err error) {
					t.Helper()
					if err != nil {
						t.Fatal(err)
					}
				}

				// One user follows the page, one has ended the follow, and many others end follows that never existed.
				follower, former := numberedUser(0), numberedUser(1)
				must(follows.Unfollow(t.Context(), follower, "p"))
				must(follows.Follow(t.Context(), follower, "p"))
				must(follows.Follow(t.Context(), former, "p"))
				must(s.Change(t.Context(), "p", unread.Change{}))
				must(follows.Unfollow(t.Context(), former, "p"))

				for n := 2; n < 100; n++ {
					must(follows.Unfollow(t.Context(), numberedUser(n), "p"))
				}

				time.Sleep(unread.EmptyFor - time.Minute)
				if _, updated, err := follows.Unread(t.Context(), former); err != nil || updated.IsZero() {
					t.Errorf("the time of the last change was forgotten within %s: %v", unread.EmptyFor, err)
				}

				// The next write after that time forgets the empty records.
				time.Sleep(2 * time.Minute)
				must(s.Change(t.Context(), "p", unread.Change{}))
				if n := len(s.unread.records); n != 1 {
					t.Errorf("%d records are kept, want that of the follower", n)
				}
				if n, _, err := follows.Unread(t.Context(), follower); n != 2 || err != nil {
					t.Errorf("the follower has %d unread, %v; want 2", n, err)
				}

				if s.dir != "" {
					_ = s.unread.disk.db.View(func(tx *bbolt.Tx) error {
						if n := tx.Bucket(recordsBucket).Stats().KeyN; n != 1 {
							t.Errorf("%d records are in the file, want that of the follower", n)
						}
						return nil
					})
				}
			})
		})
	}
}

// TestRecordsWithoutFollowsAreFew: beyond the bound, the records that have been empty longest are forgotten early.
func TestRecordsWithoutFollowsAreFew(t *testing.T) {
	s := New(Config{})
	for n := range maxEmptyRecords + 10 {
		err := s.apply(context.Background(), func(d *transaction) error {
			_, err := d.save(numberedUser(n), unread.Record{}, unread.Record{})
			return err
		})

		if err != nil {
			t.Fatal(err)
		}
	}

	if n := len(s.unread.records); n > maxEmptyRecords {
		t.Errorf("%d records without follows are kept, want at most %d", n, maxEmptyRecords)
	}
	if s.unread.records[numberedUser(maxEmptyRecords+9)] == nil {
		t.Error("the newest record is forgotten")
	}
}

// TestAKeyIsForgottenAfterADay: the same key counts again then, also if no other key came in the meantime.
func TestAKeyIsForgottenAfterADay(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) *Store{
		"memory":         func(*testing.T) *Store { return New(Config{}) },
		"data directory": func(t *testing.T) *Store { return reopen(t, t.TempDir()) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := open(t)
				if s.dir != "" {
					defer s.Close()
				}

				changes := func(want int64) {
					t.Helper()
					if err := s.Change(t.Context(), "p", unread.Change{Key: "every week"}); err != nil {
						t.Fatal(err)
					}
					if n := s.unread.pages["p"].level.All; n != want {
						t.Errorf("%d changes, want %d", n, want)
					}
				}

				changes(1)
				time.Sleep(unread.KeyFor - time.Minute)
				changes(1)
				time.Sleep(2 * time.Minute)
				changes(2)
				time.Sleep(time.Hour)
				changes(2)
				if n := len(s.unread.keys); n != 1 || len(s.unread.oldest) != 1 {
					t.Errorf("%d keys are known, and %d in their order, want one", n, len(s.unread.oldest))
				}
			})
		})
	}
}
