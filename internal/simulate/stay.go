package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"headcount/client"
)

// A Gateway is a gateway to which a Crowd's clients connect.
type Gateway struct {
	Name string // for people
	URL  string
	Up   func() bool // reports whether it should answer
}

// A CrowdConfig says who is in a Crowd.
type CrowdConfig struct {
	Gateways []Gateway
	Pages    []string
	Stayers  int // users who are always there, every fifth of them on two pages
	Churners int // users who come, change pages and go while Churn runs, one of three on two pages
	Watchers int // clients for each gateway that subscribe to every page
}

// A Crowd is for tests that break a cluster. Some of its users stay: they reconnect at once when they lose their
// connection. Its clients check all the time what must hold in spite of every fault, and Wrongs returns what did not:
// no count is negative, no version goes back on a connection, no count is lower than the number of users who stay, and
// no frame of these users is refused.
type Crowd struct {
	*crowd
	gateways []Gateway
	least    map[string]int64 // by page: how many users stay
	guard    atomic.Bool      // no count may be below least
	churners []*churner
	watching [][]*tab // the watchers of each gateway
}

type churner struct {
	user *user
	tabs []*tab
}

// NewCrowd lets the users come who stay, and waits until all counts are exact.
func NewCrowd(ctx context.Context, cfg CrowdConfig) (*Crowd, error) {
	command := &Command{ // the times are the defaults of serve
		LeaveGrace:      2 * time.Second,
		PongTimeout:     5 * time.Second,
		PresenceTimeout: 7 * time.Second,
	}
	for _, g := range cfg.Gateways {
		command.URL = append(command.URL, g.URL)
	}

	c := &Crowd{gateways: cfg.Gateways, least: map[string]int64{}}
	p := plan{pages: cfg.Pages, name: runName(rand.Uint64()), limit: 1 << 20}
	c.crowd = newCrowd(command, p, &processes{})
	c.background.Go(c.watchdog)
	c.openWatchers(cfg)
	c.openStayers(cfg)

	// No churner has come yet, so the truth has only the users who stay.
	for _, page := range c.topics() {
		c.least[page] = c.truth.count(page)
	}

	for range cfg.Churners {
		c.churners = append(c.churners, &churner{user: c.newUser()})
	}

	err := c.awaitPlaces(ctx, c.everyone())
	if err == nil {
		_, err = c.Exact(ctx, time.Now(), nil)
	}

	if err != nil {
		c.Close()
		return nil, fmt.Errorf("when the users came: %w", err)
	}

	// Only now, because counts were lower until all had arrived.
	c.guard.Store(true)
	return c, nil
}

func (c *Crowd) openWatchers(cfg CrowdConfig) {
	c.watching = make([][]*tab, len(cfg.Gateways))
	for range cfg.Watchers {
		for i := range cfg.Gateways {
			watcher := &tab{user: c.newUser(), watched: holdings(c.topics()), fixed: true, seen: c.seen}
			w := c.start(watcher, i)
			c.watching[i] = append(c.watching[i], w)
		}
	}
}

func (c *Crowd) openStayers(cfg CrowdConfig) {
	for i := range cfg.Stayers {
		u := c.newUser()
		pages := []string{cfg.Pages[i%len(cfg.Pages)]}
		// A user on two pages must count once on the site.
		if i%5 == 0 {
			pages = append(pages, cfg.Pages[(i+1)%len(cfg.Pages)])
		}

		for _, page := range pages {
			c.truth.enter(u, page)
			c.start(&tab{user: u, joined: joining(page), strict: true, seen: c.seen}, i)
		}
	}
}

// Close ends all clients.
func (c *Crowd) Close() {
	c.guard.Store(false)
	c.close()
}

// seen checks each count that a tab receives.
func (c *Crowd) seen(t *tab, n *client.Count, _ time.Time) { c.check(t.name(), n) }

// check checks that a count includes all users who stay.
func (c *Crowd) check(who string, n *client.Count) {
	if !c.guard.Load() {
		return // least may not be complete yet
	}

	least := c.least[n.Page]
	if n.Count < least {
		c.wrong("%s %s: %d of %d users who stay are missing on %q: %+v",
			stamp(), who, least-n.Count, least, n.Page, *n)
	}
}

func stamp() string { return time.Now().UTC().Format("15:04:05.000") }

// Wrongs returns what was wrong since its last call.
func (c *Crowd) Wrongs() []string { return c.faults.take() }

// Lost returns how many connections have ended although their clients did not end them.
func (c *Crowd) Lost() int64 { return c.stats.drops.Load() }

// Churn lets users come and go until the returned function is called. When that has returned, the truth changes no
// more.
func (c *Crowd) Churn(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)

	var work sync.WaitGroup
	work.Go(func() {
		for sleep(ctx, rand.N(100*time.Millisecond)) == nil {
			u := c.churners[rand.IntN(len(c.churners))]
			if rand.IntN(3) == 0 {
				u.stroll(c.pages[rand.IntN(len(c.pages))])
				continue
			}
			if u.leave() {
				continue
			}
			at := rand.IntN(len(c.gateways))
			// A fickle client dials once, so it must find a gateway that answers.
			if !c.gateways[at].Up() {
				continue
			}

			pages := []string{c.pages[rand.IntN(len(c.pages))]}
			second := c.pages[rand.IntN(len(c.pages))]
			if rand.IntN(3) == 0 && second != pages[0] {
				pages = append(pages, second)
			}

			for _, page := range pages {
				tab := &tab{user: u.user, joined: joining(page), fickle: true, seen: c.seen}
				u.tabs = append(u.tabs, c.start(tab, at))
			}
		}
	})

	return sync.OnceFunc(func() {
		cancel()
		work.Wait()

		// A tab that is still connecting would change the truth later.
		for _, u := range c.churners {
			for _, tab := range u.tabs {
				for tab.coming() {
					time.Sleep(pollEvery / 5)
				}
			}
		}
	})
}

