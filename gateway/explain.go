package gateway

import (
	"sync"
	"time"

	"headcount/presence"
)

// Explain returns what this gateway knows of the count of a page, or of a site.
func (g *Gateway) Explain(page string) presence.Parts {
	parts := g.roster.explain(page)
	parts.Ignored = g.crawlers.on(page)

	return parts
}

// explain returns the connections that joined a page, or any page of the site whose total it is.
func (r *roster) explain(page string) (parts presence.Parts) {
	now := time.Now()
	isTotal := presence.TotalOf(page) == page

	for i := range r.streams {
		s := &r.streams[i]
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

// explain adds the connections of an entry to parts; nil: there are none.
func (e *presenceEntry) explain(parts *presence.Parts, now time.Time) {
	if e == nil {
		return
	}

	parts.Connections += int64(e.live)

	state := e.state(now)
	parts.Moving = parts.Moving || state == moving || state == changed
}

// crowd counts the connections of crawlers on each page.
type crowd struct {
	mu    sync.Mutex
	pages map[string]int64
}

// add adds n connections to a page.
func (c *crowd) add(page string, n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if c.pages == nil {
		c.pages = map[string]int64{}
	}
	c.pages[page] += n
	if c.pages[page] == 0 {
		delete(c.pages, page)
	}
}

// on returns the connections on a page, or on all pages of the site whose total it is.
func (c *crowd) on(page string) (n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()

	if presence.TotalOf(page) != page {
		return c.pages[page]
	}
	for name, more := range c.pages {
		if presence.TotalOf(name) == page {
			n += more
		}
	}

	return n
}
