// Package presencemem is the embedded store, which is the default: presence.Store and
// unread.Store in the memory of one process. It fulfils the contracts except for
// durability. With a data directory, changes and follows (unread.Store) are durable, and
// present users survive a restart.
package presencemem

import (
	"cmp"
	"container/list"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/hashkey"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Partitions int    // P; default presence.DefaultPartitions
	Buckets    int    // B; default presence.DefaultBuckets
	Region     string // this region's name, for Parts
	// The store keeps a page without users, with the time of its last change, for
	// RememberFor (default 24h). It keeps at most Remember such pages (default 100,000),
	// and forgets the pages first that have been empty longest. A forgotten page looks like
	// a page that never had a user, and gets a new incarnation when it is used again.
	RememberFor time.Duration
	Remember    int
	// PageStats is how long minutes of pages are kept; 0: not at all. They take at most
	// PageStatsBytes (default 64 MiB, or 600,000 quiet minutes); beyond that, the page
	// that has not changed for the longest time is forgotten.
	PageStats      time.Duration
	PageStatsBytes int
	// PageDays is how many days of pages are kept; 0: none. They take at most PageDaysBytes (default 64 MiB, or a year
	// of 10,000 pages); beyond that, the page that has not changed for the longest time is forgotten.
	PageDays      int
	PageDaysBytes int
	// LastSeen is how long departures of users are remembered; 0: not at all. Of more than
	// MaxLastSeen (default presence.MaxLastSeen) those who departed first are forgotten.
	LastSeen    time.Duration
	MaxLastSeen int
	// Backlog bounds the publications that wait for one watcher (default 4,096). Further
	// publications are dropped, and the watcher gets a Lost.
	Backlog int
	// PresenceTimeout is how long a data directory keeps the users who are present over
	// a restart; 0: not at all.
	PresenceTimeout time.Duration
	Log             zerolog.Logger
}

// Store is the embedded store. Its methods may be called from any goroutine.
type Store struct {
	cfg    Config
	unread unreadState
	secret string

	mu          sync.Mutex // guards all below
	epoch       uint64
	incarnation uint64 // highest incarnation assigned to a page
	incomplete  int    // partitions that their owner has not written completely
	partitions  []partition
	pages       map[string]*page
	// empty has every *page without users; the longest empty comes first
	empty     *list.List
	endpoints []map[presence.Topic]presence.Incarnations // by bucket: topic -> gateways
	watchers  map[*watcher]struct{}
	leases    map[string]lease // by process
	history   pageHistory
	days      dayHistory
	seen      *lastSeen

	membersChanged bool // since the file of present users was written
	log            presentLog

	dir      string         // the data directory; "": none
	closing  chan struct{}  // closed by Close
	writers  sync.WaitGroup // of minutes and of present users
	recalled bool           // see Recalled; set by Open
}

type partition struct {
	owner    string
	epoch    uint64
	claimed  time.Time // when epoch was assigned; zero: by an earlier process, or never
	sequence uint64
	complete bool
	// members has the end of each member's hold in unix milliseconds, or 0. It is negative
	// when the user is present by the hold alone.
	members map[member]int64
}

type member struct {
	user presence.User
	page string
}

type page struct {
	count presence.Count
	users map[int]int64 // by partition; partitions without users are not in it
	empty *list.Element // in Store.empty; nil while the page has users
	left  time.Time
}

var (
	_ presence.Store     = (*Store)(nil)
	_ presence.Processes = (*Store)(nil)
)

// New returns an empty store.
func New(cfg Config) *Store {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)
	cfg.RememberFor = cmp.Or(cfg.RememberFor, 24*time.Hour)
	cfg.Remember = cmp.Or(cfg.Remember, 100_000)
	cfg.PageStatsBytes = cmp.Or(cfg.PageStatsBytes, 64<<20)
	cfg.PageDaysBytes = cmp.Or(cfg.PageDaysBytes, 64<<20)
	cfg.MaxLastSeen = cmp.Or(cfg.MaxLastSeen, presence.MaxLastSeen)
	cfg.Backlog = cmp.Or(cfg.Backlog, 4096)

	s := &Store{
		cfg:        cfg,
		partitions: make([]partition, cfg.Partitions),
		pages:      map[string]*page{},
		empty:      list.New(),
		incomplete: cfg.Partitions,
		endpoints:  make([]map[presence.Topic]presence.Incarnations, cfg.Buckets),
		watchers:   map[*watcher]struct{}{},
		leases:     map[string]lease{},
		unread:     newUnreadState(),
		history:    newPageHistory(cfg),
		days:       newDayHistory(cfg),
		seen:       newLastSeen(cfg),
		closing:    make(chan struct{}),
	}

	for i := range s.partitions {
		s.partitions[i].members = map[member]int64{}
	}
	for i := range s.endpoints {
		s.endpoints[i] = map[presence.Topic]presence.Incarnations{}
	}

	return s
}

