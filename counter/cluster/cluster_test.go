package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/call"
	"headcount/counter/cluster"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/internal/pgtest"
	"headcount/internal/redisconn"
	"headcount/internal/redistest"
	"headcount/internal/rows"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
	"headcount/presence"
)

func TestMain(m *testing.M) { testkit.Main(m, pgtest.Stop, redistest.Stop) }

// world has some processes over one Redis.
type world struct {
	url  string
	with func(*cluster.Config) // optional
	all  []*process
}

// process is one process. Its name is the address at which it listens for the others.
type process struct {
	*cluster.Process
	self     presence.Process
	redis    *redisconn.Conn
	registry *prometheus.Registry
	log      servertest.Log
	store    *call.Store   // without other regions
	shared   counter.Store // with other regions

	listener net.Listener
	wg       sync.WaitGroup // accept, and Serve for each connection
	mu       sync.Mutex     // guards the fields below
	conns    []net.Conn
	dead     bool
}

// start starts a process, and introduces it to all others.
func (w *world) start(t testing.TB, roles ...string) *process {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	p := &process{listener: listener, registry: prometheus.NewRegistry()}
	log := zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.WarnLevel)
	p.redis, err = redisconn.Open(redisconn.Config{URL: w.url, Log: log})
	if err != nil {
		t.Fatal(err)
	}

	p.self = presence.Process{
		Name: listener.Addr().String(), Roles: roles, Incarnation: presence.NewIncarnation(time.Now()),
	}
	cfg := cluster.Config{
		Self: p.self, Redis: p.redis, Rules: countertest.Rules, Dial: p.dial, Registerer: p.registry,
		Log: zerolog.New(&p.log).Level(zerolog.WarnLevel),
	}
	if w.with != nil {
		w.with(&cfg)
	}
	p.Process, err = cluster.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}

	// Opening a store waits for the feed, and for owners that know each other.
	p.wg.Go(p.accept)
	w.all = append(w.all, p)
	w.introduce()
	if p.HasPeers() {
		p.shared = p.NewSharedStore(nil, nil)
	} else {
		p.store = p.NewStore(nil)
	}
	t.Cleanup(func() { p.end(t, false) })

	return p
}

// introduce notifies all processes of all others.
func (w *world) introduce() {
	w.all = slices.DeleteFunc(w.all, func(p *process) bool { return p.dead })
	var processes []presence.Process
	for _, p := range w.all {
		processes = append(processes, p.self)
	}

	for _, p := range w.all {
		p.SetProcesses(processes)
	}
}

func (p *process) dial(ctx context.Context, addr string) (io.ReadWriteCloser, []byte, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, nil, err
	}

	return conn, []byte("key"), nil
}

func (p *process) accept() {
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			return
		}

		p.mu.Lock()
		p.conns = append(p.conns, conn)
		p.mu.Unlock()
		p.wg.Go(func() { p.Serve(conn, []byte("key")) })
	}
}

// end ends the process in order, or kills it. A killed process writes nothing more, and its connections break.
func (p *process) end(t testing.TB, killed bool) {
	t.Helper()
	if p.dead {
		return
	}

	// Without Redis and connections the rest has no effect on other processes.
	p.dead = true
	if killed {
		_ = p.redis.Close()
		p.disconnect()
	}

	if err := p.closeStore(); err != nil {
		t.Error(err)
	}

	_ = p.Close()
	p.disconnect()
	p.wg.Wait()
	if !killed {
		_ = p.redis.Close()
	}
}

func (p *process) closeStore() error {
	if p.shared != nil {
		return p.shared.Close()
	}

	return p.store.Close()
}

func (p *process) disconnect() {
	_ = p.listener.Close()

	p.mu.Lock()
	defer p.mu.Unlock()

	for _, conn := range p.conns {
		_ = conn.Close()
	}
}

// impatient is a store whose callers wait for a second.
type impatient struct{ *call.Store }

const patience = time.Second

// Apply implements counter.Writer.
func (s impatient) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()

	return s.Store.Apply(ctx, ops)
}

// Limit implements counter.Limiter.
func (s impatient) Limit(ctx context.Context, calls []limit.Request) []counter.LimitResult {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()

	return s.Store.Limit(ctx, calls)
}

// instance returns the store of one process, and perhaps of a peer. A crash kills the process, and sometimes a server
// of Redis as well. A cut kills all servers.
func (w *world) instance(t testing.TB, store, peer *process, servers []*redistest.Server) countertest.Instance {
	is := countertest.Instance{Store: impatient{store.store}}
	if peer != nil {
		is.Peer = impatient{peer.store}
	}
	crashes := 0
	is.Crash = func(t testing.TB) counter.Store {
		if crashes%8 == 0 {
			servers[crashes/8%len(servers)].Restart(t)
		}
		crashes++

		store.end(t, true)
		store = w.start(t, store.self.Roles...)
		countertest.AwaitServed(t, store.store)

		return impatient{store.store}
	}
	is.Cut = func(t testing.TB) func() {
		for _, server := range servers {
			server.Kill()
		}

		return func() {
			for _, server := range servers {
				server.Restart(t)
			}
		}
	}

	return is
}

const (
	gateway = presence.RoleGateway
	owns    = presence.RolePresence
)

func TestServerContract(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	countertest.Run(t, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		w := &world{url: server.URL()}

		return w.instance(t, w.start(t, gateway, owns), nil, []*redistest.Server{server})
	})
}

