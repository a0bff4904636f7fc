package owner

import (
	"sync/atomic"

	"headcount/internal/wake"
)

// turnLock is a lock that a caller may stop waiting for, and that costs next to nothing while nobody waits.
type turnLock struct {
	held    atomic.Bool
	waiting atomic.Int32
	free    chan struct{} // has capacity 1; a value means that somebody who waits may try again
}

func newTurnLock() turnLock { return turnLock{free: make(chan struct{}, 1)} }

// tryLock takes the lock if it is free.
func (l *turnLock) tryLock() bool { return l.held.CompareAndSwap(false, true) }

// lock takes the lock, and reports whether it did so before one of two channels was closed.
func (l *turnLock) lock(stop, other <-chan struct{}) bool {
	if l.tryLock() {
		return true
	}

	l.waiting.Add(1)
	defer l.leave()
	for !l.tryLock() {
		select {
		case <-l.free:
		case <-stop:
			return false
		case <-other:
			return false
		}
	}

	return true
}

// leave ends a wait. Another one gets the signal that the caller may have received and did not use.
func (l *turnLock) leave() {
	if l.waiting.Add(-1) > 0 && !l.held.Load() {
		wake.Signal(l.free)
	}
}

// unlock ends the lock. Whoever waits looked at held after it counted itself, so it is seen here.
func (l *turnLock) unlock() {
	l.held.Store(false)
	if l.waiting.Load() > 0 {
		wake.Signal(l.free)
	}
}
