package rows

import (
	"context"
	"sync"
)

// Watches implements Watch for a store that publishes the commits of its own process. The zero value is ready for use.
type Watches struct {
	mu  sync.RWMutex // guards all
	all map[*Watching]struct{}
}

// Watching is a call of Watch.
type Watching struct {
	of       *Watches
	mu       sync.Mutex // serialises the calls
	received func(partition int, number uint64, publication []byte)
	missed   func()
}

// Watch is Store.Watch. It ends with ctx.
func (w *Watches) Watch(ctx context.Context, received func(int, uint64, []byte), missed func()) {
	one := w.Begin(received, missed)
	defer one.End()

	<-ctx.Done()
}

// Begin begins a call of Watch, for a store that can detect gaps. End ends it.
func (w *Watches) Begin(received func(int, uint64, []byte), missed func()) *Watching {
	one := &Watching{of: w, received: received, missed: missed}

	w.mu.Lock()
	if w.all == nil {
		w.all = map[*Watching]struct{}{}
	}
	w.all[one] = struct{}{}
	w.mu.Unlock()

	// A publication may already have arrived by now, which is harmless.
	one.Missed()

	return one
}

// End ends the call.
func (w *Watching) End() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()

	delete(w.of.all, w)
}

// Publish passes the publication of a commit, if any, to all watches. The caller must call it in the order of commits.
// The functions of the watches must not block.
func (w *Watches) Publish(c *Commit) {
	if c.Publication == nil {
		return
	}

	// A read lock, so that partitions publish at the same time; each watch serialises its own calls.
	w.mu.RLock()
	defer w.mu.RUnlock()

	for one := range w.all {
		one.deliver(c)
	}
}

// Missed tells all watches that publications may have been lost.
func (w *Watches) Missed() {
	w.mu.RLock()
	defer w.mu.RUnlock()

	for one := range w.all {
		one.Missed()
	}
}

func (w *Watching) deliver(c *Commit) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.received(c.Partition, c.Number, c.Publication)
}

// Missed tells the watch that publications may have been lost.
func (w *Watching) Missed() {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.missed()
}
