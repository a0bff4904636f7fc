package main

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"headcount/cmd/headcount/simulate"
	"headcount/presence/redistest"
)

// The benchmarks measure a whole server process on one core, over the embedded
// store, with the simulator as its clients. They take half a minute each, for
// one iteration: `make bench` runs them.

// benchServer starts a server built without the race detector, with further
// flags, and returns its URL and process id.
func benchServer(b *testing.B, flags ...string) (url string, pid int) {
	b.Helper()
	url, pid, ready := benchProcess(b, benchProgram(b), flags...)
	ready()
	return url, pid
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

// benchProcess starts one server process; ready waits until it is.
func benchProcess(b *testing.B, bin string, flags ...string) (url string, pid int, ready func()) {
	b.Helper()
	public, admin := freeAddr(b), freeAddr(b)
	flags = append([]string{"serve", "--listen", public, "--admin-listen", admin, "--log-level", "error"}, flags...)
	cmd := exec.Command(bin, flags...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return "http://" + public, cmd.Process.Pid, func() {
		b.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			resp, err := http.Get("http://" + admin + "/readyz")
			if err == nil {
				resp.Body.Close()
				if resp.StatusCode == http.StatusOK {
					return
				}
			}
			if time.Now().After(end) {
				b.Fatalf("the server is not ready: %v", err)
			}
		}
	}
}

func freeAddr(b *testing.B) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// simulated runs the simulator and returns its report.
func simulated(b *testing.B, c simulate.Command, flags ...string) simulate.Report {
	b.Helper()
	url, pid := benchServer(b, flags...)
	c.URL, c.PID, c.JSON = []string{url}, []int{pid}, true
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

// report shows the simulator's figures under the names of benchmark metrics.
func report(b *testing.B, r simulate.Report, names map[string]string) {
	b.Helper()
	b.ReportMetric(0, "ns/op") // an iteration lasts as long as the scenario does
	for figure, unit := range names {
		v, ok := r.Figures[figure]
		if !ok {
			b.Fatalf("the report has no %s: %v", figure, r.Figures)
		}
		b.ReportMetric(v, unit)
	}
}

// BenchmarkIdle: 10,000 idle joined connections on 100 pages.
func BenchmarkIdle(b *testing.B) {
	for b.Loop() {
		r := simulated(b, simulate.Command{Scenario: "idle", Users: 10_000, Pages: 100})
		report(b, r, map[string]string{
			"server_rss_bytes_per_connection": "B-RSS/conn", "server_cpu_percent_of_a_core": "%core",
		})
		b.ReportMetric(r.ConnectsPerSecond, "connects/s")
	}
}

// BenchmarkFanOut: one page's count to 5,000 subscribers, as often as one core
// can, and four times a second, when every write finds its reader asleep.
func BenchmarkFanOut(b *testing.B) {
	for name, flags := range map[string][]string{
		"busy":     {"--update-interval", "40ms", "--delivery-budget", "1000000"},
		"defaults": nil,
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				r := simulated(b, simulate.Command{Scenario: "fanout", Users: 5_000, Pages: 1, Duration: 15 * time.Second}, flags...)
				report(b, r, map[string]string{"server_cpu_s_per_million_counts": "cpu-s/million", "counts_per_s": "counts/s"})
			}
		})
	}
}

// BenchmarkStorm: 5,000 users arrive on one page within 5 s.
func BenchmarkStorm(b *testing.B) {
	for b.Loop() {
		r := simulated(b, simulate.Command{Scenario: "storm", Users: 5_000, Pages: 1})
		report(b, r, map[string]string{"right_after_s": "s-until-right", "server_cpu_s": "cpu-s"})
		b.ReportMetric(float64(r.BytesReceived)/1e6, "MB-received")
	}
}

// BenchmarkLoneJoin: a join on a quiet server until another client sees it.
func BenchmarkLoneJoin(b *testing.B) {
	for b.Loop() {
		r := simulated(b, simulate.Command{Users: 1, Pages: 1, Tabs: 1, Churn: 0, Duration: 20 * time.Second})
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(r.JoinToSeen.P50, "ms-p50")
		b.ReportMetric(r.JoinToSeen.P99, "ms-p99")
		b.ReportMetric(float64(r.JoinToSeen.Samples), "joins")
	}
}

// BenchmarkClusterLoneJoin: a join on a quiet cluster until a client of another
// gateway sees it, over two gateways, a node and a dispatcher, each a process,
// and a real redis-server.
func BenchmarkClusterLoneJoin(b *testing.B) {
	redis := redistest.Start(b)
	bin := benchProgram(b)
	var urls []string
	var ready []func()
	for _, role := range []string{rolePresence, roleDispatcher, roleGateway, roleGateway} {
		url, _, wait := benchProcess(b, bin, "--roles", role, "--redis", redis.URL(), "--cluster-listen", freeAddr(b))
		ready = append(ready, wait)
		if role == roleGateway {
			urls = append(urls, url)
		}
	}
	for _, wait := range ready {
		wait()
	}
	for b.Loop() {
		c := simulate.Command{URL: urls, JSON: true, Users: 1, Pages: 1, Tabs: 1, Churn: 0, Duration: 20 * time.Second}
		var out bytes.Buffer
		if err := c.Run(b.Context(), &out, io.Discard); err != nil {
			b.Fatalf("simulate: %v\n%s", err, out.String())
		}
		var r simulate.Report
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(r.JoinToSeen.P50, "ms-p50")
		b.ReportMetric(r.JoinToSeen.P99, "ms-p99")
		b.ReportMetric(float64(r.JoinToSeen.Samples), "joins")
	}
}
