package simulate

import (
	"context"
	"sync/atomic"
	"time"

	"headcount/client"
)

// Scenarios measure one thing each. All of them check the counts as well.
var scenarios = map[string]func(*Command) plan{
	"idle":     planIdle,
	"storm":    planStorm,
	"fanout":   planFanout,
	"churn":    planMeasuredChurn,
	"slow":     planSlow,
	"counters": planLasting,
}

const (
	stormTime  = 5 * time.Second      // in which everyone arrives
	slowEvery  = 10                   // every tenth client is slow …
	slowRead   = 4096                 // … and has a receive buffer this small
	drivers    = 8                    // users who come and go so that counts move
	driverTurn = 5 * time.Millisecond // between two of their joins or leaves
)

// A measured plan keeps figures beside the report.
type measured struct {
	*crowd
	figures map[string]float64
}

func planMeasured(cfg *Command, name string, pages, users int, probes bool, work func(context.Context, *measured) error) plan {
	run := &measured{figures: map[string]float64{}}
	id := runName(cfg.Seed)
	return plan{
		name:    id,
		pages:   ownPages(id, pages),
		clients: users + maxDials,
		probes:  probes,
		work: func(ctx context.Context, crowd *crowd) error {
			run.crowd = crowd
			return work(ctx, run)
		},
		describe: func(r *Report) { r.Scenario, r.Figures = name, run.figures },
	}
}

// A window is a stretch of time over which figures are taken.
type window struct {
	began                   time.Time
	server                  usage
	messages, counts, bytes int64
}

func (r *measured) openWindow() window {
	return window{time.Now(), r.server.usage(), r.stats.messages.Load(), r.stats.counts.Load(), r.stats.bytes.Load()}
}

// closeWindow notes what happened since the window was opened.
func (r *measured) closeWindow(w window) {
	now, seconds := r.server.usage(), time.Since(w.began).Seconds()
	counts := float64(r.stats.counts.Load() - w.counts)
	r.figures["window_s"] = seconds
	r.figures["window_messages"] = float64(r.stats.messages.Load() - w.messages)
	r.figures["window_bytes"] = float64(r.stats.bytes.Load() - w.bytes)
	r.figures["counts_per_s"] = counts / seconds
	if len(r.server.pids) == 0 {
		return
	}
	cpu := now.cpu - w.server.cpu
	r.figures["server_cpu_s"] = cpu
	r.figures["server_cpu_percent_of_a_core"] = 100 * cpu / seconds
	r.figures["server_rss_bytes"] = float64(now.rss)
	if counts > 0 {
		r.figures["server_cpu_s_per_million_counts"] = cpu / counts * 1e6
	}
}

// perConnection divides the memory that the server took since the beginning.
func (r *measured) perConnection() {
	if len(r.server.pids) > 0 {
		r.figures["server_rss_bytes_per_connection"] = (r.figures["server_rss_bytes"] - float64(r.server.first.rss)) / float64(r.cfg.Users)
	}
}

// arrive opens a connection each for users, spread over the pages and over a time.
func (r *measured) arrive(ctx context.Context, users int, within time.Duration) error {
	began := time.Now()
	for i := range users {
		if err := sleep(ctx, time.Until(began.Add(within*time.Duration(i)/time.Duration(users)))); err != nil {
			return err
		}
		if _, err := r.enter(ctx, r.newUser(), r.pages[i%len(r.pages)]); err != nil {
			return err
		}
	}
	return nil
}

// planIdle: everyone is there and nothing happens. It measures the memory of a
// connection, and what it costs to keep it.
func planIdle(cfg *Command) plan {
	return planMeasured(cfg, "idle", cfg.Pages, cfg.Users, false, func(ctx context.Context, r *measured) error {
		if err := r.arrive(ctx, cfg.Users, 0); err != nil {
			return err
		}
		if err := r.checkpoint(ctx, "full"); err != nil {
			return err
		}
		r.enterPhase("idling")
		w := r.openWindow()
		if err := sleep(ctx, cfg.Duration); err != nil {
			return err
		}
		r.closeWindow(w)
		r.perConnection()
		return r.checkpoint(ctx, "final")
	})
}

// planStorm: everyone arrives on one page within 5 s. It measures how long it takes
// until every client is right, and what it costs.
func planStorm(cfg *Command) plan {
	return planMeasured(cfg, "storm", 1, cfg.Users, false, func(ctx context.Context, r *measured) error {
		r.enterPhase("storming")
		w := r.openWindow()
		if err := r.arrive(ctx, cfg.Users, stormTime); err != nil {
			return err
		}
		last := time.Now()
		if err := r.awaitRight(ctx); err != nil {
			return err
		}
		r.figures["right_after_s"] = time.Since(last).Seconds()
		r.closeWindow(w)
		return r.checkpoint(ctx, "final")
	})
}

