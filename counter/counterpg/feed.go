package counterpg

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/internal/wake"
)

const (
	readAtOnce = 1000 // keys in one statement
	maxMoved   = 100  // members named with one key; with more, all of them are looked at again
	pollParts  = 8    // in which a lap over everything followed is made
	// membersLaps is how many laps it takes until the members of a set that has changed are looked at again. It is more than
	// one, because each user who looks at the set costs a read then.
	membersLaps = 6
)

// changes are keys of counters that changed, and of sets the members that joined or left. nil
// stands for any members.
type changes map[string][]string

// add adds a change of key.
func (c changes) add(key string, moved []string) {
	before, known := c[key]
	switch {
	case known && (before == nil || moved == nil), len(before)+len(moved) > maxMoved:
		c[key] = nil
	case known:
		c[key] = slices.Concat(before, moved)
	default:
		c[key] = moved
	}
}

// feed knows what is followed, what of it may have changed, and what other processes are to be
// told. It hears which keys changed, and of sets whose members moved, from this process and from
// others; then it reads them. So each update is at least as new as what was heard, in whatever
// order that came.
//
// A process that dies between its commit and its notification is found out by a poll of everything
// followed. A poll that finds a set changed does not know which members moved, and later
// notifications may hide from it that one is missing, so now and then all members of a set that
// changed are looked at again.
type feed struct {
	self string // names this process in notifications
	hub  counter.Hub
	news chan struct{} // holds one: dirty has something
	out  chan struct{} // holds one: outgoing has something

	mu       sync.Mutex // guards all below
	followed map[string]*followed
	dirty    changes // of followed keys, perhaps
	outgoing changes // that were committed here, to be sent
	flood    bool    // outgoing was full: everything is to be read again
}

// followed is what is known of a key that somebody follows, or did until the last poll.
type followed struct {
	known   bool // last is what was read
	last    counter.Counter
	checked counter.Version // of last when all members of the set were last looked at again
}

func newFeed() *feed {
	return &feed{
		self: rand.Text(), news: make(chan struct{}, 1), out: make(chan struct{}, 1),
		followed: map[string]*followed{}, dirty: changes{}, outgoing: changes{},
	}
}

// heard notes changes of keys that somebody follows. It is called with mu.
func (f *feed) heard(key string, moved []string) {
	if f.followed[key] != nil {
		f.dirty.add(key, moved)
		wake.Signal(f.news)
	}
}

// recheck has all that is followed read again.
func (f *feed) recheck() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.followed {
		f.heard(key, nil)
	}
}

// poll has a part of what is followed read again. n grows with each call.
func (f *feed) poll(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, k := range f.followed {
		if int(key[len(key)-1])%pollParts != n%pollParts {
			continue
		}
		if !f.hub.Followed(key) {
			delete(f.followed, key)
			continue
		}
		moved := []string{} // nobody, as far as it is known
		if k.last.Kind == counter.Members && k.last.Version != k.checked && n/pollParts%membersLaps == 0 {
			moved, k.checked = nil, k.last.Version
		}
		f.heard(key, moved)
	}
}

// take takes some of the changes.
func (f *feed) take() changes {
	f.mu.Lock()
	defer f.mu.Unlock()
	some := changes{}
	for key, moved := range f.dirty {
		if len(some) == readAtOnce {
			break
		}
		some[key] = moved
		delete(f.dirty, key)
	}
	return some
}

func (f *feed) putBack(some changes) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, moved := range some {
		f.heard(key, moved)
	}
}

