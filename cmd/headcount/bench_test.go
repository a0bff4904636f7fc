package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"headcount/cmd/headcount/simulate"
	"headcount/presence"
	"headcount/presence/redistest"
	"headcount/servertest"
)

// The benchmarks measure whole server processes, on one core each, with the
// simulator as their clients. They take half a minute each, for one iteration:
// `make microbench` runs them. What load costs is for `make bench`.

// benchServer starts a server built without the race detector, with further
// flags, and returns its URL and process id.
func benchServer(b *testing.B, flags ...string) (url string, pid int) {
	b.Helper()
	p := benchProcess(b, benchProgram(b), flags...)
	p.ready(b, 30*time.Second)
	return p.url, p.PID()
}

// benchProgram is the program, built without the race detector.
func benchProgram(b *testing.B) string {
	b.Helper()
	bin := filepath.Join(b.TempDir(), "headcount")
	if out, err := exec.Command("go", "build", "-o", bin, ".").CombinedOutput(); err != nil {
		b.Fatalf("go build: %v\n%s", err, out)
	}
	return bin
}

// process is one server process.
type process struct {
	servertest.Process
	url, admin string
}

// benchProcess starts one server process.
func benchProcess(b *testing.B, bin string, flags ...string) *process {
	b.Helper()
	public, admin := servertest.FreeAddr(), servertest.FreeAddr()
	flags = append([]string{"serve", "--listen", public, "--admin-listen", admin, "--log-level", "error"}, flags...)
	cmd := exec.Command(bin, flags...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	p := &process{url: "http://" + public, admin: admin}
	if err := p.Start(cmd); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Kill)
	return p
}

// ready waits until the process is ready.
func (p *process) ready(b *testing.B, within time.Duration) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), within)
	defer cancel()
	if err := servertest.Await(ctx, &p.Process, func(ctx context.Context) error { return servertest.Ready(ctx, p.admin) }); err != nil {
		b.Fatalf("the server is not ready: %v", err)
	}
}

// simulated runs the simulator against a server of its own.
func simulated(b *testing.B, c simulate.Command, flags ...string) simulate.Report {
	b.Helper()
	url, pid := benchServer(b, flags...)
	c.URL, c.PID = []string{url}, []int{pid}
	return reported(b, c)
}

// reported runs the simulator against servers that run, and returns its report.
func reported(b *testing.B, c simulate.Command) simulate.Report {
	b.Helper()
	c.JSON = true
	var out bytes.Buffer
	if err := c.Run(b.Context(), &out, io.Discard); err != nil {
		b.Fatalf("simulate: %v\n%s", err, out.String())
	}
	var r simulate.Report
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		b.Fatal(err)
	}
	return r
}

// BenchmarkLoneJoin measures a join on a quiet server until another client sees it.
func BenchmarkLoneJoin(b *testing.B) {
	for b.Loop() {
		reportJoins(b, simulated(b, simulate.Command{Users: 1, Pages: 1, Tabs: 1, Churn: 0, Duration: 20 * time.Second}))
	}
}

func reportJoins(b *testing.B, r simulate.Report) {
	b.Helper()
	b.ReportMetric(0, "ns/op") // an iteration lasts as long as the scenario does
	b.ReportMetric(r.JoinToSeen.P50, "ms-p50")
	b.ReportMetric(r.JoinToSeen.P99, "ms-p99")
	b.ReportMetric(float64(r.JoinToSeen.Samples), "joins")
}

// BenchmarkClusterLoneJoin measures a join on a quiet cluster until a client of another
// gateway sees it. Two gateways, a node and a dispatcher are a process each, over a real
// redis-server.
func BenchmarkClusterLoneJoin(b *testing.B) {
	redis := redistest.Start(b)
	bin := benchProgram(b)
	var urls []string
	var processes []*process
	for _, role := range []string{presence.RolePresence, presence.RoleDispatcher, presence.RoleGateway, presence.RoleGateway} {
		p := benchProcess(b, bin, "--roles", role, "--redis", redis.URL(), "--cluster-listen", servertest.FreeAddr())
		processes = append(processes, p)
		if role == presence.RoleGateway {
			urls = append(urls, p.url)
		}
	}
	for _, p := range processes {
		p.ready(b, 30*time.Second)
	}
	for b.Loop() {
		reportJoins(b, reported(b, simulate.Command{URL: urls, Users: 1, Pages: 1, Tabs: 1, Churn: 0, Duration: 20 * time.Second}))
	}
}
