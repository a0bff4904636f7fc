package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/rs/zerolog"
	"go.opentelemetry.io/otel/trace"

	"headcount/cmd/headcount/certificates"
	"headcount/cmd/headcount/config"
	"headcount/counter/cluster"
	"headcount/counter/pipeline"
	"headcount/dashboard"
	"headcount/dispatcher"
	"headcount/gateway"
	"headcount/gateway/api"
	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/internal/machine"
	"headcount/internal/redisconn"
	"headcount/internal/tracing"
	"headcount/internal/tracing/otlp"
	"headcount/presence"
	"headcount/presence/member"
	"headcount/presence/minutes"
	"headcount/presence/node"
	"headcount/presence/pagestable"
	"headcount/presence/presencemem"
	"headcount/presence/region"
	"headcount/presence/seal"
	"headcount/unread"
	"headcount/web"
	"headcount/webhook"
)

const localName = "local" // the name of the one process over the embedded store

// store is the interface of the data that this process shares with other processes.
type store interface {
	presence.Store
	presence.Processes
	unread.Store
	presence.LastSeen
	minutes.Store
	minutes.DayStore
	presence.Lister
	Parts(ctx context.Context, page string) (presence.Count, []presence.Part, error)
}

// system is one process: its roles, joined by a member of the region's cluster.
// Over the embedded store it is a cluster of one.
type system struct {
	cfg      config.Server
	log      zerolog.Logger
	registry *prometheus.Registry
	member   *member.Member
	clock    *seal.Clock // of messages to and from other processes
	parts    member.Parts
	store    store
	embedded *presencemem.Store         // the same as store, if store is the embedded one; otherwise nil
	where    string                     // says in the log where the store is
	redis    *redisconn.Conn            // nil over the embedded store
	peers    []cluster.Peer             // the Redis of each other region
	network  *network                   // nil over the embedded store
	owners   *cluster.Process           // nil over the embedded store
	certs    *certificates.Certificates // nil: visitors do not speak TLS to this process
	hashKey  []byte                     // of user hashes; nil: the cluster has it
	closers  []func() error             // called in reverse order; nobody could act on their errors
	reached  atomic.Bool                // the process was ready once
	roles
}

// roles are the parts of a process by role. Those of roles that it does not have are nil.
type roles struct {
	identities *identity.Identities // with gateway and counters the role of a gateway
	gateway    *gateway.Gateway
	counters   *pipeline.Counters
	node       *node.Node
	dispatcher *dispatcher.Dispatcher
	regions    *region.Replicator // a dispatcher's, also nil over the embedded store
	webhooks   *webhook.Service
	pages      *pagestable.Table // a dispatcher's; nil: there is none
	board      *dashboard.Board  // every process has it
}

// newSystem joins the parts that the settings ask for, behind the open addresses. Nothing runs before run is called.
func newSystem(ctx context.Context, cfg config.Server, open listeners, log zerolog.Logger) (_ *system, err error) {
	self := presence.Process{Name: localName, Roles: cfg.Roles, Incarnation: presence.NewIncarnation(time.Now())}
	// The address is unique and known to the others, so it is the name by which logs and owners are compared.
	if cfg.Redis != "" {
		self.Name = cfg.AdvertiseAddr()
		log = log.With().Str("process", self.Name).Logger()
	}

	s := &system{cfg: cfg, log: log, registry: prometheus.NewRegistry(), clock: &seal.Clock{}}
	s.registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	// What was opened before an error is closed here, because the caller gets no system to close.
	defer func() {
		if err != nil {
			s.close()
		}
	}()

	// Before any store is dialled, because a wrong file of a certificate is found at once.
	if cfg.HasRole(presence.RoleGateway) && cfg.HasTLS() {
		s.certs, err = openCertificates(&cfg, log)
		if err != nil {
			return nil, err
		}

		s.gauge("headcount_certificate_overdue", "1: a certificate that visitors were shown has ended, or should "+
			"have been renewed by now.", nil, s.certs.Overdue)
	}

	// The stores report to the member, so it is there before them and joins after them.
	s.member = member.New(member.Config{
		Self:            self,
		Loopback:        cfg.Redis != "" && len(cfg.ClusterSecrets) == 0,
		Clock:           s.clock,
		Elapsed:         machine.SinceBoot,
		PresenceTimeout: cfg.PresenceTimeout,
		Registerer:      s.registry,
		Log:             log,
	})

	if cfg.Redis == "" {
		err = s.openEmbedded()
	} else {
		err = s.openCluster(ctx, self, open["cluster-listen"])
	}
	if err != nil {
		return nil, err
	}

	s.parts.Store = s.store

	if err := s.openRoles(ctx, self); err != nil {
		return nil, err
	}

	s.gauge("headcount_ready", "1: the process can do its roles, as /readyz says.", nil, func() bool {
		return s.ready() == nil
	})
	s.watchStores()

	// Last: from here on the others count on every part of this process.
	s.member.Join(s.parts)

	return s, nil
}

