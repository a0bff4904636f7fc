package fanout

import (
	"cmp"
	"container/list"
	"context"
	"slices"
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

	// standstillLimit is how long the process may be suspended before its data counts as doubtful: as long as a read of
	// the store may take.
	standstillLimit = readLimit
)

// Hub has the newest update of every topic that has subscribers in this process. Its clients are spread over the
// shards, which deliver; all subscriptions of a client are in its shard. Any goroutine may call its methods, unless
// they say otherwise.
type Hub struct {
	cfg    Config
	shards []*shard
	next   atomic.Uint64           // round-robin counter that spreads clients over shards
	wake   chan struct{}           // has capacity 1: keepAttached has something to attach or detach
	back   chan struct{}           // has capacity 1: the store is available again, so keepAttached retries now
	kinds  map[presence.Kind]*kind // set before Run, read only
	born   time.Time               // all times are relative to it: the monotonic clock, since the wall clock may be set

	// read has the last known update of topics that were read without a subscription. It has a lock of its own. Beyond
	// recentReads it drops the topic that was read longest ago.
	read  *lru.Cache[presence.Topic, reading]
	reads SharedReads[presence.Update] // one read of a topic at a time

	standstill *machine.Standstill

	verifier verifier // only keepAttached uses it

	mu      sync.Mutex // guards the fields below; lock it after a shard's lock, never before
	topics  map[presence.Topic]*watched
	doubts  doubts
	silent  buckets // buckets whose dispatcher does not reach this gateway: updates of their topics are stale
	backlog backlog
	renewed uint64 // how often all topics were marked to be attached again
}

// doubts are reasons why updates of the store may be incomplete. While there is any, all updates are delivered as
// stale.
type doubts uint8

const (
	storeAway    doubts = 1 << iota // the store is unavailable
	usersMissing                    // the store is available, but may lack users who are still present
	stoodStill                      // the process was suspended
)

// backlog is the pending work of keepAttached.
type backlog struct {
	fresh list.List // of *watched: topics to attach, the oldest first
	// lingering has the topics without subscribers that may be attached in the store. Beyond maxLingering the one that
	// was left longest ago is dropped.
	lingering list.List
	// gone has dropped topics that have to be detached. All of them were once attached, and a round detaches as many as
	// it attaches, so gone stays small.
	gone map[presence.Topic]struct{}
}

// kind says where the updates of one kind of topic come from and go to. They come from source, or from the store if
// source is nil, and go through encoder to clients, or to watcher.
type kind struct {
	encoder Encoder
	watcher Watcher
	source  Source
}

// New returns a Hub without kinds that does nothing until Run.
func New(cfg Config) *Hub {
	cfg.Buckets = cmp.Or(cfg.Buckets, presence.DefaultBuckets)

	read, _ := lru.New[presence.Topic, reading](recentReads) // fails only for a size below 1
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
		// The budget is the gateway's, so each shard has its part of it.
		h.shards = append(h.shards, newShard(h, cfg.Interval, cfg.Budget/float64(cfg.Shards), live))
	}

	return h
}

// Deliver registers a kind whose updates come from the store and go to subscribers. All kinds must be registered before
// any other method is called.
func (h *Hub) Deliver(k presence.Kind, e Encoder) { h.kinds[k] = &kind{encoder: e} }

// Supply registers a kind whose updates come from source and go to subscribers.
func (h *Hub) Supply(k presence.Kind, e Encoder, source Source) {
	h.kinds[k] = &kind{encoder: e, source: source}
}

// Watch registers a kind whose updates go to w.
func (h *Hub) Watch(k presence.Kind, w Watcher) { h.kinds[k] = &kind{watcher: w} }

// Run runs the goroutines of the hub and its shards until ctx ends, and waits for them.
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
		// At once, because deliveries wait meanwhile.
		all = slices.Grow(all, len(s.seats))
		for _, seat := range s.seats {
			all = append(all, seat.sub.client)
		}
		s.mu.Unlock()
	}

	return all
}

// Topics returns the number of topics that have subscribers here, or had until a moment ago.
func (h *Hub) Topics() int {
	h.mu.Lock()
	defer h.mu.Unlock()

	return len(h.topics)
}

