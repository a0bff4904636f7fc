package counterpg

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"headcount/counter"
)

const (
	channel = "headcount_counters"
	// Changes of one key that wait, to be sent or to be told; with more the members
	// are read again.
	maxChanges = 64
	// Keys that wait to be sent; with more the others read all they follow.
	maxOutgoing = 1 << 16
	// PostgreSQL takes payloads under 8,000 bytes.
	maxPayload = 7900
	maxItem    = 4000 // of one key; beyond it the members are not named
	// notifyPause is the least time between two notifications. What comes meanwhile
	// goes with the next.
	notifyPause = 5 * time.Millisecond
	retryEvery  = 200 * time.Millisecond // while PostgreSQL is away
	readAtOnce  = 1000                   // keys in one statement
	// defaultGapWait is how long a change of members that was read waits for the
	// notification that names them. After it watchers are told to read again.
	defaultGapWait = 50 * time.Millisecond
)

// change is one change of one key, that was committed.
type change struct {
	version      counter.Version // after it; zero: deleted
	joined, left []string
	all          bool // more members left than are named
}

// named reports whether c is about members.
func (c *change) named() bool { return c.all || len(c.joined)+len(c.left) > 0 }

// feed knows what is followed, what of it may have changed, and what other
// processes are to be told.
type feed struct {
	self string // names this process in notifications
	hub  counter.Hub
	news chan struct{} // holds one: dirty has something, or all is set
	out  chan struct{} // holds one: outgoing has something

	mu       sync.Mutex // guards all below
	followed map[string]*followed
	dirty    map[string]struct{} // followed keys that may have changed
	outgoing map[string][]change // keys that were committed here, to be sent; nil: read again
	flood    bool                // outgoing was full: everything is to be read again
	gaps     map[string]struct{} // followed keys with a gap
}

// followed is what is known of a key that somebody follows.
type followed struct {
	watches int
	known   bool // last is what was read
	last    counter.Counter
	changes []change  // after last, in the order in which they were heard; at most maxChanges
	lossy   bool      // some were dropped
	gap     time.Time // since when one between last and what was read has not been heard; zero: none
}

func newFeed() *feed {
	return &feed{
		self: rand.Text(), news: make(chan struct{}, 1), out: make(chan struct{}, 1),
		followed: map[string]*followed{}, dirty: map[string]struct{}{}, gaps: map[string]struct{}{}, outgoing: map[string][]change{},
	}
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// committed takes what this process committed.
func (f *feed) committed(told map[string][]change) {
	f.mu.Lock()
	for key, changes := range told {
		f.heard(key, changes)
		before, waits := f.outgoing[key]
		switch {
		case !waits && len(f.outgoing) == maxOutgoing:
			f.flood = true
		case !waits && len(changes) <= maxChanges:
			f.outgoing[strings.Clone(key)] = changes
		case waits && before != nil && len(before)+len(changes) <= maxChanges:
			f.outgoing[key] = append(before[:len(before):len(before)], changes...)
		default:
			f.outgoing[strings.Clone(key)] = nil
		}
	}
	f.mu.Unlock()
	signal(f.out)
}

// heard notes changes of key, when somebody follows it. It is called with mu.
func (f *feed) heard(key string, changes []change) {
	k := f.followed[key]
	if k == nil {
		return
	}
	if len(changes) == 0 || len(k.changes)+len(changes) > maxChanges {
		k.changes, k.lossy = nil, true
	} else {
		k.changes = append(k.changes, changes...)
	}
	f.dirty[key] = struct{}{}
	signal(f.news)
}

// recheck has all that is followed read again.
func (f *feed) recheck() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.followed {
		f.dirty[key] = struct{}{}
	}
	signal(f.news)
}