// openCertificates opens the certificates of --listen.
func openCertificates(cfg *config.Server, log zerolog.Logger) (*certificates.Certificates, error) {
	return certificates.Open(certificates.Config{
		Cert: cfg.TLSCert, Key: cfg.TLSKey, Domains: cfg.Domains, Directory: cfg.ACMEURL, Email: cfg.ACMEEmail,
		Dir: cfg.CertificateDir(), Plain: cfg.Redirect != "", Log: log,
	})
}

// openRoles opens what this process does over its store, and the dashboard that shows it.
func (s *system) openRoles(ctx context.Context, self presence.Process) (err error) {
	cfg := s.cfg
	ask := dashboard.Config{
		Self:    self.Name,
		Members: s.member,
		Report:  s,
		Counts:  s.store,
		Ready:   s.ready,
		Region:  cfg.Region,
		Sites:   cfg.AllSites.Names(),
		Log:     s.log,
	}
	if s.network != nil {
		ask.Others = s.network.client
	}

	// Each process has one, since it reports on itself even where no gateway shows it.
	s.board = dashboard.New(ask)
	// Counters before webhooks, which observe them, and webhooks before the node and the dispatcher, which report to
	// them.
	if s.member.Has(presence.RoleGateway) {
		if err := s.openPipeline(ctx); err != nil {
			return err
		}
	}

	if err := s.openWebhooks(); err != nil {
		return err
	}

	if s.member.Has(presence.RolePresence) {
		nodeConfig := node.Config{
			Name:            self.Name,
			PresenceTimeout: cfg.PresenceTimeout,
			Reply:           s.member,
			Arrivals:        cfg.KeptMinutes() > 0,
			Departures:      s.webhooks,
			Elapsed:         machine.SinceBoot,
			Registerer:      s.registry,
			Log:             s.log,
		}
		if cfg.LastSeen > 0 {
			nodeConfig.LastSeen = s.store
		}

		s.node, err = node.New(s.store, nodeConfig)
		if err != nil {
			return err
		}
		s.parts.Node = s.node
	}

	if s.member.Has(presence.RoleDispatcher) {
		if err := s.openDispatcher(ctx); err != nil {
			return err
		}
	}

	// Last, because its API refers to all of the others.
	if s.member.Has(presence.RoleGateway) {
		if err := s.openGateway(self); err != nil {
			return err
		}
		s.parts.Gateway = s.gateway
	}

	return nil
}

