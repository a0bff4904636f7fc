package simulate

import (
	"context"
	"sync/atomic"
	"time"

	"headcount/client"
)

// scenarios are what a run may do, by name. All of them check the counts. All but mixed, the default, also measure
// something.
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
	stormTime  = 5 * time.Second      // within which everyone arrives
	shownEvery = 10                   // every tenth client is not hidden
	slowEvery  = 10                   // every tenth client is slow
	slowRead   = 4096                 // bytes of a slow client's receive buffer
	drivers    = 8                    // users who come and go so that counts change
	driverTurn = 5 * time.Millisecond // between two of their joins or leaves
)

// measure measures from now until end is called, which adds the figures to the report.
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

// perConnection divides the memory by which the server has grown since the start of the run.
func (c *crowd) perConnection() {
	if len(c.server.procs) == 0 {
		return
	}

	f := c.result.Figures
	grown := f["server_rss_bytes"] - float64(c.server.first.rss)
	f["server_rss_bytes_per_connection"] = grown / float64(c.cfg.Users)
}

// arrive opens a connection for each user, spread evenly over the pages and over a period.
func (c *crowd) arrive(ctx context.Context, within time.Duration) error {
	began := time.Now()
	for i := range c.cfg.Users {
		// A timetable, unlike pauses, keeps a slow server from stretching the storm.
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

// idle is the scenario in which everyone is there and nothing happens. It measures what a join costs, how much memory a
// connection takes, and what an idle connection costs.
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

// storm is the scenario in which everyone arrives on one page within 5 s. It measures how long it takes until every
// client has the right count, and what that costs.
func (c *crowd) storm(ctx context.Context) error {
	c.enterPhase("storming")
	end := c.measure()

	if err := c.arrive(ctx, stormTime); err != nil {
		return err
	}

	last := time.Now()
	for c.held(c.everyone()).n > 0 && time.Since(last) < placeLimit { // after that the checkpoint says what is wrong
		if err := sleep(ctx, pollEvery/5); err != nil {
			return err
		}
	}

	c.result.Figures["right_after_s"] = time.Since(last).Seconds()
	end()
	return c.checkpoint(ctx, "final")
}

// fanOut is the scenario in which everyone subscribes to one page, and a few users come and go so fast that its count
// always changes. It measures how many counts arrive in a second, and how long after the first subscriber the others
// receive a count.
func (c *crowd) fanOut(ctx context.Context) error { return c.measureFanOut(ctx, 1) }

// hidden is fanOut while nine of ten subscribers have paused, as hidden tabs do.
func (c *crowd) hidden(ctx context.Context) error { return c.measureFanOut(ctx, shownEvery) }

// measureFanOut is fanOut while only every shown-th subscriber has not paused.
func (c *crowd) measureFanOut(ctx context.Context, shown int) error {
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
	// Not before the checkpoint of audience, for which every client needs counts.
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

// slow is fanOut for half of the time. For the other half every tenth subscriber reads nothing. It measures how much
// later the others receive their counts.
func (c *crowd) slow(ctx context.Context) error {
	drive, err := c.audience(ctx, func(i int, t *tab) {
		if i%slowEvery == 0 {
			t.slow = true
			t.seen = nil // only the others are measured
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

// audience makes everyone subscribe to the page. Before that it calls prepare with each subscriber's number and tab.
// drive changes the page's count for a period and measures how the counts spread.
func (c *crowd) audience(
	ctx context.Context, prepare func(int, *tab),
) (drive func(time.Duration) (*spread, error), err error) {
	var measured atomic.Pointer[spread] // nil between measurements
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

	// All counts must be right first, or the measurement would include the arrivals.
	if err := c.checkpoint(ctx, "full"); err != nil {
		return nil, err
	}

	return func(d time.Duration) (*spread, error) {
		s := &spread{}
		measured.Store(s)
		defer measured.Store(nil)

		began := time.Now()
		// The drivers take turns, so that each turn changes the count by one.
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

// A spread has, for the counts of a page, how much later than the first client the others received them. Any goroutine
// may add to it.
type spread struct {
	first [1 << 16]atomic.Int64 // when each version was first seen, by its sequence; a measurement has far fewer
	latencies
}

func (s *spread) add(v client.Version, at time.Time) {
	first := &s.first[v.Sequence%uint64(len(s.first))]
	if !first.CompareAndSwap(0, at.UnixNano()) {
		s.latencies.add(time.Duration(at.UnixNano() - first.Load()))
	}
}
