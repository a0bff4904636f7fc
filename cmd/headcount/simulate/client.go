package simulate

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// A client is one tab. Its driver says on which page it should be. One goroutine,
// run, keeps the client connected and on that page until the driver ends it. The
// wanted page stays the same when the connection is lost.
type client struct {
	crowd   *crowd
	user    *user
	number  uint64                                       // seeds its jitter
	gateway int                                          // the gateway that it dials first
	slow    bool                                         // it has a small buffer, and stops reading when the run asks for that
	seen    func(page string, count int64, at time.Time) // called by run's goroutine; nil for most

	done chan struct{} // closed by leave

	mu      sync.Mutex
	link    *link
	joined  holding   // without a page the client is on no page
	watched []holding // subscribed without being there
}

// A holding is what a client holds of one page.
type holding struct {
	page    string
	count   int64
	version version
	known   bool // a count came on this connection after the request for the page
	refused bool // the join was answered with bad_page
	arrival bool // the next count is the first after a join on a fresh connection
	bad     bool // the client joined it and the server must refuse it
}

// joining is what a client holds of a page that it is about to join.
func joining(page string) holding { return holding{page: page, bad: page != "" && !validPage(page)} }

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

func (c *client) run(ctx context.Context) {
	defer c.crowd.forget(c)
	for gateway, failures := c.gateway, 0; ; gateway++ {
		began := time.Now()
		how, err := c.connect(ctx, c.crowd.gateway(gateway))
		if c.left() || ctx.Err() != nil {
			return
		}
		if how != lost || time.Since(began) > steadyLife {
			failures = 0
		}
		var pause time.Duration
		switch how {
		case reloaded:
			gateway-- // it dials the same gateway again
		case lost:
			c.crowd.failed(err)
			pause = min(firstPause<<failures, lastPause)
			failures = min(failures+1, 8)
		}
		if no := (*refused)(nil); errors.As(err, &no) {
			pause = max(pause, min(no.retryAfter, lastPause))
		}
		jitter := rand.New(rand.NewPCG(c.crowd.cfg.Seed^c.number, uint64(gateway)))
		pause -= time.Duration(jitter.Float64() * float64(pause) / 2)
		if !c.sleep(ctx, pause) {
			return
		}
	}
}

// sleep reports false when the client is to leave instead.
func (c *client) sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return !c.left() && ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-c.done:
	case <-ctx.Done():
	}
	return false
}

// connect opens one connection and serves it. It returns after the connection has
// ended, with the reason.
func (c *client) connect(ctx context.Context, gateway string) (how ending, err error) {
	l, release, err := c.dial(ctx, gateway)
	if err != nil {
		return lost, err
	}
	defer release()
	defer func() { how = c.detach(l) }()

	strays, err := c.welcome(l)
	release()
	for _, stray := range strays {
		if stray != c {
			stray.end(lost) // it pauses before it dials: two servers might disagree for ever
		}
	}
	if err != nil {
		return lost, err
	}
	for {
		if err := l.next(func(msg []byte) { c.handle(l, msg) }); err != nil {
			return lost, err
		}
		for c.slow && c.crowd.deaf.Load() && c.sleep(ctx, time.Second) {
		}
	}
}

// dial opens a connection as the client's user. The release it returns may be
// called more than once; until then the user's other new tabs wait.
func (c *client) dial(ctx context.Context, gateway string) (*link, func(), error) {
	var id string
	release := func() {}
	if c.crowd.cfg.JWTSecret == "" {
		var err error
		if id, release, err = c.user.claim(ctx, c.done); err != nil {
			return nil, nil, err
		}
	}
	l, err := c.upgrade(ctx, gateway, id)
	if err != nil {
		release()
		return nil, nil, err
	}
	return l, release, nil
}

func (c *client) upgrade(ctx context.Context, gateway, id string) (*link, error) {
	free, err := c.crowd.dialSlot(ctx, c.done)
	if err != nil {
		return nil, err
	}
	defer free()
	url, header, err := c.crowd.address(gateway, id, c)
	if err != nil {
		return nil, err
	}
	l, err := dial(ctx, url, header, &c.crowd.stats.bytes)
	var no *refused
	if errors.As(err, &no) {
		c.crowd.stats.refusedUpgrades.Add(1)
	}
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", gateway, err)
	}
	if !c.attach(l, id) {
		return nil, context.Canceled
	}
	return l, nil
}