// openDispatcher opens the dispatcher, which also passes counts to the other regions, the webhooks and the table of
// pages.
func (s *system) openDispatcher(ctx context.Context) error {
	cfg := dispatcher.Config{
		Store: s.store, Gateways: s.member, Public: s.cfg.TopPages(), Elapsed: machine.SinceBoot,
		Watchers:   []dispatcher.Watcher{s.webhooks},
		Registerer: s.registry, Log: s.log,
	}

	if len(s.cfg.PagesTable) > 0 {
		pages, err := pagestable.Open(ctx, pagestable.Config{
			Patterns: s.cfg.PagesTable, URL: s.cfg.Postgres, Pages: s.store, ComeBack: s.comeBack(),
			Registerer: s.registry, Log: s.log,
		})
		if err != nil {
			return err
		}
		s.closers = append(s.closers, pages.Close)
		s.pages = pages
		cfg.Watchers = append(cfg.Watchers, pages)
	}

	if s.regions != nil {
		cfg.Regions = s.regions
		s.parts.Regions = s.regions
	}

	s.dispatcher = dispatcher.New(cfg)

	s.parts.Dispatcher = s.dispatcher

	return nil
}

// watchStores registers for each store of this process whether it can be used now.
func (s *system) watchStores() {
	// Only stores that this process uses: an alert on 0 must not fire for others.
	up := map[string]func() bool{}
	if s.embedded != nil && s.cfg.DataDir != "" {
		up["data-dir"] = func() bool {
			isCounters := s.counters != nil && !s.counters.Remote()
			return s.embedded.Writable() == nil && (!isCounters || s.counters.Ready() == nil)
		}
	}

	if s.redis != nil {
		// The counters may be unable to use a Redis that answers presence.
		up["redis"] = func() bool { return s.redis.Cause() == nil && (s.counters == nil || s.counters.Up()) }
	}

	if s.cfg.Postgres != "" && s.counters != nil {
		up["postgres"] = s.counters.PostgresUp
	}

	for store, up := range up {
		s.gauge("headcount_store_up", "1: the process can use this store of its settings, 0: it cannot.",
			prometheus.Labels{"store": store}, up)
	}
}

// gauge registers a gauge that is 1 while something is so, else 0.
func (s *system) gauge(name, help string, labels prometheus.Labels, is func() bool) {
	opts := prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}
	s.registry.MustRegister(prometheus.NewGaugeFunc(opts, func() float64 {
		if is() {
			return 1
		}

		return 0
	}))
}

// openEmbedded opens a store of this process's own, in memory or with a data
// directory.
func (s *system) openEmbedded() (err error) {
	cfg := presencemem.Config{
		Region:          s.cfg.Region,
		PageStats:       s.cfg.KeptMinutes(),
		PageDays:        s.cfg.KeptDays(),
		LastSeen:        s.cfg.LastSeen,
		PresenceTimeout: s.cfg.PresenceTimeout,
		Log:             s.log,
	}

	if s.cfg.DataDir == "" {
		s.log.Info().Msg("--data-dir is not set: this process keeps follows, unread counts and, without " +
			"--postgres, counters in memory, and they are lost when it ends")
		s.embedded = presencemem.New(cfg)
		s.where = "embedded, in memory"
	} else {
		s.embedded, err = presencemem.Open(s.cfg.DataDir, cfg)
		if err != nil {
			return fmt.Errorf("--data-dir: %w", err)
		}

		s.closers = append(s.closers, func() error {
			if err := s.embedded.Close(); err != nil {
				s.log.Error().Err(err).Msg("the data directory could not be closed")
			}
			return nil
		})

		s.where = "embedded, follows and unread in " + s.cfg.DataDir
		// The secret in the directory keeps visitors' ids valid over a restart.
		if len(s.cfg.IDSecrets) == 0 {
			s.cfg.IDSecrets = []string{s.embedded.Secret()}
		}
	}

	s.store = s.embedded
	// Never a fixed one, with which anybody could sign an id.
	if len(s.cfg.IDSecrets) == 0 {
		s.log.Info().Msg("--id-secret is not set: this process signs anonymous ids with a random secret, and the " +
			"ids are void when it ends")
		s.cfg.IDSecrets = []string{rand.Text()}
	}

	s.hashKey, err = s.embedded.HashKey()

	return err
}

// How long clients need to come back after a restart; gateway.restartDoubt makes it longer for a process that served
// late. The clients of this release try again within 2 s, so after 3 s those are there whom a killed process had no
// time to remember; others and older ones wait for up to 15 s.
const (
	soonBack     = 3 * time.Second
	comeBackTime = 15 * time.Second
)

