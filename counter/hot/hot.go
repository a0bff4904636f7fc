package hot

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
)

const (
	maxKnown = 1000 // hot sums that a process knows; others are changed by their records

	gathers  = 250 * time.Millisecond // between two gatherings of a sum that changes
	fresh    = 3 * time.Second        // a read that may lag less reads the parts
	sweeps   = 2 * time.Second        // between two looks of an owner at what others have left in parts
	busyFor  = 10 * time.Second       // a sum stays busy after it was seen to be, or to be spread
	unused   = 2 * time.Minute        // until a process forgets a hot sum that it does not change
	ended    = 24 * time.Hour         // a closed part stays, which is longer than a call can be on its way
	stepTime = 5 * time.Second        // of one step, or of a gathering
	tries    = 8                      // of a change that needs the sum whole
)

// Owner says whose a bucket is. Several processes, or none, may take themselves for the owner
// for a while.
type Owner interface{ Owns(bucket int) bool }

// SubCounters are where hot sums are spread to: a counterredis.Store.
type SubCounters interface {
	AddParts(ctx context.Context, adds []counterredis.PartAdd) []counterredis.PartAdded
	OpenParts(ctx context.Context, key string, e counter.Epoch, fresh bool, parts []int) (open bool, err error)
	CloseParts(
		ctx context.Context, key string, e counter.Epoch, kept time.Duration, parts []int,
	) (out []counter.Part, updated time.Time, err error)
	Parts(ctx context.Context, keys []string) ([][counter.SubCounters]counterredis.PartOf, error)
	Hot(ctx context.Context, buckets []int) ([]counter.Counter, error)
}

// Config tunes a Store. A zero field takes its default.
type Config struct {
	// Rate is how many writes of one sum all processes make in a second, about, before it is
	// spread; required.
	Rate       int
	Rules      *counter.Rules        // required
	Owner      Owner                 // default: every bucket is this process's
	Gather     time.Duration         // between two gatherings of a sum that changes, default 250ms
	Registerer prometheus.Registerer // of the store's metrics; nil: none
	Log        zerolog.Logger
}

// Store is a counter.Store that spreads hot sums. Its methods may be called from any goroutine.
type Store struct {
	counter.Store
	parts SubCounters
	cfg   Config
	rates *rates

	some atomic.Bool // known has some
	mu   sync.Mutex  // guards known and what is in it
	// known are the sums that this process knows to be spread: at most maxKnown.
	known map[string]*sum

	start chan string // sums that have become hot; when it is full they are found hot again
	stop  context.CancelFunc
	wg    sync.WaitGroup // run
}

// sum is what a process knows of a hot sum.
type sum struct {
	record  counter.Counter                   // the newest that was read
	spread  counter.Spread                    // what record says
	parts   [counter.SubCounters]counter.Part // the newest that were read, of the epoch of spread
	updated time.Time                         // of the newest of parts
	used    time.Time                         // when it was changed here
	busy    time.Time                         // additions go to parts until then
	broken  bool                              // a part took nothing
}

// New returns a Store in front of to, whose parts are in parts. Close ends it, and closes to.
func New(to counter.Store, parts SubCounters, cfg Config) *Store {
	s := newStore(to, parts, cfg)
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.wg.Go(func() { s.run(ctx) })
	return s
}

// newStore is New without the goroutine that gathers.
func newStore(to counter.Store, parts SubCounters, cfg Config) *Store {
	cfg.Gather = cmp.Or(cfg.Gather, gathers)
	s := &Store{Store: to, parts: parts, cfg: cfg, rates: newRates(cfg.Rate), known: map[string]*sum{}, start: make(chan string, 64), stop: func() {}}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_counters_spread", Help: "Hot sums that this process knows to be spread over parts.",
		}, func() float64 {
			s.mu.Lock()
			defer s.mu.Unlock()
			return float64(len(s.known))
		}))
	}
	return s
}

// Close is as counter.Store says. What parts have gained stays there for the next gathering,
// of whichever process.
func (s *Store) Close() error {
	s.stop()
	s.wg.Wait()
	return s.Store.Close()
}

// learn takes what was read of a sum's record, and returns what is known of it then: nil when
// it is whole, or too many are known. It is called with mu.
func (s *Store) learn(c counter.Counter) *sum {
	k := s.known[c.Key]
	if k != nil && c.Version.Compare(k.record.Version) < 0 && c.Version != (counter.Version{}) {
		return k // an older one
	}
	if !c.IsSpread() {
		if k != nil {
			delete(s.known, c.Key)
			s.some.Store(len(s.known) > 0)
		}
		return nil
	}
	spread, err := counter.ParseSpread(c.Spread)
	if err != nil || k == nil && len(s.known) >= maxKnown {
		return nil
	}
	now := time.Now()
	if k == nil || k.spread.Epoch != spread.Epoch {
		c.Key = strings.Clone(c.Key) // it may be a part of a request, which must not stay
		k = &sum{record: counter.Counter{Key: c.Key}, used: now, busy: now.Add(busyFor)}
		s.known[c.Key] = k
		s.some.Store(true)
	}
	c.Key = k.record.Key
	k.record, k.spread = c, spread
	return k
}

