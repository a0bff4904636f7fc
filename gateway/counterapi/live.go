package counterapi

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/counter"
	"headcount/internal/machine"
	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

const (
	followBatch = 500 // counters in one call to the store
	askers      = 4   // goroutines that read memberships from the store
	readTime    = 5 * time.Second
	probeEvery  = time.Second // between two reads that show whether the store is available
	maxMemory   = 1 << 14     // counters in Live.memory, about 4 MB

	standstillLimit = 2 * time.Second // how long the process may be suspended before its values count as doubtful

	// noLag is for a read that may not lag, except that it may be answered from memory while the store is unavailable.
	noLag = time.Nanosecond
)

// Hub delivers updates to their subscribers. It calls Want and Unwant.
type Hub interface {
	Update(u presence.Update)
	// Touch records a read; the hub attaches topics that are read often.
	Touch(t presence.Topic)
}

// Live follows the counters that clients here look at, and passes the newest value of each
// to the hub. The store is asked for a counter once, however many clients look at it.
//
// # The newest value
//
// A counter's own version goes back when the counter is deleted, so Live numbers the updates
// itself. A counter is read after it is followed. A notification from the store that arrives
// after the read began is at least as new as what is read, so the read does not replace it
// unless its version is greater. A read may also overtake notifications: those with a smaller
// version are old then. If one says that the counter was deleted, it may have been made again
// since, so it is read once more.
//
// A store that has gone sends no notifications, so Live reads some counters once a second,
// and follows and reads those again that differ from the last notification. Each read also
// confirms that the value has every change that was acknowledged before the read began. A
// request for a newer value is read from the store, and confirms the value in turn.
//
// After a standstill of the process all counters are stale until they have been read again.
//
// While the store is away, all counters are stale. Those that somebody has begun to look at
// since have the value that this process last saw, or an old one that a part of the store
// still has. A store may also know some counters, and
// of others only an old value or none, as one with Redis and PostgreSQL does; then these alone
// are stale.
//
// # Members
//
// The frames of a set say whether the user of the connection is a member. For each user who
// looks at a set the store is asked once; then the notifications say who joined and left.
// After a notification that does not name all of them, the store is asked again about
// everybody.
//
// Any goroutine may call the methods.
type Live struct {
	cfg   Config
	hub   Hub
	still *machine.Standstill // detects that the process was suspended
	wake  chan struct{}       // has capacity 1: Run has something to do
	ask   chan struct{}       // each element wakes one asker, because asking is not empty

	// order is held during calls to viewers and the hub, so that they arrive in order. It is locked before mu. Want and
	// Unwant must not lock it: the hub calls them while it holds its own lock.
	order sync.Mutex

	// memory has the values that were last read or written, for use while the store is unavailable. Beyond maxMemory it
	// drops the least recently used counter. It is nil for a store in this process.
	memory *lru.Cache[string, lastKnown]

	mu     sync.Mutex          // guards the fields below
	keys   map[string]*tracked // by name
	unread map[string]struct{} // subset of keys: to be followed and read
	gone   map[string]struct{} // followed in the store, but not in keys: to be unfollowed
	away   bool                // the store was unavailable, and not everything has been read since
	seq    uint64              // incremented by every update and every notification
	// asking has the members whose memberships must be read, with the keys of each. The viewers bound its size.
	asking map[string]map[string]struct{}
}

// lastKnown is a counter, and when it was read or written.
type lastKnown struct {
	counter.Counter
	at time.Time
}

// NewLive returns a Live that does nothing until Run.
func NewLive(cfg Config, hub Hub) *Live {
	l := &Live{
		cfg:    cfg,
		hub:    hub,
		still:  machine.NewStandstill(standstillLimit, cfg.Elapsed),
		wake:   make(chan struct{}, 1),
		ask:    make(chan struct{}, askers),
		keys:   map[string]*tracked{},
		unread: map[string]struct{}{},
		gone:   map[string]struct{}{},
		asking: map[string]map[string]struct{}{},
	}
	if cfg.Counters.Remote() {
		l.memory, _ = lru.New[string, lastKnown](maxMemory) // fails only for a size below 1
	}

	return l
}

