// Package redistest starts real Redis servers for tests: single, with Sentinel,
// and as a Cluster. They listen on free ports of the loopback, keep nothing
// unless asked, and die with the test process.
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
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// startTimeout bounds what a server may take to answer on a busy machine.
const startTimeout = 20 * time.Second

// Server is one redis-server. Its address stays the same over restarts.
type Server struct {
	Addr string

	dir  string
	args []string
	env  []string // beside that of the test
	text string   // a configuration file, for those that need one

	tls   *tls.Config // of those that speak TLS alone
	login string      // user:password of URL; "" for nobody in particular

	mu   sync.Mutex
	proc *process
}

// process is one run of a program.
type process struct {
	cmd    *exec.Cmd
	output *os.File
	ended  chan struct{}
}

// Start starts a server that ends with the test. args are options of
// redis-server that replace the defaults, such as "--appendonly", "yes".
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s, err := newServer(t.TempDir(), args...)
	if err == nil {
		t.Cleanup(s.Kill)
		err = s.start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newServer(dir string, args ...string) (*Server, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	return &Server{
		Addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		dir:  dir,
		args: append([]string{
			"--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir, "--save", "", "--appendonly", "no",
		}, args...),
	}, nil
}

// freePort is one that is free now, and whose Cluster bus would be, too.
func freePort() (int, error) {
	for range 100 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return 0, err
		}
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		if port+10000 > 65535 {
			port -= 10000
			if l, err = net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port)); err != nil {
				continue
			}
			_ = l.Close()
		}
		if l, err = net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(port+10000)); err == nil {
			_ = l.Close()
			return port, nil
		}
	}
	return 0, errors.New("redistest: no free port")
}

func (s *Server) start() error {
	args := s.args
	if s.text != "" {
		file := filepath.Join(s.dir, "redis.conf")
		if _, err := os.Stat(file); err != nil { // a sentinel writes into its own
			if err := os.WriteFile(file, []byte(s.text), 0o600); err != nil {
				return err
			}
		}
		args = append([]string{file}, args...)
	}
	p, err := run(s.env, filepath.Join(s.dir, "output"), "redis-server", args...)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.proc = p
	s.mu.Unlock()
	c := s.Client()
	defer c.Close()
	if err := wait(p, func(ctx context.Context) error { return c.Ping(ctx).Err() }); err != nil {
		text, _ := os.ReadFile(filepath.Join(s.dir, "output"))
		return fmt.Errorf("redistest: redis-server %s: %w\n%s", strings.Join(args, " "), err, text)
	}
	return nil
}

// run starts a program that dies with this process.
func run(env []string, output, name string, args ...string) (*process, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("install %s: run make setup", name)
	}
	out, err := os.OpenFile(output, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	p := &process{cmd: exec.Command(path, args...), output: out, ended: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.Env = append(os.Environ(), env...)
	started := make(chan error)
	go p.live(started)
	return p, <-started
}

// wait starts the program and waits for its end.
func (p *process) wait(started chan<- error) {
	defer close(p.ended)
	defer p.output.Close()
	err := p.cmd.Start()
	started <- err
	if err == nil {
		_ = p.cmd.Wait()
	}
}

// wait asks until ok, or the process has ended, or it is too late.
func wait(p *process, ok func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := ok(ctx)
		if err == nil {
			return nil
		}
		var ended <-chan struct{}
		if p != nil {
			ended = p.ended
		}
		select {
		case <-ended:
			return errors.New("it ended at once")
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// URL is the server's, as redisstore.Config wants it.
func (s *Server) URL() string { return s.origin() + "/0" }

// origin is the URL without a path.
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
	return redis.NewClient(&redis.Options{Addr: s.Addr, TLSConfig: s.tls, DialTimeout: time.Second, MaxRetries: -1, DisableIdentity: true, Protocol: 2})
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
	c := s.Client()
	defer c.Close()
	return c.Do(context.Background(), args...).Result()
}

// Flush empties the server, with the scripts it knows left.
func (s *Server) Flush(t testing.TB) { t.Helper(); s.Do(t, "FLUSHALL") }

// Kill ends the server at once, as a crash does.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil {
		_ = s.proc.cmd.Process.Kill()
		<-s.proc.ended
		s.proc = nil
	}
}

// Pause has the server hang: its connections stay, and it says nothing.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume ends Pause.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig os.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil {
		_ = s.proc.cmd.Process.Signal(sig)
	}
}

// Restart starts the server again after Kill: empty, unless it keeps its data.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.Kill()
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
}

// Cluster is a Redis Cluster of real servers.
type Cluster struct {
	Masters  []*Server // those at the beginning
	Replicas []*Server // replica i follows master i mod masters
}

