// Package redistest starts real Redis servers for tests: single ones, with Sentinel, and as a Cluster. They listen on
// free ports of the loopback, keep no data unless a test asks for it, and die with the test process.
package redistest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/rs/zerolog"

	"headcount/internal/redisconn"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

const host = "127.0.0.1" // of all servers

// clusterBus is the distance from a server's port to its port of the Cluster bus.
const clusterBus = 10000

// Server is one redis-server. Its address stays the same over restarts.
type Server struct {
	Addr string

	servertest.Process

	port string
	dir  string
	args []string
	text string // of the configuration file; "": there is none

	tls   *tls.Config // nil: the server speaks no TLS
	login string      // user:password in URL; "": none
}

// Durable are the options of a server that loses nothing when it is killed.
var Durable = []string{"--appendonly", "yes", "--appendfsync", "always"}

// Start starts a server that ends with the test. args are options of
// redis-server that replace the defaults, such as "--appendonly", "yes".
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return newServer(t.TempDir(), args...).startFor(t)
}

// StartAt is Start for a server whose clock is wrong by offset, in whole seconds.
func StartAt(t testing.TB, offset time.Duration, args ...string) *Server {
	t.Helper()

	s := newServer(t.TempDir(), args...)
	s.Clock = offset
	s.startFor(t)

	c := s.Client()
	defer c.Close()

	there, err := c.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}

	// A test must not pass because the clock is right after all.
	if off := time.Until(there) - offset; off.Abs() > time.Minute {
		t.Fatalf("the server's clock is not %s off, but %s", offset, time.Until(there))
	}

	return s
}

// startFor starts the server, which ends with the test.
func (s *Server) startFor(t testing.TB) *Server {
	t.Helper()

	t.Cleanup(s.Kill)
	s.start(t)

	return s
}

func newServer(dir string, args ...string) *Server {
	// The port of the Cluster bus has to be free as well.
	port := strconv.Itoa(servertest.FreePort(clusterBus))

	return &Server{
		Addr: net.JoinHostPort(host, port),
		port: port,
		dir:  dir,
		args: append([]string{
			"--bind", host, "--port", port, "--dir", dir, "--save", "", "--appendonly", "no",
		}, args...),
	}
}

func (s *Server) start(t testing.TB) {
	t.Helper()

	args := s.args
	if s.text != "" {
		file := filepath.Join(s.dir, "redis.conf")
		if _, err := os.Stat(file); err != nil { // a sentinel has changed its file, so it is not written again
			if err := os.WriteFile(file, []byte(s.text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		args = append([]string{file}, args...)
	}

	c := s.Client()
	defer c.Close()

	answers := func(ctx context.Context) error { return c.Ping(ctx).Err() }
	cmd := exec.Command("redis-server", args...)
	output := filepath.Join(s.dir, "output")
	if err := s.Serve(cmd, output, testkit.Timeout, answers); err != nil {
		t.Fatalf("redistest: %v (make setup installs redis-server)", err)
	}
}

// await calls ok until it returns no error, and fails the test when that takes too long.
func await(t testing.TB, ok func() error) {
	t.Helper()
	if err := servertest.Await(nil, testkit.Timeout, func(context.Context) error { return ok() }); err != nil {
		t.Fatalf("redistest: %v", err)
	}
}

// Dial returns a connection to the Redis at a URL. It closes with the test.
func Dial(t testing.TB, url string) *redisconn.Conn {
	t.Helper()

	log := zerolog.New(zerolog.NewTestWriter(t)).Level(zerolog.InfoLevel)
	conn, err := redisconn.Open(redisconn.Config{URL: url, Log: log})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Errorf("close the connection to Redis: %v", err)
		}
	})

	return conn
}

// URL returns the server's URL, as redisconn.Config expects it.
func (s *Server) URL() string { return s.origin() + "/0" }

// origin returns the URL without a path.
func (s *Server) origin() string {
	u := "redis://"
	if s.tls != nil {
		u = "rediss://"
	}

	if s.login != "" {
		u += s.login + "@"
	}

	return u + s.Addr
}

// Client returns a client of this server alone, as the user that may do
// everything; the caller closes it.
func (s *Server) Client() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr:            s.Addr,
		TLSConfig:       s.tls,
		MaxRetries:      -1,
		DisableIdentity: true,
		Protocol:        2,
		DialTimeout:     testkit.Timeout,
		ReadTimeout:     testkit.Timeout,
		WriteTimeout:    testkit.Timeout,
	})
}

