package main

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/dashboard"
	"headcount/dispatcher"
	"headcount/gateway"
	"headcount/presence"
	"headcount/presence/cluster"
	"headcount/presence/heartbeat"
	"headcount/presence/node"
	"headcount/presence/redisstore"
	"headcount/presence/region"
)

// clustered runs the given roles as a member of the region's cluster.
func clustered(ctx context.Context, cfg Config, log zerolog.Logger) (*system, error) {
	self := presence.Process{
		Name:        cfg.AdvertiseAddr(),
		Roles:       cfg.Roles,
		Incarnation: uint64(time.Now().UnixMilli()),
	}
	log = log.With().Str("process", self.Name).Logger()
	var keys [][]byte
	for _, s := range cfg.ClusterSecrets {
		keys = append(keys, []byte(s))
	}

	p := newProcess(self, presence.DefaultPartitions, presence.DefaultBuckets, log)
	store, err := redisstore.Open(redisstore.Config{
		URL:     cfg.Redis,
		Facts:   redisstore.Facts{Region: cfg.Region, Secret: checkValue(keys)},
		Peers:   cfg.peerNames(),
		Log:     log,
		OnState: p.storeState,
	})
	if err != nil {
		return nil, err
	}
	p.store = store
	if len(keys) == 0 {
		p.trusts = isLoopback // nothing is signed: only who is on this machine
	}
	sys := &system{ready: p.ready, store: "redis", leave: p.leave}
	closers := []func() error{store.Close}
	sys.close = func() {
		for _, c := range closers {
			_ = c() // the process ends
		}
	}
	fail := func(err error) (*system, error) {
		sys.close()
		return nil, err
	}
	sys.collectors = append(store.Collectors(), p.tableChanges, p.disagreements)

	tcp, err := listen(ctx, "cluster-listen", cfg.ClusterListen)
	if err != nil {
		return fail(err)
	}
	closers = append(closers, tcp.Close)
	udp, err := net.ListenPacket("udp", tcp.Addr().String())
	if err != nil {
		return fail(fmt.Errorf("--cluster-listen: %w", err))
	}
	closers = append(closers, udp.Close)
	transport, err := heartbeat.New(heartbeat.Config{
		Conn: udp, Keys: keys, Name: self.Name, Incarnation: self.Incarnation,
		OnBeat: p.receiveBeat, OnReply: p.receiveReply, OnTable: p.disagree, Log: log,
	})
	if err != nil {
		return fail(err)
	}
	client, err := cluster.NewClient(cluster.ClientConfig{Keys: keys, Name: self.Name})
	if err != nil {
		return fail(err)
	}
	var reports *reporter // and the board are made when all collectors are there, before anybody can ask
	var board *dashboard.Board
	handler, err := cluster.NewHandler(cluster.Config{
		Keys: keys, Name: self.Name, Log: log,
		OnCounts: p.receiveCounts, OnHold: p.receiveHold, NotOwner: node.ErrNotOwner,
		OnReport: func() presence.Report { return reports.report() },
	})
	if err != nil {
		return fail(err)
	}
	p.datagrams, p.calls = transport, client
	sys.collectors = append(sys.collectors, transport.Collectors()...)
	sys.collectors = append(sys.collectors, client.Collectors()...)
	sys.collectors = append(sys.collectors, handler.Collectors()...)

	if p.has(rolePresence) {
		if p.node, err = node.New(store, node.Config{
			Name: self.Name, PresenceTimeout: cfg.PresenceTimeout, Reply: p.sendReply, Log: log,
		}); err != nil {
			return fail(err)
		}
		sys.collectors = append(sys.collectors, p.node.Collectors()...)
	}
	if p.has(roleDispatcher) {
		p.dispatcher = dispatcher.New(store, p.pushCounts, log)
		bytes, peers, closePeers, err := openPeers(cfg, log)
		if err != nil {
			return fail(err)
		}
		closers = append(closers, closePeers)
		p.regions = region.New(region.Config{Local: store, Peers: peers, StaleAfter: cfg.RegionStaleAfter, Log: log})
		p.dispatcher.OnChange = p.regions.Changed
		sys.collectors = append(append(sys.collectors, bytes), p.regions.Collectors()...)
	}
	if p.has(roleGateway) {
		if len(cfg.IDSecrets) == 0 {
			cfg.IDSecrets = derivedIDSecrets(cfg.ClusterSecrets)
		}
		gw, closeGateway, err := newGateway(cfg, log, gateway.Config{
			Name: self.Name, Incarnation: self.Incarnation, Store: store, Unread: store, Alive: p.alive,
			Send: p.sendBeat, Hold: p.hold, Ready: p.ready, Parts: store.Parts, Dashboard: lookAt(&board),
		})
		if err != nil {
			return fail(err)
		}
		closers = append(closers, func() error { closeGateway(); return nil })
		p.gateway, sys.gateway = gw, gw
		sys.ready = gw.Ready
		sys.collectors = append(sys.collectors, gw.Collectors()...)
	}
	if reports, err = newReporter(sys, p.dispatcher, log); err != nil {
		return fail(err)
	}
	board = dashboard.New(dashboard.Config{
		Self: self.Name, Members: p.whoIsThere, Report: reports.report, Ask: client.Report,
		Counts: store.Counts, Region: cfg.Region, Log: log,
	})
	sys.run = func(ctx context.Context) error { return runCluster(ctx, p, tcp, handler, log) }
	return sys, nil
}

