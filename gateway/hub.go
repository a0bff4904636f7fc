package gateway

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/rs/zerolog"

	"headcount/presence"
)

const (
	attachBatch = 500             // pages in one call to the endpoint store
	lingerFor   = 5 * time.Second // a page without subscribers is kept this long: reloads come back
	recentPages = 16384           // about 4 MB
	staleMemory = time.Minute     // event streams that come back within this may have been told a stale count
)

// hub knows the newest count of every page that somebody here wants, and keeps
// the endpoint store told of them. Connections are spread over shards, which
// deliver; every page of a connection is in its shard.
type hub struct {
	name   string // this gateway's, in the endpoint store
	store  Store
	log    zerolog.Logger
	shards []*shard
	next   atomic.Uint64        // spreads connections over shards
	wake   chan struct{}        // holds one: run has something to attach or detach
	topics func(presence.Count) // is told of topics that are no pages, as the shards are of pages
	staled atomic.Int64         // when a stale count was last told, unix nanoseconds

	// read is what was last read of pages that nobody here subscribed to, for when
	// the store is away. It has a lock of its own; beyond recentPages the one read
	// longest ago is forgotten, and is not known then.
	read *lru.Cache[string, presence.Count]

	mu    sync.Mutex // guards all below; a shard's lock may be held when it is taken, not the other way round
	pages map[string]*watched
	fresh []string // pages to attach
	down  bool     // the store is known to be away: reading it is of no use
}

// watched is a page that a shard has subscribers for, or had a moment ago.
type watched struct {
	count    presence.Count
	known    bool // count may be told; until then it is the newest heard of
	attached bool
	refs     int       // shards with subscribers
	left     time.Time // when refs fell to 0
}

// want adds a shard to those with subscribers for the page, and returns the
// count when it is known. The shard is told of every newer one.
func (h *hub) want(page string) (presence.Count, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.pages[page]
	if w == nil {
		w = &watched{}
		h.pages[page] = w
		h.fresh = append(h.fresh, page)
		select {
		case h.wake <- struct{}{}:
		default:
		}
	}
	w.refs++
	return w.count, w.known
}

// unwant takes a shard out again.
func (h *hub) unwant(page string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.pages[page]
	if w.refs--; w.refs == 0 {
		w.left = time.Now()
	}
}

// update takes a count, from whatever way it came, unless a newer one is known.
// A stale one may lack users: it only says that the one known is stale, too,
// unless that came later: then the stale one has been overtaken.
//
// The first one known is what attaching brought, or newer. Before, whoever sends
// a count may have heard of the last change long ago, and the page may have been
// known to another gateway, or to this one in a former life, with more users.
func (h *hub) update(c presence.Count) {
	h.mu.Lock()
	w := h.pages[c.Page]
	switch {
	case w == nil:
	case !w.attached:
		w.hint(c)
	case !w.known && c.Stale:
	case !w.known:
		w.hint(c)
		w.known = true
		w.count.Stale = h.down
		c = w.count
		h.mu.Unlock()
		h.tell(c)
		return
	case c.Stale && c.Version != (presence.Version{}) && !c.Newer(w.count):
	default:
		if c.Stale {
			c = w.count
			c.Stale = true
		}
		c.Stale = c.Stale || h.down // it was on its way when the store went
		if replaces(c, w.count) {
			w.count = c
			h.mu.Unlock()
			h.tell(c)
			return
		}
	}
	h.mu.Unlock()
}

// acknowledged takes the count that came with the acknowledgement of a join: of
// the last change that the join's partition knows of, however long ago.
func (h *hub) acknowledged(c presence.Count) {
	h.mu.Lock()
	w := h.pages[c.Page]
	known := w != nil && w.known
	if w != nil && !known {
		w.hint(c)
	}
	h.mu.Unlock()
	if known {
		h.update(c)
	}
}

// hint keeps a count for when the page is known: then none older is told.
func (w *watched) hint(c presence.Count) {
	if !c.Stale && (w.count.Page == "" || c.Newer(w.count)) {
		w.count = c
	}
}

// staleLately reports whether who was here a moment ago may have been told a
// stale count: its version does not say so.
func (h *hub) staleLately() bool { return time.Since(time.Unix(0, h.staled.Load())) < staleMemory }