// Open returns a store that keeps changes, idempotency keys, follows and present users
// in the directory dir, which it creates if necessary. Only one process at a time may
// use a directory. The caller must Close the store.
func Open(dir string, cfg Config) (*Store, error) {
	s := New(cfg)
	var err error
	s.unread.disk, s.secret, err = openDisk(dir, s)
	if err != nil {
		return nil, err
	}

	s.dir = dir
	go s.unread.disk.run(s.commit) // ends with Close

	var alive time.Time
	if s.cfg.PresenceTimeout > 0 {
		// The file of the process before is read first, because firstPresent replaces it.
		alive = s.loadPresent(time.Now())
		s.firstPresent()
		s.writers.Go(s.keepPresent)
	}
	if s.days.retention > 0 {
		// After loadPresent, which says until when the process before was alive.
		s.days.endOfRun(s.recalled, alive, time.Now())
	}
	if s.history.retention > 0 || s.days.retention > 0 {
		s.writers.Go(s.keepMinutes)
	}

	if s.cfg.LastSeen > 0 { // after loadPresent, which notes departures
		s.writers.Go(s.keepSeen)
	}

	return s, nil
}

// Writable returns nil if changes and follows can be written to the data directory now, or
// else the reason why not. Without a directory it returns nil.
func (s *Store) Writable() error { return s.unread.disk.writable() }

// Secret returns a random text that lasts as long as the data directory. Without a
// directory it is empty.
func (s *Store) Secret() string { return s.secret }

// HashKey returns the key of user hashes, which is created when the data directory is used
// for the first time. Without a directory it is random.
func (s *Store) HashKey() ([]byte, error) {
	if s.unread.disk == nil {
		return hashkey.New(), nil
	}

	key, err := s.unread.disk.hashKey()
	if err != nil {
		return nil, fmt.Errorf("data directory: the key of user hashes: %w", err)
	}

	return key, nil
}

// Close carries out the waiting operations and closes the data directory. It is called
// once; later changes and follows are refused.
func (s *Store) Close() error {
	close(s.closing)
	// The writers use the file and the log for the last time, so these are closed after them.
	s.writers.Wait()

	s.log.mu.Lock()
	s.log.close()
	s.log.mu.Unlock()

	return s.unread.disk.close()
}

// Generation implements presence.Partitions: memory loses nothing.
func (s *Store) Generation(context.Context) (uint64, error) { return 0, nil }

// Claim implements presence.Partitions.
func (s *Store) Claim(_ context.Context, owner string, partitions []int, again bool) ([]presence.Claim, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.epoch++
	claims := make([]presence.Claim, len(partitions))
	now := time.Now()
	for i, id := range partitions {
		p := &s.partitions[id]
		// Only another process has another name, and this store has one process. The contract demands it all the
		// same.
		if again && p.owner != "" && p.owner != owner {
			claims[i] = presence.Claim{Partition: id}
			continue
		}

		claims[i] = presence.Claim{Partition: id, Epoch: s.epoch, Whole: p.complete}
		if !p.claimed.IsZero() {
			claims[i].Held = now.Sub(p.claimed)
		}

		p.owner = owner
		p.epoch = s.epoch
		p.claimed = now
		// Sequences are those of a claim: an older one is refused by its epoch.
		p.sequence = 0
	}

	return claims, nil
}

// Load implements presence.Partitions. This store writes members and counts in one
// step, so Snapshot.Pages needs only the site's total, which no member names.
func (s *Store) Load(_ context.Context, claims []presence.Claim) ([]presence.Snapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	snaps := make([]presence.Snapshot, len(claims))
	for i, c := range claims {
		p := &s.partitions[c.Partition]
		// A later claim has the members now, and may have changed them.
		if p.epoch != c.Epoch {
			return nil, presence.ErrFenced
		}

		for m, hold := range p.members {
			member := presence.Member{User: m.user, Page: m.page}
			if hold != 0 {
				member.Hold = time.UnixMilli(max(hold, -hold))
				member.Alone = hold < 0
			}
			snaps[i].Members = append(snaps[i].Members, member)
		}
	}

	return snaps, nil
}