// comeBack is how long after the start counts may lack users that are still present but have not reconnected.
func (s *system) comeBack() time.Duration {
	switch {
	case s.embedded == nil:
		return 0 // Redis remembers who is present
	case s.embedded.Recalled(): // all users except those that came in the last second
		return soonBack
	default:
		return comeBackTime
	}
}

// openIdentities opens the identification of the senders of requests.
func (s *system) openIdentities() {
	s.identities = identity.New(identity.Config{
		IDSecrets: s.cfg.IDKeys(),
		HashKey:   s.hashKey,
		Cookie:    s.cfg.CookieName,
		JWTSecret: []byte(s.cfg.JWTSecret),
		JWKSURL:   s.cfg.JWKSURL,
		Issuers:   s.cfg.JWTIssuers,
		Audiences: s.cfg.JWTAudiences,
		Leeway:    s.cfg.JWTLeeway,
		Sites:     s.cfg.AllSites.Names(),
		KeysError: func(err error) {
			s.log.Warn().Err(err).Msg("the keys of --jwks-url could not be fetched; retrying. " +
				"Until then only the keys that were fetched before are known")
		},
	})

	s.closers = append(s.closers, func() error { s.identities.Close(); return nil })
}

func (s *system) openGateway(self presence.Process) (err error) {
	cfg := s.cfg
	s.openIdentities()

	s.gateway, err = gateway.New(gateway.Config{
		Name: self.Name, Incarnation: self.Incarnation,
		Store: s.store, Unread: s.store, Cluster: s.member,
		Waits: s.cfg.Redis != "" || s.cfg.JWKSURL != "",
		API: api.Config{
			HoldTime:  node.HoldTime(cfg.PresenceTimeout),
			Regions:   s.store,
			PageStats: cfg.KeptMinutes(),
			Minutes:   s.store,
			PageDays:  cfg.KeptDays(),
			Days:      s.store,
			LastSeen:  s.store,
			App:       pusher.App{Key: cfg.PusherKey, Secrets: cfg.PusherSecrets},
			Pages:     s.store,
			Arrivals:  s.webhooks,
			Dashboard: s.board,
			Origins:   cfg.Origins,
			Assets:    web.Files,
			BasePath:  cfg.BasePath,
			Tracer:    s.openTraces(),
		},
		Counters: counterapi.Config{
			Rules: cfg.Rules, Counters: s.counters, Elapsed: machine.SinceBoot, Registerer: s.registry, Log: s.log,
		},
		Times: gateway.Times{
			HeartbeatInterval: cfg.HeartbeatInterval,
			LeaveGrace:        cfg.LeaveGrace,
			ComeBack:          s.comeBack(),
			UpdateInterval:    cfg.UpdateInterval,
			PingInterval:      cfg.PingInterval,
			PongTimeout:       cfg.PongTimeout,
			WriteTimeout:      cfg.WriteTimeout,
			ShutdownTimeout:   cfg.ShutdownTimeout,
		},
		Limits: gateway.Limits{
			MaxConnections: s.maxConnections(),
			MaxPerAddress:  cfg.MaxPerAddress,
			Memory:         machine.NewPressure(),
			DeliveryBudget: cfg.DeliveryBudget,
		},
		Access: api.Access{
			Identities: s.identities, Keys: cfg.Keys, Sites: cfg.AllSites, Proxies: cfg.Proxies,
			CacheReads: cfg.CacheReads,
			CountBots:  cfg.CountBots, Private: cfg.Private, PublicTop: cfg.TopPages(),
		},
		Elapsed:    machine.SinceBoot,
		Registerer: s.registry,
		Log:        s.log,
	})

	// The gateway and the counters need each other. The gateway was made with the counters, so they get to know it now.
	if err == nil {
		s.counters.OnState(s.gateway.CountersChanged)
	}

	return err
}

