//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

// figures are what a trial measures, by name.
type figures map[string]float64

// A trial is one run of a scenario. To the servers of tests it is the test: it ends them
// when it is over, and panics where a test would fail.
type trial struct {
	testing.TB
	*bench
	ctx      context.Context
	cleanups []func()
}

func (t *trial) Helper()                   {}
func (t *trial) Context() context.Context  { return t.ctx }
func (t *trial) Cleanup(f func())          { t.cleanups = append(t.cleanups, f) }
func (t *trial) Errorf(f string, a ...any) { panic(fmt.Errorf(f, a...)) }
func (t *trial) Fatalf(f string, a ...any) { panic(fmt.Errorf(f, a...)) }
func (t *trial) Fatal(a ...any)            { panic(errors.New(fmt.Sprint(a...))) }
func (t *trial) TempDir() string           { return t.folder("") }

// folder returns a new folder below dir; "": below that of temporary files.
func (t *trial) folder(dir string) string {
	name, err := os.MkdirTemp(dir, "bench")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(name) })
	return name
}

// try runs a trial and ends the servers that it started.
func (b *bench) try(ctx context.Context, measure func(*trial) figures) (f figures, err error) {
	t := &trial{bench: b, ctx: ctx}
	defer func() {
		if failed := recover(); failed != nil {
			err = fmt.Errorf("%v", failed)
		}
		for _, c := range slices.Backward(t.cleanups) {
			c()
		}
	}()
	return measure(t), nil
}

// A server is one that is measured. It may be ended before the trial is over.
type server struct {
	*servertest.Process
	addr  string
	url   string
	roots string // a file of certificates that clients trust; "": those of the system
}

func (t *trial) started(p *servertest.Process, addr string) server {
	t.Cleanup(func() { p.End(benchenv.EndTime) })
	return server{Process: p, addr: addr, url: "http://" + addr}
}

// serve runs the program with flags.
func (t *trial) serve(flags ...string) server {
	addr, _, p, err := benchenv.Serve(t.ctx, t.program, flags...)
	if err != nil {
		t.Fatal(err)
	}
	return t.started(p, addr)
}

// helper runs one of the helpers on a core, with an address for it and others to meet.
func (t *trial) helper(core int, name string) server {
	addr, p := servertest.FreeAddr(), &servertest.Process{}
	if err := p.Start(benchenv.On(t.ctx, core, t.self, name, addr)); err != nil {
		t.Fatal(err)
	}
	return t.started(p, addr)
}

// output runs cmd and reads the JSON that it prints.
func (t *trial) output(cmd *exec.Cmd, into any) {
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		t.Fatalf("%s: %w\n%s%s", strings.Join(cmd.Args[3:], " "), err, out.Bytes(), complaints.Bytes())
	}
	if err := json.Unmarshal(out.Bytes(), into); err != nil {
		t.Fatal(err)
	}
}

// simulated runs a scenario of the simulator against a server with flags.
func simulated(flags []string, args ...string) func(*trial) figures {
	return func(t *trial) figures { return t.simulate(t.serve(flags...), args...) }
}

// simulate runs a scenario of the simulator. It returns the scenario's figures and some of
// its report. What the server uses, and other processes that args name by --pid, is
// counted together.
func (t *trial) simulate(s server, args ...string) figures {
	var report struct {
		Figures    figures
		Bytes      float64                    `json:"bytes_received"`
		JoinToSeen struct{ P50, P99 float64 } `json:"join_to_seen_ms"`
	}
	args = append([]string{"simulate", "--json", "--url", s.url, "--pid", strconv.Itoa(s.PID())}, args...)
	cmd := benchenv.On(t.ctx, benchenv.ClientCore, t.program, args...)
	if s.roots != "" {
		cmd.Env = append(cmd.Env, "SSL_CERT_FILE="+s.roots)
	}
	t.output(cmd, &report)
	f := report.Figures
	if f == nil {
		f = figures{}
	}
	f["bytes"], f["join_p50_ms"], f["join_p99_ms"] = report.Bytes, report.JoinToSeen.P50, report.JoinToSeen.P99
	return f
}

// arrived lets all clients connect at once to a server that has just started.
func arrived(t *trial) (f figures) {
	s := t.serve("--max-connections", "40000")
	t.output(benchenv.On(t.ctx, benchenv.ClientCore, t.self, "arrive", s.url, strconv.Itoa(s.PID())), &f)
	return f
}

// floored measures plain system calls in place of a server.
func floored(call, pause string) func(*trial) figures {
	return func(t *trial) (f figures) {
		readers := t.helper(benchenv.ClientCore, "readers")
		t.output(benchenv.On(t.ctx, benchenv.ServerCore, t.self, "floor", readers.addr, call, pause), &f)
		return f
	}
}
