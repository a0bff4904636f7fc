package gateway

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/unread"
)

const (
	enterPatience = time.Second            // a new connection waits this long for its unread count
	bookPatience  = 3 * time.Second        // for the store to answer
	readUsers     = 256                    // users whose follows are read in one call
	presenceTick  = 250 * time.Millisecond // how exactly the grace of those who were present is kept
	// tellAgain is how often a presence that lasts is told again when its page has
	// changed: what came since is what a gateway that is killed forgets to excuse.
	tellAgain = time.Minute
)

// followers are the users with a WebSocket here, and what they follow. The
// levels of their pages and the versions of their follows come as counts do;
// the sums are kept here, so a change costs the store nothing.
//
// run is the one goroutine that reads what has changed, but for what a new
// connection and a read message wait for.
type followers struct {
	store unread.Store
	book  *unread.Book
	alive func(life string) bool
	hub   *hub
	life  string // of this gateway, in follows that are away only
	grace time.Duration
	rest  time.Duration // between two resets of one user
	log   zerolog.Logger
	spawn func(func())  // starts a goroutine that the gateway waits for
	wake  chan struct{} // holds one: run has something to do

	// mu guards all below. A shard's lock and the hub's may be taken while it is
	// held, not the other way round. By the bounds of connections and follows, so
	// is all of it.
	mu         sync.Mutex
	users      map[unread.User]*follower
	pages      map[string]*followedPage
	staleUsers map[*follower]struct{}     // to be read
	stalePages map[*followedPage]struct{} // whose authors are to be read
	presences  map[presenceOf]bool        // to be told to the store
	told       map[presenceOf]struct{}    // told, and not ended
	graces     map[presenceOf]time.Time   // connections that ended without a leave: their users stay until
}

type presenceOf struct {
	user unread.User
	page string
}

// follower is one user.
type follower struct {
	user     unread.User
	refs     int // connections, and requests that may become one
	conns    []*conn
	known    bool // what follows has been read
	adopting bool // what follows is being replaced: the sum is not right until it is
	version  presence.Version
	follows  map[string]*follow // nil: nothing
	sum      int64              // of the follows' counts

	asked     bool // some of conns have sent read and wait for the answer
	resetting bool
	rested    int64 // unix nanoseconds: no reset before
}

// follow is one page of one user.
type follow struct {
	of     *follower
	page   *followedPage
	index  int // in page.follows
	stored unread.Follow
	own    unread.Own
	ownOf  uint64 // the incarnation that own is of
	count  int64  // unread of this page
}

// followedPage is a page that users here follow.
type followedPage struct {
	page    string
	level   unread.Level
	follows []*follow
	newest  unread.Level // heard of; it may be that its authors have to be read first
	authors int64        // up to this Level.By every follow has the right own
	lowest  int64        // the least that authors has been lowered to since they were last read
}

func newFollowers(g *Gateway, life string, store unread.Store, alive func(string) bool) *followers {
	fs := &followers{
		hub: g.hub, life: life, grace: g.cfg.LeaveGrace, rest: min(g.cfg.UpdateInterval, time.Second), log: g.cfg.Log,
		spawn:      func(f func()) { g.conns.Go(f) },
		wake:       make(chan struct{}, 1),
		users:      map[unread.User]*follower{},
		pages:      map[string]*followedPage{},
		staleUsers: map[*follower]struct{}{},
		stalePages: map[*followedPage]struct{}{},
		presences:  map[presenceOf]bool{},
		told:       map[presenceOf]struct{}{},
		graces:     map[presenceOf]time.Time{},
	}
	fs.alive = func(other string) bool { return other == life || alive != nil && alive(other) }
	fs.store, fs.book = store, unread.NewBook(store, fs.alive)
	return fs
}

// LifeName names one life of a gateway, as Config.Alive is asked about it.
func LifeName(gateway string, incarnation uint64) string {
	return gateway + "/" + strconv.FormatUint(incarnation, 10)
}

func (fs *followers) wakeUp() {
	select {
	case fs.wake <- struct{}{}:
	default:
	}
}

