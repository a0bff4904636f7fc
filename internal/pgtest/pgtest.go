// Package pgtest starts real PostgreSQL servers for tests. They listen on free ports of the loopback, have folders of
// their own, and die with the test process. PostgreSQL refuses to run as root, so a test that runs as root starts it as
// the user postgres or, without that user, as nobody.
package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"headcount/internal/servertest"
)

// startTimeout bounds how long a server may take to answer on a busy machine, including its recovery after a crash.
const startTimeout = 3 * time.Minute

// Server is one PostgreSQL. Its address stays the same over restarts.
type Server struct {
	Addr string

	dir  string
	args []string

	servertest.Process
	databases atomic.Int64 // created so far
}

// Start starts a server that ends with the test. settings are lines of postgresql.conf, such as "fsync=on". By default
// a commit does not wait for the disk: what a killed process has committed is kept all the same.
func Start(t testing.TB, settings ...string) *Server {
	t.Helper()

	s := newServer(t, settings...)
	t.Cleanup(s.remove)

	s.create(t)
	return s
}

// newServer returns a server in a new folder that the server's user owns. The folder is not in the test's own, which
// only the test's user may enter.
func newServer(t testing.TB, settings ...string) *Server {
	t.Helper()

	dir, err := os.MkdirTemp("", "pgtest")
	if err != nil {
		t.Fatal(err)
	}

	if who := credential(t); who != nil {
		if err := os.Chown(dir, int(who.Uid), int(who.Gid)); err != nil {
			t.Fatal(err)
		}
	}

	port := strconv.Itoa(servertest.FreePort())

	s := &Server{Addr: net.JoinHostPort("127.0.0.1", port), dir: dir}
	// The Unix socket is in the folder, too, because a PostgreSQL of the machine may use the default place.
	s.args = []string{"-D", s.data(), "-h", "127.0.0.1", "-p", port, "-k", dir}
	for _, setting := range append([]string{"fsync=off", "max_connections=200", "shared_buffers=32MB"}, settings...) {
		s.args = append(s.args, "-c", setting)
	}

	return s
}

// data returns the folder of the server's files.
func (s *Server) data() string { return filepath.Join(s.dir, "data") }

// create creates the server's files and starts it.
func (s *Server) create(t testing.TB) {
	t.Helper()
	initdb := command(t, "initdb", "--pgdata", s.data(), "--username", "headcount",
		"--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync")

	if text, err := initdb.CombinedOutput(); err != nil {
		t.Fatalf("pgtest: initdb: %v\n%s", err, text)
	}

	s.start(t)
}

// remove ends the server for good.
func (s *Server) remove() {
	s.Kill()
	_ = os.RemoveAll(s.dir)
}

// credential returns the user that runs servers; nil: the user of the test.
func credential(t testing.TB) *syscall.Credential {
	t.Helper()
	if os.Getuid() != 0 {
		return nil
	}

	// The packages of PostgreSQL create postgres, and every system has nobody.
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}

		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			t.Fatal(err)
		}

		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid), NoSetGroups: true}
	}
	t.Fatal("pgtest: there is neither a user postgres nor nobody, and PostgreSQL does not run as root")
	return nil
}

// program returns the path of PgBouncer or of a program of PostgreSQL, of which it takes the newest version.
func program(t testing.TB, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}

	var found []string
	for _, pattern := range []string{
		"/usr/sbin/", "/usr/lib/postgresql/*/bin/", "/usr/libexec/postgresql*/", "/usr/pgsql-*/bin/",
		"/opt/homebrew/opt/postgresql*/bin/",
	} {
		paths, _ := filepath.Glob(pattern + name)
		found = append(found, paths...)
	}

	if len(found) == 0 {
		t.Fatalf("pgtest: %s is missing: run make setup", name)
	}

	slices.SortFunc(found, func(a, b string) int { return len(a) - len(b) }) // version 9 before version 10
	return found[len(found)-1]
}

func command(t testing.TB, name string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program(t, name), args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential(t)}

	// The server's user may not be allowed to enter the test's folder.
	cmd.Dir = "/"
	// startWith compares the text of an error, which has to be English.
	cmd.Env = append(os.Environ(), "LC_ALL=C")

	return cmd
}

// start waits until the server answers.
func (s *Server) start(t testing.TB) {
	t.Helper()

	s.startWith(t, s.args, func(ctx context.Context) error {
		c, err := pgx.Connect(ctx, s.URL("postgres"))
		if err != nil {
			return err
		}
		return c.Close(ctx)
	})
}

// startWith is start with other arguments; the server answers when answers returns no error. After a kill the last of
// the server's children may still hold its shared memory, so startWith tries again until that is free.
func (s *Server) startWith(t testing.TB, args []string, answers func(context.Context) error) {
	t.Helper()
	for end := time.Now().Add(startTimeout); ; time.Sleep(50 * time.Millisecond) {
		err := s.Serve(command(t, "postgres", args...), filepath.Join(s.dir, "output"), startTimeout, answers)
		if err == nil {
			return
		}
		if !strings.Contains(err.Error(), "still in use") || time.Now().After(end) {
			t.Fatalf("pgtest: %v", err)
		}
		s.Kill()
	}
}