// Write implements presence.Partitions. With a data directory, changes of members and departures are in the log of
// present users when it returns.
func (s *Store) Write(_ context.Context, changes []presence.Change) []presence.Outcome {
	// Held until the changes are logged, so that the log has them in the order in which they were made.
	s.log.mu.Lock()
	defer s.log.mu.Unlock()

	outcomes, made := s.write(changes)
	s.logChangesLocked(made)

	return outcomes
}

// write makes the changes in memory. It returns those that were made now.
func (s *Store) write(changes []presence.Change) (outcomes []presence.Outcome, made []presence.Change) {
	s.mu.Lock()
	defer s.mu.Unlock()

	now := time.Now()
	touched := map[*page]struct{}{}
	var arrivals []presence.Arrival

	outcomes = make([]presence.Outcome, len(changes))
	for i, c := range changes {
		p := &s.partitions[c.Partition]
		if c.Epoch != p.epoch {
			outcomes[i].Err = presence.ErrFenced
			continue
		}

		if c.Sequence <= p.sequence {
			continue // a repetition: this change or a newer one has been applied
		}

		// Noted before anything is changed: from here on nothing can fail.
		p.sequence = c.Sequence
		arrivals = append(arrivals, c.Arrivals...)
		s.membersChanged = s.membersChanged || c.Reset || len(c.Members) > 0
		changeMembers(p.members, c)

		if s.seen.retention == 0 {
			c.Departures = nil // so they are in no log either
		}

		// A repetition is not logged again, because the log has it.
		made = append(made, c)
		for _, d := range c.Departures {
			s.seen.departed(d.User, d.At)
		}
		for _, pu := range c.Counts {
			if pg := s.set(c.Partition, pu, now); pg != nil {
				touched[pg] = struct{}{}
			}
		}
	}

	// All counts were stale until now, and no publication has said otherwise.
	completed := s.complete(changes, outcomes)
	if completed {
		for b := range s.cfg.Buckets {
			s.notify(presence.Publication{Bucket: b, Lost: true})
		}
	}

	s.publish(touched)
	s.history.remember(touched, arrivals, now)
	s.days.remember(touched, arrivals, now)
	if completed {
		// Every owner has written its users by now, so nobody else came back after the restart.
		s.days.confirm(s.pages, now)
	}

	for i, c := range changes {
		if outcomes[i].Err == nil {
			// After all changes: the counts of one may have been raised by the next.
			outcomes[i].Counts = make([]presence.Count, len(c.Counts))
			for j, pu := range c.Counts {
				outcomes[i].Counts[j] = s.count(pu.Page)
			}
		}
	}

	// After the counts were read: a page that has just become empty may be the one too many.
	s.forget(now)
	s.seen.expire(now)

	return outcomes, made
}

// changeMembers makes a change of a partition's members, after a reset to none.
func changeMembers(members map[member]int64, c presence.Change) {
	if c.Reset {
		clear(members)
	}

	for _, m := range c.Members {
		key := member{m.User, m.Page}
		if m.Gone {
			delete(members, key)
		} else {
			members[key] = holdOf(m)
		}
	}
}

// holdOf returns the end of a member's hold, as partition.members has it.
func holdOf(m presence.MemberChange) int64 {
	switch {
	case m.Hold.IsZero():
		return 0
	case m.Alone:
		return -m.Hold.UnixMilli()
	default:
		return m.Hold.UnixMilli()
	}
}

// Incomplete implements presence.Partitions. It always looks at the whole store.
func (s *Store) Incomplete(_ context.Context, partitions []int, _ bool) (missing []int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	for _, id := range partitions {
		if !s.partitions[id].complete {
			missing = append(missing, id)
		}
	}

	return missing, nil
}

// complete records which partitions the changes complete, and reports whether the last
// one is among them.
func (s *Store) complete(changes []presence.Change, outcomes []presence.Outcome) bool {
	before := s.incomplete
	for i, c := range changes {
		p := &s.partitions[c.Partition]
		if c.Complete && outcomes[i].Err == nil && !p.complete {
			p.complete = true
			s.incomplete--
		}
	}

	// Once complete stays complete: memory loses nothing.
	return before > 0 && s.incomplete == 0
}

