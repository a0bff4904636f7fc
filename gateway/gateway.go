// Package gateway holds the connections of browsers: it is the ground truth of
// who is here, tells the presence nodes, and delivers the counts that come
// back, over WebSockets, event streams and plain HTTP.
package gateway

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/unread"
)

// budgetPerCore leaves half of what a core can deliver to everything else.
const budgetPerCore = 60_000

// ErrConfig is in every error about settings that cannot work.
var ErrConfig = errors.New("bad setting")

// Store is what a gateway needs of a store.
type Store interface {
	presence.Counters
	presence.Endpoints
}

// Config tunes a Gateway. A zero duration takes its default.
type Config struct {
	Name       string // this gateway's, in the endpoint store and as a source of beats; required
	Partitions int    // P; default presence.DefaultPartitions
	// Incarnation of this life of the process, as a source of beats; default the
	// time in unix milliseconds.
	Incarnation uint64

	Store Store
	// Unread keeps changes and follows; what it publishes comes as counts do. Required.
	Unread unread.Store
	// Alive reports whether the life of another gateway, "name/incarnation", still
	// lasts. It must not block. Default: there is no other.
	Alive func(life string) bool
	// Send carries a beat to the owner of its partition. It must not block and
	// may lose it.
	Send func(*heartbeat.Beat)
	// Hold takes or ends a user's hold on a page and returns when the store has
	// it. An error says that it may not have been.
	Hold func(ctx context.Context, u presence.User, page string, on bool) error
	// Region is this region's name, and Parts reads a count with each region's
	// share; nil: this region has all of it.
	Region string
	Parts  func(ctx context.Context, page string) (presence.Count, []presence.Part, error)
	// Ready says why the other roles cannot be used yet, or nil.
	Ready func() error

	HeartbeatInterval time.Duration // default 2s
	LeaveGrace        time.Duration // after a connection ends without a leave; 0 is none
	UpdateInterval    time.Duration // default 250ms, at least 10ms
	PingInterval      time.Duration // default 15s
	PongTimeout       time.Duration // default 5s
	WriteTimeout      time.Duration // default 5s
	ShutdownTimeout   time.Duration // default 30s; half of it at most is for clients to move
	MaxConnections    int           // default 100,000
	DeliveryBudget    int           // deliveries/s before the intervals of the largest pages grow; default 60,000 a core

	// Dashboard returns what an operator sees, as JSON. Nil: there is no dashboard.
	Dashboard func(ctx context.Context) ([]byte, error)

	Identities *Identities
	APIKeys    []string // for calls from servers; without any there are none
	Origins    *Origins
	Proxies    *Proxies
	Assets     fs.FS // index.html is served at /, the others under /-/
	Log        zerolog.Logger
}

// Gateway serves clients. Its methods may be called from any goroutine.
type Gateway struct {
	cfg         Config
	hub         *hub
	roster      *roster
	followers   *followers
	keys        apiKeys
	limiter     *addressLimiter
	metrics     *metrics
	handler     http.Handler
	speakers    speakers
	conns       sync.WaitGroup // connections, and what they start
	entry       sync.Mutex     // orders reserve and Drain: no connection begins once draining is set
	connections atomic.Int64
	started     atomic.Bool // has been ready once: from then on there is always something to serve
	draining    atomic.Bool
}

// New returns a Gateway that does nothing until Run, and whose Handler answers
// 503 where it would have to.
func New(cfg Config) (*Gateway, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	cfg.HeartbeatInterval = cmp.Or(cfg.HeartbeatInterval, 2*time.Second)
	cfg.UpdateInterval = cmp.Or(cfg.UpdateInterval, 250*time.Millisecond)
	cfg.PingInterval = cmp.Or(cfg.PingInterval, 15*time.Second)
	cfg.PongTimeout = cmp.Or(cfg.PongTimeout, 5*time.Second)
	cfg.WriteTimeout = cmp.Or(cfg.WriteTimeout, 5*time.Second)
	cfg.ShutdownTimeout = cmp.Or(cfg.ShutdownTimeout, 30*time.Second)
	cfg.MaxConnections = cmp.Or(cfg.MaxConnections, 100_000)
	switch {
	case cfg.Name == "":
		return nil, fmt.Errorf("gateway: %w: it has no name", ErrConfig)
	case cfg.UpdateInterval < 10*time.Millisecond:
		return nil, fmt.Errorf("gateway: %w: update interval %s is under 10ms", ErrConfig, cfg.UpdateInterval)
	case cfg.Store == nil || cfg.Unread == nil || cfg.Send == nil || cfg.Hold == nil || cfg.Ready == nil:
		return nil, fmt.Errorf("gateway: %w: it has no store or nobody to send to", ErrConfig)
	case cfg.Identities == nil || cfg.Origins == nil || cfg.Proxies == nil || cfg.Assets == nil:
		return nil, fmt.Errorf("gateway: %w: identities, origins, proxies and assets are required", ErrConfig)
	}
	cfg.Incarnation = cmp.Or(cfg.Incarnation, uint64(time.Now().UnixMilli()))
	g := &Gateway{cfg: cfg, limiter: newAddressLimiter(), keys: newAPIKeys(cfg.APIKeys)}
	read, err := lru.New[string, presence.Count](recentPages)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	g.hub = &hub{name: cfg.Name, store: cfg.Store, log: cfg.Log, wake: make(chan struct{}, 1), read: read, pages: map[string]*watched{}}
	live := liveness{ping: cfg.PingInterval, pong: cfg.PongTimeout}
	shards := runtime.GOMAXPROCS(0)
	budget := float64(cmp.Or(cfg.DeliveryBudget, budgetPerCore*shards)) / float64(shards)
	for range shards {
		s := newShard(g.hub, cfg.UpdateInterval, budget, live)
		var err error
		if s.poller, err = newPoller(); err != nil && !errors.Is(err, errNoPoller) {
			return nil, err
		}
		g.hub.shards = append(g.hub.shards, s)
	}
	g.followers = newFollowers(g, LifeName(cfg.Name, cfg.Incarnation), cfg.Unread, cfg.Alive)
	g.hub.topics = g.followers.update
	source := heartbeat.Source{Gateway: cfg.Name, Incarnation: cfg.Incarnation}
	g.roster = newRoster(source, cfg.Partitions, cfg.HeartbeatInterval, cfg.LeaveGrace, cfg.Send)
	g.roster.ready = g.joined
	g.metrics = newMetrics(g)
	g.handler = g.routes()
	return g, nil
}

