// Package countermem is a store of counters in memory, for the lifetime of the process.
//
// One lock guards everything. A step is arithmetic on a map, much shorter than the handling of a request, so nothing
// has to be combined, and a hot key costs the same as many keys. An aggregate visits every key under the lock, which
// takes about 100 ns for each. Limits have a lock of their own.
package countermem

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/counter"
	"headcount/counter/hyperloglog"
	"headcount/presence"
)

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Now func() time.Time // default time.Now; for tests
}

// Store is a counter.Store in memory. All methods may be called from any goroutine.
type Store struct {
	now    func() time.Time
	hub    counter.Hub
	limits limits

	mu       sync.Mutex // guards the fields below
	counters map[string]*record
	deleted  uint64 // the highest incarnation that was deleted
	// ids are forgotten after a day, oldest first; their number has no other bound.
	ids    map[counter.IdempotencyKey]struct{}
	oldest []remembered // the same, in the order of time
	// pasts has all histories with gains, the next one that may expire first. Each operation looks at more of them than
	// it can add.
	pasts  pasts
	tops   map[string]*top // by match
	step   step
	closed bool
}

var _ counter.Store = (*Store)(nil)

// record is one counter. Most have only a State, so everything else is behind a pointer: a sum takes about 180 bytes
// with its key.
type record struct {
	counter.State
	rest *rest
}

// rest has what some counters have besides their State.
type rest struct {
	members map[string]struct{}
	unique  *hyperloglog.Registers
	ledger  []counter.Entry             // oldest first
	history []*past                     // one for each bucket of the rule
	counted map[string]*counter.Counted // by dimension
}

// none is returned for counters without a rest. It must not be changed.
var none rest

// more returns the rest for reading.
func (r *record) more() *rest {
	if r.rest == nil {
		return &none
	}
	return r.rest
}

type remembered struct {
	id    counter.IdempotencyKey
	until time.Time
}

// New returns an empty store.
func New(cfg Config) *Store {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	s := &Store{now: cfg.Now, limits: newLimits(), tops: map[string]*top{}, counters: map[string]*record{}, ids: map[counter.IdempotencyKey]struct{}{}}
	s.step.store = s
	return s
}

// Close implements counter.Store.
func (s *Store) Close() error {
	s.limits.mu.Lock()
	s.limits.closed = true
	s.limits.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return nil
}

func (s *Store) unavailable(what string) error {
	return fmt.Errorf("countermem: %s: %w: it is closed", what, counter.ErrUnavailable)
}

// Apply implements counter.Writer. It waits for nothing but the lock.
func (s *Store) Apply(_ context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		for i := range results {
			results[i].Err = s.unavailable("apply")
		}
		return results
	}
	now := s.now()
	s.forget(now)
	s.clear(now, 16+2*len(ops))
	for i := range ops {
		results[i] = counter.Judge(&s.step, &ops[i], now)
		for _, key := range s.step.fresh {
			if r := s.counters[key]; r != nil && r.State == (counter.State{}) {
				delete(s.counters, key)
			}
		}
		s.step.fresh = s.step.fresh[:0]
		s.hub.Publish(s.step.told, s.counter)
		clear(s.step.told) // do not keep the members of a large operation alive
		s.step.told = s.step.told[:0]
	}
	return results
}

// forget deletes idempotency keys that are older than a day.
func (s *Store) forget(now time.Time) {
	n := 0
	for n < len(s.oldest) && !s.oldest[n].until.After(now) {
		delete(s.ids, s.oldest[n].id)
		n++
	}
	s.oldest = s.oldest[n:]
}

// counter returns a counter. The caller holds mu.
func (s *Store) counter(key string) counter.Counter {
	if r := s.counters[key]; r != nil {
		return r.Counter(key)
	}
	return counter.Counter{Key: key}
}