// take notes a part that was read. It is called with mu.
func (k *sum) take(i int, p counterredis.PartOf) {
	if p.Epoch == k.spread.Epoch && p.Sequence >= k.parts[i].Sequence {
		k.parts[i] = p.Part
		if p.Sequence > 0 && p.Updated.After(k.updated) {
			k.updated = p.Updated
		}
	}
}

// ahead reports whether parts have what the record has not. It is called with mu.
func (k *sum) ahead() bool {
	for i := range k.parts {
		if k.parts[i].Sequence > k.spread.Parts[i].Sequence {
			return true
		}
	}
	return false
}

// counter is the sum with all that is known of its parts. It is called with mu.
func (k *sum) counter() counter.Counter {
	c := k.spread.With(k.record, &k.parts)
	if c.Version != k.record.Version && k.updated.After(c.Updated) {
		c.Updated = k.updated
	}
	return c
}

// Apply is as counter.Writer says.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	if !s.some.Load() {
		results := s.Store.Apply(ctx, ops)
		s.note(results)
		return s.again(ctx, ops, results)
	}
	results := make([]counter.Result, len(ops))
	adds, to, rest := s.choose(ctx, ops)
	var added []counterredis.PartAdded
	var made []counter.Result
	others := make([]counter.Op, len(rest))
	for n, i := range rest {
		others[n] = ops[i]
	}
	switch {
	case len(adds) == 0:
		made = s.Store.Apply(ctx, others)
	case len(rest) == 0:
		added = s.parts.AddParts(ctx, adds)
	default: // at once
		var wg sync.WaitGroup
		wg.Go(func() { added = s.parts.AddParts(ctx, adds) })
		made = s.Store.Apply(ctx, others)
		wg.Wait()
	}
	s.note(made)
	for n, i := range rest {
		results[i] = made[n]
	}
	var late []counter.Op // parts did not take them
	var at []int
	for n, i := range to {
		if errors.Is(added[n].Err, counter.ErrSpread) {
			late, at = append(late, ops[i]), append(at, i)
			s.breaks(adds[n].Key, adds[n].Epoch)
			continue
		}
		results[i] = s.answer(ctx, &adds[n], &added[n])
	}
	if len(late) > 0 {
		made := s.Store.Apply(ctx, late)
		s.note(made)
		for n, i := range at {
			results[i] = made[n]
		}
	}
	return s.again(ctx, ops, results)
}