// stroll takes one tab of the churner to another page.
func (u *churner) stroll(page string) {
	if len(u.tabs) > 0 {
		u.tabs[0].stroll(page)
	}
}

// leave closes the churner's tabs, each with a leave frame or, as often, as a killed browser does. It reports false
// when the churner was away.
func (u *churner) leave() (here bool) {
	for _, tab := range u.tabs {
		if !tab.left() {
			here = true
			tab.leave([]exit{leaveFrame, endsSocket}[rand.IntN(2)])
		}
	}

	u.tabs = nil
	return here
}

// Look calls fn with each count that the watchers of a gateway hold, and reports whether all of them hold a count of
// each page.
func (c *Crowd) Look(gateway int, fn func(client.Count)) (all bool) {
	all = true
	for _, w := range c.watching[gateway] {
		all = w.look(fn) && all
	}

	return all
}

// Get requests a count from a gateway, and checks it.
func (c *Crowd) Get(ctx context.Context, gateway int, page string) (client.Count, error) {
	n, err := c.get(ctx, c.gateways[gateway].URL, page)
	if err == nil {
		c.check("GET from "+c.gateways[gateway].Name, &n)
	}

	return n, err
}

// off returns an error that says which counts of the gateways that are up are wrong or stale.
func (c *Crowd) off(ctx context.Context) error {
	wrong := &faults{}
	for i, g := range c.gateways {
		if !g.Up() {
			continue
		}

		all := c.Look(i, func(n client.Count) {
			want := c.truth.count(n.Page)
			if n.Count != want || n.Stale {
				wrong.add("a watcher of %s: %q is %d (stale: %t, version %s), want %d",
					g.Name, n.Page, n.Count, n.Stale, n.Version, want)
			}
		})
		if !all {
			wrong.add("a watcher of %s lacks counts", g.Name)
		}
	}

	for i, g := range c.gateways {
		for _, page := range c.topics() {
			// Looking at watchers costs nothing, so the gateways are asked only when those are right.
			if wrong.n > 0 || !g.Up() {
				break
			}

			n, err := c.Get(ctx, i, page)
			want := c.truth.count(page)
			if err != nil || n.Count != want || n.Stale {
				wrong.add("GET %q from %s: %+v, %v, want %d", page, g.Name, n, err, want)
			}
		}
	}

	if wrong.n > 0 {
		return errors.New(strings.Join(wrong.take(), "; "))
	}
	return nil
}

// steady is how long counts must stay exact for Exact.
const steady = 1200 * time.Millisecond

// Exact waits until all counts are exact and stay so, and returns how long after since that began. It returns an error
// if that took longer than the promised 10 s plus late, which may be nil.
func (c *Crowd) Exact(ctx context.Context, since time.Time, late func() time.Duration) (time.Duration, error) {
	var begun time.Time
	for {
		limit := settleLimit
		if late != nil {
			limit += late()
		}

		at := time.Now()
		err := c.off(ctx)
		if err != nil && at.Sub(since) > limit {
			return -1, fmt.Errorf("%.1f s later, of %.1f: %w", at.Sub(since).Seconds(), limit.Seconds(), err)
		}

		pause := pollEvery
		switch {
		case err != nil:
			begun = time.Time{} // counts that flicker are not exact
		case begun.IsZero():
			begun = at
		case at.Sub(begun) >= steady:
			return begun.Sub(since), nil
		default:
			pause = 4 * pollEvery
		}

		if err := sleep(ctx, pause); err != nil {
			return -1, err
		}
	}
}

// A Ghost is a wrong count that no arrival or departure within the promised time explains.
type Ghost struct {
	By    int64  // distance from the truth
	Where string // which watcher held it, and when
}

// Observe compares the counts that watchers hold and that are not stale with the truth, until stop is called. stop
// returns the worst ghost. late is as for Exact.
func (c *Crowd) Observe(ctx context.Context, late func() time.Duration) (stop func() Ghost) {
	ctx, cancel := context.WithCancel(ctx)
	var worst Ghost

	var work sync.WaitGroup
	work.Go(func() {
		for round := 0; sleep(ctx, 2*pollEvery) == nil; round++ {
			since := time.Now().Add(-settleLimit - late())
			for i, g := range c.gateways {
				c.Look(i, func(n client.Count) {
					by := c.truth.distance(n.Page, n.Count, since)
					if n.Stale || by <= worst.By {
						return
					}
					worst = Ghost{by, fmt.Sprintf("%s a watcher of %s: %q is %d, want %d",
						stamp(), g.Name, n.Page, n.Count, c.truth.count(n.Page))}
				})
			}

			at := round % len(c.gateways)
			if c.gateways[at].Up() { // Get checks the count
				_, _ = c.Get(ctx, at, c.topics()[round%(len(c.pages)+1)])
			}
		}
	})

	return func() Ghost {
		cancel()
		work.Wait()
		return worst
	}
}

// name returns the name of the tab, for people.
func (c *tab) name() string {
	return cmp.Or(c.user.name, "client") + " " + strconv.FormatUint(c.number, 10)
}