// remember keeps a counter for use while the store is unavailable.
func (l *Live) remember(c counter.Counter) {
	if l.memory == nil {
		return
	}

	// A late answer may be older than what this process knows. A deleted counter has no version to compare.
	old, known := l.memory.Peek(c.Key)
	if known && c.Touched() && old.Version.Compare(c.Version) > 0 {
		return
	}

	// A copy, because the key may be a part of a request's buffer.
	c.Key = strings.Clone(c.Key)
	l.memory.Add(c.Key, lastKnown{c, time.Now()})
}

// Want implements fanout.Source.
func (l *Live) Want(t presence.Topic) {
	l.mu.Lock()
	defer l.mu.Unlock()

	key := t.Name()
	if l.keys[key] == nil {
		l.keys[key] = &tracked{}
		l.rereadLocked(key)
		// The counter stays followed, unless it is being unfollowed right now, and is then followed again.
		delete(l.gone, key)
	}
}

// Unwant implements fanout.Source.
func (l *Live) Unwant(t presence.Topic) {
	l.mu.Lock()
	defer l.mu.Unlock()

	key := t.Name()
	// Keep the last value as an answer for clients that ask while the store is away.
	if c, ok := l.lastLocked(key); ok {
		l.remember(c.Counter)
	}

	delete(l.keys, key)
	delete(l.unread, key)
	l.gone[key] = struct{}{}
	wake.Signal(l.wake)
}

// StateChanged makes Live check whether the store is available.
func (l *Live) StateChanged() { wake.Signal(l.wake) }

// up reports whether the store can be reached.
func (l *Live) up() bool { return l.cfg.Counters.Up() }

// followed returns the number of counters that clients watch.
func (l *Live) followed() int {
	l.mu.Lock()
	defer l.mu.Unlock()

	return len(l.keys)
}

// lastLocked returns the newest value known here, and when it was read or written.
func (l *Live) lastLocked(key string) (c lastKnown, ok bool) {
	if l.memory != nil {
		c, ok = l.memory.Get(key)
	}

	k := l.keys[key]
	if k == nil || k.origin == unknown {
		return c, ok
	}

	// A change that was made here may be newer than the subscribers' value, if its notification has not arrived yet.
	if k.counter.Touched() && c.Version.Compare(k.counter.Version) > 0 {
		return c, true
	}

	return lastKnown{k.counter, time.Now()}, true
}

// known reports whether a value is known here.
func (l *Live) known(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	_, ok := l.lastLocked(key)

	return ok
}

// newest returns the newest known value for a stale reading: that of the store, or the last one known here. ok is
// false if neither is known.
func (l *Live) newest(r counter.Reading) (c counter.Counter, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.newestLocked(r)
}

// newestLocked is newest for callers that hold mu.
func (l *Live) newestLocked(r counter.Reading) (c counter.Counter, ok bool) {
	last, known := l.lastLocked(r.Key)
	if !known {
		return r.Counter, !r.Away
	}

	// What was last known here may be that the counter did not exist. If the store's value has changed since then, the
	// counter was made meanwhile.
	madeSince := !last.Touched() && r.Updated.After(last.at)
	better := newer(&last.Counter, &r.Counter) && !madeSince
	if r.Away || better {
		last.Approx = true
		last.Stale = true
		return last.Counter, true
	}

	return r.Counter, true
}

// newer reports whether a is newer than b, or says that b was deleted.
func newer(a, b *counter.Counter) bool {
	ended := !a.Touched() && b.Touched()
	return ended || a.Version.Compare(b.Version) > 0
}