// tell reads what may have changed and tells watchers of what did. It is the
// only one that calls Hub.Publish, and each of its reads sees all that the one
// before it saw: so no version is told after a newer one.
func (s *Store) tell(ctx context.Context) {
	f := s.feed
	poll := time.NewTicker(s.cfg.PollEvery / 8)
	defer poll.Stop()
	part := 0
	late := time.NewTimer(s.cfg.gapWait)
	defer late.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-f.news:
		case <-late.C:
			f.late()
		case <-poll.C:
			f.pollPart(part)
			part = (part + 1) % 8
		}
		for ctx.Err() == nil {
			keys := f.take()
			if len(keys) == 0 {
				break
			}
			now := map[string]counter.Counter{}
			err := s.readFollowed(ctx, keys, now)
			if err != nil {
				f.putBack(keys)
				select {
				case <-ctx.Done():
				case <-time.After(retryEvery):
				}
				continue
			}
			told, gap := f.compare(keys, now, time.Now(), s.cfg.gapWait, s.cfg.Behind)
			if gap {
				late.Reset(s.cfg.gapWait)
			}
			f.hub.Publish(told, func(key string) counter.Counter {
				if c, ok := now[key]; ok {
					return c
				}
				return counter.Counter{Key: key}
			})
		}
	}
}

// readFollowed reads the counters of keys of which the feed tells.
func (s *Store) readFollowed(ctx context.Context, keys []string, to map[string]counter.Counter) error {
	return s.read(ctx, keys, "", func(key string, r *record, _ bool) {
		if !s.cfg.Behind || r.Kind == counter.Exact {
			to[key] = r.Counter(key)
		}
	})
}

// pollPart marks an eighth of what is followed.
func (f *feed) pollPart(part int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.followed {
		if int(key[len(key)-1])%8 == part {
			f.dirty[key] = struct{}{}
		}
	}
}

// take takes some of the keys that may have changed.
func (f *feed) take() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	keys := make([]string, 0, min(len(f.dirty), readAtOnce))
	for key := range f.dirty {
		if len(keys) == readAtOnce {
			break
		}
		keys = append(keys, key)
		delete(f.dirty, key)
	}
	return keys
}

func (f *feed) putBack(keys []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, key := range keys {
		if f.followed[key] != nil {
			f.dirty[key] = struct{}{}
		}
	}
}

// late marks the keys with a gap.
func (f *feed) late() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key := range f.gaps {
		if f.followed[key] != nil {
			f.dirty[key] = struct{}{}
		}
	}
	clear(f.gaps)
}

// compare returns what changed of keys, whose newest counters are in now, and
// whether something waits for a gap to be filled, which it does for wait. learn: of those nobody knew, what is
// there has changed.
func (f *feed) compare(keys []string, now map[string]counter.Counter, at time.Time, wait time.Duration, learn bool) (told []counter.Notification, gap bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, key := range keys {
		k := f.followed[key]
		if k == nil || !k.known && !learn {
			continue // who follows it reads it after this
		}
		k.known = true
		c, ok := now[key]
		if !ok {
			c = counter.Counter{Key: key}
		}
		if c.Version != k.last.Version {
			t, missing := k.told(key, c)
			if missing && k.gap.IsZero() {
				k.gap = at
			}
			if missing && at.Sub(k.gap) < wait {
				f.gaps[key], gap = struct{}{}, true
				continue
			}
			told = append(told, t)
			k.last, k.gap = c, time.Time{}
		}
		// What was heard and is newer than what was read is for the next time.
		k.changes = slices.DeleteFunc(k.changes, func(ch change) bool { return ch.version.Compare(c.Version) <= 0 })
		if len(k.changes) == 0 {
			k.changes, k.lossy = nil, false
		}
	}
	return told, gap
}