func (h *hub) tell(c presence.Count) {
	if !presence.IsPage(c.Page) {
		h.topics(c)
		return
	}
	if c.Stale || c.Without != "" {
		h.staled.Store(time.Now().UnixNano())
	}
	for _, s := range h.shards {
		s.update(c)
	}
}

// replaces reports whether c is to be told to who has old.
func replaces(c, old presence.Count) bool {
	order := c.Version.Compare(old.Version)
	return order > 0 || order == 0 && c.Stale != old.Stale
}

// away marks every count stale, because the store cannot be reached.
func (h *hub) away() {
	h.mu.Lock()
	h.down = true
	var known []presence.Count
	for _, w := range h.pages {
		if w.known && !w.count.Stale {
			known = append(known, presence.Count{Page: w.count.Page, Stale: true})
		}
	}
	h.mu.Unlock()
	for _, c := range known {
		h.update(c)
	}
}

// back has every page attached and read anew.
func (h *hub) back() {
	h.mu.Lock()
	h.down = false
	h.fresh = h.fresh[:0:0]
	for page := range h.pages {
		h.fresh = append(h.fresh, page)
	}
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// last is the newest count known here of a page that somebody wants.
func (h *hub) last(page string) (presence.Count, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w := h.pages[page]; w != nil && w.known {
		return w.count, true
	}
	return presence.Count{}, false
}

// remember keeps counts that were read from the store.
func (h *hub) remember(counts []presence.Count) {
	for _, c := range counts {
		if !c.Stale {
			h.read.Add(c.Page, c)
		}
	}
}

// run keeps the endpoint store told, until ctx ends.
func (h *hub) run(ctx context.Context) {
	tick := time.NewTicker(lingerFor / 2)
	defer tick.Stop()
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	for failed := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-h.wake:
		case <-retry.C:
		case now := <-tick.C:
			h.detach(ctx, now)
			h.reread()
		}
		if err := h.attach(ctx); err != nil && ctx.Err() == nil {
			failed++
			pause := min(50*time.Millisecond<<min(failed, 6), 2*time.Second)
			h.log.Warn().Err(err).Stringer("retry_in", pause.Round(time.Millisecond)).Msg("pages could not be attached")
			retry.Reset(pause/2 + rand.N(pause/2))
		} else {
			failed = 0
		}
	}
}

// reread has the pages read again whose count is stale, or not known, though the
// store answers: the word that it is complete again may have been lost, or
// overtaken by one that it is not.
func (h *hub) reread() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.down || len(h.fresh) > 0 {
		return
	}
	for page, w := range h.pages {
		if w.count.Stale || !w.known {
			h.fresh = append(h.fresh, page)
		}
	}
}

// attach tells the endpoint store of new pages and learns their counts.
func (h *hub) attach(ctx context.Context) error {
	for {
		h.mu.Lock()
		n := min(len(h.fresh), attachBatch)
		batch := h.fresh[:n:n]
		h.fresh = h.fresh[n:]
		h.mu.Unlock()
		if n == 0 {
			return nil
		}
		counts, err := h.store.Attach(ctx, h.name, batch)
		if err != nil {
			h.mu.Lock()
			h.fresh = append(h.fresh, batch...)
			h.mu.Unlock()
			return err
		}
		h.mu.Lock()
		for _, page := range batch {
			if w := h.pages[page]; w != nil {
				w.attached = true
			}
		}
		h.mu.Unlock()
		for _, c := range counts {
			h.update(c)
		}
	}
}

// detach forgets the pages that nobody has wanted for a while.
func (h *hub) detach(ctx context.Context, now time.Time) {
	var gone []string
	h.mu.Lock()
	for page, w := range h.pages {
		if w.refs == 0 && w.attached && now.Sub(w.left) >= lingerFor {
			delete(h.pages, page)
			if w.known && presence.IsPage(page) {
				h.read.Add(page, w.count)
			}
			gone = append(gone, page)
		}
	}
	h.mu.Unlock()
	if len(gone) == 0 {
		return
	}
	// This goroutine attaches, too, so a page wanted again meanwhile is attached
	// after this, never before.
	if err := h.store.Detach(ctx, h.name, gone); err != nil && ctx.Err() == nil {
		h.log.Debug().Err(err).Msg("pages stay attached: their counts will come and be ignored")
	}
}
