package simulate

import (
	"context"
	"errors"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/client"
)

// A tab is one client. The driver says on which page it should be. One goroutine, run, keeps the client connected and
// on that page, even after lost connections, until the driver ends it.
type tab struct {
	crowd   *crowd
	user    *user
	number  uint64
	gateway int  // the gateway that it dials first
	fixed   bool // it dials no other gateway
	fickle  bool // it does not reconnect, and is in the truth only while it is connected
	strict  bool // it must not receive error frames
	slow    bool // it has a small buffer, and does not read while the crowd is deaf

	seen func(t *tab, count *client.Count, when time.Time) // called by run's goroutine with each count; nil for most
	asks *subscriber                                       // subscribes to counters over the tab; nil for most

	stays context.Context // until the tab leaves
	quit  func()          // ends stays

	mu      sync.Mutex
	counted bool // it is fickle, and in the truth
	link    *link
	joined  holding   // its page is "" while the client is on none
	watched []holding // pages to which the client only subscribes
}

// A holding is what a client has received about one page.
type holding struct {
	client.Count
	known   bool // the count has come over this connection
	refused bool // the server has answered the join with bad_page
	arrival bool // the next count is the first after a join on a fresh connection
	bad     bool // the client has joined the page, but the server must refuse it
}

// joining returns the holding of a page that a client is about to join.
func joining(page string) holding {
	return holding{Count: client.Count{Page: page}, bad: page != "" && !validPage(page)}
}

// An exit is a way to leave.
type exit int

const (
	leaveFrame  exit = iota // leaves the page, then closes
	closesFrame             // closes
	endsSocket              // the connection ends without a close frame
	resetSocket             // the connection is reset
	vanishes                // falls silent for ever; the server has to notice
)

// An ending is the reason why a connection ended while its client stays.
type ending int

const (
	lost     ending = iota // without notice
	reloaded               // the client wanted a new one
	sentAway               // the server asked for it, with a reconnect frame
)

// Pauses between attempts to connect. Jitter takes off up to half.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 3 * time.Second
	steadyLife = 5 * time.Second // after a connection of this age the pauses begin anew
)

func (c *tab) run() {
	defer c.crowd.forget(c)
	gateway := c.gateway
	for failures := 0; ; gateway++ {
		began := time.Now()
		how, err := c.connect(c.crowd.gateway(gateway))
		if c.left() {
			return
		}

		if how != lost || time.Since(began) > steadyLife {
			failures = 0
		}

		if c.fickle {
			c.closeNow()
			return
		}

		if c.fixed || how == reloaded {
			gateway-- // it dials the same gateway again
		}

		var pause time.Duration
		if how == lost {
			c.crowd.failed(err)
			pause = min(firstPause<<failures, lastPause)
			failures = min(failures+1, 8) // bounded, so that the shift does not overflow
		}

		var refused *client.Error
		if errors.As(err, &refused) {
			pause = max(pause, min(refused.RetryAfter, lastPause))
		}

		// The fan's calls go on meanwhile. If the server has forgotten the fan, they would be a stranger's.
		isFan := c.asks != nil && c.asks.like != nil
		if isFan {
			pause = min(pause, pauseMost/5)
		}

		if sleep(c.stays, pause/2+rand.N(pause/2+1)) != nil {
			return
		}
	}
}

// connect opens one connection and serves it. It returns after the connection has
// ended, with the reason.
func (c *tab) connect(gateway string) (how ending, err error) {
	l, err := c.dial(gateway)
	if err != nil {
		return lost, err
	}

	// Only detach knows whether the client or the server wanted the end.
	defer func() { how = c.detach(l) }()

	var f client.Frame
	for {
		err := l.Receive(&f)
		if errors.Is(err, client.ErrFrame) {
			c.crowd.wrong("%v", err)
		} else if err != nil {
			return lost, err
		} else {
			c.handle(l, &f)
		}

		for c.slow && c.crowd.deaf.Load() && sleep(c.stays, time.Second) == nil { // it does not read
		}
	}
}