// enter is for a request that may become a connection of the user: it waits
// for what the user follows, but not for long. Each enter has its leave.
func (fs *followers) enter(ctx context.Context, user unread.User) *follower {
	fs.mu.Lock()
	f := fs.users[user]
	if f == nil {
		f = &follower{user: user}
		fs.users[user] = f
		fs.hub.want(presence.FollowsTopic(user)) // before it is read: what changes after that is heard of
	}
	f.refs++
	known := f.known
	fs.mu.Unlock()
	if known {
		return f
	}
	ctx, cancel := context.WithTimeout(ctx, enterPatience)
	defer cancel()
	states, err := fs.book.Read(ctx, user)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if err == nil {
		fs.adopt(f, states[0])
	} else {
		fs.staleUsers[f] = struct{}{} // run tries on
		fs.wakeUp()
	}
	return f
}

// unread is the user's count, if it is known.
func (fs *followers) unread(f *follower) (count int64, known bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return f.sum, f.known
}

// add makes c, which its shard knows, one of the user's connections.
func (fs *followers) add(c *conn) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f := c.follower
	f.conns = append(f.conns, c)
	if f.known { // it may have moved since the client was told
		c.shard.ring([]ring{{c, f.sum, false}})
	}
}

// leave takes back an enter; c is nil when it became no connection. joined are
// the pages it had joined and not left.
func (fs *followers) leave(f *follower, c *conn, joined []string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f.conns = slices.DeleteFunc(f.conns, func(o *conn) bool { return o == c })
	for _, page := range joined {
		if fo := f.follows[page]; fo != nil && fo.stored.AwayOnly {
			at := presenceOf{f.user, page}
			fs.graces[at] = time.Now().Add(fs.grace)
		}
	}
	if f.refs--; f.refs > 0 {
		return
	}
	for _, fo := range f.follows {
		fs.drop(fo)
	}
	delete(fs.users, f.user)
	delete(fs.staleUsers, f)
	fs.hub.unwant(presence.FollowsTopic(f.user))
}

// drop forgets one page of one user.
func (fs *followers) drop(fo *follow) {
	p := fo.page
	last := len(p.follows) - 1
	p.follows[fo.index] = p.follows[last]
	p.follows[fo.index].index = fo.index
	p.follows[last] = nil
	if p.follows = p.follows[:last]; last == 0 {
		delete(fs.pages, p.page)
		delete(fs.stalePages, p)
		fs.hub.unwant(presence.ChangesTopic(p.page))
	}
	delete(fo.of.follows, p.page)
}

// adopt takes what a user follows, as it was read.
func (fs *followers) adopt(f *follower, s unread.State) {
	old := f.version
	if f.known && s.Version.Incarnation == old.Incarnation && s.Version.Sequence < old.Sequence ||
		s.Version != (presence.Version{}) && s.Version.Incarnation < old.Incarnation {
		return // overtaken
	}
	if fs.users[f.user] != f {
		return // it has gone
	}
	f.version, f.adopting = s.Version, true
	for page, fo := range f.follows {
		if _, still := s.Find(page); !still {
			delete(fs.told, presenceOf{f.user, page})
			fs.drop(fo)
		}
	}
	for i, stored := range s.Follows {
		level, own := s.Levels[i], s.Owns[i]
		fo := f.follows[stored.Page]
		if fo == nil {
			fo = fs.take(f, stored.Page, level)
		}
		fo.stored, fo.own, fo.ownOf = stored, own, level.Incarnation
		at, right := level, level.By // up to which Level.By own is right
		if is := fo.page.level; is.Newer(level) {
			if is.Incarnation != level.Incarnation {
				fo.own, fo.ownOf, right = unread.Own{}, is.Incarnation, 0
			}
			if is.By == right {
				at = is
			}
		}
		fo.count = stored.Unread(at, fo.own, fs.alive)
		fs.level(fo.page, level, right)
		if at := (presenceOf{f.user, stored.Page}); slices.Contains(stored.Through, fs.life) {
			fs.told[at] = struct{}{}
		} else {
			delete(fs.told, at)
		}
		fs.attend(fo)
	}
	fs.sum(f)
}

