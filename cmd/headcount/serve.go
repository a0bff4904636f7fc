package main

import (
	"context"
	"errors"
	"fmt"
	stdlog "log"
	"net"
	"net/http"
	"net/http/pprof"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/rs/zerolog"

	"headcount/cmd/headcount/certificates"
	"headcount/cmd/headcount/config"
	"headcount/cmd/headcount/probe"
	"headcount/gateway"
	"headcount/internal/machine"
	"headcount/internal/setting"
)

const (
	// How long a client may take over the head of a request, and keep an idle
	// connection. Bodies are small, and answers are written at once.
	headerTimeout = 10 * time.Second
	bodyTimeout   = 15 * time.Second
	answerTimeout = 30 * time.Second // from the end of the head, for the body, the work, and a client that reads slowly
	idleTimeout   = 2 * time.Minute
	maxHeader     = 16 << 10
	lastRequests  = time.Second // for requests under way when the server ends
)

// serveProcess calls serve in a process of its own, and tunes the memory of this process.
func serveProcess(ctx context.Context, cfg config.Server, log zerolog.Logger) error {
	// Not in serve, which tests call in processes that are not theirs to tune.
	machine.LimitMemory()
	machine.LoadBallast()
	return serve(ctx, cfg, log)
}

// serve runs the server until ctx ends. Then it asks its clients to reconnect elsewhere and
// returns nil, or an error if that took longer than --shutdown-timeout.
func serve(ctx context.Context, cfg config.Server, log zerolog.Logger) error {
	// The addresses come first: one in use is the most frequent mistake, and must not leave a lease or a locked file.
	open := listeners{}
	defer open.close()

	if err := open.listen(ctx, cfg); err != nil {
		return err
	}

	sys, err := newSystem(ctx, cfg, open, log)
	if err != nil {
		return err
	}

	defer sys.close()

	// The roles outlive ctx, because the shutdown needs them.
	roles, stopRoles := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRoles()

	// No sender may block, because after the first error nobody receives.
	failed := make(chan error, 5) // one place for each goroutine that sends
	running := make(chan error, 1)
	// An error of the roles ends the process, or half of it would go on serving.
	go func() { // ends with roles
		err := sys.run(roles)
		stopRoles()
		running <- err
		if err != nil {
			failed <- err
		}
	}()

	// The addresses answer before the store does, because /healthz and /readyz must.
	endpoints, err := sys.endpoints(ctx, open)
	if err != nil {
		stopRoles()
		return errors.Join(fmt.Errorf("serve: %w", err), <-running)
	}
	for _, e := range endpoints {
		go func() { failed <- e.serve() }() // ends with Shutdown or Close below
	}

	for _, warning := range cfg.Open() {
		log.Warn().Msg(warning)
	}

	sys.logAddresses(log, open)

	// Each return below stops the roles first, which ends logReady, so this wait is short.
	var ready sync.WaitGroup
	defer ready.Wait()
	ready.Go(func() { logReady(roles, sys, log) })

	select {
	case err := <-failed:
		stopRoles()
		<-running
		err = fmt.Errorf("serve: %w", err)
		for _, e := range endpoints {
			err = errors.Join(err, e.Close())
		}
		return err
	case <-ctx.Done():
	}

	// Said before the wait, since this may take as long as --shutdown-timeout.
	log.Info().Stringer("within", cfg.ShutdownTimeout).Msg("the server shuts down and asks its clients to reconnect; " +
		"a second signal ends the process at once")
	err = sys.drain(ctx, endpoints)
	stopRoles()

	err = errors.Join(err, <-running)
	if err != nil {
		return fmt.Errorf("shut down: %w", err)
	}
	log.Info().Msg("the shutdown is complete")
	return nil
}

// listener is an open address. For --cluster-listen it includes the UDP port with the same number.
type listener struct {
	net.Listener
	udp net.PacketConn // nil at other addresses
}

func (l listener) close() {
	_ = l.Close()
	if l.udp != nil {
		_ = l.udp.Close()
	}
}

// listen opens an address.
func listen(ctx context.Context, a config.Address) (l listener, err error) {
	var lc net.ListenConfig
	if a.Flag == "listen" {
		// Four system calls for each client, for nothing: requests have timeouts, and what lasts has pings and a limit
		// to how long sent data may be unacknowledged.
		lc.KeepAlive = -1
	}
	l.Listener, err = lc.Listen(ctx, "tcp", a.Addr)
	if err == nil && a.Flag == "cluster-listen" {
		// The port of the TCP listener, which the system may have chosen.
		l.udp, err = lc.ListenPacket(ctx, "udp", l.Addr().String())
		if err != nil {
			_ = l.Close()
		}
	}

	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		err = fmt.Errorf("--%s: %w; end the program that has this address, or give another one", a.Flag, err)
	case err != nil:
		err = fmt.Errorf("--%s: %w", a.Flag, err)
	}

	return l, err
}

