package dispatcher

import (
	"slices"
	"sync"

	"headcount/presence"
)

// maxTop bounds the pages whose counts a dispatcher keeps for Top. Beyond the bound it
// forgets the half with the fewest users; a page returns when its count changes.
const maxTop = 16_384

// top has the counts of pages with users in the buckets that are served: of pages that
// had subscribers when the bucket was read, and of pages that changed since. A page
// without subscribers, with holds alone, is missing until its count changes. Any goroutine
// may use top.
type top struct {
	mu    sync.Mutex
	pages map[int]map[string]presence.Count // by bucket; only pages with users
	size  int                               // pages in all buckets
}

// serve forgets the pages of buckets that are not served any more.
func (t *top) serve(buckets []int) {
	t.mu.Lock()
	defer t.mu.Unlock()

	// What stays served is kept, since its pages would come back only with their next change.
	remaining := make(map[int]map[string]presence.Count, len(buckets))
	t.size = 0
	for _, b := range buckets {
		if pages := t.pages[b]; pages != nil {
			remaining[b] = pages
			t.size += len(pages)
		}
	}

	t.pages = remaining
}

// update takes the counts among the updates of a bucket.
func (t *top) update(bucket int, updates []presence.Update) {
	t.mu.Lock()
	defer t.mu.Unlock()

	for _, u := range updates {
		c, ok := presence.CountOf(u)
		if !ok {
			continue
		}

		pages := t.pages[bucket]
		// A publication may be older than the read of the bucket.
		old, known := pages[c.Page]

		overtaken := known && old.Newer(c)
		if overtaken || c.Stale { // a stale count may lack users
			continue
		}

		if c.Users == 0 {
			if known {
				delete(pages, c.Page)
				t.size--
			}
			continue
		}

		if known {
			pages[c.Page] = c
			continue
		}

		// The total of a site is no page.
		if presence.KeyOf(c.Page) == presence.AllPages {
			continue
		}
		if pages == nil {
			pages = map[string]presence.Count{}
			t.pages[bucket] = pages
		}
		pages[c.Page] = c
		t.size++
	}

	// After all updates, so that a batch halves it once.
	if t.size > maxTop {
		t.halve()
	}
}

// unattached returns the topics of a bucket's pages that are not in attached.
func (t *top) unattached(bucket int, attached map[presence.Topic]presence.Incarnations) (topics []presence.Topic) {
	t.mu.Lock()
	defer t.mu.Unlock()

	for page := range t.pages[bucket] {
		topic := presence.CountTopic(page)
		if _, both := attached[topic]; !both {
			topics = append(topics, topic)
		}
	}

	return topics
}

// halve forgets the half with the fewest users.
func (t *top) halve() {
	// Half at once, so that the sort is rare.
	for _, c := range t.sorted()[t.size/2:] {
		for _, pages := range t.pages {
			if _, here := pages[c.Page]; here {
				delete(pages, c.Page)
				t.size--
				break
			}
		}
	}
}

// sorted returns all pages, those with the most users first.
func (t *top) sorted() []presence.PageUsers {
	all := make([]presence.PageUsers, 0, t.size)
	for _, pages := range t.pages {
		for _, c := range pages {
			all = append(all, presence.PageUsers{Page: c.Page, Users: c.Users})
		}
	}

	slices.SortFunc(all, presence.PageUsers.Compare)

	return all
}

// Top returns the n pages with the most users of each site and its n public ones with the
// most users, in the buckets that are served, the largest first. A page with holds alone
// may be missing. Any goroutine may call it.
func (d *Dispatcher) Top(n int) []presence.PageUsers {
	d.top.mu.Lock()
	defer d.top.mu.Unlock()

	of := map[presence.Site]int{} // pages of each site so far
	public := map[presence.Site]int{}

	// In order, so the counters say which place a page has among all of its site, and among the public ones.
	return slices.DeleteFunc(d.top.sorted(), func(p presence.PageUsers) bool {
		site, _ := presence.SplitName(p.Page)
		of[site]++
		if d.cfg.Public != nil && d.cfg.Public.Has(p.Page) {
			public[site]++
			return of[site] > n && public[site] > n
		}
		return of[site] > n
	})
}