// Do runs one command on this server and fails the test when it fails.
func (s *Server) Do(t testing.TB, args ...any) any {
	t.Helper()

	v, err := s.do(args...)
	if err != nil {
		t.Fatalf("redis: %v: %v", args, err)
	}

	return v
}

func (s *Server) do(args ...any) (any, error) {
	c := s.Client() // a new one each time, because the server may have been killed since
	defer c.Close()

	return c.Do(context.Background(), args...).Result()
}

// shows returns an error unless the answer to a command has the text.
func (s *Server) shows(text string, command ...any) error {
	answer, err := s.do(command...)
	if err == nil && !strings.Contains(answer.(string), text) {
		err = fmt.Errorf("%v: no %q in %s", command, text, answer)
	}
	return err
}

// Flush removes all data; the server still knows its scripts.
func (s *Server) Flush(t testing.TB) { t.Helper(); s.Do(t, "FLUSHALL") }

// Restart kills the server and starts it again. It is empty then, unless its options make it keep its data.
func (s *Server) Restart(t testing.TB) {
	t.Helper()

	s.Kill()
	s.start(t)
}

// Cluster is a Redis Cluster of real servers.
type Cluster struct {
	Masters  []*Server // that the Cluster started with
	Replicas []*Server // replica i follows master i mod masters
}

// StartCluster starts a Cluster that ends with the test. args are as for Start.
func StartCluster(t testing.TB, masters, replicas int, args ...string) *Cluster {
	t.Helper()

	c := &Cluster{}
	t.Cleanup(c.Kill)

	c.start(t, t.TempDir(), masters, replicas, func(dir string, more ...string) *Server {
		return newServer(dir, append(more, args...)...)
	})

	return c
}

// start creates servers with newServer, starts them and makes a Cluster of them.
func (c *Cluster) start(
	t testing.TB, dir string, masters, replicas int, newServer func(dir string, args ...string) *Server,
) {
	t.Helper()

	timeout := "15000" // ms; a server on a busy machine must not be taken for dead
	if replicas > 0 {
		timeout = "1500" // these tests wait for a failover
	}

	for i := range masters + replicas {
		sub := filepath.Join(dir, "node"+strconv.Itoa(i))
		if err := os.Mkdir(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		s := newServer(sub,
			"--cluster-enabled", "yes", "--cluster-node-timeout", timeout, "--repl-diskless-sync-delay", "0")

		if i < masters {
			c.Masters = append(c.Masters, s)
		} else {
			c.Replicas = append(c.Replicas, s)
		}
		s.start(t)
	}

	c.join(t)
	c.awaitJoined(t)
}

// join makes a Cluster of the servers.
func (c *Cluster) join(t testing.TB) {
	t.Helper()
	masters := len(c.Masters)

	// With equal epochs the masters would first have to resolve the conflict.
	for i, s := range c.Masters {
		s.Do(t, "CLUSTER", "ADDSLOTSRANGE", 16384*i/masters, 16384*(i+1)/masters-1)
		s.Do(t, "CLUSTER", "SET-CONFIG-EPOCH", i+1)
	}

	for _, s := range c.all()[1:] {
		s.Do(t, "CLUSTER", "MEET", host, c.Masters[0].port)
	}

	// Repeated until it succeeds, because a server learns of the others some time after it has met one.
	for i, s := range c.Replicas {
		id := c.Masters[i%masters].Do(t, "CLUSTER", "MYID")
		await(t, func() error {
			_, err := s.do("CLUSTER", "REPLICATE", id)
			return err
		})
	}
}

// awaitJoined waits until each server knows all others, because a client may ask any.
func (c *Cluster) awaitJoined(t testing.TB) {
	t.Helper()

	await(t, func() error {
		var errs []error
		known := fmt.Sprintf("cluster_known_nodes:%d\r", len(c.all()))
		for _, s := range c.all() {
			errs = append(errs, s.shows("cluster_state:ok", "CLUSTER", "INFO"), s.shows(known, "CLUSTER", "INFO"))
		}

		for _, s := range c.Replicas {
			errs = append(errs, s.shows("master_link_status:up", "INFO", "replication"))
		}

		return errors.Join(errs...)
	})
}

func (c *Cluster) all() []*Server { return append(append([]*Server(nil), c.Masters...), c.Replicas...) }

// URL returns a URL with the addresses of all masters.
func (c *Cluster) URL() string {
	u := c.Masters[0].origin() + "/?"
	for i, s := range c.Masters[1:] {
		if i > 0 {
			u += "&"
		}
		u += "addr=" + s.Addr
	}

	return u
}

// Flush empties all masters that the cluster started with.
func (c *Cluster) Flush(t testing.TB) {
	t.Helper()
	for _, s := range c.Masters {
		s.Flush(t)
	}
}

// Kill ends all servers.
func (c *Cluster) Kill() {
	for _, s := range c.all() {
		s.Kill()
	}
}

// Sentinel is a master with a replica, watched by three sentinels.
type Sentinel struct {
	Master, Replica *Server // as they started
	Sentinels       []*Server
}

// MasterName is the name of the master in Sentinel's configuration.
const MasterName = "headcount"

// StartSentinel starts the five servers, which end with the test. args are options of the master and its replica, as
// those of Start.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()

	// By default a master waits for five seconds, in case further replicas come, before it sends the first copy.
	s := &Sentinel{Master: Start(t, append([]string{"--repl-diskless-sync-delay", "0"}, args...)...)}
	replicaOf := []string{"--replicaof", host + " " + s.Master.port, "--repl-diskless-sync-delay", "0"}
	s.Replica = Start(t, append(replicaOf, args...)...)

	for range 3 {
		sn := newServer(t.TempDir())
		sn.text = fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]s 2\n"+
			"sentinel down-after-milliseconds %[1]s 1000\n"+
			"sentinel failover-timeout %[1]s 5000\n", MasterName, host, s.Master.port)
		sn.args = []string{"--sentinel", "--bind", host, "--port", sn.port, "--dir", sn.dir}
		s.Sentinels = append(s.Sentinels, sn.startFor(t))
	}

	// Sentinels find each other through the master. Until they have, there is no majority for a failover.
	await(t, func() error {
		errs := []error{s.Replica.shows("master_link_status:up", "INFO", "replication")}
		for _, sn := range s.Sentinels {
			errs = append(errs, sn.shows("slaves=1,sentinels=3", "INFO", "sentinel"))
		}
		return errors.Join(errs...)
	})

	return s
}

