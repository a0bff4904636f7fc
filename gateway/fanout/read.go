package fanout

import (
	"context"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

const (
	readAgain = time.Second     // a topic that is read twice within this time is attached
	readLimit = 3 * time.Second // how long a caller waits for the store
)

// reading is the last read of a topic, and when it was made, relative to Hub.born.
type reading struct {
	update presence.Update
	at     time.Duration
}

// Newest returns the newest updates of topics to a caller that does not subscribe. Updates of attached topics come from
// memory, at no cost to the store. All others are read from the store, where concurrent reads of one topic share one
// call. While the store is unavailable, or has lost data, Newest returns the last known updates, marked as stale. After
// the process was suspended, everything is read from the store. Newest returns false if the update of any topic is
// unknown.
func (h *Hub) Newest(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	if h.standstill.Ended() {
		return h.Read(ctx, topics)
	}

	updates := make([]presence.Update, len(topics))
	var rest []presence.Topic // topics that must be read from the store
	var places []int          // index in topics of each element of rest

	h.mu.Lock()
	for i, t := range topics {
		u, known := h.knownLocked(t)
		if known {
			updates[i] = u
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

// Known is Newest of one topic, if its update comes from memory.
func (h *Hub) Known(t presence.Topic) (presence.Update, bool) {
	if h.standstill.Ended() {
		return presence.Update{}, false
	}

	h.mu.Lock()
	defer h.mu.Unlock()

	return h.knownLocked(t)
}

// knownLocked returns the update of a topic, if it is the one that the store would return. Whoever reads a topic keeps
// it attached.
func (h *Hub) knownLocked(t presence.Topic) (presence.Update, bool) {
	w := h.topics[t]
	if w == nil || !h.currentLocked(w) {
		return presence.Update{}, false
	}
	h.stayLocked(w)

	return w.update, true
}

// Read is Newest for a caller that must see everything that the store acknowledged before the call. Later calls of
// Newest do not share a read that began before.
func (h *Hub) Read(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	// A read that has begun already may lack what was acknowledged since.
	for _, t := range topics {
		h.reads.Forget(t.String())
	}

	return h.readWith(ctx, topics, h.cfg.Store.Updates)
}

// Touch records that a topic of a Source was read without a subscription. Any topic that is read twice within readAgain
// is attached until it has not been read for lingerFor.
func (h *Hub) Touch(t presence.Topic) { h.note(presence.Update{Topic: t}) }

// note remembers the last read of a topic that the hub does not have, and attaches the topic when it is read again
// soon.
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

// currentLocked reports whether the update of w is the one that the store would return, apart from updates that are on
// their way.
func (h *Hub) currentLocked(w *watched) bool {
	return w.known && w.endpoint == attached && !w.update.Stale && !h.doubtfulLocked(w, w.update)
}

// stayLocked restarts the time for which w lingers without subscribers.
func (h *Hub) stayLocked(w *watched) {
	if w.in == &h.backlog.lingering {
		h.lingerLocked(w)
	}
}

// followLocked attaches a topic without subscribers, which lingers from then on.
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

// readWith reads updates from the store with the given function.
func (h *Hub) readWith(
	ctx context.Context, topics []presence.Topic,
	read func(context.Context, []presence.Topic) ([]presence.Update, error),
) ([]presence.Update, bool) {
	h.mu.Lock()
	doubtful := h.doubts&usersMissing != 0 // even if the doubt ends during the read
	h.mu.Unlock()

	ctx, cancel := context.WithTimeout(ctx, readLimit)
	defer cancel()

	found, err := read(ctx, topics)

	// A copy, because found may be shared.
	updates := make([]presence.Update, len(topics))
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

// settleRead replaces the update that the store returned for a topic if a newer one is known here, or if the store's
// may be incomplete. It returns false if no update is known.
func (h *Hub) settleRead(t presence.Topic, u *presence.Update) bool {
	last, known := h.Last(t)
	if !u.Stale {
		if known && last.Newer(*u) {
			*u = last
		} else {
			// Otherwise a later answer from memory could be older than this one.
			h.Acknowledged(*u)
		}

		return true
	}

	if !known {
		// What was read lately is kept for topics that the hub does not have.
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

// readShared reads updates from the store. Concurrent reads of one topic share one call.
func (h *Hub) readShared(ctx context.Context, topics []presence.Topic) ([]presence.Update, error) {
	read := func(ctx context.Context) ([]presence.Update, error) { return h.cfg.Store.Updates(ctx, topics) }
	// Two callers seldom ask for the same list, and one call for each of its topics would be more work for the store.
	if len(topics) > 1 {
		return read(ctx)
	}

	return h.reads.Read(ctx, topics[0].String(), readLimit, readLimit, read)
}
