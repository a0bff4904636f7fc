package simulate

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"golang.org/x/sync/errgroup"

	"headcount/client"
)

// A Checkpoint compares the truth with what every client and gateway says. Nobody
// comes or leaves during a checkpoint. It has two stages:
//
//   - quiet: it waits until every client that should be present is connected, has
//     joined and holds a count, and until the contract's time for noticing every
//     earlier departure is over.
//   - settling: every client's count of every page it holds, and GET
//     /{page}/counter of every page and of `*` on every gateway, is compared until
//     all of them equal the truth. A count that differs after 10 s is wrong.
//
// When a connection is lost during a checkpoint, both stages begin again.
type Checkpoint struct {
	Name     string  `json:"name"`
	AtS      float64 `json:"at_s"`      // since the start of the run
	Users    int     `json:"users"`     // truly present
	Clients  int     `json:"clients"`   // connections that were compared
	Pages    int     `json:"pages"`     // without `*`
	Gets     int     `json:"gets"`      // counters that were requested over HTTP
	QuietMS  int64   `json:"quiet_ms"`  // duration of the first stage
	SettleMS int64   `json:"settle_ms"` // duration of the second stage
	Wrong    int     `json:"wrong"`

	// Of the scenario counters.
	Counters int   `json:"counters,omitempty"`
	Failures int64 `json:"failures,omitempty"` // 503s and lost connections since the checkpoint before
}

const (
	settleLimit = 10 * time.Second // the contract's
	placeLimit  = 90 * time.Second // for all clients to be connected and joined
	maxRetries  = 5                // checkpoints that a lost connection may spoil in a row
	pollEvery   = 50 * time.Millisecond
	getsAtOnce  = 8
	readyLimit  = 15 * time.Second // for the gateways to be ready at the start
)

// errSpoilt means that a connection was lost while counts were compared.
var errSpoilt = errors.New("connections were lost")

// checkpoint runs one checkpoint. The probes rest during it. It notes wrong counts
// and does not return them: the run goes on and can show whether they become right.
func (c *crowd) checkpoint(ctx context.Context, name string) error {
	// The inner call is made at once, and its result, the phase before, is entered again at the end.
	defer c.enterPhase(c.enterPhase("checkpoint " + name))
	// A probe that joins meanwhile would change the count of the whole site.
	c.probes.gate.Lock()
	defer c.probes.gate.Unlock()

	// The truth does not change any more: the caller is the driver, which waits here.
	cp := Checkpoint{Name: name, Users: int(c.truth.count(wholeSite)), Pages: len(c.pages)}
	for try := 0; ; try++ {
		err := c.compare(ctx, &cp)
		if errors.Is(err, errSpoilt) && try < maxRetries {
			continue
		}

		if err != nil {
			return fmt.Errorf("checkpoint %s: %w", name, err)
		}

		cp.AtS = time.Since(c.began).Seconds()
		c.result.Checkpoints = append(c.result.Checkpoints, cp)
		return nil
	}
}

