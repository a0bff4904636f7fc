package fanout

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/rs/zerolog"

	"headcount/presence"
)

const (
	recentReads = 16384       // about 4 MB
	staleMemory = time.Minute // event streams that come back within this may have been told a stale update
)

// Hub knows the newest update of every topic that somebody here wants. Clients are
// spread over its shards, which deliver; every topic of a client is in its shard.
// Any goroutine may call its methods, unless they say otherwise.
type Hub struct {
	life    string // this gateway's, in the store
	store   Store
	numbers NumberEncoder
	log     zerolog.Logger
	shards  []*shard
	next    atomic.Uint64           // spreads clients over shards
	wake    chan struct{}           // holds one: Run has something to attach or detach
	back    chan struct{}           // holds one: the store is back, so Run need not wait to try again
	kinds   map[presence.Kind]*kind // set before Run, read only
	born    time.Time               // staled is told by the monotonic clock: the wall clock may be set
	staled  atomic.Int64            // when an update was last told whose version does not say all, nanoseconds since born; 0: never

	// read is what was last read of topics that nobody here subscribed to, for when
	// the store is away. It has a lock of its own; beyond recentReads the one read
	// longest ago is forgotten, and is not known then.
	read *lru.Cache[presence.Topic, presence.Update]

	// keepAttached's own. It verifies the endpoints of some buckets at a time, and
	// after a loss all of them until none is missing.
	verified int     // the bucket to look at next
	used     buckets // those that had endpoints of this gateway at the last look
	lost     bool

	mu     sync.Mutex // guards all below; a shard's lock may be held when it is taken, not the other way round
	topics map[presence.Topic]*watched
	down   bool // the store is known to be away: reading it is of no use
	doubt  bool // the store may lack users who stay: what it says is told to clients as stale
	// fresh are the wanted topics to attach, the oldest first. lingering are those
	// that nobody wants any more and that the store may have, at most
	// maxLingering: beyond it the one left longest ago is dropped.
	fresh, lingering line
	// gone are topics that were dropped, and are to be detached. The store was
	// asked for each of them, so it grows no faster than topics are attached; the
	// store is asked to forget as many a turn as it is asked for.
	gone map[presence.Topic]struct{}
	era  uint64 // grows when every topic is to be attached anew
}

// kind is who has the updates of one kind of topic: an encoder or a watcher. With a
// source, the updates come from there and not from the store.
type kind struct {
	encoder Encoder
	watcher Watcher
	source  Source
}

// New returns a Hub that does nothing until Run, and knows no kinds.
func New(cfg Config) (*Hub, error) {
	read, err := lru.New[presence.Topic, presence.Update](recentReads)
	if err != nil {
		return nil, fmt.Errorf("fanout: %w", err)
	}
	h := &Hub{
		life: cfg.Life, store: cfg.Store, numbers: cfg.Numbers, log: cfg.Log, read: read,
		wake:   make(chan struct{}, 1),
		born:   time.Now(),
		back:   make(chan struct{}, 1),
		gone:   map[presence.Topic]struct{}{},
		kinds:  map[presence.Kind]*kind{},
		topics: map[presence.Topic]*watched{},
	}
	live := liveness{ping: cfg.Ping, pong: cfg.Pong}
	for range cfg.Shards {
		h.shards = append(h.shards, newShard(h, cfg.Interval, cfg.Budget/float64(cfg.Shards), live))
	}
	return h, nil
}

// Deliver registers a kind whose updates go to subscribers. It is called before
// anything else, as Watch is.
func (h *Hub) Deliver(k presence.Kind, e Encoder) { h.kinds[k] = &kind{encoder: e} }

// Supply registers a kind whose updates come from source and go to subscribers.
func (h *Hub) Supply(k presence.Kind, e Encoder, source Source) {
	h.kinds[k] = &kind{encoder: e, source: source}
}

// source is who has the updates of w, or nil when the store has.
func (h *Hub) source(w *watched) Source {
	if k := h.kinds[w.update.Kind]; k != nil {
		return k.source
	}
	return nil
}

// Watch registers a kind whose updates go to w.
func (h *Hub) Watch(k presence.Kind, w Watcher) { h.kinds[k] = &kind{watcher: w} }