// take adds a page to those of a user.
func (fs *followers) take(f *follower, page string, level unread.Level) *follow {
	p := fs.pages[page]
	if p == nil {
		p = &followedPage{page: page, level: level, newest: level, authors: level.By, lowest: math.MaxInt64}
		fs.pages[page] = p
		if c, known := fs.hub.want(presence.ChangesTopic(page)); known && unread.LevelOf(c).Newer(level) {
			p.newest = unread.LevelOf(c)
		}
	}
	fo := &follow{of: f, page: p, index: len(p.follows)}
	p.follows = append(p.follows, fo)
	if f.follows == nil {
		f.follows = map[string]*follow{}
	}
	f.follows[page] = fo
	return fo
}

// sum adds up a user's counts and tells the connections when that is news.
func (fs *followers) sum(f *follower) {
	sum := int64(0)
	for _, fo := range f.follows {
		sum += fo.count
	}
	news := !f.known || sum != f.sum
	f.sum, f.known, f.adopting = sum, true, false
	if news {
		for _, c := range f.conns {
			c.shard.ring([]ring{{c, sum, false}})
		}
	}
}

// update takes what is published of a topic, in any order, repeated or not.
func (fs *followers) update(c presence.Count) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if page, ok := presence.PageOfChanges(c.Page); ok {
		if p := fs.pages[page]; p != nil {
			fs.level(p, unread.LevelOf(c), math.MaxInt64)
		}
		return
	}
	if user, ok := presence.UserOfFollows(c.Page); ok {
		if f := fs.users[user]; f != nil && (!f.known || c.Version.Compare(f.version) > 0) {
			fs.staleUsers[f] = struct{}{}
			fs.wakeUp()
		}
	}
}

// level takes a level of a page. right is up to which Level.By the follow that
// it came with has the right own.
func (fs *followers) level(p *followedPage, l unread.Level, right int64) {
	p.lowest = min(p.lowest, right)
	if l.Incarnation <= p.level.Incarnation { // else own is of what is applied below
		p.authors = min(p.authors, right)
	}
	if l.Newer(p.newest) {
		p.newest = l
	}
	switch n := p.newest; {
	case n.Incarnation == p.level.Incarnation && n.By <= p.authors || n.Incarnation != p.level.Incarnation && n.By == 0:
		if n.Newer(p.level) {
			fs.apply(p, n, nil)
			p.authors = min(p.authors, n.By)
		}
	default:
		fs.stalePages[p] = struct{}{}
		fs.wakeUp()
	}
}

// apply makes l the page's level, with what some users have changed of it, and
// tells those whose sum that moves.
func (fs *followers) apply(p *followedPage, l unread.Level, owns map[unread.User]unread.Own) {
	p.level = l
	rings := map[*shard][]ring{}
	for _, fo := range p.follows {
		if fo.ownOf != l.Incarnation {
			fo.own, fo.ownOf = unread.Own{}, l.Incarnation
		}
		if own, ok := owns[fo.of.user]; ok && own.Changes >= fo.own.Changes {
			fo.own = own
		}
		count := fo.stored.Unread(l, fo.own, fs.alive)
		if count == fo.count {
			continue
		}
		diff := count - fo.count
		fo.count = count
		if fo.of.adopting {
			continue
		}
		fo.of.sum += diff
		for _, c := range fo.of.conns {
			rings[c.shard] = append(rings[c.shard], ring{c, fo.of.sum, false})
		}
	}
	for s, list := range rings {
		s.ring(list)
	}
}

// read has everything that the connection's user follows seen, and the
// connection told when it is. It does not wait.
func (fs *followers) read(c *conn) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f := c.follower
	f.asked, c.asked = true, true
	if !f.resetting { // else whoever resets does it once more
		f.resetting = true
		fs.spawn(func() { fs.reset(f) })
	}
}

// reset answers all who ask, until nobody does. There is one per user at most,
// and it rests between two answers, so that nobody keeps the store busy by asking.
func (fs *followers) reset(f *follower) {
	for {
		fs.mu.Lock()
		rest := time.Until(time.Unix(0, f.rested))
		fs.mu.Unlock()
		time.Sleep(rest)
		fs.mu.Lock()
		var asked []*conn
		if f.asked {
			for _, c := range f.conns {
				if c.asked {
					asked = append(asked, c)
					c.asked = false
				}
			}
		}
		f.asked, f.resetting = false, len(asked) > 0
		fs.mu.Unlock()
		if len(asked) == 0 { // or they have gone
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), bookPatience)
		s, err := fs.book.Reset(ctx, f.user)
		cancel()
		if err != nil {
			fs.log.Debug().Err(err).Msg("unread could not be reset; it stays as it is")
		}
		fs.mu.Lock()
		f.rested = time.Now().Add(fs.rest).UnixNano()
		if err == nil {
			fs.adopt(f, s)
		}
		if f.known {
			for _, c := range asked {
				c.shard.ring([]ring{{c, f.sum, true}})
			}
		}
		fs.mu.Unlock()
	}
}

