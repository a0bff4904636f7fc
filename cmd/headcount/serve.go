package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"headcount/dashboard"
	"headcount/dispatcher"
	"headcount/gateway"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/memstore"
	"headcount/presence/node"
	"headcount/web"
)

const (
	localName = "local" // of the one process over the embedded store

	// How long a client may take over the head of a request, and keep an idle
	// connection. Bodies are small, and answers are written at once.
	headerTimeout = 10 * time.Second
	bodyTimeout   = 15 * time.Second
	answerTimeout = 30 * time.Second // from the head on: the body, the work and a client that takes its time
	idleTimeout   = 2 * time.Minute
	maxHeader     = 16 << 10
	lastRequests  = time.Second // for requests under way at the end
)

// system is what serve runs: all roles over the embedded store, or some roles
// as a member of a cluster.
type system struct {
	gateway    *gateway.Gateway // nil without the role
	ready      func() error
	collectors []prometheus.Collector
	store      string // for the log
	run        func(ctx context.Context) error
	leave      func(ctx context.Context) // hands over, when the clients have gone
	close      func()
}

// serve runs until ctx ends; then it drains and returns nil, or an error when
// that took longer than it may.
func serve(ctx context.Context, cfg Config, log zerolog.Logger) error {
	admin, err := listen(ctx, "admin-listen", cfg.AdminListen)
	if err != nil {
		return err
	}
	defer admin.Close()
	var public net.Listener
	if cfg.HasRole(roleGateway) {
		if public, err = listen(ctx, "listen", cfg.Listen); err != nil {
			return err
		}
		defer public.Close()
	}
	build := embedded
	if cfg.Redis != "" {
		build = clustered
	}
	sys, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer sys.close()

	// The roles outlive ctx: clients are sent away while everything still runs.
	roles, stopRoles := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRoles()
	failed := make(chan error, 3) // room for all who send
	running := make(chan error, 1)
	go func() { // ends with roles
		err := sys.run(roles)
		running <- err
		if err != nil {
			failed <- err
		}
	}()
	adminServer := httpServer(adminHandler(sys), log)
	go func() { failed <- adminServer.Serve(admin) }() // ends with Shutdown or Close below
	hello := log.Info().Str("admin", admin.Addr().String()).Str("store", sys.store).Strs("roles", cfg.Roles)
	if cfg.Redis != "" {
		hello = hello.Str("cluster", cmp.Or(cfg.Advertise, cfg.ClusterListen)).Str("region", cfg.Region)
	}
	publicServer := &http.Server{}
	if public != nil {
		publicServer = httpServer(sys.gateway.Handler(), log)
		publicServer.WriteTimeout = answerTimeout // WebSockets and event streams have their own
		door := sys.gateway.Door(public)
		publicServer.ConnState = door.State
		go func() { failed <- publicServer.Serve(door) }()
		hello = hello.Str("listen", public.Addr().String()).Str("open", openURL(public.Addr()))
	}
	hello.Msg("headcount is serving")

	select {
	case err := <-failed:
		stopRoles()
		<-running
		return errors.Join(fmt.Errorf("serve: %w", err), publicServer.Close(), adminServer.Close())
	case <-ctx.Done():
	}
	log.Info().Stringer("within", cfg.ShutdownTimeout).Msg("shutting down: clients are sent away; a second signal ends at once")
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.ShutdownTimeout*9/10)
	defer cancel()
	if sys.gateway != nil {
		err = sys.gateway.Drain(drain)
	}
	sys.leave(drain)
	err = errors.Join(err, shutdown(drain, publicServer), shutdown(drain, adminServer))
	stopRoles()
	if err = errors.Join(err, <-running); err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	log.Info().Msg("everything is handed over; bye")
	return nil
}

// embedded runs all roles in this process, over a store in its memory.
func embedded(_ context.Context, cfg Config, log zerolog.Logger) (*system, error) {
	store, where, err := openEmbedded(cfg, log)
	if err != nil {
		return nil, err
	}
	fail := func(err error) (*system, error) { return nil, errors.Join(err, store.Close()) }
	var gw *gateway.Gateway // the chain is a ring: gateway, node, store, dispatcher, gateway
	nd, err := node.New(store, node.Config{
		Name:            localName,
		PresenceTimeout: cfg.PresenceTimeout,
		Reply:           func(_ string, r *heartbeat.Reply) { gw.Receive(r) },
		Log:             log,
	})
	if err != nil {
		return fail(err)
	}
	ready := func() error {
		counts, err := store.Counts(context.Background(), []string{presence.Site})
		if err == nil && counts[0].Stale {
			err = errors.New("the presence node is starting")
		}
		return err
	}
	switch {
	case len(cfg.IDSecrets) > 0:
	case store.Secret() != "":
		cfg.IDSecrets = []string{store.Secret()}
	default:
		log.Info().Msg("no --id-secret: anonymous ids are signed with a random one and end with this process")
		cfg.IDSecrets = []string{rand.Text()}
	}
	var board *dashboard.Board
	gw, closeGateway, err := newGateway(cfg, log, gateway.Config{
		Name:      localName,
		Store:     store,
		Unread:    store,
		Send:      func(b *heartbeat.Beat) { nd.Deliver(b) },
		Hold:      nd.Hold,
		Ready:     ready,
		Dashboard: lookAt(&board),
	})
	if err != nil {
		return fail(err)
	}
	dp := dispatcher.New(store, func(_ context.Context, _ string, counts []presence.Count) error {
		gw.Push(counts)
		return nil
	}, log)
	nd.Own(upTo(presence.DefaultPartitions))
	dp.Own(upTo(presence.DefaultBuckets))
	sys := &system{
		gateway:    gw,
		ready:      gw.Ready,
		collectors: append(gw.Collectors(), nd.Collectors()...),
		store:      where,
		run: func(ctx context.Context) error {
			var all errgroup.Group
			for _, run := range []func(context.Context) error{nd.Run, dp.Run, gw.Run} {
				all.Go(func() error { return run(ctx) })
			}
			return all.Wait()
		},
		leave: func(context.Context) {},
		close: func() {
			closeGateway()
			if err := store.Close(); err != nil {
				log.Error().Err(err).Msg("the data directory could not be closed")
			}
		},
	}
	reports, err := newReporter(sys, dp, log)
	if err != nil {
		sys.close()
		return nil, err
	}
	board = dashboard.New(dashboard.Config{
		Self: localName, Members: alone(cfg), Report: reports.report,
		Counts: store.Counts, Region: cfg.Region, Log: log,
	})
	return sys, nil
}