// Run owns the goroutines of the hub and its shards until ctx ends.
func (h *Hub) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { h.keepAttached(ctx) })
	for _, s := range h.shards {
		wg.Go(func() { s.run(ctx) })
	}
	wg.Wait()
}

// Clients is who is there now.
func (h *Hub) Clients() (all []Client) {
	for _, s := range h.shards {
		s.mu.Lock()
		for _, seat := range s.seats {
			all = append(all, seat.sub.client)
		}
		s.mu.Unlock()
	}
	return all
}

// Topics is the number of topics that somebody here wants, or did a moment ago.
func (h *Hub) Topics() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.topics)
}

// Wanted is the number of topics that somebody here wants now.
func (h *Hub) Wanted() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, w := range h.topics {
		if w.refs > 0 {
			n++
		}
	}
	return n
}

// Figures are what has been done so far.
type Figures struct {
	Delivered int64 // updates written to clients
	Conflated int64 // updates that a newer one replaced before a client got them
	Busy      int64 // writes put off, since a client had not taken the last one; it then got the newest
	Unwritten int64 // writes to clients that were gone, or that failed
	Silent    int64 // clients closed, since they did not answer a ping
}

// Figures returns the sums over all shards.
func (h *Hub) Figures() (f Figures) {
	for _, s := range h.shards {
		f.Delivered += s.delivered.Load()
		f.Conflated += s.conflated.Load()
		f.Busy += s.busy.Load()
		f.Unwritten += s.unwritten.Load()
		f.Silent += s.silent.Load()
	}
	return f
}

// Delivered is how many updates have been written to clients.
func (h *Hub) Delivered() int64 { return h.Figures().Delivered }

// Unread is how many of the topics nobody here subscribes to or read lately.
func (h *Hub) Unread(topics []presence.Topic) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range topics {
		if h.topics[t] == nil && !h.read.Contains(t) {
			n++
		}
	}
	return n
}

// Unheard is how many of the topics are not known here at all: each of them costs
// the store a call when it is wanted.
func (h *Hub) Unheard(topics []presence.Topic) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, t := range topics {
		if h.topics[t] == nil {
			n++
		}
	}
	return n
}

// Want adds a shard to those with subscribers for the topic, and returns the
// Update when it is known. The shard is told of every newer one.
func (h *Hub) Want(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.topics[t]
	if w == nil {
		_, asked := h.gone[t]
		delete(h.gone, t)
		w = &watched{update: presence.Update{Topic: t}, bucket: uint16(t.Bucket(presence.DefaultBuckets)), asked: asked}
		h.topics[t] = w
		if source := h.source(w); source != nil {
			w.sourced, w.asked, w.attached, w.current = true, true, true, true
			source.Want(t)
		}
	}
	if w.refs++; w.refs == 1 {
		w.leaveLine()
		if !w.current {
			h.fresh.push(w)
			signal(h.wake)
		}
	}
	return w.update, w.known
}

// Unwant takes back one Want. A topic that the store was never asked for is
// forgotten at once, others when nobody has wanted them for a while.
func (h *Hub) Unwant(t presence.Topic) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.topics[t]
	if w.refs--; w.refs > 0 {
		return
	}
	w.leaveLine()
	if !w.asked {
		delete(h.topics, t)
		return
	}
	w.left = time.Since(h.born)
	h.lingering.push(w)
	if h.lingering.len > maxLingering {
		h.drop(h.lingering.first)
		signal(h.wake)
	}
}

