package simulate

import (
	"context"
	"sync/atomic"
	"time"

	"headcount/client"
)

// scenarios are what a run may do. All of them check the counts; all but mixed, which is
// the default, measure something.
var scenarios = map[string]func(*Command) plan{
	"mixed": func(c *Command) plan {
		return plan{made: c.Pages, limit: churners(c), probing: true, work: (*crowd).mixed}
	},
	"churn": func(c *Command) plan {
		return plan{made: c.Pages, limit: churners(c), probing: true, work: (*crowd).measuredChurn}
	},
	"idle":     func(c *Command) plan { return plan{made: c.Pages, limit: c.Users, work: (*crowd).idle} },
	"storm":    func(c *Command) plan { return plan{made: 1, limit: c.Users, work: (*crowd).storm} },
	"fanout":   func(c *Command) plan { return plan{made: 1, limit: c.Users, probing: true, work: (*crowd).fanOut} },
	"hidden":   func(c *Command) plan { return plan{made: 1, limit: c.Users, probing: true, work: (*crowd).hidden} },
	"slow":     func(c *Command) plan { return plan{made: 1, limit: c.Users, probing: true, work: (*crowd).slow} },
	"counters": func(c *Command) plan { return plan{limit: lastingConns(c), work: (*crowd).lasting} },
}

const (
	stormTime  = 5 * time.Second      // in which everyone arrives
	shownEvery = 10                   // every tenth client is not hidden
	slowEvery  = 10                   // every tenth client is slow …
	slowRead   = 4096                 // … and has a receive buffer this small
	drivers    = 8                    // users who come and go so that counts move
	driverTurn = 5 * time.Millisecond // between two of their joins or leaves
)

// measure takes figures from now until end is called.
func (c *crowd) measure() (end func()) {
	began := time.Now()
	before := c.server.usage()
	messages := c.stats.messages.Load()
	counts := c.stats.counts.Load()
	bytes := c.stats.bytes.Load()

	return func() {
		now := c.server.usage()
		seconds := time.Since(began).Seconds()
		f := c.result.Figures
		counts := float64(c.stats.counts.Load() - counts)
		f["window_s"] = seconds
		f["window_messages"] = float64(c.stats.messages.Load() - messages)
		f["window_bytes"] = float64(c.stats.bytes.Load() - bytes)
		f["counts_per_s"] = counts / seconds

		if len(c.server.procs) == 0 {
			return
		}

		cpu := now.cpu - before.cpu
		f["server_cpu_s"] = cpu
		f["server_cpu_percent_of_a_core"] = 100 * cpu / seconds
		f["server_rss_bytes"] = float64(now.rss)

		if counts > 0 {
			f["server_cpu_s_per_million_counts"] = cpu / counts * 1e6
		}
	}
}

// perConnection divides the memory that the server took since the beginning.
func (c *crowd) perConnection() {
	if len(c.server.procs) == 0 {
		return
	}

	f := c.result.Figures
	grown := f["server_rss_bytes"] - float64(c.server.first.rss)
	f["server_rss_bytes_per_connection"] = grown / float64(c.cfg.Users)
}

// arrive opens a connection for each user, spread over the pages and over a time.
func (c *crowd) arrive(ctx context.Context, within time.Duration) error {
	began := time.Now()
	for i := range c.cfg.Users {
		// By a timetable, not by pauses, so that a slow server does not stretch the storm.
		due := began.Add(within * time.Duration(i) / time.Duration(c.cfg.Users))
		if err := sleep(ctx, time.Until(due)); err != nil {
			return err
		}
		if _, err := c.enter(ctx, c.newUser(), c.pages[i%len(c.pages)]); err != nil {
			return err
		}
	}

	return nil
}

// idle: everyone is there and nothing happens. It measures what a join costs, the memory of a
// connection, and what it costs to keep it.
func (c *crowd) idle(ctx context.Context) error {
	before := c.server.usage()
	if err := c.arrive(ctx, 0); err != nil {
		return err
	}

	if err := c.awaitPlaces(ctx, c.everyone()); err != nil {
		return err
	}

	if len(c.server.procs) > 0 {
		used := c.server.usage().cpu - before.cpu
		c.result.Figures["server_cpu_us_per_join"] = used / float64(c.cfg.Users) * 1e6
	}

	if err := c.checkpoint(ctx, "full"); err != nil {
		return err
	}

	c.enterPhase("idling")
	end := c.measure()
	if err := sleep(ctx, c.cfg.Duration); err != nil {
		return err
	}

	end()
	c.perConnection()
	return c.checkpoint(ctx, "final")
}

// storm: everyone arrives on one page within 5 s. It measures how long it takes until
// every client is right, and what it costs.
func (c *crowd) storm(ctx context.Context) error {
	c.enterPhase("storming")
	end := c.measure()

	if err := c.arrive(ctx, stormTime); err != nil {
		return err
	}

	// Measured from the last arrival, because before that no count can be final.
	last := time.Now()
	for c.held(c.everyone()).n > 0 && time.Since(last) < placeLimit { // then the checkpoint says what is wrong
		if err := sleep(ctx, pollEvery/5); err != nil {
			return err
		}
	}

	c.result.Figures["right_after_s"] = time.Since(last).Seconds()
	end()
	return c.checkpoint(ctx, "final")
}