// current returns the counters as their subscribers see them. It returns nil unless all of them are known, none lags by
// more than lag, and the store is available.
func (l *Live) current(keys []string, lag time.Duration) []counter.Reading {
	// After a standstill the feed may lack as much as was missed.
	if !l.up() || l.still.Ended() {
		return nil
	}
	oldest := time.Now().Add(-lag)

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.away {
		return nil
	}

	var all []counter.Reading
	for _, key := range keys {
		k := l.keys[key]
		if k == nil || !l.isCurrentLocked(key, k, oldest) {
			return nil
		}

		if all == nil {
			all = make([]counter.Reading, 0, len(keys))
		}
		c := k.counter
		// The value may lack a change whose notification is on its way.
		c.Approx = true
		all = append(all, counter.Reading{Counter: c})
	}

	return all
}

// isCurrentLocked reports whether the value of a tracked counter includes everything that was acknowledged before
// oldest.
func (l *Live) isCurrentLocked(key string, k *tracked, oldest time.Time) bool {
	_, outdated := l.unread[key]
	if outdated || k.origin == unknown {
		return false
	}

	return !k.lags(oldest) && !l.isBehindLocked(k)
}

// isBehindLocked reports whether this process has made or read a change whose notification has not arrived yet.
func (l *Live) isBehindLocked(k *tracked) bool {
	if l.memory == nil {
		return false
	}

	last, known := l.memory.Peek(k.counter.Key)

	return known && newer(&last.Counter, &k.counter)
}

// confirm records the results of a read of the store that began at the given time.
func (l *Live) confirm(readings []counter.Reading, began time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for i := range readings {
		k := l.keys[readings[i].Key]
		// Without a value there is nothing to confirm.
		if k != nil && k.origin != unknown {
			k.confirm(&readings[i].Counter, began)
		}
	}
}

// Run runs Live's goroutines until ctx ends, and waits for them.
func (l *Live) Run(ctx context.Context) {
	watch := l.cfg.Counters.Watch(l.notify, l.missed)
	defer watch.Close()

	var wg sync.WaitGroup
	defer wg.Wait()
	for range askers {
		wg.Go(func() { l.answer(ctx) })
	}
	// A store in this process stands still together with its watches.
	if l.cfg.Counters.Remote() {
		wg.Go(func() { l.still.Run(ctx, l.resumed) })
	}

	l.keepFollowed(ctx, watch)
}

// keepFollowed follows the counters that clients watch, and unfollows the others, until ctx ends.
func (l *Live) keepFollowed(ctx context.Context, watch counter.Watch) {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	pulse := time.NewTicker(probeEvery)
	defer pulse.Stop()

	for failed := 0; ; {
		var sample []string
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-retry.C:
		case <-pulse.C:
			sample = l.sample()
			if len(sample) == 0 {
				continue
			}
		}

		// Also while the store is away, or gone would grow.
		more := l.unfollow(watch)
		err := l.catchUp(ctx, watch, sample)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.cfg.Log.Debug().Err(err).Msg("counters: watched counters cannot be followed now; retrying")
			// If only some counters are away, read has marked these as stale.
			if !errors.Is(err, errSomeAway) {
				l.goAway()
				l.readOld(ctx)
			}
			failed++
			retry.Reset(outage.Pause(failed))
			continue
		}

		failed = 0
		// A round unfollows some only, and there are others.
		if more {
			wake.Signal(l.wake)
		}
	}
}

// catchUp probes the store with a sample of the counters or, without a sample, follows and reads the unread ones.
func (l *Live) catchUp(ctx context.Context, watch counter.Watch, sample []string) error {
	switch {
	case !l.up(): // a call would only time out
		return counter.ErrUnavailable
	case len(sample) > 0:
		return l.probe(ctx, sample)
	}

	return l.follow(ctx, watch)
}

// missed is called by the feed when notifications may have been lost.
func (l *Live) missed() {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.rereadAllLocked()
}

// rereadLocked makes Run follow and read a counter again.
func (l *Live) rereadLocked(key string) {
	l.unread[key] = struct{}{}
	wake.Signal(l.wake)
}

// rereadAllLocked is rereadLocked for every counter.
func (l *Live) rereadAllLocked() {
	for key := range l.keys {
		l.unread[key] = struct{}{}
	}
	wake.Signal(l.wake)
}

