package cluster

import (
	"context"
	"errors"
	"fmt"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/counter/region"
	"headcount/counter/routed"
	"headcount/internal/redisconn"
	"headcount/internal/rows/rowsredis"
)

// Peer is another region: its name, and its Redis.
type Peer struct {
	Name string
	Conn *redisconn.Conn
}

// shared is what a process needs for other regions. The zero value is for a process without them.
type shared struct {
	peers  []region.Peer
	opened []*rowsredis.Store // rows and inboxes at peers, and the peers' inboxes here
	region *region.Region     // nil: this process replicates nothing

	sharedExact *routed.SharedExact // the PostgreSQL with the exact counters of all regions; nil: there is none
	postgres    counter.Relay
}

// openPeers opens the rows of the other regions, and the inboxes. A process that owns nothing only reads the rows.
func (p *Process) openPeers() {
	open := func(cfg rowsredis.Config) *rowsredis.Store {
		opened := rowsredis.New(cfg)
		p.opened = append(p.opened, opened)

		return opened
	}

	// This region writes to its inbox in the peer's Redis, and the peer writes to its inbox in this region's Redis.
	for _, peer := range p.cfg.Peers {
		p.peers = append(p.peers, region.Peer{
			Name:   peer.Name,
			Rows:   open(rowsredis.Config{Conn: peer.Conn, Accept: acceptPeer}),
			Outbox: open(rowsredis.Config{Conn: peer.Conn, Accept: acceptPeer, Inbox: p.cfg.Region}),
			Inbox:  open(rowsredis.Config{Conn: p.cfg.Redis, Accept: accept, Inbox: peer.Name}),
		})
	}
}

// acceptPeer refuses a peer whose counters have another format.
func acceptPeer(ctx context.Context, c *redisconn.Client) error {
	err := accept(ctx, c)

	var other *counter.FormatError
	if errors.As(err, &other) {
		return redisconn.Answered(fmt.Errorf("%w: run the same release in all regions", other))
	}

	return err
}

// openSharedExact opens the PostgreSQL that has the exact counters of all regions.
func (p *Process) openSharedExact(ctx context.Context) (err error) {
	p.sharedExact, err = routed.OpenSharedExact(ctx, routed.SharedExactConfig{
		Owned:      p.rows,
		URL:        p.cfg.Postgres,
		Rules:      p.cfg.Rules,
		OnPostgres: p.postgres.StoreState,
		Log:        p.cfg.Log,
	})
	if err != nil {
		return fmt.Errorf("cluster: %w", err)
	}

	return nil
}

// replicate makes an owner with this Config replicate its counters. The owner must then be passed to the Region.
func (p *Process) replicate(cfg *owner.Config) {
	p.region = region.New(region.Config{
		Name:       p.cfg.Region,
		Process:    p.name,
		Store:      p.rows,
		Peers:      p.peers,
		Registerer: p.cfg.Registerer,
		Log:        p.cfg.Log,
	})
	cfg.Region = p.cfg.Region
	cfg.Shared = p.region.Shared
}

// HasPeers reports whether other regions share the counters.
func (p *Process) HasPeers() bool { return len(p.peers) > 0 }

// SharedExact returns the PostgreSQL that has the exact counters of all regions, nil if there is none.
func (p *Process) SharedExact() *routed.SharedExact { return p.sharedExact }

// NewSharedStore is NewStore for a region with peers. If Postgres is configured, the exact counters are there. States
// may be nil.
func (p *Process) NewSharedStore(redis, postgres counter.States) counter.Store {
	owned := p.NewStore(redis)
	store := counter.Store(owned)
	if p.sharedExact != nil {
		store = p.sharedExact.NewStore(owned)
	}
	if postgres != nil {
		p.postgres.Observe(postgres)
	}

	return region.NewStore(store, p.cfg.Rules, p.peers)
}

// CombiningShared is Combining for a Store of NewSharedStore. Exact counters in PostgreSQL have queues of their own, so
// that other counters wait neither for PostgreSQL nor for an application that has locked rows there.
func (p *Process) CombiningShared() counter.CombinerConfig {
	if p.sharedExact == nil {
		return Combining()
	}

	return TieredCombining()
}

// closeShared closes what is left once this process owns no partitions any more.
func (p *Process) closeShared() {
	if p.sharedExact != nil {
		p.sharedExact.Close()
	}
	// The region, which used them, has ended before.
	for _, opened := range p.opened {
		opened.Close()
	}
}
