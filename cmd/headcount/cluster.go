package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/cmd/headcount/config"
	"headcount/counter/cluster"
	"headcount/counter/link"
	"headcount/internal/redisconn"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/presenceredis"
	"headcount/presence/region"
	"headcount/presence/rpc"
	"headcount/webhook/webhookredis"
)

// peerDial is how long it may take to connect to a peer. With TLS that takes
// three round trips.
const peerDial = 2 * time.Second

// openCluster opens the store that the region's processes share, and the network
// between those processes.
func (s *system) openCluster(ctx context.Context, self presence.Process, l listener) (err error) {
	// Left nil in all other processes, since only a gateway hashes users.
	var hashKeys presenceredis.HashKeys
	if s.member.Has(presence.RoleGateway) {
		hashKeys = s
	}

	// The connections come first, so that close, which goes backwards, ends the stores before them.
	if err := s.connect(); err != nil {
		return err
	}

	opened := presenceredis.Open(presenceredis.Config{
		Conn:      s.redis,
		IDSecrets: s.cfg.IDKeys(), HashKeys: hashKeys,
		Facts:      factsOf(&s.cfg),
		Peers:      s.cfg.PeerNames(),
		PageStats:  s.cfg.KeptMinutes(),
		PageDays:   s.cfg.KeptDays(),
		LastSeen:   s.cfg.LastSeen,
		Registerer: s.registry,
		Log:        s.log,
		OnState:    s.member,
	})
	s.closers = append(s.closers, opened.Close)

	s.store = opened
	s.where = "redis"

	s.network, err = s.openNetwork(ctx, self, l)
	if err != nil {
		return err
	}

	s.parts.Datagrams = s.network.datagrams
	s.parts.Calls = s.network.client

	// Only dispatchers replicate; the bucket that one owns is what it sends.
	if !s.member.Has(presence.RoleDispatcher) {
		return nil
	}

	var peers []region.Peer
	for _, peer := range s.peers {
		// Configure only what replication uses: that region's own processes look after the rest.
		remote := presenceredis.Open(presenceredis.Config{
			Conn:      peer.Conn,
			PageStats: s.cfg.KeptMinutes(),
			PageDays:  s.cfg.KeptDays(),
			Log:       s.log.With().Str("peer", peer.Name).Logger(),
		})
		s.closers = append(s.closers, remote.Close)
		ours := presenceredis.NewPeer(remote, s.cfg.Region, peer.Name)
		peers = append(peers, region.Peer{Name: peer.Name, Remote: ours})
	}
	s.regions = region.New(region.Config{
		Local: opened, Peers: peers, StaleAfter: s.cfg.RegionStaleAfter, Registerer: s.registry, Log: s.log,
	})

	return nil
}

// factsOf returns the facts that the processes of the region must agree on. A process without webhooks leaves out the
// format of their data.
func factsOf(cfg *config.Server) presenceredis.Facts {
	f := placeOf(cfg).Facts()
	f.Region = cfg.Region
	f.Secret = cfg.ClusterDigest()

	// Such a process never dials PostgreSQL, so it need not have been given the same one as the others.
	if !cfg.HasCounters() {
		f.Postgres = ""
	}
	if len(cfg.Hooks) > 0 {
		f.Webhooks = webhookredis.Format
	}

	return f
}

// SetHashKey implements presenceredis.HashKeys. The first lease, which comes with the
// key, is taken when the gateway is there.
func (s *system) SetHashKey(key []byte) { s.identities.SetHashKey(key) }

// traffic counts the bytes to and from a peer.
type traffic struct{ sent, received prometheus.Counter }

// Carried implements redisconn.Traffic.
func (t traffic) Carried(sent, received int) {
	t.sent.Add(float64(sent))
	t.received.Add(float64(received))
}

