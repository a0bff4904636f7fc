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

// A Checkpoint is the report of a checkpoint, which compares the truth with what every client and gateway says. Nobody
// comes or leaves meanwhile. It has two stages:
//
//   - quiet: it waits until every client that should be present is connected, has joined and holds a count, and until
//     the time is over in which the server must notice the departures before.
//   - settling: it compares all counts that clients hold, and GET /{page}/counter of every page and of `*` on every
//     gateway, until all of them equal the truth. A count that differs after 10 s is wrong.
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
	Failures int64 `json:"failures,omitempty"` // 503s and lost connections since the previous checkpoint
}

const (
	settleLimit = 10 * time.Second // after which the contract says that counts are right
	placeLimit  = 90 * time.Second // for all clients to connect and join
	maxRetries  = 5                // of a checkpoint that a lost connection has spoilt
	pollEvery   = 50 * time.Millisecond
	getsAtOnce  = 8
	readyLimit  = 15 * time.Second // for the gateways to get ready at the start
)

// errSpoilt means that a connection was lost while counts were compared.
var errSpoilt = errors.New("connections were lost")

// checkpoint runs one checkpoint. The probes rest during it. It notes wrong counts
// and does not return them: the run goes on and can show whether they become right.
func (c *crowd) checkpoint(ctx context.Context, name string) error {
	// The inner call enters the phase now. The outer one returns to the phase before at the end.
	defer c.enterPhase(c.enterPhase("checkpoint " + name))
	// A probe that joins meanwhile would change the count of the whole site.
	c.probes.gate.Lock()
	defer c.probes.gate.Unlock()

	// The truth does not change meanwhile, because the driver, which changes it, waits for this function.
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

// compare goes through both stages once. It returns errSpoilt when a connection was lost in the second one.
func (c *crowd) compare(ctx context.Context, cp *Checkpoint) error {
	began := time.Now()
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
		// Reading what clients hold costs the server nothing, so the gateways are asked only when that is right.
		if wrong.n == 0 {
			c.ask(ctx, c.topics(), wrong)
		}

		settled := time.Since(quiet)
		// Read after the comparison: a connection that was lost meanwhile may have made any count wrong.
		_, now := c.quiet()
		if now != before {
			return errSpoilt
		}

		if wrong.n == 0 || settled > c.settle {
			cp.SettleMS = settled.Milliseconds()
			// Only now is a wrong count not just late.
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

// want returns the true count of a page. It knows that of `*` only when nobody else is on the site.
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

		// Otherwise a wrong token or address would be reported only after the whole limit.
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
		// Read first, so that a disturbance during the waits below is noticed at the end.
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
	for _, gateway := range c.cfg.URL {
		// One request finds out whether the gateway is there, before there is one for each page.
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

	// Some gateways may be down during a checkpoint, but not all of them.
	if down.n == len(c.cfg.URL) {
		wrong.merge(down)
	}
}

// get returns the count of a page as a gateway has it.
func (c *crowd) get(ctx context.Context, gateway, page string) (client.Count, error) {
	return client.NewAPI(client.Config{URL: gateway, Site: c.cfg.Site, HTTP: c.http}).Count(ctx, page)
}

// answered reports whether err is about an answer, so that a server is there.
func answered(err error) bool {
	return errors.As(err, new(*client.Error)) || errors.Is(err, client.ErrFrame)
}

// errNobody means that the run has not begun, because a gateway does not answer.
var errNobody = errors.New("nothing answers")

// cause returns err without the request, which the reader knows.
func cause(err error) error {
	var u *url.Error
	if errors.As(err, &u) {
		return u.Err
	}

	return err
}

// awaitGateways waits until every gateway returns the count of `*`. It waits for a gateway that answers that it is not
// ready, but not for one that does not answer at all.
func (c *crowd) awaitGateways(ctx context.Context) error {
	deadline := time.Now().Add(readyLimit)
	for _, gateway := range c.cfg.URL {
		for {
			_, err := c.get(ctx, gateway, wholeSite)
			if err == nil {
				break
			}

			// A mistyped address is the most frequent mistake, so it is reported at once.
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

// readBaseline reads the count of `*` before the run's users come. A count above 0 may soon fall, because an earlier
// run has just left, so readBaseline waits until the count stands still. If it keeps moving, other people are on the
// site.
func (c *crowd) readBaseline(ctx context.Context) error {
	still := c.cfg.LeaveGrace + time.Second
	since := time.Now()
	limit := since.Add(c.ghostBound() + still)

	for first := true; ; first = false {
		got, err := c.get(ctx, c.cfg.URL[0], wholeSite)
		if err != nil {
			return fmt.Errorf("read the baseline of *: %w", err)
		}

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

// expectEmpty waits until nobody is on the run's pages, which are those of a log: other visitors of these pages would
// make every count look wrong.
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
	// Even without a wait the end of the context must end loops.
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