// openEmbedded opens the store in memory or with a data directory; where says so.
func openEmbedded(cfg Config, log zerolog.Logger) (store *memstore.Store, where string, err error) {
	if cfg.DataDir == "" {
		log.Info().Msg("no --data-dir: follows and unread counts are kept in memory and end with this process")
		return memstore.New(memstore.Config{Log: log}), "embedded, in memory", nil
	}
	store, err = memstore.Open(cfg.DataDir, memstore.Config{Log: log})
	if err != nil {
		return nil, "", fmt.Errorf("--data-dir: %w", err)
	}
	return store, "embedded, follows and unread in " + cfg.DataDir, nil
}

// newGateway completes the gateway's configuration with the settings.
func newGateway(cfg Config, log zerolog.Logger, gc gateway.Config) (gw *gateway.Gateway, closeIt func(), err error) {
	var secrets [][]byte
	for _, s := range cfg.IDSecrets {
		secrets = append(secrets, []byte(s))
	}
	identities, err := gateway.NewIdentities(gateway.IdentityConfig{
		IDSecrets: secrets,
		JWTSecret: []byte(cfg.JWTSecret),
		JWKSURL:   cfg.JWKSURL,
		KeysError: func(err error) { log.Warn().Err(err).Msg("keys could not be fetched from --jwks-url") },
	})
	if err != nil {
		return nil, nil, err
	}
	gc.Identities, gc.Region = identities, cfg.Region
	if gc.Origins, err = gateway.NewOrigins(cfg.AllowOrigins); err != nil {
		return nil, nil, err
	}
	if gc.Proxies, err = gateway.NewProxies(cfg.TrustedProxies); err != nil {
		return nil, nil, err
	}
	gc.APIKeys = cfg.APIKeys
	gc.HeartbeatInterval = cfg.HeartbeatInterval
	gc.LeaveGrace = cfg.LeaveGrace
	gc.UpdateInterval = cfg.UpdateInterval
	gc.PingInterval = cfg.PingInterval
	gc.PongTimeout = cfg.PongTimeout
	gc.WriteTimeout = cfg.WriteTimeout
	gc.ShutdownTimeout = cfg.ShutdownTimeout
	gc.DeliveryBudget = cfg.DeliveryBudget
	gc.MaxConnections = cmp.Or(cfg.MaxConnections, connectionsByMemory())
	gc.APIKeys = cfg.APIKeys
	gc.Assets = web.Files
	gc.Log = log
	gw, err = gateway.New(gc)
	return gw, identities.Close, err
}

// shutdown lets the requests under way finish, which takes them seconds at
// most. Connections without one, those that never sent a byte among them, are
// closed.
func shutdown(ctx context.Context, srv *http.Server) error {
	ctx, cancel := context.WithTimeout(ctx, lastRequests)
	defer cancel()
	if err := srv.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return srv.Close()
}

func listen(ctx context.Context, flag, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	return l, nil
}

func httpServer(h http.Handler, log zerolog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       bodyTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          stdlog.New(quiet{log}, "", 0),
	}
}

// quiet logs what the HTTP server says of single connections, which is about
// clients' mistakes, where an operator who looks for them finds it.
type quiet struct{ log zerolog.Logger }

func (q quiet) Write(text []byte) (int, error) {
	q.log.Debug().Str("from", "http").Msg(strings.TrimSpace(string(text)))
	return len(text), nil
}

// upTo is 0 to n-1: all partitions, or all buckets.
func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// adminHandler serves operators: it belongs on an address that only they reach.
func adminHandler(sys *system) http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	reg.MustRegister(sys.collectors...)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := sys.ready(); err != nil {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ready")
	})
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// openURL is where a person finds the demo page.
func openURL(addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return ""
	}
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, port) + "/"
}

// connectionsByMemory is the default of --max-connections: what half of the
// memory holds, at 8 KiB each, and what leaves a fifth of the open files that
// are allowed. An idle connection has been measured at 4.3 KB, the kernel's part aside;
// and beside the long connections there may be a tenth as many short ones, of
// 13 KB each.
func connectionsByMemory() int {
	const each = 8 << 10
	limit := memoryLimit() / 2 / each
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		limit = min(limit, files.Cur*8/10)
	}
	return int(max(limit, 100))
}

// memoryLimit is the memory this process may use: the cgroup's limit, else
// the machine's size.
func memoryLimit() uint64 {
	total := uint64(1 << 30)
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		total = uint64(info.Totalram) * uint64(info.Unit)
	}
	if text, err := os.ReadFile("/sys/fs/cgroup/memory.max"); err == nil {
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
			total = min(total, n)
		}
	}
	return total
}
