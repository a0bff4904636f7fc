package conn

import (
	"sync"

	"headcount/presence"
)

// Ignored returns the connections of crawlers on a page, or on all pages of the site whose total it is.
func (cs *Clients) Ignored(page string) int64 { return cs.crawlers.on(page) }

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
	if c.pages[page] == 0 { // crawlers go through all pages of a site
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
	// Somebody asks rarely, and crawlers come and go all the time, so totals are not kept.
	for name, more := range c.pages {
		if presence.TotalOf(name) == page {
			n += more
		}
	}

	return n
}
