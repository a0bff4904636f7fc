package fanout

import (
	"context"

	"headcount/presence"
)

// Newest reads the updates of topics for a caller who does not subscribe. They come from
// the store. While that is away, or has lost what it had, they are the last ones known
// here, marked as stale. It returns false if one is not known at all.
func (h *Hub) Newest(ctx context.Context, topics []presence.Topic) ([]presence.Update, bool) {
	h.mu.Lock()
	doubtful := h.doubts&usersMissing != 0 // also if the doubt ends meanwhile
	h.mu.Unlock()
	updates, err := h.cfg.Store.Updates(ctx, topics)
	if err != nil {
		updates = make([]presence.Update, len(topics))
		for i := range updates {
			updates[i].Stale = true
		}
	}
	for i, u := range updates {
		if !u.Stale {
			h.read.Add(topics[i], u)
			h.Acknowledged(u) // otherwise a later answer without the store could be older than this one
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
		updates[i].Stale = updates[i].Stale || doubtful
	}
	return updates, true
}
