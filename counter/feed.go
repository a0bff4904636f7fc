package counter

import (
	"context"
	"maps"
	"slices"
	"sync"

	"headcount/internal/wake"
)

// maxNamed is the maximum number of members that an Update names. With more it says Reread.
const maxNamed = 1000

// Notification is one change, as Judge reports it to Tx.Changed.
type Notification struct {
	Key          string
	Joined, Left []string
	All          bool // further members left
}

// Hub delivers changes to the watchers of one process. It is the whole feed of a store that only this process writes,
// and the last stage of the feeds of other stores. The zero Hub is ready for use. All methods may be called from any
// goroutine.
type Hub struct {
	mu        sync.RWMutex
	followers map[string][]*watch // by key; none of the lists is empty
}

// MarkMissed calls lost of all watches that follow any key: the store's feed may have missed changes.
func (h *Hub) MarkMissed() {
	h.mu.RLock()
	defer h.mu.RUnlock()

	for _, watches := range h.followers {
		for _, w := range watches {
			// No callback runs under this lock, so a slow watcher delays nobody here.
			w.mu.Lock()
			w.missed = true
			w.mu.Unlock()

			wake.Signal(w.wake)
		}
	}
}

// Publish delivers durable changes, oldest first, to the watches that follow their keys. It calls counter for these
// keys only. Calls of Publish must be in the order of the changes, and each must come before a Read can see a later
// change: otherwise a watcher could replace a newer value by an older one.
func (h *Hub) Publish(changes []Notification, counter func(key string) Counter) {
	if len(changes) == 0 {
		return
	}

	// Publishing only reads the followers: each watch has a lock of its own.
	h.mu.RLock()
	defer h.mu.RUnlock()

	if len(h.followers) == 0 {
		return
	}
	for i := range changes {
		t := &changes[i]
		watches := h.followers[t.Key]
		if len(watches) == 0 {
			continue
		}

		c := counter(t.Key)
		for _, w := range watches {
			w.add(t, c)
		}
	}
}

// Followed reports whether somebody follows key.
func (h *Hub) Followed(key string) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()

	return len(h.followers[key]) > 0
}

// Keys returns the keys that somebody follows.
func (h *Hub) Keys() []string {
	h.mu.RLock()
	defer h.mu.RUnlock()

	return slices.Collect(maps.Keys(h.followers))
}

// Watch implements Feed. A Hub itself misses nothing, so it calls lost only after MarkMissed.
func (h *Hub) Watch(changed func([]Update), lost func()) Watch {
	w := &watch{
		hub:     h,
		changed: changed,
		lost:    lost,
		keys:    map[string]struct{}{},
		pending: map[string]*pending{},
		wake:    make(chan struct{}, 1),
		ended:   make(chan struct{}),
	}
	go w.run() // ends with Close

	return w
}

// watch implements Watch.
type watch struct {
	hub     *Hub
	changed func([]Update)
	lost    func()
	keys    map[string]struct{} // guarded by hub.mu

	mu      sync.Mutex          // guards the fields up to closed; taken after hub.mu
	pending map[string]*pending // by key, so at most one for each followed key
	order   []string            // the keys of pending, oldest first
	missed  bool                // lost has to be called
	closed  bool

	wake  chan struct{} // has capacity 1; a value means that one of the fields above changed
	ended chan struct{} // closed when run has returned
}

// pending is an update that has not been delivered yet.
type pending struct {
	counter Counter
	members map[string]bool // true: joined, false: left; at most maxNamed
	reread  bool
}

func (w *watch) Follow(_ context.Context, keys ...string) error {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()

	if w.hub.followers == nil {
		w.hub.followers = map[string][]*watch{}
	}
	for _, key := range keys {
		if _, again := w.keys[key]; again {
			continue
		}
		w.keys[key] = struct{}{}
		w.hub.followers[key] = append(w.hub.followers[key], w)
	}

	return nil
}

func (w *watch) Unfollow(keys ...string) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()

	for _, key := range keys {
		w.unfollowLocked(key)
	}
}

// unfollowLocked removes a key, under hub.mu.
func (w *watch) unfollowLocked(key string) {
	if _, ok := w.keys[key]; !ok {
		return
	}
	delete(w.keys, key)

	// In place: the lists are read only under hub.mu.
	others := slices.DeleteFunc(w.hub.followers[key], func(o *watch) bool { return o == w })
	if len(others) == 0 {
		delete(w.hub.followers, key)
	} else {
		w.hub.followers[key] = others
	}
}

func (w *watch) Close() {
	// First nothing new can arrive, then the goroutine is told to end.
	w.hub.mu.Lock()
	for key := range w.keys {
		w.unfollowLocked(key)
	}
	w.hub.mu.Unlock()

	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	wake.Signal(w.wake)

	// A callback may still be running.
	<-w.ended
}

// add puts a change into pending, and merges it with an earlier one of its key.
func (w *watch) add(t *Notification, c Counter) {
	w.mu.Lock()
	p := w.pending[t.Key]
	if p == nil {
		p = &pending{}
		w.pending[t.Key] = p
		w.order = append(w.order, t.Key)
	}
	// The value replaces the one before it. The members add up, because later changes do not name them again.
	p.counter = c
	p.add(t)
	w.mu.Unlock()

	wake.Signal(w.wake)
}

func (p *pending) add(t *Notification) {
	if t.All {
		p.reread = true
	}
	// Who reads the members again needs no names.
	if len(t.Joined)+len(t.Left) == 0 || p.reread {
		return
	}

	if p.members == nil {
		p.members = map[string]bool{}
	}
	for _, m := range t.Joined {
		p.members[m] = true
	}
	for _, m := range t.Left {
		p.members[m] = false
	}

	if len(p.members) > maxNamed {
		p.members = nil
		p.reread = true
	}
}

// run is the only goroutine that calls changed and lost.
func (w *watch) run() {
	defer close(w.ended)
	for range w.wake {
		updates, missed, closed := w.take()
		// Close promises that no callback runs after it.
		if closed {
			return
		}

		if missed && w.lost != nil {
			w.lost()
		}
		if len(updates) > 0 {
			w.changed(updates)
		}
	}
}

// take takes what is pending.
func (w *watch) take() (updates []Update, missed, closed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()

	for _, key := range w.order {
		updates = append(updates, w.pending[key].update())
	}
	// The map and the list keep their memory for the next updates.
	clear(w.pending)
	w.order = w.order[:0]

	missed = w.missed
	w.missed = false

	return updates, missed, w.closed
}

func (p *pending) update() Update {
	u := Update{Counter: p.counter, Reread: p.reread}
	// Who reads the whole set next needs none of its changes.
	if p.reread {
		return u
	}

	for m, in := range p.members {
		if in {
			u.Joined = append(u.Joined, m)
		} else {
			u.Left = append(u.Left, m)
		}
	}

	return u
}
