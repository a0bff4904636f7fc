package rows

import (
	"context"
	"sync"
)

// Watches are the calls of Watch within a process, for a store that publishes what the same process commits. The zero
// value has none.
type Watches struct {
	mu  sync.RWMutex // guards all
	all map[*watch]struct{}
}

type watch struct {
	mu     sync.Mutex // serialises the calls
	heard  func(partition int, number uint64, publication []byte)
	missed func()
}

// Watch is Store.Watch. It ends with ctx.
func (w *Watches) Watch(ctx context.Context, heard func(int, uint64, []byte), missed func()) {
	one := &watch{heard: heard, missed: missed}
	w.add(one)
	defer w.remove(one)

	one.miss()
	<-ctx.Done()
}

func (w *Watches) add(one *watch) {
	w.mu.Lock()
	defer w.mu.Unlock()

	if w.all == nil {
		w.all = map[*watch]struct{}{}
	}
	w.all[one] = struct{}{}
}

func (w *Watches) remove(one *watch) {
	w.mu.Lock()
	defer w.mu.Unlock()

	delete(w.all, one)
}

// Publish passes the publication of a commit, if it has one, to all watches. The caller keeps the order of commits. What
// hears it must not block.
func (w *Watches) Publish(c *Commit) {
	if c.Publication == nil {
		return
	}

	w.mu.RLock()
	defer w.mu.RUnlock()

	for one := range w.all {
		one.hear(c)
	}
}

// Missed says to all watches that publications may be lost.
func (w *Watches) Missed() {
	w.mu.RLock()
	defer w.mu.RUnlock()

	for one := range w.all {
		one.miss()
	}
}

func (w *watch) hear(c *Commit) {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.heard(c.Partition, c.Number, c.Publication)
}

func (w *watch) miss() {
	w.mu.Lock()
	defer w.mu.Unlock()

	w.missed()
}
