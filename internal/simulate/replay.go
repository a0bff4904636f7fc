package simulate

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/time/rate"
)

// replay plays a log. A visitor is an address with a user agent, and is on the page of a request until the visitor's
// next request or until the dwell time is over. A visitor who is present has one connection, which joins the next page
// and leaves the one before. A visitor who comes back is the same user.
//
// Pages have the log's own names, so that people can watch them on the demo page. The server must have nobody on them
// at the start. Visitors also join pages that are not allowed, such as `*` or one of more than 128 characters: the
// server must refuse them, and the visitor is nowhere.
type replay struct {
	*crowd
	events   []event
	present  []int // how many visitors, after each event
	visitors []visitor
	end      time.Duration // of the log, the last dwell included
	tally    ReplayReport
}

// A visitor of the log.
type visitor struct {
	user *user
	tab  *tab          // nil while away
	pace *rate.Limiter // of moves
}

// An event is one thing that happens: a visitor is on a page from now on, or leaves.
type event struct {
	at      time.Duration // since the first request, in the log's time
	visitor int
	page    string
	leaves  bool
}

// A ReplayReport says what was in the log.
type ReplayReport struct {
	Lines       int     `json:"lines"`
	BadLines    int     `json:"bad_lines"`
	Requests    int     `json:"requests"`
	Visitors    int     `json:"visitors"`     // addresses with user agent
	Visits      int     `json:"visits"`       // how often a visitor came
	MostPresent int     `json:"most_present"` // visitors at once
	BadPages    int     `json:"bad_pages"`    // requests for pages that must be refused
	LogSeconds  float64 `json:"log_seconds"`
	Speed       float64 `json:"speed"`         // --speed
	Behind      float64 `json:"behind_s"`      // how late the replay was, at most
	Paused      float64 `json:"checkpoints_s"` // how long the log's clock stood still for checkpoints
}

func (r *ReplayReport) String() string {
	return fmt.Sprintf("%d lines (%d bad), %d requests of %d visitors in %d visits, up to %d visitors at once; "+
		"%d requests for pages that the server must refuse; the replay was up to %.2f s late",
		r.Lines, r.BadLines, r.Requests, r.Visitors, r.Visits, r.MostPresent, r.BadPages, r.Behind)
}

// However fast the log is played, the replay makes every visit. A visitor moves on only when the server has answered
// the join of the last page, and no more often than a server allows: moveBurst times at once, and then movesPerSecond
// times, with two frames each. The replay waits for that and catches up later. For a visitor who cannot connect it
// waits for arriveLimit at most.
const (
	moveBurst      = 20
	movesPerSecond = 25
	arriveLimit    = 2 * time.Second
)

func planReplay(cfg *Command) (plan, error) {
	file, err := os.Open(cfg.Replay)
	if err != nil {
		return plan{}, fmt.Errorf("%w: --replay: %w: give the path of an access log", ErrSettings, err)
	}
	defer file.Close()

	requests, lines, bad, err := readLog(file)
	if err != nil {
		return plan{}, fmt.Errorf("%w: --replay: %s: %w", ErrSettings, cfg.Replay, err)
	}

	if len(requests) == 0 {
		return plan{}, fmt.Errorf("%w: --replay: %s: none of the file's %d lines is in the common or combined "+
			"log format: give an access log", ErrSettings, cfg.Replay, lines)
	}

	run := schedule(requests, cfg.Dwell)
	run.tally.Lines = lines
	run.tally.BadLines = bad
	run.tally.Speed = cfg.Speed

	return plan{
		pages:   pagesOf(requests),
		limit:   run.tally.MostPresent,
		probing: true,
		work: func(c *crowd, ctx context.Context) error {
			run.crowd = c
			c.result.Replay = &run.tally
			return run.work(ctx)
		},
	}, nil
}

// pagesOf returns the allowed pages of a log, each once.
func pagesOf(requests []request) []string {
	var pages []string
	for _, req := range requests {
		if validPage(req.page) {
			pages = append(pages, req.page)
		}
	}

	slices.Sort(pages)
	return slices.Compact(pages)
}

