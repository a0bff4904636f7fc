// Package testkit has helpers for the tests of all packages: they wait for events, check promises in seconds on a busy
// machine, and build the program.
package testkit

import (
	"sync/atomic"
	"testing"
	"time"
)

// Timeout is how long a test waits for an event. Even on a busy machine only a fault takes this long, so such a test
// says nothing about speed.
const Timeout = 3 * time.Minute

const pollInterval = 5 * time.Millisecond

// Eventually waits until done returns true, and fails the test after Timeout.
func Eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for start := time.Now(); !done(); time.Sleep(pollInterval) {
		if time.Since(start) > Timeout {
			t.Fatalf("not within %s: %s", Timeout, what)
		}
	}
}

// Within waits until done returns true. It fails the test when that takes longer than the promise plus the time that
// the machine lost.
func Within(t testing.TB, promise time.Duration, what string, done func() bool) {
	t.Helper()
	for watch := NewStopwatch(t); !done(); time.Sleep(pollInterval) {
		if watch.Elapsed() > promise {
			t.Fatalf("not within %s (the machine lost %s more): %s",
				promise, watch.Lost().Round(time.Millisecond), what)
		}
	}
}

// A Stopwatch measures a promise that the product makes in seconds. It leaves out the time that the machine lost: while
// the machine was too busy to run goroutines that were due. Its methods may be called from any goroutine.
type Stopwatch struct {
	start time.Time
	lost  atomic.Int64 // ns
}

// NewStopwatch starts a stopwatch. Its goroutine sleeps and adds up how late it wakes. It ends with the test.
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

			// Waking a millisecond late is normal.
			if late := time.Since(start) - nap; late > time.Millisecond {
				w.lost.Add(int64(late))
			}
		}
	}()

	return w
}

// Lost returns how much time the machine has lost since the start.
func (w *Stopwatch) Lost() time.Duration {
	// An event crosses several goroutines and processes before a test sees it, and each of them wakes late.
	const hops = 3
	return hops * time.Duration(w.lost.Load())
}

// Elapsed returns the time since the start, without the time that the machine lost.
func (w *Stopwatch) Elapsed() time.Duration { return time.Since(w.start) - w.Lost() }
