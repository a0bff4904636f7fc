package unread

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/internal/outage"
	"headcount/presence"
)

// attempts is how often a FollowService tries to change a record while other processes
// change it. An attempt fails only if a change by another process has succeeded.
const attempts = 20

// ErrTooMany means that the user already follows MaxFollows pages.
var ErrTooMany = fmt.Errorf("%w follows: a user may follow %d pages; unfollow some first",
	presence.ErrTooMany, MaxFollows)

// FollowService reads and changes the follows of users. Any goroutine may use it.
//
// It changes the follows of one user one after another, so that only other processes cause conflicts. Users do not wait
// for each other.
type FollowService struct {
	store Store

	mu    sync.Mutex
	turns map[User]*turn // of the users of calls in progress
}

// turn is held by the call that changes a user's follows.
type turn struct {
	held  chan struct{} // has one element while a call holds the turn
	calls int           // that hold it or wait for it; guarded by FollowService.mu
}

// NewFollowService returns a FollowService over the store.
func NewFollowService(store Store) *FollowService {
	return &FollowService{store: store, turns: map[User]*turn{}}
}

// turn waits until the caller may change the user's follows. The caller must call end.
func (fs *FollowService) turn(ctx context.Context, user User) (end func(), err error) {
	t := fs.join(user)

	select {
	case t.held <- struct{}{}:
		return func() {
			<-t.held
			fs.leave(user, t)
		}, nil
	case <-ctx.Done():
		fs.leave(user, t)
		return nil, errCrowded
	}
}

// join adds a call to a user's turn.
func (fs *FollowService) join(user User) *turn {
	fs.mu.Lock()
	defer fs.mu.Unlock()

	t := fs.turns[user]
	if t == nil {
		t = &turn{held: make(chan struct{}, 1)}
		fs.turns[user] = t
	}
	t.calls++

	return t
}

// leave ends a join.
func (fs *FollowService) leave(user User, t *turn) {
	fs.mu.Lock()
	defer fs.mu.Unlock()

	t.calls--
	if t.calls == 0 {
		delete(fs.turns, user)
	}
}

// State is a user's record with the levels of its pages, in the order of the record.
type State struct {
	Record
	Levels []Level
	Owns   []Own
}

// Unread returns the sum over the pages, which is never negative, and the time when the
// sum last changed; zero: never.
func (s State) Unread() (n int64, updated time.Time) {
	// A reset changes the sum as well, and no level shows it.
	updated = s.Updated

	for i, f := range s.Follows {
		u := f.Unread(s.Levels[i], s.Owns[i])
		if u == 0 {
			continue
		}

		n += u
		_, at := others(s.Levels[i], s.Owns[i])
		if at.After(updated) {
			updated = at
		}
	}

	return n, updated
}

// Read returns the states of users, in the order of users.
func (fs *FollowService) Read(ctx context.Context, users ...User) ([]State, error) {
	records, err := fs.store.Records(ctx, users)
	if err != nil {
		return nil, err
	}

	states := make([]State, len(users))
	for i, r := range records {
		// A call for each user, because Levels returns the own changes of one.
		states[i], err = fs.State(ctx, users[i], r)
		if err != nil {
			return nil, err
		}
	}

	return states, nil
}

// State returns a user's record with the levels of its pages.
func (fs *FollowService) State(ctx context.Context, user User, r Record) (s State, err error) {
	s.Record = r
	if len(r.Follows) > 0 {
		s.Levels, s.Owns, err = fs.store.Levels(ctx, user, r.Pages())
	}
	return s, err
}

// Unread returns a user's unread count and the time when it last changed.
func (fs *FollowService) Unread(ctx context.Context, user User) (n int64, updated time.Time, err error) {
	states, err := fs.Read(ctx, user)
	if err != nil {
		return 0, time.Time{}, err
	}

	n, updated = states[0].Unread()
	return n, updated, nil
}

// Follow makes the user follow the page, with 0 unread changes. It has no effect if the
// user follows the page already. It returns ErrTooMany when the user follows MaxFollows
// pages.
func (fs *FollowService) Follow(ctx context.Context, user User, page string) error {
	return fs.edit(ctx, user, page, func(r *Record, i int, found bool, l Level, o Own) error {
		switch {
		// The record is saved all the same, see edit.
		case found:
			return nil
		case len(r.Follows) >= MaxFollows:
			return ErrTooMany
		}

		// Everything up to now counts as seen.
		n, _ := others(l, o)
		r.Follows = slices.Insert(r.Follows, i, Follow{Page: page, Incarnation: l.Incarnation, Seen: n})

		return nil
	})
}

// Unfollow ends a follow, and drops the page's unread changes.
func (fs *FollowService) Unfollow(ctx context.Context, user User, page string) error {
	return fs.edit(ctx, user, page, func(r *Record, i int, found bool, l Level, o Own) error {
		if !found {
			return nil
		}

		// Otherwise the sum stays as it is.
		if r.Follows[i].Unread(l, o) > 0 {
			r.touch()
		}

		r.Follows = slices.Delete(r.Follows, i, i+1)

		return nil
	})
}