// told says who joined and left between last and c, when every single change
// between the two was heard. missing says that one was not heard yet.
func (k *followed) told(key string, c counter.Counter) (t counter.Notification, missing bool) {
	t.Key = key
	if c.Kind != counter.Members && k.last.Kind != counter.Members {
		return t, false
	}
	t.All = true
	next := k.last.Version.Sequence + 1
	if k.last.Version.Incarnation != c.Version.Incarnation {
		next = 1
		if k.last.Touched() { // it was deleted in between
			return t, false
		}
	}
	if k.lossy || !c.Touched() {
		return t, false
	}
	slices.SortStableFunc(k.changes, func(a, b change) int { return a.version.Compare(b.version) })
	places := map[string]bool{}
	for _, ch := range k.changes {
		if ch.version.Incarnation != c.Version.Incarnation || ch.version.Sequence < next {
			continue
		}
		if ch.all {
			return t, false
		}
		if ch.version.Sequence != next || ch.version.Sequence > c.Version.Sequence {
			break
		}
		for _, m := range ch.joined {
			places[m] = true
		}
		for _, m := range ch.left {
			places[m] = false
		}
		next++
	}
	if next != c.Version.Sequence+1 {
		return t, true
	}
	t.All = false
	for m, in := range places {
		if in {
			t.Joined = append(t.Joined, m)
		} else {
			t.Left = append(t.Left, m)
		}
	}
	return t, false
}

// Watch is as counter.Feed says. What was missed is read again here, so lost is
// never called.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return &watch{Watch: s.feed.hub.Watch(told, lost), store: s, keys: map[string]struct{}{}}
}

// watch is a hub's, that also says what is followed.
type watch struct {
	counter.Watch
	store *Store
	keys  map[string]struct{} // guarded by feed.mu
}

// Follow also reads keys that nobody followed before: what changes later is
// told by comparison.
func (w *watch) Follow(ctx context.Context, keys ...string) error {
	f := w.store.feed
	var added, unknown []string
	f.mu.Lock()
	for _, key := range keys {
		if _, ok := w.keys[key]; ok {
			continue
		}
		w.keys[key] = struct{}{}
		added = append(added, key)
		k := f.followed[key]
		if k == nil {
			k = &followed{}
			f.followed[key] = k
		}
		k.watches++
		if !k.known {
			unknown = append(unknown, key)
		}
	}
	f.mu.Unlock()
	for chunk := range slices.Chunk(unknown, readAtOnce) {
		now := map[string]counter.Counter{}
		err := w.store.readFollowed(ctx, chunk, now)
		if err != nil && w.store.cfg.Behind {
			f.mu.Lock()
			for _, key := range chunk {
				f.dirty[key] = struct{}{} // what is there is told when PostgreSQL is back
			}
			f.mu.Unlock()
			signal(f.news)
			continue
		}
		if err != nil {
			w.forget(added)
			return fmt.Errorf("counterpg: follow: %w", err)
		}
		f.mu.Lock()
		for _, key := range chunk {
			if k := f.followed[key]; k != nil && !k.known {
				k.known, k.last = true, now[key]
			}
		}
		f.mu.Unlock()
	}
	return w.Watch.Follow(ctx, added...)
}

func (w *watch) Unfollow(keys ...string) {
	w.Watch.Unfollow(keys...)
	w.forget(keys)
}

func (w *watch) forget(keys []string) {
	f := w.store.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, key := range keys {
		if _, ok := w.keys[key]; !ok {
			continue
		}
		delete(w.keys, key)
		if k := f.followed[key]; k.watches > 1 {
			k.watches--
		} else {
			delete(f.followed, key)
			delete(f.dirty, key)
		}
	}
}

func (w *watch) Close() {
	w.Watch.Close()
	w.store.feed.mu.Lock()
	keys := sortedKeys(w.keys)
	w.store.feed.mu.Unlock()
	w.forget(keys)
}

// message is the payload of a notification.
type message struct {
	From string `json:"f"`
	All  bool   `json:"a,omitempty"` // read again all that is followed
	Keys []item `json:"k,omitempty"`
}

// item is a key that changed. Without changes the members are read again.
type item struct {
	Key     string   `json:"k"`
	Changes []wanted `json:"c,omitempty"`
}