// openTraces returns the tracer that sends spans of this process to the collector; nil: there is none.
func (s *system) openTraces() trace.Tracer {
	if s.cfg.OTLP == "" {
		return nil
	}
	cfg := otlp.Config{URL: s.cfg.OTLP, Every: s.cfg.TraceEvery, Version: cmp.Or(version, "devel"), Log: s.log}
	tracer, end := otlp.New(cfg, tracing.Scope)
	s.closers = append(s.closers, end)

	return tracer
}

// ready returns why the process cannot do its roles now, or nil if it can.
func (s *system) ready() error {
	err := s.rolesReady()
	if err == nil {
		s.reached.Store(true)
		return nil
	}

	// The roles only know that the store does not answer; the connection knows why.
	if s.redis == nil {
		return err
	}

	if why := s.redis.Cause(); why != nil {
		return fmt.Errorf("%w: Redis: %w", err, why)
	}

	return err
}

func (s *system) rolesReady() error {
	if s.embedded != nil {
		if err := s.embedded.Writable(); err != nil {
			return err
		}
	}

	// Without a gateway, membership alone says whether the process does its work.
	if s.gateway == nil {
		return s.member.Ready()
	}

	if err := s.gateway.Ready(); err != nil {
		return err
	}

	return s.counters.Ready()
}

// open is like ready, but does not depend on the stores.
func (s *system) open() error {
	if s.gateway == nil {
		return nil
	}

	return s.gateway.Open()
}

// run runs the roles, and serves the other processes, until ctx ends.
func (s *system) run(ctx context.Context) error {
	// A context of its own, because the roles may also end by an error.
	watching, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { machine.ReturnMemory(watching) })
	watch.Go(func() { s.board.Watch(watching) })

	if s.certs != nil {
		watch.Go(func() { s.certs.Run(watching) })
	}

	watch.Go(func() { s.webhooks.Run(watching) })
	if s.pages != nil {
		watch.Go(func() { s.pages.Run(watching) })
	}
	if s.counters != nil {
		watch.Go(func() { s.counters.Run(watching) })
	}

	// Deferred calls go backwards: stop, then wait.
	defer watch.Wait()
	defer stop()

	if s.network == nil {
		return s.member.Run(ctx)
	}

	// Without the calls of others a process owns partitions that nobody reaches, so it ends.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	served := make(chan error, 1)
	go func() { // ends with Close below
		err := s.network.server.Serve(s.network.listener)
		cancel()
		served <- err
	}()

	err := s.member.Run(ctx)
	_ = s.network.server.Close() // callers repeat unfinished calls at the next owner

	// Close above makes Serve end in any case.
	serr := <-served
	if !errors.Is(serr, http.ErrServerClosed) {
		err = errors.Join(err, serr)
	}

	return err
}

// close closes everything. Call it when nothing runs any more.
func (s *system) close() {
	// Backwards, because each part uses what was opened before it.
	for i := len(s.closers) - 1; i >= 0; i-- {
		_ = s.closers[i]()
	}
}

// Peers returns the state of the other regions, as this process sees them. Only a dispatcher sees them.
func (s *system) Peers() []presence.PeerStats {
	if s.regions == nil {
		return nil
	}

	return s.regions.Stats()
}

// Report returns the state of this process for the dashboard.
func (s *system) Report() presence.Report {
	var used presence.ProcessStats
	used.CPU, used.Memory = machine.Usage()

	// An empty list, not nil: the dashboard reads it as JSON.
	r := presence.Report{Stats: presence.Stats{Process: used}, Top: []presence.PageUsers{}}
	if s.gateway != nil {
		stats := s.gateway.Stats()
		r.Gateway = &stats
	}

	if s.node != nil {
		stats := s.node.Stats()
		r.Node = &stats
	}

	r.Peers = s.Peers()
	if s.dispatcher != nil {
		r.Top = s.dispatcher.Top(presence.TopPages)
		// The counts of a dispatcher that is cut off are old, and the board must not show them as those of now.
		r.Away = errors.Is(s.member.Ready(), presence.ErrUnavailable)
	}

	return r
}