// Forget removes all follows of the user, and with them the unread changes. It saves also where there is nothing to
// remove, see edit.
func (fs *FollowService) Forget(ctx context.Context, user User) error {
	return fs.change(ctx, user, func() error {
		records, err := fs.store.Records(ctx, []User{user})
		if err != nil {
			return err
		}

		_, err = fs.store.Save(ctx, user, records[0], Record{})

		return err
	})
}

// Notification is a page that has unread changes for a user.
type Notification struct {
	Page       string
	Count      int64     // unread changes, at least 1
	At         time.Time // time of the last of them
	Title, URL string    // of the newest of them with a title or URL
}

// Notifications returns at most limit pages that have unread changes for the user, the
// newest first, and how many changes are unread on all pages.
func (fs *FollowService) Notifications(
	ctx context.Context, user User, limit int,
) (list []Notification, unread int64, err error) {
	states, err := fs.Read(ctx, user)
	if err != nil {
		return nil, 0, err
	}

	s := states[0]

	places := map[string]int{} // indexes into s.Follows
	for i, f := range s.Follows {
		n := f.Unread(s.Levels[i], s.Owns[i])
		if n == 0 {
			continue
		}

		_, at := others(s.Levels[i], s.Owns[i])
		list = append(list, Notification{Page: f.Page, Count: n, At: at})
		places[f.Page] = i
		unread += n
	}

	slices.SortFunc(list, func(x, y Notification) int {
		return cmp.Or(y.At.Compare(x.At), strings.Compare(x.Page, y.Page))
	})
	// Cut the list only now, since the sum is that of all pages. Notes are read only for the pages that remain.
	list = list[:min(len(list), limit)]

	pages := make([]string, len(list))
	for i := range list {
		pages[i] = list[i].Page
	}

	notes, err := fs.store.Notes(ctx, pages)
	if err != nil {
		return nil, 0, err
	}

	for i, note := range notes {
		one := &list[i]
		place := places[one.Page]

		// Leave out the note of a change that the user has seen or may have made: only the user's last change is known.
		isUnread := note.All > s.Levels[place].All-one.Count
		if isUnread && note.All > s.Owns[place].Last {
			one.Title, one.URL = note.Title, note.URL
		}
	}

	return list, unread, nil
}

// Reset marks the changes of the given pages as seen; without pages, it marks the changes
// of all pages that the user follows. Changes after the call of Reset remain unread. It
// returns the state after the reset.
func (fs *FollowService) Reset(ctx context.Context, user User, pages ...string) (s State, err error) {
	err = fs.change(ctx, user, func() error {
		states, err := fs.Read(ctx, user)
		if err != nil {
			return err
		}

		s = states[0]
		old := s.Record
		s.Record = s.Clone() // old is what Save compares with, and must not change

		moved := false
		for i, f := range s.Follows {
			wanted := len(pages) == 0 || slices.Contains(pages, f.Page)
			if !wanted || f.Unread(s.Levels[i], s.Owns[i]) == 0 {
				continue
			}

			moved = true
			all, _ := others(s.Levels[i], s.Owns[i])
			s.Follows[i] = Follow{Page: f.Page, Incarnation: s.Levels[i].Incarnation, Seen: all}
		}

		// Nothing need be saved, unlike in edit: no late call can undo what this one answers.
		if !moved {
			return nil
		}

		s.touch()
		s.Version, err = fs.store.Save(ctx, user, old, s.Record)
		return err
	})

	return s, err
}

func (r *Record) touch() { r.Updated = time.Now().UTC().Truncate(time.Second) }

// edit changes the user's follow of one page. fn gets the index of the page in the record.
//
// It saves the record even if fn changed nothing. An older call for the opposite, whose caller has given up, may still
// be on its way to the store. It has read the same record, and would undo what is acknowledged now. The new version
// makes the store refuse it.
func (fs *FollowService) edit(
	ctx context.Context, user User, page string, fn func(r *Record, i int, found bool, l Level, o Own) error,
) error {
	return fs.change(ctx, user, func() error {
		records, err := fs.store.Records(ctx, []User{user})
		if err != nil {
			return err
		}

		levels, owns, err := fs.store.Levels(ctx, user, []string{page})
		if err != nil {
			return err
		}

		// Save compares with the record as it was read.
		r := records[0].Clone()
		i, found := r.Find(page)
		if err := fn(&r, i, found, levels[0], owns[0]); err != nil {
			return err
		}

		_, err = fs.store.Save(ctx, user, records[0], r)
		return err
	})
}

// change runs edit, which reads the user's record and saves a new one, in the user's turn.
// It runs edit again while other processes cause conflicts.
func (fs *FollowService) change(ctx context.Context, user User, edit func() error) error {
	end, err := fs.turn(ctx, user)
	if err != nil {
		return err
	}
	defer end()

	// Each conflict is the success of another call, so all of them get through in the end.
	for n := range attempts {
		err := edit()
		if !errors.Is(err, ErrConflict) {
			return err
		}

		pause := rand.N(time.Millisecond << min(n, 6)) // lets other processes save first
		if !outage.Sleep(ctx, pause) {
			return fmt.Errorf("%w: %w", presence.ErrUnavailable, ctx.Err())
		}
	}

	return errCrowded
}

var errCrowded = fmt.Errorf("%w: too many requests change the same follows at once", presence.ErrUnavailable)