// listeners are the open addresses of this process, by their flags.
type listeners map[string]listener

// listen opens the addresses of the settings.
func (l listeners) listen(ctx context.Context, cfg config.Server) error {
	for _, a := range cfg.Addresses() {
		opened, err := listen(ctx, a)
		if err != nil {
			return err
		}
		// Entered one by one, so that close ends those that were opened before an error.
		l[a.Flag] = opened
	}

	return nil
}

func (l listeners) close() {
	for _, opened := range l {
		opened.close()
	}
}

// drain closes the connections of clients, hands over the process's roles, and then shuts
// down the endpoints.
func (s *system) drain(ctx context.Context, endpoints []endpoint) (err error) {
	// The signal has ended ctx, so the time starts anew; its last tenth is for what closes after this.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.ShutdownTimeout*9/10)
	defer cancel()

	// With the embedded store only the next run of this process can take its users over, so none of them may expire
	// meanwhile.
	if s.cfg.Redis == "" {
		s.node.StopClock()
	}

	// Clients go first, while this process still answers for the partitions that it owns.
	if s.gateway != nil {
		s.gateway.Drain(ctx)
	}

	// After the clients, because their last operations may belong to partitions of this process.
	s.member.Leave(ctx)
	for _, e := range endpoints {
		err = errors.Join(err, shutdown(ctx, e.Server))
	}

	return err
}

// logAddresses logs the addresses of this process, its store and its roles.
func (s *system) logAddresses(log zerolog.Logger, open listeners) {
	hello := log.Info().
		Str("admin", open["admin-listen"].Addr().String()).Str("store", s.where).Strs("roles", s.cfg.Roles)
	if s.counters != nil {
		hello = hello.Str("counters", s.counters.Where())
	}

	if s.cfg.Redis != "" {
		hello = hello.Str("cluster", s.cfg.AdvertiseAddr()).Str("region", s.cfg.Region)
	}

	if l, is := open["listen"]; is {
		hello = hello.Str("listen", l.Addr().String()).Str("open", openURL(l.Addr(), s.cfg))
	}

	if l, is := open["http-redirect"]; is {
		hello = hello.Str("http_redirect", l.Addr().String())
	}
	hello.Msg("headcount is listening")
}

// logReady logs once that the server is ready.
func logReady(ctx context.Context, sys *system, log zerolog.Logger) {
	// Several parts decide on readiness, and none announces it, so this asks.
	look := time.NewTicker(50 * time.Millisecond)
	defer look.Stop()

	for sys.ready() != nil {
		select {
		case <-ctx.Done():
			return
		case <-look.C:
		}
	}

	log.Info().Msg("headcount is serving")
}

const (
	// sharedRequests is how many calls and event streams one connection may have under way
	// over HTTP/2.
	sharedRequests = 100

	// sharedBodies is how many bytes of request bodies the server buffers for one connection
	// over HTTP/2. It is the least that is possible; the default is a megabyte.
	sharedBodies = 64 << 10
)

// endpoint serves one address.
type endpoint struct {
	*http.Server
	listener net.Listener
	tls      bool
}

func (e endpoint) serve() error {
	if e.tls {
		// No file names: TLSConfig has the certificates and reloads them.
		return e.ServeTLS(e.listener, "", "")
	}

	return e.Serve(e.listener)
}

// endpoints returns the servers of the listeners, in the order in which they are shut down.
func (s *system) endpoints(ctx context.Context, open listeners) (all []endpoint, err error) {
	probes := probe.New(s.cfg.Proxies, s.cfg.BasePath)

	// Visitors first: the admin address answers /readyz and /metrics until all else has ended.
	if l, is := open["listen"]; is {
		visitors, err := s.visitorEndpoints(l.Listener, probes.Before(s.gateway.Handler()))
		if err != nil {
			return nil, err
		}
		all = visitors
	}

	if l, is := open["http-redirect"]; is {
		// The same limits as at --listen, or plain HTTP would be a way around them.
		limiter := s.gateway.Listener(l.Listener)
		srv := httpServer(s.certs.Redirect, s.log)
		srv.WriteTimeout = answerTimeout
		srv.ConnState = limiter.State
		all = append(all, endpoint{Server: srv, listener: limiter})
	}

	admin := ownHost(s.cfg.AdminListen, adminHandler(ctx, s, probes))
	return append(all, endpoint{Server: httpServer(admin, s.log), listener: open["admin-listen"]}), nil
}

