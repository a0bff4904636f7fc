// Package e2e tests the program from outside: real processes over real sockets. The tests know the contract and nothing
// about the code. They share one server where they can, and use pages of their own, so that they do not disturb each
// other.
//
// With -short, the tests of the shared server and TestServerSetups are one pass over every part of the contract and
// every kind of deployment. Without -short, processes and stores are also killed, and disks are full.
package e2e

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/internal/pgtest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

var program string // the path of the program

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	defer pgtest.Stop()

	// These tests mostly wait, so more of them may run at the same time than there are cores.
	status := testkit.RunWithProgram(m, "12", &program)

	if shared.s != nil {
		if problem := shared.s.end(); problem != "" {
			fmt.Fprintln(os.Stderr, "the shared server:", problem)
			status = max(status, 1)
		}
	}

	return status
}

// server is one running process.
type server struct {
	url   string // http://127.0.0.1:port
	addr  string // 127.0.0.1:port
	admin string // http://127.0.0.1:port
	log   *servertest.Log
	ended sync.Once
	what  string // what was wrong when the server ended; "": nothing

	servertest.Process
}

// start starts a server with flags such as "--leave-grace=0s" and waits until it is ready. The server ends with the
// test: see end.
func start(t testing.TB, flags ...string) *server {
	t.Helper()
	return startAll(t, flags)[0]
}

var shared struct {
	sync.Once
	s   *server
	err error
}

// sharedPing is the --ping-interval of the shared server.
const sharedPing = 3 * time.Second

// common returns the server that all tests without flags of their own share.
func common(t testing.TB) *server {
	t.Helper()
	shared.Do(func() {
		shared.s, shared.err = launch(
			"--ping-interval="+sharedPing.String(), "--pong-timeout=1m", "--leave-grace=700ms",
			"--update-interval=10ms",
			"--api-key="+apiKey, "--allow-origins=https://shop.example",
		)
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}

	return shared.s
}

func launch(flags ...string) (*server, error) {
	s, err := spawn(flags...)
	if err != nil {
		return nil, err
	}

	if err := servertest.Await(&s.Process, testkit.Timeout, s.askReady); err != nil {
		s.End(0)
		return nil, fmt.Errorf("%w:\n%s", err, s.log)
	}

	return s, nil
}

func (s *server) askReady(ctx context.Context) error {
	return servertest.Ready(ctx, strings.TrimPrefix(s.admin, "http://"))
}

func (s *server) ready() bool { return s.askReady(context.Background()) == nil }

// startAll starts servers at the same time, one for each list of flags.
func startAll(t testing.TB, flags ...[]string) []*server {
	t.Helper()
	all := make([]*server, len(flags))
	errs := make([]error, len(flags))
	var wg sync.WaitGroup
	for i := range flags {
		wg.Go(func() { all[i], errs[i] = launch(flags[i]...) })
	}

	wg.Wait()

	t.Cleanup(func() {
		for _, s := range all {
			if s == nil {
				continue
			}
			if problem := s.end(); problem != "" {
				t.Error(problem)
			}
		}
	})

	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}

	return all
}

// spawn starts a server and waits until its log says where it listens.
func spawn(flags ...string) (*server, error) {
	for _, d := range []string{
		"--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--log-format=json", "--shutdown-timeout=10s",
	} {
		name, _, _ := strings.Cut(d, "=")
		if !slices.ContainsFunc(flags, func(f string) bool { return f == name || strings.HasPrefix(f, name+"=") }) {
			flags = append(flags, d)
		}
	}

	s := &server{log: &servertest.Log{}}
	cmd := exec.Command(program, append([]string{"serve"}, flags...)...)
	cmd.Env = testkit.Environ()
	cmd.Stderr = s.log
	if err := s.Start(cmd); err != nil {
		return nil, err
	}

	err := servertest.Await(&s.Process, testkit.Timeout, func(context.Context) error {
		for line := range strings.Lines(s.log.String()) {
			var l struct{ Listen, Admin string }
			if json.Unmarshal([]byte(line), &l) == nil && l.Admin != "" { // only a gateway has l.Listen
				s.addr = l.Listen
				s.url = "http://" + l.Listen
				s.admin = "http://" + l.Admin
				return nil
			}
		}
		return errors.New("it does not say where it listens")
	})

	if err != nil {
		s.End(0) // its goroutines are in the log
		return nil, fmt.Errorf("%w:\n%s", err, s.log)
	}

	return s, nil
}

