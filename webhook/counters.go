package webhook

import (
	"context"
	"slices"
	"strconv"
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

// scanCounters is the longest time between two looks of a process at all counters that are reported as over.
const scanCounters = 10 * time.Minute

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

	// Only the run goroutine uses these.
	looks    map[subject]look // counters to look at again; at most maxCounters
	nextScan time.Time
	store    failing
}

// look is when to look at a counter again.
type look struct {
	at time.Time
	// mayRise says that the counter may be over the threshold without being reported. Without that, one that is not
	// reported need not be read.
	mayRise bool
}

func newCounters(s *Service, hooks []*Hook) *counters {
	return &counters{
		service: s,
		hooks:   hooks,
		wake:    make(chan struct{}, 1),
		changed: map[string]counter.Counter{},
		looks:   map[subject]look{},
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
		wait := max(time.Until(c.nextScan), 0)
		for _, l := range c.looks {
			wait = min(wait, max(time.Until(l.at), 0))
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

// question is whether a counter is reported as it is.
type question struct {
	subject
	mayRise, mayFall bool
	reported         string
}

// needsValue reports whether the reported state alone is no answer. Most counters are reported as over already when
// they change, or never were when they are looked at again.
func (q *question) needsValue() bool {
	if q.reported == "" {
		return q.mayRise
	}

	return q.mayFall
}

// round reports counters that are over their threshold, and resets the reported state of counters that were
// reported as over and have been below for Settle. What it reports it has read just now: what has changed may be known
// late, after a suspension or while the store was away, and others may have reported it since.
func (c *counters) round(ctx context.Context, changed map[string]counter.Counter) error {
	now := time.Now()
	if err := c.scan(ctx, now); err != nil {
		return err
	}

	rises, low := c.judge(changed)
	due, late := c.due(now)
	rises = append(rises, late...)

	var unsure []subject
	// Each chunk is reported at once: what was read long ago is not.
	for asked := range slices.Chunk(slices.Concat(rises, due), counter.MaxKeys) {
		some, err := c.settle(ctx, asked)
		if err != nil {
			return err
		}
		unsure = append(unsure, some...)
	}

	// Not before the changes are made: after a failure these are looked at again.
	for i := range due {
		delete(c.looks, due[i].subject)
	}
	// Another process that has read an older value may be about to reset the state.
	for i := range rises {
		unsure = append(unsure, rises[i].subject)
	}
	c.lookLater(unsure, low, now.Add(c.service.cfg.Settle))

	return nil
}

// settle answers up to counter.MaxKeys questions, and reports what they change. It returns the counters of which it is
// not sure.
func (c *counters) settle(ctx context.Context, asked []question) (unsure []subject, err error) {
	seen := time.Now()
	// States before values: if another process reports a counter after that, the change below is refused.
	if err := c.readStates(ctx, asked); err != nil {
		return nil, err
	}
	values, err := c.values(ctx, asked)
	if err != nil {
		return nil, err
	}

	changes, unsure := c.compare(asked, values, seen)
	_, err = c.service.report(ctx, seen, changes)

	return unsure, err
}

// judge returns questions about the counters that are over their thresholds, and those that are not.
func (c *counters) judge(changed map[string]counter.Counter) (rises []question, low []subject) {
	for name, one := range changed {
		for _, h := range c.hooks {
			s := subject{h, name}
			switch {
			case !h.matches(name):
			case one.Value > h.limit:
				rises = append(rises, question{subject: s, mayRise: true})
			// A hook that never reported it has nothing to reset, but only the store knows that.
			default:
				low = append(low, s)
			}
		}
	}

	return rises, low
}

// scan has all counters looked at that are reported as over, when this process begins and from time to time: another
// one may have ended between a fall and its look.
func (c *counters) scan(ctx context.Context, now time.Time) error {
	if now.Before(c.nextScan) {
		return nil
	}

	for _, h := range c.hooks {
		reported, err := c.service.cfg.Store.Reported(ctx, h.ID)
		if err != nil {
			return err
		}

		for name := range reported {
			s := subject{h, name}
			if _, waits := c.looks[s]; !waits {
				c.lookAt(s, look{at: now.Add(c.service.cfg.Settle)})
			}
		}
	}
	c.nextScan = now.Add(outage.Jitter(scanCounters))

	return nil
}

// lookLater has counters looked at of which it is not sure what is reported, and some that are not over.
func (c *counters) lookLater(unsure, low []subject, at time.Time) {
	for _, s := range unsure {
		c.lookAt(s, look{at, true})
	}

	for _, s := range low {
		last, waits := c.looks[s]
		// A fall that was noticed goes on, unless the counter rose meanwhile.
		if !waits || last.mayRise {
			c.lookAt(s, look{at, false})
		}
	}
}

// lookAt has a counter looked at later.
func (c *counters) lookAt(s subject, l look) {
	_, waits := c.looks[s]
	if waits || len(c.looks) < maxCounters {
		c.looks[s] = l
	}
}

// due returns questions about the counters to look at now. late are those that should have been looked at before: the
// process stood still, or did not reach the store. Such a counter may have been over its threshold since it fell, so
// that its fall has to settle once more.
func (c *counters) due(now time.Time) (due, late []question) {
	for s, l := range c.looks {
		switch {
		case l.at.After(now):
		case c.service.isLate(l.at, now):
			late = append(late, question{subject: s, mayRise: l.mayRise})
		default:
			due = append(due, question{subject: s, mayRise: l.mayRise, mayFall: true})
		}
	}

	return due, late
}

// readStates reads the reported states.
func (c *counters) readStates(ctx context.Context, asked []question) error {
	changes := make([]Change, len(asked))
	for i := range asked {
		// Was equals Is, so they only read.
		changes[i] = Change{Hook: asked[i].hook.ID, Subject: asked[i].name}
	}
	reported, _, err := report(ctx, c.service.cfg.Store, changes)
	if err != nil {
		return err
	}

	for i := range asked {
		asked[i].reported = reported[i]
	}

	return nil
}

// values reads the counters whose values are needed by up to counter.MaxKeys questions. It leaves out those that cannot
// be read now.
func (c *counters) values(ctx context.Context, asked []question) (map[string]counter.Counter, error) {
	var names []string
	for i := range asked {
		if asked[i].needsValue() {
			names = append(names, asked[i].name)
		}
	}
	if len(names) == 0 {
		return nil, nil
	}

	slices.Sort(names)
	names = slices.Compact(names)
	// The lag is 0, because a value from memory may be older than the rise over the threshold that was reported.
	readings, err := c.service.cfg.Counters.Read(ctx, names, "", 0)
	if err != nil {
		return nil, err
	}

	values := map[string]counter.Counter{}
	for i := range readings {
		if !readings[i].Away {
			values[names[i]] = readings[i].Counter
		}
	}

	return values, nil
}

// compare returns the changes that make the reported states true, and the counters of which it is not sure.
func (c *counters) compare(
	asked []question, values map[string]counter.Counter, now time.Time,
) (changes []Change, unsure []subject) {
	for i := range asked {
		q := &asked[i]
		if !q.needsValue() {
			continue
		}

		one, isRead := values[q.name]
		isOver := one.Value > q.hook.limit
		sinceReport := now.Sub(reportedAt(q.reported))

		switch {
		case !isRead:
		case isOver == (q.reported != ""):
			continue
		case isOver:
			changes = append(changes, over(q.hook, one))
		// It was over then, so it has not been below for Settle. Clocks differ, and are set.
		case sinceReport.Abs() < c.service.cfg.Settle:
		default:
			changes = append(changes, Change{Hook: q.hook.ID, Subject: q.name, Was: q.reported})
		}
		// The value may have changed between the read and the report.
		unsure = append(unsure, q.subject)
	}

	return changes, unsure
}

// over returns the change that reports a counter as over the threshold.
func over(h *Hook, c counter.Counter) Change {
	e := newEvent(CounterOver, c.Key)
	e.Counter = presence.KeyOf(c.Key)
	e.Value = &c.Value
	e.Threshold = &h.limit
	e.Version = c.Version.String()

	// Was is empty, so the store refuses it for a counter that is reported as over already.
	return Change{
		Hook: h.ID, Subject: c.Key, Is: strconv.FormatInt(e.Timestamp.UnixMilli(), 10), Event: e.encode(),
		kind: CounterOver,
	}
}

// reportedAt returns when a counter was reported, by its state. Former releases made that "1".
func reportedAt(state string) time.Time {
	ms, _ := strconv.ParseInt(state, 10, 64)

	return time.UnixMilli(ms)
}
