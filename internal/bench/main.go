//go:build linux

// Bench measures the server of this repository and writes BENCHMARKS.md. It runs
// every scenario several times, with the server on one core and its clients on
// another. In the same run it measures what plain system calls cost on the machine.
//
// It needs Linux, two cores and taskset(1).
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/benchenv"
	"headcount/internal/servertest"
)

func main() {
	if len(os.Args) > 1 && helpers[os.Args[1]] != nil {
		if err := helpers[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "bench "+os.Args[1]+":", err)
			os.Exit(1)
		}
		return
	}
	b := &bench{}
	flag.StringVar(&b.program, "program", "bin/headcount", "the server")
	out := flag.String("out", "BENCHMARKS.md", "where to write the table")
	flag.IntVar(&b.runs, "runs", 3, "how often to run each scenario; the table shows the medians")
	only := flag.String("only", "", "run only these scenarios, separated by commas, and print the table to standard output")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := b.run(ctx, *out, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// helpers are the parts that this program runs as separate processes.
var helpers = map[string]func(args []string) error{"floor": floor, "readers": readers, "arrive": arrive, "calls": calls, "gin": bare}

// bench is one run of everything.
type bench struct {
	program string
	self    string
	runs    int
	load    float64              // the load of the machine before the run
	figures map[string][]float64 // by scenario and name; one figure per run
}

func (b *bench) run(ctx context.Context, out, only string) (err error) {
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if _, err := os.Stat(b.program); err != nil {
		return fmt.Errorf("the server's program is missing: run make build, or give --program: %w", err)
	}
	if err := benchenv.Cores(); err != nil {
		return err
	}
	raiseFiles()
	b.load = loadAverage()
	b.figures = map[string][]float64{}
	for _, s := range scenarios {
		if only != "" && !slices.Contains(strings.Split(only, ","), s.name) {
			continue
		}
		for n := range b.runs {
			fmt.Fprintf(os.Stderr, "%s  %s, %d of %d\n", time.Now().Format(time.TimeOnly), s.name, n+1, b.runs)
			got, err := s.measure(ctx, b)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			for name, v := range got {
				b.figures[s.name+" "+name] = append(b.figures[s.name+" "+name], v)
			}
		}
	}
	if only != "" {
		_, err = os.Stdout.Write(b.page())
		return err
	}
	return os.WriteFile(out, b.page(), 0o644)
}

// raiseFiles raises the limit of open files as far as possible. Children inherit it.
func raiseFiles() {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return
	}
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 50_000, Max: max(50_000, l.Max)}) != nil { // raising the hard limit needs a privilege
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: l.Max, Max: l.Max})
	}
}

// withServer runs f while a server with the given flags runs.
func (b *bench) withServer(ctx context.Context, flags []string, f func(url string, pid int) error) error {
	addr, _, server, err := benchenv.Serve(ctx, b.program, flags...)
	if err != nil {
		return err
	}
	defer server.End(benchenv.EndTime)
	return f("http://"+addr, server.PID())
}

// beside runs f while one of the helpers runs on a core, with an address for the
// two to meet.
func (b *bench) beside(ctx context.Context, core int, helper string, f func(addr string, pid int) error) error {
	addr := servertest.FreeAddr()
	var p servertest.Process
	if err := p.Start(benchenv.On(ctx, core, b.self, helper, addr)); err != nil {
		return err
	}
	defer p.End(benchenv.EndTime)
	return f(addr, p.PID())
}

// simulated runs a scenario of the simulator. It returns the scenario's figures and
// some figures of its report.
func simulated(serve []string, args ...string) func(ctx context.Context, b *bench) (map[string]float64, error) {
	return func(ctx context.Context, b *bench) (figures map[string]float64, err error) {
		err = b.withServer(ctx, serve, func(url string, pid int) (err error) {
			figures, err = b.simulate(ctx, "", url, pid, args...)
			return err
		})
		return figures, err
	}
}

// simulate runs the simulator against a server. roots is a file of certificates that it
// trusts, or empty. What the process uses, and others that args name by --pid, is counted together.
func (b *bench) simulate(ctx context.Context, roots, url string, pid int, args ...string) (figures map[string]float64, err error) {
	var report struct {
		Figures    map[string]float64
		Bytes      float64                    `json:"bytes_received"`
		JoinToSeen struct{ P50, P99 float64 } `json:"join_to_seen_ms"`
	}
	cmd := benchenv.On(ctx, benchenv.ClientCore, b.program, append([]string{"simulate", "--json", "--url", url, "--pid", strconv.Itoa(pid)}, args...)...)
	if roots != "" {
		cmd.Env = append(cmd.Env, "SSL_CERT_FILE="+roots)
	}
	if err := output(cmd, &report); err != nil {
		return nil, err
	}
	if figures = report.Figures; figures == nil {
		figures = map[string]float64{}
	}
	figures["bytes"], figures["join_p50_ms"], figures["join_p99_ms"] = report.Bytes, report.JoinToSeen.P50, report.JoinToSeen.P99
	return figures, nil
}

// output runs cmd and reads the JSON that it prints.
func output(cmd *exec.Cmd, into any) error {
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w\n%s%s", strings.Join(cmd.Args[3:], " "), err, out.Bytes(), complaints.Bytes())
	}
	return json.Unmarshal(out.Bytes(), into)
}

// arrived lets all clients connect at once to a server that has just started.
func arrived(ctx context.Context, b *bench) (figures map[string]float64, err error) {
	err = b.withServer(ctx, []string{"--max-connections", "40000"}, func(url string, pid int) error {
		return output(benchenv.On(ctx, benchenv.ClientCore, b.self, "arrive", url, strconv.Itoa(pid)), &figures)
	})
	return figures, err
}

// floored measures plain system calls in place of a server.
func floored(call, pause string) func(ctx context.Context, b *bench) (map[string]float64, error) {
	return func(ctx context.Context, b *bench) (figures map[string]float64, err error) {
		err = b.beside(ctx, benchenv.ClientCore, "readers", func(addr string, _ int) error {
			return output(benchenv.On(ctx, benchenv.ServerCore, b.self, "floor", addr, call, pause), &figures)
		})
		return figures, err
	}
}
