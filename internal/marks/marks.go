//go:build marks

// Package marks counts which marked places of the product's code the simulations reach. It does so only in a program
// that is built with the tag marks; in any other program a mark does nothing. The simulations prove nothing about a
// branch that none of them reaches, so `make prove` names such marks.
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
	mu        sync.Mutex // guards the maps
	places    = map[string]*atomic.Int64{}
	faults    = map[string]*atomic.Int64{}
	simulated atomic.Int64 // ns
)

// Sometimes returns a mark that at least one of the simulations must reach. Package variables hold marks.
func Sometimes(what string) Mark { return Mark{count(places, what)} }

// Reached counts that the code has reached the mark. It may be called from any goroutine.
func (m Mark) Reached() { m.reached.Add(1) }

// Must ends the program unless ok. what is an invariant that holds at this place whatever fails. It may be called from
// any goroutine.
func Must(ok bool, what string) {
	if !ok {
		panic("must: " + what)
	}
}

// Fault counts a fault that a simulation has caused.
func Fault(kind string) { count(faults, kind).Add(1) }

// Simulated counts d, by which the clock of a simulation has advanced.
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
