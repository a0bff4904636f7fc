// Package gateway holds the connections of browsers: WebSockets and event streams. It
// reports the users of these connections to the presence nodes, and delivers the counts
// of pages to the clients. Package api answers plain HTTP calls.
package gateway

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"net/http"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/conn"
	"headcount/gateway/counterapi"
	"headcount/gateway/fanout"
	"headcount/gateway/httppolicy"
	"headcount/gateway/notifier"
	"headcount/gateway/roster"
	"headcount/gateway/socket"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/unread"
)

// budgetPerCore is half of the deliveries a second that one core can make. The other half
// is for all other work.
const budgetPerCore = 60_000

// Cluster reaches the other roles, in this process or in others.
type Cluster interface {
	roster.Beats
	api.Cluster
	// Members returns the live processes, this one among them. Those that leave have no roles.
	Members() []presence.Process
}

// Memory reports whether the process uses so much memory that it must refuse new
// connections.
type Memory interface{ High() bool }

// Config tunes a Gateway. A field without a default is required, unless it says otherwise.
type Config struct {
	Name        string // names this gateway as a source of beats
	Partitions  int    // P; default presence.DefaultPartitions
	Buckets     int    // B; default presence.DefaultBuckets
	Incarnation uint64 // identifies this run of the process in beats and in the endpoint store

	Store    fanout.Store
	Unread   unread.Store // its publications arrive as updates, like counts
	Cluster  Cluster
	API      api.Config // of plain HTTP calls
	Counters counterapi.Config

	Times
	Limits
	api.Access

	// Waits says that an upgrade may have to wait: for a store of unread counts in another process, or for the keys of
	// tokens.
	Waits bool

	Elapsed    func() time.Duration  // goes on while the machine sleeps, see machine.NewStandstill
	Registerer prometheus.Registerer // registers the gateway's metrics; nil: they are not registered
	Log        zerolog.Logger
}

// Times are the durations of a gateway. Those without a comment are required.
type Times struct {
	HeartbeatInterval time.Duration
	ComeBack          time.Duration // how long counts are stale after a restart, see restartDoubt; 0: users are kept
	// LeaveGrace is how long a user counts after a connection that ended without a leave; 0: not at all
	LeaveGrace      time.Duration
	UpdateInterval  time.Duration // at least 10ms
	PingInterval    time.Duration
	PongTimeout     time.Duration
	WriteTimeout    time.Duration
	ShutdownTimeout time.Duration // Drain gives clients at most half of it to move
}

// Limits bound what a gateway serves.
type Limits struct {
	MaxConnections int    // required
	MaxPerAddress  int    // connections of one address; 0: any number
	Memory         Memory // while it is high, new connections are refused; nil: no such check
	DeliveryBudget int    // deliveries/s before the intervals of the largest pages grow; default 60,000 a core
}

// Gateway serves clients. Its methods may be called from any goroutine.
type Gateway struct {
	cfg       Config
	hub       *fanout.Hub
	roster    *roster.Roster
	unread    *notifier.Sums
	counters  *counterapi.API
	live      *counterapi.Live
	liveTop   *counterapi.LiveTop
	users     *fanout.Poll
	topPages  *fanout.Poll
	callers   *api.Callers
	api       *api.API
	pollers   []*socket.Poller
	clients   *conn.Clients
	slots     *bounds.Slots
	newTopics []*bounds.Rates // of an address, and of all
	restart   *restartDoubt
	metrics   *metrics
	handler   http.Handler

	conns     sync.WaitGroup        // connections, and the goroutines that they start
	arriving  sync.WaitGroup        // upgrades that wait, see Config.Waits
	acceptErr atomic.Pointer[error] // why no new client can be accepted; nil: new clients are accepted
}

