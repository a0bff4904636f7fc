// Package gateway holds the connections of browsers. It knows first-hand who is
// here, reports this to the presence nodes, and delivers the counts that come
// back over WebSockets, event streams and plain HTTP.
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
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"headcount/counter/limit"
	"headcount/gateway/counterapi"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/notifier"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/minutes"
	"headcount/unread"
)

// budgetPerCore leaves half of what a core can deliver to everything else.
const budgetPerCore = 60_000

// ErrConfig is wrapped by every error about a setting that cannot work.
var ErrConfig = errors.New("bad setting")

// Store is the part of a store that a gateway uses.
type Store interface {
	presence.Updates
	presence.Endpoints
}

// Cluster reaches the other roles, in this process or in others.
type Cluster interface {
	Beats
	// Hold takes (on) or ends a user's hold on a page. It returns when the store has
	// the change. After an error the store may or may not have it.
	Hold(ctx context.Context, u presence.User, page string, on bool) error
	// Ready says why the other roles cannot be used yet, or nil.
	Ready() error
}

// Regions reads a count with each region's share.
type Regions interface {
	Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error)
}

// Dashboard returns the dashboard's data about a site as JSON; alone leaves out what is of
// all sites.
type Dashboard interface {
	JSON(ctx context.Context, site presence.Site, alone bool) ([]byte, error)
}

// Memory reports whether the process uses so much memory that it must refuse new
// connections.
type Memory interface{ High() bool }

// Config tunes a Gateway. Its durations and MaxConnections are required, unless a comment says what zero means.
type Config struct {
	Name       string // names this gateway as a source of beats; required
	Partitions int    // P; default presence.DefaultPartitions
	// Incarnation numbers this life of the process. Beats carry it, and the endpoint
	// store has it beside the name. Default: a new one of now.
	Incarnation uint64

	Store Store
	// Unread keeps changes and follows. Its publications arrive the way counts do.
	// Required.
	Unread unread.Store
	// Cluster is required.
	Cluster Cluster
	// HoldTime is how long a hold lasts if it is not renewed.
	HoldTime time.Duration
	// Region is the name of this region. Regions reads each region's share of a count;
	// nil means that there is no other region.
	Region  string
	Regions Regions

	// PageStats is how long the minutes of pages are kept, and Minutes has them. 0: they
	// are not kept.
	PageStats time.Duration
	Minutes   minutes.Store

	// Counters serves counters that last; nil: there are none.
	Counters *counterapi.Config

	HeartbeatInterval time.Duration
	ComeBack          time.Duration // after the start, for those who were here before it; 0: the store remembers them
	LeaveGrace        time.Duration // how long a user still counts after a connection that ended without a leave; 0: not at all
	UpdateInterval    time.Duration // at least 10ms
	PingInterval      time.Duration
	PongTimeout       time.Duration
	WriteTimeout      time.Duration
	ShutdownTimeout   time.Duration // clients get at most half of it to move
	MaxConnections    int
	MaxPerAddress     int    // connections of one address; 0: any number
	Memory            Memory // while it is high, new connections are refused; nil: no such check
	DeliveryBudget    int    // deliveries/s before the intervals of the largest pages grow; default 60,000 a core

	Dashboard Dashboard // nil: no dashboard is served

	Identities *identity.Identities
	APIKeys    []string        // servers call with one of these; empty: no server may call. One may begin with the name of its site and a colon
	Sites      *identity.Sites // nil: the default one
	Origins    *identity.Origins
	Proxies    *identity.Proxies
	Assets     fs.FS  // index.html is served at /, the other files under /-/
	BasePath   string // everything is served below this path, such as /live; empty: below the root

	Tracer     trace.Tracer          // traces requests; nil: nothing is traced
	Registerer prometheus.Registerer // registers the gateway's metrics; nil: they are not registered
	Log        zerolog.Logger
}

