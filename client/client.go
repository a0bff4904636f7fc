// Package client is the Go client of Headcount: who is here, live, and counters that last.
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
// A Client keeps a WebSocket connection and comes back when it is lost, as the browser's
// client does. A Conn is one such connection, for programs that have their own idea of
// coming back. An API makes calls over HTTP: counts, and counters that last.
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

// An Update is what a Client learns: a Count, a Counter, an Unread, a Status or a Fault.
type Update interface{ topic() string }

// Unread is the number of the user's unread notifications.
type Unread int64

// A Status says whether the client is connected.
type Status struct {
	Connected bool
	User, ID  string // as in Conn
	Err       error  // why it is not connected
}

// A Fault is an error frame: the server refused a frame.
type Fault struct{ Code, Message, Page, Key string }

func (c Count) topic() string   { return "page " + c.Page }
func (c Counter) topic() string { return "counter " + c.Key }
func (Unread) topic() string    { return "unread" }
func (Status) topic() string    { return "status" }
func (f Fault) topic() string   { return "fault " + f.Code + " " + f.Page + f.Key }

// Delays of a Client. The first attempt to come back is made within backoffBase, those of about a minute
// within backoffSoon, since a restart takes seconds, and later ones within backoffMost.
const (
	backoffBase = time.Second
	backoffSoon = 2 * time.Second
	backoffMost = 30 * time.Second
	soon        = 60               // attempts
	steadyLife  = 10 * time.Second // after a connection this old, the failures before it do not count
	moveMost    = time.Minute      // the longest wait that a reconnect frame may ask for
	maxPending  = 300              // updates that nobody has read; more: the oldest is dropped
)

// silenceMost is how long the answer to a heartbeat may take.
var silenceMost = 5 * time.Second

// A Client keeps one connection to a server while Run runs, and what it wants of it:
// Join, Leave, Subscribe and the like may be called at any time, connected or not. Its
// methods may be called from any goroutine.
type Client struct {
	cfg Config

	mu       sync.Mutex
	joined   map[string]bool
	pages    map[string]bool
	counters map[string]bool
	conn     *Conn             // that says what is newest; nil while there is none
	fresh    map[string]bool   // topics that conn has named
	newest   map[string]Update // of each wanted topic
	pending  map[string]Update // that Next has not returned
	order    []string          // of pending, the oldest first
	wake     chan struct{}     // holds a value when pending may have something
}

// New returns a client that does nothing until Run.
func New(cfg Config) *Client {
	return &Client{
		cfg: cfg, joined: map[string]bool{}, pages: map[string]bool{}, counters: map[string]bool{},
		newest: map[string]Update{}, pending: map[string]Update{}, wake: make(chan struct{}, 1),
	}
}