// attach gives the link to the client, or resets the link if the client has left.
func (c *client) attach(l *link, id string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left() {
		l.kill()
		return false
	}
	c.link, l.who = l, id // the id of the dial; welcome replaces it
	if c.slow {
		_ = l.tcp.SetReadBuffer(slowRead) // on an error the buffer has its usual size
	}
	_ = l.conn.SetReadDeadline(time.Now().Add(dialTimeout))
	return true
}

// detach ends the link and forgets the counts that came over it.
func (c *client) detach(l *link) ending {
	_ = l.ws.CloseNow()
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
	}
	c.link = nil
	for h := range c.holdings() {
		h.known, h.refused, h.arrival = false, false, false
	}
	if l.ready && !l.ending && !c.left() {
		c.crowd.dropped()
	}
	return l.how
}

// welcome waits for the first frame and then says where the client is. It
// returns the user's tabs that have to dial again under the user's new id.
func (c *client) welcome(l *link) (strays []*client, err error) {
	var f frame
	if rerr := l.next(func(msg []byte) { f, err = parseFrame(msg) }); rerr != nil {
		return nil, fmt.Errorf("wait for welcome: %w", rerr)
	}
	c.crowd.stats.messages.Add(1)
	if err != nil || f.Type != "welcome" || f.User == "" {
		c.crowd.wrong("the first frame must be a welcome with a user; its type is %q", f.Type)
		return nil, fmt.Errorf("wait for welcome: got %q", f.Type)
	}
	c.crowd.learn(f.HeartbeatMS)
	if c.crowd.cfg.JWTSecret != "" {
		if f.User != c.user.name {
			c.crowd.wrong("the server welcomed the token of %q as the user %q", c.user.name, f.User)
		}
	} else {
		var ok bool
		if ok, strays = c.user.adopt(l.who, f.User, f.ID); !ok {
			return strays, errors.New("the server welcomed this tab as another user than the user's other tabs")
		}
	}
	c.enter(l, f.User)
	return strays, nil
}

// enter sends the join and the subscriptions on a fresh connection.
func (c *client) enter(l *link, who string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left() {
		return
	}
	_ = l.conn.SetReadDeadline(time.Time{})
	l.who, l.ready = who, true
	c.crowd.stats.connects.Add(1)
	pages := make([]string, len(c.watched))
	for i, h := range c.watched {
		pages[i] = h.page
	}
	for _, msg := range subscribeFrames(pages) {
		l.send(msg)
	}
	if c.joined.page != "" {
		c.joined.arrival = !slices.Contains(pages, c.joined.page) // or the first count is for the subscription
		l.send(pageFrame("join", c.joined.page))
	}
}

func (c *client) left() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// move sends the client to another page, or to none.
func (c *client) move(page string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.joined
	if old.page == page || c.left() {
		return
	}
	c.joined = joining(page)
	if c.link == nil || !c.link.ready {
		return
	}
	if page != "" {
		c.link.send(pageFrame("join", page))
	}
	if old.page != "" && !old.bad {
		c.link.send(pageFrame("leave", old.page))
	}
}

// reload closes the connection and opens another, as F5 does.
func (c *client) reload() { c.end(reloaded) }

// end closes the connection; run opens another.
func (c *client) end(how ending) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != nil && !c.left() {
		c.link.how, c.link.ending = how, true
		c.crowd.disturb(c.crowd.cfg.LeaveGrace)
		c.link.bye()
	}
}

// leave ends the client for good. It returns at once; run ends when the
// connection has.
func (c *client) leave(how exit) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left() {
		return
	}
	close(c.done)
	l := c.link
	if l == nil {
		return
	}
	if !l.ready {
		l.kill() // the connection has joined no page yet
		return
	}
	grace := c.crowd.cfg.LeaveGrace
	switch how {
	case leaveFrame:
		if c.joined.page != "" && !c.joined.bad {
			l.send(pageFrame("leave", c.joined.page))
		}
		l.bye()
	case closesFrame:
		l.bye()
	case endsSocket:
		l.fin()
	case resetSocket:
		l.kill()
	case vanishes:
		l.vanish()
		grace = c.crowd.ghostBound()
		c.crowd.bury(l, grace)
	}
	c.crowd.disturb(grace)
}

