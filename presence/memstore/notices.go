package memstore

import (
	"context"
	"sync"
	"time"

	"headcount/presence"
	"headcount/presence/unread"
)

// maxKeys is how many idempotency keys are remembered: beyond, the oldest is
// forgotten before its day is over. At 24 bytes each, and as much again for the
// map, that is some 50 MB.
const maxKeys = 1_000_000

// notices are changes and follows: unread.Store in memory. What is in memory is
// the truth; disk, when there is one, has a copy that survives.
type notices struct {
	disk *disk // nil: nothing survives

	mu          sync.Mutex // guards all below; Store.mu may be taken while it is held, not the other way round
	pages       map[string]*changed
	records     map[unread.User]*unread.Record
	keys        map[[16]byte]struct{}
	oldest      []rememberedKey // the keys, in the order in which they are forgotten
	incarnation uint64          // highest given to anything
}

// changed is a page that has changed, and what its authors have.
type changed struct {
	level unread.Level
	owns  map[unread.User]unread.Own // at most unread.MaxAuthors
}

type rememberedKey struct {
	hash  [16]byte
	until int64 // unix seconds
}

var _ unread.Store = (*Store)(nil)

func newNotices() notices {
	return notices{
		pages:   map[string]*changed{},
		records: map[unread.User]*unread.Record{},
		keys:    map[[16]byte]struct{}{},
	}
}

// newIncarnation is called with mu held.
func (n *notices) newIncarnation(now time.Time) uint64 {
	n.incarnation = max(n.incarnation+1, uint64(now.UnixMilli()))
	return n.incarnation
}

// Change implements unread.Store. Two calls with one key return when the change
// is kept, both.
func (s *Store) Change(ctx context.Context, page string, c unread.Change) error {
	n := &s.notices
	n.mu.Lock()
	now := time.Now()
	if c.Key == "" || n.remember(unread.KeyHash(page, c.Key), now) {
		n.change(page, c.By, now)
		s.publishTopic(n.pages[page].level.Count(page))
	}
	n.mu.Unlock()
	return n.disk.sync(ctx)
}

// remember reports whether the key is new.
func (n *notices) remember(key [16]byte, now time.Time) bool {
	if _, known := n.keys[key]; known {
		return false
	}
	k := rememberedKey{key, now.Add(unread.KeyFor).Unix()}
	n.keys[key] = struct{}{}
	n.oldest = append(n.oldest, k)
	n.disk.putKey(k)
	for len(n.oldest) > maxKeys || n.oldest[0].until <= now.Unix() {
		delete(n.keys, n.oldest[0].hash)
		n.disk.forgetKey(n.oldest[0].hash)
		n.oldest = n.oldest[1:]
	}
	return true
}

func (n *notices) change(page string, by *unread.User, now time.Time) {
	p := n.pages[page]
	if p == nil {
		p = &changed{level: unread.Level{Incarnation: n.newIncarnation(now)}, owns: map[unread.User]unread.Own{}}
		n.pages[page] = p
	}
	old := p.level
	p.level.All++
	p.level.At = now.UTC().Truncate(time.Second)
	if by != nil {
		own, known := p.owns[*by]
		if known || len(p.owns) < unread.MaxAuthors {
			p.level.By++
			own = own.Next(old)
			p.owns[*by] = own
			n.disk.putOwn(page, *by, own)
		}
	}
	n.disk.putLevel(page, p.level)
}

// Levels implements unread.Store.
func (s *Store) Levels(_ context.Context, user unread.User, pages []string) ([]unread.Level, []unread.Own, error) {
	s.notices.mu.Lock()
	defer s.notices.mu.Unlock()
	levels, owns := make([]unread.Level, len(pages)), make([]unread.Own, len(pages))
	for i, page := range pages {
		if p := s.notices.pages[page]; p != nil {
			levels[i], owns[i] = p.level, p.owns[user]
		}
	}
	return levels, owns, nil
}

// Authors implements unread.Store.
func (s *Store) Authors(_ context.Context, page string, since int64, users []unread.User) (unread.Level, map[unread.User]unread.Own, error) {
	s.notices.mu.Lock()
	defer s.notices.mu.Unlock()
	p := s.notices.pages[page]
	if p == nil {
		return unread.Level{}, nil, nil
	}
	owns := map[unread.User]unread.Own{}
	if p.level.By > since {
		for _, u := range users {
			if own, ok := p.owns[u]; ok {
				owns[u] = own
			}
		}
	}
	return p.level, owns, nil
}

// Records implements unread.Store.
func (s *Store) Records(_ context.Context, users []unread.User) ([]unread.Record, error) {
	s.notices.mu.Lock()
	defer s.notices.mu.Unlock()
	records := make([]unread.Record, len(users))
	for i, u := range users {
		if r := s.notices.records[u]; r != nil {
			records[i] = *r // replaced by Save, never written to
		}
	}
	return records, nil
}

// Save implements unread.Store.
func (s *Store) Save(ctx context.Context, user unread.User, old, r unread.Record) (presence.Version, error) {
	n := &s.notices
	n.mu.Lock()
	version := presence.Version{}
	if is := n.records[user]; is != nil {
		version = is.Version
	}
	if version != old.Version {
		n.mu.Unlock()
		return presence.Version{}, unread.ErrConflict
	}
	if version == (presence.Version{}) {
		version.Incarnation = n.newIncarnation(time.Now())
	}
	version.Sequence++
	r = r.Clone()
	r.Version = version
	n.records[user] = &r
	n.disk.putRecord(user, r)
	set, gone := r.Differences(old)
	for _, f := range set {
		n.disk.putFollow(user, f)
	}
	for _, page := range gone {
		n.disk.endFollow(user, page)
	}
	s.publishTopic(presence.Count{Page: presence.FollowsTopic(user), Version: version})
	n.mu.Unlock()
	return version, n.disk.sync(ctx)
}

// topic is the count that is published under a topic which is no page.
func (s *Store) topic(topic string) presence.Count {
	s.notices.mu.Lock()
	defer s.notices.mu.Unlock()
	if page, ok := presence.PageOfChanges(topic); ok {
		if p := s.notices.pages[page]; p != nil {
			return p.level.Count(page)
		}
	} else if user, ok := presence.UserOfFollows(topic); ok {
		if r := s.notices.records[user]; r != nil {
			return presence.Count{Page: topic, Version: r.Version}
		}
	}
	return presence.Count{Page: topic}
}

// publishTopic is called with notices.mu held.
func (s *Store) publishTopic(c presence.Count) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tell(presence.Publication{Bucket: presence.Bucket(c.Page, s.cfg.Buckets), Counts: []presence.Count{c}})
}
