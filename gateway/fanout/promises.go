//go:build promises

package fanout

import (
	"time"

	"headcount/internal/promises"
	"headcount/presence"
)

// rests are the topics of a shard that have not changed lately.
type rests map[*topic]*rest

// rest is how long a topic has not changed, counted in sweeps, which stop while the process is suspended.
type rest struct {
	newest   presence.Update
	gen      uint32
	sweeps   int
	unmarked int                  // sweeps at which its update should have been marked as stale and was not
	lacking  map[*Subscriber]bool // subscribers that lacked the newest update at the last sweep without a reason
}

// markWithin is how long an update that the hub doubts may stay unmarked in a shard: another goroutine marks the topics
// one after the other. It is counted in sweeps, three at least.
const markWithin = 5 * time.Second

// checkNewestLocked ends the program in two cases: a topic has not changed for as long as any subscriber may wait, but
// a subscriber that accepts updates lacks the newest one; or an update that the hub doubts is not marked. A client that
// has just become free may lack the newest update for one sweep.
func (s *shard) checkNewestLocked() {
	marks := max(3, int(markWithin/s.live.tick()))
	// The longest interval, and some time for a pass on a busy machine.
	patience := int((max(maxInterval, s.interval) + 2*time.Second) / s.live.tick())
	// A subscriber with a scheduled visit gets the newest update then.
	visited := map[*Subscriber]bool{}
	for _, v := range s.visits {
		visited[v.sub] = true
	}

	still := rests{}
	for _, t := range s.topics {
		newest, known := s.hub.marked(t.name)
		r := s.rests[t]
		isSame := r != nil && r.newest.Version == newest.Version && r.newest.Stale == newest.Stale && r.gen == t.gen
		if !isSame {
			r = &rest{newest: newest, gen: t.gen}
		}
		r.sweeps++
		still[t] = r

		if known && newest.Stale && t.gen != 0 && !t.update.Stale {
			r.unmarked++
		}
		if r.unmarked > marks {
			promises.Broken("unmarked truth: %q is not marked as stale, and is doubted", t.name.Name())
		}

		if r.sweeps > patience {
			s.checkRestLocked(t, r, known, visited)
		}
	}
	s.rests = still
}

// checkRestLocked checks that nobody lacks the newest update of a topic that rests.
func (s *shard) checkRestLocked(t *topic, r *rest, known bool, visited map[*Subscriber]bool) {
	if known && r.newest.Version.Compare(t.update.Version) > 0 {
		promises.Broken("newest: the hub has version %s of %q, its subscribers %s",
			r.newest.Version, t.name.Name(), t.update.Version)
	}

	lacking := map[*Subscriber]bool{}
	for i := range t.subs {
		x := &t.subs[i]
		// A subscriber that does not take updates now gets the newest one later.
		takes := x.state == following && !x.sub.paused && !x.sub.missed && !x.sub.client.Busy()
		if !takes || x.gen == t.gen || visited[x.sub] {
			continue
		}

		if r.lacking[x.sub] {
			promises.Broken("newest: a subscriber of %q lacks version %s", t.name.Name(), t.update.Version)
		}
		lacking[x.sub] = true
	}
	r.lacking = lacking
}

// marked returns the newest update of a topic, marked as stale if the hub doubts it.
func (h *Hub) marked(t presence.Topic) (u presence.Update, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()

	w := h.topics[t]
	if w == nil || !w.known {
		return u, false
	}

	u = w.update
	u.Stale = u.Stale || h.doubtfulLocked(w, u)

	return u, true
}
