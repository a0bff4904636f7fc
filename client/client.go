// Package client is the Go client of Headcount: live counts of the users on pages, and
// durable counters.
//
//	c := client.New(client.Config{URL: "https://headcount.example.com"})
//	go c.Run(ctx)
//	c.Subscribe("pricing", "*")
//	for {
//		update, err := c.Next(ctx)
//		if err != nil {
//			return err
//		}
//		if count, ok := update.(client.Count); ok {
//			fmt.Println(count.Page, count.Count)
//		}
//	}
//
// A Client keeps a WebSocket connection and reconnects when it is lost, as the browser client
// does. A Conn is one such connection, for programs that reconnect in their own way. An API
// makes calls over HTTP, to read counts and to use counters.
package client

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// An Update is the result of Client.Next: a Count, a Counter, an Unread, a Status or a Fault.
type Update interface{ topic() string }

// Unread is the number of the user's unread notifications.
type Unread int64

// A Status says whether the client is connected.
type Status struct {
	Connected bool
	User, ID  string // as in Conn
	Err       error  // why the client is not connected
}

// A Fault is an error frame, by which the server refused a frame of the client. The client gives up the page or
// counter that a Fault names, because the server would refuse it with everything else again.
type Fault struct{ Code, Message, Page, Key string }

func (c Count) topic() string   { return "page " + c.Page }
func (c Counter) topic() string { return "counter " + c.Key }
func (Unread) topic() string    { return "unread" }
func (Status) topic() string    { return "status" }
func (f Fault) topic() string   { return "fault " + f.Code + " " + f.Page + f.Key }

// Delays of a Client. The first attempt to reconnect is made within firstBackoff, the attempts
// of about a minute within shortBackoff, since a restart takes seconds, and later attempts within
// maxBackoff.
const (
	firstBackoff  = time.Second
	shortBackoff  = 2 * time.Second
	maxBackoff    = 30 * time.Second
	shortAttempts = 60               // attempts within firstBackoff or shortBackoff
	stableAfter   = 10 * time.Second // a connection that lasted this long resets the number of failures
	maxMove       = time.Minute      // the longest wait that a reconnect frame may ask for
	maxPending    = 300              // updates that Next has not returned; beyond the bound the oldest is dropped
)

// maxSilence is how long the answer to a heartbeat may take.
var maxSilence = 5 * time.Second

// A Client keeps one connection to a server while Run runs. It remembers what is joined and
// subscribed to: Join, Leave, Subscribe and the like may be called at any time, connected or
// not. Its methods may be called from any goroutine.
type Client struct {
	cfg Config

	mu       sync.Mutex
	joined   map[string]bool
	pages    map[string]bool
	counters map[string]bool
	conn     *Conn             // the connection whose frames are used; nil: none
	fresh    map[string]bool   // topics that conn has sent an update of
	newest   map[string]Update // the newest update of each wanted topic
	pending  map[string]Update // updates that Next has not returned
	order    []string          // topics of pending, the oldest first
	limited  bool              // the server has refused something as too much at a time, so it is to be asked for again
	wake     chan struct{}     // holds a value when pending may have updates
}

// New returns a client that does nothing until Run.
func New(cfg Config) *Client {
	return &Client{
		cfg:      cfg,
		joined:   map[string]bool{},
		pages:    map[string]bool{},
		counters: map[string]bool{},
		newest:   map[string]Update{},
		pending:  map[string]Update{},
		wake:     make(chan struct{}, 1),
	}
}

