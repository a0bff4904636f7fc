package fanout

import (
	"context"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

const (
	readAgain = time.Second     // a topic that is read twice within this is followed
	readLimit = 3 * time.Second // how long a caller waits for the store
)

// reading is what was last read of a topic, and when, since Hub.born.
type reading struct {
	update presence.Update
	at     time.Duration
}

// Newest returns the newest updates of topics to a caller who does not subscribe. Updates of
// topics that the hub follows come from memory, at no cost to the store. All others are read
// from the store, where concurrent reads of one topic are one call. While the store is away,
// or has lost what it had, they are the last ones known here, marked as stale. After a standstill
// of the process all are read from the store. Newest returns false if one of them is not known
// at all.
func (h *Hub) Newest(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	if h.standstill.Ended() {
		return h.Read(ctx, topics)
	}

	updates := make([]presence.Update, len(topics))
	var rest []presence.Topic // those that are not in memory
	var places []int          // of rest in topics
	h.mu.Lock()
	for i, t := range topics {
		if w := h.topics[t]; w != nil && h.current(w) {
			updates[i] = w.update
			h.stay(w)
		} else {
			rest, places = append(rest, t), append(places, i)
		}
	}
	h.mu.Unlock()
	if len(rest) == 0 {
		return updates, true
	}
	read, ok := h.readWith(ctx, rest, h.readShared)
	for i, u := range read {
		updates[places[i]] = u
	}
	return updates, ok
}

// Read is Newest for a caller who must see everything that the store acknowledged before the
// call. Nobody who calls Newest afterwards shares a read that began before.
func (h *Hub) Read(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	for _, t := range topics {
		h.reads.Forget(t.String())
	}
	return h.readWith(ctx, topics, h.cfg.Store.Updates)
}

// Touch notes that somebody who does not subscribe has read a topic of a Source. Any topic that
// is read twice within readAgain is followed until it has not been read for lingerFor.
func (h *Hub) Touch(t presence.Topic) { h.note(presence.Update{Topic: t}) }

// note remembers what was read of a topic that the hub does not have, and follows the topic when
// it is read again.
func (h *Hub) note(u presence.Update) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := u.Topic
	if w := h.topics[t]; w != nil && w.endpoint == attached {
		h.stay(w)
		return
	}
	now := time.Since(h.born)
	last, known := h.read.Get(t)
	if known && now-last.at < readAgain && h.doubts == 0 {
		h.follow(t)
	}
	h.read.Add(t, reading{u, now})
}

// current reports whether the update of w is what the store would answer, but for updates
// that are on their way. The caller holds mu.
func (h *Hub) current(w *watched) bool {
	return w.known && w.endpoint == attached && !w.update.Stale && !h.doubtful(w, w.update)
}

// stay begins anew the time for which the hub keeps w although nobody wants it. The caller
// holds mu.
func (h *Hub) stay(w *watched) {
	if w.in == &h.backlog.lingering {
		h.linger(w)
	}
}

// follow attaches a topic that nobody wants. It lingers from then on. The caller holds mu.
func (h *Hub) follow(t presence.Topic) {
	w := h.topics[t]
	if w == nil {
		w = h.watch(t)
	}
	switch {
	case w.refs > 0:
	case w.endpoint == attached:
		h.linger(w)
	case w.in != &h.backlog.fresh:
		w.join(&h.backlog.fresh)
		wake.Signal(h.wake)
	}
}

// readWith reads updates from the store with read.
func (h *Hub) readWith(ctx context.Context, topics []presence.Topic, read func(context.Context, []presence.Topic) ([]presence.Update, error)) ([]presence.Update, bool) {
	h.mu.Lock()
	doubtful := h.doubts&usersMissing != 0 // also if the doubt ends meanwhile
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()
	found, err := read(ctx, topics)
	updates := make([]presence.Update, len(topics)) // found may be shared
	copy(updates, found)
	for i, t := range topics {
		u := &updates[i]
		u.Stale = u.Stale || err != nil
		last, known := h.Last(t)
		recent, read := h.read.Get(t)
		switch {
		case u.Stale && known:
			*u = last
			u.Stale = true
		case u.Stale && read:
			*u = recent.update
			u.Stale = true
		case u.Stale:
			return nil, false
		case known && last.Newer(*u):
			*u = last
		default:
			h.Acknowledged(*u) // otherwise a later answer without the store could be older than this one
		}
		if !u.Stale {
			h.note(*u)
		}
		u.Stale = u.Stale || doubtful
	}
	return updates, true
}

// readShared reads updates from the store. Of one topic there is one call at a time.
func (h *Hub) readShared(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	read := func(ctx context.Context) ([]presence.Update, error) { return h.cfg.Store.Updates(ctx, topics) }
	if len(topics) > 1 {
		return read(ctx)
	}

	return h.reads.Read(ctx, topics[0].String(), readLimit, readLimit, read)
}