// goAway marks everything as stale in the hub, until follow has read it again.
func (l *Live) goAway() {
	l.order.Lock()
	defer l.order.Unlock()

	var updates []presence.Update
	l.mu.Lock()
	l.away = true
	for key, k := range l.keys {
		l.unread[key] = struct{}{} // keepFollowed retries these at its next timer
		// As if a read that begins now had found the counter away, so that no earlier notification counts as newer.
		found := counter.Away([]string{key})[0]
		updates = l.acceptLocked(updates, k, found, l.seq)
	}
	l.mu.Unlock()

	l.publishLocked(updates)
}

// readOld reads watched counters of which nothing is known here, while the store is away: of two servers one may have
// their old values.
func (l *Live) readOld(ctx context.Context) {
	l.mu.Lock()
	began := l.seq
	var keys []string
	for key, k := range l.keys {
		if k.origin == unknown && len(keys) < counter.MaxKeys {
			keys = append(keys, key)
		}
	}
	l.mu.Unlock()

	if len(keys) == 0 {
		return
	}

	// The store may be back soon, and this goroutine is the one that notices.
	ctx, cancel := context.WithTimeout(ctx, probeEvery)
	defer cancel()
	readings, err := l.cfg.Counters.Read(ctx, keys, "", noLag)
	if err != nil {
		return
	}

	l.order.Lock()
	defer l.order.Unlock()
	var updates []presence.Update
	l.mu.Lock()
	for _, r := range readings {
		// Whoever has a value that is not stale by now is read again in any case.
		if k := l.keys[r.Key]; k != nil && k.origin == unknown && r.Stale {
			updates = l.acceptLocked(updates, k, r, began)
		}
	}
	l.mu.Unlock()

	l.publishLocked(updates)
}

// publishLocked passes updates to the hub. The caller holds order, but not mu: the hub calls Want under its own lock.
func (l *Live) publishLocked(updates []presence.Update) {
	for _, u := range updates {
		l.hub.Update(u)
	}
}

// resumed marks everything as stale until it has been read again.
func (l *Live) resumed() {
	l.goAway()
	wake.Signal(l.wake)
}

// takeSome removes up to followBatch keys from set and returns them.
func takeSome(set map[string]struct{}) []string {
	keys := make([]string, 0, min(len(set), followBatch))
	for key := range set {
		if len(keys) == followBatch {
			break
		}
		keys = append(keys, key)
		delete(set, key)
	}

	return keys
}

// unfollow unfollows counters that no client watches any more, and reports whether there are more.
func (l *Live) unfollow(watch counter.Watch) (more bool) {
	l.mu.Lock()
	keys := takeSome(l.gone)
	more = len(l.gone) > 0
	l.mu.Unlock()

	// Only this goroutine follows and unfollows, so a key that is wanted again during the call is followed after it.
	if len(keys) > 0 {
		watch.Unfollow(keys...)
	}

	return more
}

// errSomeAway means that some counters cannot be read, but all others can.
var errSomeAway = errors.New("some counters cannot be read")

// follow follows and reads the counters in unread. After an error, the counters that were not read are put back.
func (l *Live) follow(ctx context.Context, watch counter.Watch) error {
	var late []string // counters that cannot be read now
	// Put them back only at the end: the loop would take them from unread again and again.
	defer func() { l.putBack(late) }()

	for {
		l.mu.Lock()
		keys := takeSome(l.unread)
		if len(keys) == 0 {
			l.away = false // all that can be read has been read, so current may answer again
		}
		l.mu.Unlock()

		if len(keys) == 0 {
			break
		}
		away, err := l.followSome(ctx, watch, keys)
		if err != nil {
			l.putBack(keys)
			return err
		}
		late = append(late, away...)
	}

	if len(late) > 0 {
		return errSomeAway
	}

	return nil
}

// putBack puts keys back into unread.
func (l *Live) putBack(keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	for _, key := range keys {
		// The counter's last viewer may have left meanwhile.
		if l.keys[key] != nil {
			l.unread[key] = struct{}{}
		}
	}
}

