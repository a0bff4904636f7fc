// Package testkit has what the tests of all packages share: waiting for events,
// holding a promise in seconds on a machine that is busy, and building the program.
package testkit

import (
	"sync/atomic"
	"testing"
	"time"
)

// Timeout is how long a test waits for an event. Only a fault takes this long: a
// machine with busy cores never does, so a test says nothing about speed with it.
const Timeout = 3 * time.Minute

const pollInterval = 5 * time.Millisecond

// Eventually waits until done returns true, and fails the test after Timeout.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	// Asked at once, so that what is true already costs nothing.
	for start := time.Now(); !done(); time.Sleep(pollInterval) {
		if time.Since(start) > Timeout {
			t.Fatalf("not within %s: %s", Timeout, what)
		}
	}
}

// Within waits until done returns true, and fails the test when that takes longer
// than the promise and what the machine lost meanwhile.
func Within(t testing.TB, promise time.Duration, what string, done func() bool) {
	t.Helper()
	for watch := NewStopwatch(t); !done(); time.Sleep(pollInterval) {
		if watch.Elapsed() > promise {
			t.Fatalf("not within %s (the machine lost %s more): %s",
				promise, watch.Lost().Round(time.Millisecond), what)
		}
	}
}

// A Stopwatch measures a promise that the product makes in seconds. Its time stands
// still while the machine does not run those who are due. Its methods may be called
// from any goroutine.
type Stopwatch struct {
	start time.Time
	lost  atomic.Int64 // ns
}

// NewStopwatch starts a stopwatch. Its goroutine, which only sleeps and adds up how late
// it wakes, ends with the test.
func NewStopwatch(t testing.TB) *Stopwatch {
	w := &Stopwatch{start: time.Now()}
	stop, stopped := make(chan struct{}), make(chan struct{})
	t.Cleanup(func() { close(stop); <-stopped })
	go func() {
		defer close(stopped)
		for {
			const nap = 10 * time.Millisecond
			start := time.Now()
			select {
			case <-stop:
				return
			case <-time.After(nap):
			}
			// A millisecond late is usual, and no loss.
			if late := time.Since(start) - nap; late > time.Millisecond {
				w.lost.Add(int64(late))
			}
		}
	}()
	return w
}

// Lost returns what the machine lost since the start. What a test waits for crosses
// several goroutines and processes, one after the other, and each of them wakes late:
// hence the factor.
func (w *Stopwatch) Lost() time.Duration {
	const hops = 3
	return hops * time.Duration(w.lost.Load())
}

// Elapsed returns the time since the start without what the machine lost.
func (w *Stopwatch) Elapsed() time.Duration { return time.Since(w.start) - w.Lost() }