// tell reads what may have changed and tells watchers of what did. It is the
// only one that calls Hub.Publish, and each of its reads sees all that the one
// before it saw: so no version is told after a newer one.
func (s *Store) tell(ctx context.Context) {
	f := s.feed
	poll := time.NewTicker(s.cfg.PollEvery / pollParts)
	defer poll.Stop()
	for polls := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-f.news:
		case <-poll.C:
			f.poll(polls)
			polls++
		}
		for some := f.take(); len(some) > 0 && ctx.Err() == nil; some = f.take() {
			now, in, err := s.look(ctx, some)
			if err != nil {
				f.putBack(some)
				outage.Sleep(ctx, retryEvery)
				continue
			}
			f.hub.Publish(s.compare(some, now, in), func(key string) counter.Counter {
				c := now[key]
				c.Key = key
				return c
			})
		}
	}
}

// place is a member of a set.
type place struct{ key, member string }

// look reads the counters of some, and which of the members that moved are in their sets.
func (s *Store) look(ctx context.Context, some changes) (now map[string]counter.Counter, in map[place]bool, err error) {
	if now, err = s.readFollowed(ctx, slices.Collect(maps.Keys(some))); err != nil {
		return nil, nil, err
	}
	var moved memberColumns
	for key, members := range some {
		for _, m := range members {
			moved.add(key, m)
		}
	}
	if len(moved.key) == 0 {
		return now, nil, nil
	}
	in = map[place]bool{}
	var p place
	err = s.query(ctx, []any{&p.key, &p.member}, func() error { in[p] = true; return nil }, readMembers, moved.key, moved.member)
	return now, in, err
}

// readFollowed reads the counters of keys of which the feed tells.
func (s *Store) readFollowed(ctx context.Context, keys []string) (map[string]counter.Counter, error) {
	now := map[string]counter.Counter{}
	err := s.read(ctx, keys, "", func(key string, r *record, _ bool) {
		if !s.cfg.Behind || r.Kind == counter.Exact {
			now[key] = r.Counter(key)
		}
	})
	return now, err
}

// compare returns what is to be told of some, that look has read.
func (s *Store) compare(some changes, now map[string]counter.Counter, in map[place]bool) (told []counter.Notification) {
	f := s.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, moved := range some {
		k := f.followed[key]
		if k == nil || !k.known && !s.cfg.Behind {
			continue // who follows it reads it after this
		}
		c, last := now[key], k.last
		k.known, k.last = true, c
		set := c.Kind == counter.Members || last.Kind == counter.Members
		polled := moved != nil && len(moved) == 0
		if c.Version == last.Version && (!set || polled) {
			continue
		}
		t := counter.Notification{Key: key, All: set && len(moved) == 0}
		for _, m := range moved {
			if in[place{key, m}] {
				t.Joined = append(t.Joined, m)
			} else {
				t.Left = append(t.Left, m)
			}
		}
		told = append(told, t)
	}
	return told
}

// Watch is as counter.Feed says. What was missed is read again here, so lost is
// never called.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return &watch{s.feed.hub.Watch(told, lost), s}
}

// watch is a hub's, that also says what is followed.
type watch struct {
	counter.Watch
	store *Store
}

// Follow also reads keys that nobody followed before: what changes later is
// told by comparison.
func (w *watch) Follow(ctx context.Context, keys ...string) error {
	if err := w.Watch.Follow(ctx, keys...); err != nil {
		return err
	}
	f := w.store.feed
	var unknown []string
	f.mu.Lock()
	for _, key := range keys {
		if f.followed[key] == nil {
			f.followed[key] = &followed{}
		}
		if !f.followed[key].known {
			unknown = append(unknown, key)
		}
	}
	f.mu.Unlock()
	for chunk := range slices.Chunk(unknown, readAtOnce) {
		now, err := w.store.readFollowed(ctx, chunk)
		if err != nil && !w.store.cfg.Behind {
			return fmt.Errorf("counterpg: follow: %w", err)
		}
		f.mu.Lock()
		for _, key := range chunk {
			switch k := f.followed[key]; {
			case err != nil:
				f.heard(key, nil) // what is there is told when PostgreSQL is back
			case k != nil && !k.known:
				k.known, k.last, k.checked = true, now[key], now[key].Version
			}
		}
		f.mu.Unlock()
	}
	return nil
}