// followSome follows and reads counters, and returns those that cannot be read now.
func (l *Live) followSome(ctx context.Context, watch counter.Watch, keys []string) (away []string, err error) {
	within, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	// Before the read, so that a change between the two is notified.
	if err := watch.Follow(within, keys...); err != nil {
		return nil, err
	}

	return l.read(ctx, keys)
}

// sample returns known counters for a probe, at most as many as one read may have. It returns none for a store in this
// process, and none while everything has to be read anyway.
func (l *Live) sample() (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.away || !l.cfg.Counters.Remote() {
		return nil
	}

	// A map yields other keys each time, so that in time all are probed.
	for key, k := range l.keys {
		if len(keys) == counter.MaxKeys {
			break
		}
		_, outdated := l.unread[key]
		if !outdated && k.origin != unknown {
			keys = append(keys, key)
		}
	}

	return keys
}

// probe reads counters to check that the store is available, and rereads those that differ from what subscribers see.
func (l *Live) probe(ctx context.Context, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()

	began := time.Now()
	readings, err := l.cfg.Counters.Read(ctx, keys, "", noLag)
	if err != nil {
		return err
	}
	if allStale(readings) {
		return counter.ErrUnavailable
	}

	l.mu.Lock()
	defer l.mu.Unlock()

	// A part of the store is unavailable, and it probably has more counters than these.
	if slices.ContainsFunc(readings, func(r counter.Reading) bool { return r.Away }) {
		l.rereadAllLocked()
		return nil
	}

	for _, r := range readings {
		k := l.keys[r.Key]
		if k == nil {
			continue
		}

		k.confirm(&r.Counter, began)
		if k.differs(&r.Counter) {
			l.rereadLocked(r.Key)
		}
	}

	return nil
}

// read reads followed counters, and has the askers read the memberships of their viewers. It returns the counters that
// cannot be read now.
func (l *Live) read(ctx context.Context, keys []string) (late []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()

	// Notifications that arrive from here on may be newer than the read.
	l.mu.Lock()
	began := l.seq
	away := l.away
	l.mu.Unlock()

	at := time.Now()
	readings, err := l.cfg.Counters.Read(ctx, keys, "", noLag)
	if err != nil {
		return nil, err
	}
	if away && allStale(readings) { // the store is still unavailable
		return nil, counter.ErrUnavailable
	}

	// Notifications wait meanwhile, so that the hub gets the updates in order.
	l.order.Lock()
	defer l.order.Unlock()
	updates := make([]presence.Update, 0, len(readings))
	l.mu.Lock()
	for _, r := range readings {
		k := l.keys[r.Key]
		if k == nil { // no client watches it any more
			continue
		}

		updates = l.acceptLocked(updates, k, r, began)
		k.confirm(&r.Counter, at)
		if r.Away {
			late = append(late, r.Key)
		} else {
			// Notifications that named members may have been lost until now.
			l.questionAllLocked(r.Key, k)
		}
	}
	l.mu.Unlock()

	l.publishLocked(updates)

	return late, nil
}

// allStale reports whether the store returned an old value of every counter, which means that all of it is unavailable.
// If only a part is, there are readings that are Away.
func allStale(readings []counter.Reading) bool {
	return !slices.ContainsFunc(readings, func(r counter.Reading) bool { return !r.Stale || r.Away })
}

// notify is called by the feed with changes of followed counters.
func (l *Live) notify(changes []counter.Update) {
	l.order.Lock()
	defer l.order.Unlock()

	var updates []presence.Update
	var notices []mineNotice
	l.mu.Lock()
	// First, so that a read that is under way counts as older.
	l.seq++
	for i := range changes {
		change := &changes[i]
		k := l.keys[change.Counter.Key]
		if k == nil {
			continue
		}

		u, news := l.acceptNotificationLocked(k, change.Counter)
		if news {
			updates = append(updates, u)
		}
		if len(k.viewers) > 0 {
			notices = l.changeMembersLocked(notices, k, change, news)
		}
	}
	l.mu.Unlock()

	// Viewers must learn their memberships first, so that the updates are sent in the right form.
	notifyViewersLocked(notices)
	l.publishLocked(updates)
}