// URL returns a URL with the addresses of the sentinels and the name of the master.
func (s *Sentinel) URL() string {
	u := fmt.Sprintf("redis://%s/0?master_name=%s&addr=%s&addr=%s",
		s.Sentinels[0].Addr, MasterName, s.Sentinels[1].Addr, s.Sentinels[2].Addr)
	if name, password, ok := strings.Cut(s.Master.login, ":"); ok { // a user before the @ would be for the sentinels
		u += "&username=" + name + "&password=" + password
	}

	return u
}

// shared servers live as long as the test process, because starting one takes longer than emptying it.
var shared struct {
	sync.Mutex
	dir      string
	single   *Server
	cluster  *Cluster
	loopback servertest.Certificate // Stop keeps it, because Go reads SSL_CERT_FILE only once
}

// Single returns this test process's shared server, emptied.
func Single(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()

	if shared.single == nil {
		shared.single = newServer(sharedDir(t, "single"))
		shared.single.start(t)
	}

	shared.single.Flush(t)
	return shared.single
}

// ThreeMasters returns this test process's shared Cluster, emptied.
func ThreeMasters(t testing.TB) *Cluster {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()

	if shared.cluster == nil {
		shared.cluster = &Cluster{}
		shared.cluster.start(t, sharedDir(t, "cluster"), 3, 0, newServer)
	}

	shared.cluster.Flush(t)
	return shared.cluster
}

func sharedDir(t testing.TB, name string) string {
	if shared.dir == "" {
		dir, err := os.MkdirTemp("", "redistest")
		if err != nil {
			t.Fatal(err)
		}
		shared.dir = dir
	}

	dir := filepath.Join(shared.dir, name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Stop ends the shared servers. TestMain calls it after the tests.
func Stop() {
	shared.Lock()
	defer shared.Unlock()

	if shared.single != nil {
		shared.single.Kill()
	}
	if shared.cluster != nil {
		shared.cluster.Kill()
	}
	if shared.dir != "" {
		_ = os.RemoveAll(shared.dir)
	}

	shared.single = nil
	shared.cluster = nil
	shared.dir = ""
}
