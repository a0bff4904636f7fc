package region

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/counter"
	"headcount/counter/owner"
	"headcount/internal/rows"
)

const (
	// askTime is the timeout of a question to another region about time buckets or dimensions.
	askTime = time.Second
	// silentFor is how long a region is not asked again after a timeout, so that at most one question in that time
	// waits for it.
	silentFor = 2 * time.Second
)

// Store is a counter.Store whose totals include the other regions. Time buckets and dimensions are not replicated: when
// they are read, all regions are asked and the answers are added up. Its methods may be called from any goroutine.
type Store struct {
	counter.Store
	rules *counter.Rules
	peers []*asked
}

// asked is another region that answers questions.
type asked struct {
	*owner.Reader
	silent atomic.Int64 // the region is not asked until then, Unix nanoseconds
}

var _ counter.Store = (*Store)(nil)

// NewStore returns a Store that wraps this region's own. Rules give the kind of counters that do not exist yet. Close
// also closes the wrapped store.
func NewStore(to counter.Store, rules *counter.Rules, peers []Peer) *Store {
	s := &Store{Store: to, rules: rules}
	for _, p := range peers {
		s.peers = append(s.peers, &asked{Reader: owner.NewReader(p.Rows, rows.PartitionOf)})
	}

	return s
}

// markApprox marks a total as approximate, because other regions may have changes that have not arrived here.
func (s *Store) markApprox(c *counter.Counter) {
	if !s.exact(c) {
		c.Approx = true
	}
}

// exact reports whether c is an exact counter, or would be one if it existed.
func (s *Store) exact(c *counter.Counter) bool {
	if c.Kind != 0 {
		return c.Kind.IsExact()
	}
	rule := s.rules.Find(c.Key)

	return rule != nil && rule.Kind.IsExact()
}

// Apply implements counter.Writer.
func (s *Store) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	results := s.Store.Apply(ctx, ops)
	for i := range results {
		for j := range results[i].Counters {
			s.markApprox(&results[i].Counters[j])
		}
	}

	return results
}

// Read implements counter.Reader. Totals include the changes of other regions that have arrived.
func (s *Store) Read(ctx context.Context, keys []string, member string, lag time.Duration) ([]counter.Reading, error) {
	read, err := s.Store.Read(ctx, keys, member, lag)
	for i := range read {
		s.markApprox(&read[i].Counter)
	}

	return read, err
}

// Watch implements counter.Feed.
func (s *Store) Watch(changed func([]counter.Update), lost func()) counter.Watch {
	return s.Store.Watch(func(updates []counter.Update) {
		for i := range updates {
			s.markApprox(&updates[i].Counter)
		}
		changed(updates)
	}, lost)
}

// ask calls with for all other regions in parallel, and reports whether all of them answered in time.
func (s *Store) ask(caller context.Context, with func(context.Context, *owner.Reader) error) (all bool) {
	ctx, cancel := context.WithTimeout(caller, askTime)
	defer cancel()

	var failed atomic.Bool
	var wg sync.WaitGroup
	for _, p := range s.peers {
		if time.Now().UnixNano() < p.silent.Load() {
			// The peer still counts as failed, so the answer says that it lacks a region.
			failed.Store(true)
			continue
		}

		wg.Go(func() {
			if with(ctx, p.Reader) == nil {
				return
			}
			failed.Store(true)
			// Only a timeout makes the region skipped for a while: errors that come quickly delay nothing.
			timedOut := ctx.Err() != nil && caller.Err() == nil
			if timedOut {
				p.silent.Store(time.Now().Add(silentFor).UnixNano())
			}
		})
	}
	wg.Wait()

	return !failed.Load()
}

// History implements counter.Reader. The counter is stale if a region did not answer.
func (s *Store) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	c, gains, err := s.Store.History(ctx, key, step, from, to)
	if err != nil || s.exact(&c) {
		return c, gains, err
	}

	var mu sync.Mutex // guards others
	others := [][]counter.Gain{gains}
	all := s.ask(ctx, func(ctx context.Context, r *owner.Reader) error {
		there, gains, err := r.History(ctx, key, step, from, to)
		// A region whose rules give the counter another kind has nothing to add.
		if err != nil || there.Kind != c.Kind && c.Kind != 0 {
			return err
		}

		mu.Lock()
		defer mu.Unlock()
		others = append(others, gains)

		return nil
	})

	s.markApprox(&c)
	c.Stale = c.Stale || !all

	return c, addUp(others), nil
}

// addUp adds up the time buckets of several regions.
func addUp(lists [][]counter.Gain) []counter.Gain {
	by := map[int64]counter.Gain{}
	for _, list := range lists {
		for _, g := range list {
			is, known := by[g.Number]
			if known {
				g = bothGains(is, g)
			}
			by[g.Number] = g
		}
	}

	return slices.SortedFunc(maps.Values(by), func(a, b counter.Gain) int { return cmp.Compare(a.Number, b.Number) })
}

func bothGains(a, b counter.Gain) counter.Gain {
	if a.Seen == nil || b.Seen == nil {
		a.Value = counter.Saturated(a.Value, b.Value)
		return a
	}

	// A copy, because the registers of a Gain are shared.
	seen := a.Seen.Clone()
	seen.Merge(*b.Seen)
	a.Seen = &seen

	return a
}

// Dimension implements counter.Reader. It adds up all regions, like History.
func (s *Store) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	c, counted, err := s.Store.Dimension(ctx, key, name)
	if err != nil || s.exact(&c) {
		return c, counted, err
	}

	var mu sync.Mutex // guards counted
	all := s.ask(ctx, func(ctx context.Context, r *owner.Reader) error {
		_, there, err := r.Dimension(ctx, key, name)

		mu.Lock()
		defer mu.Unlock()
		// Not Counted.Add: in a sum of regions each value that one of them keeps has its own count. Otherwise, the
		// greatest ones of another region would be missing where this one has as many as it keeps.
		for value, n := range there.Values {
			counted.Values[value] = counter.Saturated(counted.Values[value], n)
		}
		counted.Other = counter.Saturated(counted.Other, there.Other)

		return err
	})

	s.markApprox(&c)
	c.Stale = c.Stale || !all

	return c, counted, nil
}
