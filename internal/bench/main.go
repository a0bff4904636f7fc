//go:build linux

// Bench measures the server of this repository and writes BENCHMARKS.md. It runs every scenario several times, with the
// server on one core and its clients on another. In the same run it measures the floor: what plain system calls cost on
// the machine. Where costs could grow faster than the load, it measures once at each of several sizes and draws a plot.
//
// It needs Linux, two cores and taskset(1).
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/benchenv"
)

func main() {
	// A helper has arguments of its own, so this comes before the flags.
	if len(os.Args) > 1 && helpers[os.Args[1]] != nil {
		if err := helpers[os.Args[1]](os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, "bench "+os.Args[1]+":", err)
			os.Exit(1)
		}
		return
	}

	b := &bench{sizes: []int{1_000, 5_000, 10_000, 19_000}, people: 100_000}
	flag.StringVar(&b.program, "program", "bin/headcount", "the server")
	out := flag.String("out", "BENCHMARKS.md", "where to write the table")
	flag.IntVar(&b.runs, "runs", 3, "how often to run each scenario; the table shows the medians")
	size := flag.Int("size", 0, "measure growth with this number of connections, pages or keys, or of people, only")
	only := flag.String("only", "",
		"run only these scenarios, separated by commas, and print the table to standard output")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	if *size > 0 {
		b.sizes = []int{*size}
		b.people = *size
	}

	if err := b.run(ctx, *out, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// helpers are the parts of this program that it runs as processes of their own, by the argument that names them.
var helpers = map[string]func(args []string) error{
	"floor": floor, "readers": readers, "arrive": arrive, "calls": calls, "gin": serveGin,
	"people": joinPeople,
}

// bench is one run of all scenarios that were chosen.
type bench struct {
	program string
	self    string               // the file of this program
	runs    int                  // of each scenario
	sizes   []int                // of growths
	people  int                  // in the scenario of that name
	version string               // of the program
	load    float64              // the load average of the machine before the run
	figures map[string][]float64 // by scenario and name; one figure per run, or per size

	bare   string // the folder with the programs of bare servers
	noBare error  // why they could not be built
}

func (b *bench) run(ctx context.Context, out, only string) (err error) {
	b.self, err = os.Executable()
	if err != nil {
		return err
	}

	version, err := exec.Command(b.program, "version").Output()
	if err != nil {
		return fmt.Errorf("the server's program is missing: run make build, or give --program: %w", err)
	}

	b.version = strings.TrimSpace(string(version))
	if err := benchenv.Cores(); err != nil {
		return err
	}

	raiseFileLimit()
	b.figures = map[string][]float64{}

	chosen := func(name string) bool { return only == "" || slices.Contains(strings.Split(only, ","), name) }

	if slices.ContainsFunc(scenarios, func(s scenario) bool { return needsBare(s.name) && chosen(s.name) }) {
		remove, err := b.buildBare(ctx)
		if err != nil {
			return err
		}
		defer remove()
	}

	// The builds above and the scenarios below are loads of our own, so the load is taken in between. Only a complete
	// BENCHMARKS.md mentions it.
	if only == "" {
		time.Sleep(settling)
		b.load = loadAverage()
	}

	if err := b.measureScenarios(ctx, chosen); err != nil {
		return err
	}
	if err := b.measureGrowths(ctx, chosen); err != nil {
		return err
	}

	// A part of the table must not replace the file that has all of it.
	if only != "" {
		_, err = os.Stdout.Write(b.page())
		return err
	}

	if err := b.draw(filepath.Join(filepath.Dir(out), plotFolder)); err != nil {
		return err
	}
	return os.WriteFile(out, b.page(), 0o644)
}

func needsBare(scenario string) bool { return strings.HasPrefix(scenario, beside) }

func (b *bench) measureScenarios(ctx context.Context, chosen func(name string) bool) error {
	// All runs of a scenario, and then the next: runs that are close in time show how much a figure varies.
	for _, s := range scenarios {
		if needsBare(s.name) && b.noBare != nil {
			continue
		}

		runs := b.runs
		if once[s.name] {
			runs = 1
		}
		for n := 1; n <= runs && chosen(s.name); n++ {
			if err := b.measure(ctx, s.name, fmt.Sprintf("%d of %d", n, runs), s.measure); err != nil {
				return err
			}
		}
	}

	return nil
}

func (b *bench) measureGrowths(ctx context.Context, chosen func(name string) bool) error {
	for _, g := range growths {
		for _, size := range b.sizes {
			if !chosen(g.name) {
				continue
			}
			if g.sockets {
				size = min(size, mostSockets())
			}

			measure := func(t *trial) figures { return g.measure(t, size) }
			if err := b.measure(ctx, g.name, "at "+number(float64(size), 0), measure); err != nil {
				return err
			}

			b.figures[g.name+" size"] = append(b.figures[g.name+" size"], float64(size))
		}
	}

	return nil
}

// measure adds the figures of a trial to those of its scenario.
func (b *bench) measure(ctx context.Context, scenario, which string, measure func(*trial) figures) error {
	fmt.Fprintf(os.Stderr, "%s  %s, %s\n", time.Now().Format(time.TimeOnly), scenario, which)
	got, err := b.try(ctx, measure)
	if err != nil {
		return fmt.Errorf("%s: %w", scenario, err)
	}

	for name, v := range got {
		b.figures[scenario+" "+name] = append(b.figures[scenario+" "+name], v)
	}

	return nil
}

// raiseFileLimit raises the limit of open files as far as possible. Child processes inherit it.
func raiseFileLimit() {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return
	}

	// Only a privileged process may raise the hard limit. Any process may raise its own limit up to that.
	if unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 50_000, Max: max(50_000, l.Max)}) != nil {
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: l.Max, Max: l.Max})
	}
}
