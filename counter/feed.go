package counter

import (
	"context"
	"sync"
)

// maxTold is the number of members one Update names. Beyond it the update says
// Reread.
const maxTold = 1000

// Told is one change, as a Step heard of it.
type Told struct {
	Key          string
	Joined, Left []string
	All          bool // more members left than are named
}

// Hub tells the watchers of one process. It is the feed of a store that this
// process alone writes, and the last part of the feed of others. The zero Hub is
// ready. All methods may be called from any goroutine.
type Hub struct {
	mu        sync.RWMutex
	followers map[string][]*watch // by key; none of the lists is empty
}

// Lose has the watchers that follow anything read it again.
func (h *Hub) Lose() {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, watches := range h.followers {
		for _, w := range watches {
			w.mu.Lock()
			w.missed = true
			w.mu.Unlock()
			w.signal()
		}
	}
}

// Tell tells watchers of changes, oldest first, that are safe now. counter is
// called for the keys somebody follows. Who calls Tell does so in the order in
// which changes were made, and before a Read can see what comes after them.
func (h *Hub) Tell(changes []Told, counter func(key string) Counter) {
	if len(changes) == 0 {
		return
	}
	h.mu.RLock()
	defer h.mu.RUnlock()
	if len(h.followers) == 0 {
		return
	}
	for i := range changes {
		t := &changes[i]
		if watches := h.followers[t.Key]; len(watches) > 0 {
			c := counter(t.Key)
			for _, w := range watches {
				w.tell(t, c)
			}
		}
	}
}

// Followed reports whether somebody follows key.
func (h *Hub) Followed(key string) bool {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return len(h.followers[key]) > 0
}

// Watch is as Feed says. A Hub misses nothing by itself: it calls lost after Lose.
func (h *Hub) Watch(told func([]Update), lost func()) Watch {
	w := &watch{hub: h, told: told, lost: lost, keys: map[string]struct{}{}, pending: map[string]*pending{}, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go w.run() // ends with Close
	return w
}

// watch is one watcher's.
type watch struct {
	hub  *Hub
	told func([]Update)
	lost func()
	keys map[string]struct{} // guarded by hub.mu

	mu      sync.Mutex          // guards all below; taken after hub.mu
	pending map[string]*pending // by key: no more than are followed
	order   []string            // the keys of pending, oldest first
	missed  bool                // lost is to be called
	closed  bool

	wake  chan struct{} // holds one: pending has something, or the end has come
	ended chan struct{} // closed when run has returned
}

// pending is an update not told yet. In places only the last place of a member
// counts; it has at most maxTold.
type pending struct {
	counter Counter
	places  map[string]bool
	reread  bool
}

func (w *watch) Follow(_ context.Context, keys ...string) error {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	if w.hub.followers == nil {
		w.hub.followers = map[string][]*watch{}
	}
	for _, key := range keys {
		if _, ok := w.keys[key]; !ok {
			w.keys[key] = struct{}{}
			w.hub.followers[key] = append(w.hub.followers[key], w)
		}
	}
	return nil
}

func (w *watch) Unfollow(keys ...string) {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	for _, key := range keys {
		w.unfollow(key)
	}
}

// unfollow is called with hub.mu.
func (w *watch) unfollow(key string) {
	if _, ok := w.keys[key]; !ok {
		return
	}
	delete(w.keys, key)
	others := make([]*watch, 0, len(w.hub.followers[key]))
	for _, o := range w.hub.followers[key] {
		if o != w {
			others = append(others, o)
		}
	}
	if len(others) == 0 {
		delete(w.hub.followers, key)
	} else {
		w.hub.followers[key] = others
	}
}

func (w *watch) Close() {
	w.hub.mu.Lock()
	for key := range w.keys {
		w.unfollow(key)
	}
	w.hub.mu.Unlock()
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.signal()
	<-w.ended
}

func (w *watch) signal() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

func (w *watch) tell(t *Told, c Counter) {
	w.mu.Lock()
	p := w.pending[t.Key]
	if p == nil {
		p = &pending{}
		w.pending[t.Key] = p
		w.order = append(w.order, t.Key)
	}
	p.counter = c
	p.add(t)
	w.mu.Unlock()
	w.signal()
}

func (p *pending) add(t *Told) {
	if t.All {
		p.reread = true
	}
	if len(t.Joined)+len(t.Left) == 0 || p.reread {
		return
	}
	if p.places == nil {
		p.places = map[string]bool{}
	}
	for _, m := range t.Joined {
		p.places[m] = true
	}
	for _, m := range t.Left {
		p.places[m] = false
	}
	if len(p.places) > maxTold {
		p.places, p.reread = nil, true
	}
}

// run is the one goroutine that calls told.
func (w *watch) run() {
	defer close(w.ended)
	for range w.wake {
		w.mu.Lock()
		updates := make([]Update, 0, len(w.order))
		for _, key := range w.order {
			p := w.pending[key]
			u := Update{Counter: p.counter, Reread: p.reread}
			if !p.reread {
				for m, in := range p.places {
					if in {
						u.Joined = append(u.Joined, m)
					} else {
						u.Left = append(u.Left, m)
					}
				}
			}
			updates = append(updates, u)
		}
		clear(w.pending)
		w.order = w.order[:0]
		closed, missed := w.closed, w.missed
		w.missed = false
		w.mu.Unlock()
		if closed {
			return
		}
		if missed && w.lost != nil {
			w.lost()
		}
		if len(updates) > 0 {
			w.told(updates)
		}
	}
}
