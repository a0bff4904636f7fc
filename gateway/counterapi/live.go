package counterapi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/presence"
)

const (
	followBatch = 500 // counters in one call to the store
	lookers     = 4   // goroutines that ask whether somebody is a member
	readTime    = 5 * time.Second
	pulseEvery  = time.Second // between two reads that show that the store is there
	maxLast     = 1 << 14     // counters last read that are remembered, about 4 MB

	// noLag is that of a read that is not to lag, and yet to say what is known when the store is away.
	noLag = time.Nanosecond
)

// Hub delivers updates to those who want them. It asks for topics with Want and
// Unwant.
type Hub interface{ Update(u presence.Update) }

// Live follows at the store the counters that clients here look at, and hands each
// newest one to the hub. The store is asked for a counter once, however many look.
//
// # Which one is newest
//
// A counter's own version goes back when it is deleted, so updates are numbered here:
// Live alone makes those of its topics. A counter is read after it is followed. What
// the store tells after that read began is at least as new, so the read does not
// replace it, unless its version is greater. A read may also overtake what the store
// tells: then what is told with a smaller version is old, and of one that is told
// to be deleted it is not known whether it was made again since, so it is read once more.
//
// A store that has gone tells nothing, so some of the counters are read once a second.
// One that is not as it was told is read in earnest.
//
// While the store is away, all counters are told as stale: those that were heard, and of those that
// somebody began to look at since, what was last read. A store may also know some counters and of others
// only what they were, as one with Redis and PostgreSQL does; then these alone are stale.
//
// # Whose it is
//
// Connections whose user is a member are shown that in their frames. For a set, each
// user who looks at it is asked about once, by one of a few goroutines; then the
// updates of the store say who joined and left. An update that does not name all
// members has everybody asked about again.
//
// Its methods may be called from any goroutine.
type Live struct {
	rules *counter.Rules
	store Store
	state State
	hub   Hub
	log   zerolog.Logger
	wake  chan struct{} // holds one: unread or gone has something, or all is to be read
	ask   chan struct{} // holds one for each looker: asking has something

	// telling is held while viewers and the hub are told, so that they are told in
	// order. It is taken before mu. Neither Want nor Unwant takes it: the hub calls
	// them under its lock.
	telling sync.Mutex

	// memory is what was last read or made, for when the store is away; beyond maxLast
	// the one not asked for longest is forgotten. Nil for a store within the process.
	memory *lru.Cache[string, counter.Counter]

	mu     sync.Mutex          // guards all below
	keys   map[string]*heard   // by name
	unread map[string]struct{} // of keys: to be followed and read
	gone   map[string]struct{} // followed at the store, and not of keys: to be unfollowed
	lost   bool                // all keys and viewers are to be read anew
	away   bool                // the store cannot be reached, or not all has been read since
	seq    uint64              // of the newest update
	// asking are the members to be asked about, with the keys of each: at most those
	// of the viewers.
	asking map[string]map[string]struct{}
}

// heard is a counter that somebody here looks at.
type heard struct {
	counter counter.Counter
	known   bool // counter is what the store has, or had
	told    bool // the store told something since the last read began
	read    bool // counter was read, and the store has not told it or a newer one yet
	stale   bool // the hub was told that counter is stale
	viewers map[string]*viewer
}

// NewLive returns a Live that does nothing until Run.
func NewLive(cfg Config, hub Hub) *Live {
	l := &Live{
		rules: cfg.Rules, store: cfg.Store, state: cfg.State, hub: hub, log: cfg.Log, wake: make(chan struct{}, 1), ask: make(chan struct{}, lookers),
		keys: map[string]*heard{}, unread: map[string]struct{}{}, gone: map[string]struct{}{}, asking: map[string]map[string]struct{}{},
	}
	if cfg.State != nil {
		var err error
		if l.memory, err = lru.New[string, counter.Counter](maxLast); err != nil { // a size under 1
			panic(err)
		}
	}
	return l
}

