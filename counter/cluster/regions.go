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

// shared is what a process has to do with other regions. The zero value has none.
type shared struct {
	peers  []region.Peer
	opened []*rowsredis.Store // of peers, and inboxes
	region *region.Region     // nil: this process shares nothing

	beside   *routed.Beside // nil: there is no PostgreSQL
	postgres counter.Relay
}

// openPeers opens the rows of the other regions, and the inboxes. A process that owns nothing only reads the rows.
func (p *Process) openPeers() {
	open := func(cfg rowsredis.Config) *rowsredis.Store {
		opened := rowsredis.New(cfg)
		p.opened = append(p.opened, opened)

		return opened
	}

	// Our share goes to an inbox that a peer's Redis has for us, and theirs to those that ours has for them.
	for _, peer := range p.cfg.Peers {
		p.peers = append(p.peers, region.Peer{
			Name:  peer.Name,
			There: open(rowsredis.Config{Conn: peer.Conn, Accept: acceptPeer}),
			Out:   open(rowsredis.Config{Conn: peer.Conn, Accept: acceptPeer, Inbox: p.cfg.Region}),
			In:    open(rowsredis.Config{Conn: p.cfg.Redis, Accept: accept, Inbox: peer.Name}),
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

// openBeside opens the PostgreSQL that has the exact counters of all regions.
func (p *Process) openBeside(ctx context.Context) (err error) {
	p.beside, err = routed.OpenBeside(ctx, routed.BesideConfig{
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

// share has an owner with this Config share its counters, once it is given to the Region.
func (p *Process) share(cfg *owner.Config) {
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

// Beside returns the PostgreSQL beside Redis, nil if there is none.
func (p *Process) Beside() *routed.Beside { return p.beside }

// NewSharedStore is NewStore with other regions, and with PostgreSQL beside Redis if it was configured. States may be
// nil.
func (p *Process) NewSharedStore(redis, postgres counter.States) counter.Store {
	owned := p.NewStore(redis)
	store := counter.Store(owned)
	if p.beside != nil {
		store = p.beside.Over(owned)
	}
	if postgres != nil {
		p.postgres.Observe(postgres)
	}

	return region.NewStore(store, p.cfg.Rules, p.peers)
}

// CombiningShared is Combining for a Store of NewSharedStore. Exact counters in PostgreSQL have queues of their own, so
// that nothing waits for it, nor for an application that holds some of them.
func (p *Process) CombiningShared() counter.CombinerConfig {
	if p.beside == nil {
		return Combining()
	}

	return CombiningOver()
}

// closeShared ends what is left when this process owns nothing any more.
func (p *Process) closeShared() {
	if p.beside != nil {
		p.beside.Close()
	}
	for _, opened := range p.opened {
		opened.Close()
	}
}