// New returns a Gateway that does nothing until Run. Until the cluster is ready,
// its Handler answers 503 to requests that need the cluster.
func New(cfg Config) (*Gateway, error) {
	// As many pollers and shards as can run at a time.
	cores := runtime.GOMAXPROCS(0)
	pollers, err := newPollers(cores)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}

	g := &Gateway{
		cfg:     cfg,
		pollers: pollers,
		slots:   bounds.NewSlots(cfg.MaxPerAddress),
		newTopics: []*bounds.Rates{
			bounds.NewRates(bounds.NewTopicsOfAddress), bounds.NewRates(bounds.NewTopicsOfAll),
		},
		metrics: newMetrics(),
	}

	g.hub = fanout.New(fanout.Config{
		Gateway:  presence.IncarnationName(cfg.Name, cfg.Incarnation),
		Store:    cfg.Store,
		Buckets:  cfg.Buckets,
		Numbers:  conn.UnreadEncoder{},
		Shards:   cores,
		Interval: cfg.UpdateInterval,
		Budget:   float64(cmp.Or(cfg.DeliveryBudget, budgetPerCore*cores)),
		Ping:     cfg.PingInterval,
		Pong:     cfg.PongTimeout,
		Elapsed:  cfg.Elapsed,
		Log:      cfg.Log,
	})

	g.restart = newRestartDoubt(cfg, g.hub)
	g.callers = &api.Callers{Access: cfg.Access, Restart: g.restart, Ignored: g.metrics.ignored}

	g.unread = notifier.New(notifier.Config{
		Store: cfg.Unread, Hub: g.hub, Group: &g.conns, Rest: cfg.UpdateInterval, Log: cfg.Log,
	})

	g.live = counterapi.NewLive(cfg.Counters, g.hub)
	g.counters = counterapi.New(cfg.Counters, g.callers, g.live)
	g.liveTop = counterapi.NewLiveTop(g.counters, g.hub)

	g.users = fanout.NewPoll(g.hub, userStates{g})
	g.topPages = fanout.NewPoll(g.hub, topPages{g})
	g.registerKinds()

	g.roster = roster.New(roster.Config{
		Source:     heartbeat.Source{Gateway: cfg.Name, Incarnation: cfg.Incarnation},
		Partitions: cmp.Or(cfg.Partitions, presence.DefaultPartitions),
		Interval:   cfg.HeartbeatInterval,
		Grace:      cfg.LeaveGrace,
		Beats:      cfg.Cluster,
		Counts:     g.hub,
		JoinWait:   g.metrics.joinWait,
	})

	g.clients = conn.New(conn.Config{
		Hub: g.hub, Roster: g.roster, Unread: g.unread, Live: g.live, Counters: g.counters, Callers: g.callers,
		Arrivals: cfg.API.Arrivals, Pollers: pollers, NewTopics: g.newTopics, Limits: g.metrics.limits,
		PingInterval: cfg.PingInterval, WriteTimeout: cfg.WriteTimeout, ShutdownTimeout: cfg.ShutdownTimeout,
		Group: &g.conns, Log: cfg.Log,
	})

	// After the parts whose figures the metrics read.
	if cfg.Registerer != nil {
		g.registerMetrics(cfg.Registerer)
	}

	g.api = api.New(cfg.API, api.Parts{
		Callers: g.callers, Counts: g.hub, NewTopics: g.newTopics, Cluster: cfg.Cluster,
		Unread: cfg.Unread, Follows: g.unread.Follows(), Counters: g.counters,
		Limits: g.metrics.limits, Registerer: cfg.Registerer, Log: cfg.Log,
	})

	g.handler = g.routes() // last: its calls belong to all parts above

	return g, nil
}

// Receive handles a presence node's reply to a beat. It does not block.
func (g *Gateway) Receive(r *heartbeat.Reply) { g.roster.Receive(r) }

// Push hands updates to the hub. They may arrive in any order, and repeatedly. It does not
// block.
func (g *Gateway) Push(updates []presence.Update) {
	for _, u := range updates {
		g.hub.Update(u)
	}
}

// Connected returns the users who are on a page by a connection to this gateway, as conn.Clients.Connected does.
func (g *Gateway) Connected() iter.Seq2[presence.User, string] { return g.clients.Connected() }

// Handler returns the handler of the public contract.
func (g *Gateway) Handler() http.Handler { return httppolicy.Shared(g.handler) }

// Ready returns nil if new clients should be sent to this gateway now, or else the reason
// why not.
func (g *Gateway) Ready() error {
	if err := g.Open(); err != nil {
		return err
	}

	return g.api.Ready()
}

// Open returns nil if the gateway accepts clients at all, or else the reason why not. Unlike
// Ready, it does not depend on the store.
func (g *Gateway) Open() error {
	if err := g.clients.Open(); err != nil {
		return err
	}

	if err := g.acceptErr.Load(); err != nil {
		return *err
	}

	return nil
}

// Run owns the gateway's goroutines, except those of connections: Drain ends and
// awaits these. Run returns when ctx has ended and its goroutines have stopped.
func (g *Gateway) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { g.roster.Run(ctx) })
	wg.Go(func() { g.hub.Run(ctx) })
	wg.Go(func() { g.unread.Run(ctx) })
	wg.Go(func() { g.users.Run(ctx) })
	wg.Go(func() { g.topPages.Run(ctx) })
	wg.Go(func() { g.live.Run(ctx) })
	wg.Go(func() { g.liveTop.Visitors.Run(ctx) })
	wg.Go(func() { g.liveTop.Servers.Run(ctx) })
	for _, p := range g.pollers {
		wg.Go(func() { p.Run(ctx) })
	}

	wg.Wait()
	g.arriving.Wait()
	return nil
}

// OwnersChanged reports every user of these partitions to the new owner at once,
// before the owner asks. Any goroutine may call it.
func (g *Gateway) OwnersChanged(partitions []int) {
	for _, id := range partitions {
		g.roster.MovedTo(id)
	}
}

// StoreAway must be called when the store becomes unavailable: counts are stale until
// StoreBack.
func (g *Gateway) StoreAway() { g.hub.Away() }

// Silent marks the counts of these buckets as stale: their dispatchers do not reach this gateway now.
func (g *Gateway) Silent(buckets []int) { g.hub.Silence(buckets) }

// StoreBack must be called when the store is available again: all topics are read again.
func (g *Gateway) StoreBack() {
	g.hub.Back()
	g.unread.StoreBack()
}

// Drain closes all connections and returns when they have ended, as conn.Clients.Drain does. Run must still be running.
func (g *Gateway) Drain(ctx context.Context) { g.clients.Drain(ctx, g.alone()) }

// alone reports whether no other gateway can serve the clients of this one.
func (g *Gateway) alone() bool {
	return !slices.ContainsFunc(g.cfg.Cluster.Members(), func(p presence.Process) bool {
		return p.Name != g.cfg.Name && slices.Contains(p.Roles, presence.RoleGateway)
	})
}

func newPollers(n int) ([]*socket.Poller, error) {
	pollers := make([]*socket.Poller, n)
	for i := range pollers {
		p, err := socket.NewPoller()
		if err != nil {
			return nil, err
		}
		pollers[i] = p
	}

	return pollers, nil
}
