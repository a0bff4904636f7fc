package gateway

import (
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"headcount/gateway/identity"
	"headcount/presence"
)

// restartHub is the part of the hub that marks all counts as stale, from Doubt until Trust.
type restartHub interface {
	Doubt()
	Trust()
}

// restartDoubt doubts all counts for a while after a restart of a process whose store does not keep users. A
// process cannot know that it was restarted, but a client that reconnects does. From the first such client
// until all clients have had time to reconnect, every count is stale, because it may lack users that have not
// reconnected yet.
type restartDoubt struct {
	hub restartHub
	log zerolog.Logger

	began    time.Time     // when the process started
	lasts    time.Duration // after that, until all have had time; 0: the store keeps users
	until    time.Time     // a client that reconnects later was away for another reason
	first    sync.Once     // done when a client has reconnected
	doubtful atomic.Bool   // a client has reconnected, and counts are stale
}

const (
	// firstReturn is how long after the start of a process its first client reconnects at the latest.
	firstReturn = 15 * time.Second
	// othersReturn is how long after the first client the others reconnect, however long the process took to serve:
	// they try every 2 s.
	othersReturn = 3 * time.Second
)

func newRestartDoubt(cfg Config, hub restartHub) *restartDoubt {
	// On the monotonic clock, since the wall clock may be set.
	began := time.Now().Add(-time.Since(presence.Started(cfg.Incarnation)))
	until := began.Add(firstReturn)

	return &restartDoubt{hub: hub, log: cfg.Log, began: began, lasts: cfg.ComeBack, until: until}
}

// Note checks a request for signs that its client was connected before the restart. It must be called before
// the client gets a count.
func (g *restartDoubt) Note(r *http.Request, id identity.Identity) {
	over := g.lasts <= 0 || time.Now().After(g.until)
	if over || !g.returns(r, id) {
		return
	}

	// Others that come back say nothing new.
	g.first.Do(func() {
		g.doubtful.Store(true)
		g.hub.Doubt()

		left := max(time.Until(g.began.Add(g.lasts)), othersReturn)
		time.AfterFunc(left, func() {
			g.doubtful.Store(false)
			g.hub.Trust()
		})

		g.log.Info().Stringer("for", left.Round(time.Second)).Msg("a client has reconnected that was connected " +
			"before this process started: counts are marked stale until all clients have had time to reconnect; " +
			"with --data-dir, a restart within --presence-timeout keeps the users")
	})
}

// returns reports whether the client of a request was connected before this process started.
func (g *restartDoubt) returns(r *http.Request, id identity.Identity) bool {
	// Without a secret that outlives the process, all ids of before are void.
	return id.Void || g.older(r.Header.Get("Last-Event-Id")) || g.before(r.URL.Query().Get("back"))
}

// before reports whether a client was welcomed before this process started. back is the client's statement:
// how many ms ago it was welcomed, or "1" if it knows only that it was.
func (g *restartDoubt) before(back string) bool {
	ago, err := strconv.ParseFloat(back, 64)
	welcomed := err == nil && ago > float64(time.Since(g.began).Milliseconds())

	return back == "1" || welcomed
}

// older reports whether a version is from an earlier incarnation of the process. A version from more than a
// year ago is not plausible.
func (g *restartDoubt) older(version string) bool {
	v, err := presence.ParseVersion(version)
	made := time.UnixMilli(int64(v.Incarnation))

	return err == nil && made.Before(g.began) && made.After(g.began.AddDate(-1, 0, 0))
}

// Doubtful reports whether counts are stale because of a restart.
func (g *restartDoubt) Doubtful() bool { return g.doubtful.Load() }
