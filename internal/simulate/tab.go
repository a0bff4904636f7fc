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

// A tab is one client. Its driver says on which page it should be. One goroutine,
// run, keeps the client connected and on that page until the driver ends it. The
// wanted page stays the same when the connection is lost.
type tab struct {
	crowd   *crowd
	user    *user
	number  uint64
	gateway int  // the gateway that it dials first
	fixed   bool // it dials no other gateway
	fickle  bool // it does not come back, and is on its page while it is connected
	strict  bool // an error frame is wrong
	slow    bool // it has a small buffer, and stops reading when the run asks for that

	seen func(t *tab, count *client.Count, when time.Time) // called by run's goroutine with each count; nil for most
	asks *subscriber                                       // looks at counters over it; nil for most

	stays context.Context // until the tab leaves
	quit  func()          // ends stays

	mu      sync.Mutex
	counted bool // it is fickle, and in the truth
	link    *link
	joined  holding   // without a page the client is on no page
	watched []holding // subscribed without being there
}

// A holding is what a client holds of one page.
type holding struct {
	client.Count
	known   bool // the count came on this connection after the request for the page
	refused bool // the join was answered with bad_page
	arrival bool // the next count is the first after a join on a fresh connection
	bad     bool // the client joined it and the server must refuse it
}

// joining returns what a client holds of a page that it is about to join.
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
	vanishes                // falls silent; the server has to notice
)

// An ending is the reason why a connection ended while its client stays.
type ending int

const (
	lost     ending = iota // without notice
	reloaded               // the client wanted a new one
	sentAway               // the server asked for it
)

// Back-off between attempts to connect, before jitter takes off up to half.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 3 * time.Second
	steadyLife = 5 * time.Second // a connection this old makes the attempts before it forgotten
)

func (c *tab) run() {
	defer c.crowd.forget(c)
	gateway := c.gateway
	for failures := 0; ; gateway++ {
		began := time.Now()
		how, err := c.connect(c.crowd.gateway(gateway))
		// Nothing of what follows is for a client that has ended.
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
			// The shift is bounded with the failures, so it does not overflow.
			pause = min(firstPause<<failures, lastPause)
			failures = min(failures+1, 8)
		}

		var refused *client.Error
		if errors.As(err, &refused) {
			pause = max(pause, min(refused.RetryAfter, lastPause))
		}

		// The fan's calls go on, and would be a stranger's where the server forgot the fan.
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

	// Whatever the error was, it is detach that knows whether the end was asked for.
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
	ending bool // one of the two sides has said that it ends, and how
	how    ending
	timer  *time.Timer // ends it when the server asked for that
}

// dial opens a connection as the tab's user, and asks for what the tab wants. Until it
// returns, the user's other new tabs wait when they have no id yet.
func (c *tab) dial(gateway string) (l *link, err error) {
	tokens := c.crowd.cfg.JWTSecret != ""
	var id string
	// With tokens the name in the token makes the user; nothing has to be asked for first.
	if !tokens {
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
	// Over TLS the socket sees no headers, only encrypted bytes, so all of them count.
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

// welcomed checks as whom the server has welcomed a tab that dialled with the id, or with a token.
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

// enter gives the link to the tab, and sends the join and the subscriptions. When the tab
// has left, it resets the link and reports false.
func (c *tab) enter(l *link) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	// It may have left while the handshake was under way, and nobody else would close the link.
	if c.left() {
		l.socket.reset()
		l.Abort()
		return false
	}

	c.link = l
	c.crowd.stats.connects.Add(1)
	// Under the same lock as the join, so that nobody sees the truth without it.
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
		c.joined.arrival = !slices.Contains(pages, c.joined.Page) // or the first count is for the subscription
		_ = l.Join(c.joined.Page)
	}

	return true
}

// partLocked takes a fickle tab out of the truth.
func (c *tab) partLocked() {
	if c.counted {
		c.counted = false
		c.crowd.truth.exit(c.user, c.joined.Page)
	}
}

// coming reports whether a fickle tab may still come.
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

	// What is held was received over the connection that is gone.
	c.link = nil
	for h := range c.holdings() {
		h.known = false
		h.refused = false
		h.arrival = false
	}

	if c.asks != nil {
		c.asks.begin()
	}

	// An ending that was asked for has been noted as a disturbance already.
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

	// Enter before exit, so that the user is never gone from the site in between.
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

	// Join before leave, so that the user never leaves the site.
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

	// Before the close, whose end run sees at once.
	c.link.how = reloaded
	c.link.ending = true
	c.crowd.disturb(c.crowd.cfg.LeaveGrace)
	c.link.Close()
}

// leave ends the client for good. It returns at once; run ends when the
// connection has.
func (c *tab) leave(how exit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left() {
		return
	}

	// Before the connection ends, so that run does not take its end for a loss.
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

// cut first asks a silent connection for a sign of life, and ends the connection
// when it stays silent for too long. The watchdog calls it.
func (c *tab) cut(now time.Time, ask, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.link == nil {
		return
	}

	quiet := now.Sub(c.link.HeardAt())
	// A reset, because a connection that answers nothing would not answer a close frame either.
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

// handle takes one frame of the server. Only run's goroutine calls it.
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

// count stores a count, unless the tab has left the count's page.
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

// hold keeps the count as that of its page, if the tab holds that.
func (c *tab) hold(l *link, n *client.Count) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// A frame of a connection that has been replaced says nothing about this one.
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

		// Only on one connection: another gateway may be a moment behind.
		if h.known && n.Version.Before(h.Version) {
			c.crowd.stats.backward.Add(1)
			c.crowd.wrong("page %q: the version went back from %s to %s", n.Page, h.Version, n.Version)
			return
		}

		if h.arrival && n.Count < 1 && !n.Stale {
			c.crowd.wrong("page %q: the first count after a join is %d (version %s), "+
				"which does not include the user who joined", n.Page, n.Count, n.Version)
		}

		// The page stays: it is the driver's, who reads it without a lock.
		h.Count.Count = n.Count
		h.Version = n.Version
		h.Stale = n.Stale
		h.known = true
		h.arrival = false
	}
}

// holdings returns what the client holds, the joined page first. A page may be both joined and watched.
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

// reconnect obeys a reconnect frame.
func (c *tab) reconnect(l *link, after time.Duration) {
	// A server may ask for anything; the run must go on.
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

// look reports whether the client is on the wanted page and knows its counts. It
// passes each count that the client holds to check, which may be nil.
func (c *tab) look(check func(client.Count)) (placed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// A connection that is about to end holds counts that nobody updates any more.
	placed = c.link != nil && !c.link.ending
	for h := range c.holdings() {
		placed = placed && (h.known || h.refused)
		if h.known && !h.bad && check != nil {
			check(h.Count)
		}
	}

	return placed
}
