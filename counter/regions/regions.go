package regions

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/counterredis"
)

// Remote is the Redis of another region: a counterredis.Store.
type Remote interface {
	History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error)
	Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error)
	Positions(ctx context.Context, of string, buckets []int) ([]counterredis.Position, error)
	Merge(ctx context.Context, from, to string, messages []counterredis.Message) ([]counterredis.Ack, error)
}

// Peer is another region.
type Peer struct {
	Name   string
	Remote Remote
}

// askTime is the timeout of a question to another region about time buckets or dimensions.
const askTime = time.Second

// silentFor is how long a region that timed out is not asked again, so that only one question in that time waits for
// it.
const silentFor = 2 * time.Second

// Config tunes a Store. A zero field takes its default.
type Config struct {
	Region     string              // name of this region; required
	Local      *counterredis.Store // Redis of this region; required
	Peers      []Peer              // the caller closes them after Close
	Rules      *counter.Rules      // give the kind of counters that do not exist yet; required
	Owner      counterredis.Owner  // default: this process owns every bucket
	Every      time.Duration       // shortest time between two rounds of a link; default 200ms
	Registerer prometheus.Registerer
	Log        zerolog.Logger
}

// Store is a counter.Store that shares its counters with other regions. Its methods may be called from any goroutine.
type Store struct {
	counter.Store
	cfg   Config
	links []*link
	stop  context.CancelFunc
	wg    sync.WaitGroup // the links

	silent []atomic.Int64 // for each peer, until when it is not asked, in Unix nanoseconds
}

// New returns a Store that wraps to, which uses Config.Local. Close closes both.
func New(to counter.Store, cfg Config) *Store {
	cfg.Every = cmp.Or(cfg.Every, 200*time.Millisecond)
	ctx, stop := context.WithCancel(context.Background())
	s := &Store{Store: to, cfg: cfg, stop: stop, silent: make([]atomic.Int64, len(cfg.Peers))}
	m := newMetrics(cfg.Registerer)
	for _, p := range cfg.Peers {
		l := newLink(s, p, m)
		s.links = append(s.links, l)
		registerLag(cfg.Registerer, l)
	}
	cfg.Local.Listen(s)
	for _, l := range s.links {
		s.wg.Go(func() { l.Run(ctx) })
	}
	return s
}

// Changed implements counterredis.Listener.
func (s *Store) Changed(bucket int) {
	for _, l := range s.links {
		l.Changed(bucket)
	}
}

// Close implements counter.Store. Changes that have not been replicated stay in the log for the next process.
func (s *Store) Close() error {
	s.stop()
	s.wg.Wait()
	return s.Store.Close()
}

// lags marks a total as approximate, because other regions may have changes that this one lacks.
func (s *Store) lags(c *counter.Counter) {
	if !s.exact(c) {
		c.Approx = true
	}
}

// exact reports whether c is an exact counter, or would become one.
func (s *Store) exact(c *counter.Counter) bool {
	if c.Kind != 0 {
		return c.Kind == counter.Exact
	}
	rule := s.cfg.Rules.Find(c.Key)
	return rule != nil && rule.Kind == counter.Exact
}

// Apply implements counter.Writer.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := s.Store.Apply(ctx, ops)
	for i := range results {
		for j := range results[i].Counters {
			s.lags(&results[i].Counters[j])
		}
	}
	return results
}

// Read implements counter.Reader. Totals have the other regions as far as this one knows them.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	read, err := s.Store.Read(ctx, keys, member, lag)
	for i := range read {
		s.lags(&read[i].Counter)
	}
	return read, err
}

// Watch implements counter.Feed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	return s.Store.Watch(func(updates []counter.Update) {
		for i := range updates {
			s.lags(&updates[i].Counter)
		}
		changed(updates)
	}, lost)
}