// URL returns the URL of a database.
func (s *Server) URL(database string) string {
	return "postgres://headcount@" + s.Addr + "/" + database + "?sslmode=disable"
}

// Database creates an empty database and returns its URL.
func (s *Server) Database(t testing.TB) string {
	t.Helper()

	name := "d" + strconv.FormatInt(s.databases.Add(1), 10)
	s.Exec(t, s.URL("postgres"), "CREATE DATABASE "+name)

	return s.URL(name)
}

// Exec runs statements in the database of url and fails the test when they fail.
func (s *Server) Exec(t testing.TB, url, sql string) {
	t.Helper()
	err := ask(t, url, func(c *pgx.Conn) error {
		_, err := c.Exec(t.Context(), sql)
		return err
	})
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// Query runs a statement that returns one value.
func Query[T any](t testing.TB, url, sql string, args ...any) (v T) {
	t.Helper()
	err := ask(t, url, func(c *pgx.Conn) error { return c.QueryRow(t.Context(), sql, args...).Scan(&v) })
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}

	return v
}

// connections are open connections, by URL. Tests repeat a query until its answer is right, and for each new connection
// the server would start a process.
var connections = struct {
	sync.Mutex
	open map[string]*pgx.Conn
}{open: map[string]*pgx.Conn{}}

func ask(t testing.TB, url string, do func(*pgx.Conn) error) error {
	connections.Lock()
	defer connections.Unlock()

	c := connections.open[url]
	// A connection from before a restart looks open until it is used.
	if c != nil && c.Ping(t.Context()) != nil {
		_ = c.Close(context.Background())
		c = nil
	}

	if c == nil {
		var err error
		c, err = pgx.Connect(t.Context(), url)
		if err != nil {
			delete(connections.open, url)
			return err
		}
		connections.open[url] = c
	}

	return do(c)
}

// Restart kills the server and starts it again, with everything that was committed.
func (s *Server) Restart(t testing.TB) {
	t.Helper()

	s.Kill()
	s.start(t)
}

// StartUp kills the server and starts it again in such a way that it answers "starting up" until end is called: as a
// standby that permits no connections and waits for its primary.
func (s *Server) StartUp(t testing.TB) (end func()) {
	t.Helper()
	s.Kill()

	file := func(name string) {
		if err := os.WriteFile(filepath.Join(s.data(), name), nil, 0o666); err != nil {
			t.Fatal(err)
		}
	}

	file("standby.signal")
	s.startWith(t, append(slices.Clip(s.args), "-c", "hot_standby=off"), func(ctx context.Context) error {
		_, err := pgx.Connect(ctx, s.URL("postgres"))

		refused := (*pgconn.PgError)(nil)
		if errors.As(err, &refused) && refused.Code == "57P03" {
			return nil
		}

		return fmt.Errorf("it does not start up: %w", err)
	})

	return func() {
		// PostgreSQL looks for this file when it gets the signal.
		file("promote")
		_ = syscall.Kill(s.PID(), syscall.SIGUSR1)
	}
}

// Bouncer starts a PgBouncer in front of the server, with a pool mode, and returns the URL of the same database through
// it. It ends with the test.
func (s *Server) Bouncer(t testing.TB, url, mode string) string {
	t.Helper()

	addr := servertest.FreeAddr()
	host, port, _ := net.SplitHostPort(addr)
	_, serverPort, _ := net.SplitHostPort(s.Addr)

	dir := filepath.Join(s.dir, "bouncer"+port)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}

	users := filepath.Join(dir, "users")
	conf := filepath.Join(dir, "conf")
	settings := []string{
		"[databases]", "* = host=" + host + " port=" + serverPort,
		"[pgbouncer]", "listen_addr=" + host, "listen_port=" + port, "unix_socket_dir=",
		"auth_type=trust", "auth_file=" + users, "pool_mode=" + mode,
	}
	for file, text := range map[string]string{users: `"headcount" ""`, conf: strings.Join(settings, "\n")} {
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}

	var bouncer servertest.Process
	t.Cleanup(bouncer.Kill)
	listens := func(ctx context.Context) error { return servertest.Listens(ctx, addr) }

	output := filepath.Join(dir, "output")
	if err := bouncer.Serve(command(t, "pgbouncer", conf), output, startTimeout, listens); err != nil {
		t.Fatal(err)
	}

	return strings.Replace(url, s.Addr, addr, 1)
}

// shared lives as long as the test process: starting a server takes longer than creating a database.
var shared struct {
	sync.Mutex
	server *Server
}

// Single returns this test process's shared server. A test that kills it starts it again.
func Single(t testing.TB) *Server {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()

	if shared.server == nil {
		shared.server = newServer(t)
		shared.server.create(t)
	}

	return shared.server
}

// Stop ends the shared server. TestMain calls it after the tests.
func Stop() {
	// Closed first, because the server would log each broken connection.
	connections.Lock()
	for _, c := range connections.open {
		_ = c.Close(context.Background())
	}
	connections.Unlock()

	shared.Lock()
	defer shared.Unlock()
	if s := shared.server; s != nil {
		s.remove()
		shared.server = nil
	}
}