// A link is one connection of a tab. All fields but the first two are guarded by the tab's mutex.
type link struct {
	*client.Conn
	socket socket
	ending bool        // one side has announced the end
	how    ending      // which end
	timer  *time.Timer // ends the link after a reconnect frame
}

// dial opens a connection as the tab's user, joins and subscribes. While the user has no id yet, the user's other tabs
// wait until dial returns.
func (c *tab) dial(gateway string) (l *link, err error) {
	tokens := c.crowd.cfg.JWTSecret != ""
	var id string
	if !tokens { // with a token the server knows the user by its name
		var release func()
		id, release, err = c.user.claim(c.stays)
		if err != nil {
			return nil, err
		}
		defer release()
	}

	free, err := c.crowd.dialSlot(c.stays)
	if err != nil {
		return nil, err
	}
	defer free()

	cfg, err := c.crowd.config(gateway, c.user.name, id)
	if err != nil {
		return nil, err
	}

	if c.asks != nil && c.asks.like == nil {
		cfg.APIKey = c.crowd.cfg.APIKeys[0]
	}

	l = &link{}
	l.socket.received = &c.crowd.stats.bytes
	l.socket.slow = c.slow
	// Over TLS the socket cannot see where the headers end, so all bytes count.
	if strings.HasPrefix(gateway, "https:") {
		l.socket.matched = len(endOfHeader)
	}

	cfg.DialContext = l.socket.dial
	l.Conn, err = client.Dial(c.stays, cfg)
	if errors.As(err, new(*client.Error)) {
		c.crowd.stats.refusedUpgrades.Add(1)
	} else if errors.Is(err, client.ErrFrame) {
		c.crowd.wrong("the first frame must be a welcome with a user: %v", err)
	}
	if err != nil {
		return nil, err
	}

	c.crowd.stats.messages.Add(1)
	c.crowd.learn(l.Heartbeat)
	if err := c.welcomed(l, id, tokens); err != nil {
		l.Abort()
		return nil, err
	}

	if !c.enter(l) {
		return nil, context.Canceled
	}
	return l, nil
}

// welcomed checks as which user the server has welcomed a tab that dialled with an id, or with a token.
func (c *tab) welcomed(l *link, id string, token bool) error {
	if token {
		if l.ID != "" {
			return errNoTokens
		}
		if l.User != c.user.name {
			c.crowd.wrong("the server welcomed the token of %q as the user %q", c.user.name, l.User)
		}
		return nil
	}

	ok, renamed := c.user.acceptWelcome(id, l.User, l.ID)
	if !ok {
		return errors.New("the server welcomed this tab as another user than the user's other tabs")
	}
	if renamed && c.asks != nil {
		c.asks.renamed()
	}
	return nil
}

// enter gives the link to the tab, and sends the join and the subscriptions. If the tab has left during the handshake,
// it resets the link and reports false.
func (c *tab) enter(l *link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.left() {
		l.socket.reset()
		l.Abort()
		return false
	}

	c.link = l
	c.crowd.stats.connects.Add(1)
	// Under the same lock as the join: see coming.
	if c.fickle {
		c.counted = true
		c.crowd.truth.enter(c.user, c.joined.Page)
	}

	pages := make([]string, len(c.watched))
	for i, h := range c.watched {
		pages[i] = h.Page
	}

	_ = l.Subscribe(pages...) // an error ends the connection, here and below
	if c.asks != nil {
		_ = l.SubscribeCounters(slices.Collect(maps.Keys(c.asks.tallies))...)
	}

	if c.joined.Page != "" {
		c.joined.arrival = !slices.Contains(pages, c.joined.Page) // if subscribed, the first count may be older
		_ = l.Join(c.joined.Page)
	}

	return true
}

// partLocked removes a fickle tab from the truth.
func (c *tab) partLocked() {
	if c.counted {
		c.counted = false
		c.crowd.truth.exit(c.user, c.joined.Page)
	}
}