// note remembers a counter for when the store is away.
func (l *Live) note(c counter.Counter) {
	if l.memory == nil {
		return
	}
	if was, ok := l.memory.Peek(c.Key); ok && c.Touched() && was.Version.Compare(c.Version) > 0 {
		return
	}
	c.Key = strings.Clone(c.Key) // a part of a request, which must not stay
	l.memory.Add(c.Key, c)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Want implements fanout.Source: updates of the topic are wanted.
func (l *Live) Want(t presence.Topic) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := t.Name()
	if l.keys[key] == nil {
		l.keys[key] = &heard{}
		l.unread[key] = struct{}{}
		delete(l.gone, key)
		signal(l.wake)
	}
}

// Unwant implements fanout.Source: updates of the topic are not wanted any more.
func (l *Live) Unwant(t presence.Topic) {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := t.Name()
	delete(l.keys, key)
	delete(l.unread, key)
	l.gone[key] = struct{}{}
	signal(l.wake)
}

// StateChanged has Live look whether the store can be reached.
func (l *Live) StateChanged() { signal(l.wake) }

// up reports whether the store can be reached.
func (l *Live) up() bool { return l.state == nil || l.state.Up() }

// followed is the number of counters that somebody looks at.
func (l *Live) followed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.keys)
}

// last is the newest counter known here.
func (l *Live) last(key string) (counter.Counter, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k := l.keys[key]; k != nil && k.known {
		return k.counter, true
	}
	if l.memory == nil {
		return counter.Counter{}, false
	}
	return l.memory.Get(key)
}

// toldStale reports whether subscribers of key have been told that it is stale.
func (l *Live) toldStale(key string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.keys[key]
	return k != nil && k.known && (k.stale || k.counter.Stale)
}

// heardAll is last of keys, when all of them are known and the store can be reached.
func (l *Live) heardAll(keys []string) []counter.Reading {
	if !l.up() {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lost || l.away {
		return nil
	}
	var all []counter.Reading
	for _, key := range keys {
		k := l.keys[key]
		if k == nil || !k.known {
			return nil
		}
		if all == nil {
			all = make([]counter.Reading, 0, len(keys))
		}
		c := k.counter
		c.Approx = true
		c.Stale = c.Stale || k.stale // as its subscribers were told
		all = append(all, counter.Reading{Counter: c})
	}
	return all
}

// Run owns Live's goroutines until ctx ends.
func (l *Live) Run(ctx context.Context) {
	watch := l.store.Watch(l.told, l.missed)
	defer watch.Close()
	var wg sync.WaitGroup
	defer wg.Wait()
	for range lookers {
		wg.Go(func() { l.answer(ctx) })
	}
	failed := 0
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	pulse := time.NewTicker(pulseEvery)
	defer pulse.Stop()
	for {
		var beat []string
		select {
		case <-ctx.Done():
			return
		case <-l.wake:
		case <-retry.C:
		case <-pulse.C:
			if beat = l.some(); len(beat) == 0 {
				continue
			}
		}
		done := l.unfollow(watch)
		var err error
		switch {
		case !l.up():
			err = counter.ErrUnavailable
		case len(beat) > 0:
			err = l.look(ctx, beat)
		default:
			err = l.follow(ctx, watch)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.log.Debug().Err(err).Msg("counters: those that are looked at cannot be followed now; trying again")
			if !errors.Is(err, errExact) {
				l.goAway()
			}
			failed++
			retry.Reset(outage.Pause(failed))
			continue
		}
		failed = 0
		if !done {
			signal(l.wake)
		}
	}
}

// missed implements the lost of counter.Feed: everything is read anew.
func (l *Live) missed() {
	l.mu.Lock()
	l.lost = true
	l.mu.Unlock()
	signal(l.wake)
}

// goAway tells the hub that everything is stale. follow ends that.
func (l *Live) goAway() {
	l.telling.Lock()
	defer l.telling.Unlock()
	var stale []presence.Update
	l.mu.Lock()
	l.away = true
	for key, k := range l.keys {
		switch {
		case k.known && !k.stale:
			k.stale = true
			stale = append(stale, presence.Update{Topic: Topic(key), Stale: true})
		case !k.known && l.memory != nil:
			if c, ok := l.memory.Get(key); ok {
				c.Approx, c.Stale = true, true
				u, _ := l.take(k, c)
				k.stale = true
				stale = append(stale, u)
			}
		}
	}
	l.mu.Unlock()
	for _, u := range stale {
		l.hub.Update(u)
	}
}

// unfollow unfollows what nobody looks at any more.
func (l *Live) unfollow(watch counter.Watch) (done bool) {
	l.mu.Lock()
	keys := make([]string, 0, min(len(l.gone), followBatch))
	for key := range l.gone {
		if len(keys) == followBatch {
			break
		}
		keys = append(keys, key)
		delete(l.gone, key)
	}
	done = len(l.gone) == 0
	l.mu.Unlock()
	// Only this goroutine follows and unfollows, so a key that is wanted again
	// meanwhile is followed after this.
	if len(keys) > 0 {
		watch.Unfollow(keys...)
	}
	return done
}

// errExact says that exact counters, which may have a store of their own, cannot be read, and others can.
var errExact = errors.New("exact counters cannot be read")

// follow follows and reads what is fresh, and everything when something was lost or the
// store was away.
func (l *Live) follow(ctx context.Context, watch counter.Watch) error {
	var late []string // exact ones that could not be read
	var lateErr error
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		for _, key := range late {
			if l.keys[key] != nil {
				l.unread[key] = struct{}{}
			}
		}
	}()
	l.mu.Lock()
	if l.lost || l.away {
		l.lost = false
		for key := range l.keys {
			l.unread[key] = struct{}{}
		}
	}
	l.mu.Unlock()
	for {
		l.mu.Lock()
		keys := make([]string, 0, min(len(l.unread), followBatch))
		for key := range l.unread {
			if len(keys) == followBatch {
				break
			}
			keys = append(keys, key)
			delete(l.unread, key)
		}
		if len(keys) == 0 {
			l.away = false
		}
		l.mu.Unlock()
		if len(keys) == 0 {
			return lateErr
		}
		err := l.followSome(ctx, watch, keys)
		if errors.Is(err, errExact) {
			late, lateErr, err = append(late, slices.DeleteFunc(keys, func(key string) bool { return !l.exact(key) })...), err, nil
		}
		if err != nil {
			l.mu.Lock()
			for _, key := range keys {
				if l.keys[key] != nil {
					l.unread[key] = struct{}{}
				}
			}
			l.mu.Unlock()
			return err
		}
	}
}

