package member

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/machine"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/ring"
	"headcount/presence/seal"
)

// Store is the part of the region's store that a member itself needs.
type Store interface {
	presence.Processes
	presence.Counters
	// Generation is defined by presence.Partitions.
	Generation(ctx context.Context) (uint64, error)
}

// Gateway is the gateway of this process.
type Gateway interface {
	Receive(r *heartbeat.Reply)
	Push(updates []presence.Update)
	StoreAway()
	StoreBack()
	OwnersChanged(partitions []int)
	Silent(buckets []int)
	Explain(page string) presence.Parts
	Connected() iter.Seq2[presence.User, string]
	Run(ctx context.Context) error
}

// Node is the presence node of this process.
type Node interface {
	Deliver(b *heartbeat.Beat) bool
	Hold(ctx context.Context, change presence.HoldChange) error
	Users(ctx context.Context, users []presence.User) ([]presence.UserState, error)
	Explain(ctx context.Context, page string) (presence.Parts, error)
	Own(partitions []int)
	Owns(partition int) bool
	HandOver()
	Check(share, shares int)
	Gateways(live []heartbeat.Source)
	Died(p presence.Process, seen time.Time)
	Run(ctx context.Context) error
}

// Dispatcher is the dispatcher of this process, or the replicator that shares the
// dispatcher's buckets with other regions.
type Dispatcher interface {
	Own(buckets []int)
	Run(ctx context.Context) error
}

// Datagrams carries beats and replies to other processes. It must not block.
type Datagrams interface {
	SendBeat(to string, b *heartbeat.Beat)
	SendReply(to string, r *heartbeat.Reply)
	SetTable(hash uint64)
	Began(name string)
	Run(ctx context.Context) error
}

// Calls carries updates, holds and questions about users and counts to other processes.
type Calls interface {
	PushUpdates(ctx context.Context, addr string, updates []presence.Update) error
	Hold(ctx context.Context, addr string, change presence.HoldChange) error
	Users(ctx context.Context, addr string, users []presence.User) ([]presence.UserState, error)
	Explain(ctx context.Context, addr, page string) (presence.Parts, error)
}

// Owners are the owners of something other than presence, such as counters. They have their own ring of processes.
type Owners interface {
	// SetProcesses says which processes there are, after each renewal of the lease. One without roles is about to
	// leave. It must not block.
	SetProcesses(processes []presence.Process)
}

// Config describes a member. A zero field takes its default.
type Config struct {
	Self       presence.Process // required
	Partitions int              // P; default presence.DefaultPartitions
	Buckets    int              // B; default presence.DefaultBuckets
	// PresenceTimeout is the silence of a dispatcher after which the counts of its buckets are stale at the latest;
	// default 7s.
	PresenceTimeout time.Duration
	// Loopback says that messages are not signed, so only processes on this machine count
	// as members.
	Loopback   bool
	Clock      *seal.Clock           // set by the renewals of the lease; nil: nobody reads it
	Wall       func() time.Time      // the clock of the machine, compared with the store's; default time.Now
	Elapsed    func() time.Duration  // a clock that does not stop while the machine sleeps, see machine.NewStandstill
	Registerer prometheus.Registerer // registers the member's metrics; nil: there are none
	Log        zerolog.Logger
}

// Parts are the components that a member connects. The part of a role that the process
// does not have is nil.
type Parts struct {
	Store Store
	// Datagrams and Calls reach the other processes. Both are nil when the store belongs
	// to this process alone; such a store is always available.
	Datagrams Datagrams
	Calls     Calls

	Gateway    Gateway
	Node       Node
	Dispatcher Dispatcher
	Regions    Dispatcher // has the same buckets as Dispatcher
	Owners     Owners     // of every role
}