// peerDial is how long it may take to connect to a peer: with TLS that is three
// ways there and back.
const peerDial = 2 * time.Second

// openPeers opens the Redis of every --peer. None of them need answer.
func openPeers(cfg Config, log zerolog.Logger) (bytes *prometheus.CounterVec, peers []region.Peer, closeAll func() error, err error) {
	bytes = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "headcount_region_bytes_total", Help: "Bytes on the connections to a peer's Redis, before TLS.",
	}, []string{"peer", "direction"})
	var stores []*redisstore.Store
	closeAll = func() error {
		var errs []error
		for _, s := range stores {
			errs = append(errs, s.Close())
		}
		return errors.Join(errs...)
	}
	for _, peer := range cfg.Peers {
		name, url, _ := strings.Cut(peer, "=")
		sent, received := bytes.WithLabelValues(name, "sent"), bytes.WithLabelValues(name, "received")
		s, err := redisstore.Open(redisstore.Config{
			URL: url, Dial: peerDial, Log: log.With().Str("peer", name).Logger(),
			OnBytes: func(out, in int) { sent.Add(float64(out)); received.Add(float64(in)) },
		})
		if err != nil {
			return nil, nil, nil, errors.Join(fmt.Errorf("--peer %s: %w", name, err), closeAll())
		}
		stores = append(stores, s)
		peers = append(peers, region.Peer{Name: name, Remote: redisstore.NewPeer(s, cfg.Region, name)})
	}
	return bytes, peers, closeAll, nil
}

// runCluster runs the process and serves the others, until ctx ends.
func runCluster(ctx context.Context, p *process, tcp net.Listener, handler http.Handler, log zerolog.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	srv := httpServer(handler, log)
	served := make(chan error, 1)
	go func() { // ends with Close below
		err := srv.Serve(tcp)
		cancel()
		served <- err
	}()
	err := p.run(ctx)
	_ = srv.Close() // what is under way is asked again of the next owner
	if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}
	return err
}

// checkValue says which cluster secrets are used without saying them.
func checkValue(keys [][]byte) string {
	if len(keys) == 0 {
		return "none"
	}
	values := make([]string, len(keys))
	for i, key := range keys {
		values[i] = keyed(key, "headcount cluster check")
	}
	return strings.Join(values, ",")
}

// derivedIDSecrets are the id secrets of a cluster that was given none: all its
// gateways derive the same. Without a cluster secret all of them are on this
// machine's loopback, for trying out.
func derivedIDSecrets(secrets []string) []string {
	if len(secrets) == 0 {
		secrets = []string{"loopback"}
	}
	derived := make([]string, len(secrets))
	for i, s := range secrets {
		derived[i] = keyed([]byte(s), "headcount ids")
	}
	return derived
}

func keyed(key []byte, text string) string {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(text))
	return hex.EncodeToString(mac.Sum(nil))
}