// end terminates the server as an operator would, unless it has ended already, and returns what was wrong with it.
func (s *server) end() string {
	s.ended.Do(func() {
		if status := s.End(testkit.Timeout); status != 0 {
			s.what = fmt.Sprintf("exit status %d:\n%s", status, s.log)
		} else {
			s.what = s.log.Complaint()
		}
	})

	return s.what
}

// died is for tests that end the server themselves. The server must end with a status. If that is 0, its log must have
// no complaint.
func (s *server) died(t testing.TB, status int) {
	t.Helper()
	s.ended.Do(func() {
		if got := s.Wait(testkit.Timeout); got != status {
			s.End(0)
			t.Fatalf("exit status %d, want %d:\n%s", got, status, s.log)
		}
		if what := s.log.Complaint(); what != "" && status == 0 {
			t.Error(what)
		}
	})
}

// kill ends the server as a crash does.
func (s *server) kill() {
	s.Kill()
	s.ended.Do(func() { s.what = s.log.Complaint() })
}

var names atomic.Int64

// fresh returns a page that no other test uses.
func fresh(t testing.TB) string {
	return fmt.Sprintf("%s %d", t.Name()[:min(len(t.Name()), 100)], names.Add(1))
}

// browserless is an HTTP client without cookies, redirects and compression.
var browserless = &http.Client{
	Transport:     &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 16, Proxy: nil},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	Timeout:       testkit.Timeout,
}

// answer is an HTTP response that has been read.
type answer struct {
	status int
	header http.Header
	body   string
}

// do makes a request. headers are lines such as "Origin: http://a.example".
func do(t testing.TB, method, url, body string, headers ...string) answer {
	t.Helper()
	a, err := try(method, url, body, headers...)
	if err != nil {
		t.Fatal(err)
	}

	return a
}

func try(method, url, body string, headers ...string) (answer, error) {
	req, err := request(method, url, body, headers...)
	if err != nil {
		return answer{}, err
	}

	resp, err := browserless.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()

	text, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(text)}, err
}

func request(method, url, body string, headers ...string) (*http.Request, error) {
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}

	req, err := http.NewRequest(method, url, r)
	if err != nil {
		return nil, err
	}

	for _, line := range headers {
		name, value, _ := strings.Cut(line, ": ")
		if name == "Host" {
			req.Host = value
		} else {
			req.Header.Add(name, value)
		}
	}

	return req, nil
}

func (s *server) get(t testing.TB, path string, headers ...string) answer {
	t.Helper()
	return do(t, "GET", s.url+path, "", headers...)
}

func (s *server) put(t testing.TB, path, body string, headers ...string) answer {
	t.Helper()
	return do(t, "PUT", s.url+path, body, headers...)
}

// counter is a count as the contract has it in JSON.
type counter struct {
	Page      string  `json:"page"`
	Count     int     `json:"count"`
	UpdatedAt *string `json:"updated_at"`
	Version   string  `json:"version"`
	Stale     bool    `json:"stale"`
}

// version parses "incarnation-sequence".
func version(t testing.TB, text string) [2]uint64 {
	t.Helper()

	a, b, ok := strings.Cut(text, "-")
	x, err := strconv.ParseUint(a, 10, 64)
	y, err2 := strconv.ParseUint(b, 10, 64)

	if !ok || err != nil || err2 != nil {
		t.Fatalf("%q is no version", text)
	}

	return [2]uint64{x, y}
}

func newer(t testing.TB, a, b string) bool {
	t.Helper()
	x, y := version(t, a), version(t, b)
	return x[0] > y[0] || x[0] == y[0] && x[1] > y[1]
}

// counter decodes the answer, which must be a 200 with exactly the members of a counter.
func (a answer) counter(t testing.TB) counter {
	t.Helper()
	if a.status != http.StatusOK {
		t.Fatalf("status %d, want a counter: %s", a.status, a.body)
	}

	if got := a.header.Get("Content-Type"); got != "application/json" && got != "application/json; charset=utf-8" {
		t.Errorf("Content-Type %q", got)
	}

	return decodeCounter(t, a.body)
}