// Next waits for an update. While nobody calls it, only the newest of each page and
// counter is kept. It returns what is pending at once, the oldest first.
func (c *Client) Next(ctx context.Context) (Update, error) {
	for {
		c.mu.Lock()
		if len(c.order) > 0 {
			topic := c.order[0]
			c.order = c.order[1:]
			update := c.pending[topic]
			delete(c.pending, topic)
			c.mu.Unlock()
			return update, nil
		}
		c.mu.Unlock()
		select {
		case <-c.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// put hands an update to Next. The caller holds c.mu.
func (c *Client) put(u Update) {
	topic := u.topic()
	if _, ok := c.pending[topic]; !ok {
		if len(c.order) == maxPending {
			delete(c.pending, c.order[0])
			c.order = c.order[1:]
		}
		c.order = append(c.order, topic)
	}
	c.pending[topic] = u
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

// Leave ends what Join began.
func (c *Client) Leave(page string) { c.drop(c.joined, []string{page}, (*Conn).leaveAll) }

// Subscribe asks for the counts of pages; "*" is the whole site.
func (c *Client) Subscribe(pages ...string) { c.want(c.pages, pages, (*Conn).Subscribe) }

// Unsubscribe ends what Subscribe began.
func (c *Client) Unsubscribe(pages ...string) { c.drop(c.pages, pages, (*Conn).Unsubscribe) }

// SubscribeCounters asks for counters.
func (c *Client) SubscribeCounters(keys ...string) {
	c.want(c.counters, keys, (*Conn).SubscribeCounters)
}

// UnsubscribeCounters ends what SubscribeCounters began.
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
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, name := range names {
		set[name] = true
	}
	if c.conn != nil {
		_ = ask(c.conn, names...) // after an error the next connection asks
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
	maps.DeleteFunc(c.newest, func(_ string, u Update) bool { return !c.wanted(u) })
}

// wanted reports whether an update is still asked for. The caller holds c.mu.
func (c *Client) wanted(u Update) bool {
	switch u := u.(type) {
	case Count:
		return c.joined[u.Page] || c.pages[u.Page]
	case Counter:
		return c.counters[u.Key]
	}
	return true
}

// Run keeps the client connected until ctx ends, and returns the cause of that.
func (c *Client) Run(ctx context.Context) error {
	var old *session // serves until the next one does
	for failures := 0; ctx.Err() == nil; {
		began := time.Now()
		s, err := c.open(ctx)
		if old != nil && (err == nil || old.ended()) {
			old.end()
			old = nil
		}
		if err == nil {
			old, err = s.serve(ctx) // old is s when the server asked to move
			if err == nil || time.Since(began) > steadyLife {
				failures = 0
			}
		}
		if err == nil || ctx.Err() != nil {
			continue
		}
		if old == nil {
			c.lost(err)
		}
		pause := rand.N(backoff(failures))
		if refusal := (*Error)(nil); errors.As(err, &refusal) {
			pause = max(pause, min(refusal.RetryAfter, backoffMost))
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

// backoff returns the longest pause after so many failures in a row, before the newest one.
func backoff(failures int) time.Duration {
	switch {
	case failures == 0:
		return backoffBase
	case failures < soon:
		return backoffSoon
	}
	return backoffMost
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// lost notes that there is no connection.
func (c *Client) lost(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.conn = nil
	c.put(Status{ID: c.cfg.ID, Err: err})
}

// A session is a connection of a Client and the goroutine that reads it.
type session struct {
	client *Client
	conn   *Conn
	move   chan time.Duration // holds a value when the server asked to move
	done   chan struct{}      // closed when the connection has ended
	err    error              // why it ended
}

// open dials, and asks for everything that is wanted.
func (c *Client) open(ctx context.Context) (*session, error) {
	conn, err := Dial(ctx, c.cfg)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if conn.ID != "" {
		c.cfg.ID = conn.ID
	}
	c.conn, c.fresh = conn, map[string]bool{}
	c.put(Status{Connected: true, User: conn.User, ID: conn.ID})
	_ = conn.Subscribe(slices.Collect(maps.Keys(c.pages))...) // its reader notices an error
	_ = conn.SubscribeCounters(slices.Collect(maps.Keys(c.counters))...)
	_ = conn.joinAll(slices.Collect(maps.Keys(c.joined))...)
	s := &session{client: c, conn: conn, move: make(chan time.Duration, 1), done: make(chan struct{})}
	go s.read()
	return s, nil
}

func (s *session) read() {
	defer close(s.done)
	var f Frame
	for {
		if err := s.conn.Receive(&f); errors.Is(err, ErrFrame) {
			continue // of a newer server
		} else if err != nil {
			s.err = err
			return
		}
		if f.Type != "reconnect" {
			s.client.take(s.conn, &f)
			continue
		}
		select {
		case s.move <- min(max(f.After, 0), moveMost):
		default:
		}
	}
}

// take keeps what a frame says, unless it is older than what is known.
func (c *Client) take(from *Conn, f *Frame) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != from {
		return // an old connection serves presence alone
	}
	var u Update
	var version Version
	switch f.Type {
	case "count":
		u, version = f.Count, f.Count.Version
	case "counter":
		u, version = f.Counter, f.Counter.Version
	case "unread":
		u = Unread(f.Unread)
	case "error":
		c.put(Fault{f.Code, f.Message, f.Page, f.Key})
		return
	default:
		return
	}
	if !c.wanted(u) {
		return
	}
	topic := u.topic()
	// A version of zero says that the server knows nothing: a counter was deleted, or a
	// server without stored counts started again. That is news, once on a connection.
	forgotten := version == Version{} && (f.Type == "counter" || !c.fresh[topic])
	if version.Before(versionOf(c.newest[topic])) && !forgotten {
		return
	}
	c.fresh[topic], c.newest[topic] = true, u
	c.put(u)
}

func versionOf(u Update) Version {
	switch u := u.(type) {
	case Count:
		return u.Version
	case Counter:
		return u.Version
	}
	return Version{}
}

// serve watches the session until it ends. When the server asked to move, and the time
// for that has come, it returns the session, which goes on, and no error.
func (s *session) serve(ctx context.Context) (old *session, err error) {
	beat := cmp.Or(s.conn.Heartbeat, 15*time.Second)
	tick := time.NewTicker(max(beat/4, 10*time.Millisecond))
	defer tick.Stop()
	var moved <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			s.end()
			return nil, ctx.Err()
		case <-s.done:
			if moved != nil {
				return nil, nil // it ended before its time: move at once
			}
			return nil, s.err
		case after := <-s.move:
			if moved == nil {
				moved = time.After(after)
			}
		case <-moved:
			return s, nil
		case <-tick.C:
			switch silence := time.Since(s.conn.HeardAt()); {
			case silence > beat+silenceMost:
				s.conn.Abort()
			case silence > beat:
				_ = s.conn.Beat() // its reader notices an error
			}
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

// end closes the connection and waits for its reader. What the connection joined ends
// after the server's leave-grace, unless another connection of the user joined it.
func (s *session) end() {
	s.conn.Close()
	timer := time.AfterFunc(time.Second, s.conn.Abort)
	<-s.done
	timer.Stop()
	s.conn.Abort()
}
