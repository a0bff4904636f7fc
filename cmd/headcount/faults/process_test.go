package faults

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"headcount/client"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// member is one process of a cluster. It can be ended and started again with the same addresses.
type member struct {
	name  string // for people
	role  string
	addr  string // of --listen; "" without a gateway
	admin string // of --admin-listen
	self  string // its address for the other processes
	flags []string
	log   servertest.Log

	program string // "": the program under test
	forgets bool   // the test makes its Redis lose acknowledged data, so reads may be old for a moment

	process servertest.Process
	still   atomic.Bool // it is paused, or was killed
}

// newMember returns a process with the role or roles of --roles. If there is a proxy, other processes reach it only
// through that.
func newMember(name, role, redis string, through *proxy, flags ...string) *member {
	m := &member{name: name, role: role, admin: servertest.FreeAddr()}
	listen := servertest.FreeAddr()
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
		m.addr = servertest.FreeAddr()
		m.flags = append(m.flags, "--listen="+m.addr)
	}

	return m
}

// start starts the process, without waiting until it is ready.
func (m *member) start() error {
	cmd := exec.Command(cmp.Or(m.program, program), m.flags...)
	cmd.Env = testkit.Environ()
	if m.forgets {
		// The program under test ends at an old read, which is no fault here: see gateway/counterapi/promises.go.
		cmd.Env = append(cmd.Env, "HEADCOUNT_STORE_FORGETS=1")
	}
	cmd.Stderr = &m.log

	m.still.Store(false)
	return m.process.Start(cmd)
}

// up reports whether the process should answer.
func (m *member) up() bool { return m.process.Runs() && !m.still.Load() }

// pause makes the process hang.
func (m *member) pause() {
	m.still.Store(true)
	m.process.Pause()
}

// resume ends pause.
func (m *member) resume() {
	m.still.Store(false)
	m.process.Resume()
}

// kill ends the process as a crash does.
func (m *member) kill() {
	m.still.Store(true)
	m.process.Kill()
}

// leave terminates the process as an operator does, and returns what was wrong.
func (m *member) leave() error {
	switch status := m.process.End(testkit.Timeout); status {
	case 0:
		return nil
	case -1:
		return fmt.Errorf("%s did not end within %s of SIGTERM", m.name, testkit.Timeout)
	default:
		return fmt.Errorf("%s ended with status %d after SIGTERM", m.name, status)
	}
}

// web is an HTTP client without cookies and idle connections.
var web = &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}, Timeout: testkit.Timeout}

// api returns an API for calls as the user with an id, or as a new user if the id is empty.
func (m *member) api(id string) *client.API {
	return client.NewAPI(client.Config{URL: "http://" + m.addr, ID: id, HTTP: web})
}

// keyed returns an API for calls with the API key.
func (m *member) keyed() *client.API {
	return client.NewAPI(client.Config{URL: "http://" + m.addr, APIKey: counterKey, HTTP: web})
}

// get makes a GET request, and returns the status, the header and the body of the answer.
func get(url string) (int, http.Header, string, error) {
	resp, err := web.Get(url)
	if err != nil {
		return 0, nil, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)

	return resp.StatusCode, resp.Header, string(body), err
}

// ready reports whether /readyz says that the process is ready.
func (m *member) ready() bool {
	status, _, _, err := get("http://" + m.admin + "/readyz")
	return err == nil && status == http.StatusOK
}

// startAll starts members. At the end of the test it ends them and checks their logs.
func startAll(t testing.TB, members ...*member) {
	t.Helper()
	t.Cleanup(func() {
		var all sync.WaitGroup
		for _, m := range members {
			all.Go(func() {
				if m.process.Runs() {
					m.resume()
					if err := m.leave(); err != nil {
						t.Error(err)
					}
				}
				if what := m.log.Complaint(); what != "" {
					t.Errorf("%s complains: %s", m.name, what)
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

func awaitReady(t testing.TB, members ...*member) {
	t.Helper()
	for _, m := range members {
		testkit.Eventually(t, m.name+" is ready", func() bool {
			if !m.process.Runs() {
				t.Fatalf("%s has ended:\n%s", m.name, m.log.String())
			}
			return m.ready()
		})
	}
}
