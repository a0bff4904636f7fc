package hot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
)

const (
	maxKnown = 1000 // sharded sums that a process knows; others are changed by their records

	gathers  = 250 * time.Millisecond // between two gatherings of a sum that changes
	fresh    = 3 * time.Second        // a read that may lag by less reads the shards
	sweeps   = 2 * time.Second        // between two sweeps of the owner of a bucket
	busyFor  = 10 * time.Second       // how long a sum counts as busy after its rate was high, or after it was found sharded
	unused   = 2 * time.Minute        // until a process forgets a sharded sum that it does not change
	ended    = 24 * time.Hour         // how long a closed shard stays: longer than a call can be delayed
	stepTime = 5 * time.Second        // of one step, or of a gathering
	tries    = 8                      // of a change that needs the sum whole
)

// ShardStore keeps the shards: a counterredis.Store.
type ShardStore interface {
	AddToShards(ctx context.Context, adds []counterredis.ShardAdd) []counterredis.ShardAdded
	OpenShards(ctx context.Context, key string, e counter.Epoch, fresh bool, shards []int) (open bool, err error)
	CloseShards(ctx context.Context, key string, e counter.Epoch, kept time.Duration, shards []int) ([]counter.Shard, error)
	Shards(ctx context.Context, keys []string) ([][counter.Shards]counter.Shard, error)
	Sharded(ctx context.Context, buckets []int) ([]counter.Counter, error)
}

// Config tunes a Store. A zero field takes its default.
type Config struct {
	// Rate is the number of writes per second by all processes, about, above which a sum is split; required.
	Rate       int
	Rules      *counter.Rules        // required
	Owner      counterredis.Owner    // default: every bucket is this process's
	Gather     time.Duration         // between two gatherings of a sum that changes, default 250ms
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
}

// Store is a counter.Store that splits busy sums. Its methods may be called from any goroutine.
type Store struct {
	counter.Store
	shards ShardStore
	cfg    Config
	rates  *rates

	mu sync.Mutex // guards known and its elements
	// known has the sums that this process knows to be sharded, at most maxKnown.
	known map[string]*sum

	start chan string // sums that have become busy; if it is full, they will be found again
	stop  context.CancelFunc
	wg    sync.WaitGroup // run
}

// sum is what a process knows of a sharded sum.
type sum struct {
	record   counter.Counter               // the newest that was read
	sharding counter.Sharding              // what record says
	shards   [counter.Shards]counter.Shard // the newest that were read
	used     time.Time                     // last change by this process
	busy     time.Time                     // additions go to shards until then
	broken   bool                          // a shard took no addition
}

// New returns a Store that wraps to and keeps the shards of its sums in shards. Close also closes to.
func New(to counter.Store, shards ShardStore, cfg Config) *Store {
	s := newStore(to, shards, cfg)
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.run(ctx) })
	return s
}

// newStore is New without the goroutine that gathers.
func newStore(to counter.Store, shards ShardStore, cfg Config) *Store {
	cfg.Gather = cmp.Or(cfg.Gather, gathers)
	s := &Store{Store: to, shards: shards, cfg: cfg, rates: newRates(cfg.Rate), known: map[string]*sum{}, start: make(chan string, 64), stop: func() {}}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_counters_spread", Help: "Sharded sums that this process knows.",
		}, func() float64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			return float64(len(s.known))
		}))
	}
	return s
}

// Close implements counter.Store. It gathers what this process has added to shards: after the last process nobody else
// does, and a store behind Redis would lack it.
func (s *Store) Close() error {
	s.stop()
	s.wg.Wait()
	var ahead []*sum
	s.mu.Lock()
	for _, k := range s.known {
		if k.ahead() {
			ahead = append(ahead, k)
		}
	}
	s.mu.Unlock()
	if err := s.within(context.Background(), func(ctx context.Context) error { return s.gather(ctx, ahead) }); err != nil {
		s.cfg.Log.Warn().Err(err).Msg("counters: increments of sharded sums stay in Redis until another process merges them")
	}
	return s.Store.Close()
}

// learn notes a record that was read, and returns what is known of the sum then: nil if it is not sharded, or if too
// many sums are known. The caller holds mu.
func (s *Store) learn(c counter.Counter) *sum {
	k := s.known[c.Key]
	if k != nil && c.Version.Compare(k.record.Version) < 0 && c.Version != (counter.Version{}) {
		return k // an older record
	}
	if !c.IsSharded() {
		delete(s.known, c.Key)
		return nil
	}
	sharding, err := counter.ParseSharding(c.Sharding)
	if err != nil || k == nil && len(s.known) >= maxKnown {
		return nil
	}
	if k == nil {
		now := time.Now()
		k = &sum{used: now, busy: now.Add(busyFor)}
		k.record.Key = strings.Clone(c.Key) // it may be a slice of a request
		s.known[k.record.Key] = k
	}
	if k.sharding.Epoch != sharding.Epoch {
		k.broken = false
	}
	c.Key = k.record.Key
	k.record, k.sharding = c, sharding
	return k
}

