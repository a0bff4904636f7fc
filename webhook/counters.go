package webhook

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

// maxCounters bounds the counters that wait to be judged. Beyond the bound a counter is left out until
// its next change.
const maxCounters = 100_000

// lastRound is how long the round after the end of the process's context may take.
const lastRound = time.Second

// counters reports counters over thresholds. Every process judges the counters that it has changed itself,
// so every change is judged, unless its process is killed before it has done so; then the counter's next
// change is.
type counters struct {
	service *Service
	hooks   []*Hook
	wake    chan struct{} // holds one: changed is not empty

	mu      sync.Mutex
	changed map[string]counter.Counter // the newest by name; at most maxCounters

	// Only the run goroutine uses these. below has counters that are not over a threshold, with the time
	// at which to check whether they are still reported as over; at most maxCounters.
	below map[string]time.Time
	store failing
}

func newCounters(s *Service, hooks []*Hook) *counters {
	return &counters{
		service: s,
		hooks:   hooks,
		wake:    make(chan struct{}, 1),
		changed: map[string]counter.Counter{},
		below:   map[string]time.Time{},
	}
}

// receive queues the counters that a write has changed. It does not block.
func (c *counters) receive(results []counter.Result) {
	changed := false
	for i := range results {
		if results[i].Err != nil {
			continue
		}
		for _, one := range results[i].Counters {
			// Most counters have no hook, and are gone here.
			if slices.ContainsFunc(c.hooks, func(h *Hook) bool { return h.matches(one.Key) }) {
				changed = c.queue(one) || changed
			}
		}
	}

	if changed {
		wake.Signal(c.wake)
	}
}

// queue queues a counter for the next round, unless a newer value of it is queued.
func (c *counters) queue(one counter.Counter) bool {
	c.mu.Lock()
	defer c.mu.Unlock()

	old, known := c.changed[one.Key]
	// A counter that was deleted has no version, and is newer than anything that waits.
	if known && one.Touched() && old.Version.Compare(one.Version) > 0 {
		return false
	}
	if !known && len(c.changed) >= maxCounters {
		c.service.metrics.left.WithLabelValues("counter").Inc()
		return false
	}

	one.Key = strings.Clone(one.Key) // it may be part of a request, which would stay in memory
	c.changed[one.Key] = one

	return true
}

// run judges the counters that changed, in rounds, until ctx ends, and then once more. A counter that changes often
// is judged once in a round.
func (c *counters) run(ctx context.Context) {
	for ctx.Err() == nil {
		// Without counters to look at again only a change wakes it.
		wait := time.Hour
		for _, at := range c.below {
			wait = min(wait, max(time.Until(at), 0))
		}
		wake.Wait(ctx, wait, c.wake)

		changed := c.take()
		err := c.round(ctx, changed)
		c.store.note(ctx, c.service.cfg.Log, err)

		pause := roundEvery
		if err != nil {
			c.restore(changed)
			pause = outage.Jitter(retryAfter)
		}
		outage.Sleep(ctx, pause)
	}

	// No other process judges the last changes of this one.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRound)
	defer cancel()
	c.store.note(last, c.service.cfg.Log, c.round(last, c.take()))
}

// take returns the counters that changed since the last call.
func (c *counters) take() map[string]counter.Counter {
	c.mu.Lock()
	defer c.mu.Unlock()

	changed := c.changed
	c.changed = map[string]counter.Counter{}

	return changed
}

// restore queues counters again that could not be judged, except where a newer value is queued.
func (c *counters) restore(changed map[string]counter.Counter) {
	c.mu.Lock()
	defer c.mu.Unlock()

	for name, one := range changed {
		_, newer := c.changed[name]
		// A newer value has all that the older one would tell.
		if !newer && len(c.changed) < maxCounters {
			c.changed[name] = one
		}
	}
	if len(c.changed) > 0 {
		wake.Signal(c.wake)
	}
}

// round reports counters that are over their threshold, and resets the reported state of counters that were
// reported as over and have been below for Settle.
func (c *counters) round(ctx context.Context, changed map[string]counter.Counter) error {
	now := time.Now()
	changes := c.judge(changed, now)

	var due []string
	for name, at := range c.below {
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
		if _, err := c.service.report(ctx, changes); err != nil {
			return err
		}
	}

	// Not before the changes are made: after a failure these are looked at again.
	for _, name := range due {
		delete(c.below, name)
	}

	return nil
}

// judge returns the changes that report counters as over their thresholds. It notes those that are not over one.
func (c *counters) judge(changed map[string]counter.Counter, now time.Time) (rises []Change) {
	for name, one := range changed {
		for _, h := range c.hooks {
			switch {
			case !h.matches(name):
			case one.Value > h.limit:
				rises = append(rises, over(h, one, now))
			// A hook that never reported it has nothing to reset, but only the store knows that.
			default:
				c.noteBelow(name, now.Add(c.service.cfg.Settle))
			}
		}
	}

	return rises
}

// noteBelow has a counter looked at later, unless that is about to happen.
func (c *counters) noteBelow(name string, at time.Time) {
	_, waits := c.below[name]
	if !waits && len(c.below) < maxCounters {
		c.below[name] = at
	}
}

// falls returns the changes that reset counters which are reported as over and are not over any more.
func (c *counters) falls(ctx context.Context, names []string) (falls []Change, err error) {
	var ask []Change // Was equals Is, so they only read the reported state
	for _, name := range names {
		for _, h := range c.hooks {
			if h.matches(name) {
				ask = append(ask, Change{Hook: h.ID, Subject: name, Was: "1", Is: "1"})
			}
		}
	}
	reported, _, err := report(ctx, c.service.cfg.Store, ask)
	if err != nil {
		return nil, err
	}

	var read []string
	for i, last := range reported {
		name := ask[i].Subject
		// Most were never over their threshold, and need not be read.
		if last != "" && !slices.Contains(read, name) {
			read = append(read, name)
		}
	}
	values, err := c.values(ctx, read)
	if err != nil {
		return nil, err
	}

	for i, last := range reported {
		h := c.hooks[slices.IndexFunc(c.hooks, func(h *Hook) bool { return h.ID == ask[i].Hook })]
		// The value may have risen again in the meantime.
		if last != "" && values[ask[i].Subject] <= h.limit {
			falls = append(falls, Change{Hook: h.ID, Subject: ask[i].Subject, Was: last})
		}
	}

	return falls, nil
}

// values reads the values of counters.
func (c *counters) values(ctx context.Context, names []string) (map[string]int64, error) {
	values := map[string]int64{}
	for chunk := range slices.Chunk(names, counter.MaxKeys) {
		// The lag is 0, because a value from memory may be older than the rise over the threshold that was reported.
		readings, err := c.service.cfg.Counters.Read(ctx, chunk, "", 0)
		if err != nil {
			return nil, err
		}
		for i := range readings {
			values[chunk[i]] = readings[i].Value
		}
	}

	return values, nil
}

// over returns the change that reports a counter as over the threshold.
func over(h *Hook, c counter.Counter, now time.Time) Change {
	e := newEvent(CounterOver, c.Key, now)
	e.Counter = presence.KeyOf(c.Key)
	e.Value = &c.Value
	e.Threshold = &h.limit
	e.Version = c.Version.String()

	// Was is empty, so the store refuses it for a counter that is reported as over already.
	return Change{Hook: h.ID, Subject: c.Key, Is: "1", Event: e.encode(), kind: CounterOver}
}
