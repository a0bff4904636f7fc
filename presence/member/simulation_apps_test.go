package member

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"headcount/client"
	"headcount/presence"
)

// simApps is how many users of a simulation have a program with the Go client in place of a browser.
const simApps = 2

// app is a user whose program uses the Go client. It connects through a proxy, which picks any gateway, and whatever
// happens to the connection the client has to come back. The client notices later than a tab that a gateway is silent.
// So these users must be counted at rest, but need not be counted all the time.
type app struct {
	s      *simulation
	user   *user
	client *client.Client
	todo   chan func() // calls of the client, in order: a call may wait for a slow connection
	stop   context.CancelFunc

	mu        sync.Mutex // guards the fields below
	chance    *rand.Rand
	joined    map[string]bool
	last      map[string]client.Count
	arrival   map[string]time.Time // when the page was joined on this connection, until its first count
	at        *life                // the gateway that it dialled last
	connected bool
}

// arrivesWithin is how long after a join the first count of a page is taken for the answer to the join. Within this
// time nobody times out again, whatever fails.
const arrivesWithin = time.Second

func (s *simulation) newApp(name string) *app {
	ctx, stop := context.WithCancel(context.Background())
	a := &app{
		s: s, user: newUser(name), todo: make(chan func(), 256), stop: stop, chance: chance(s.seed, name),
		joined: map[string]bool{}, last: map[string]client.Count{}, arrival: map[string]time.Time{},
	}

	a.client = client.New(client.Config{URL: "http://gateways.test", Token: a.user.token, DialContext: a.dial})
	a.client.Subscribe(presence.AllPages)

	s.clients.Go(func() { _ = a.client.Run(ctx) })
	s.clients.Go(func() { a.read(ctx) })
	s.clients.Go(func() {
		for {
			select {
			case call := <-a.todo:
				call()
			case <-ctx.Done():
				return
			}
		}
	})

	return a
}

// dial connects to some gateway.
func (a *app) dial(context.Context, string, string) (net.Conn, error) {
	a.mu.Lock()
	gateway := a.s.someGateway(a.chance)
	a.mu.Unlock()

	end, err := a.s.net.dial(gateway)
	if err != nil {
		return nil, err
	}

	a.mu.Lock()
	a.at = a.s.net.find(gateway)
	a.mu.Unlock()

	c := newBuffered(end)
	a.s.clients.Go(c.send)
	a.s.detail("%s dials %s", a.user.name, gateway)

	return c, nil
}

// buffered is a connection whose writes do not wait for the other side, like those of TCP. The client holds a lock
// while it writes, and in a bubble no time passes while a goroutine waits for a lock.
type buffered struct {
	*pipeEnd
	out    chan []byte
	once   sync.Once
	closed chan struct{}
}

func newBuffered(end *pipeEnd) *buffered {
	return &buffered{pipeEnd: end, out: make(chan []byte, 1024), closed: make(chan struct{})}
}

func (c *buffered) send() {
	for {
		select {
		case b := <-c.out:
			if _, err := c.pipeEnd.Write(b); err != nil {
				return
			}
		case <-c.closed:
			return
		}
	}
}

func (c *buffered) Write(b []byte) (int, error) {
	select {
	case <-c.closed:
		return 0, net.ErrClosed
	default:
	}

	select {
	case c.out <- slices.Clone(b):
		return len(b), nil
	default:
		return 0, errors.New("the buffer is full")
	}
}

func (c *buffered) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.pipeEnd.Close()
}

// act has a program join or leave a page.
func (a *app) act(r *rand.Rand) {
	page := a.s.pages[r.IntN(len(a.s.pages))]

	a.mu.Lock()
	defer a.mu.Unlock()

	if a.joined[page] {
		a.s.log("%s leaves %s", a.user.name, page)
		delete(a.joined, page)
		delete(a.arrival, page)
		a.todo <- func() { a.client.Leave(page) }
		return
	}

	a.s.log("%s joins %s", a.user.name, page)
	a.s.crowd.arrives(a.user, page)
	a.joined[page] = true
	a.arrival[page] = time.Now()
	delete(a.last, page) // counts from before the last leave do not matter any more
	a.todo <- func() { a.client.Join(page) }
}

func (a *app) pages() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Sorted(maps.Keys(a.joined))
}

// isConnected reports whether the client is connected to a process that lives. The client may not have noticed a death
// yet.
func (a *app) isConnected() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.connected && a.at != nil && !a.at.ended()
}

// read checks what the client reports to its program.
func (a *app) read(ctx context.Context) {
	for {
		update, err := a.client.Next(ctx)
		if err != nil {
			return
		}

		switch is := update.(type) {
		case client.Status:
			a.status(is)
		case client.Count:
			a.count(is)
		case client.Unread:
			if is != 0 {
				a.s.broken("–", "%s, who follows nothing, was told that %d are unread", a.user.name, is)
			}
		case client.Fault:
			a.s.broken("–", "%s was refused: %v", a.user.name, is)
		}
	}
}

func (a *app) status(is client.Status) {
	a.mu.Lock()
	defer a.mu.Unlock()

	a.s.detail("%s is connected: %t, %v", a.user.name, is.Connected, is.Err)
	a.connected = is.Connected
	if is.Connected {
		for page := range a.joined {
			a.arrival[page] = time.Now()
		}
	}
}

func (a *app) count(is client.Count) {
	a.s.crowd.told(a.user.name, is.Page, is.Count, is.Stale)
	v := presence.Version(is.Version)

	a.mu.Lock()
	old, known := a.last[is.Page]
	a.last[is.Page] = is
	arrived, arrives := a.arrival[is.Page]
	first := arrives && !is.Stale
	if first {
		delete(a.arrival, is.Page)
	}
	a.mu.Unlock()

	a.s.detail("%s: %s = %d, %s stale %t", a.user.name, is.Page, is.Count, v, is.Stale)
	if known && is.Version.Before(old.Version) && is.Version != (client.Version{}) {
		a.s.broken("ordered", "%s was told version %s of %s after %s", a.user.name, v, is.Page,
			presence.Version(old.Version))
	}
	if first && time.Since(arrived) < arrivesWithin && a.s.store.past.lacks(is.Page, v, a.user.hash) {
		a.s.broken("own join", "the first count of %s after a join of %s is %d, of version %s, without the user",
			is.Page, a.user.name, is.Count, v)
	}
}

// check compares what the program knows at rest with the model.
func (a *app) check(truth map[string]int) {
	if !a.isConnected() {
		a.s.broken("newest", "%s is not connected", a.user.name)
		return
	}

	for _, page := range append(a.pages(), presence.AllPages) {
		is, known := a.client.Count(page)
		if !known || is.Stale || is.Count != int64(truth[page]) {
			a.s.broken("newest", "%s knows %+v of %s (%t); want %d", a.user.name, is, page, known, truth[page])
		}
	}
}