// awaitRight waits until every client holds true counts, as long as a checkpoint would.
func (r *measured) awaitRight(ctx context.Context) error {
	for deadline := time.Now().Add(placeLimit); time.Now().Before(deadline); {
		if r.held(r.everyone()).n == 0 {
			return nil
		}
		if err := sleep(ctx, pollEvery/5); err != nil {
			return err
		}
	}
	return nil // the checkpoint will say what is wrong
}

// planFanout: everyone subscribes to one page without being there, and a few users come
// and go so fast that its count always moves. It measures how many counts arrive a
// second, and how long after the first subscriber the others have a count.
func planFanout(cfg *Command) plan {
	return planMeasured(cfg, "fanout", 1, cfg.Users, true, func(ctx context.Context, r *measured) error {
		drive, err := r.watchers(ctx, 0)
		if err != nil {
			return err
		}
		r.enterPhase("fanning out")
		w := r.openWindow()
		spread, err := drive(cfg.Duration)
		if err != nil {
			return err
		}
		r.closeWindow(w)
		r.perConnection()
		r.figures["spread_p50_ms"], r.figures["spread_p99_ms"] = spread.ms(0.5), spread.ms(0.99)
		return r.checkpoint(ctx, "final")
	})
}

// planSlow is planFanout for half of the time. For the other half every tenth subscriber
// reads nothing. It measures how much later the others have their counts.
func planSlow(cfg *Command) plan {
	return planMeasured(cfg, "slow", 1, cfg.Users, true, func(ctx context.Context, r *measured) error {
		drive, err := r.watchers(ctx, slowEvery)
		if err != nil {
			return err
		}
		r.enterPhase("everyone reads")
		before, err := drive(cfg.Duration / 2)
		if err != nil {
			return err
		}
		r.enterPhase("a tenth does not read")
		w := r.openWindow()
		r.deaf.Store(true)
		after, err := drive(cfg.Duration / 2)
		if err != nil {
			return err
		}
		r.closeWindow(w)
		r.deaf.Store(false)
		r.figures["spread_p99_ms_before"], r.figures["spread_p99_ms"] = before.ms(0.99), after.ms(0.99)
		if p99 := before.ms(0.99); p99 > 0 {
			r.figures["spread_p99_ratio"] = after.ms(0.99) / p99
		}
		return r.checkpoint(ctx, "final")
	})
}

// watchers has everyone subscribe to the page, every slowEvery-th of them as a
// slow client (0: none). The function it returns moves the page's count for a
// time and measures how its counts spread.
func (r *measured) watchers(ctx context.Context, slowEvery int) (drive func(time.Duration) (*spread, error), err error) {
	page := r.pages[0]
	for i := range r.cfg.Users {
		slow := slowEvery > 0 && i%slowEvery == 0
		r.start(ctx, &tab{user: r.newUser(), watched: holdings(r.pages), slow: slow}, i%len(r.cfg.URL))
	}
	var tabs []*tab
	for range drivers {
		tab, err := r.enter(ctx, r.newUser(), page)
		if err != nil {
			return nil, err
		}
		tabs = append(tabs, tab)
	}
	if err := r.checkpoint(ctx, "full"); err != nil {
		return nil, err
	}
	return func(d time.Duration) (*spread, error) {
		s := &spread{page: page}
		r.spread.Store(s)
		defer r.spread.Store(nil)
		began := time.Now()
		for i := 0; time.Since(began) < d; i++ {
			tab, to := tabs[i%drivers], page
			if tab.joined.page != "" {
				to = ""
			}
			r.move(tab, to)
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
	page  string
	first [1 << 16]atomic.Int64 // when the version was first seen, by its sequence; a window has far fewer
	histogram
}

func (s *spread) add(page string, v client.Version, at time.Time) {
	if page != s.page {
		return
	}
	first := &s.first[v.Sequence%uint64(len(s.first))]
	if !first.CompareAndSwap(0, at.UnixNano()) {
		s.histogram.add(time.Duration(at.UnixNano() - first.Load()))
	}
}

func (s *spread) ms(q float64) float64 { return float64(s.quantile(q).Microseconds()) / 1000 }

// planMeasuredChurn is the default run with figures.
func planMeasuredChurn(cfg *Command) plan {
	p := planChurn(cfg, "churn", false) // the figures are of all of --duration
	m := &measured{figures: map[string]float64{}}
	work, describe := p.work, p.describe
	p.work = func(ctx context.Context, crowd *crowd) error {
		m.crowd = crowd
		w := m.openWindow()
		err := work(ctx, crowd)
		m.closeWindow(w)
		return err
	}
	p.describe = func(r *Report) { describe(r); r.Figures = m.figures }
	return p
}
