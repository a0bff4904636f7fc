package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"headcount/client"
)

// A crowd has all clients of a run and the truth about them. Its driver is the goroutine that runs the plan; the
// goroutines of clients only report to it.
type crowd struct {
	plan
	cfg    *Command
	rng    *rand.Rand // the driver's
	truth  *truth
	settle time.Duration // within which counts must be right
	began  time.Time
	result Report // what the driver adds to the report

	stats     stats
	faults    faults
	server    *processes
	http      *http.Client
	dialing   chan struct{} // one value per handshake under way
	heartbeat atomic.Int64  // from welcome, ns
	phase     atomic.Pointer[string]
	deaf      atomic.Bool // while it is set, slow clients do not read

	baseline   int64 // the count of `*` before the run
	users      int   // how many there were so far
	probes     probes
	background sync.WaitGroup // the watchdog
	graves     []*socket      // open sockets of clients that fell silent for ever; the driver's
	stop       chan struct{}  // closed to end the watchdog

	clients struct {
		sync.Mutex
		live map[*tab]struct{} // whose run has not returned
		made uint64            // how many there were so far
		wait sync.WaitGroup
	}

	// ended has what departures and lost connections leave behind. Its lock is a leaf: who holds it takes no other
	// lock.
	ended struct {
		sync.Mutex
		quietAt      time.Time // when the server must have noticed all of them
		disturbances int       // how many there were so far
		failure      error     // the newest one
	}
}

const (
	maxDials    = 256             // handshakes at once; further ones wait
	maxGraves   = 512             // at once; for a further one the oldest is closed
	silentExtra = 2 * time.Second // that the contract adds for a silent connection
	orphanExtra = 3 * time.Second // that the contract adds for the users of a dead gateway
	watchPages  = 99              // pages of one watcher, with `*` the 100 that a connection may have
)

func newCrowd(cfg *Command, p plan, server *processes) *crowd {
	c := &crowd{
		plan:   p,
		cfg:    cfg,
		rng:    rand.New(rand.NewPCG(cfg.Seed, 0)),
		truth:  newTruth(),
		settle: cmp.Or(cfg.settle, settleLimit),
		began:  time.Now(),
		result: Report{SiteChecked: true, Figures: map[string]float64{}},
		server: server,

		http: &http.Client{
			Timeout:   5 * time.Second,
			Transport: &http.Transport{MaxIdleConnsPerHost: getsAtOnce},
		},
		dialing: make(chan struct{}, maxDials),
		stop:    make(chan struct{}),
	}
	c.clients.live = map[*tab]struct{}{}
	// The server's default; the first welcome brings the actual interval.
	c.heartbeat.Store(int64(15 * time.Second))

	c.enterPhase("connecting")

	return c
}

// runName tells runs on the same server apart.
func runName(seed uint64) string {
	return "sim-" + strconv.FormatUint(seed, 36) + "-" + strconv.FormatInt(time.Now().UnixMilli(), 36)
}

// open waits for the gateways, starts the watchdog and the watchers, and reads
// the baseline.
func (c *crowd) open(ctx context.Context) error {
	if err := c.awaitGateways(ctx); err != nil {
		return err
	}

	c.background.Go(c.watchdog)
	if len(c.pages) == 0 {
		c.result.SiteChecked = false // the run is not about presence
		return nil
	}

	// Every page has a watcher at every gateway, so that a checkpoint also sees gateways without visitors of a page.
	for batch := range slices.Chunk(c.pages, watchPages) {
		all := append(slices.Clone(batch), wholeSite)
		for gateway := range c.cfg.URL { // watchers are on no page
			c.start(&tab{user: c.newUser(), watched: holdings(all)}, gateway)
		}
	}

	if err := c.awaitPlaces(ctx, c.everyone()); err != nil {
		return err
	}

	return c.readBaseline(ctx)
}

// holdings returns what a client holds of pages that it is about to subscribe to.
func holdings(pages []string) []holding {
	hs := make([]holding, len(pages))
	for i, page := range pages {
		hs[i].Page = page
	}

	return hs
}

// enter opens a tab of u on the page; every 16th tab watches `*` as well.
func (c *crowd) enter(ctx context.Context, u *user, page string) (*tab, error) {
	if err := c.makeRoom(ctx); err != nil {
		return nil, err
	}

	tab := &tab{user: u, joined: joining(page)}
	// Only some tabs, because the count of the site changes so often that it would be most of what they receive.
	if c.clients.made%16 == 0 {
		tab.watched = holdings([]string{wholeSite})
	}

	// Before the tab connects, because a checkpoint waits for all tabs before it compares.
	c.truth.enter(u, page)

	return c.start(tab, int(c.clients.made)%len(c.cfg.URL)), nil
}