// coming reports whether a fickle tab may still enter the truth.
func (c *tab) coming() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.counted && !c.left()
}

// detach ends the link and forgets the counts that came over it.
func (c *tab) detach(l *link) ending {
	l.Abort()

	c.mu.Lock()
	defer c.mu.Unlock()

	if l.timer != nil {
		l.timer.Stop()
	}

	c.link = nil
	for h := range c.holdings() {
		h.known = false
		h.refused = false
		h.arrival = false
	}

	if c.asks != nil {
		c.asks.begin()
	}

	// An announced end has already been noted as a disturbance.
	if !l.ending && !c.left() {
		c.crowd.dropped()
	}

	return l.how
}

func (c *tab) left() bool { return c.stays.Err() != nil }

// stroll sends a fickle client that is counted to another page.
func (c *tab) stroll(page string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if !c.counted {
		return
	}

	// Enter before exit, so that the user stays on the site.
	c.crowd.truth.enter(c.user, page)
	c.crowd.truth.exit(c.user, c.joined.Page)
	c.moveLocked(page)
}

// move sends the client to another page, or to none.
func (c *tab) move(page string) {
	c.mu.Lock()
	defer c.mu.Unlock()

	c.moveLocked(page)
}

func (c *tab) moveLocked(page string) {
	old := c.joined
	if old.Page == page || c.left() {
		return
	}

	c.joined = joining(page)
	if c.link == nil {
		return
	}

	// Join before leave, so that the user stays on the site.
	if page != "" {
		_ = c.link.Join(page)
	}

	if old.Page != "" && !old.bad {
		_ = c.link.Leave(old.Page)
	}
}

// say sends a frame, if the client is connected.
func (c *tab) say(frame string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil {
		_ = c.link.Send([]byte(frame)) // an error ends the connection
	}
}

// reload closes the connection and opens another, as F5 does.
func (c *tab) reload() {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.link == nil || c.left() {
		return
	}

	// Set before Close, because run may see the end at once.
	c.link.how = reloaded
	c.link.ending = true
	c.crowd.disturb(c.crowd.cfg.LeaveGrace)
	c.link.Close()
}

// leave ends the client for good. It returns at once; run ends with the connection.
func (c *tab) leave(how exit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left() {
		return
	}

	// Before the connection ends, so that run does not take the end for a loss.
	c.quit()
	c.partLocked()

	l := c.link
	if l == nil {
		return
	}

	grace := c.crowd.cfg.LeaveGrace
	switch how {
	case leaveFrame:
		if c.joined.Page != "" && !c.joined.bad {
			_ = l.Leave(c.joined.Page)
		}
		l.Close()
	case closesFrame:
		l.Close()
	case endsSocket:
		l.socket.fin()
	case resetSocket:
		l.socket.reset()
	case vanishes:
		l.socket.vanish()
		grace = c.crowd.ghostBound()
		c.crowd.bury(&l.socket)
	}

	c.crowd.disturb(grace)
}

// cut sends a heartbeat over a connection that has been silent for ask, and ends one that has been silent for limit.
// The watchdog calls it.
func (c *tab) cut(now time.Time, ask, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.link == nil {
		return
	}

	quiet := now.Sub(c.link.HeardAt())
	// A reset, because nobody would answer a close frame.
	if quiet > limit {
		c.link.socket.reset()
	} else if quiet > ask {
		_ = c.link.Beat()
	}
}

// closeNow ends the client and its connection at once.
func (c *tab) closeNow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.quit()
	c.partLocked()

	if c.link != nil {
		c.link.socket.fin()
	}
}

// handle handles one frame of the server. Only run's goroutine calls it.
func (c *tab) handle(l *link, f *client.Frame) {
	c.crowd.stats.messages.Add(1)
	switch f.Type {
	case "count":
		c.count(l, &f.Count)
	case "counter":
		if c.asks != nil {
			c.asks.take(f.Counter)
		}
	case "error":
		c.failed(l, f)
	case "reconnect":
		c.reconnect(l, f.After)
	}
}