// take notes a shard that was read. The caller holds mu.
func (k *sum) take(i int, p counter.Shard) {
	if cmp.Or(p.Epoch.Compare(k.shards[i].Epoch), cmp.Compare(p.Sequence, k.shards[i].Sequence)) > 0 {
		k.shards[i] = p
	}
}

// counter returns the sum with everything that is known of its shards. The caller holds mu.
func (k *sum) counter() counter.Counter { return k.sharding.With(k.record, &k.shards) }

// ahead reports whether shards have something that the record lacks. The caller holds mu.
func (k *sum) ahead() bool { return k.counter().Version != k.record.Version }

// Apply implements counter.Writer.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := make([]counter.Result, len(ops))
	adds, to, rest, whole := s.choose(ops)
	for _, key := range whole {
		_ = s.merge(ctx, key) // if it fails, the record refuses the change, and again merges the sum
	}
	var added []counterredis.ShardAdded
	var wg sync.WaitGroup
	if len(adds) > 0 {
		wg.Go(func() { added = s.shards.AddToShards(ctx, adds) })
	}
	s.apply(ctx, ops, rest, results)
	wg.Wait()
	s.apply(ctx, ops, s.answer(ctx, adds, added, to, results), results)
	s.again(ctx, ops, results)
	return results
}

// apply makes the operations with these indexes on records.
func (s *Store) apply(ctx context.Context, ops []counter.Op, at []int, results []counter.Result) {
	if len(at) == 0 {
		return
	}
	some := ops
	if len(at) < len(ops) {
		some = make([]counter.Op, len(at))
		for n, i := range at {
			some[n] = ops[i]
		}
	}
	made := s.Store.Apply(ctx, some)
	s.note(made)
	for n, i := range at {
		results[i] = made[n]
	}
}

// choose divides operations into additions to shards, with their indexes, and others, and returns the sums that have to
// be merged for these. If one operation on a key is not a plain addition, all of them go to its record, in order.
func (s *Store) choose(ops []counter.Op) (adds []counterredis.ShardAdd, to, rest []int, whole []string) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	apart := map[string]bool{}
	for i := range ops {
		for j := range ops[i].Changes {
			c := &ops[i].Changes[j]
			k := s.known[c.Key]
			if k == nil {
				continue
			}
			k.used = now
			plain := len(ops[i].Changes) == 1 && c.Verb == counter.Add && ops[i].IdempotencyKey == counter.IdempotencyKey{} && len(c.Dimensions) == 0
			if !plain || k.broken || now.After(k.busy) || c.Rule.Kind != counter.Sum {
				apart[c.Key] = true
			}
			if c.Verb == counter.Reset || c.Verb == counter.Delete {
				whole = append(whole, c.Key)
			}
		}
	}
	for i := range ops {
		if len(ops[i].Changes) == 1 {
			c := &ops[i].Changes[0]
			if k := s.known[c.Key]; k != nil && !apart[c.Key] {
				adds = append(adds, counterredis.ShardAdd{Key: c.Key, Shard: rand.IntN(counter.Shards), Epoch: k.sharding.Epoch, Delta: c.Delta})
				to = append(to, i)
				continue
			}
		}
		rest = append(rest, i)
	}
	return adds, to, rest, whole
}

// answer sets the results of additions to shards, and returns the indexes of those that no shard took.
func (s *Store) answer(
	ctx context.Context, adds []counterredis.ShardAdd, added []counterredis.ShardAdded, to []int, results []counter.Result,
) (late []int) {
	for n, i := range to {
		add, is := &adds[n], &added[n]
		s.mu.Lock()
		k := s.known[add.Key]
		c, err := counter.Counter{}, is.Err
		switch {
		case errors.Is(err, counter.ErrSharded):
			late = append(late, i)
			if k != nil && k.sharding.Epoch == add.Epoch {
				k.broken = true
			}
		case err == nil && k != nil:
			k.take(add.Shard, is.Shard)
			c = k.counter()
			s.watch(c)
		}
		s.mu.Unlock()
		if err == nil && k == nil { // the sum was merged meanwhile, with the change
			var read []counter.Reading
			if read, err = s.Read(ctx, []string{add.Key}, "", 0); err == nil {
				c = read[0].Counter
			}
		}
		if results[i].Counters = []counter.Counter{c}; err != nil {
			results[i] = counter.Result{Err: fmt.Errorf("hot: add to a shard of %q: %w", add.Key, err)}
		}
	}
	return late
}

