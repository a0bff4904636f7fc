package fanout

import (
	"cmp"
	"container/list"
	"context"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/internal/machine"
	"headcount/internal/wake"
	"headcount/presence"
)

const (
	recentReads = 16384 // about 4 MB

	// standstillLimit is how long the process may stand still without a doubt about what it knows: as long as a read of
	// the store may take.
	standstillLimit = readLimit
)

// Hub has the newest update of every topic that somebody here wants. Its clients are
// spread over the shards, which deliver; all topics of a client are in its shard.
// Any goroutine may call its methods, unless they say otherwise.
type Hub struct {
	cfg    Config
	shards []*shard
	next   atomic.Uint64           // spreads clients over shards
	wake   chan struct{}           // holds one: keepAttached has something to attach or detach
	back   chan struct{}           // holds one: the store is back, so keepAttached need not wait to try again
	kinds  map[presence.Kind]*kind // set before Run, read only
	born   time.Time               // times are since then: the monotonic clock, since the wall clock may be set

	// read has what was last read of topics that the hub does not have. It has a lock of its
	// own; beyond recentReads it forgets the topic read longest ago.
	read  *lru.Cache[presence.Topic, reading]
	reads SharedReads[presence.Update] // of one topic each

	standstill *machine.Standstill

	verifier verifier // keepAttached's own

	mu      sync.Mutex // guards all below; a shard's lock may be held when it is taken, not the other way round
	topics  map[presence.Topic]*watched
	doubts  doubts
	silent  buckets // whose dispatcher does not reach this gateway: updates of their topics are stale
	backlog backlog
	renewed uint64 // how many times all topics were to be attached anew
}

// doubts are the reasons why updates of the store may lack something. While there is one,
// all of them are delivered as stale.
type doubts uint8

const (
	storeAway    doubts = 1 << iota // the store cannot be reached
	usersMissing                    // the store can be reached, but may lack users who stay
	stoodStill                      // the process stood still
)

// backlog is what keepAttached has to do.
type backlog struct {
	fresh list.List // of *watched: wanted topics to attach, the oldest first
	// lingering has the topics that nobody wants any more and that the store may have. Beyond
	// maxLingering the one left longest ago is dropped.
	lingering list.List
	// gone has topics that were dropped, and are to be detached. The store was asked for each
	// of them, so it grows no faster than topics are attached; as many are detached in a turn.
	gone map[presence.Topic]struct{}
}

// kind says where the updates of one kind of topic come from and go to: from source, or
// from the store if that is nil; through encoder to clients, or to watcher.
type kind struct {
	encoder Encoder
	watcher Watcher
	source  Source
}

// New returns a Hub that does nothing until Run, and knows no kinds.
func New(cfg Config) *Hub {
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)

	read, _ := lru.New[presence.Topic, reading](recentReads) // fails only for a size under 1
	h := &Hub{
		cfg:        cfg,
		read:       read,
		standstill: machine.NewStandstill(standstillLimit, cfg.Elapsed),

		wake:    make(chan struct{}, 1),
		back:    make(chan struct{}, 1),
		born:    time.Now(),
		kinds:   map[presence.Kind]*kind{},
		topics:  map[presence.Topic]*watched{},
		backlog: backlog{gone: map[presence.Topic]struct{}{}},
	}

	live := liveness{ping: cfg.Ping, pong: cfg.Pong}

	for range cfg.Shards {
		h.shards = append(h.shards, newShard(h, cfg.Interval, cfg.Budget/float64(cfg.Shards), live))
	}

	return h
}

// Deliver registers a kind whose updates come from the store and go to subscribers. All
// kinds are registered before anything else is called.
func (h *Hub) Deliver(k presence.Kind, e Encoder) { h.kinds[k] = &kind{encoder: e} }

// Supply registers a kind whose updates come from source and go to subscribers.
func (h *Hub) Supply(k presence.Kind, e Encoder, source Source) {
	h.kinds[k] = &kind{encoder: e, source: source}
}

// Watch registers a kind whose updates go to w.
func (h *Hub) Watch(k presence.Kind, w Watcher) { h.kinds[k] = &kind{watcher: w} }

// Run owns the goroutines of the hub and its shards until ctx ends.
func (h *Hub) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { h.keepAttached(ctx) })
	wg.Go(func() { h.standstill.Run(ctx, h.resumed) })
	for _, s := range h.shards {
		wg.Go(func() { s.run(ctx) })
	}

	wg.Wait()
}

// Clients returns all clients that have entered and not left.
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

// Figures counts what the shards have done so far.
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
		f.Delivered += s.figures.delivered.Load()
		f.Conflated += s.figures.conflated.Load()
		f.Busy += s.figures.busy.Load()
		f.Unwritten += s.figures.unwritten.Load()
		f.Silent += s.figures.silent.Load()
	}

	return f
}

