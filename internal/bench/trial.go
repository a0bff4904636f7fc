//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os/exec"
	"strconv"
	"strings"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

// figures are what a trial measures, by name.
type figures map[string]float64

// A trial is one run of a scenario.
type trial struct {
	*benchenv.Trial
	*bench
}

// try runs a trial and ends the servers that it started.
func (b *bench) try(ctx context.Context, measure func(*trial) figures) (f figures, err error) {
	err = benchenv.Try(ctx, func(t *benchenv.Trial) { f = measure(&trial{t, b}) })
	return f, err
}

// A server is a process that is measured.
type server struct {
	*servertest.Process
	addr  string
	url   string
	roots string // a file with the root certificates that clients trust; "": the system's
}

// serve runs the program with flags.
func (t *trial) serve(flags ...string) server {
	s := t.Serve(t.program, flags...)
	return server{Process: s.Process, addr: s.Addr, url: "http://" + s.Addr}
}

// helper runs one of the helpers on a core. It gets an address, which it listens on or connects to.
func (t *trial) helper(core int, name string, args ...string) server {
	addr := servertest.FreeAddr()
	p := t.Start(benchenv.On(t.Context(), core, t.self, append([]string{name, addr}, args...)...))
	return server{Process: p, addr: addr, url: "http://" + addr}
}

// output runs cmd and decodes the JSON that it prints.
func (t *trial) output(cmd *exec.Cmd, into any) {
	var stdout, stderr bytes.Buffer
	cmd.Stdout = &stdout
	cmd.Stderr = &stderr

	if err := cmd.Run(); err != nil {
		// Each command begins with "taskset -c CORE", which does not matter here.
		t.Fatalf("%s: %w\n%s%s", strings.Join(cmd.Args[3:], " "), err, stdout.Bytes(), stderr.Bytes())
	}

	if err := json.Unmarshal(stdout.Bytes(), into); err != nil {
		t.Fatal(err)
	}
}

// simulated returns a measurement: it runs a scenario of the simulator against a server with flags.
func simulated(flags []string, args ...string) func(*trial) figures {
	return func(t *trial) figures { return t.simulate(t.serve(flags...), args...) }
}

// simulate runs a scenario of the simulator. It returns the scenario's figures and some of its report. CPU time and
// memory are those of the server and of the processes that args name by --pid, together.
func (t *trial) simulate(s server, args ...string) figures {
	var report struct {
		Figures    figures
		Bytes      float64                    `json:"bytes_received"`
		JoinToSeen struct{ P50, P99 float64 } `json:"join_to_seen_ms"`
	}
	args = append([]string{"simulate", "--json", "--url", s.url, "--pid", strconv.Itoa(s.PID())}, args...)

	cmd := benchenv.On(t.Context(), benchenv.ClientCore, t.program, args...)
	if s.roots != "" {
		cmd.Env = append(cmd.Env, "SSL_CERT_FILE="+s.roots)
	}
	t.output(cmd, &report)

	f := report.Figures
	if f == nil { // only some scenarios have figures of their own
		f = figures{}
	}

	f["bytes"] = report.Bytes
	f["join_p50_ms"] = report.JoinToSeen.P50
	f["join_p99_ms"] = report.JoinToSeen.P99

	return f
}

// arrived lets all clients connect at once to a server that has just started.
func arrived(t *trial) figures { return t.arrive(t.serve("--max-connections", "40000"), "unread") }

// arrive lets all clients connect at once. frame is the type of the frame that they wait for.
func (t *trial) arrive(s server, frame string) (f figures) {
	t.output(benchenv.On(t.Context(), benchenv.ClientCore, t.self, "arrive", s.url, strconv.Itoa(s.PID()), frame), &f)
	return f
}

// floored returns a measurement of plain send(2) to that many subscribers, in place of a server.
func floored(subscribers int, pause string) func(*trial) figures {
	return func(t *trial) (f figures) {
		n := strconv.Itoa(subscribers)
		readers := t.helper(benchenv.ClientCore, "readers", n)
		t.output(benchenv.On(t.Context(), benchenv.ServerCore, t.self, "floor", readers.addr, n, pause), &f)
		return f
	}
}
