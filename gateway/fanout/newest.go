package fanout

import (
	"context"

	"headcount/presence"
)

// Newest reads the updates of topics, for who does not subscribe: from the
// store, or while that is away, or has lost what it had, the last one known here,
// as stale. It is false when one is not known at all.
func (h *Hub) Newest(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	h.mu.Lock()
	doubt := h.doubt // for as long as it takes to answer
	h.mu.Unlock()
	updates, err := h.store.Updates(ctx, topics)
	if err != nil {
		updates = make([]presence.Update, len(topics))
		for i := range updates {
			updates[i].Stale = true
		}
	}
	for i, u := range updates {
		if !u.Stale {
			h.read.Add(topics[i], u)
			h.Acknowledged(u) // else a later answer without the store could be older than this one
		}
		last, known := h.Last(topics[i])
		if !known && u.Stale {
			last, known = h.read.Get(topics[i])
		}
		switch {
		case u.Stale && !known:
			return nil, false
		case u.Stale:
			updates[i] = last
			updates[i].Stale = true
		case known && last.Newer(u):
			updates[i] = last
		}
		updates[i].Stale = updates[i].Stale || doubt
	}
	return updates, true
}
