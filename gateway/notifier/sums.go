// Package unread keeps the unread counts of the users who are connected to this gateway.
// It reads what they follow and hears of changes. It knows no sockets.
package notifier

import (
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/unread"
)

const (
	enterTimeout = 250 * time.Millisecond // a new connection waits this long for its unread count; else it comes later
	storeTimeout = 3 * time.Second        // how long a call waits for the store's answer
	readUsers    = 256                    // users whose follows are read in one call
)

// Conn is a connection of a user.
type Conn interface {
	// Tell sends the unread count to the client, if the count is new to the client or
	// again is set. It is called under the lock of Sums, and must not block.
	Tell(count int64, again bool)
}

// Hub watches topics. It passes their updates to Sums.Update.
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

// Sums keeps the unread counts of the users with a WebSocket here. The levels of the
// pages that these users follow, and the versions of the users' records, arrive the
// way counts do. Sums adds them up itself, so a change costs the store no read.
//
// Only the goroutine of Run reads what has changed, except for the reads of new
// connections and of read messages. Any goroutine may call the methods.
type Sums struct {
	born          time.Time // resets rest by the monotonic clock: the wall clock may be set
	cfg           Config
	store         unread.Store
	followService *unread.FollowService
	hub           Hub
	rest          time.Duration
	log           zerolog.Logger
	wake          chan struct{} // holds one: Run has something to do

	// mu guards the fields below. Sums calls Hub and Conn while it holds mu, so they must
	// hold no lock of their own when they call Sums. The bounds on connections and follows
	// bound these maps.
	mu         sync.Mutex
	users      map[unread.User]*Sum
	pages      map[string]*page
	staleUsers map[*Sum]struct{}  // users that Run must read
	stalePages map[*page]struct{} // pages whose authors Run must read
	entering   *gathering         // users that are new here and wait for the next read; nil: none
	reading    bool               // a read of such users is under way
}

// Sum is what one user follows, and how much of it is unread.
type Sum struct {
	user     unread.User
	refs     int32 // connections, and requests that may become connections
	known    bool  // the fields below have been read
	adopting bool  // adopt is replacing the fields below; until it ends, sum is wrong
	conns    []Conn
	version  presence.Version
	follows  map[string]*follow // by page; nil: the user follows nothing
	sum      int64              // the sum of the follows' counts
	reset    *reset             // the reset under way; nil: no reset is under way
	rested   time.Duration      // since Sums.born: no reset before
}

// follow is one page of one user.
type follow struct {
	of     *Sum
	page   *page
	index  int // in page.follows
	stored unread.Follow
	own    unread.Own
	ownOf  uint64 // the incarnation that own belongs to
	count  int64  // unread changes of this page
}

// New returns Sums without users.
func New(cfg Config) *Sums {
	s := &Sums{
		cfg: cfg, store: cfg.Store, hub: cfg.Hub, log: cfg.Log,
		born:       time.Now(),
		rest:       min(cfg.Rest, time.Second),
		wake:       make(chan struct{}, 1),
		users:      map[unread.User]*Sum{},
		pages:      map[string]*page{},
		staleUsers: map[*Sum]struct{}{},
		stalePages: map[*page]struct{}{},
	}
	s.followService = unread.NewFollowService(cfg.Store)
	return s
}

// Follows reads and changes what users follow. Changes come back as updates.
func (s *Sums) Follows() *unread.FollowService { return s.followService }

func (s *Sums) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Enter is for a request that may become a connection of the user. It reads what the
// user follows, and waits for that at most enterPatience. The caller must call Leave
// once for each Enter.
func (s *Sums) Enter(ctx context.Context, user unread.User) *Sum {
	s.mu.Lock()
	f := s.users[user]
	if f == nil {
		f = &Sum{user: user}
		s.users[user] = f
		s.hub.Want(unread.RecordTopic(user)) // before the read, so that an update reports every change after it
	}
	f.refs++
	known := f.known
	s.mu.Unlock()
	if known {
		return f
	}
	ctx, cancel := context.WithTimeout(ctx, enterTimeout)
	defer cancel()
	var state unread.State
	record, err := s.record(ctx, user)
	if err == nil {
		state, err = s.followService.State(ctx, user, record)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.adopt(f, state)
	} else {
		s.staleUsers[f] = struct{}{} // Run tries again
		s.wakeUp()
	}
	return f
}

// gathering is one read of the records of users that are new here. Connections bound it.
type gathering struct {
	users []unread.User
	done  chan struct{} // closed when what follows is set

	records []unread.Record // in the order of users
	err     error
}

// record reads what the user follows. While one read is under way, the users of
// later calls gather, and the next read is for all of them.
func (s *Sums) record(ctx context.Context, user unread.User) (unread.Record, error) {
	s.mu.Lock()
	g := s.entering
	if g == nil {
		g = &gathering{done: make(chan struct{})}
		s.entering = g
	}
	i, first := len(g.users), !s.reading
	g.users = append(g.users, user)
	s.reading = true
	s.mu.Unlock()
	if first {
		s.readEntering()
	}
	select {
	case <-g.done:
	case <-ctx.Done():
		return unread.Record{}, ctx.Err()
	}
	if g.err != nil {
		return unread.Record{}, g.err
	}
	return g.records[i], nil
}

