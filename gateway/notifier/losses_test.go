package notifier

import (
	"context"

	"headcount/presence"
	"headcount/presence/presencemem"
	"headcount/unread"
)

// losingStore is a store that loses its newest data, or all, like a Redis that comes back older or empty. Until repair
// a page without changes has no incarnation. After it all incarnations are above those from before the loss.
type losingStore struct {
	*presencemem.Store
	writes  []func() // all writes that are left, for the next loss
	highest uint64   // of all incarnations
	lowest  uint64   // valid incarnation
	levels  map[string]uint64
	records map[unread.User]uint64
	before  map[string]int64 // by page: Level.Before

	losses int
	past   map[string][]moment // what was ever stored of each page
	first  map[userFollow]int  // losses before a follow was first read
}

type userFollow struct {
	user   unread.User
	follow unread.Follow
}

// moment has a level of a page and all own changes.
type moment struct {
	losses int // before it
	level  unread.Level
	owns   map[unread.User]unread.Own
}

func newLosingStore() *losingStore {
	s := &losingStore{past: map[string][]moment{}, first: map[userFollow]int{}}
	s.lose(0)

	return s
}

// lose loses all writes but the first ones.
func (s *losingStore) lose(left int) {
	writes := s.writes[:left]
	*s = losingStore{
		Store:   presencemem.New(presencemem.Config{}),
		highest: s.highest,
		levels:  map[string]uint64{},
		records: map[unread.User]uint64{},
		before:  map[string]int64{},
		losses:  s.losses + 1,
		past:    s.past,
		first:   s.first,
	}

	for _, write := range writes {
		write()
	}
}

// repair raises all incarnations, as Redis does when it may have lost data.
func (s *losingStore) repair() {
	s.highest++
	s.lowest = s.highest

	for page := range s.levels {
		l, _, _ := s.Store.Authors(context.Background(), page, 0, nil)
		s.before[page] = l.All
	}
}

// remember adds what is stored of pages to the past.
func (s *losingStore) remember(pages []string, users []unread.User) {
	for _, page := range pages {
		l, owns, _ := s.Authors(context.Background(), page, 0, users)
		s.past[page] = append(s.past[page], moment{s.losses, l, owns})
	}
}

// most returns how many changes of a page can be unread at most for a user with that follow.
func (s *losingStore) most(u unread.User, f unread.Follow) (n int64) {
	for _, m := range s.past[f.Page] {
		if m.losses >= s.first[userFollow{u, f}] {
			n = max(n, f.Unread(m.level, m.owns[u]))
		}
	}

	return n
}

func (s *losingStore) raised(page string, l unread.Level) unread.Level {
	l.Incarnation = max(s.levels[page], s.lowest)
	l.Before = s.before[page]

	return l
}

func (s *losingStore) Change(ctx context.Context, page string, c unread.Change) error {
	if s.levels[page] == 0 {
		s.highest++
		s.levels[page] = s.highest
	}
	s.writes = append(s.writes, func() { _ = s.Change(ctx, page, c) })

	return s.Store.Change(ctx, page, c)
}

func (s *losingStore) Levels(ctx context.Context, u unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	levels, owns, err := s.Store.Levels(ctx, u, pages)
	for i := range levels {
		levels[i] = s.raised(pages[i], levels[i])
	}

	return levels, owns, err
}

func (s *losingStore) Authors(
	ctx context.Context, page string, since int64, users []unread.User,
) (unread.Level, map[unread.User]unread.Own, error) {
	l, owns, err := s.Store.Authors(ctx, page, since, users)
	return s.raised(page, l), owns, err
}

func (s *losingStore) Records(ctx context.Context, users []unread.User) ([]unread.Record, error) {
	records, err := s.Store.Records(ctx, users)
	for i, u := range users {
		if records[i].Version != (presence.Version{}) {
			records[i].Version.Incarnation = max(s.records[u], s.lowest)
		}
		for _, f := range records[i].Follows {
			if _, isKnown := s.first[userFollow{u, f}]; !isKnown {
				s.first[userFollow{u, f}] = s.losses
			}
		}
	}

	return records, err
}

func (s *losingStore) Save(ctx context.Context, u unread.User, old, r unread.Record) (v presence.Version, err error) {
	is, err := s.Records(ctx, []unread.User{u})
	if err != nil {
		return v, err
	}
	if is[0].Version != old.Version {
		return v, unread.ErrConflict
	}

	return v, s.save(ctx, u, r)
}

func (s *losingStore) save(ctx context.Context, u unread.User, r unread.Record) error {
	if s.records[u] == 0 {
		s.highest++
		s.records[u] = s.highest
	}
	s.writes = append(s.writes, func() { _ = s.save(ctx, u, r) })

	// The inner store has incarnations of its own.
	is, err := s.Store.Records(ctx, []unread.User{u})
	if err != nil {
		return err
	}

	_, err = s.Store.Save(ctx, u, is[0], r)
	return err
}

// lingers is a Hub that knows the newest update of each topic that was ever published.
type lingers struct {
	wants
	newest map[presence.Topic]presence.Update
}

func (h lingers) Want(t presence.Topic) (presence.Update, bool) {
	h.wants.Want(t)
	u, known := h.newest[t]

	return u, known
}

func (h lingers) publish(u presence.Update) {
	if u.Version.Compare(h.newest[u.Topic].Version) > 0 {
		h.newest[u.Topic] = u
	}
}

// watcher is a connection that checks what is sent.
type watcher struct{ check func() }

func (w watcher) SendUnread(int64, bool) { w.check() }