func (c *crowd) compare(ctx context.Context, cp *Checkpoint) error {
	began := time.Now()
	// The same clients for the whole comparison: the driver starts and ends none meanwhile.
	everyone := c.everyone()
	before, err := c.awaitQuiet(ctx, everyone)
	if err != nil {
		return err
	}

	quiet := time.Now()
	cp.QuietMS = quiet.Sub(began).Milliseconds()
	cp.Clients = len(everyone)

	cp.Gets = len(c.topics()) * len(c.cfg.URL)
	for {
		wrong := c.held(everyone)
		// What clients hold costs the server nothing to look at; it is asked only when they are right.
		if wrong.n == 0 {
			c.ask(ctx, c.topics(), wrong)
		}

		settled := time.Since(quiet)
		// After the comparison: a connection that was lost during it may have made any of its counts wrong.
		_, now := c.quiet()
		if now != before {
			return errSpoilt
		}

		if wrong.n == 0 || settled > c.settle {
			cp.SettleMS = settled.Milliseconds()
			// Noted only now: until the time is over a wrong count may only be late.
			cp.Wrong = wrong.n
			c.faults.merge(wrong)
			return nil
		}

		if err := sleep(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// held compares the counts that every client holds with the truth.
func (c *crowd) held(everyone []*tab) *faults {
	wrong := &faults{}
	for _, tab := range everyone {
		placed := tab.look(func(n client.Count) {
			want, ok := c.want(n.Page)
			if ok && n.Count != want {
				wrong.add("page %q: a client of %s holds the count %d; the true count is %d",
					n.Page, c.gateway(tab.gateway), n.Count, want)
			}
		})
		if !placed {
			wrong.add("a client of %s is not connected or holds no count", c.gateway(tab.gateway))
		}
	}

	return wrong
}

// want returns the true count of a page; of `*` only when nobody else is on the site.
func (c *crowd) want(page string) (count int64, ok bool) {
	if page == wholeSite {
		return c.baseline + c.truth.count(page), c.result.SiteChecked
	}

	return c.truth.count(page), true
}

// awaitPlaces waits until all tabs are connected, joined, and hold a count.
func (c *crowd) awaitPlaces(ctx context.Context, tabs []*tab) error {
	for deadline := time.Now().Add(placeLimit); ; {
		missing := 0

		for _, tab := range tabs {
			if !tab.look(nil) {
				missing++
			}
		}

		if missing == 0 {
			return nil
		}

		if time.Now().After(deadline) {
			return fmt.Errorf("after %s, %d clients are not connected or have no answer to their joins; last error: %w",
				placeLimit, missing, c.lastFailure())
		}

		// Without this a wrong token or address would take the whole limit to be reported.
		if err := c.hopeless(); err != nil {
			return err
		}

		if err := sleep(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// awaitQuiet waits until the tabs are in their places and the server must have
// noticed every departure. It returns the number of disturbances up to that moment.
func (c *crowd) awaitQuiet(ctx context.Context, tabs []*tab) (disturbances int, err error) {
	for {
		// Read first, so that what happens while this waits is noticed at the end.
		at, disturbances := c.quiet()

		if err := c.awaitPlaces(ctx, tabs); err != nil {
			return 0, err
		}

		if err := sleep(ctx, time.Until(at)); err != nil {
			return 0, err
		}

		_, now := c.quiet()
		if now == disturbances {
			return disturbances, nil
		}
	}
}

// ask compares what the gateways answer for pages. It leaves out a gateway at whose address
// nobody listens, unless none of the gateways answers.
func (c *crowd) ask(ctx context.Context, pages []string, wrong *faults) {
	down := &faults{}

	var group errgroup.Group
	group.SetLimit(getsAtOnce)
	// Every gateway is asked for every page, since each has its own copy of the counts.
	for _, gateway := range c.cfg.URL {
		// One request finds out whether somebody listens there, before there is one for each page.
		_, err := c.get(ctx, gateway, wholeSite)
		if err != nil && !answered(err) {
			down.add("%v", err)
			continue
		}

		for _, page := range pages {
			group.Go(func() error {
				counter, err := c.get(ctx, gateway, page)
				want, checked := c.want(page)
				if err != nil {
					wrong.add("page %q: GET from %s: %v", page, gateway, err)
				} else if checked && counter.Count != want {
					wrong.add("page %q: GET from %s answers %d; the true count is %d",
						page, gateway, counter.Count, want)
				}
				return nil
			})
		}
	}

	_ = group.Wait()

	// One gateway may be restarted during a checkpoint; without any there is nothing to compare with.
	if down.n == len(c.cfg.URL) {
		wrong.merge(down)
	}
}

// get returns the count of a page as a gateway has it.
func (c *crowd) get(ctx context.Context, gateway, page string) (client.Count, error) {
	return client.NewAPI(client.Config{URL: gateway, Site: c.cfg.Site, HTTP: c.http}).Count(ctx, page)
}

// answered reports whether err is about an answer, so that somebody is there.
func answered(err error) bool {
	return errors.As(err, new(*client.Error)) || errors.Is(err, client.ErrFrame)
}

// errNobody says that the run has not begun.
var errNobody = errors.New("nothing answers")

// cause returns err without the request, which the reader knows.
func cause(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}

	return err
}

// awaitGateways waits until every gateway answers for `*`. One that answers that it is
// not ready yet gets some time; one that does not answer at all gets none.
func (c *crowd) awaitGateways(ctx context.Context) error {
	deadline := time.Now().Add(readyLimit)
	for _, gateway := range c.cfg.URL {
		for {
			_, err := c.get(ctx, gateway, wholeSite)
			if err == nil {
				break
			}

			// A mistyped address is the most frequent mistake of all, so it is reported at once.
			if !answered(err) {
				return fmt.Errorf("%w at %s: start the server, or give its address with --url: %w",
					errNobody, gateway, cause(err))
			}

			if time.Now().After(deadline) {
				return fmt.Errorf("%s is not ready after %s: %w", gateway, readyLimit, err)
			}

			if err := sleep(ctx, 5*pollEvery); err != nil {
				return err
			}
		}
	}

	return nil
}

// readBaseline reads the count of `*` before the run's users come. A count above 0
// may soon fall, because an earlier run has just left. If the count keeps moving,
// other people are on the site.
func (c *crowd) readBaseline(ctx context.Context) error {
	still := c.cfg.LeaveGrace + time.Second
	since := time.Now()
	limit := since.Add(c.ghostBound() + still)

	for first := true; ; first = false {
		got, err := c.get(ctx, c.cfg.URL[0], wholeSite)

		if err != nil {
			return fmt.Errorf("read the baseline of *: %w", err)
		}

		// The time begins anew whenever the count has moved.
		if first || got.Count != c.baseline {
			c.baseline = got.Count
			since = time.Now()
		}

		if c.baseline == 0 || time.Since(since) > still {
			return nil
		}

		if time.Now().After(limit) {
			c.result.SiteChecked = false
			return nil
		}

		if err := sleep(ctx, 2*pollEvery); err != nil {
			return err
		}
	}
}

// expectEmpty waits until nobody is on the run's pages. The pages of a log are not
// made for the run, and other visitors of these pages would make every count look
// wrong.
func (c *crowd) expectEmpty(ctx context.Context) error {
	for deadline := time.Now().Add(c.ghostBound()); ; {
		there := &faults{}
		c.ask(ctx, c.pages, there)
		if there.n == 0 {
			return nil
		}

		if time.Now().After(deadline) {
			return fmt.Errorf("%d of the pages have visitors already: replay the log to a server without visitors; "+
				"first page: %s", there.n, there.texts[0])
		}

		if err := sleep(ctx, 5*pollEvery); err != nil {
			return err
		}
	}
}

// sleep returns an error when the context ends first.
func sleep(ctx context.Context, d time.Duration) error {
	// Also without a wait the end of the run is noticed, so that no loop goes on for ever.
	if d <= 0 {
		return ctx.Err()
	}

	timer := time.NewTimer(d)
	defer timer.Stop()

	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("interrupted: %w", context.Cause(ctx))
	}
}