// Wanted returns the number of topics that have subscribers here now.
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

// Figures counts what the shards have done.
type Figures struct {
	Delivered int64 // updates written to clients
	Conflated int64 // updates that a newer one replaced before a client got them
	Busy      int64 // writes postponed because a client's last write was not complete
	Unwritten int64 // writes to clients that had left, or that failed
	Silent    int64 // clients closed because they did not answer a ping
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

// Uncached returns how many of the topics would have to be read from the store: they have no subscribers here and were
// not read lately.
func (h *Hub) Uncached(topics []presence.Topic) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()

	for _, t := range topics {
		if h.topics[t] == nil && !h.read.Contains(t) {
			n++
		}
	}

	return n
}

// Unwatched returns how many of the topics the hub does not have. Each of them would cost the store a call.
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

// Want registers that one more shard, or the watcher of the kind, wants the topic. It returns the newest update if that
// is known. Newer updates go to all shards, or to the watcher.
func (h *Hub) Want(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	w := h.topics[t]
	if w == nil {
		w = h.watchLocked(t)
	}

	// Each shard counts once, however many of its clients want the topic.
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
		u.Stale = true // resumed is about to publish it as stale to all others
	}
	return u, w.known
}

// watchLocked adds a topic to the hub.
func (h *Hub) watchLocked(t presence.Topic) *watched {
	w := &watched{
		update: presence.Update{Topic: t},
		kind:   h.kinds[t.Kind],
		bucket: uint16(t.Bucket(h.cfg.Buckets)),
	}
	h.topics[t] = w

	if w.kind.source != nil {
		w.endpoint = attached
		// With the hub's lock held, so a source must not call the hub from there.
		w.kind.source.Want(t)
		return w
	}

	// The topic still has to be detached, so the store may have it attached.
	if _, dropped := h.backlog.gone[t]; dropped {
		w.endpoint = asked
		delete(h.backlog.gone, t)
	}

	return w
}

// Unwant reverses one Want. A topic that the store was never asked for is forgotten at once, any other after lingerFor.
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

// lingerLocked keeps a topic without subscribers for lingerFor.
func (h *Hub) lingerLocked(w *watched) {
	w.left = time.Since(h.born)

	lingering := &h.backlog.lingering
	if w.in == lingering {
		lingering.MoveToBack(w.at)
		return
	}

	w.join(lingering)
	if lingering.Len() > maxLingering {
		// The one that was left first goes before its time.
		h.dropLocked(first(lingering))
		wake.Signal(h.wake)
	}
}

// dropLocked forgets a topic without subscribers, and schedules it to be detached in the store or tells its source.
func (h *Hub) dropLocked(w *watched) {
	w.leave()
	t := w.update.Topic
	delete(h.topics, t)

	if w.kind.source != nil {
		w.kind.source.Unwant(t)
		return
	}

	// Readers get this update while the store is away. Its time stays 0, since it was not read from the store just now.
	if w.known && w.kind.encoder != nil {
		h.read.Add(t, reading{update: w.update})
	}
	h.backlog.gone[t] = struct{}{}
}

// Update accepts an update from any source, unless a newer one is known.
//
// A stale update may be incomplete. So it does not replace the known update, but only marks it as stale. It does not
// even do that if the known update is as new: then the stale one was merely overtaken. An update that is older than a
// stale one is stale, too, whenever it arrives: the stale one may include a client's join, and the client must not
// accept an older count from before the store lost its data.
//
// The first known update is the one that attaching returned, or a newer one. Updates that arrive before that may be
// old: the topic may have changed since at another gateway, or at this one before it was restarted.
func (h *Hub) Update(u presence.Update) {
	h.mu.Lock()

	w := h.topics[u.Topic]
	news := w != nil && h.acceptLocked(w, &u)
	h.mu.Unlock()

	// Without the lock, so updates may overtake each other on the way. The shards compare versions, and ask the hub
	// for the mark of equal ones.
	if news {
		h.publish(w.kind, u)
	}
}

