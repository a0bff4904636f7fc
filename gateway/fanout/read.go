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
		if w := h.topics[t]; w != nil && h.currentLocked(w) {
			updates[i] = w.update
			h.stayLocked(w)
		} else {
			rest = append(rest, t)
			places = append(places, i)
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
		h.stayLocked(w)
		return
	}

	now := time.Since(h.born)
	last, known := h.read.Get(t)
	// While there is a doubt, following a topic would not spare the store a read of it.
	if known && now-last.at < readAgain && h.doubts == 0 {
		h.followLocked(t)
	}

	h.read.Add(t, reading{u, now})
}

// currentLocked reports whether the update of w is what the store would answer, but for updates
// that are on their way.
func (h *Hub) currentLocked(w *watched) bool {
	return w.known && w.endpoint == attached && !w.update.Stale && !h.doubtfulLocked(w, w.update)
}

// stayLocked begins anew the time for which the hub keeps w although nobody wants it.
func (h *Hub) stayLocked(w *watched) {
	if w.in == &h.backlog.lingering {
		h.lingerLocked(w)
	}
}

// followLocked attaches a topic that nobody wants. It lingers from then on.
func (h *Hub) followLocked(t presence.Topic) {
	w := h.topics[t]
	if w == nil {
		w = h.watchLocked(t)
	}

	switch {
	case w.refs > 0: // its subscribers have it attached
	case w.endpoint == attached:
		h.lingerLocked(w)
	case w.in != &h.backlog.fresh:
		w.join(&h.backlog.fresh)
		wake.Signal(h.wake)
	}
}

// readWith reads updates from the store with read.
func (h *Hub) readWith(
	ctx context.Context, topics []presence.Topic,
	read func(context.Context, []presence.Topic) ([]presence.Update, error),
) ([]presence.Update, bool) {
	h.mu.Lock()
	doubtful := h.doubts&usersMissing != 0 // also if the doubt ends meanwhile
	h.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()

	found, err := read(ctx, topics)

	updates := make([]presence.Update, len(topics)) // found may be shared
	copy(updates, found)
	for i := range topics {
		u := &updates[i]
		u.Stale = u.Stale || err != nil
		if !h.settleRead(topics[i], u) {
			return nil, false
		}

		if !u.Stale {
			h.note(*u)
		}
		u.Stale = u.Stale || doubtful // after note, which keeps what the store said
	}

	return updates, true
}

// settleRead replaces what the store returned for a topic by the newest update known here, if that is newer, or if
// the store's may lack something. It returns false if nothing is known.
func (h *Hub) settleRead(t presence.Topic, u *presence.Update) bool {
	last, known := h.Last(t)
	if !u.Stale {
		if known && last.Newer(*u) {
			*u = last
		} else {
			h.Acknowledged(*u) // otherwise a later answer without the store could be older than this one
		}

		return true
	}

	if !known {
		recent, read := h.read.Get(t)
		if !read {
			return false
		}
		last = recent.update
	}
	*u = last
	u.Stale = true

	return true
}

// readShared reads updates from the store. Of one topic there is one call at a time.
func (h *Hub) readShared(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	read := func(ctx context.Context) ([]presence.Update, error) { return h.cfg.Store.Updates(ctx, topics) }
	// Two callers seldom ask for the same list, and one call for each of its topics would be more work for the store.
	if len(topics) > 1 {
		return read(ctx)
	}

	return h.reads.Read(ctx, topics[0].String(), readLimit, readLimit, read)
}
