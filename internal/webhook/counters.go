package webhook

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/presence"
)

// maxCounters bounds the counters that wait to be looked at. Beyond it a counter is left out until
// its next change.
const maxCounters = 100_000

// counters tells of counters over thresholds. Every process looks at those that it changed, so a
// change is looked at by somebody, unless its process is killed within the moment; then the
// counter's next change is.
type counters struct {
	service *Service
	hooks   []*Hook
	wake    chan struct{} // holds one: news has something

	mu   sync.Mutex
	news map[string]counter.Counter // the newest by name; at most maxCounters

	// The run goroutine alone uses these. low has counters that are not over a threshold, and when
	// to find out whether something else was told of them; at most maxCounters.
	low   map[string]time.Time
	store failing
}

func newCounters(s *Service, hooks []*Hook) *counters {
	return &counters{service: s, hooks: hooks, wake: make(chan struct{}, 1), news: map[string]counter.Counter{}, low: map[string]time.Time{}}
}

// note takes what a write has made of counters. It does not block.
func (c *counters) note(results []counter.Result) {
	news := false
	for i := range results {
		for _, one := range results[i].Counters {
			if results[i].Err != nil || !slices.ContainsFunc(c.hooks, func(h *Hook) bool { return h.matches(one.Key) }) {
				continue
			}
			one.Key = strings.Clone(one.Key) // it may be a part of a request, which must not stay
			c.mu.Lock()
			old, known := c.news[one.Key]
			switch {
			case known && one.Touched() && old.Version.Compare(one.Version) > 0:
			case !known && len(c.news) >= maxCounters:
				c.service.metrics.left.WithLabelValues("counter").Inc()
			default:
				c.news[one.Key], news = one, true
			}
			c.mu.Unlock()
		}
	}
	if news {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// run compares counters that changed with what was told, until ctx ends. A counter that changes all
// the time is compared once in a round.
func (c *counters) run(ctx context.Context) {
	for ctx.Err() == nil {
		wait := time.Hour
		for _, at := range c.low {
			wait = min(wait, max(time.Until(at), 0))
		}
		sleep(ctx, wait, c.wake)
		c.mu.Lock()
		news := c.news
		c.news = map[string]counter.Counter{}
		c.mu.Unlock()
		err := c.round(ctx, news)
		c.store.note(ctx, c.service.cfg.Log, err)
		pause := roundEvery
		if err != nil {
			c.back(news)
			pause = outage.Jitter(lookAgain)
		}
		sleep(ctx, pause, nil)
	}
}

// back puts back what could not be looked at, unless it is known better.
func (c *counters) back(news map[string]counter.Counter) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, one := range news {
		if _, newer := c.news[name]; !newer && len(c.news) < maxCounters {
			c.news[name] = one
		}
	}
	if len(c.news) > 0 {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
}

// round tells of counters that are over, and that those are not any more which were told as over and
// were not for Settle.
func (c *counters) round(ctx context.Context, news map[string]counter.Counter) error {
	now := time.Now()
	var changes []Change
	for name, one := range news {
		for _, h := range c.hooks {
			if !h.matches(name) {
				continue
			}
			if one.Value > h.limit {
				changes = append(changes, over(h, one, now))
			} else if _, waits := c.low[name]; !waits && len(c.low) < maxCounters {
				c.low[name] = now.Add(c.service.cfg.Settle)
			}
		}
	}
	var due []string
	for name, at := range c.low {
		if !at.After(now) {
			due = append(due, name)
		}
	}
	falls, err := c.falls(ctx, due)
	if err != nil {
		return err
	}
	changes = append(changes, falls...)
	if len(changes) > 0 {
		if _, err := c.service.tell(ctx, changes); err != nil {
			return err
		}
	}
	for _, name := range due {
		delete(c.low, name)
	}
	return nil
}

// falls are the changes for counters that were told as over and are not.
func (c *counters) falls(ctx context.Context, names []string) (falls []Change, err error) {
	var ask []Change // they change nothing
	for _, name := range names {
		for _, h := range c.hooks {
			if h.matches(name) {
				ask = append(ask, Change{Hook: h.ID, Subject: name, Was: "1", Is: "1"})
			}
		}
	}
	told, _, err := tell(ctx, c.service.cfg.Store, ask)
	if err != nil {
		return nil, err
	}
	values := map[string]int64{}
	var read []string
	for i, last := range told {
		if name := ask[i].Subject; last != "" && !slices.Contains(read, name) {
			read = append(read, name)
		}
	}
	for chunk := range slices.Chunk(read, counter.MaxKeys) {
		readings, err := c.service.cfg.Counters.Read(ctx, chunk, "", 0)
		if err != nil {
			return nil, err
		}
		for i := range readings {
			values[chunk[i]] = readings[i].Value
		}
	}
	for i, last := range told {
		h := c.hooks[slices.IndexFunc(c.hooks, func(h *Hook) bool { return h.ID == ask[i].Hook })]
		if last != "" && values[ask[i].Subject] <= h.limit {
			falls = append(falls, Change{Hook: h.ID, Subject: ask[i].Subject, Was: last})
		}
	}
	return falls, nil
}

// over says that a counter is over the threshold.
func over(h *Hook, c counter.Counter, now time.Time) Change {
	e := newEvent(CounterOver, c.Key, now)
	e.Counter, e.Value, e.Threshold, e.Version = presence.KeyOf(c.Key), &c.Value, &h.limit, c.Version.String()
	return Change{Hook: h.ID, Subject: c.Key, Is: "1", Event: e.encode(), kind: CounterOver}
}
