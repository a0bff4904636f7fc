package simulate

import (
	"context"
	"time"
)

// Scenarios measure one thing each and print JSON. All of them check the counts
// as well.
var scenarios = map[string]func(*Command) plan{
	"idle":   planIdle,
	"storm":  planStorm,
	"fanout": planFanout,
	"churn":  func(cfg *Command) plan { return planMeasuredChurn(cfg, "churn", 0) },
	"slow":   func(cfg *Command) plan { return planMeasuredChurn(cfg, "slow", slowPause) },
}

const (
	stormTime  = 5 * time.Second        // in which everyone arrives
	slowPause  = 500 * time.Millisecond // of a slow client after every message
	slowEvery  = 10                     // every tenth client is slow
	drivers    = 8                      // users who come and go so that counts move
	driverTurn = 5 * time.Millisecond   // between two of their joins or leaves
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

// planIdle: everyone is there and nothing happens. Memory per connection, and
// what keeping them costs.
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
		if len(r.server.pids) > 0 {
			r.figures["server_rss_bytes_per_connection"] = (r.figures["server_rss_bytes"] - float64(r.server.first.rss)) / float64(cfg.Users)
		}
		return r.checkpoint(ctx, "final")
	})
}

// planStorm: everyone arrives on one page within 5 s. How long until every
// client is right, and what it costs.
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

// planFanout: everyone subscribes to one page without being there, and a few come
// and go so fast that its count always moves. How many counts a second arrive.
func planFanout(cfg *Command) plan {
	return planMeasured(cfg, "fanout", 1, cfg.Users, true, func(ctx context.Context, r *measured) error {
		for i := range cfg.Users {
			r.watch(ctx, i%len(cfg.URL), r.pages)
		}
		var tabs []*client
		for range drivers {
			tab, err := r.enter(ctx, r.newUser(), r.pages[0])
			if err != nil {
				return err
			}
			tabs = append(tabs, tab)
		}
		if err := r.checkpoint(ctx, "full"); err != nil {
			return err
		}
		r.enterPhase("fanning out")
		w := r.openWindow()
		for i := 0; time.Since(w.began) < cfg.Duration; i++ {
			tab, page := tabs[i%drivers], r.pages[0]
			if tab.joined.page != "" {
				page = ""
			}
			r.move(tab, page)
			if err := sleep(ctx, driverTurn); err != nil {
				return err
			}
		}
		r.closeWindow(w)
		return r.checkpoint(ctx, "final")
	})
}

// planMeasuredChurn is the default run with figures. With a pause, every tenth client
// reads slowly until the run's checkpoints: the others must not notice.
func planMeasuredChurn(cfg *Command, name string, pause time.Duration) plan {
	p := planChurn(cfg, name)
	m := &measured{figures: map[string]float64{}}
	work, describe := p.work, p.describe
	p.work = func(ctx context.Context, crowd *crowd) error {
		m.crowd = crowd
		crowd.slowness.Store(int64(pause))
		w := m.openWindow()
		err := work(ctx, crowd)
		m.closeWindow(w)
		return err
	}
	p.describe = func(r *Report) { describe(r); r.Figures = m.figures }
	return p
}