// move takes a tab to another page.
func (c *crowd) move(tab *tab, page string) {
	c.truth.exit(tab.user, tab.joined.Page)
	c.truth.enter(tab.user, page)
	tab.move(page)
}

// leave ends a tab.
func (c *crowd) leave(tab *tab, how exit) {
	c.truth.exit(tab.user, tab.joined.Page)
	tab.leave(how)
}

func (c *crowd) newUser() *user {
	c.users++
	return newUser(c.name + "-u" + strconv.Itoa(c.users))
}

// start runs a client until it leaves. It dials this gateway first.
func (c *crowd) start(tab *tab, gateway int) *tab {
	tab.crowd = c
	tab.stays, tab.quit = context.WithCancel(context.Background())
	tab.user.add(tab)

	c.clients.Lock()
	defer c.clients.Unlock()

	c.clients.made++
	tab.number = c.clients.made
	tab.gateway = gateway
	c.clients.live[tab] = struct{}{}
	c.clients.wait.Go(tab.run)
	return tab
}

// forget is the last thing a client's goroutine does.
func (c *crowd) forget(tab *tab) {
	tab.user.remove(tab)

	c.clients.Lock()
	defer c.clients.Unlock()
	delete(c.clients.live, tab)
}

// makeRoom waits until one more client may start. Clients that are closing still have a socket, so they count.
func (c *crowd) makeRoom(ctx context.Context) error {
	for {
		c.clients.Lock()
		n := len(c.clients.live)
		c.clients.Unlock()

		if n < c.limit {
			return ctx.Err()
		}

		if err := sleep(ctx, pollEvery/5); err != nil {
			return err
		}
	}
}

// everyone returns the clients that are meant to be there.
func (c *crowd) everyone() []*tab {
	c.clients.Lock()
	defer c.clients.Unlock()

	return slices.DeleteFunc(slices.Collect(maps.Keys(c.clients.live)), (*tab).left)
}

// close ends everything that open and the driver started, and waits for it.
func (c *crowd) close() {
	for _, tab := range c.everyone() {
		tab.leave(closesFrame)
	}

	// A server that hangs answers no close frame, but the run must end.
	late := time.AfterFunc(answerLimitOfClose/2, func() {
		c.clients.Lock()
		left := slices.Collect(maps.Keys(c.clients.live))
		c.clients.Unlock()

		for _, tab := range left {
			tab.closeNow()
		}
	})

	c.clients.wait.Wait()
	late.Stop()

	// After the clients, because until then the watchdog ends connections that are dead.
	close(c.stop)
	c.background.Wait()

	for _, s := range c.graves {
		s.fin()
	}

	c.http.CloseIdleConnections()
}

// watchdog samples the server's memory once a second, and ends connections over which nothing comes any more.
func (c *crowd) watchdog() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()

	for {
		select {
		case <-c.stop:
			return
		case now := <-tick.C:
			// A second more than the server promises, because a busy machine delays it.
			ask := c.heartbeatInterval() + time.Second
			for _, tab := range c.everyone() {
				tab.cut(now, ask, ask+c.cfg.PongTimeout)
			}
			c.server.sample()
		}
	}
}

// bury keeps the socket of a client that fell silent open until the end of the run.
func (c *crowd) bury(s *socket) {
	// The server has most likely given up the oldest one.
	if len(c.graves) == maxGraves {
		c.graves[0].fin()
		c.graves = c.graves[1:]
	}

	c.graves = append(c.graves, s)
}

// disturb notes that counts may change for another d, because a user has left or has to come back. Checkpoints wait for
// that.
func (c *crowd) disturb(d time.Duration) {
	c.ended.Lock()
	defer c.ended.Unlock()

	c.ended.disturbances++

	at := time.Now().Add(d)
	// A later disturbance may be over earlier: a leave is noticed sooner than a silence.
	if at.After(c.ended.quietAt) {
		c.ended.quietAt = at
	}
}

// quiet returns when the last disturbance is over, and how many there were.
func (c *crowd) quiet() (at time.Time, disturbances int) {
	c.ended.Lock()
	defer c.ended.Unlock()

	return c.ended.quietAt, c.ended.disturbances
}