// Unread returns how many of the topics have no subscribers here and were not read lately.
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

// Unwatched returns how many of the topics the hub does not have: each of them costs the
// store a call when it is wanted.
func (h *Hub) Unwatched(topics []presence.Topic) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for _, t := range topics {
		if h.topics[t] == nil {
			n++
		}
	}

	return n
}

// Want adds one to the number of those who need the topic's updates, and returns the newest update if it is
// known. Every newer one goes to all shards, or to the watcher of its kind.
func (h *Hub) Want(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	w := h.topics[t]
	if w == nil {
		w = h.watchLocked(t)
	}

	w.refs++
	if w.refs == 1 {
		w.leave()
		// A topic that has lingered is mostly attached still, and then what is known of it is up to date.
		if w.endpoint != attached {
			w.join(&h.backlog.fresh)
			wake.Signal(h.wake)
		}
	}

	u := w.update
	if w.kind.source == nil && h.standstill.Ended() {
		u.Stale = true // resumed is about to say so to all others
	}
	return u, w.known
}

// watchLocked adds a topic.
func (h *Hub) watchLocked(t presence.Topic) *watched {
	w := &watched{
		update: presence.Update{Topic: t},
		kind:   h.kinds[t.Kind],
		bucket: uint16(t.Bucket(h.cfg.Buckets)),
	}
	h.topics[t] = w

	if w.kind.source != nil {
		w.endpoint = attached
		w.kind.source.Want(t)
		return w
	}

	// The topic is to be detached, so the store may still have it.
	if _, dropped := h.backlog.gone[t]; dropped {
		w.endpoint = asked
		delete(h.backlog.gone, t)
	}

	return w
}

// Unwant takes back one Want. The hub forgets a topic at once that the store was never
// asked for, and any other when nobody has wanted it for a while.
func (h *Hub) Unwant(t presence.Topic) {
	h.mu.Lock()
	defer h.mu.Unlock()

	w := h.topics[t]
	w.refs--
	if w.refs > 0 {
		return
	}

	w.leave()
	if w.endpoint == unasked {
		delete(h.topics, t)
		return
	}

	h.lingerLocked(w)
}

// lingerLocked keeps a topic that nobody wants for lingerFor from now on.
func (h *Hub) lingerLocked(w *watched) {
	w.left = time.Since(h.born)

	lingering := &h.backlog.lingering
	if w.in == lingering {
		lingering.MoveToBack(w.at)
		return
	}

	w.join(lingering)
	if lingering.Len() > maxLingering {
		h.dropLocked(first(lingering))
		wake.Signal(h.wake)
	}
}

// dropLocked forgets a topic that nobody wants and that the store or a source may have.
func (h *Hub) dropLocked(w *watched) {
	w.leave()
	t := w.update.Topic
	delete(h.topics, t)

	if w.kind.source != nil {
		w.kind.source.Unwant(t)
		return
	}

	// Readers get it while the store is away. It has no time, since nobody has read it now.
	if w.known && w.kind.encoder != nil {
		h.read.Add(t, reading{update: w.update})
	}
	h.backlog.gone[t] = struct{}{}
}

// Update takes an update, whichever way it came, unless a newer one is known.
//
// A stale update may lack something. It only says that the known one is stale too, and not
// even that if the known one is as new: then the stale one was overtaken. Any update older
// than a stale one is stale, whenever it comes: a client whose join the stale one includes
// must not take an older one, from before the store lost its data, for right.
//
// The first known update is what attaching returned, or newer. An update from before may
// be of long ago: the topic may have changed since at another gateway, or at this one
// before it was started again.
func (h *Hub) Update(u presence.Update) {
	h.mu.Lock()

	w := h.topics[u.Topic]
	news := w != nil && h.acceptLocked(w, &u)
	h.mu.Unlock()

	if news {
		h.publish(w.kind, u)
	}
}

// acceptLocked makes u the newest update of w, and reports whether it is news. Then u is as it is
// to be delivered.
func (h *Hub) acceptLocked(w *watched, u *presence.Update) (news bool) {
	w.note(*u)

	// Before it is attached, newer ones may have passed by here.
	if w.endpoint < outdated {
		w.remember(*u)
		return false
	}
	if !w.known {
		return h.acceptFirstLocked(w, u)
	}
	if w.overtook(u) {
		return false
	}

	if u.Stale {
		*u = w.update
		u.Stale = true
	} else if h.doubtfulLocked(w, *u) { // u was on its way when the doubt arose
		u.Stale = true
	}

	if !replaces(u, &w.update) {
		return false
	}
	w.update = *u

	return true
}