// moved says that c has joined or left a page.
func (fs *followers) moved(c *conn, page string) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fo := c.follower.follows[page]; fo != nil {
		fs.attend(fo)
	}
}

// attend has the store told whether the user is present here, where that
// matters and is not what it knows.
func (fs *followers) attend(fo *follow) {
	if !fo.stored.AwayOnly {
		return
	}
	at := presenceOf{fo.of.user, fo.page.page}
	here := fs.present(fo, at)
	_, told := fs.told[at]
	if pending, ok := fs.presences[at]; ok {
		told = pending
	}
	if here != told {
		fs.presences[at] = here
		fs.wakeUp()
	}
}

// present reports whether a connection here has joined the page, or one has
// ended a moment ago.
func (fs *followers) present(fo *follow, at presenceOf) bool {
	if end, ok := fs.graces[at]; ok && time.Now().Before(end) {
		return true
	}
	return slices.ContainsFunc(fo.of.conns, func(c *conn) bool { return c.shard.hasJoined(c, at.page) })
}

// hasJoined reports whether c has joined the page.
func (s *shard) hasJoined(c *conn, page string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := c.place(page)
	return p != nil && p.joined
}

// run reads what has changed, until ctx ends.
func (fs *followers) run(ctx context.Context) {
	tick := time.NewTicker(presenceTick)
	defer tick.Stop()
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	rest := tellAgain
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-fs.wake:
		case <-retry.C:
		case <-tick.C:
			if rest -= presenceTick; rest <= 0 {
				rest = tellAgain
				fs.lasting()
			}
			if !fs.graceEnded() {
				continue
			}
		}
		if err := fs.catchUp(ctx); err != nil && ctx.Err() == nil {
			failed++
			pause := min(50*time.Millisecond<<min(failed, 6), 2*time.Second)
			if failed == 1 {
				fs.log.Warn().Err(err).Msg("unread counts could not be read; trying again")
			}
			retry.Reset(pause/2 + rand.N(pause/2))
		} else {
			failed = 0
		}
	}
}

// catchUp reads and tells all there is; what fails stays to be done.
func (fs *followers) catchUp(ctx context.Context) error {
	for {
		users, pages, presences := fs.todo()
		if len(users)+len(pages)+len(presences) == 0 {
			return nil
		}
		if err := fs.readUsers(ctx, users); err != nil {
			return err
		}
		for _, p := range pages {
			if err := fs.readAuthors(ctx, p); err != nil {
				return err
			}
		}
		for at, here := range presences {
			if err := fs.tellPresence(ctx, at, here); err != nil {
				return err
			}
		}
	}
}

// todo is a part of what is to be done.
func (fs *followers) todo() (users []*follower, pages []*followedPage, presences map[presenceOf]bool) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for f := range fs.staleUsers {
		if len(users) == readUsers {
			break
		}
		users = append(users, f)
	}
	for p := range fs.stalePages {
		pages = append(pages, p)
	}
	presences = make(map[presenceOf]bool, len(fs.presences))
	for at, here := range fs.presences {
		presences[at] = here
	}
	return users, pages, presences
}

func (fs *followers) readUsers(ctx context.Context, users []*follower) error {
	if len(users) == 0 {
		return nil
	}
	ids := make([]unread.User, len(users))
	fs.mu.Lock()
	for i, f := range users {
		ids[i] = f.user
		delete(fs.staleUsers, f) // before reading: what changes from now on comes again
	}
	fs.mu.Unlock()
	rctx, cancel := context.WithTimeout(ctx, bookPatience)
	defer cancel()
	states, err := fs.book.Read(rctx, ids...)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for i, f := range users {
		if fs.users[f.user] != f {
			continue
		}
		if err != nil {
			fs.staleUsers[f] = struct{}{}
		} else {
			fs.adopt(f, states[i])
		}
	}
	return err
}

