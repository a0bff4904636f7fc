// Package notifier keeps the unread counts of the users who are connected to this gateway.
// It reads their follows, and receives changes as updates. It is independent of sockets.
package notifier

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/wake"
	"headcount/presence"
	"headcount/unread"
)

const (
	enterTimeout = 250 * time.Millisecond // how long a new connection waits for its unread count
	storeTimeout = 3 * time.Second        // for a call of the store
	readUsers    = 256                    // users whose follows are read in one call
)

// Conn is a connection of a user.
type Conn interface {
	// SendUnread sends the unread count to the client, if the count is new to the client or again
	// is set. Sums calls it under its lock, so it must not block.
	SendUnread(count int64, again bool)
}

// Hub subscribes to topics, and passes their updates to Sums.Update.
type Hub interface {
	Want(t presence.Topic) (newest presence.Update, known bool)
	Unwant(t presence.Topic)
}

// Group waits for the goroutines it starts.
type Group interface{ Go(f func()) }

// Config configures Sums. Every field is required.
type Config struct {
	Store unread.Store
	Hub   Hub
	Group Group         // runs the resets that connections ask for
	Rest  time.Duration // the pause between two resets of one user; more than 1 s counts as 1 s
	Log   zerolog.Logger
}

// Sums keeps the unread counts of the connected users. The levels of the pages that they
// follow, and the versions of their records, arrive as updates, like counts. Sums adds up the
// counts itself, so a change of a page costs no read of the store.
//
// Only the goroutine of Run reads stale data again; new connections and resets read for
// themselves. Any goroutine may call the methods.
type Sums struct {
	born          time.Time // for times on the monotonic clock
	cfg           Config
	followService *unread.FollowService
	wake          chan struct{} // holds one: Run has something to do

	// mu guards the fields below. Sums calls Hub and Conn while it holds mu, so these must
	// hold no lock of their own when they call Sums. The maps are bounded by connections
	// and follows.
	mu         sync.Mutex
	users      map[unread.User]*Sum
	pages      map[string]*page
	staleUsers map[*Sum]failure  // users whom Run must read
	stalePages map[*page]failure // pages whose authors Run must read
	entering   *gathering        // new users for the next read; nil: none
	failures   failure           // reads by Run that failed
	reading    bool              // a read of new users is in flight
}

// failure numbers the reads that failed, in order; 0: none.
type failure uint64

// Sum has the follows of one user, and the number of unread changes.
type Sum struct {
	user      unread.User
	refs      int32 // connections, and requests that may become connections
	known     bool  // the fields below were read
	replacing bool  // replace is replacing the fields below, and sum is not valid yet
	conns     []Conn
	version   presence.Version
	follows   map[string]*follow // by page; nil: the user follows nothing
	sum       int64              // the sum of the follows' counts
	reset     *reset             // for runResets; nil: it does not run
	rested    time.Duration      // when the next reset may begin, since Sums.born
}

// follow is one page of one user.
type follow struct {
	user   *Sum
	page   *page
	index  int // in page.follows
	stored unread.Follow
	own    own
	count  int64 // unread changes of this page
}

// New returns Sums without users.
func New(cfg Config) *Sums {
	cfg.Rest = min(cfg.Rest, time.Second)
	s := &Sums{
		cfg:        cfg,
		born:       time.Now(),
		wake:       make(chan struct{}, 1),
		users:      map[unread.User]*Sum{},
		pages:      map[string]*page{},
		staleUsers: map[*Sum]failure{},
		stalePages: map[*page]failure{},
	}
	s.followService = unread.NewFollowService(cfg.Store)

	return s
}

// Follows returns the service that reads and changes follows. Its changes arrive as updates.
func (s *Sums) Follows() *unread.FollowService { return s.followService }

// Enter prepares a connection of the user. It reads the user's follows, and waits at most
// enterTimeout for them. The caller must call Leave once for each Enter.
func (s *Sums) Enter(ctx context.Context, user unread.User) *Sum {
	f, known := s.enter(user)
	if known {
		return f
	}

	ctx, cancel := context.WithTimeout(ctx, enterTimeout)
	defer cancel()
	state, err := s.state(ctx, user)

	s.mu.Lock()
	defer s.mu.Unlock()

	if err == nil {
		s.replace(f, state)
	} else {
		s.staleUsers[f] = 0 // Run tries again
		wake.Signal(s.wake)
	}

	return f
}

// enter returns the user's Sum, with one more reference to it, and whether it is known.
func (s *Sums) enter(user unread.User) (f *Sum, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	f = s.users[user]
	if f == nil {
		f = &Sum{user: user}
		s.users[user] = f
		// Before the read, so that no later change is missed.
		s.cfg.Hub.Want(unread.RecordTopic(user))
	}
	f.refs++

	return f, f.known
}

// state reads the user's follows, and the levels of their pages.
func (s *Sums) state(ctx context.Context, user unread.User) (unread.State, error) {
	record, err := s.record(ctx, user)
	if err != nil {
		return unread.State{}, err
	}

	return s.followService.State(ctx, user, record)
}

// gathering is one read of the records of new users. It is bounded by connections.
type gathering struct {
	users []unread.User
	done  chan struct{} // closed when the fields below are set

	records []unread.Record // in the order of users
	err     error
}

// record reads the user's record. While a read is in flight, the users of later calls are
// collected for the next read.
func (s *Sums) record(ctx context.Context, user unread.User) (unread.Record, error) {
	g, i, first := s.gather(user)
	if first {
		s.readEntering()
	}

	select {
	case <-g.done:
	// The read goes on for the others that wait for it.
	case <-ctx.Done():
		return unread.Record{}, ctx.Err()
	}
	if g.err != nil {
		return unread.Record{}, g.err
	}

	return g.records[i], nil
}