// Read implements counter.Reader. No answer lags.
func (s *Store) Read(_ context.Context, keys []string, member string, _ time.Duration) ([]counter.Reading, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, s.unavailable("read")
	}
	out := make([]counter.Reading, len(keys))
	for i, key := range keys {
		out[i].Counter.Key = key
		if r := s.counters[key]; r != nil {
			out[i].Counter = r.Counter(key)
			if member != "" {
				_, out[i].Mine = r.more().members[member]
			}
		}
	}
	return out, nil
}

// Ledger implements counter.Reader.
func (s *Store) Ledger(_ context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return counter.Ledger{}, s.unavailable("ledger")
	}
	r := s.counters[key]
	if r == nil || len(r.more().ledger) == 0 || after >= r.Entries {
		return counter.Ledger{}, nil
	}
	ledger := r.rest.ledger
	from := 0 // entries have no gaps
	if first := ledger[0].Seq; after >= first {
		from = int(after - first + 1)
	}
	to := min(from+limit, len(ledger))
	return counter.Ledger{Entries: append([]counter.Entry(nil), ledger[from:to]...), More: to < len(ledger)}, nil
}

// History implements counter.Reader.
func (s *Store) History(_ context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return counter.Counter{}, nil, s.unavailable("history")
	}
	r := s.counters[key]
	if r == nil {
		return counter.Counter{Key: key}, nil, nil
	}
	var gains []counter.Gain
	if p := r.more().past(step); p != nil {
		at := func(number int64) int {
			i, _ := slices.BinarySearchFunc(p.gains, number, func(g counter.Gain, n int64) int { return cmp.Compare(g.Number, n) })
			return i
		}
		gains = append(gains, p.gains[at(from):at(to)]...)
		for i := range gains {
			if gains[i].Seen != nil { // the registers of the running time bucket still change
				own := gains[i].Seen.Clone()
				gains[i].Seen = &own
			}
		}
	}
	return r.Counter(key), r.With(gains, step, from, to), nil
}

// Dimension implements counter.Reader.
func (s *Store) Dimension(_ context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return counter.Counter{}, counter.Counted{}, s.unavailable("dimension")
	}
	var out counter.Counted
	if r := s.counters[key]; r != nil && r.more().counted[name] != nil {
		out = r.rest.counted[name].Clone()
	}
	return s.counter(key), out, nil
}

// Aggregate implements counter.Reader.
func (s *Store) Aggregate(_ context.Context, prefix string) (counter.Aggregate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return counter.Aggregate{}, s.unavailable("aggregate")
	}
	var total counter.Total
	for key, r := range s.counters {
		if presence.HasPrefix(key, prefix) {
			total.Add(r.State)
			if u := r.more().unique; u != nil {
				total.Merge(*u)
			}
		}
	}
	return total.Aggregate(prefix)
}

// Size implements counter.Reader.
func (s *Store) Size(_ context.Context, prefix string) (n int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, s.unavailable("size")
	}
	for key := range s.counters {
		if presence.HasPrefix(key, prefix) {
			n++
		}
	}
	return n, nil
}

// Sets implements counter.Reader. It returns all of them at once.
func (s *Store) Sets(context.Context, string) (keys []string, next string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, "", s.unavailable("sets")
	}
	for key, r := range s.counters {
		if r.Kind == counter.Members {
			keys = append(keys, key)
		}
	}
	return keys, "", nil
}

// Watch implements counter.Feed.
func (s *Store) Watch(told func([]counter.Update), lost func()) counter.Watch {
	return s.hub.Watch(told, lost)
}

// step implements counter.Step. The caller holds the lock of the Store.
type step struct {
	store *Store
	fresh []string // keys for which State created a record
	told  []counter.Notification
}

func (t *step) record(key string) *record {
	r := t.store.counters[key]
	if r == nil {
		r = &record{}
		key = strings.Clone(key) // it may be a slice of a request
		t.store.counters[key] = r
		t.fresh = append(t.fresh, key)
	}
	return r
}