// count checks a count and stores it.
func (c *tab) count(l *link, n *client.Count) {
	now := time.Now()
	c.crowd.stats.counts.Add(1)

	if n.Count < 0 {
		c.crowd.stats.negative.Add(1)
		c.crowd.wrong("page %q: the count %d is negative", n.Page, n.Count)
	}

	if n.Stale {
		c.crowd.stats.stale.Add(1)
	}

	if c.seen != nil {
		c.seen(c, n, now)
	}

	c.hold(l, n)
}

// hold stores a count, unless the tab has left the count's page.
func (c *tab) hold(l *link, n *client.Count) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// The frame may be from an earlier connection.
	if c.link != l {
		return
	}

	for h := range c.holdings() {
		if h.Page != n.Page {
			continue
		}
		if h.bad {
			c.crowd.wrong("page %q: the server accepts a page that is not allowed", n.Page)
		}

		// h.known means the same connection. Another gateway may be a moment behind.
		if h.known && n.Version.Before(h.Version) {
			c.crowd.stats.backward.Add(1)
			c.crowd.wrong("page %q: the version went back from %s to %s", n.Page, h.Version, n.Version)
			return
		}

		if h.arrival && n.Count < 1 && !n.Stale {
			c.crowd.wrong("page %q: the first count after a join is %d (version %s), "+
				"which does not include the user who joined", n.Page, n.Count, n.Version)
		}

		// Not all of h.Count, because the driver reads h.Page without the lock.
		h.Count.Count = n.Count
		h.Version = n.Version
		h.Stale = n.Stale
		h.known = true
		h.arrival = false
	}
}

// holdings returns all holdings, that of the joined page first. A page may be both joined and watched.
func (c *tab) holdings() iter.Seq[*holding] {
	return func(yield func(*holding) bool) {
		if c.joined.Page != "" && !yield(&c.joined) {
			return
		}
		for i := range c.watched {
			if !yield(&c.watched[i]) {
				return
			}
		}
	}
}

// failed handles an error frame.
func (c *tab) failed(l *link, f *client.Frame) {
	c.crowd.stats.errorFrame(f.Code)
	expected := f.Code == "rate_limited"
	if c.strict || c.asks != nil && !expected {
		c.crowd.wrong("%s: error frame %s: %s", c.name(), f.Code, f.Message)
	}

	c.mu.Lock()
	defer c.mu.Unlock()

	if c.link != l {
		return
	}

	switch f.Code {
	case "bad_page":
		if c.joined.bad {
			c.joined.refused = true
		} else if f.Page == c.joined.Page {
			c.crowd.wrong("page %q: the server refuses a page that is allowed: %s", f.Page, f.Message)
		}
	case "rate_limited":
		l.socket.reset() // nobody knows which frame the server refused, so the client starts over after a pause
	}
}

// reconnect obeys a reconnect frame, but waits for maxReconnect at most.
func (c *tab) reconnect(l *link, after time.Duration) {
	after = min(max(after, 0), maxReconnect)

	c.mu.Lock()
	defer c.mu.Unlock()

	if c.link != l || l.timer != nil || c.left() {
		return
	}

	c.crowd.stats.sentAway.Add(1)
	c.crowd.disturb(after + c.crowd.cfg.LeaveGrace)
	l.how = sentAway
	l.ending = true
	l.timer = time.AfterFunc(after, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.link == l && !c.left() {
			l.Close()
		}
	})
}

const maxReconnect = time.Minute

// look reports whether the client is placed: connected, on its page, and with all its counts. It passes each count that
// the client holds to check, which may be nil.
func (c *tab) look(check func(client.Count)) (placed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Counts over a connection that is about to end may be out of date.
	placed = c.link != nil && !c.link.ending
	for h := range c.holdings() {
		placed = placed && (h.known || h.refused)
		if h.known && !h.bad && check != nil {
			check(h.Count)
		}
	}

	return placed
}