// Gateway serves clients. Its methods may be called from any goroutine.
type Gateway struct {
	cfg      Config
	hub      *fanout.Hub
	roster   *roster
	unread   *notifier.Sums
	counters *counterapi.API  // nil, like live, if there are no counters
	live     *counterapi.Live //
	pollers  *pollers
	keys     identity.SiteKeys
	limiter  *httppolicy.Limiter
	slots    *httppolicy.AddressSlots
	// What clients may bring of pages that the gateway does not have yet.
	addressPages *httppolicy.Rates
	newPages     *httppolicy.Rates // its one caller is everybody
	erasures     erasures
	comebacks    *comebacks
	metrics      *metrics
	handler      http.Handler
	conns        sync.WaitGroup // connections, and the goroutines that they start
	entry        sync.Mutex     // orders reserve and Drain: no connection begins once draining is set
	connections  atomic.Int64
	started      atomic.Bool // the gateway was ready once; from then on it always has counts to serve
	draining     atomic.Bool
	shut         atomic.Pointer[error] // why no new client can be accepted; nil: clients are accepted
}

// New returns a Gateway that does nothing until Run. Until the cluster is ready,
// its Handler answers 503 to requests that need the cluster.
func New(cfg Config) (*Gateway, error) {
	cfg.Partitions = cmp.Or(cfg.Partitions, presence.DefaultPartitions)
	switch {
	case cfg.Name == "":
		return nil, fmt.Errorf("gateway: %w: it has no name", ErrConfig)
	case cfg.UpdateInterval < 10*time.Millisecond:
		return nil, fmt.Errorf("gateway: %w: update interval %s is under 10ms", ErrConfig, cfg.UpdateInterval)
	case cfg.Store == nil || cfg.Unread == nil || cfg.Cluster == nil:
		return nil, fmt.Errorf("gateway: %w: it has no store or no cluster", ErrConfig)
	case cfg.Identities == nil || cfg.Origins == nil || cfg.Proxies == nil || cfg.Assets == nil:
		return nil, fmt.Errorf("gateway: %w: identities, origins, proxies and assets are required", ErrConfig)
	}
	keys, err := setSites(&cfg)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w: %w", ErrConfig, err)
	}
	cfg.Incarnation = cmp.Or(cfg.Incarnation, presence.NewIncarnation(time.Now()))
	g := &Gateway{
		cfg: cfg, keys: keys,
		limiter: httppolicy.NewLimiter(limit.PerSecond(holdRate, holdBurst), cfg.HoldTime), slots: httppolicy.NewAddressSlots(cfg.MaxPerAddress),
		addressPages: httppolicy.NewRates(addressPageRate, addressPageBurst), newPages: httppolicy.NewRates(gatewayPageRate, gatewayPageBurst),
		erasures: newErasures(),
	}
	cores := runtime.GOMAXPROCS(0)
	life := presence.LifeName(cfg.Name, cfg.Incarnation)
	if g.hub, err = fanout.New(fanout.Config{
		Life: life, Store: cfg.Store, Numbers: unreadEncoder{},
		Shards: cores, Interval: cfg.UpdateInterval, Budget: float64(cmp.Or(cfg.DeliveryBudget, budgetPerCore*cores)),
		Ping: cfg.PingInterval, Pong: cfg.PongTimeout, Log: cfg.Log,
	}); err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	if g.pollers, err = newPollers(cores); err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	g.comebacks = newComebacks(cfg, g.hub)
	g.unread = notifier.New(notifier.Config{
		Store: cfg.Unread, Hub: g.hub, Group: &g.conns, Rest: cfg.UpdateInterval, Log: cfg.Log,
	})
	g.openCounters()
	g.registerKinds()
	source := heartbeat.Source{Gateway: cfg.Name, Incarnation: cfg.Incarnation}
	g.roster = newRoster(source, cfg.Partitions, cfg.HeartbeatInterval, cfg.LeaveGrace, cfg.Cluster, g.hub)
	g.metrics = newMetrics(g, cfg.Registerer)
	g.roster.seen = g.metrics.seen
	g.handler = below(cfg.BasePath, g.routes())
	return g, nil
}

