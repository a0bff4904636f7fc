package roster

import (
	"time"

	"headcount/presence"
)

// Explain returns the connections that joined a page, or any page of the site whose total it is.
func (r *Roster) Explain(page string) (parts presence.Parts) {
	now := time.Now()
	isTotal := presence.TotalOf(page) == page

	for i := range r.streams {
		s := &r.streams[i]
		// One stream at a time, so that joins of the others go on.
		s.mu.Lock()
		for _, u := range s.users {
			if !isTotal {
				u.find(page).explain(&parts, now)
				continue
			}
			for _, e := range u.entries {
				if presence.TotalOf(e.page) == page {
					e.explain(&parts, now)
				}
			}
		}
		s.mu.Unlock()
	}

	return parts
}

// explain adds the connections of an entry to parts. A nil entry has none.
func (e *presenceEntry) explain(parts *presence.Parts, now time.Time) {
	if e == nil {
		return
	}

	parts.Connections += int64(e.live)

	state := e.state(now)
	parts.Moving = parts.Moving || state == moving || state == changed
}
