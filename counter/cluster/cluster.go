// Package cluster is the part that a process has in the counters of a cluster, whose rows are in one Redis.
//
// A process with the role presence owns partitions: it changes their counters. Every other process calls the owners.
// A process with the role gateway has a Store, in which it reads and changes all counters. The packages that this one
// puts together, from the bottom up:
//
//	rowsredis  rows in Redis
//	owner      the partitions of this process
//	link       connections to other processes, and from them
//	owners     which process owns which partition
//	region     with other regions: what this process owns goes to them, and what they send comes here
//	call       the Store: changes go to owners, reads go to Redis
package cluster

import (
	"context"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/link"
	"headcount/counter/owner"
	"headcount/counter/owners"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/internal/rows"
	"headcount/internal/rows/rowsredis"
	"headcount/presence"
)

// Config describes a Process.
type Config struct {
	Self  presence.Process // required: the name is the address for other processes
	Redis *redisconn.Conn  // required
	// Rules say where the counters of NewStore are. Owners need none: they judge by the rules of who calls them.
	Rules *counter.Rules
	// Behind is PostgreSQL behind this Redis; nil: there is none. Close closes it.
	Behind    *routed.Behind
	ColdAfter time.Duration // with Behind: a counter that nobody has changed for so long leaves Redis
	// Region is the name of this region, and Peers are the others. Without others nothing is shared.
	Region string
	Peers  []Peer
	// Postgres is the URL of the PostgreSQL that has the exact counters of all regions. Empty: each region has its own
	// in Redis.
	Postgres string
	// Dial makes a link to the process with that name. Required.
	Dial link.Dial
	// Clock is the time of the cluster. Default time.Now, for processes of one machine.
	Clock      link.Clock
	Registerer prometheus.Registerer // takes the metrics; nil: there are none
	Log        zerolog.Logger
}

// writeTimeout is how long all partitions of a process wait for a master of a Cluster that says nothing. After that its
// partitions wait alone, and their commits are repeated until it answers.
const writeTimeout = 500 * time.Millisecond

// Process is this process's part in the counters. Its methods may be called from any goroutine.
type Process struct {
	cfg       Config
	name      string // that no other process has, nor this one before a restart
	rows      *rowsredis.Store
	over      rows.Store   // the same, with heads of exact counters from elsewhere
	owner     *owner.Owner // nil: this process owns nothing
	shared                 // with other regions
	directory *owners.Directory
	client    *link.Client
	server    *link.Server
	metrics   *metrics
	redis     counter.Relay                       // whether Redis can be used
	refused   atomic.Pointer[counter.FormatError] // see Refused

	mu          sync.Mutex // guards the fields below
	owning, all []string   // as the directory knows them
}

// Open returns this process's part in the counters. It has none before SetProcesses says which processes there are. It
// does not wait for Redis. It fails if settings cannot work. Close ends it.
func Open(ctx context.Context, cfg Config) (*Process, error) {
	p := &Process{cfg: cfg, name: presence.IncarnationName(cfg.Self.Name, cfg.Self.Incarnation), metrics: newMetrics()}
	if err := p.openRows(ctx); err != nil {
		return nil, err
	}
	p.openPeers()

	clock := cfg.Clock
	if clock == nil {
		clock = time.Now
	}
	p.client = link.NewClient(cfg.Dial, clock)

	directory := owners.Config{
		Self: cfg.Self.Name,
		Peer: func(name string) owners.Peer { return p.client.To(name) },
	}
	if p.hasRole(presence.RolePresence) {
		p.owner = p.newOwner()
		directory.Local = p.owner
	}
	p.directory = owners.New(directory)
	p.server = link.NewServer(p.directory, clock)

	// The metrics ask the owner, so they come last.
	if cfg.Registerer != nil {
		p.metrics.register(cfg.Registerer, p)
	}

	return p, nil
}

func (p *Process) hasRole(role string) bool { return slices.Contains(p.cfg.Self.Roles, role) }