// acceptFirstLocked is acceptLocked while no update of w is known.
func (h *Hub) acceptFirstLocked(w *watched, u *presence.Update) (news bool) {
	// There is no value yet that it could mark as stale, and its own may lack something.
	if u.Stale {
		return false
	}

	w.remember(*u) // may have a newer one already
	w.known = true
	w.update.Stale = h.doubtfulLocked(w, w.update)
	*u = w.update

	return true
}

// doubtfulLocked reports whether an update of w may be old, or may lack something.
func (h *Hub) doubtfulLocked(w *watched, u presence.Update) bool {
	fromStore := w.kind.source == nil

	return fromStore && (h.doubts != 0 || h.silent[w.bucket] || w.outdates(u))
}

// Doubtful reports whether what processes know of the store may be old, or may lack something: it is away, or lacks
// users who stay, or this process stood still.
func (h *Hub) Doubtful() bool {
	h.mu.Lock()
	defer h.mu.Unlock()

	return h.doubts != 0 || h.standstill.Ended()
}

// Acknowledged takes an update that did not come from the topic's dispatcher: a count that
// was read for a GET, or that came with the acknowledgement of a join. The latter is of the
// last change that the join's partition knows of, which may be long ago. So before the
// topic is known, the hub only remembers it.
func (h *Hub) Acknowledged(u presence.Update) {
	h.mu.Lock()
	w := h.topics[u.Topic]
	known := w != nil && w.known
	if w != nil && !known {
		w.note(u)
		w.remember(u)
	}
	h.mu.Unlock()

	if known {
		h.Update(u)
	}
}

// publish hands an update to the shards, or to the watcher of its kind.
func (h *Hub) publish(k *kind, u presence.Update) {
	if k.watcher != nil {
		k.watcher.Update(u)
		return
	}

	for _, s := range h.shards {
		s.update(u)
	}
}

// replaces reports whether somebody who has old is to get u.
func replaces(u, old *presence.Update) bool {
	order := u.Version.Compare(old.Version)

	return order > 0 || order == 0 && u.Stale != old.Stale
}

// Away marks every update as stale, because the store cannot be reached.
func (h *Hub) Away() { h.suspect(storeAway) }

// Back ends Away: every topic is attached and read anew.
func (h *Hub) Back() { h.settle(storeAway) }

// Doubt marks every update as stale, also those that come, because the store can be
// reached but may lack users who stay.
func (h *Hub) Doubt() { h.suspect(usersMissing) }

// Trust ends Doubt: every topic is attached and read anew.
func (h *Hub) Trust() { h.settle(usersMissing) }

// resumed marks every update as stale until it has been read anew: the process stood still, and what was published
// meanwhile may not have arrived yet, or never will.
func (h *Hub) resumed() {
	// What is read from now on is right, so the doubt ends at once; what is known stays stale until then.
	h.suspect(stoodStill)
	h.settle(stoodStill)
}

func (h *Hub) suspect(why doubts) {
	h.mu.Lock()
	h.doubts |= why

	var known []presence.Update
	for t, w := range h.topics {
		if w.known && !w.update.Stale && w.kind.source == nil {
			known = append(known, presence.Update{Topic: t, Stale: true})
		}
	}

	h.mu.Unlock()

	// Without the lock, since updates go on to the shards, whose locks come before it.
	for _, u := range known {
		h.Update(u)
	}
}

func (h *Hub) settle(why doubts) {
	h.mu.Lock()
	h.doubts &^= why
	h.attachAllLocked()
	h.mu.Unlock()

	wake.Signal(h.back)
}

// Silence marks what is known of the topics in these buckets as stale: their dispatchers do not reach this gateway now.
// Meanwhile keepAttached reads these topics from the store at every look, and once more when the dispatcher is back.
func (h *Hub) Silence(silent []int) {
	var now buckets
	for _, b := range silent {
		now[b] = true
	}

	h.mu.Lock()
	was := h.silent
	h.silent = now

	var known []presence.Update
	for t, w := range h.topics {
		begins := now[w.bucket] && !was[w.bucket]
		ends := was[w.bucket] && !now[w.bucket]

		fresh := w.known && !w.update.Stale && w.kind.source == nil
		// An update without a version marks the known one, whatever that is.
		if begins && fresh {
			known = append(known, presence.Update{Topic: t, Stale: true})
		}

		if ends {
			h.renewLocked(w)
		}
	}
	h.mu.Unlock()

	for _, u := range known {
		h.Update(u)
	}
	wake.Signal(h.back)
}

// Last returns the newest update known here of a topic that somebody wants.
func (h *Hub) Last(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	if w := h.topics[t]; w != nil && w.known {
		return w.update, true
	}

	return presence.Update{}, false
}