// StartCluster starts a Cluster that ends with the test. args are as for Start.
func StartCluster(t testing.TB, masters, replicas int, args ...string) *Cluster {
	t.Helper()
	c, err := startCluster(t.TempDir(), masters, replicas, func(dir string, more ...string) (*Server, error) {
		return newServer(dir, append(more, args...)...)
	})
	if c != nil {
		t.Cleanup(c.Kill)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func startCluster(dir string, masters, replicas int, newServer func(dir string, args ...string) (*Server, error)) (*Cluster, error) {
	c := &Cluster{}
	timeout := "15000" // on a busy machine one must not be taken for dead
	if replicas > 0 {
		timeout = "1500" // here it is to be noticed soon
	}
	for i := range masters + replicas {
		sub := filepath.Join(dir, "node"+strconv.Itoa(i))
		if err := os.Mkdir(sub, 0o700); err != nil {
			return c, err
		}
		s, err := newServer(sub, "--cluster-enabled", "yes", "--cluster-node-timeout", timeout, "--repl-diskless-sync-delay", "0")
		if err != nil {
			return c, err
		}
		if i < masters {
			c.Masters = append(c.Masters, s)
		} else {
			c.Replicas = append(c.Replicas, s)
		}
		if err := s.start(); err != nil {
			return c, err
		}
	}
	for i, s := range c.Masters {
		first, last := 16384*i/masters, 16384*(i+1)/masters-1
		if _, err := s.do("CLUSTER", "ADDSLOTSRANGE", first, last); err != nil {
			return c, err
		}
		if _, err := s.do("CLUSTER", "SET-CONFIG-EPOCH", i+1); err != nil {
			return c, err
		}
	}
	host, port, err := net.SplitHostPort(c.Masters[0].Addr)
	if err != nil {
		return c, err
	}
	for _, s := range c.all()[1:] {
		if _, err := s.do("CLUSTER", "MEET", host, port); err != nil {
			return c, err
		}
	}
	for i, s := range c.Replicas {
		id, err := c.Masters[i%masters].do("CLUSTER", "MYID")
		if err != nil {
			return c, err
		}
		err = wait(nil, func(context.Context) error {
			_, err := s.do("CLUSTER", "REPLICATE", id)
			return err
		})
		if err != nil {
			return c, err
		}
	}
	return c, c.await()
}

// await waits until every server finds the Cluster whole.
func (c *Cluster) await() error {
	all := c.all()
	return wait(nil, func(context.Context) error {
		for _, s := range all {
			info, err := s.do("CLUSTER", "INFO")
			if err != nil {
				return err
			}
			text := info.(string)
			if !strings.Contains(text, "cluster_state:ok") || !strings.Contains(text, "cluster_known_nodes:"+strconv.Itoa(len(all))+"\r") {
				return fmt.Errorf("redistest: cluster: %s", text)
			}
		}
		for _, s := range c.Replicas {
			info, err := s.do("INFO", "replication")
			if err != nil {
				return err
			}
			if !strings.Contains(info.(string), "master_link_status:up") {
				return errors.New("redistest: cluster: a replica has not caught up")
			}
		}
		return nil
	})
}

func (c *Cluster) all() []*Server { return append(append([]*Server(nil), c.Masters...), c.Replicas...) }

// URL names all masters.
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

// Flush empties all masters there were at the beginning.
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
	Master, Replica *Server // at the beginning
	Sentinels       []*Server
}

// MasterName is what the sentinels call the master.
const MasterName = "headcount"

// StartSentinel starts them; they end with the test. args are for the master and
// its replica, as those of Start.
func StartSentinel(t testing.TB, args ...string) *Sentinel {
	t.Helper()
	s := &Sentinel{Master: Start(t, append([]string{"--repl-diskless-sync-delay", "0"}, args...)...)}
	host, port, err := net.SplitHostPort(s.Master.Addr)
	if err != nil {
		t.Fatal(err)
	}
	s.Replica = Start(t, append([]string{"--replicaof", host + " " + port, "--repl-diskless-sync-delay", "0"}, args...)...)
	for range 3 {
		sn, err := newServer(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		sn.text = fmt.Sprintf("sentinel monitor %[1]s %[2]s %[3]s 2\nsentinel down-after-milliseconds %[1]s 1000\nsentinel failover-timeout %[1]s 5000\n", MasterName, host, port)
		_, own, err := net.SplitHostPort(sn.Addr)
		if err != nil {
			t.Fatal(err)
		}
		sn.args = []string{"--sentinel", "--bind", "127.0.0.1", "--port", own, "--dir", sn.dir}
		t.Cleanup(sn.Kill)
		if err := sn.start(); err != nil {
			t.Fatal(err)
		}
		s.Sentinels = append(s.Sentinels, sn)
	}
	err = wait(nil, func(context.Context) error {
		info, err := s.Replica.do("INFO", "replication")
		if err != nil {
			return err
		}
		if !strings.Contains(info.(string), "master_link_status:up") {
			return errors.New("redistest: the replica has not caught up")
		}
		for _, sn := range s.Sentinels {
			info, err := sn.do("INFO", "sentinel")
			if err != nil {
				return err
			}
			if !strings.Contains(info.(string), "slaves=1,sentinels=3") {
				return fmt.Errorf("redistest: sentinels do not know each other: %s", info)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// URL names the sentinels and the master.
func (s *Sentinel) URL() string {
	u := fmt.Sprintf("redis://%s/0?master_name=%s&addr=%s&addr=%s", s.Sentinels[0].Addr, MasterName, s.Sentinels[1].Addr, s.Sentinels[2].Addr)
	if name, password, ok := strings.Cut(s.Master.login, ":"); ok { // a user before the @ is one of the sentinels
		u += "&username=" + name + "&password=" + password
	}
	return u
}

// shared servers live as long as the test process: starting one takes longer
// than emptying it.
var shared struct {
	sync.Mutex
	dir       string
	single    *Server
	cluster   *Cluster
	authority *Authority // it stays: Go reads SSL_CERT_FILE once
}

// Single is this test process's shared server, emptied.
func Single(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.single == nil {
		s, err := newServer(sharedDir(t, "single"))
		if err == nil {
			err = s.start()
		}
		if err != nil {
			t.Fatal(err)
		}
		shared.single = s
	}
	shared.single.Flush(t)
	return shared.single
}

// ThreeMasters is this test process's shared Cluster, emptied.
func ThreeMasters(t testing.TB) *Cluster {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster == nil {
		c, err := startCluster(sharedDir(t, "cluster"), 3, 0, newServer)
		if err != nil {
			c.Kill()
			t.Fatal(err)
		}
		shared.cluster = c
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
	shared.single, shared.cluster, shared.dir = nil, nil, ""
}