// joined is told by the roster what an acknowledgement brought: a count, or
// that c's join is in the store.
func (g *Gateway) joined(c *conn, page string, count presence.Count) {
	if count.Page != "" {
		g.hub.acknowledged(count)
	}
	if c == nil {
		return
	}
	// The hub has a count that includes the join, but whoever brought it may
	// still be on the way to the shard with it.
	if last, known := g.hub.last(page); known {
		c.shard.update(last)
	}
	c.shard.ready(c, page)
}

// Handler serves the public contract.
func (g *Gateway) Handler() http.Handler { return g.handler }

// Collectors are the gateway's metrics.
func (g *Gateway) Collectors() []prometheus.Collector { return g.metrics.collectors() }

// Ready says why no new clients should be sent here now, or nil.
func (g *Gateway) Ready() error {
	if g.draining.Load() {
		return errDraining
	}
	return g.ready()
}

func (g *Gateway) ready() error {
	err := g.cfg.Ready()
	if err == nil {
		g.started.Store(true)
	}
	return err
}

// serving says why nothing can be served yet, or nil. What has been ready once
// serves on: without its store it has the last known counts.
func (g *Gateway) serving() error {
	if g.started.Load() {
		return nil
	}
	return g.ready()
}

const goodbye = "this gateway is shutting down"

var errDraining = errors.New(goodbye)

// Run owns the gateway's goroutines but those of connections, which Drain ends.
func (g *Gateway) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { g.roster.run(ctx) })
	wg.Go(func() { g.hub.run(ctx) })
	wg.Go(func() { g.followers.run(ctx) })
	for _, s := range g.hub.shards {
		wg.Go(func() { s.run(ctx) })
		wg.Go(func() { s.poller.run(ctx) })
	}
	wg.Wait()
	return nil
}

// OwnersChanged has every user of the partitions named to their new owner at
// once, instead of when it asks. Any goroutine may call it.
func (g *Gateway) OwnersChanged(partitions []int) {
	for _, id := range partitions {
		g.roster.movedTo(id)
	}
}

// OthersChanged says that what Alive answers has changed.
func (g *Gateway) OthersChanged() { g.followers.othersChanged() }

// StoreAway says that the store cannot be reached: counts are stale from now
// on. StoreBack says that it can be again: everything is read anew.
func (g *Gateway) StoreAway() { g.hub.away() }

// StoreBack ends StoreAway.
func (g *Gateway) StoreBack() {
	g.hub.back()
	g.followers.storeBack()
}

// moveRate is how many clients a second a draining gateway sends elsewhere, as
// long as there is time.
const moveRate = 1000

// Drain sends the clients away: they are told to connect again after a jittered
// time, those that are left then are closed with 1012, and Drain returns when
// all are gone; those that would not go until ctx ends are cut off. Their users
// stay counted for the grace. Run must still be running.
func (g *Gateway) Drain(ctx context.Context) error {
	g.entry.Lock()
	g.draining.Store(true)
	g.entry.Unlock()
	window := time.Duration(g.connections.Load()) * time.Second / moveRate
	window = min(max(window, time.Second), g.cfg.ShutdownTimeout*2/5)
	g.each(func(c *conn) {
		if c.events {
			return
		}
		after := rand.N(window)
		_ = c.send(frameText, appendReconnect(nil, after)) // who has gone need not know
	})
	g.settle(ctx, window+window/10)
	g.each(func(c *conn) { _ = c.end(websocket.StatusServiceRestart, goodbye) })
	done := make(chan struct{})
	go func() { // ends with the last connection, which each below sees to
		g.conns.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		g.each(func(c *conn) { c.dead() }) // they had their time
		<-done
	}
	g.followers.depart(ctx)
	return nil
}

// settle waits until no connections are left, or d has passed.
func (g *Gateway) settle(ctx context.Context, d time.Duration) {
	end := time.NewTimer(d)
	defer end.Stop()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for g.connections.Load() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-end.C:
			return
		case <-look.C:
		}
	}
}

func (g *Gateway) each(do func(*conn)) {
	for _, s := range g.hub.shards {
		s.mu.Lock()
		seats := slices.Clone(s.conns)
		s.mu.Unlock()
		for _, seat := range seats {
			do(seat.conn)
		}
	}
}