// connect opens one connection of this process to each Redis: its own, and those of the other regions. Every role needs
// these. connect does not wait for an answer.
func (s *system) connect() (err error) {
	// One pool for presence, counters and webhooks, or each of them would find out alone that Redis is gone.
	s.redis, err = s.dial(redisconn.Config{URL: s.cfg.Redis, Log: s.log})
	if err != nil {
		return fmt.Errorf("--redis: %w", err)
	}
	if len(s.cfg.Peers) == 0 {
		return nil
	}

	bytes := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_region_bytes_total", Help: "Bytes on the connections to a peer's Redis, before TLS.",
	}, []string{"peer", "direction"})
	s.registry.MustRegister(bytes)

	// The log of a peer carries its name, because an outage there is no outage here.
	for _, peer := range s.cfg.Peers {
		name, url := region.SplitPeer(peer)
		conn, err := s.dial(redisconn.Config{
			URL:       url,
			Dial:      peerDial,
			Log:       s.log.With().Str("peer", name).Logger(),
			Meanwhile: "changes for that region wait meanwhile",
			OnBytes:   traffic{bytes.WithLabelValues(name, "sent"), bytes.WithLabelValues(name, "received")},
		})
		if err != nil {
			return fmt.Errorf("--peer %s: %w", name, err)
		}
		s.peers = append(s.peers, cluster.Peer{Name: name, Conn: conn})
	}

	return nil
}

// dial opens a connection that is closed after the stores that use it.
func (s *system) dial(cfg redisconn.Config) (*redisconn.Conn, error) {
	conn, err := redisconn.Open(cfg)
	if err == nil {
		s.closers = append(s.closers, conn.Close)
	}

	return conn, err
}

// network carries what this process and the other processes of the cluster say to
// each other.
type network struct {
	listener  // of both
	datagrams *heartbeat.Transport
	client    *rpc.Client
	server    *http.Server // of calls
}

// openNetwork opens the connections by which this process sends to other processes, and receives from them at l.
func (s *system) openNetwork(ctx context.Context, self presence.Process, l listener) (n *network, err error) {
	keys := s.cfg.ClusterKeys()
	n = &network{listener: l}
	n.datagrams, err = heartbeat.New(heartbeat.Config{
		Conn: l.udp, Keys: keys, Name: self.Name, Incarnation: self.Incarnation,
		Now: s.clock.Now, OnBeat: s.member, OnReply: s.member, OnTable: s.member, Registerer: s.registry, Log: s.log,
	})
	if err != nil {
		return nil, err
	}

	n.client, err = rpc.NewClient(rpc.ClientConfig{
		Keys: keys, Name: self.Name, Now: s.clock.Now, Registerer: s.registry,
	})
	if err != nil {
		return nil, err
	}

	if err := s.openOwners(ctx, self, n.client); err != nil {
		return nil, err
	}

	// After openOwners, which sets s.owners.
	calls, err := rpc.NewHandler(rpc.Config{
		Keys: keys, Name: self.Name, Now: s.clock.Now, Registerer: s.registry, Log: s.log,
		Updates: s.member, Holds: s.member, Users: s.member, Parts: s.member, Reports: s, Links: s.owners,
	})
	if err != nil {
		return nil, err
	}

	n.server = httpServer(calls, s.log)

	return n, nil
}

// openOwners opens this process's part in the counters of the cluster.
func (s *system) openOwners(ctx context.Context, self presence.Process, client *rpc.Client) (err error) {
	cfg := cluster.Config{
		Self: self, Redis: s.redis, Rules: s.cfg.Rules, Registerer: s.registry, Log: s.log, Clock: s.clock.Now,
		Dial: func(ctx context.Context, addr string) (io.ReadWriteCloser, []byte, error) {
			stream, key, err := client.Link(ctx, addr)
			// The counters know nothing of rpc, so its refusal becomes theirs.
			if errors.Is(err, rpc.ErrNoLink) {
				err = fmt.Errorf("%w: %w", link.ErrRefused, err)
			}

			return stream, key, err
		},
	}

	// With regions PostgreSQL is no store behind Redis: it keeps the exact counters of all of them.
	isTiered := s.cfg.Postgres != "" && len(s.peers) == 0
	if isTiered && s.cfg.HasCounters() {
		cfg.Tiered, err = s.openTiered(ctx)
		if err != nil {
			return err
		}
		cfg.ColdAfter = s.cfg.ColdAfter
	}

	if len(s.peers) > 0 {
		cfg.Region = s.cfg.Region
		cfg.Peers = s.peers
		cfg.Postgres = s.cfg.Postgres
	}

	s.owners, err = cluster.Open(ctx, cfg)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, s.owners.Close)
	s.parts.Owners = s.owners

	return nil
}
