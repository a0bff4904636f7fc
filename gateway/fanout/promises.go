//go:build promises

package fanout

import (
	"time"

	"headcount/internal/promises"
	"headcount/presence"
)

// rests are the topics of a shard that have not changed lately.
type rests map[*topic]*rest

// rest is how long a topic has not changed, in sweeps: they stand still with the process.
type rest struct {
	newest  presence.Version
	gen     uint32
	sweeps  int
	lacking map[*Subscriber]bool // those who lacked the newest update at the last sweep, without an excuse
}

// checkNewestLocked ends the program if a topic has rested for as long as any subscriber may wait, and one of those who
// take updates lacks the newest one. A client that is just becoming free lacks it for one sweep.
func (s *shard) checkNewestLocked() {
	patience := int((max(maxInterval, s.interval) + 2*time.Second) / s.live.tick())
	visited := map[*Subscriber]bool{}
	for _, v := range s.visits {
		visited[v.sub] = true
	}

	still := rests{}
	for _, t := range s.topics {
		last, known := s.hub.Last(t.name)
		r := s.rests[t]
		if r == nil || r.newest != last.Version || r.gen != t.gen {
			r = &rest{newest: last.Version, gen: t.gen}
		}
		r.sweeps++
		still[t] = r
		if r.sweeps < patience {
			continue
		}

		if known && last.Version.Compare(t.update.Version) > 0 {
			promises.Broken("newest: the hub has version %s of %q, its subscribers %s",
				last.Version, t.name.Name(), t.update.Version)
		}

		lacking := map[*Subscriber]bool{}
		for i := range t.subs {
			x := &t.subs[i]
			takes := x.state == following && !x.sub.paused && !x.sub.missed && !x.sub.client.Busy()
			if takes && x.gen != t.gen && !visited[x.sub] {
				lacking[x.sub] = true
			}
			if lacking[x.sub] && r.lacking[x.sub] {
				promises.Broken("newest: a subscriber of %q lacks version %s", t.name.Name(), t.update.Version)
			}
		}
		r.lacking = lacking
	}
	s.rests = still
}