// rest returns the rest of a record for writing.
func (t *step) rest(key string) *rest {
	r := t.record(key)
	if r.rest == nil {
		r.rest = &rest{}
	}
	return r.rest
}

func (t *step) State(key string) *counter.State { return &t.record(key).State }
func (t *step) Deleted() uint64                 { return t.store.deleted }

func (t *step) Remembered(id counter.IdempotencyKey) bool {
	_, ok := t.store.ids[id]
	return ok
}

func (t *step) Remember(id counter.IdempotencyKey) {
	t.store.ids[id] = struct{}{}
	t.store.oldest = append(t.store.oldest, remembered{id, t.store.now().Add(counter.IdempotencyKeyKept)})
}

func (t *step) Join(key, member string) bool {
	r := t.rest(key)
	if _, ok := r.members[member]; ok {
		return false
	}
	if r.members == nil {
		r.members = map[string]struct{}{}
	}
	r.members[strings.Clone(member)] = struct{}{}
	return true
}

func (t *step) Leave(key, member string) bool {
	r := t.rest(key)
	if _, ok := r.members[member]; !ok {
		return false
	}
	delete(r.members, member)
	return true
}

func (t *step) Registers(key string) counter.Registers {
	r := t.rest(key)
	if r.unique == nil {
		r.unique = &hyperloglog.Registers{}
	}
	return r.unique
}

func (t *step) Empty(key string) {
	r := t.rest(key)
	r.members, r.unique = nil, nil
}

// Enter implements counter.Step. It also deletes expired entries.
func (t *step) Enter(key string, e counter.Entry, kept time.Duration) {
	r := t.rest(key)
	if kept > 0 {
		n := 0
		for n < len(r.ledger) && !r.ledger[n].At.Add(kept).After(e.At) {
			n++
		}
		r.ledger = r.ledger[n:]
	}
	r.ledger = append(r.ledger, e)
}

func (t *step) Past(key string, s counter.Slot, kept time.Duration) {
	p := t.past(key, s, kept)
	p.gains = append(p.gains, counter.Gain{Number: int64(s.Number), Value: s.Value})
	t.store.await(p, t.store.now())
}

// past returns the history of a bucket, which it creates if needed.
func (t *step) past(key string, s counter.Slot, kept time.Duration) *past {
	r, length := t.rest(key), time.Duration(s.Step)*time.Second
	p := r.past(length)
	if p == nil {
		p = &past{step: length}
		r.history = append(r.history, p)
	}
	p.kept = kept
	return p
}

func (t *step) See(key string, s counter.Slot, members []string, kept time.Duration) {
	p := t.past(key, s, kept)
	last := len(p.gains) - 1
	if last < 0 || p.gains[last].Number < int64(s.Number) { // when the clock goes back, the newest time bucket goes on
		p.gains = append(p.gains, counter.Gain{Number: int64(s.Number), Seen: &hyperloglog.Registers{}})
		t.store.await(p, t.store.now())
		last++
	}
	p.gains[last].Seen.Add(members...)
}

func (t *step) Count(key, name, value string, delta int64) {
	r := t.rest(key)
	if r.counted == nil {
		r.counted = map[string]*counter.Counted{}
	}
	c := r.counted[name]
	if c == nil {
		c = &counter.Counted{}
		r.counted[strings.Clone(name)] = c
	}
	if _, known := c.Values[value]; !known {
		value = strings.Clone(value)
	}
	c.Add(value, delta)
}

func (t *step) Drop(key string, v counter.Version) {
	t.store.deleted = max(t.store.deleted, v.Incarnation)
	r := t.record(key)
	for _, p := range r.more().history {
		p.gains = nil
	}
	r.rest = nil
	t.fresh = append(t.fresh, key) // its State is zero at the end of the step, so the record has to be deleted
}

func (t *step) Changed(key string, joined, left []string, all bool) {
	t.told = append(t.told, counter.Notification{Key: key, Joined: joined, Left: left, All: all})
}