// dropped notes a connection that the run did not end. If its gateway has died, its user stays counted until the
// presence nodes notice that.
func (c *crowd) dropped() {
	c.stats.drops.Add(1)
	c.disturb(max(c.cfg.PresenceTimeout+orphanExtra, c.cfg.LeaveGrace))
}

// ghostBound returns how long the user of a silent connection may stay counted.
func (c *crowd) ghostBound() time.Duration {
	return c.heartbeatInterval() + c.cfg.PongTimeout + c.cfg.LeaveGrace + silentExtra
}

func (c *crowd) heartbeatInterval() time.Duration {
	return time.Duration(c.heartbeat.Load())
}

// failed notes why a connection could not be opened or was lost.
func (c *crowd) failed(err error) {
	c.ended.Lock()
	defer c.ended.Unlock()
	c.ended.failure = err
}

// lastFailure returns the newest noted failure. It is never nil.
func (c *crowd) lastFailure() error {
	c.ended.Lock()
	defer c.ended.Unlock()
	return cmp.Or(c.ended.failure, errNone)
}

var (
	errNone     = errors.New("none")
	errNoTokens = errors.New("the server takes no tokens, and knows their users as anonymous: " +
		"leave --jwt-secret out, or start the server with it")
)

// hopeless returns an error when every dial has failed and further ones would fail, too.
func (c *crowd) hopeless() error {
	// After a successful dial a failure is temporary.
	if c.stats.connects.Load() > 0 {
		return nil
	}

	last := c.lastFailure()
	if errors.Is(last, errNoTokens) {
		return last
	}

	var no *client.Error
	if !errors.As(last, &no) {
		return nil
	}

	switch no.Status {
	case http.StatusUnauthorized:
		return fmt.Errorf("the server requires tokens: give --jwt-secret the same value as the server has: %w", no)
	case http.StatusForbidden, http.StatusNotFound, http.StatusUpgradeRequired:
		return fmt.Errorf("the server opens no WebSocket: give --url the address of a gateway: %w", no)
	}

	return nil
}

// wrong notes that the server has broken its contract.
func (c *crowd) wrong(format string, args ...any) { c.faults.add(format, args...) }

// learn stores the server's heartbeat_ms. More than an hour is wrong.
func (c *crowd) learn(beat time.Duration) {
	if beat <= 0 || beat > time.Hour {
		c.wrong("heartbeat_ms is %d", beat.Milliseconds())
		return
	}

	c.heartbeat.Store(int64(beat))
}

func (c *crowd) gateway(n int) string { return c.cfg.URL[n%len(c.cfg.URL)] }

// dialSlot waits for one of the handshakes that may be under way at once.
func (c *crowd) dialSlot(ctx context.Context) (free func(), err error) {
	select {
	case c.dialing <- struct{}{}:
		return func() { <-c.dialing }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// config returns the configuration of a connection or call to a gateway. With tokens it is that of the user with a
// name, and without them that of the user with an id.
func (c *crowd) config(gateway, name, id string) (cfg client.Config, err error) {
	cfg = client.Config{URL: gateway, Site: c.cfg.Site, HTTP: c.http}
	if c.cfg.JWTSecret == "" {
		cfg.ID = id
		return cfg, nil
	}

	cfg.Token, err = c.token(name)
	return cfg, err
}

func (c *crowd) token(subject string) (string, error) {
	// A day is longer than any run, so no token expires during one.
	token, err := jwt.NewWithClaims(jwt.SigningMethodHS256, jwt.RegisteredClaims{
		Subject:   subject,
		IssuedAt:  jwt.NewNumericDate(time.Now()),
		ExpiresAt: jwt.NewNumericDate(time.Now().Add(24 * time.Hour)),
	}).SignedString([]byte(c.cfg.JWTSecret))
	if err != nil {
		return "", fmt.Errorf("sign a token: %w", err)
	}

	return token, nil
}

// exitWay draws how a tab leaves. The tab falls silent only if that is permitted.
func (c *crowd) exitWay(silent bool) exit {
	if c.rng.Float64() >= c.cfg.KillFraction {
		return []exit{leaveFrame, closesFrame}[c.rng.IntN(2)]
	}

	way := []exit{endsSocket, resetSocket, vanishes}[c.rng.IntN(3)]
	if way == vanishes && !silent {
		way = resetSocket
	}

	return way
}