// visitorEndpoints returns what serves the clients of l, with TLS if there are certificates. It
// closes a connection over HTTP/2 whose client reads no byte for --write-timeout.
func (s *system) visitorEndpoints(l net.Listener, handler http.Handler) ([]endpoint, error) {
	// Whoever sends visitors to https can promise browsers that there is nothing else (HSTS).
	if s.cfg.Redirect != "" {
		handler = certificates.OverTLSAlone(handler)
	}

	srv := httpServer(handler, s.log)
	srv.WriteTimeout = answerTimeout // WebSockets and event streams have timeouts of their own

	if s.certs == nil {
		entrance, err := s.gateway.NewEntrance(l, handler, headerTimeout)
		if err != nil {
			return nil, err
		}
		srv.ConnState = entrance.State

		return []endpoint{{Server: srv, listener: entrance}, {Server: srv, listener: entrance.Passed()}}, nil
	}

	// Over HTTP/2 many requests share a connection, so what belongs to it travels in the context.
	limiter := s.gateway.Listener(l)
	srv.ConnState = limiter.State
	srv.ConnContext = limiter.Context
	srv.TLSConfig = s.certs.Config
	srv.HTTP2 = &http.HTTP2Config{
		MaxConcurrentStreams:          sharedRequests,
		WriteByteTimeout:              s.cfg.WriteTimeout,
		MaxReceiveBufferPerConnection: sharedBodies,
		MaxReceiveBufferPerStream:     sharedBodies,
	}

	return []endpoint{{Server: srv, listener: gateway.BelowTLS(limiter), tls: true}}, nil
}

// shutdown waits at most lastRequests for the requests under way. It closes every
// connection without a request, also one that never sent a byte.
func shutdown(ctx context.Context, srv *http.Server) error {
	ctx, cancel := context.WithTimeout(ctx, lastRequests)
	defer cancel()

	// A request that lasts longer is cut off, or one client could hold up the shutdown.
	err := srv.Shutdown(ctx)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}

	return srv.Close()
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

// quiet logs the HTTP server's messages about single connections at a low level, because
// they are about mistakes of clients.
type quiet struct{ log zerolog.Logger }

func (q quiet) Write(text []byte) (int, error) {
	// Whoever reads the log must not learn who the visitors are.
	said := peerAddress.ReplaceAllString(strings.TrimSpace(string(text)), "…")
	q.log.Debug().Str("from", "http").Msg(said)
	return len(text), nil
}

// peerAddress matches the address of a connection's end, as package net writes it.
var peerAddress = regexp.MustCompile(`(\d+\.\d+\.\d+\.\d+|\[[0-9a-f:.]*:[^\]\s]*\]):\d+`)

// adminHandler returns the handler for operators. When ctx ends, /readyz reports that the process is not ready. Only
// operators must be able to reach its address.
func adminHandler(ctx context.Context, sys *system, probes *probe.Probes) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(sys.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		// An unknown name is refused, or a misspelt one would silently ask for the whole.
		exclude := r.URL.Query()["exclude"]
		if slices.ContainsFunc(exclude, func(what string) bool { return what != "store" }) {
			http.Error(w, "only exclude=store can be asked for", http.StatusBadRequest)
			return
		}

		err := sys.ready()
		// Without its store a gateway serves the last known counts. When the store that all gateways share is
		// unavailable, a load balancer that took all of them out of service would refuse every visitor.
		if len(exclude) > 0 && sys.reached.Load() && ctx.Err() == nil {
			err = sys.open()
		}

		if err != nil {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "not ready: "+err.Error(), http.StatusServiceUnavailable)
			return
		}

		fmt.Fprintln(w, "ready")
	})

	mux.HandleFunc("POST /probe", probes.Begin)
	// Without cmdline, which would show secrets that were given as flags.
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)

	return mux
}

// ownHost refuses requests to a loopback address under the name of another host. A page in a browser on this machine
// could send such requests after its own name was changed to resolve to 127.0.0.1 (DNS rebinding).
func ownHost(addr string, handler http.Handler) http.Handler {
	if !setting.IsLoopback(addr) {
		return handler
	}

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A Host without a port means port 80.
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = strings.Trim(r.Host, "[]")
		}

		if host != "" && host != "localhost" && net.ParseIP(host) == nil {
			const text = "this address answers requests to localhost, or to an IP address, alone"
			http.Error(w, text, http.StatusMisdirectedRequest)
			return
		}

		handler.ServeHTTP(w, r)
	})
}

// openURL returns the URL of the demo page.
func openURL(addr net.Addr, cfg config.Server) string {
	// The log offers an address that can be clicked on, which a wildcard cannot.
	host, port, _ := net.SplitHostPort(addr.String()) // a listener's address has both
	ip := net.ParseIP(host)
	if ip == nil || ip.IsUnspecified() {
		host = "localhost"
	}

	scheme := "http://"
	if cfg.HasTLS() {
		scheme = "https://"
	}

	if len(cfg.Domains) > 0 {
		host = cfg.Domains[0]
	}

	return scheme + net.JoinHostPort(host, port) + cfg.BasePath + "/"
}