// drop forgets a topic that nobody wants and that the store may have; under mu.
func (h *Hub) drop(w *watched) {
	w.leaveLine()
	delete(h.topics, w.update.Topic)
	if source := h.source(w); source != nil {
		source.Unwant(w.update.Topic)
		return
	}
	if w.known && h.kinds[w.update.Kind].encoder != nil {
		h.read.Add(w.update.Topic, w.update)
	}
	h.gone[w.update.Topic] = struct{}{}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Update takes an update, from whatever way it came, unless a newer one is known.
// A stale one may lack something: it only says that the one known is stale, too,
// unless that came later: then the stale one has been overtaken.
//
// The first one known is what attaching brought, or newer. Before, whoever sends
// an update may have heard of the last change long ago, and the topic may have
// been known to another gateway, or to this one in a former life, with more to it.
func (h *Hub) Update(u presence.Update) {
	h.mu.Lock()
	w := h.topics[u.Topic]
	down := w != nil && !w.sourced && (h.down || h.doubt && h.kinds[u.Kind].encoder != nil)
	switch {
	case w == nil:
	case !w.attached:
		w.hint(u)
	case !w.known && u.Stale:
	case !w.known:
		w.hint(u)
		w.known = true
		w.update.Stale = down
		u = w.update
		h.mu.Unlock()
		h.tell(u)
		return
	case u.Stale && u.Version != (presence.Version{}) && !u.Newer(w.update):
	default:
		if u.Stale {
			u = w.update
			u.Stale = true
		}
		u.Stale = u.Stale || down // it was on its way when the store went
		if replaces(&u, &w.update) {
			w.update = u
			h.mu.Unlock()
			h.tell(u)
			return
		}
	}
	h.mu.Unlock()
}

// Acknowledged takes an update that did not come from the topic's dispatcher: one that
// was read for a GET, or the count that came with the acknowledgement of a join, of the
// last change that the join's partition knows of, however long ago. It says nothing of a
// topic that is not known yet.
func (h *Hub) Acknowledged(u presence.Update) {
	h.mu.Lock()
	w := h.topics[u.Topic]
	known := w != nil && w.known
	if w != nil && !known {
		w.hint(u)
	}
	h.mu.Unlock()
	if known {
		h.Update(u)
	}
}

// hint keeps an update for when the topic is known: then none older is told.
func (w *watched) hint(u presence.Update) {
	if !u.Stale && (!w.heard || u.Newer(w.update)) {
		w.update, w.heard = u, true
	}
}

// StaleLately reports whether who was here a moment ago may have been told
// something stale: its version does not say so.
func (h *Hub) StaleLately() bool {
	at := h.staled.Load()
	return at != 0 && time.Since(h.born)-time.Duration(at) < staleMemory
}

// tell hands an update to those who deliver it, or to the watcher of its kind.
func (h *Hub) tell(u presence.Update) {
	k := h.kinds[u.Kind]
	if k.watcher != nil {
		k.watcher.Update(u)
		return
	}
	if !k.encoder.Exact(u) {
		h.staled.Store(max(int64(time.Since(h.born)), 1))
	}
	for _, s := range h.shards {
		s.update(u)
	}
}

// replaces reports whether u is to be told to who has old.
func replaces(u, old *presence.Update) bool {
	order := u.Version.Compare(old.Version)
	return order > 0 || order == 0 && u.Stale != old.Stale
}

// Away marks every update stale, because the store cannot be reached.
func (h *Hub) Away() { h.suspect(&h.down, func(*kind) bool { return true }) }

// Back has every topic attached and read anew.
func (h *Hub) Back() { h.renewAll(&h.down) }

// Doubt marks every update that clients are told as stale, also those that come, because
// the store can be reached but may lack users who stay.
func (h *Hub) Doubt() { h.suspect(&h.doubt, func(k *kind) bool { return k.encoder != nil }) }

// Trust ends Doubt: every topic is attached and read anew.
func (h *Hub) Trust() { h.renewAll(&h.doubt) }

func (h *Hub) suspect(why *bool, concerns func(*kind) bool) {
	h.mu.Lock()
	*why = true
	var known []presence.Update
	for t, w := range h.topics {
		if w.known && !w.update.Stale && !w.sourced && concerns(h.kinds[t.Kind]) {
			known = append(known, presence.Update{Topic: t, Stale: true})
		}
	}
	h.mu.Unlock()
	for _, u := range known {
		h.Update(u)
	}
}

func (h *Hub) renewAll(why *bool) {
	h.mu.Lock()
	*why = false
	h.attachAll()
	h.mu.Unlock()
	signal(h.back)
}

// Last is the newest update known here of a topic that somebody wants.
func (h *Hub) Last(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w := h.topics[t]; w != nil && w.known {
		return w.update, true
	}
	return presence.Update{}, false
}