func (fs *followers) readAuthors(ctx context.Context, p *followedPage) error {
	fs.mu.Lock()
	delete(fs.stalePages, p)
	if fs.pages[p.page] != p {
		fs.mu.Unlock()
		return nil
	}
	since := p.authors
	if p.newest.Incarnation != p.level.Incarnation {
		since = 0
	}
	p.lowest = math.MaxInt64 // unless a follow comes meanwhile that knows less
	users := make([]unread.User, len(p.follows))
	for i, fo := range p.follows {
		users[i] = fo.of.user
	}
	fs.mu.Unlock()
	rctx, cancel := context.WithTimeout(ctx, bookPatience)
	defer cancel()
	l, owns, err := fs.store.Authors(rctx, p.page, since, users)
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.pages[p.page] != p {
		return err
	}
	if err != nil {
		fs.stalePages[p] = struct{}{}
		return err
	}
	if !p.level.Newer(l) {
		fs.apply(p, l, owns)
		p.authors = min(p.lowest, l.By)
	}
	fs.level(p, l, math.MaxInt64)
	return nil
}

func (fs *followers) tellPresence(ctx context.Context, at presenceOf, here bool) error {
	rctx, cancel := context.WithTimeout(ctx, bookPatience)
	defer cancel()
	if err := fs.book.Attend(rctx, at.user, at.page, fs.life, here); err != nil {
		return err
	}
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if here {
		fs.told[at] = struct{}{}
	} else {
		delete(fs.told, at)
	}
	if fs.presences[at] == here { // else it has changed meanwhile
		delete(fs.presences, at)
	}
	return nil
}

// graceEnded looks for users whose grace is over and who have not come back. It
// reports whether there is something to tell.
func (fs *followers) graceEnded() bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	now := time.Now()
	for at, end := range fs.graces {
		if now.Before(end) {
			continue
		}
		delete(fs.graces, at)
		if f := fs.users[at.user]; f != nil {
			if fo := f.follows[at.page]; fo != nil {
				fs.attend(fo)
				continue
			}
		}
		fs.presences[at] = false
	}
	return len(fs.presences) > 0
}

// lasting has presences told again whose page has changed since.
func (fs *followers) lasting() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for at := range fs.told {
		f := fs.users[at.user]
		if f == nil {
			continue
		}
		if fo := f.follows[at.page]; fo != nil && fo.page.level.All-fo.own.Changes > fo.stored.Held && fs.present(fo, at) {
			fs.presences[at] = true
		}
	}
}

// storeBack has everything read anew: the store was away, or has lost data.
func (fs *followers) storeBack() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, f := range fs.users {
		fs.staleUsers[f] = struct{}{}
	}
	fs.wakeUp()
}

// othersChanged counts anew where other gateways say who is present: one of
// them may have died.
func (fs *followers) othersChanged() {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	for _, f := range fs.users {
		again := false
		for _, fo := range f.follows {
			if len(fo.stored.Through) > 0 {
				fo.count, again = fo.stored.Unread(fo.page.level, fo.own, fs.alive), true
			}
		}
		if again && f.known {
			fs.sum(f)
		}
	}
}

// depart tells the store that nobody is present here any more: the gateway
// shuts down, and its clients have gone. What cannot be told before ctx ends
// counts as after a gateway that was killed.
func (fs *followers) depart(ctx context.Context) {
	fs.mu.Lock()
	left := make(chan presenceOf, len(fs.told)+len(fs.presences))
	for at := range fs.told {
		left <- at
	}
	for at := range fs.presences {
		if _, twice := fs.told[at]; !twice {
			left <- at
		}
	}
	clear(fs.presences)
	clear(fs.graces)
	fs.mu.Unlock()
	close(left)
	var wg sync.WaitGroup
	for range min(len(left), 16) {
		wg.Go(func() {
			for at := range left {
				if err := fs.book.Attend(ctx, at.user, at.page, fs.life, false); err != nil && ctx.Err() == nil {
					fs.log.Warn().Err(err).Msg("the end of a presence could not be told")
				}
			}
		})
	}
	wg.Wait()
}