// choose divides operations into additions to parts, with their indexes, and others. Sums of which
// the others need the whole are folded first.
func (s *Store) choose(ctx context.Context, ops []counter.Op) (adds []counterredis.PartAdd, to, rest []int) {
	now := time.Now()
	var fold []string
	s.mu.Lock()
	for i := range ops {
		for j := range ops[i].Changes {
			c := &ops[i].Changes[j]
			if k := s.known[c.Key]; k != nil {
				k.used = now
				if c.Verb == counter.Reset || c.Verb == counter.Delete {
					fold = append(fold, c.Key)
				}
			}
		}
	}
	s.mu.Unlock()
	for _, key := range fold {
		_ = s.fold(ctx, key) // else the change is refused, and again sees to it
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range ops {
		c := &ops[i].Changes[0]
		k := s.known[c.Key]
		plain := len(ops[i].Changes) == 1 && c.Verb == counter.Add && ops[i].Identity == counter.Identity{} && len(c.Dimensions) == 0
		if k == nil || !plain || k.broken || now.After(k.busy) || c.Rule.Kind != counter.Sum {
			rest = append(rest, i)
			continue
		}
		adds = append(adds, counterredis.PartAdd{Key: c.Key, Part: rand.IntN(counter.SubCounters), Epoch: k.spread.Epoch, Delta: c.Delta})
		to = append(to, i)
	}
	return adds, to, rest
}

// answer is what became of an addition to a part.
func (s *Store) answer(ctx context.Context, add *counterredis.PartAdd, added *counterredis.PartAdded) counter.Result {
	fail := func(err error) counter.Result {
		return counter.Result{Err: fmt.Errorf("hot: add to a part of %q: %w", add.Key, err)}
	}
	if added.Err != nil {
		return fail(added.Err)
	}
	s.mu.Lock()
	if k := s.known[add.Key]; k != nil && k.spread.Epoch == add.Epoch {
		k.take(add.Part, added.PartOf)
		c := k.counter()
		s.mu.Unlock()
		s.watch(c)
		return counter.Result{Counters: []counter.Counter{c}}
	}
	s.mu.Unlock()
	// It was folded meanwhile, and so are the change and what is known of the sum.
	read, err := s.Read(ctx, []string{add.Key}, "", 0)
	if err != nil {
		return fail(err)
	}
	return counter.Result{Counters: []counter.Counter{read[0].Counter}}
}

// breaks notes that a part takes nothing in that epoch.
func (s *Store) breaks(key string, e counter.Epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.known[key]; k != nil && k.spread.Epoch == e {
		k.broken = true
	}
}

// note looks at what was made: which sums are spread, and which are busy.
func (s *Store) note(results []counter.Result) {
	for i := range results {
		r := &results[i]
		for j := range r.Counters {
			c := &r.Counters[j]
			if c.Kind != counter.Sum {
				continue
			}
			if c.IsSpread() || s.some.Load() {
				s.mu.Lock()
				if k := s.learn(*c); k != nil {
					*c = k.counter()
				}
				s.mu.Unlock()
			}
			s.watch(*c)
		}
	}
}

// watch sees by the version of a sum that was changed whether the sum is busy, and has it spread.
func (s *Store) watch(c counter.Counter) {
	if !s.rates.hot(c.Key, c.Version) {
		return
	}
	if !c.IsSpread() {
		select {
		case s.start <- c.Key:
		default:
		}
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.known[c.Key]; k != nil {
		k.busy = time.Now().Add(busyFor)
	}
}

// again makes what was refused because a sum is spread, after folding it.
func (s *Store) again(ctx context.Context, ops []counter.Op, results []counter.Result) []counter.Result {
	for i := range results {
		for n := 0; n < tries && errors.Is(results[i].Err, counter.ErrSpread); n++ {
			for j := range ops[i].Changes {
				if err := s.fold(ctx, ops[i].Changes[j].Key); err != nil {
					results[i] = counter.Result{Err: fmt.Errorf("hot: fold %q: %w", ops[i].Changes[j].Key, err)}
					return results
				}
			}
			results[i] = s.Store.Apply(ctx, ops[i:i+1])[0]
			s.note(results[i : i+1])
		}
	}
	return results
}

// Read is as counter.Reader says. A read that may lag gets the master value, and what this process
// has added itself.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	exact := lag < fresh
	var early []string // their parts are read in the same round trip
	if exact && s.some.Load() {
		s.mu.Lock()
		for _, key := range keys {
			if s.known[key] != nil {
				early = append(early, key)
			}
		}
		s.mu.Unlock()
	}
	parts := map[string]*[counter.SubCounters]counterredis.PartOf{}
	var wg sync.WaitGroup
	var fault error
	if len(early) > 0 {
		wg.Go(func() { fault = s.readParts(ctx, early, parts) })
	}
	out, err := s.Store.Read(ctx, keys, member, lag)
	wg.Wait()
	for tries := 0; err == nil; tries++ {
		if fault != nil {
			return nil, fmt.Errorf("hot: parts of %d sums: %w", len(keys), fault)
		}
		missing := s.whole(out, parts, exact)
		if len(missing) == 0 {
			break
		}
		if tries > 0 { // the record was older than its parts
			if tries > 4 {
				return nil, fmt.Errorf("hot: %w: sums are spread and folded faster than they can be read", counter.ErrUnavailable)
			}
			out, err = s.Store.Read(ctx, keys, member, lag)
		}
		if fault = s.readParts(ctx, missing, parts); fault != nil && !exact {
			break // the master value is as old as may be, or a little older
		}
	}
	return out, err
}

func (s *Store) readParts(ctx context.Context, keys []string, into map[string]*[counter.SubCounters]counterredis.PartOf) error {
	read, err := s.parts.Parts(ctx, keys)
	if err != nil {
		return err
	}
	for i, key := range keys {
		into[key] = &read[i]
	}
	return nil
}

// whole adds to readings what parts have beyond them, and returns the keys whose parts are still
// to be read.
func (s *Store) whole(out []counter.Reading, parts map[string]*[counter.SubCounters]counterredis.PartOf, exact bool) (missing []string) {
	for i := range out {
		r := &out[i]
		if r.Stale || r.Kind != counter.Sum && r.Kind != 0 {
			continue
		}
		if !r.IsSpread() && !s.some.Load() {
			continue
		}
		s.mu.Lock()
		knew := s.known[r.Key] != nil
		k := s.learn(r.Counter)
		is := parts[r.Key]
		switch {
		case !r.IsSpread():
		case k != nil && knew && !exact:
			r.Counter = touched(k.counter())
		case is == nil:
			missing = append(missing, r.Key)
		default:
			spread, err := counter.ParseSpread(r.Spread)
			newer := false
			for p := range is {
				newer = newer || later(is[p].Epoch, spread.Epoch)
				if k != nil {
					k.take(p, is[p])
				}
			}
			if k != nil && newer { // also after the record was lost
				k.broken = true
			}
			if err != nil || newer {
				missing = append(missing, r.Key)
				break
			}
			in, updated := counterredis.InEpoch(spread.Epoch, is)
			c := spread.With(r.Counter, in)
			if c.Version != r.Version && updated.After(c.Updated) {
				c.Updated = updated
			}
			c.Approx = false
			r.Counter = touched(c)
		}
		s.mu.Unlock()
	}
	return missing
}

// touched is c, or a counter that nobody has touched: it was deleted in another region, and its parts have gained nothing since.
func touched(c counter.Counter) counter.Counter {
	if c.Version.Sequence == 0 {
		return counter.Counter{Key: c.Key}
	}
	return c
}

func later(a, b counter.Epoch) bool {
	return a.Incarnation > b.Incarnation || a.Incarnation == b.Incarnation && a.Number > b.Number
}