// openRows opens the rows in Redis, and over them the heads of exact counters that are in PostgreSQL.
func (p *Process) openRows(ctx context.Context) error {
	p.rows = rowsredis.New(rowsredis.Config{
		Conn: p.cfg.Redis, Registerer: p.cfg.Registerer, OnState: &p.redis, Accept: p.accept,
	})
	p.over = p.rows

	// A process that neither owns counters nor serves them needs no connection to PostgreSQL.
	usesCounters := p.hasRole(presence.RoleGateway) || p.hasRole(presence.RolePresence)
	isBeside := p.cfg.Postgres != "" && usesCounters
	switch {
	case p.cfg.Behind != nil:
		p.cfg.Behind.Begin(p.rows)
		p.over = p.cfg.Behind.Rows()
	case isBeside:
		if err := p.openBeside(ctx); err != nil {
			p.rows.Close()
			return err
		}
		p.over = p.beside.Rows()
	}

	return nil
}

// newOwner returns the owner of this process, which shares what it owns with other regions.
func (p *Process) newOwner() *owner.Owner {
	cfg := owner.Config{Name: p.name, WriteTimeout: writeTimeout, ExactOutside: p.beside != nil}
	if p.cfg.Behind != nil {
		p.putBehind(&cfg)
	}
	if p.HasPeers() {
		p.share(&cfg)
	}

	o := owner.New(&measured{Store: p.over, metrics: p.metrics, log: p.cfg.Log}, cfg)
	if p.region != nil {
		p.region.Start(o)
	}

	return o
}

// SetProcesses says which processes there are. One without a role is about to leave: it should own nothing, and may own
// something until another process asks for it.
func (p *Process) SetProcesses(processes []presence.Process) {
	var owning, all []string
	for i := range processes {
		all = append(all, processes[i].Name)

		// Others have no counters, but they may call those who have.
		if slices.Contains(processes[i].Roles, presence.RolePresence) {
			owning = append(owning, processes[i].Name)
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	// The directory forgets what others have said when processes come or go.
	if !slices.Equal(owning, p.owning) || !slices.Equal(all, p.all) {
		p.owning = owning
		p.all = all
		p.directory.SetProcesses(owning, all)
	}
}

// Serve makes the calls that come over a link from another process, until the link or the Process ends. The key is that
// of signatures.
func (p *Process) Serve(stream io.ReadWriteCloser, key []byte) { p.server.Serve(stream, key) }

// NewStore returns the counters of the cluster. It finds their owners as the Process does, so it is closed before the
// Process. It waits for a second if Redis does not answer. States may be nil. It is called once.
//
// A call waits as long as its caller does: while an owner is away, it is repeated. See Combining.
func (p *Process) NewStore(states counter.States) *call.Store {
	if states != nil {
		p.redis.Observe(states)
	}

	return call.NewStore(p.over, p.directory, p.cfg.Rules, call.Config{Stream: p.name, Observer: p.metrics})
}

const (
	// changeTimeout is long enough for the lease of an owner to end, and for a failover of Redis.
	changeTimeout = 10 * time.Second
	// limitTimeout is short, because a limit stands in front of other work.
	limitTimeout = 250 * time.Millisecond
	// pace is how long changes of a busy partition gather for one call.
	pace = 2 * time.Millisecond
)

// Combining returns how calls of a Store are combined. Each partition has a queue of its own, so that an owner that is
// away holds up changes of its own keys alone.
func Combining() counter.CombinerConfig {
	return counter.CombinerConfig{
		Queues:       rows.Partitions,
		QueueOf:      call.PartitionOf,
		WriteTimeout: changeTimeout,
		LimitTimeout: limitTimeout,
		Pace:         pace,
	}
}

// Close ends the part of this process: it gives up what it owns once the turn under way has ended. The caller closes
// the Store first.
func (p *Process) Close() error {
	// Nothing is claimed any more, and nothing more is sent to other regions.
	p.directory.Close()
	if p.region != nil {
		p.region.Close()
	}

	// The owner answers the calls of its last turn, so the links end after it.
	if p.owner != nil {
		p.owner.Close()
	}
	p.server.Close()
	p.client.Close()

	// What the last turn has written goes to PostgreSQL.
	err := p.closeBehind()
	p.closeShared()
	p.rows.Close()

	return err
}