// readEntering reads the records that have been asked for. If more have been asked for
// meanwhile, a goroutine of its own goes on, until there are none.
func (s *Sums) readEntering() {
	s.mu.Lock()
	g := s.entering
	s.entering = nil
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), enterTimeout)
	g.records, g.err = s.store.Records(ctx, g.users)
	cancel()
	close(g.done)
	s.mu.Lock()
	more := s.entering != nil
	s.reading = more
	s.mu.Unlock()
	if more {
		s.cfg.Group.Go(s.readEntering)
	}
}

// Users is the number of users here.
func (s *Sums) Users() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.users)
}

// Unread is the user's count, if it is known.
func (s *Sums) Unread(f *Sum) (count int64, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return f.sum, f.known
}

// Add makes c one of the user's connections. From now on Sums calls c.Tell.
func (s *Sums) Add(f *Sum, c Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.conns = append(f.conns, c)
	if f.known { // the count may have changed since the client got it
		c.Tell(f.sum, false)
	}
}

// Leave ends an Enter. c is nil if the request became no connection.
func (s *Sums) Leave(f *Sum, c Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f.conns = without(f.conns, c)
	if f.reset != nil {
		f.reset.waiting = without(f.reset.waiting, c)
	}
	if f.refs--; f.refs > 0 {
		return
	}
	for _, fo := range f.follows {
		s.drop(fo)
	}
	delete(s.users, f.user)
	delete(s.staleUsers, f)
	s.hub.Unwant(unread.RecordTopic(f.user))
}

func without(conns []Conn, c Conn) []Conn {
	return slices.DeleteFunc(conns, func(o Conn) bool { return o == c })
}

// drop forgets one page of one user.
func (s *Sums) drop(fo *follow) {
	p := fo.page
	last := len(p.follows) - 1
	p.follows[fo.index] = p.follows[last]
	p.follows[fo.index].index = fo.index
	p.follows[last] = nil
	if p.follows = p.follows[:last]; last == 0 {
		delete(s.pages, p.page)
		delete(s.stalePages, p)
		s.hub.Unwant(unread.LevelTopic(p.page))
	}
	delete(fo.of.follows, p.page)
}

// adopt replaces what the user follows by what was read. It ignores an older state.
func (s *Sums) adopt(f *Sum, state unread.State) {
	old := f.version
	if f.known && state.Version.Incarnation == old.Incarnation && state.Version.Sequence < old.Sequence ||
		state.Version != (presence.Version{}) && state.Version.Incarnation < old.Incarnation {
		return // a newer state is known
	}
	if s.users[f.user] != f {
		return // the user has gone
	}
	f.version, f.adopting = state.Version, true
	for page, fo := range f.follows {
		if _, still := state.Find(page); !still {
			s.drop(fo)
		}
	}
	for i, stored := range state.Follows {
		level, own := state.Levels[i], state.Owns[i]
		fo := f.follows[stored.Page]
		if fo == nil {
			fo = s.take(f, stored.Page, level)
		}
		fo.stored, fo.own, fo.ownOf = stored, own, level.Incarnation
		at, ownUpTo := level, level.By // own is right up to the Level.By right
		if is := fo.page.level; is.Newer(level) {
			if is.Incarnation != level.Incarnation {
				fo.own, fo.ownOf, ownUpTo = unread.Own{}, is.Incarnation, 0
			}
			if is.By == ownUpTo {
				at = is
			}
		}
		fo.count = stored.Unread(at, fo.own)
		s.level(fo.page, level, ownUpTo)
	}
	s.sum(f)
}

// take adds a page to the follows of a user.
func (s *Sums) take(f *Sum, name string, level unread.Level) *follow {
	p := s.pages[name]
	if p == nil {
		p = &page{page: name, level: level, newest: level, authors: level.By, lowest: math.MaxInt64}
		s.pages[name] = p
		if u, known := s.hub.Want(unread.LevelTopic(name)); known {
			if l, ok := unread.LevelOf(u); ok && l.Newer(level) {
				p.newest = l
			}
		}
	}
	fo := &follow{of: f, page: p, index: len(p.follows)}
	p.follows = append(p.follows, fo)
	if f.follows == nil {
		f.follows = map[string]*follow{}
	}
	f.follows[name] = fo
	return fo
}

// sum adds up a user's counts. If the sum has changed, it sends the sum to the user's
// connections.
func (s *Sums) sum(f *Sum) {
	sum := int64(0)
	for _, fo := range f.follows {
		sum += fo.count
	}
	news := !f.known || sum != f.sum
	f.sum, f.known, f.adopting = sum, true, false
	if news {
		for _, c := range f.conns {
			c.Tell(sum, false)
		}
	}
}