// Receive takes a presence node's answer to a beat. It does not block.
func (g *Gateway) Receive(r *heartbeat.Reply) { g.roster.receive(r) }

// Push takes updates, in any order, repeated or not. It does not block.
func (g *Gateway) Push(updates []presence.Update) {
	for _, u := range updates {
		g.hub.Update(u)
	}
}

// Handler serves the public contract.
func (g *Gateway) Handler() http.Handler { return httppolicy.Shared(g.handler) }

// Ready says why no new clients should be sent here now, or nil.
func (g *Gateway) Ready() error {
	if err := g.Open(); err != nil {
		return err
	}
	return g.ready()
}

// Open is Ready whatever the store does: it says why no client can come in at all, or nil.
func (g *Gateway) Open() error {
	if g.draining.Load() {
		return errDraining
	}
	if err := g.shut.Load(); err != nil {
		return *err
	}
	return nil
}

func (g *Gateway) ready() error {
	err := g.cfg.Cluster.Ready()
	if err == nil {
		g.started.Store(true)
	}
	return err
}

// serving says why nothing can be served yet, or nil. A gateway that was ready once
// serves for ever: without its store it has the last known counts.
func (g *Gateway) serving() error {
	if g.started.Load() {
		return nil
	}
	return g.ready()
}

const goodbye = "this gateway is shutting down"

var errDraining = errors.New(goodbye)

// Run owns the gateway's goroutines, except those of connections: Drain ends and
// awaits these. Run returns when ctx has ended and its goroutines have stopped.
func (g *Gateway) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { g.roster.run(ctx) })
	wg.Go(func() { g.hub.Run(ctx) })
	wg.Go(func() { g.unread.Run(ctx) })
	wg.Go(func() { g.comebacks.run(ctx) })
	if g.live != nil {
		wg.Go(func() { g.live.Run(ctx) })
	}
	for _, p := range g.pollers.all {
		wg.Go(func() { p.Run(ctx) })
	}
	wg.Wait()
	return nil
}

// OwnersChanged reports every user of these partitions to the new owner at once,
// before the owner asks. Any goroutine may call it.
func (g *Gateway) OwnersChanged(partitions []int) {
	for _, id := range partitions {
		g.roster.movedTo(id)
	}
}

// StoreAway says that the store cannot be reached: counts are stale until
// StoreBack.
func (g *Gateway) StoreAway() { g.hub.Away() }

// StoreBack says that the store can be reached again: everything is read anew.
func (g *Gateway) StoreBack() {
	g.hub.Back()
	g.unread.StoreBack()
}

// moveRate is how many clients a second a draining gateway sends elsewhere, as
// long as there is time.
const moveRate = 1000

// Drain sends the clients away and returns when every connection is gone. First
// each client is told to connect again after a jittered time. Drain then closes
// the connections that are left with 1012. When ctx ends, it cuts off the rest.
// The users stay counted for the grace. Run must still be running.
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
		_ = c.send(websocket.Text, appendReconnect(nil, after)) // an error means that the client has gone already
	})
	g.settle(ctx, window+window/10)
	g.each(func(c *conn) { _ = c.end(websocket.StatusServiceRestart, goodbye) })
	done := make(chan struct{})
	go func() { // ends with the last connection; Close below ends them all
		g.conns.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		g.each(func(c *conn) { _ = c.Close() }) // the clients had their time
		<-done
	}
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
	for _, client := range g.hub.Clients() {
		do(client.(*conn)) // every client of the hub is a *conn
	}
}

// pollers serve the connections whose clients have sent something. Each connection
// belongs to one poller.
type pollers struct {
	all  []*socket.Poller
	last atomic.Uint64 // spreads connections over the pollers
}

func newPollers(n int) (*pollers, error) {
	ps := &pollers{}
	for range n {
		p, err := socket.NewPoller()
		if err != nil {
			return nil, err
		}
		ps.all = append(ps.all, p)
	}
	return ps, nil
}

func (p *pollers) next() *socket.Poller { return p.all[p.last.Add(1)%uint64(len(p.all))] }