// Member is one process of a cluster. Messages to its own parts go through memory, all
// others through datagrams and calls. Any goroutine may call its methods, except Join.
type Member struct {
	self       presence.Process
	partitions int
	buckets    int
	loopback   bool
	clock      *seal.Clock
	wall       func() time.Time
	log        zerolog.Logger
	parts      Parts
	alone      bool // a cluster of one: there can be no other processes

	table        atomic.Pointer[ring.Table]
	members      atomic.Pointer[[]presence.Process] // the live processes, sorted by name
	view         atomic.Pointer[view]               // nil: not known yet
	up           atomic.Bool                        // the store answers
	read         atomic.Bool                        // complete counts have been read once
	leaving      atomic.Bool
	storeChanged chan struct{} // holds one: up has changed
	renewNow     chan struct{} // holds one: the store is back, or the process leaves
	renewSoon    chan struct{} // holds one: another process has another table

	tableChanges, disagreements prometheus.Counter

	standstill *machine.Standstill // for longer than any caller waits for a hold
	greetings  greetings
	lease      lease // only membership's goroutine uses it

	// renewing is a lock of ended. It is held while the lease is renewed or ended, each of which takes at most
	// renewLimit.
	renewing chan struct{}
	ended    bool // the lease has ended
}

// New returns a member without its parts, which Join adds: the parts reach each other
// through the member, so it has to exist first.
func New(cfg Config) *Member {
	if cfg.Partitions == 0 {
		cfg.Partitions = presence.DefaultPartitions
	}
	if cfg.Buckets == 0 {
		cfg.Buckets = presence.DefaultBuckets
	}
	if cfg.Clock == nil {
		cfg.Clock = &seal.Clock{}
	}
	if cfg.Wall == nil {
		cfg.Wall = time.Now
	}
	if cfg.PresenceTimeout == 0 {
		cfg.PresenceTimeout = 7 * time.Second
	}

	m := &Member{
		standstill:   machine.NewStandstill(presence.HoldTimeout, cfg.Elapsed),
		greetings:    greetings{timeout: cfg.PresenceTimeout, lastGreeted: map[string]time.Time{}},
		self:         cfg.Self,
		partitions:   cfg.Partitions,
		buckets:      cfg.Buckets,
		loopback:     cfg.Loopback,
		clock:        cfg.Clock,
		wall:         cfg.Wall,
		log:          cfg.Log,
		storeChanged: make(chan struct{}, 1),
		renewNow:     make(chan struct{}, 1),
		renewSoon:    make(chan struct{}, 1),
		renewing:     make(chan struct{}, 1),
		lease:        lease{members: map[string]*sighting{}},
		tableChanges: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_ring_changes_total", Help: "Changes of the table of owners of partitions and buckets.",
		}),
		disagreements: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "headcount_ring_disagreements_total",
			Help: "Datagrams from processes that had another table of owners at that moment.",
		}),
	}

	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(m.tableChanges, m.disagreements)
	}

	return m
}

// Join gives the member its parts. It is called once, before Run and before every
// other method except StoreState.
func (m *Member) Join(parts Parts) {
	m.parts = parts
	m.alone = parts.Datagrams == nil && parts.Calls == nil
	if m.alone {
		m.up.Store(true)
		m.lease.settled = true
	}
}

// Run runs the goroutines of the member and its parts until ctx ends. It returns an error
// when the process cannot take part in the cluster.
func (m *Member) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup

	// The first part that fails ends all others.
	start := func(run func(context.Context) error) {
		wg.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				cancel(err)
			}
		})
	}

	if m.parts.Datagrams != nil {
		start(m.parts.Datagrams.Run)
	}
	start(m.membership)
	wg.Go(func() { m.standstill.Run(ctx, nil) })

	if m.parts.Node != nil {
		start(m.parts.Node.Run)
	}

	if m.parts.Dispatcher != nil {
		start(m.parts.Dispatcher.Run)
		start(m.greet)
	}

	if m.parts.Regions != nil {
		start(m.parts.Regions.Run)
	}

	if m.parts.Gateway != nil {
		start(m.parts.Gateway.Run)
		start(m.followStore)
		start(m.followGeneration)
		start(m.awaitCounts)
		start(m.watchDispatchers)
	}

	wg.Wait()

	// The cause is the error of the part that failed first; Canceled if the caller ended it.
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// Has reports whether the process has the role.
func (m *Member) Has(role string) bool { return slices.Contains(m.self.Roles, role) }
