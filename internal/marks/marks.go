//go:build marks

// Package marks counts what a simulation has reached in the code of the product: in a program that is built with the
// tag marks. In any other program a mark is nothing. A rare branch that no simulation reaches is a branch that they do
// not prove, so `make prove` names it.
package marks

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// Mark is a place in the code.
type Mark struct{ reached *atomic.Int64 }

var (
	mu        sync.Mutex // guards names and their maps
	places    = map[string]*atomic.Int64{}
	faults    = map[string]*atomic.Int64{}
	simulated atomic.Int64 // ns
)

// Sometimes returns a mark that the simulations together must reach. It is for variables of packages.
func Sometimes(what string) Mark { return Mark{count(places, what)} }

// Reached counts. It may be called from any goroutine.
func (m Mark) Reached() { m.reached.Add(1) }

// Must ends the program unless ok: what it says is true at this place, whatever fails. It may be called from any
// goroutine.
func Must(ok bool, what string) {
	if !ok {
		panic("must: " + what)
	}
}

// Fault counts a fault that a simulation has made.
func Fault(kind string) { count(faults, kind).Add(1) }

// Simulated adds up the time that simulations have run, by their own clocks.
func Simulated(d time.Duration) { simulated.Add(int64(d)) }

func count(all map[string]*atomic.Int64, name string) *atomic.Int64 {
	mu.Lock()
	defer mu.Unlock()

	n := all[name]
	if n == nil {
		n = &atomic.Int64{}
		all[name] = n
	}

	return n
}

// Report writes all counts, a line each, for internal/prove.
func Report(w io.Writer) {
	mu.Lock()
	defer mu.Unlock()

	fmt.Fprintf(w, "simulated\t%d\t\n", simulated.Load())
	for name, n := range places {
		fmt.Fprintf(w, "mark\t%d\t%s\n", n.Load(), name)
	}
	for kind, n := range faults {
		fmt.Fprintf(w, "fault\t%d\t%s\n", n.Load(), kind)
	}
}
