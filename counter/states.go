package counter

import "sync"

// States observes whether the server of a store is reachable. One goroutine calls it; before the first call the
// server counts as unreachable. StoreState must not block.
type States interface{ StoreState(up bool) }

// Relay is the States of a store that is opened before those who want to know. It tells them what it was told last. The
// zero Relay is ready for use. Its methods may be called from any goroutine.
type Relay struct {
	mu sync.Mutex // guards the fields below, and calls of to
	up bool
	to States // nil: nobody listens yet
}

// StoreState implements States.
func (r *Relay) StoreState(up bool) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.up = up
	if r.to != nil {
		r.to.StoreState(up)
	}
}

// Observe has states told, now and from now on.
func (r *Relay) Observe(states States) {
	r.mu.Lock()
	defer r.mu.Unlock()

	r.to = states
	// Under mu, so that a newer state cannot come before this one.
	states.StoreState(r.up)
}

// Repeat tells the state again.
func (r *Relay) Repeat() {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.to != nil {
		r.to.StoreState(r.up)
	}
}