// schedule turns requests into events.
func schedule(requests []request, dwell time.Duration) *replay {
	// A server writes the line of a request at its end, so the lines are not quite in order.
	slices.SortStableFunc(requests, func(a, b request) int { return a.at.Compare(b.at) })

	r := &replay{}
	type who struct{ address, agent string }
	known := map[who]int{}
	last := map[int]time.Duration{} // when each visitor's last request was

	for _, req := range requests {
		id := who{req.address, req.agent}
		v, ok := known[id]
		if !ok {
			v = len(known)
			known[id] = v
		}

		at := req.at.Sub(requests[0].at)
		before, came := last[v]
		// A visitor who comes back within the dwell time has not left.
		if came && at > before+dwell {
			r.events = append(r.events, event{at: before + dwell, visitor: v, leaves: true})
		}

		r.events = append(r.events, event{at: at, visitor: v, page: req.page})
		last[v] = at

		if !validPage(req.page) {
			r.tally.BadPages++
		}
	}

	for v := range len(known) { // in order, so that the same log gives the same events
		r.events = append(r.events, event{at: last[v] + dwell, visitor: v, leaves: true})
	}

	// Stable, so that a leave and a visit at the same moment stay in the order of the log.
	slices.SortStableFunc(r.events, func(a, b event) int { return cmp.Compare(a.at, b.at) })

	r.visitors = make([]visitor, len(known))
	r.end = r.events[len(r.events)-1].at
	r.tally.Requests = len(requests)
	r.tally.Visitors = len(known)
	r.tally.LogSeconds = r.end.Seconds()

	r.countPresent()
	return r
}

// countPresent counts the visits, and the visitors at each moment.
func (r *replay) countPresent() {
	present := map[int]bool{}
	for _, s := range r.events {
		if s.leaves {
			delete(present, s.visitor)
		} else if !present[s.visitor] {
			present[s.visitor] = true
			r.tally.Visits++
		}

		r.present = append(r.present, len(present))
		r.tally.MostPresent = max(r.tally.MostPresent, len(present))
	}
}

func (r *replay) work(ctx context.Context) error {
	for i := range r.visitors {
		r.visitors[i].user = r.newUser()
	}

	checks := r.checkEvents()
	clock := time.Now() // when the log's time was 0; each pause of the log's clock moves it
	r.enterPhase("replaying")

	for i, s := range r.events {
		due := clock.Add(r.wall(s.at))
		if err := sleep(ctx, time.Until(due)); err != nil {
			return err
		}

		// The replay waits for a slow server instead of dropping visits; the report says how late it was.
		r.tally.Behind = max(r.tally.Behind, time.Since(due).Seconds())

		// A visitor who falls silent stays counted for a while, for which the next checkpoint would have to wait.
		silent := len(checks) == 0 || r.wall(r.events[checks[0]].at-s.at) > r.ghostBound()
		if err := r.take(ctx, s, silent); err != nil {
			return err
		}

		if len(checks) == 0 || i < checks[0] {
			continue
		}

		began := time.Now()
		if err := r.checkpoint(ctx, "mid"); err != nil {
			return err
		}

		// The log's clock stands still during a checkpoint, or the replay would have to catch up.
		clock = clock.Add(time.Since(began))
		r.tally.Paused += time.Since(began).Seconds()
		checks = checks[1:]
	}

	return r.checkpoint(ctx, "final")
}

// wall returns how long a time of the log takes to play.
func (r *replay) wall(d time.Duration) time.Duration {
	return time.Duration(float64(d) / r.cfg.Speed)
}

// checkEvents returns the events after which there is a checkpoint: about one for each minute of the replay, but at
// least three. Each is at the event of its part of the log after which most visitors are present.
func (r *replay) checkEvents() []int {
	n := min(max(int(r.wall(r.end)/checkEvery), 3), maxChecks, len(r.events))
	var checks []int

	for part := range n {
		from := part * len(r.events) / n
		to := (part + 1) * len(r.events) / n
		best := from
		for i := from; i < to; i++ {
			if r.present[i] > r.present[best] {
				best = i
			}
		}
		checks = append(checks, best)
	}

	return checks
}

const maxChecks = 100 // of a long replay

// take carries out one event.
func (r *replay) take(ctx context.Context, s event, silent bool) error {
	v := &r.visitors[s.visitor]
	if err := r.arrived(ctx, v); err != nil {
		return err
	}

	switch {
	case s.leaves:
		r.leave(v.tab, r.exitWay(silent))
		v.tab = nil
	case v.tab == nil:
		tab, err := r.enter(ctx, v.user, s.page)
		if err != nil {
			return err
		}
		v.tab = tab
		v.pace = rate.NewLimiter(movesPerSecond, moveBurst)
	case v.tab.joined.Page != s.page:
		if err := v.pace.Wait(ctx); err != nil {
			return fmt.Errorf("interrupted: %w", err)
		}
		r.move(v.tab, s.page)
	}

	return nil
}

// arrived waits until the visitor's last event was answered.
func (r *replay) arrived(ctx context.Context, v *visitor) error {
	if v.tab == nil {
		return nil
	}

	for limit := time.Now().Add(arriveLimit); !v.tab.look(nil) && time.Now().Before(limit); {
		if err := sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}

	return nil
}