// Next returns pending updates, the oldest first, or waits for an update. Between calls only
// the newest update of each page and counter is kept.
func (c *Client) Next(ctx context.Context) (Update, error) {
	for {
		// The value in wake may be older than the last take, so a waiter looks again instead of relying on it.
		update, found := c.take()
		if found {
			return update, nil
		}

		select {
		case <-c.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// take returns the oldest pending update, if there is one.
func (c *Client) take() (update Update, found bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if len(c.order) == 0 {
		return nil, false
	}

	// The order is of topics, not of updates: a newer update takes the place of an older one of its topic.
	topic := c.order[0]
	c.order = c.order[1:]
	update = c.pending[topic]
	delete(c.pending, topic)

	if len(c.order) > 0 {
		c.signal() // another caller may wait
	}

	return update, true
}

// putLocked makes an update pending for Next.
func (c *Client) putLocked(u Update) {
	topic := u.topic()

	if _, ok := c.pending[topic]; !ok {
		// Next is called too seldom. Count and Counter still return the newest of what is dropped.
		if len(c.order) == maxPending {
			delete(c.pending, c.order[0])
			c.order = c.order[1:]
		}

		c.order = append(c.order, topic)
	}

	c.pending[topic] = u
	c.signal()
}

// signal wakes one caller of Next.
func (c *Client) signal() {
	// One value is enough for any number of updates: who takes one signals the next caller.
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Count returns the newest count of a page that the client joined or subscribed to.
func (c *Client) Count(page string) (count Count, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	count, known = c.newest[Count{Page: page}.topic()].(Count)
	return count, known
}

// Counter returns the newest state of a counter that the client subscribed to.
func (c *Client) Counter(key string) (counter Counter, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()

	counter, known = c.newest[Counter{Key: key}.topic()].(Counter)
	return counter, known
}

// Join makes the user present on a page, and subscribes to its count.
func (c *Client) Join(page string) { c.want(c.joined, []string{page}, (*Conn).joinAll) }

// Leave ends the user's presence on a page, and the subscription that Join made.
func (c *Client) Leave(page string) { c.drop(c.joined, []string{page}, (*Conn).leaveAll) }

// Subscribe asks for the counts of pages; "*" is the whole site.
func (c *Client) Subscribe(pages ...string) { c.want(c.pages, pages, (*Conn).Subscribe) }

// Unsubscribe ends subscriptions to counts. The client keeps the counts of pages that it has joined.
func (c *Client) Unsubscribe(pages ...string) {
	c.drop(c.pages, pages, func(conn *Conn, pages ...string) error {
		// The server ends the counts of a joined page as well. It begins them again when it is asked to join.
		joined := slices.DeleteFunc(slices.Clone(pages), func(page string) bool { return !c.joined[page] })

		return errors.Join(conn.Unsubscribe(pages...), conn.joinAll(joined...))
	})
}

// SubscribeCounters asks for counters.
func (c *Client) SubscribeCounters(keys ...string) {
	c.want(c.counters, keys, (*Conn).SubscribeCounters)
}

// UnsubscribeCounters ends subscriptions to counters.
func (c *Client) UnsubscribeCounters(keys ...string) {
	c.drop(c.counters, keys, (*Conn).UnsubscribeCounters)
}

func (c *Conn) joinAll(pages ...string) (err error) {
	for _, page := range pages {
		err = errors.Join(err, c.Join(page))
	}

	return err
}

func (c *Conn) leaveAll(pages ...string) (err error) {
	for _, page := range pages {
		err = errors.Join(err, c.Leave(page))
	}

	return err
}

func (c *Client) want(set map[string]bool, names []string, ask func(*Conn, ...string) error) {
	// The lock is held while the frame is sent, so that frames leave in the order of the calls. The write has a
	// timeout.
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, name := range names {
		set[name] = true
	}

	if c.conn != nil {
		_ = ask(c.conn, names...) // after an error the next connection asks again
	}
}

func (c *Client) drop(set map[string]bool, names []string, ask func(*Conn, ...string) error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for _, name := range names {
		delete(set, name)
	}

	if c.conn != nil {
		_ = ask(c.conn, names...)
	}

	// A page may be joined and subscribed to, so its count stays as long as either holds.
	maps.DeleteFunc(c.newest, func(_ string, u Update) bool { return !c.wantedLocked(u) })
}

// wantedLocked reports whether the update's topic is still joined or subscribed to.
func (c *Client) wantedLocked(u Update) bool {
	switch u := u.(type) {
	case Count:
		return c.joined[u.Page] || c.pages[u.Page]
	case Counter:
		return c.counters[u.Key]
	default:
		return true
	}
}

// Run keeps the client connected until ctx ends, and returns ctx's cause.
func (c *Client) Run(ctx context.Context) error {
	var old *session // keeps the user present until the next session is open

	for failures := 0; ctx.Err() == nil; {
		s, err := c.open(ctx)
		// The old connection ends after the new one has joined, or the user would leave every page in between. While
		// dialling fails it stays, since it still serves.
		mayEnd := old != nil && (err == nil || old.ended())
		if mayEnd {
			old.end()
			old = nil
		}

		if err == nil {
			began := time.Now()
			old, err = s.serve(ctx) // old is s when the server asked to move
			if err == nil || time.Since(began) > stableAfter {
				failures = 0
			}
		}

		// The server asked to move, so nothing failed and there is nothing to wait for.
		if err == nil || ctx.Err() != nil {
			continue
		}

		// With an old connection the client is still connected, and the program hears of no outage.
		if old == nil {
			c.lost(err)
		}

		// The pause is random from 0 on, so that the clients of a restarted server do not return together.
		pause := rand.N(backoff(failures))
		var refusal *Error
		if errors.As(err, &refusal) {
			// A proxy may ask for an hour; maxBackoff bounds it.
			pause = max(pause, min(refusal.RetryAfter, maxBackoff))
		}

		failures++
		sleep(ctx, pause)
	}
	if old != nil {
		old.end()
	}

	c.lost(ctx.Err())

	return context.Cause(ctx)
}

// backoff returns the longest pause after a failure; failures is the number of failures in a
// row before it.
func backoff(failures int) time.Duration {
	switch {
	case failures == 0:
		return firstBackoff
	case failures < shortAttempts:
		return shortBackoff
	default:
		return maxBackoff
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()

	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// lost records that there is no connection.
func (c *Client) lost(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// Calls made from here on are only remembered; open asks for them.
	c.conn = nil
	c.putLocked(Status{ID: c.cfg.ID, Err: err})
}

// A session is a connection of a Client, and the goroutine that runs it.
type session struct {
	client *Client
	conn   *Conn
	move   chan time.Duration // holds a value when the server asked to move
	done   chan struct{}      // closed when the connection has ended
	err    error              // why it ended
}

// open dials, joins all pages and subscribes to all wanted topics.
func (c *Client) open(ctx context.Context) (*session, error) {
	conn, err := Dial(ctx, c.cfg)
	if err != nil {
		return nil, err
	}

	// A Join that runs at the same time either is in the sets below, or finds conn and sends its own frame.
	c.mu.Lock()
	defer c.mu.Unlock()
	// The id makes the next connection the same user. An identified user has none.
	if conn.ID != "" {
		c.cfg.ID = conn.ID
	}
	c.cfg.Welcomed = conn.Welcomed

	c.conn = conn
	// Each connection may once send a count without a version; see store.
	c.fresh = map[string]bool{}
	c.putLocked(Status{Connected: true, User: conn.User, ID: conn.ID})
	c.askAllLocked()

	s := &session{client: c, conn: conn, move: make(chan time.Duration, 1), done: make(chan struct{})}
	go s.run()

	return s, nil
}

// askAllLocked asks conn for all wanted topics. The joins come first: only then the server holds the count of the site
// back until it includes the user.
func (c *Client) askAllLocked() {
	c.limited = false
	_ = c.conn.joinAll(slices.Collect(maps.Keys(c.joined))...) // the session's reader notices an error
	_ = c.conn.Subscribe(slices.Collect(maps.Keys(c.pages))...)
	_ = c.conn.SubscribeCounters(slices.Collect(maps.Keys(c.counters))...)
}

// askAgain asks for everything once more if the server was asked for too much at a time.
func (c *Client) askAgain(conn *Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// A later connection has asked for everything itself.
	if c.limited && c.conn == conn {
		c.askAllLocked()
	}
}

// run reads the connection and notices its silence, until it has ended.
func (s *session) run() {
	defer close(s.done)

	ended := make(chan struct{})
	var listening sync.WaitGroup
	listening.Go(func() { s.listen(ended) })

	s.err = s.read()
	s.conn.Abort() // the server's end is closed, and this one is not
	close(ended)
	listening.Wait()
}

// read reads frames until the connection has ended, and returns why.
func (s *session) read() error {
	var f Frame
	for {
		err := s.conn.Receive(&f)
		if errors.Is(err, ErrFrame) {
			continue // a frame of a newer server
		}
		if err != nil {
			return err
		}

		if f.Type != "reconnect" {
			s.client.store(s.conn, &f)
			continue
		}

		// A second request to move while the first one waits adds nothing.
		select {
		case s.move <- min(max(f.After, 0), maxMove):
		default:
		}
	}
}

// store keeps the update in a frame, unless a newer one is known.
func (c *Client) store(from *Conn, f *Frame) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.conn != from {
		return // an old connection only keeps the user present
	}

	var u Update
	var version Version
	switch f.Type {
	case "count":
		u = f.Count
		version = f.Count.Version
	case "counter":
		u = f.Counter
		version = f.Counter.Version
	case "unread":
		u = Unread(f.Unread)
	case "error":
		c.refusedLocked(f)
		return
	default:
		return
	}

	// The frame was sent before the server read the unsubscribe.
	if !c.wantedLocked(u) {
		return
	}

	topic := u.topic()

	// The zero version means that the server has no value: a counter was deleted, or a server
	// without stored counts was restarted. For a count, that is accepted once per connection.
	forgotten := version == Version{} && (f.Type == "counter" || !c.fresh[topic])
	if version.Before(versionOf(c.newest[topic])) && !forgotten {
		return
	}

	c.fresh[topic] = true
	c.newest[topic] = u
	c.putLocked(u)
}

// refusedLocked handles an error frame. The server has refused a whole frame, which may have named other topics, too.
func (c *Client) refusedLocked(f *Frame) {
	c.putLocked(Fault{f.Code, f.Message, f.Page, f.Key})

	// Set sizes tell whether something was given up; only then is it safe to ask again, or a refusal would loop.
	wanted := len(c.joined) + len(c.pages) + len(c.counters)

	delete(c.joined, f.Page)
	delete(c.pages, f.Page)

	delete(c.counters, f.Key)

	if len(c.joined)+len(c.pages)+len(c.counters) < wanted {
		maps.DeleteFunc(c.newest, func(_ string, u Update) bool { return !c.wantedLocked(u) })
		c.askAllLocked()
	}

	c.limited = c.limited || f.Code == "rate_limited"
}

func versionOf(u Update) Version {
	switch u := u.(type) {
	case Count:
		return u.Version
	case Counter:
		return u.Version
	default:
		return Version{}
	}
}

// serve watches the session until it ends. When the server has asked the client to reconnect
// and the time for that has come, it returns the session, which is still open, and no error.
func (s *session) serve(ctx context.Context) (old *session, err error) {
	// A nil channel is never ready, so the case below waits until the server asks.
	var moved <-chan time.Time // has a value when it is time to move; nil: the server has not asked for a move

	for {
		select {
		case <-ctx.Done():
			s.end()
			return nil, ctx.Err()
		case <-s.done:
			if moved != nil {
				return nil, nil // the session ended early: reconnect at once
			}
			return nil, s.err
		case after := <-s.move:
			if moved == nil {
				moved = time.After(after)
			}
		case <-moved:
			return s, nil
		}
	}
}

// listen ends a connection whose server falls silent. It goes on while serve does not run: a server that has asked the
// client to move serves it until there is another one.
func (s *session) listen(ended <-chan struct{}) {
	beat := cmp.Or(s.conn.Heartbeat, 15*time.Second)
	// A quarter, so that silence is noticed at most a quarter late; the bound keeps a tiny heartbeat from spinning.
	tick := time.NewTicker(max(beat/4, 10*time.Millisecond))
	defer tick.Stop()

	var asked time.Time // when the last heartbeat was sent

	for {
		select {
		case <-ended:
			return
		case <-tick.C:
		}

		s.client.askAgain(s.conn)
		// Any byte counts as a sign of life, not the answer alone: a busy connection is never asked.
		heard := s.conn.HeardAt()
		switch {
		case time.Since(heard) <= beat:
			asked = time.Time{}
		case asked.IsZero():
			asked = time.Now()
			_ = s.conn.Beat() // the session's reader notices an error
		case time.Since(asked) > maxSilence:
			s.conn.Abort()
		}
	}
}

func (s *session) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// end closes the connection and waits for its reader. The user's presence on the joined pages
// ends after the server's leave-grace, unless another connection of the user has joined them.
func (s *session) end() {
	s.conn.Close()
	// A server that hangs may not answer the close frame; the next connection does not wait longer for it.
	timer := time.AfterFunc(time.Second, s.conn.Abort)

	<-s.done
	timer.Stop()
	s.conn.Abort()
}