// wanted is a change as it is sent.
type wanted struct {
	Incarnation uint64   `json:"i"`
	Sequence    uint64   `json:"s"`
	Joined      []string `json:"j,omitempty"`
	Left        []string `json:"l,omitempty"`
	All         bool     `json:"a,omitempty"`
}

// notify sends what was committed here to the other processes until ctx ends.
func (s *Store) notify(ctx context.Context) {
	f := s.feed
	var payloads []string // taken, not sent yet
	for {
		if len(payloads) == 0 {
			select {
			case <-ctx.Done():
				return
			case <-f.out:
			}
			payloads = f.payloads()
		}
		err := s.do(ctx, func(ctx context.Context, c *pgxpool.Conn) error {
			_, err := c.Exec(ctx, `select pg_notify('`+channel+`', p) from unnest($1::text[]) p`, payloads)
			return err
		})
		pause := notifyPause
		if err == nil {
			payloads = nil
		} else {
			pause = retryEvery
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// payloads takes what is to be sent, in as few payloads as hold it.
func (f *feed) payloads() []string {
	f.mu.Lock()
	outgoing, flood := f.outgoing, f.flood
	f.outgoing, f.flood = map[string][]change{}, false
	f.mu.Unlock()
	if flood {
		return []string{encode(message{From: f.self, All: true})}
	}
	var out []string
	m, size := message{From: f.self}, 0
	for key, changes := range outgoing {
		it := item{Key: key}
		for _, c := range changes {
			it.Changes = append(it.Changes, wanted{c.version.Incarnation, c.version.Sequence, c.joined, c.left, c.all})
		}
		n := len(encode(it))
		if n > maxItem {
			it.Changes = nil
			n = len(encode(it))
		}
		if size+n > maxPayload-200 {
			out = append(out, encode(m))
			m.Keys, size = nil, 0
		}
		m.Keys = append(m.Keys, it)
		size += n + 1
	}
	if len(m.Keys) > 0 {
		out = append(out, encode(m))
	}
	return out
}

func encode(v any) string {
	b, err := json.Marshal(v)
	if err != nil { // strings and numbers always marshal
		panic(err)
	}
	return string(b)
}

// listen hears what other processes committed until ctx ends.
func (s *Store) listen(ctx context.Context) {
	for ctx.Err() == nil {
		if s.ready.Load() {
			err := s.hear(ctx)
			s.cfg.Log.Debug().Err(err).Msg("counters: listening to PostgreSQL")
		}
		select {
		case <-ctx.Done():
		case <-time.After(retryEvery):
		}
	}
}

// hear listens on one connection until it fails.
func (s *Store) hear(ctx context.Context) error {
	dialling, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := pgx.ConnectConfig(dialling, s.pool.Config().ConnConfig)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = c.Close(closing) // it is of no use any more
	}()
	if _, err := c.Exec(dialling, "listen "+channel); err != nil {
		return err
	}
	cancel()
	// What was committed before the connection stood was not heard.
	s.cache.expireAll()
	s.feed.recheck()
	for {
		n, err := c.WaitForNotification(ctx)
		if err != nil {
			return err
		}
		var m message
		if err := json.Unmarshal([]byte(n.Payload), &m); err != nil {
			return fmt.Errorf("a notification of %d bytes: %w", len(n.Payload), err)
		}
		if m.From == s.feed.self {
			continue
		}
		s.receive(&m)
	}
}

func (s *Store) receive(m *message) {
	if m.All {
		s.cache.expireAll()
		s.feed.recheck()
		return
	}
	for _, it := range m.Keys {
		s.cache.expire(it.Key)
	}
	s.feed.mu.Lock()
	defer s.feed.mu.Unlock()
	for _, it := range m.Keys {
		changes := make([]change, 0, len(it.Changes))
		for _, c := range it.Changes {
			changes = append(changes, change{counter.Version{Incarnation: c.Incarnation, Sequence: c.Sequence}, c.Joined, c.Left, c.All})
		}
		s.feed.heard(it.Key, changes)
	}
}
