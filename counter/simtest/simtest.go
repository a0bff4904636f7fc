// Package simtest has what simulations of counters share: seeds, dice, notes of what went wrong, and hosts of processes
// that die or stand still. Only tests import it.
package simtest

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/cryptotest"
	"testing/synctest"
	"time"

	"github.com/cespare/xxhash/v2"

	"headcount/internal/marks"
)

var (
	replayed = flag.Uint64("seed", 0, "replay the simulation of this seed, with its trace")
	without  = flag.String("without", "", "numbers of the faults that the replay leaves out, such as 1,4")
	seeds    = flag.Int("seeds", 0, "number of seeds to simulate; 0: as many as usual")
	first    = flag.Uint64("first", 1, "the first of these seeds")
)

// Run is a simulation: the seed decides what happens in it, and it notes what is wrong.
type Run func(seed uint64, notes *Notes)

// Check runs a simulation with as many seeds as usual, or as short with -short. Each must find nothing wrong.
func Check(t *testing.T, usual, short int, run Run) {
	t.Helper()
	if *replayed != 0 {
		replay(t, run)
		return
	}

	n := usual
	if *seeds != 0 {
		n = *seeds
	}
	if testing.Short() {
		n = min(n, short)
	}
	each(n, func(seed uint64) {
		for _, line := range simulate(t, seed, false, run).wrong {
			t.Errorf("seed %d: %s\nreplay: make replay SIM=%s SEED=%d", seed, line, directory(), seed)
		}
	})
}

// directory returns the directory of the simulation, relative to the module, as make replay needs it.
func directory() string {
	here, _ := os.Getwd()
	for root := here; root != filepath.Dir(root); root = filepath.Dir(root) {
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			here, _ = filepath.Rel(root, here)
			break
		}
	}

	return here
}

// Finds runs a simulation of something that is wrong, with as many seeds as usual, or as short with -short. It returns
// how many seeds there were, and how many of them found it.
func Finds(t *testing.T, usual, short int, run Run) (n int, found int64) {
	t.Helper()
	if *replayed != 0 {
		replay(t, run)
		return 1, 1
	}

	n = usual
	if testing.Short() {
		n = short
	}

	var some atomic.Int64
	each(n, func(seed uint64) {
		if len(simulate(t, seed, false, run).wrong) > 0 {
			some.Add(1)
		}
	})

	return n, some.Load()
}

// replay runs the seed that -seed names, and prints its trace. The seed decides everything that is random except the
// choices of Go's runtime, for which see internal/prove.
func replay(t *testing.T, run Run) {
	t.Helper()
	cryptotest.SetGlobalRandom(t, *replayed)
	for _, line := range simulate(t, *replayed, true, run).wrong {
		t.Log(line)
	}
}

// each calls one for n seeds, on all cores.
func each(n int, one func(seed uint64)) {
	var next atomic.Uint64
	var workers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		workers.Go(func() {
			// One at a time, because some seeds take much longer than others.
			for at := next.Add(1); at <= uint64(n); at = next.Add(1) {
				one(*first + at - 1)
			}
		})
	}
	workers.Wait()
}

// simulate runs one seed in a bubble with a clock of its own.
func simulate(t *testing.T, seed uint64, verbose bool, run Run) (notes *Notes) {
	t.Helper()
	t.Run(fmt.Sprint(seed), func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			notes = &Notes{Start: time.Now(), verbose: verbose}
			run(seed, notes)
			marks.Simulated(time.Since(notes.Start))
		})
	})

	return notes
}

// Notes collect the trace of a simulation and what is wrong in it. The methods may be called from any goroutine.
type Notes struct {
	Start   time.Time
	verbose bool

	mu    sync.Mutex // guards wrong, and the order of the trace
	wrong []string
}

// Logf adds a line to the trace of a replay. It prints at once, so that a panic loses nothing.
func (n *Notes) Logf(format string, args ...any) {
	if !n.verbose {
		return
	}

	n.mu.Lock()
	defer n.mu.Unlock()

	fmt.Printf("%9.3f  %s\n", time.Since(n.Start).Seconds(), fmt.Sprintf(format, args...))
}

// Makes reports whether the simulation causes the fault of this number: a replay may leave it out. Each fault has dice
// of its own, so the others stay the same.
func (n *Notes) Makes(fault int) bool {
	leaveOut := n.verbose && slices.Contains(strings.Split(*without, ","), strconv.Itoa(fault))
	if !leaveOut {
		n.Logf("fault %d:", fault)
	}

	return !leaveOut
}

// kinds turns the format of a fault into the name of its kind.
var kinds = strings.NewReplacer("%s", "…", "%d", "…", "%v", "…")

// Fault notes a fault that the simulation causes. kind is a format for args.
func (n *Notes) Fault(kind string, args ...any) {
	marks.Fault(kinds.Replace(kind))
	n.Logf(kind, args...)
}

// Failf notes what is wrong, and which promise of docs/promises.md that breaks; "–": none of them.
func (n *Notes) Failf(promise, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	n.Logf("BROKEN %s: %s", promise, text)

	n.mu.Lock()
	defer n.mu.Unlock()

	n.wrong = append(n.wrong, fmt.Sprintf("after %.3f s: %s: %s", time.Since(n.Start).Seconds(), promise, text))
}

// Dice are a source of random numbers. Each goroutine has its own, so that the order of goroutines does not matter.
type Dice struct {
	mu sync.Mutex
	r  *rand.Rand
}

// NewDice returns dice that depend on the seed and on their name.
func NewDice(seed uint64, name string) *Dice {
	return &Dice{r: rand.New(rand.NewPCG(seed, xxhash.Sum64String(name)))}
}

// Chance returns true with probability p.
func (d *Dice) Chance(p float64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()

	return d.r.Float64() < p
}

// Below returns a number from 0 to n-1.
func (d *Dice) Below(n int) int {
	d.mu.Lock()
	defer d.mu.Unlock()

	return d.r.IntN(n)
}

// UpTo returns a duration below most, in nanoseconds, so that two goroutines rarely get the same one.
func (d *Dice) UpTo(most time.Duration) time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()

	return time.Duration(d.r.Int64N(int64(most)))
}

// Host runs a simulated process, which may die or stand still. Its methods may be called from any goroutine.
type Host struct {
	dead atomic.Bool

	mu      sync.Mutex    // guards resumed
	resumed chan struct{} // closed when a standstill ends; nil: the process does not stand still
}

// IsDead reports whether the process was killed. It does not wait.
func (h *Host) IsDead() bool { return h.dead.Load() }

// Alive waits while the process stands still, and reports whether it lives.
func (h *Host) Alive() bool {
	h.mu.Lock()
	resumed := h.resumed
	h.mu.Unlock()
	if resumed != nil {
		<-resumed
	}

	return !h.dead.Load()
}

// Suspend makes the process stand still.
func (h *Host) Suspend() {
	h.mu.Lock()
	defer h.mu.Unlock()

	h.resumed = make(chan struct{})
}

// Resume ends a standstill.
func (h *Host) Resume() {
	h.mu.Lock()
	defer h.mu.Unlock()

	if h.resumed != nil {
		close(h.resumed)
	}
	h.resumed = nil
}

// Die kills the process.
func (h *Host) Die() {
	h.dead.Store(true) // before Resume, so that a process that stands still does nothing in between
	h.Resume()
}