// ask calls with for all peers concurrently, and reports whether all of them answered in time.
func (s *Store) ask(caller context.Context, with func(context.Context, Remote) error) (all bool) {
	ctx, cancel := context.WithTimeout(caller, askTime)
	defer cancel()
	var failed atomic.Bool
	var wg sync.WaitGroup
	for i, p := range s.cfg.Peers {
		if time.Now().UnixNano() < s.silent[i].Load() {
			failed.Store(true)
			continue
		}
		wg.Go(func() {
			if with(ctx, p.Remote) == nil {
				return
			}
			failed.Store(true)
			if ctx.Err() != nil && caller.Err() == nil { // a timeout; an error that comes quickly delays no further question
				s.silent[i].Store(time.Now().Add(silentFor).UnixNano())
			}
		})
	}
	wg.Wait()
	return !failed.Load()
}

// History implements counter.Reader. It adds up all regions; the counter is stale if a region did not answer.
func (s *Store) History(ctx context.Context, key string, step time.Duration, from, to int64) (counter.Counter, []counter.Gain, error) {
	c, gains, err := s.Store.History(ctx, key, step, from, to)
	if err != nil || s.exact(&c) {
		return c, gains, err
	}
	var mu sync.Mutex // guards others
	others := [][]counter.Gain{gains}
	all := s.ask(ctx, func(ctx context.Context, r Remote) error {
		there, gains, err := r.History(ctx, key, step, from, to)
		if err == nil && (there.Kind == c.Kind || c.Kind == 0) {
			mu.Lock()
			defer mu.Unlock()
			others = append(others, gains)
		}
		return err
	})
	s.lags(&c)
	c.Stale = c.Stale || !all
	return c, addUp(others), nil
}

// addUp adds up the time buckets of several regions.
func addUp(lists [][]counter.Gain) []counter.Gain {
	by := map[int64]counter.Gain{}
	for _, list := range lists {
		for _, g := range list {
			is, known := by[g.Number]
			switch {
			case !known:
				is = g
			case is.Seen != nil && g.Seen != nil:
				seen := is.Seen.Clone()
				seen.Merge(*g.Seen)
				is.Seen = &seen
			default:
				is.Value = counter.Saturated(is.Value, g.Value)
			}
			by[g.Number] = is
		}
	}
	return slices.SortedFunc(maps.Values(by), func(a, b counter.Gain) int { return cmp.Compare(a.Number, b.Number) })
}

// Dimension implements counter.Reader. It adds up all regions, like History.
func (s *Store) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	c, counted, err := s.Store.Dimension(ctx, key, name)
	if err != nil || s.exact(&c) {
		return c, counted, err
	}
	var mu sync.Mutex // guards counted
	all := s.ask(ctx, func(ctx context.Context, r Remote) error {
		_, there, err := r.Dimension(ctx, key, name)
		mu.Lock()
		defer mu.Unlock()
		for value, n := range there.Values {
			counted.Add(value, n)
		}
		counted.Other = counter.Saturated(counted.Other, there.Other)
		return err
	})
	s.lags(&c)
	c.Stale = c.Stale || !all
	return c, counted, nil
}

type metrics struct {
	news, odd, all, failures *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) *metrics {
	count := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"peer"})
	}
	m := &metrics{
		news:     count("headcount_counters_region_merges_total", "Replicated counters with changes that the peer did not have."),
		odd:      count("headcount_counters_region_odd_total", "Counters that the peer could not merge: of another kind there, or with totals beyond 64 bits."),
		all:      count("headcount_counters_region_repairs_total", "Buckets that were sent to the peer as a whole."),
		failures: count("headcount_counters_region_failures_total", "Rounds that failed because the peer, or this region's Redis, did not answer."),
	}
	if reg != nil {
		reg.MustRegister(m.news, m.odd, m.all, m.failures)
	}
	return m
}

// registerLag registers the lag of a link.
func registerLag(reg prometheus.Registerer, l *link) {
	if reg != nil {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "headcount_counters_region_lag_seconds", Help: "Age of the oldest change that the peer does not have; 0 if it has all changes.",
			ConstLabels: prometheus.Labels{"peer": l.Name},
		}, func() float64 { return l.Lag().Seconds() }))
	}
}