// cut first asks a silent connection for a sign of life, and ends the connection
// when it stays silent for too long. The watchdog calls it.
func (c *client) cut(now time.Time, ask, limit time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil {
		return
	}
	switch quiet := now.Sub(time.UnixMilli(c.link.heard.Load())); {
	case quiet > limit:
		c.link.kill()
	case quiet > ask && c.link.ready:
		c.link.send(heartbeatFrame)
	}
}

// closeNow ends the client and its connection at once.
func (c *client) closeNow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.left() {
		close(c.done)
	}
	if c.link != nil {
		c.link.fin()
	}
}

// handle takes one message of the server. Only run's goroutine calls it.
func (c *client) handle(l *link, msg []byte) {
	c.crowd.stats.messages.Add(1)
	f, err := parseFrame(msg)
	if err != nil {
		c.crowd.wrong("%v: %.200q", err, msg)
		return
	}
	switch f.Type {
	case "count":
		c.count(l, f)
	case "error":
		c.failed(l, f)
	case "reconnect":
		c.reconnect(l, f.AfterMS)
	}
}

// count stores a count, unless the client has left the count's page.
func (c *client) count(l *link, f frame) {
	now := time.Now()
	c.crowd.stats.counts.Add(1)
	v, err := parseVersion(f.Version)
	if err != nil || !f.HasCount {
		c.crowd.wrong("page %q: a count frame has no count or no version: %v", f.Page, err)
		return
	}
	if f.Count < 0 {
		c.crowd.stats.negative.Add(1)
		c.crowd.wrong("page %q: the count %d is negative", f.Page, f.Count)
	}
	if f.Stale {
		c.crowd.stats.stale.Add(1)
	}
	if s := c.crowd.spread.Load(); s != nil && !c.slow {
		s.add(f.Page, v, now)
	}
	page, ok := c.hold(l, f, v)
	if ok && c.seen != nil {
		c.seen(page, f.Count, now)
	}
}

func (c *client) hold(l *link, f frame, v version) (page string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != l {
		return "", false
	}
	for h := range c.holdings() {
		if h.page != string(f.Page) {
			continue
		}
		if h.bad {
			c.crowd.wrong("page %q: the server accepts a page that is not allowed", f.Page)
		}
		if h.known && v.before(h.version) {
			c.crowd.stats.backward.Add(1)
			c.crowd.wrong("page %q: the version went back from %d-%d to %s", f.Page, h.version.incarnation, h.version.sequence, f.Version)
			return "", false
		}
		if h.arrival && f.Count < 1 && !f.Stale {
			c.crowd.wrong("page %q: the first count after a join is %d (version %s), which does not include the user who joined", f.Page, f.Count, f.Version)
		}
		h.count, h.version, h.known, h.arrival = f.Count, v, true, false
		page, ok = h.page, true
	}
	return page, ok
}

// holdings are the client's, the joined page's first. A page may be both joined and
// watched.
func (c *client) holdings() iter.Seq[*holding] {
	return func(yield func(*holding) bool) {
		if c.joined.page != "" && !yield(&c.joined) {
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
func (c *client) failed(l *link, f frame) {
	c.crowd.stats.errorFrame(f.Code)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != l {
		return
	}
	switch f.Code {
	case "bad_page":
		switch {
		case c.joined.bad:
			c.joined.refused = true
		case string(f.Page) == c.joined.page:
			c.crowd.wrong("page %q: the server refuses a page that is allowed: %s", f.Page, f.Message)
		}
	case "rate_limited":
		l.kill() // nobody knows which frame the server refused, so the client starts over after a pause
	}
}

// reconnect obeys a reconnect frame.
func (c *client) reconnect(l *link, afterMS int64) {
	after := time.Duration(min(max(afterMS, 0), maxReconnectMS)) * time.Millisecond
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link != l || l.timer != nil || c.left() {
		return
	}
	c.crowd.stats.sentAway.Add(1)
	c.crowd.disturb(after + c.crowd.cfg.LeaveGrace)
	l.how, l.ending = sentAway, true
	l.timer = time.AfterFunc(after, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.link == l && !c.left() {
			l.bye()
		}
	})
}

const maxReconnectMS = 60_000

// look reports whether the client is on the wanted page and knows its counts. It
// passes each count that the client holds to check.
func (c *client) look(check func(page string, count int64)) (placed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.link == nil || !c.link.ready || c.link.ending {
		return false
	}
	placed = true
	for h := range c.holdings() {
		placed = placed && (h.known || h.refused)
		if h.known && !h.bad && check != nil {
			check(h.page, h.count)
		}
	}
	return placed
}