// The tested store belongs to a process that owns nothing; its peer is the owner.
func TestServerContractOfACaller(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	countertest.RunParts(t, countertest.Parts{
		"many members and changes at once":           "calls are large",
		"a watcher hears what it follows":            "changes are published by another process",
		"reservations":                               "calls and answers go over a link",
		"limits end as the model's":                  "calls and answers go over a link",
		"a store that is away":                       "the owner has no Redis",
		"a closed store is unavailable, and says so": "the owner is not",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		w := &world{url: server.URL()}
		owner := w.start(t, gateway, owns)

		return w.instance(t, w.start(t, gateway), owner, []*redistest.Server{server})
	})
}

// There are three owners, one of which is killed again and again, and a process that calls them.
func TestServerContractOfFour(t *testing.T) {
	server := redistest.Start(t, redistest.Durable...)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "batches have several owners, and partitions move",
		"changes at the same time add up":            "several processes change",
		"64 clients fight for 100":                   "two processes fight",
		"free, reserved and committed add up":        "owners are killed",
	}, func(t testing.TB) countertest.Instance {
		server.Flush(t)
		w := &world{url: server.URL()}
		w.start(t, owns)
		w.start(t, owns)
		killed := w.start(t, gateway, owns)

		return w.instance(t, killed, w.start(t, gateway), []*redistest.Server{server})
	})
}

func TestServerContractOnCluster(t *testing.T) {
	redis := redistest.StartCluster(t, 3, 0, redistest.Durable...)
	countertest.RunParts(t, countertest.Parts{
		"any history ends with the model's counters": "partitions are in slots of their own, and masters are killed",
	}, func(t testing.TB) countertest.Instance {
		redis.Flush(t)
		w := &world{url: redis.URL()}

		return w.instance(t, w.start(t, gateway, owns), w.start(t, gateway, owns), redis.Masters)
	})
}

// Counters of another release are neither read nor changed, and callers learn what to do. When they have been
// converted, they are served.
func TestServerAnotherReleaseIsRefused(t *testing.T) {
	server := redistest.Single(t)
	server.Do(t, "HSET", "hc:{c}:facts", "counters", "2", "format", "5")
	w := &world{url: server.URL()}
	store := impatient{w.start(t, gateway, owns).store}

	one := counter.Change{Key: "s:1", Rule: countertest.Rules.Find("s:1"), Verb: counter.Add, Delta: 1}
	ops := []counter.Op{{Changes: []counter.Change{one}}}
	for what, call := range map[string]func() error{
		"change": func() error { return store.Apply(t.Context(), ops)[0].Err },
		"read": func() error {
			_, err := store.Read(t.Context(), []string{"s:1"}, "", 0)
			return err
		},
	} {
		// On a busy machine Redis may not have answered yet which format it has.
		testkit.Eventually(t, what+" is refused with advice", func() bool {
			err := call()
			if !errors.Is(err, counter.ErrUnavailable) {
				t.Fatalf("%s: %v", what, err)
			}

			return strings.Contains(err.Error(), "headcount import --redis URL")
		})
	}

	if keys := server.Do(t, "KEYS", "hc:{r*"); len(keys.([]any)) > 0 {
		t.Errorf("the refused process has written %v, want no keys", keys)
	}

	server.Do(t, "HSET", "hc:{c}:facts", "counters", "3")
	testkit.Eventually(t, "they are served", func() bool { return store.Apply(t.Context(), ops)[0].Err == nil })
}

// number returns the value of a metric, the sum of all its labels.
func (p *process) number(t testing.TB, name string) (sum float64) {
	t.Helper()
	families, err := p.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, family := range families {
		for _, m := range family.GetMetric() {
			if family.GetName() == name {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}

	return sum
}

// The metrics show who owns which partitions, and how much was called, committed and healed.
func TestServerMetrics(t *testing.T) {
	server := redistest.Start(t)
	w := &world{url: server.URL()}
	owner := w.start(t, owns)
	caller := w.start(t, gateway)
	increment := func(key string) error {
		one := counter.Change{Key: key, Rule: countertest.Rules.Find(key), Verb: counter.Add, Delta: 1}
		return impatient{caller.store}.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{one}}})[0].Err
	}

	for n := range 10 {
		testkit.Eventually(t, "it is served", func() bool { return increment(fmt.Sprint("s:", n)) == nil })
	}

	least := func(p *process, name string, want float64) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprint(name, " is ", want), func() bool { return p.number(t, name) >= want })
	}

	least(caller, "headcount_owner_calls_total", 10)
	least(caller, "headcount_owner_call_seconds", 10)
	least(owner, "headcount_owner_partitions", rows.Partitions)
	least(owner, "headcount_owner_claims_total", rows.Partitions)
	least(owner, "headcount_owner_commits_total", 10)
	least(owner, "headcount_owner_commit_seconds", 10)
	least(owner, "headcount_owner_rows", 10)
	least(owner, "headcount_owner_rows_bytes", 1000)
	if healed := owner.number(t, "headcount_owner_healed_rows_total"); healed != 0 {
		t.Errorf("%v rows were healed before the loss, want 0", healed)
	}

	server.Flush(t)
	least(owner, "headcount_owner_healed_rows_total", 10)
	if lines := strings.Count(owner.log.String(), "redis has lost commits of counters"); lines != 1 {
		t.Errorf("%d lines of the log are about the loss, want 1:\n%s", lines, owner.log.String())
	}
	if n := caller.number(t, "headcount_owner_partitions"); n != 0 {
		t.Errorf("a caller owns %v partitions, want 0", n)
	}
}
