//go:build linux

// Bench measures the server of this repository and writes BENCHMARKS.md. It runs
// every scenario several times, with the server on one core and its clients on
// another. In the same run it measures what plain system calls cost on the machine.
//
// It needs Linux, two cores and taskset(1).
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/benchenv"
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
			got, err := b.try(ctx, s.measure)
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
