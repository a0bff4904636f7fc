package dispatcher

import (
	"slices"
	"sync"

	"headcount/presence"
)

// maxTop bounds the pages a dispatcher remembers the counts of, for Top alone.
// Beyond, the half with the fewest users is forgotten; such a page is known
// again with its next change.
const maxTop = 16_384

// top knows the counts of the pages people are on, of the buckets served: what
// was published since they are, and the pages that had subscribers before.
// Pages that only holds are on, and that have not changed since, are missing.
// Any goroutine may use it.
type top struct {
	mu    sync.Mutex
	pages map[int]map[string]presence.Count // by bucket; without those nobody is on
	size  int
}

// serve forgets the pages of buckets that are not served any more.
func (t *top) serve(buckets []int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kept := make(map[int]map[string]presence.Count, len(buckets))
	t.size = 0
	for _, b := range buckets {
		if pages := t.pages[b]; pages != nil {
			kept[b] = pages
			t.size += len(pages)
		}
	}
	t.pages = kept
}

// take takes counts of a bucket.
func (t *top) take(bucket int, counts []presence.Count) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range counts {
		pages := t.pages[bucket]
		old, known := pages[c.Page]
		switch {
		case known && old.Newer(c) || c.Stale: // a stale one may lack users
		case c.Users == 0:
			if known {
				delete(pages, c.Page)
				t.size--
			}
		case !known && presence.CheckPage(c.Page) != nil: // the whole site, or no page at all
		default:
			if pages == nil {
				pages = map[string]presence.Count{}
				t.pages[bucket] = pages
			}
			if pages[c.Page] = c; !known {
				t.size++
			}
		}
	}
	if t.size > maxTop {
		t.halve()
	}
}

// beside returns the pages it knows of a bucket that are not among the attached.
func (t *top) beside(bucket int, attached map[string][]string) (pages []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for page := range t.pages[bucket] {
		if _, both := attached[page]; !both {
			pages = append(pages, page)
		}
	}
	return pages
}

// halve forgets the half with the fewest users.
func (t *top) halve() {
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

// Top returns the n pages of the buckets served that most users are on, most
// first. It knows what was published since the buckets are served, and the
// pages that had subscribers before; pages on which only holds are may be
// missing. Any goroutine may call it.
func (d *Dispatcher) Top(n int) []presence.PageUsers {
	d.top.mu.Lock()
	defer d.top.mu.Unlock()
	all := d.top.sorted()
	return all[:min(n, len(all))]
}