func (l *Live) followSome(ctx context.Context, watch counter.Watch, keys []string) error {
	within, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	if err := watch.Follow(within, keys...); err != nil {
		return err
	}
	var exact, others []string
	for _, key := range keys {
		if l.exact(key) {
			exact = append(exact, key)
		} else {
			others = append(others, key)
		}
	}
	if err := l.read(ctx, others); err != nil {
		return err
	}
	err := l.read(ctx, exact)
	if err != nil {
		err = fmt.Errorf("%w: %w", errExact, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		if k := l.keys[key]; k != nil {
			for member := range k.viewers {
				l.question(key, member)
			}
		}
	}
	return err
}

func (l *Live) exact(key string) bool {
	rule := l.rules.Find(key)
	return rule != nil && rule.Kind == counter.Exact
}

// some are known counters to look after, as many as one read has. There are none for
// a store within the process, nor while everything is to be read anyway.
func (l *Live) some() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == nil || l.away || l.lost {
		return nil
	}
	var keys []string
	for key, k := range l.keys {
		if len(keys) == counter.MaxKeys {
			break
		}
		if k.known {
			keys = append(keys, key)
		}
	}
	return keys
}

// look reads counters to see that the store is there, and has those read in earnest that
// are not as they were told.
func (l *Live) look(ctx context.Context, keys []string) error {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	read, err := l.store.Read(ctx, keys, "", noLag)
	if err == nil && allStale(read) {
		err = counter.ErrUnavailable
	}
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range read {
		k := l.keys[r.Key]
		if k == nil {
			continue
		}
		stale := k.stale || k.counter.Stale
		if r.Stale != stale || r.Version != k.counter.Version && !(stale && r.Version.Compare(k.counter.Version) < 0) {
			l.again(r.Key)
		}
	}
	return nil
}

// again has key followed and read once more; under mu.
func (l *Live) again(key string) {
	l.unread[key] = struct{}{}
	signal(l.wake)
}

