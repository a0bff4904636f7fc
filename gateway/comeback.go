package gateway

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"headcount/gateway/identity"
	"headcount/presence"
)

// doubter is what is told whether counts may lack users who stay.
type doubter interface {
	Doubt()
	Trust()
}

// comebacks is the time after a start of a process whose store has forgotten who is present. A process
// cannot know that it has been restarted, but a client that comes back does. From the first of them
// on, until all had time to come back, every count is stale: it may lack users who stay.
type comebacks struct {
	hub doubter
	log func(left time.Duration)

	began, until time.Time // set by newComebacks alone

	over  atomic.Bool // read without mu: nobody's return matters any more
	mu    sync.Mutex  // guards doubt, and orders what the hub is told
	doubt bool        // somebody came back
}

func newComebacks(cfg Config, hub doubter) *comebacks {
	began := presence.Started(cfg.Incarnation)
	b := &comebacks{hub: hub, began: began, until: began.Add(cfg.ComeBack)}
	b.over.Store(cfg.ComeBack <= 0)
	b.log = func(left time.Duration) {
		cfg.Log.Info().Stringer("for", left.Round(time.Second)).Msg("a client has come back that was here before this process began: counts are stale until the others had time for it; with --data-dir, and a restart within --presence-timeout, they would have been remembered")
	}
	return b
}

// run ends the time. It returns when it is over, or ctx.
func (b *comebacks) run(ctx context.Context) {
	if b.over.Load() {
		return
	}
	select {
	case <-time.After(time.Until(b.until)):
	case <-ctx.Done():
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over.Store(true)
	if b.doubt {
		b.hub.Trust()
	}
}

// note looks at what a client has sent that begins a connection or calls. It must be called before
// the client is told a count.
func (b *comebacks) note(r *http.Request, id identity.Identity) {
	if b.over.Load() || !id.Void && !b.older(r.Header.Get("Last-Event-Id")) && r.URL.Query().Get("back") == "" {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.doubt || b.over.Load() {
		return
	}
	b.doubt = true
	b.hub.Doubt()
	b.log(time.Until(b.until))
}

// older reports whether a version is of an earlier life of the process. One that is older than any
// process is nobody's.
func (b *comebacks) older(version string) bool {
	v, err := presence.ParseVersion(version)
	made := time.UnixMilli(int64(v.Incarnation))
	return err == nil && made.Before(b.began) && made.After(b.began.AddDate(-1, 0, 0))
}

// doubtful reports whether counts are stale for that reason.
func (b *comebacks) doubtful() bool {
	if b.over.Load() {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.doubt && !b.over.Load()
}