// gather adds a user to the next read, and returns the user's index in it. If no read is in flight, first is true, and
// the caller begins that one.
func (s *Sums) gather(user unread.User) (g *gathering, i int, first bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if s.entering == nil {
		s.entering = &gathering{done: make(chan struct{})}
	}
	g = s.entering
	i = len(g.users)
	g.users = append(g.users, user)

	first = !s.reading
	s.reading = true

	return g, i, first
}

// readEntering reads the records of the collected users. If more users were collected
// meanwhile, another goroutine reads their records.
func (s *Sums) readEntering() {
	s.mu.Lock()
	g := s.entering
	s.entering = nil
	s.mu.Unlock()

	// Not the context of one caller, because others wait for the same read.
	ctx, cancel := context.WithTimeout(context.Background(), enterTimeout)
	g.records, g.err = s.cfg.Store.Records(ctx, g.users)
	cancel()
	close(g.done)

	s.mu.Lock()
	more := s.entering != nil
	s.reading = more
	s.mu.Unlock()

	if more {
		// This caller has what it came for, and need not read for others.
		s.cfg.Group.Go(s.readEntering)
	}
}

// Users returns the number of connected users.
func (s *Sums) Users() int {
	s.mu.Lock()
	defer s.mu.Unlock()

	return len(s.users)
}

// Unread returns the user's count, if it is known.
func (s *Sums) Unread(f *Sum) (count int64, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	return f.sum, f.known
}

// Add makes c one of the user's connections, for which Sums calls c.SendUnread.
func (s *Sums) Add(f *Sum, c Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()

	f.conns = append(f.conns, c)
	if f.known { // the count may have changed since the client got it
		c.SendUnread(f.sum, false)
	}
}

// Leave ends an Enter. c is nil if Add was not called.
func (s *Sums) Leave(f *Sum, c Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()

	f.conns = without(f.conns, c)
	// What it asked for is carried out, but nobody is told any more.
	if f.reset != nil {
		f.reset.waiting = without(f.reset.waiting, c)
	}
	f.refs--
	if f.refs > 0 {
		return
	}

	for _, fo := range f.follows {
		s.drop(fo)
	}
	delete(s.users, f.user)
	delete(s.staleUsers, f)
	s.cfg.Hub.Unwant(unread.RecordTopic(f.user))
}

func without(conns []Conn, c Conn) []Conn {
	return slices.DeleteFunc(conns, func(o Conn) bool { return o == c })
}

// drop removes one page from the follows of its user.
func (s *Sums) drop(fo *follow) {
	// The last follow of the page takes the place of the dropped one.
	p := fo.page
	last := len(p.follows) - 1
	p.follows[fo.index] = p.follows[last]
	p.follows[fo.index].index = fo.index
	p.follows[last] = nil
	p.follows = p.follows[:last]
	delete(fo.user.follows, p.page)

	if last == 0 {
		delete(s.pages, p.page)
		delete(s.stalePages, p)
		s.cfg.Hub.Unwant(unread.LevelTopic(p.page))
	}
}

// replace replaces the user's follows with a state that was read, unless the state is outdated.
func (s *Sums) replace(f *Sum, state unread.State) {
	hasGone := s.users[f.user] != f
	if hasGone || f.outdates(state.Version) {
		return
	}
	if f.doubts(state.Version) {
		f.version = state.Version // so that the next read is applied, if it finds the same
		s.staleUsers[f] = 0
		wake.Signal(s.wake)
		return
	}

	f.version = state.Version
	// The levels below must not send sums in which follows are missing still.
	f.replacing = true
	for page, fo := range f.follows {
		_, still := state.Find(page)
		if !still {
			s.drop(fo)
		}
	}
	for i, stored := range state.Follows {
		read := state.Levels[i]
		fo := f.follows[stored.Page]
		if fo == nil {
			fo = s.take(f, stored.Page, read)
		}

		fo.stored = stored
		fo.own.learn(read, state.Owns[i].Changes)
		s.readLocked(fo, read)
	}

	s.sum(f)
}

// outdates reports whether a newer state is known than the one with that version.
func (f *Sum) outdates(v presence.Version) bool {
	return v != (presence.Version{}) && v.Compare(f.version) < 0
}

// doubts reports whether nothing says which is newer, what is known of the user or a state with that version. One of
// the two has no record: it is from before the user's first follow, or from after a loss of data.
func (f *Sum) doubts(v presence.Version) bool {
	none := presence.Version{}
	return f.known && (v == none) != (f.version == none)
}

// take adds a page to the follows of a user. level is the page's level that was read with them.
func (s *Sums) take(f *Sum, name string, level unread.Level) *follow {
	p := s.pages[name]
	if p == nil {
		p = &page{page: name, newest: level}
		s.pages[name] = p

		// The hub may know a newer level than this read did, and passes none on a second time.
		u, known := s.cfg.Hub.Want(unread.LevelTopic(name))
		l, ok := unread.LevelOf(u)
		if known && ok {
			p.receive(l)
		}
	}

	fo := &follow{user: f, page: p, index: len(p.follows)}
	p.follows = append(p.follows, fo)
	if f.follows == nil {
		f.follows = map[string]*follow{}
	}
	f.follows[name] = fo

	return fo
}

// sum adds up a user's counts. If the sum has changed, it is sent to the user's connections.
func (s *Sums) sum(f *Sum) {
	sum := int64(0)
	for _, fo := range f.follows {
		sum += fo.count
	}

	changed := !f.known || sum != f.sum // the first sum is news, even if it is 0
	f.known = true
	f.replacing = false
	if changed {
		f.setSum(sum)
	}
}