func decodeCounter(t testing.TB, text string) counter {
	t.Helper()
	var c counter
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		t.Fatalf("%v in %s", err, text)
	}

	checkCounter(t, c)
	return c
}

func checkCounter(t testing.TB, c counter) {
	t.Helper()
	if c.Count < 0 {
		t.Errorf("a negative count: %+v", c)
	}

	version(t, c.Version)

	switch {
	case c.UpdatedAt == nil:
		if c.Count != 0 || c.Version != "0-0" {
			t.Errorf("updated_at is null in %+v", c)
		}
	case c.Version == "0-0":
		t.Errorf("version 0-0 in %+v", c)
	default:
		at, err := time.Parse("2006-01-02T15:04:05Z", *c.UpdatedAt)
		if d := time.Since(at); err != nil || d < -5*time.Second || d > time.Hour {
			t.Errorf("updated_at %q: %v, %s ago", *c.UpdatedAt, err, d)
		}
	}
}

// problem checks that the answer is a problem of RFC 9457 with a status.
func (a answer) problem(t testing.TB, status int) {
	t.Helper()
	if a.status != status {
		t.Errorf("status %d, want %d: %.300s", a.status, status, a.body)
		return
	}

	if got := a.header.Get("Content-Type"); got != "application/problem+json" {
		t.Errorf("Content-Type of a %d: %q", status, got)
	}

	var p struct {
		Type, Title, Detail string
		Status              int
	}

	if err := json.Unmarshal([]byte(a.body), &p); err != nil {
		t.Errorf("%v in the problem %.300q", err, a.body)
		return
	}

	if p.Status != status || p.Title != http.StatusText(status) || p.Detail == "" || p.Type != "" &&
		p.Type != "about:blank" {
		t.Errorf("problem %s", a.body)
	}

	if status == http.StatusServiceUnavailable || status == http.StatusTooManyRequests {
		if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 {
			t.Errorf("Retry-After %q of a %d", a.header.Get("Retry-After"), status)
		}
	}
}

// count returns the count of a page, whose name must be escaped, by GET. It is -1 when the server answers 503, as one
// without CPU time does after 3 s.
func (s *server) count(t testing.TB, escaped string) int {
	t.Helper()
	a := s.get(t, "/"+escaped+"/counter")
	if a.status == http.StatusServiceUnavailable {
		return -1
	}

	c := a.counter(t)
	if !c.Stale && c.Page != "*" {
		s.explained(t, escaped, c.Count)
	}

	return c.Count
}

// explained waits until the server's explanation of a count adds up, or the count has changed.
func (s *server) explained(t testing.TB, escaped string, count int) {
	t.Helper()
	addsUp := func() bool {
		a := s.get(t, "/"+escaped+"/counter?explain=1", "X-API-Key: "+apiKey)
		if a.status == http.StatusUnauthorized {
			return true // the server has other keys, or none
		}

		var is struct {
			Counter counter
			Explain struct {
				Regions map[string]int
				Moving  bool
			}
		}
		if err := json.Unmarshal([]byte(a.body), &is); err != nil || a.status != http.StatusOK {
			t.Fatalf("%d %v: %s", a.status, err, a.body)
		}
		if is.Counter.Count != count || is.Counter.Stale {
			return true
		}

		sum := 0
		for _, users := range is.Explain.Regions {
			sum += users
		}

		return !is.Explain.Moving && sum == count
	}

	testkit.Eventually(t, fmt.Sprintf("the explanation of %d on %q adds up", count, escaped), addsUp)
}

func gunzip(t testing.TB, text string) string {
	t.Helper()
	r, err := gzip.NewReader(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}

	return string(out)
}

// metric returns the sum of all samples of a metric.
func (s *server) metric(t testing.TB, name string) float64 {
	t.Helper()
	sum := 0.0
	for line := range strings.Lines(do(t, "GET", s.admin+"/metrics", "").body) {
		if rest, ok := strings.CutPrefix(line, name); ok && (rest[0] == ' ' || rest[0] == '{') {
			v, err := strconv.ParseFloat(strings.TrimSpace(rest[strings.LastIndexByte(rest, ' '):]), 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += v
		}
	}

	return sum
}

// rawDial opens a TCP connection to the public address.
func (s *server) rawDial(t testing.TB) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