// note learns from results which sums are sharded, and which are busy.
func (s *Store) note(results []counter.Result) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range results {
		for j := range results[i].Counters {
			c := &results[i].Counters[j]
			if c.Kind != counter.Sum {
				continue
			}
			if k := s.learn(*c); k != nil {
				*c = k.counter()
			}
			s.watch(*c)
		}
	}
}

// watch finds out by the version of a changed sum whether the sum is busy, and then starts a split. The caller holds
// mu.
func (s *Store) watch(c counter.Counter) {
	if !s.rates.hot(c.Key, c.Version) {
		return
	}
	if k := s.known[c.Key]; k != nil {
		k.busy = time.Now().Add(busyFor)
	} else if !c.IsSharded() {
		select {
		case s.start <- c.Key:
		default:
		}
	}
}

// again repeats operations that were refused because a sum is sharded, after merging the sum.
func (s *Store) again(ctx context.Context, ops []counter.Op, results []counter.Result) {
	for i := range results {
		for n := 0; n < tries && errors.Is(results[i].Err, counter.ErrSharded); n++ {
			for j := range ops[i].Changes {
				if err := s.merge(ctx, ops[i].Changes[j].Key); err != nil {
					results[i] = counter.Result{Err: fmt.Errorf("hot: merge %q: %w", ops[i].Changes[j].Key, err)}
					return
				}
			}
			s.apply(ctx, ops, []int{i}, results)
		}
	}
}

// Read implements counter.Reader. A read that may lag gets the record, and what this process has added itself.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	exact := lag < fresh
	var sharded []string // their shards are read in the same round trip
	if exact {
		s.mu.Lock()
		for _, key := range keys {
			if s.known[key] != nil {
				sharded = append(sharded, key)
			}
		}
		s.mu.Unlock()
	}
	for range tries {
		var shards [][counter.Shards]counter.Shard
		var fault error
		var wg sync.WaitGroup
		if len(sharded) > 0 {
			wg.Go(func() { shards, fault = s.shards.Shards(ctx, sharded) })
		}
		out, err := s.Store.Read(ctx, keys, member, lag)
		wg.Wait()
		switch {
		case err != nil:
			return nil, err
		case fault != nil && exact:
			return nil, fmt.Errorf("hot: shards of %d sums: %w", len(sharded), fault)
		case fault != nil:
			return out, nil // the record may be a little older than permitted
		}
		if sharded = s.whole(out, sharded, shards, exact); len(sharded) == 0 {
			return out, nil
		}
	}
	return nil, fmt.Errorf("hot: %w: sums are split and merged faster than they can be read", counter.ErrUnavailable)
}

// whole adds to readings what shards have beyond the records. If shards are missing, or belong to a later epoch than
// their record, it returns the keys of all sharded sums, which have to be read again.
func (s *Store) whole(out []counter.Reading, keys []string, shards [][counter.Shards]counter.Shard, exact bool) (again []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	done := true
	for i := range out {
		r := &out[i]
		if r.Stale || r.Kind != counter.Sum && r.Kind != 0 {
			continue
		}
		knew := s.known[r.Key] != nil
		k := s.learn(r.Counter)
		sharding, err := counter.ParseSharding(r.Sharding)
		if !sharding.Active {
			continue
		}
		again = append(again, r.Key)
		at := slices.Index(keys, r.Key)
		switch {
		case err == nil && at >= 0:
			for p := range shards[at] {
				later := shards[at][p].Epoch.Compare(sharding.Epoch) > 0 // also after the record was lost
				done = done && !later
				if k != nil {
					k.take(p, shards[at][p])
					k.broken = k.broken || later
				}
			}
			r.Counter = sharding.With(r.Counter, &shards[at])
			r.Approx = r.Approx && !exact
		case knew && k != nil && !exact:
			r.Counter = k.counter()
		default:
			done = false
		}
	}
	if done {
		return nil
	}
	return again
}

// History implements counter.Reader. The record has the time buckets, so it gathers what shards have beyond it.
func (s *Store) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	c, gains, err := s.Store.History(ctx, key, step, from, to)
	sharding, fault := counter.ParseSharding(c.Sharding)
	if err != nil || fault != nil || !sharding.Active || c.Version.Sequence == 0 { // 0: deleted in another region
		return c, gains, err
	}
	if err := s.gather(ctx, []*sum{{record: c, sharding: sharding}}); err != nil {
		return counter.Counter{}, nil, fmt.Errorf("hot: history of %q: %w", key, err)
	}
	return s.Store.History(ctx, key, step, from, to)
}