// acceptLocked makes u the newest update of w, and reports whether it changes anything. Then u is the update to
// deliver.
func (h *Hub) acceptLocked(w *watched, u *presence.Update) (news bool) {
	// Even an update that is not accepted shows which version the store has.
	w.note(*u)

	// Before the topic is attached, newer updates may not have been sent to this gateway.
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
	// A stale update marks a known value, and there is none yet. Its own value may be incomplete.
	if u.Stale {
		return false
	}

	w.remember(*u) // w keeps a newer update that it has remembered before
	w.known = true
	w.update.Stale = h.doubtfulLocked(w, w.update)
	*u = w.update

	return true
}

// doubtfulLocked reports whether an update of w may be outdated or incomplete.
func (h *Hub) doubtfulLocked(w *watched, u presence.Update) bool {
	fromStore := w.kind.source == nil

	return fromStore && (h.doubts != 0 || h.silent[w.bucket] || w.outdates(u))
}

// Doubtful reports whether anything read from the store may be outdated or incomplete: the store is unavailable, it
// lacks users who are still present, or this process was suspended.
func (h *Hub) Doubtful() bool {
	h.mu.Lock()
	defer h.mu.Unlock()

	return h.doubts != 0 || h.standstill.Ended()
}

// Acknowledged accepts an update that did not come from the topic's dispatcher: a count that was read for a GET, or
// that came with the acknowledgement of a join. The latter may be old, because it includes only changes that the join's
// partition knows of. So the hub only remembers it until the topic is known.
func (h *Hub) Acknowledged(u presence.Update) {
	h.mu.Lock()
	w := h.topics[u.Topic]
	known := w != nil && w.known
	if w != nil && !known {
		w.note(u)
		w.remember(u)
	}
	h.mu.Unlock()

	// For a known topic its version decides, as for any other update.
	if known {
		h.Update(u)
	}
}

// publish passes an update to the shards, or to the watcher of its kind.
func (h *Hub) publish(k *kind, u presence.Update) {
	if k.watcher != nil {
		k.watcher.Update(u)
		return
	}

	for _, s := range h.shards {
		s.update(u)
	}
}

// replaces reports whether u must be delivered to a client that has old.
func replaces(u, old *presence.Update) bool {
	order := u.Version.Compare(old.Version)

	return order > 0 || order == 0 && u.Stale != old.Stale
}

// Away marks every update as stale, because the store is unavailable.
func (h *Hub) Away() { h.suspect(storeAway) }

// Back ends Away: every topic is attached and read again.
func (h *Hub) Back() { h.dispel(storeAway) }

// Doubt marks every update as stale, including later ones, because the store is available but may lack users who are
// still present.
func (h *Hub) Doubt() { h.suspect(usersMissing) }

// Trust ends Doubt: every topic is attached and read again.
func (h *Hub) Trust() { h.dispel(usersMissing) }

// resumed marks every update as stale until it has been read again. The process was suspended, and what was published
// in that time may arrive late or never.
func (h *Hub) resumed() {
	// Whatever is read from now on is right, so the doubt can end at once. Known updates stay stale until they are read
	// again.
	h.suspect(stoodStill)
	h.dispel(stoodStill)
}

func (h *Hub) suspect(why doubts) {
	h.mu.Lock()
	h.doubts |= why

	var known []presence.Update
	for t, w := range h.topics {
		// A source marks its own updates.
		if w.known && !w.update.Stale && w.kind.source == nil {
			known = append(known, presence.Update{Topic: t, Stale: true})
		}
	}

	h.mu.Unlock()

	// Update is called without the lock: it goes on to the shards, whose locks must be taken before the hub's.
	for _, u := range known {
		h.Update(u)
	}
}

func (h *Hub) dispel(why doubts) {
	h.mu.Lock()
	h.doubts &^= why
	h.attachAllLocked()
	h.mu.Unlock()

	// keepAttached may be waiting for its next attempt.
	wake.Signal(h.back)
}

// Silence marks the known updates of topics in these buckets as stale, because their dispatchers do not reach this
// gateway. Until a dispatcher is back, keepAttached reads its topics from the store at every verification, and once
// more afterwards.
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

// Last returns the newest update known here of a topic with subscribers.
func (h *Hub) Last(t presence.Topic) (presence.Update, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	if w := h.topics[t]; w != nil && w.known {
		return w.update, true
	}

	return presence.Update{}, false
}
