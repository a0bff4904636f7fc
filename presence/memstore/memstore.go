// Package memstore is the embedded store: all of presence.Store and unread.Store
// in the memory of one process. It is the default, and it keeps every promise of
// the contracts but durability: what it holds ends with the process, but for
// what unread.Store keeps when there is a data directory.
package memstore

import (
	"cmp"
	"container/list"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Partitions int // P; default presence.DefaultPartitions
	Buckets    int // B; default presence.DefaultBuckets
	// Pages nobody is on are remembered, with the time of their last change, for
	// RememberFor (default 24h), and at most Remember of them (default 100,000):
	// beyond either the one that was left longest ago is forgotten. It then looks
	// like a page nobody ever joined, and comes back under a new incarnation.
	RememberFor time.Duration
	Remember    int
	// Backlog is how many publications wait for one watcher (default 4,096).
	// Beyond, they are dropped and the watcher is told to read again.
	Backlog int
	Log     zerolog.Logger
}

// Store is the embedded store. Its methods may be called from any goroutine.
type Store struct {
	cfg     Config
	notices notices
	secret  string

	mu          sync.Mutex // guards all below
	epoch       uint64
	incarnation uint64 // highest given to a page
	incomplete  int    // partitions whose owner has not written all of them
	partitions  []partition
	pages       map[string]*page
	empty       *list.List            // of *page nobody is on, the one left longest ago first
	endpoints   []map[string][]string // by bucket: page -> gateways
	watchers    map[*watcher]struct{}
}

type partition struct {
	epoch    uint64
	sequence uint64
	complete bool
	members  map[member]int64 // -> end of the hold in unix milliseconds, or 0
}

type member struct {
	user presence.User
	page string
}

type page struct {
	count presence.Count
	users map[int]int64 // by partition; without those that have none
	empty *list.Element // in Store.empty while nobody is on it
	left  time.Time
}

var _ presence.Store = (*Store)(nil)

// New returns an empty store.
func New(cfg Config) *Store {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)
	cfg.RememberFor = cmp.Or(cfg.RememberFor, 24*time.Hour)
	cfg.Remember = cmp.Or(cfg.Remember, 100_000)
	cfg.Backlog = cmp.Or(cfg.Backlog, 4096)
	s := &Store{
		cfg:        cfg,
		partitions: make([]partition, cfg.Partitions),
		pages:      map[string]*page{},
		empty:      list.New(),
		incomplete: cfg.Partitions,
		endpoints:  make([]map[string][]string, cfg.Buckets),
		watchers:   map[*watcher]struct{}{},
		notices:    newNotices(),
	}
	for i := range s.partitions {
		s.partitions[i].members = map[member]int64{}
	}
	for i := range s.endpoints {
		s.endpoints[i] = map[string][]string{}
	}
	return s
}

// Open returns a store whose changes and follows, and the idempotency keys of
// changes, are those kept in the directory, which is made when it is missing. A
// directory serves one process at a time. Close ends it.
func Open(dir string, cfg Config) (*Store, error) {
	s := New(cfg)
	var err error
	if s.notices.disk, s.secret, err = openDisk(dir, &s.notices, cfg.Log); err != nil {
		return nil, err
	}
	return s, nil
}

// Secret is a random text that lasts as long as the data directory; without one
// it is empty.
func (s *Store) Secret() string { return s.secret }

// Close writes what has not been, and lets go of the data directory. Nobody may
// use the store after it.
func (s *Store) Close() error { return s.notices.disk.close() }

// Generation implements presence.Partitions: memory loses nothing.
func (s *Store) Generation(context.Context) (uint64, error) { return 0, nil }

// Claim implements presence.Partitions.
func (s *Store) Claim(_ context.Context, _ string, partitions []int, _ bool) ([]presence.Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	claims := make([]presence.Claim, len(partitions))
	for i, id := range partitions {
		claims[i] = presence.Claim{Partition: id, Epoch: s.epoch, Former: s.partitions[id].epoch}
		s.partitions[id].epoch, s.partitions[id].sequence = s.epoch, 0
	}
	return claims, nil
}

// Load implements presence.Partitions. Members and counts are written in one
// step here, so there are never pages beside those of the members, but for the
// site's total, which the members do not name.
func (s *Store) Load(_ context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	snaps := make([]presence.Snapshot, len(claims))
	for i, c := range claims {
		p := &s.partitions[c.Partition]
		if p.epoch != c.Epoch {
			return nil, presence.ErrFenced
		}
		for m, hold := range p.members {
			member := presence.Member{User: m.user, Page: m.page}
			if hold != 0 {
				member.Hold = time.UnixMilli(hold)
			}
			snaps[i].Members = append(snaps[i].Members, member)
		}
	}
	return snaps, nil
}

// Write implements presence.Partitions.
func (s *Store) Write(_ context.Context, changes []presence.Change) []presence.Outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	touched := map[*page]struct{}{}
	outcomes := make([]presence.Outcome, len(changes))
	for i, c := range changes {
		p := &s.partitions[c.Partition]
		if c.Epoch != p.epoch {
			outcomes[i].Err = presence.ErrFenced
			continue
		}
		if c.Sequence <= p.sequence {
			continue // a repetition: what it says is in, or overtaken
		}
		p.sequence = c.Sequence
		if c.Reset {
			clear(p.members)
		}
		for _, m := range c.Members {
			key := member{m.User, m.Page}
			switch {
			case m.Gone:
				delete(p.members, key)
			case m.Hold.IsZero():
				p.members[key] = 0
			default:
				p.members[key] = m.Hold.UnixMilli()
			}
		}
		for _, pu := range c.Counts {
			if pg := s.set(c.Partition, pu, now); pg != nil {
				touched[pg] = struct{}{}
			}
		}
	}
	if s.complete(changes, outcomes) {
		for b := range s.cfg.Buckets {
			s.tell(presence.Publication{Bucket: b, Lost: true})
		}
	}
	s.publish(touched)
	for i, c := range changes {
		if outcomes[i].Err == nil {
			outcomes[i].Counts = make([]presence.Count, len(c.Counts))
			for j, pu := range c.Counts {
				outcomes[i].Counts[j] = s.count(pu.Page)
			}
		}
	}
	s.forget(now)
	return outcomes
}