// set stores the partition's number of users on the page, and returns the page when
// its total changed.
func (s *Store) set(partition int, pu presence.PageUsers, now time.Time) *page {
	pg := s.pages[pu.Page]
	if pg == nil {
		// A page that nobody has joined needs no entry, which would push another out of the list of empty pages.
		if pu.Users == 0 {
			return nil
		}

		// The incarnation exceeds all earlier ones, so that a forgotten page comes back as newer, even after a restart.
		s.incarnation = max(s.incarnation+1, uint64(now.UnixMilli()))
		pg = &page{
			count: presence.Count{Page: pu.Page, Version: presence.Version{Incarnation: s.incarnation}},
			users: map[int]int64{},
		}
		s.pages[pu.Page] = pg
	}

	delta := pu.Users - pg.users[partition]
	// A count that is written again is no change, and publishes nothing.
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
		pg.left = now
		pg.empty = s.empty.PushBack(pg)
	case pg.empty != nil:
		s.empty.Remove(pg.empty)
		pg.empty = nil
	}

	return pg
}

// forget drops pages that have been empty for too long, and those beyond the bound.
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

	// Some owner has not written all its users, and they may be on any page.
	c.Stale = s.incomplete > 0

	return c
}

// Counts implements presence.Counters.
func (s *Store) Counts(_ context.Context, pages []string) ([]presence.Count, error) {
	counts := make([]presence.Count, len(pages))

	s.mu.Lock()
	defer s.mu.Unlock()

	for i, name := range pages {
		counts[i] = s.count(name)
	}

	return counts, nil
}

// Pages implements presence.Lister.
func (s *Store) Pages(_ context.Context, fn func(pages []string)) error {
	var names []string

	s.mu.Lock()
	for name, pg := range s.pages {
		if pg.count.Users > 0 {
			names = append(names, name)
		}
	}
	// fn is called without the lock, because it may read counts.
	s.mu.Unlock()

	fn(names)
	return nil
}

// Attach implements presence.Endpoints.
func (s *Store) Attach(ctx context.Context, gateway string, topics []presence.Topic) ([]presence.Update, error) {
	s.mu.Lock()
	s.changeEndpoints(gateway, topics, false)
	s.mu.Unlock()

	return s.Updates(ctx, topics) // after the endpoints, so that watchers know them before any later change
}

// Detach implements presence.Endpoints.
func (s *Store) Detach(_ context.Context, gateway string, topics []presence.Topic) error {
	s.mu.Lock()
	defer s.mu.Unlock()

	s.changeEndpoints(gateway, topics, true)

	return nil
}

// Missing implements presence.Endpoints.
func (s *Store) Missing(_ context.Context, gateway string, topics []presence.Topic) ([]presence.Topic, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	var missing []presence.Topic
	for _, t := range topics {
		if !s.endpoints[t.Bucket(s.cfg.Buckets)][t].Has(gateway) {
			missing = append(missing, t)
		}
	}

	return missing, nil
}

// changeEndpoints adds or removes endpoints of a gateway, and notifies the watchers with one publication per bucket.
func (s *Store) changeEndpoints(gateway string, topics []presence.Topic, gone bool) {
	changed := map[int][]presence.Endpoint{}
	for _, t := range topics {
		e := presence.Endpoint{Topic: t, Gateway: gateway, Gone: gone}
		b := t.Bucket(s.cfg.Buckets)
		if s.changeEndpoint(b, e) {
			changed[b] = append(changed[b], e)
		}
	}

	for b, endpoints := range changed {
		s.notify(presence.Publication{Bucket: b, Endpoints: endpoints})
	}
}

// changeEndpoint adds or removes an endpoint, and reports whether that changed anything.
func (s *Store) changeEndpoint(bucket int, e presence.Endpoint) (changed bool) {
	all := s.endpoints[bucket]
	gateways := all[e.Topic]
	if gateways.Has(e.Gateway) != e.Gone {
		return false
	}

	if e.Gone {
		gateways = gateways.Without(e.Gateway)
	} else {
		gateways = gateways.With(e.Gateway)
	}

	all[e.Topic] = gateways
	if gateways == (presence.Incarnations{}) {
		delete(all, e.Topic)
	}

	return true
}

// Attached implements presence.Endpoints.
func (s *Store) Attached(_ context.Context, bucket int) ([]presence.Endpoint, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	var all []presence.Endpoint
	for topic, gateways := range s.endpoints[bucket] {
		for gw := range gateways.All() {
			all = append(all, presence.Endpoint{Topic: topic, Gateway: gw})
		}
	}

	return all, nil
}
