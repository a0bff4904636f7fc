// Package cluster is one process's part in the counters of a cluster, whose rows are in one Redis.
//
// A process with the role presence owns partitions and changes their counters. All other processes call the owners. A
// process with the role gateway has a Store, through which it reads and changes all counters. This package assembles
// the following ones, from the bottom up:
//
//	rowsredis  rows in Redis
//	owner      the partitions of this process
//	link       connections to and from other processes
//	owners     directory: which process owns which partition
//	region     replication of counters to and from other regions
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
	Self  presence.Process // required; its name is the address at which other processes reach it
	Redis *redisconn.Conn  // required
	// Rules tell the Store of NewStore which counters are exact. Owners need no rules: each call has those of its
	// sender.
	Rules *counter.Rules
	// Tiered is the PostgreSQL behind this Redis; nil: there is none. Close closes it.
	Tiered    *routed.Tiered
	ColdAfter time.Duration // with Tiered: counters that nobody changed for so long are evicted from Redis
	// Region is the name of this region, and Peers are the others. Without peers nothing is replicated.
	Region string
	Peers  []Peer
	// Postgres is the URL of the PostgreSQL that has the exact counters of all regions. Empty: each region keeps its
	// exact counters in its Redis.
	Postgres string
	// Dial connects to the process with the given name. Required.
	Dial link.Dial
	// Clock is the cluster's clock. Default time.Now, for processes on one machine.
	Clock      link.Clock
	Registerer prometheus.Registerer // for the metrics; nil: there are none
	Log        zerolog.Logger
}

// writeTimeout is how long all partitions of a process wait for a master of a Redis Cluster that does not answer. After
// that only the partitions of that master wait, and their commits are repeated until it answers.
const writeTimeout = 500 * time.Millisecond

// Process is this process's part in the counters. Its methods may be called from any goroutine.
type Process struct {
	cfg       Config
	name      string // unique among processes, including earlier runs of this one
	rows      *rowsredis.Store
	over      rows.Store   // rows, extended by the heads of exact counters that PostgreSQL has
	owner     *owner.Owner // nil: this process owns no partitions
	shared                 // everything that concerns other regions
	directory *owners.Directory
	client    *link.Client
	server    *link.Server
	metrics   *metrics
	redis     counter.Relay                       // whether Redis can be used
	refused   atomic.Pointer[counter.FormatError] // see Refused

	mu          sync.Mutex // guards the fields below
	owning, all []string   // as the directory knows them
}

// Open returns this process's part in the counters. It takes no part before SetProcesses is called. Open does not wait
// for Redis, and fails only if settings are invalid. The caller must call Close.
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
		// A process without this role calls the owners in others.
		p.owner = p.newOwner()
		directory.Local = p.owner
	}
	p.directory = owners.New(directory)
	p.server = link.NewServer(p.directory, clock)

	// The metrics read from the owner, so they are registered last.
	if cfg.Registerer != nil {
		p.metrics.register(cfg.Registerer, p)
	}

	return p, nil
}

func (p *Process) hasRole(role string) bool { return slices.Contains(p.cfg.Self.Roles, role) }

// openRows opens the rows in Redis, and adds the heads of the exact counters that are in PostgreSQL.
func (p *Process) openRows(ctx context.Context) error {
	p.rows = rowsredis.New(rowsredis.Config{
		Conn: p.cfg.Redis, Registerer: p.cfg.Registerer, OnState: &p.redis, Accept: p.accept,
	})
	p.over = p.rows

	// A process that neither owns nor serves counters needs no connection to PostgreSQL.
	usesCounters := p.hasRole(presence.RoleGateway) || p.hasRole(presence.RolePresence)
	sharesExact := p.cfg.Postgres != "" && usesCounters
	switch {
	case p.cfg.Tiered != nil:
		p.cfg.Tiered.Begin(p.rows)
		p.over = p.cfg.Tiered.Rows()
	case sharesExact:
		if err := p.openSharedExact(ctx); err != nil {
			p.rows.Close()
			return err
		}
		p.over = p.sharedExact.Rows()
	}

	return nil
}

// newOwner returns the owner of this process, which replicates its counters to other regions.
func (p *Process) newOwner() *owner.Owner {
	cfg := owner.Config{Name: p.name, WriteTimeout: writeTimeout, ExactOutside: p.sharedExact != nil}
	if p.cfg.Tiered != nil {
		p.useTier(&cfg)
	}
	if p.HasPeers() {
		p.replicate(&cfg)
	}

	o := owner.New(&measured{Store: p.over, metrics: p.metrics, log: p.cfg.Log}, cfg)
	if p.region != nil {
		// The owner owns nothing yet, so the region misses none of its commits.
		p.region.Start(o)
	}

	return o
}

// SetProcesses sets the processes of the cluster. A process without roles is shutting down: it should own no
// partitions, but keeps those it has until another process asks for them.
func (p *Process) SetProcesses(processes []presence.Process) {
	var owning, all []string
	for i := range processes {
		all = append(all, processes[i].Name)

		// Processes with other roles own no counters, but they may call the owners.
		if slices.Contains(processes[i].Roles, presence.RolePresence) {
			owning = append(owning, processes[i].Name)
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()

	// The directory drops what it has learned from other processes whenever the processes change, so do that only for
	// real changes.
	if !slices.Equal(owning, p.owning) || !slices.Equal(all, p.all) {
		p.owning = owning
		p.all = all
		p.directory.SetProcesses(owning, all)
	}
}

// Serve makes the calls that arrive over a link from another process, until the link or the Process ends. The key is
// for checking signatures.
func (p *Process) Serve(stream io.ReadWriteCloser, key []byte) { p.server.Serve(stream, key) }

// NewStore returns the counters of the cluster. It uses the directory of the Process, so it must be closed first. It
// waits up to a second for Redis. States may be nil. It is called only once.
//
// A call is repeated while the owner is unavailable, for as long as its caller waits. See Combining.
func (p *Process) NewStore(states counter.States) *call.Store {
	if states != nil {
		p.redis.Observe(states)
	}

	return call.NewStore(p.over, p.directory, p.cfg.Rules, call.Config{Stream: p.name, Observer: p.metrics})
}

const (
	// changeTimeout is long enough for the lease of an owner to end, and for a failover of Redis.
	changeTimeout = 10 * time.Second
	// limitTimeout is short, because other work waits for the answer of a limit.
	limitTimeout = 250 * time.Millisecond
	// pace is how long changes for a busy partition are collected before they are sent as one call.
	pace = 2 * time.Millisecond
)

// Combining returns how the calls of a Store are combined. Each partition has a queue of its own, so that an
// unavailable owner delays only changes of its own keys.
func Combining() counter.CombinerConfig {
	return counter.CombinerConfig{
		Queues:       rows.Partitions,
		QueueOf:      call.PartitionOf,
		WriteTimeout: changeTimeout,
		LimitTimeout: limitTimeout,
		Pace:         pace,
	}
}

// Close ends the part of this process: it gives up its partitions once the current turn has ended. The Store must be
// closed first.
func (p *Process) Close() error {
	// From here on no change of the ring claims anything, and nothing more is sent to other regions.
	p.directory.Close()
	if p.region != nil {
		p.region.Close()
	}

	// The owner still answers the calls of its last turn, so the links are closed after it.
	if p.owner != nil {
		p.owner.Close()
	}
	p.server.Close()
	p.client.Close()

	// The rows that the last turn wrote still have to be drained to PostgreSQL.
	err := p.closeTiered()
	p.closeShared()
	p.rows.Close()

	return err
}
