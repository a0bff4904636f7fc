package gateway

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"headcount/gateway/identity"
	"headcount/presence"
)

// restartHub marks all counts as stale from Doubt to Trust.
type restartHub interface {
	Doubt()
	Trust()
}

// restartGrace is the time after the start of a process whose store has forgotten who is present. A
// process cannot know that it has been restarted, but a client that comes back does. From the first
// such client until all have had time to come back, every count is stale, since it may lack users
// who stay.
type restartGrace struct {
	hub restartHub
	log func(left time.Duration)

	began, until time.Time // set by newRestartGrace only

	state atomic.Uint32 // one of the states below
	mu    sync.Mutex    // held while state changes, so that the calls of hub are in order
}

// States of a restartGrace.
const (
	graceWaiting uint32 = iota // no client has come back yet
	graceDoubt                 // one has, and counts are stale
	graceOver                  // clients that come back change nothing any more
)

func newRestartGrace(cfg Config, hub restartHub) *restartGrace {
	began := presence.Started(cfg.Incarnation)
	g := &restartGrace{hub: hub, began: began, until: began.Add(cfg.ComeBack)}
	if cfg.ComeBack <= 0 {
		g.state.Store(graceOver)
	}
	g.log = func(left time.Duration) {
		cfg.Log.Info().Stringer("for", left.Round(time.Second)).Msg("a client has reconnected that was here before this process started: counts are marked stale until the others have had time to reconnect; with --data-dir, and a restart within --presence-timeout, the users would have been remembered")
	}
	return g
}

// run ends the grace in time. It returns when the grace is over, or ctx.
func (g *restartGrace) run(ctx context.Context) {
	if g.state.Load() == graceOver {
		return
	}
	select {
	case <-time.After(time.Until(g.until)):
	case <-ctx.Done():
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state.Swap(graceOver) == graceDoubt {
		g.hub.Trust()
	}
}

// Note looks for signs in a request that its client was here before the restart. It must be called
// before the client gets a count.
func (g *restartGrace) Note(r *http.Request, id identity.Identity) {
	if g.state.Load() != graceWaiting || !id.Void && !g.older(r.Header.Get("Last-Event-Id")) && !g.before(r.URL.Query().Get("back")) {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.state.CompareAndSwap(graceWaiting, graceDoubt) {
		return
	}
	g.hub.Doubt()
	g.log(time.Until(g.until))
}

// before reports whether a client was welcomed before the process began. It says how many ms ago that
// was, or "1" if it only knows that it was.
func (g *restartGrace) before(back string) bool {
	ago, err := strconv.ParseFloat(back, 64)
	return back == "1" || err == nil && ago > float64(time.Since(g.began).Milliseconds())
}

// older reports whether a version is of an earlier incarnation of the process. A version from more
// than a year ago is made up.
func (g *restartGrace) older(version string) bool {
	v, err := presence.ParseVersion(version)
	made := time.UnixMilli(int64(v.Incarnation))
	return err == nil && made.Before(g.began) && made.After(g.began.AddDate(-1, 0, 0))
}

// Doubtful reports whether counts are stale because of a restart.
func (g *restartGrace) Doubtful() bool { return g.state.Load() == graceDoubt }