// complete notes which partitions are, and reports whether now all are.
func (s *Store) complete(changes []presence.Change, outcomes []presence.Outcome) bool {
	before := s.incomplete
	for i, c := range changes {
		if p := &s.partitions[c.Partition]; c.Complete && outcomes[i].Err == nil && !p.complete {
			p.complete = true
			s.incomplete--
		}
	}
	return before > 0 && s.incomplete == 0
}

// set makes the partition's number of users on the page what it is now, and
// returns the page when its total changed.
func (s *Store) set(partition int, pu presence.PageUsers, now time.Time) *page {
	pg := s.pages[pu.Page]
	if pg == nil {
		if pu.Users == 0 {
			return nil
		}
		s.incarnation = max(s.incarnation+1, uint64(now.UnixMilli()))
		pg = &page{
			count: presence.Count{Page: pu.Page, Version: presence.Version{Incarnation: s.incarnation}},
			users: map[int]int64{},
		}
		s.pages[pu.Page] = pg
	}
	delta := pu.Users - pg.users[partition]
	if delta == 0 {
		return nil
	}
	if pu.Users == 0 {
		delete(pg.users, partition)
	} else {
		pg.users[partition] = pu.Users
	}
	pg.count.Users += delta
	pg.count.Updated = now.UTC().Truncate(time.Second)
	pg.count.Version.Sequence++
	switch {
	case pg.count.Users == 0:
		pg.left, pg.empty = now, s.empty.PushBack(pg)
	case pg.empty != nil:
		s.empty.Remove(pg.empty)
		pg.empty = nil
	}
	return pg
}

// forget drops the pages that were left too long ago, and those beyond the bound.
func (s *Store) forget(now time.Time) {
	for front := s.empty.Front(); front != nil; front = s.empty.Front() {
		pg := front.Value.(*page)
		if s.empty.Len() <= s.cfg.Remember && now.Sub(pg.left) < s.cfg.RememberFor {
			return
		}
		s.empty.Remove(front)
		delete(s.pages, pg.count.Page)
	}
}

func (s *Store) count(name string) presence.Count {
	c := presence.Count{Page: name}
	if pg := s.pages[name]; pg != nil {
		c = pg.count
	}
	c.Stale = s.incomplete > 0
	return c
}

// Counts implements presence.Counters.
func (s *Store) Counts(_ context.Context, pages []string) ([]presence.Count, error) {
	counts := make([]presence.Count, len(pages))
	s.mu.Lock()
	for i, name := range pages {
		if presence.IsPage(name) {
			counts[i] = s.count(name)
		}
	}
	s.mu.Unlock()
	s.topics(counts, pages)
	return counts, nil
}

// topics fills in the counts of topics that are no pages.
func (s *Store) topics(counts []presence.Count, names []string) {
	for i, name := range names {
		if !presence.IsPage(name) {
			counts[i] = s.topic(name)
		}
	}
}

// Attach implements presence.Endpoints.
func (s *Store) Attach(_ context.Context, gateway string, pages []string) ([]presence.Count, error) {
	counts := make([]presence.Count, len(pages))
	s.mu.Lock()
	for i, name := range pages {
		if presence.IsPage(name) {
			counts[i] = s.count(name)
		}
		s.endpoint(presence.Endpoint{Page: name, Gateway: gateway})
	}
	s.mu.Unlock()
	s.topics(counts, pages)
	return counts, nil
}

// Detach implements presence.Endpoints.
func (s *Store) Detach(_ context.Context, gateway string, pages []string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range pages {
		s.endpoint(presence.Endpoint{Page: name, Gateway: gateway, Gone: true})
	}
	return nil
}

// endpoint makes the endpoint what it is now and tells the bucket's watchers.
func (s *Store) endpoint(e presence.Endpoint) {
	b := presence.Bucket(e.Page, s.cfg.Buckets)
	gateways := s.endpoints[b][e.Page]
	i := slices.Index(gateways, e.Gateway)
	if (i >= 0) != e.Gone {
		return
	}
	switch {
	case !e.Gone:
		s.endpoints[b][e.Page] = append(gateways, e.Gateway)
	case len(gateways) == 1:
		delete(s.endpoints[b], e.Page)
	default:
		s.endpoints[b][e.Page] = slices.Delete(gateways, i, i+1)
	}
	s.tell(presence.Publication{Bucket: b, Endpoints: []presence.Endpoint{e}})
}

// Attached implements presence.Endpoints.
func (s *Store) Attached(_ context.Context, bucket int) ([]presence.Endpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []presence.Endpoint
	for name, gateways := range s.endpoints[bucket] {
		for _, gw := range gateways {
			all = append(all, presence.Endpoint{Page: name, Gateway: gw})
		}
	}
	return all, nil
}
