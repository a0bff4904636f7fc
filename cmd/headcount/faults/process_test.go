package faults

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"headcount/cmd/headcount/programtest"
)

// logBook keeps what a process writes to stderr, over all its lives.
type logBook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBook) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// member is one process of a cluster, which may be ended and started again: its
// addresses stay.
type member struct {
	name  string // for people
	role  string
	addr  string // public; "" without a gateway
	admin string
	self  string // where the others reach it
	flags []string
	log   logBook
	up    atomic.Bool // it runs and is not frozen

	mu   sync.Mutex
	cmd  *exec.Cmd
	gone chan struct{}
}

// newMember is one process with one role, or several, as --roles names them. Its --advertise is that of a proxy,
// when there is one.
func newMember(name, role, redis string, through *proxy, flags ...string) *member {
	m := &member{name: name, role: role, admin: programtest.FreeAddr()}
	listen := programtest.FreeAddr()
	m.self = listen
	m.flags = append([]string{
		"serve", "--roles=" + role, "--redis=" + redis, "--admin-listen=" + m.admin, "--cluster-listen=" + listen,
		"--log-format=json", "--shutdown-timeout=15s",
	}, flags...)
	if through != nil {
		through.to(listen)
		m.self = through.addr
		m.flags = append(m.flags, "--advertise="+through.addr)
	}
	if strings.Contains(role, "gateway") {
		m.addr = programtest.FreeAddr()
		m.flags = append(m.flags, "--listen="+m.addr)
	}
	return m
}

// start starts the process, without waiting until it is ready.
func (m *member) start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	cmd := exec.Command(program, m.flags...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "HEADCOUNT_") })
	cmd.Env = append(cmd.Env, "GORACE=atexit_sleep_ms=0") // it would add a second to each end
	cmd.Stderr = &m.log
	gone, started := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(gone)
		live(cmd, started)
		m.up.Store(false)
	}()
	if err := <-started; err != nil {
		return err
	}
	m.cmd, m.gone = cmd, gone
	m.up.Store(true)
	return nil
}

func startAndWait(cmd *exec.Cmd, started chan<- error) {
	err := cmd.Start()
	started <- err
	if err == nil {
		_ = cmd.Wait()
	}
}

// signal sends a signal; whether the process counts as up follows from it.
func (m *member) signal(sig syscall.Signal) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch sig {
	case syscall.SIGKILL, syscall.SIGSTOP:
		m.up.Store(false)
	case syscall.SIGCONT:
		m.up.Store(true)
	}
	_ = m.cmd.Process.Signal(sig)
}

// kill ends the process as a crash does.
func (m *member) kill() {
	m.signal(syscall.SIGKILL)
	<-m.gone
}

// ended waits for the end and returns the exit status; -1: it still runs then.
func (m *member) ended(within time.Duration) int {
	select {
	case <-m.gone:
		return m.cmd.ProcessState.ExitCode()
	case <-time.After(within):
		return -1
	}
}

// leave ends the process as an operator does and returns what was wrong.
func (m *member) leave(within time.Duration) error {
	m.signal(syscall.SIGTERM)
	switch status := m.ended(within); status {
	case 0:
		return nil
	case -1:
		m.signal(syscall.SIGQUIT) // its goroutines say where they are
		if m.ended(5*time.Second) == -1 {
			m.kill()
		}
		return fmt.Errorf("%s did not end within %s of SIGTERM", m.name, within)
	default:
		return fmt.Errorf("%s ended with status %d after SIGTERM", m.name, status)
	}
}

// web is an HTTP client without memory.
var web = &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}, Timeout: 5 * time.Second}

// get returns status, header and body.
func get(url string) (int, http.Header, string, error) {
	resp, err := web.Get(url)
	if err != nil {
		return 0, nil, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(body), err
}

// ready reports whether the process says so.
func (m *member) ready() bool {
	status, _, _, err := get("http://" + m.admin + "/readyz")
	return err == nil && status == http.StatusOK
}

// complaint is what the log holds that must never be there, or "".
func (m *member) complaint() string {
	text := m.log.String()
	for _, bad := range []string{"DATA RACE", "panic", "fatal error", `"level":"error"`} {
		if i := strings.Index(text, bad); i >= 0 {
			return fmt.Sprintf("%s: %q in the log:\n%.6000s", m.name, bad, text[max(0, i-300):])
		}
	}
	return ""
}

// startAll starts members and has them ended with the test, and their logs looked at.
func startAll(t testing.TB, members ...*member) {
	t.Helper()
	t.Cleanup(func() {
		var all sync.WaitGroup
		for _, m := range members {
			all.Go(func() {
				if m.cmd != nil && m.ended(0) == -1 {
					m.signal(syscall.SIGCONT)
					if err := m.leave(20 * time.Second); err != nil {
						t.Error(err)
					}
				}
				if what := m.complaint(); what != "" {
					t.Error(what)
				}
			})
		}
		all.Wait()
	})
	for _, m := range members {
		if err := m.start(); err != nil {
			t.Fatal(err)
		}
	}
}

func awaitReady(t testing.TB, within time.Duration, members ...*member) {
	t.Helper()
	for _, m := range members {
		start := time.Now()
		for !m.ready() {
			if m.ended(0) != -1 || time.Since(start) > within {
				t.Fatalf("%s is not ready after %s:\n%s", m.name, within, m.log.String())
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}