// read reads counters that are followed.
func (l *Live) read(ctx context.Context, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	l.mu.Lock()
	for _, key := range keys {
		if k := l.keys[key]; k != nil {
			k.told = false
		}
	}
	away := l.away
	l.mu.Unlock()
	read, err := l.store.Read(ctx, keys, "", noLag)
	if err == nil && away && allStale(read) {
		err = counter.ErrUnavailable // still
	}
	if err != nil {
		return err
	}
	l.telling.Lock()
	defer l.telling.Unlock()
	updates := make([]presence.Update, 0, len(read))
	l.mu.Lock()
	for _, r := range read {
		k := l.keys[r.Key]
		if k == nil || k.told && (!r.Touched() || !k.counter.Touched() || r.Version.Compare(k.counter.Version) <= 0) {
			continue
		}
		if r.Stale && k.known && r.Version.Compare(k.counter.Version) <= 0 { // more than that is known here
			if !k.stale && !k.counter.Stale {
				k.stale = true
				updates = append(updates, presence.Update{Topic: Topic(r.Key), Stale: true})
			}
			continue
		}
		k.read = k.read || !k.known || k.counter.Version != r.Version
		if u, news := l.take(k, r.Counter); news {
			updates = append(updates, u)
		}
	}
	l.mu.Unlock()
	for _, u := range updates {
		l.hub.Update(u)
	}
	return nil
}

// allStale reports whether the store knows of no counter more than what it was.
func allStale(read []counter.Reading) bool {
	return !slices.ContainsFunc(read, func(r counter.Reading) bool { return !r.Stale })
}

// take has c be the newest of k, and reports whether that is news; under mu.
func (l *Live) take(k *heard, c counter.Counter) (u presence.Update, news bool) {
	if rule := l.rules.Find(c.Key); rule != nil {
		c = c.Or(rule.Kind)
	}
	if k.known && !k.stale && k.counter.Version == c.Version && k.counter.Value == c.Value && k.counter.Stale == c.Stale {
		return u, false
	}
	c.Key = strings.Clone(c.Key)
	k.counter, k.known, k.stale = c, true, false
	l.seq++
	return presence.Update{Topic: Topic(c.Key), Version: presence.Version{Incarnation: 1, Sequence: l.seq}, Value: valueOf(c)}, true
}

// told implements the told of counter.Feed.
func (l *Live) told(changes []counter.Update) {
	type mine struct {
		v         Viewer
		key       string
		is, again bool
	}
	var hub []presence.Update
	var viewers []mine
	l.telling.Lock()
	defer l.telling.Unlock()
	l.mu.Lock()
	for i := range changes {
		ch := &changes[i]
		k := l.keys[ch.Counter.Key]
		if k == nil {
			continue
		}
		k.told = true
		news := false
		switch {
		case k.read && k.counter.Touched() && !ch.Counter.Touched():
			l.again(ch.Counter.Key)
		case k.read && ch.Counter.Version.Compare(k.counter.Version) < 0:
		default:
			var u presence.Update
			k.read = false
			if u, news = l.take(k, ch.Counter); news {
				hub = append(hub, u)
			}
		}
		if len(k.viewers) == 0 {
			continue
		}
		set := func(member string, is bool) {
			w := k.viewers[member]
			if w == nil {
				return
			}
			w.told, w.known, w.mine = true, true, is
			for v := range w.conns {
				viewers = append(viewers, mine{v, ch.Counter.Key, is, !news})
			}
		}
		switch {
		case news && ch.Counter.Value == 0 && !ch.Counter.Stale: // deleted or emptied: nobody is a member
			for member := range k.viewers {
				set(member, false)
			}
		case ch.Reread || !ch.Counter.Touched():
			for member := range k.viewers {
				l.question(ch.Counter.Key, member)
			}
		default:
			for _, member := range ch.Joined {
				set(member, true)
			}
			for _, member := range ch.Left {
				set(member, false)
			}
		}
	}
	l.mu.Unlock()
	for _, m := range viewers { // before the updates, which then go out in the right form
		m.v.Mine(m.key, m.is, m.again)
	}
	for _, u := range hub {
		l.hub.Update(u)
	}
}