// fanOut: everyone subscribes to one page without being there, and a few users come
// and go so fast that its count always moves. It measures how many counts arrive a
// second, and how long after the first subscriber the others have a count.
func (c *crowd) fanOut(ctx context.Context) error { return c.fanOutBeside(ctx, 1) }

// hidden is fanOut while only every tenth subscriber wants counts: the others have paused, as
// hidden tabs do.
func (c *crowd) hidden(ctx context.Context) error { return c.fanOutBeside(ctx, shownEvery) }

// fanOutBeside measures a fan-out while all but every shown-th subscriber have paused.
func (c *crowd) fanOutBeside(ctx context.Context, shown int) error {
	var hidden []*tab
	drive, err := c.audience(ctx, func(i int, t *tab) {
		if i%shown != 0 {
			hidden = append(hidden, t)
		}
	})
	if err != nil {
		return err
	}

	c.enterPhase("fanning out")
	// After the checkpoint, for which every client must have its counts.
	for _, t := range hidden {
		t.say(`{"type":"pause"}`)
	}

	end := c.measure()
	spread, err := drive(c.cfg.Duration)
	if err != nil {
		return err
	}

	end()
	for _, t := range hidden {
		t.say(`{"type":"resume"}`)
	}

	c.perConnection()
	c.result.Figures["spread_p50_ms"] = spread.ms(0.5)
	c.result.Figures["spread_p99_ms"] = spread.ms(0.99)

	return c.checkpoint(ctx, "final")
}

// slow is fanOut for half of the time. For the other half every tenth subscriber reads
// nothing. It measures how much later the others have their counts.
func (c *crowd) slow(ctx context.Context) error {
	drive, err := c.audience(ctx, func(i int, t *tab) {
		if i%slowEvery == 0 {
			// The slow ones are left out of the figures: what is asked is how much later the others are.
			t.slow = true
			t.seen = nil
		}
	})
	if err != nil {
		return err
	}

	c.enterPhase("everyone reads")
	before, err := drive(c.cfg.Duration / 2)
	if err != nil {
		return err
	}

	c.enterPhase("a tenth does not read")
	end := c.measure()
	c.deaf.Store(true)
	after, err := drive(c.cfg.Duration / 2)
	if err != nil {
		return err
	}

	end()
	c.deaf.Store(false)

	f := c.result.Figures
	f["spread_p99_ms_before"] = before.ms(0.99)
	f["spread_p99_ms"] = after.ms(0.99)
	if p99 := before.ms(0.99); p99 > 0 {
		f["spread_p99_ratio"] = after.ms(0.99) / p99
	}

	return c.checkpoint(ctx, "final")
}

// audience has everyone subscribe to the page, after prepare was called with each subscriber's
// number and tab. The function that it returns moves the page's count for a time and measures
// how its counts spread.
func (c *crowd) audience(
	ctx context.Context, prepare func(int, *tab),
) (drive func(time.Duration) (*spread, error), err error) {
	// A pointer, because clients go on receiving counts between two measurements.
	var measured atomic.Pointer[spread] // nil: none
	seen := func(_ *tab, n *client.Count, at time.Time) {
		if s := measured.Load(); s != nil {
			s.add(n.Version, at)
		}
	}

	for i := range c.cfg.Users {
		t := &tab{user: c.newUser(), watched: holdings(c.pages), seen: seen}
		prepare(i, t)
		c.start(t, i%len(c.cfg.URL))
	}

	var tabs []*tab
	for range drivers {
		tab, err := c.enter(ctx, c.newUser(), c.pages[0])
		if err != nil {
			return nil, err
		}
		tabs = append(tabs, tab)
	}

	// All counts are right before anything is measured, or the measurement would have the arrivals in it.
	if err := c.checkpoint(ctx, "full"); err != nil {
		return nil, err
	}

	return func(d time.Duration) (*spread, error) {
		s := &spread{}
		measured.Store(s)
		defer measured.Store(nil)

		began := time.Now()
		// One after the other, so that the count of the page goes up and down by one and never stands still.
		for i := 0; time.Since(began) < d; i++ {
			tab := tabs[i%drivers]
			to := c.pages[0]
			if tab.joined.Page != "" {
				to = ""
			}

			c.move(tab, to)

			if err := sleep(ctx, driverTurn); err != nil {
				return nil, err
			}
		}

		return s, nil
	}, nil
}

// A spread is how long after the first client that had a count of a page the
// others had the same. Many goroutines may add to it.
type spread struct {
	first [1 << 16]atomic.Int64 // when the version was first seen, by its sequence; a measurement has far fewer
	latencies
}

func (s *spread) add(v client.Version, at time.Time) {
	first := &s.first[v.Sequence%uint64(len(s.first))]
	if !first.CompareAndSwap(0, at.UnixNano()) {
		s.latencies.add(time.Duration(at.UnixNano() - first.Load()))
	}
}
