// Package pagestable keeps the table headcount_pages in PostgreSQL: the counts of pages, for applications to join with
// rows of their own. The table is a view of presence, and nothing is restored from it.
//
// # Writing
//
// Of each page the newest count waits. Once a second one statement writes the counts that have waited longest. It
// leaves a row alone that is as new, so it may be repeated, arrive late, and meet that of another process: while the
// owner of a page moves, two processes write its row.
//
// # Comparing
//
// Publications may be missed, and PostgreSQL may come back without its last commits. So the owner of a bucket compares
// the rows of its pages with the store of presence, soon if it knows of a reason and else once a minute. What a row
// lacks is written at once. A row is deleted if presence does not know its page, as after a restart of a process that
// keeps users in memory, or if no pattern fits the page any more; not, however, if another process has written it since
// it was read. Rows without users are deleted by time.
package pagestable

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/internal/outage"
	"headcount/presence"
)

const (
	every      = time.Second     // between two statements
	checkEvery = time.Minute     // between two comparisons
	checkPause = 5 * time.Second // the same, if something may have been missed

	// maxWaiting bounds the pages whose counts wait. Further ones come with the next comparison.
	maxWaiting = 100_000
	maxEmpty   = 100_000 // rows without users; beyond, those go first that have been empty longest
	readBatch  = 1024    // counts that are read at once

	// maxRows bounds the rows of one statement. After one that took tooLong the next has half as many, down to minRows.
	maxRows = 10_000
	minRows = 100
	tooLong = 2 * time.Second
)

// errStale means that the store of presence may lack users.
var errStale = errors.New("counts are stale")

// Pages reads the counts of pages. A presence store implements it.
type Pages interface {
	presence.Counters
	presence.Lister
}

// rows is the table. Its methods may be called from any goroutine, and change the order of their arguments.
type rows interface {
	// Put writes counts by one statement, except those whose rows are as new.
	Put(ctx context.Context, counts []presence.Count) error
	// Drop deletes the rows that still have the versions of counts.
	Drop(ctx context.Context, counts []presence.Count) error
	// Occupied returns up to limit rows with users, in the order of pages, after the one with that name.
	Occupied(ctx context.Context, after string, limit int) ([]presence.Count, error)
	// Sweep deletes rows that have been without users for a day, and those beyond maxEmpty.
	Sweep(ctx context.Context) error
	// Grant lets applications read the table, if the user may do so.
	Grant(ctx context.Context) error
	Close()
}

// Config tunes a Table.
type Config struct {
	Patterns []string // of the keys of pages, on every site
	URL      string   // of PostgreSQL
	Pages    Pages
	// ComeBack is how long after the start the store may lack users who stay. Nothing is compared meanwhile.
	ComeBack   time.Duration
	Registerer prometheus.Registerer
	Log        zerolog.Logger
}

// Table keeps the table of one process. It is a dispatcher.Watcher.
type Table struct {
	cfg      Config
	rows     rows
	failures prometheus.Counter
	doubt    atomic.Bool // something may have been missed

	mu      sync.Mutex // guards all below
	waiting map[string]entry
	served  buckets
}

type buckets [presence.DefaultBuckets]bool

func (b *buckets) has(page string) bool { return b[presence.Bucket(page, presence.DefaultBuckets)] }

// entry is a count that waits.
type entry struct {
	presence.Count
	since time.Time // when the oldest change came that the row lacks
}

// Open returns a Table that does nothing until Run. It fails, with postgres.ErrConfig, if settings cannot work or the
// database that answered cannot be used; one that does not answer is waited for.
func Open(ctx context.Context, cfg Config) (*Table, error) {
	rows, err := openRows(ctx, cfg.URL)
	if err != nil {
		return nil, err
	}

	return newTable(cfg, rows), nil
}

func newTable(cfg Config, rows rows) *Table {
	t := &Table{cfg: cfg, rows: rows, waiting: map[string]entry{}}
	// What the table has at the start is not known.
	t.doubt.Store(true)

	t.failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "headcount_pages_table_failures_total",
		Help: "Statements and comparisons of headcount_pages that failed; they are tried again.",
	})
	cfg.Registerer.MustRegister(t.failures, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "headcount_pages_table_lag_seconds",
		Help: "Age of the oldest change of a count of this process's pages that headcount_pages lacks.",
	}, t.lag))

	return t
}

// Close ends the connections. It is called after Run.
func (t *Table) Close() error {
	t.rows.Close()

	return nil
}

// Run writes and compares until ctx ends.
func (t *Table) Run(ctx context.Context) {
	var wg sync.WaitGroup
	wg.Go(func() { t.writeEach(ctx) })
	wg.Go(func() { t.compareEach(ctx) })
	wg.Wait()
}

// Serve sets the buckets whose rows this process keeps. The feed reports each new one as lost.
func (t *Table) Serve(served []int) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.served = buckets{}
	for _, b := range served {
		t.served[b] = true
	}
}

// Lost has the table compared soon, because updates may have been missed.
func (t *Table) Lost() { t.doubt.Store(true) }

// Received has the counts among updates written. It does not block.
func (t *Table) Received(updates []presence.Update) {
	for _, u := range updates {
		c, ok := presence.CountOf(u)
		// The feed has all pages and kinds of the served buckets.
		if ok && t.matches(c.Page) {
			t.queue(c)
		}
	}
}

// matches reports whether the table has the page. The total of a site is no page.
func (t *Table) matches(name string) bool {
	key := presence.KeyOf(name)
	if key == presence.AllPages {
		return false
	}

	return slices.ContainsFunc(t.cfg.Patterns, func(match string) bool { return counter.Matches(match, key) })
}

// queue has a count wait to be written, in place of an older one. A stale one may lack users: it is read later.
func (t *Table) queue(c presence.Count) {
	t.mu.Lock()
	defer t.mu.Unlock()

	e, waits := t.waiting[c.Page]
	// A count that replaces an older one keeps its place: the page that waits longest is written first.
	if !waits {
		e.since = time.Now()
	}

	isLeftOut := !waits && len(t.waiting) >= maxWaiting
	if c.Stale || isLeftOut {
		t.doubt.Store(true)
	} else if c.Newer(e.Count) {
		t.waiting[c.Page] = entry{c, e.since}
	}
}

// lag returns how long the oldest change has waited.
func (t *Table) lag() float64 {
	t.mu.Lock()
	defer t.mu.Unlock()

	var oldest time.Duration
	for _, e := range t.waiting {
		oldest = max(oldest, time.Since(e.since))
	}

	return oldest.Seconds()
}

// writeEach makes the statements. It also lets applications read the table, once.
func (t *Table) writeEach(ctx context.Context) {
	log := outage.Log{
		Log: t.cfg.Log, What: "headcount_pages in PostgreSQL",
		Mend: "counts wait until it takes them: see whether PostgreSQL runs, and whether the table is locked",
	}
	ticker := time.NewTicker(every) // it drops ticks during a slow statement
	defer ticker.Stop()

	granted := false
	for size := maxRows; ; {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}

		// Until it succeeds, because PostgreSQL may be away at the start.
		if !granted {
			granted = t.rows.Grant(ctx) == nil
		}
		counts := t.oldest(size)
		if len(counts) == 0 {
			continue
		}

		start := time.Now()
		err := t.rows.Put(ctx, counts)
		if ctx.Err() != nil {
			return
		}
		log.Note(err)
		t.wrote(counts, err)

		size = min(2*size, maxRows)
		// A long statement holds locks for long, and what changes meanwhile waits for its end.
		if time.Since(start) > tooLong {
			size = max(len(counts)/2, minRows)
		}
	}
}

// oldest returns the counts that have waited longest.
func (t *Table) oldest(n int) []presence.Count {
	// A copy, because publications must not wait for the statement.
	t.mu.Lock()
	entries := slices.Collect(maps.Values(t.waiting))
	t.mu.Unlock()

	if len(entries) > n {
		slices.SortFunc(entries, func(a, b entry) int { return a.since.Compare(b.since) })
		entries = entries[:n]
	}

	counts := make([]presence.Count, len(entries))
	for i, e := range entries {
		counts[i] = e.Count
	}

	return counts
}

// wrote notes the outcome of a statement. After an error it is not known what was made, so the counts go on waiting.
func (t *Table) wrote(counts []presence.Count, err error) {
	if err != nil {
		t.failures.Inc()
		t.Lost() // PostgreSQL may come back older

		return
	}

	t.mu.Lock()
	defer t.mu.Unlock()

	for _, c := range counts {
		e := t.waiting[c.Page]
		// The row has the newest count.
		if !e.Newer(c) {
			delete(t.waiting, c.Page)
			continue
		}

		e.since = time.Now() // it came during the statement
		t.waiting[c.Page] = e
	}
}

// compareEach compares until ctx ends.
func (t *Table) compareEach(ctx context.Context) {
	// So that the first comparison comes ComeBack after the start.
	last := time.Now().Add(t.cfg.ComeBack - checkPause)
	for outage.Sleep(ctx, every) {
		pause := checkEvery
		if t.doubt.Load() {
			pause = checkPause
		}

		t.mu.Lock()
		served := t.served
		t.mu.Unlock()
		if served == (buckets{}) || time.Since(last) < pause {
			continue
		}

		// Before the comparison, because what is missed during it calls for another one.
		t.doubt.Store(false)
		if err := t.compare(ctx, served); err != nil && ctx.Err() == nil {
			t.failures.Inc()
			t.Lost()
			t.cfg.Log.Debug().Err(err).Msg("headcount_pages could not be compared with presence; retrying")
		}
		last = time.Now()
	}
}

// compare compares the rows of the served buckets with the store of presence: those that say that a page has users, and
// those of pages that have some.
func (t *Table) compare(ctx context.Context, served buckets) error {
	isOther := func(row presence.Count) bool { return !served.has(row.Page) }
	// First the rows with users, which alone show pages that presence does not know.
	for last := ""; ; {
		some, err := t.rows.Occupied(ctx, last, maxRows)
		if err != nil {
			return err
		}
		if len(some) == 0 {
			break
		}

		last = some[len(some)-1].Page
		if err := t.refresh(ctx, slices.DeleteFunc(some, isOther)); err != nil {
			return err
		}
	}

	var some []presence.Count
	var failed error
	// Then the pages with users, of which there may be no row.
	err := t.cfg.Pages.Pages(ctx, func(names []string) {
		for _, name := range names {
			if served.has(name) && t.matches(name) {
				some = append(some, presence.Count{Page: name})
			}
			if len(some) == maxRows {
				failed = errors.Join(failed, t.refresh(ctx, some))
				some = some[:0]
			}
		}
	})
	if err := errors.Join(err, failed, t.refresh(ctx, some)); err != nil {
		return err
	}

	return t.rows.Sweep(ctx)
}

// refresh writes the counts of pages that are newer than their rows, and deletes rows that should not be there. A page
// whose row is not known has the zero Version.
func (t *Table) refresh(ctx context.Context, all []presence.Count) error {
	var news, gone []presence.Count
	for some := range slices.Chunk(all, readBatch) {
		names := make([]string, len(some))
		for i := range some {
			names[i] = some[i].Page
		}

		counts, err := t.cfg.Pages.Counts(ctx, names)
		if err != nil {
			return err
		}

		for i, c := range counts {
			isUnknown := c.Version == presence.Version{}
			// A count that may lack users changes no row, and deletes none.
			if c.Stale {
				return errStale
			}
			if isUnknown || !t.matches(c.Page) {
				gone = append(gone, some[i])
			} else if c.Newer(some[i]) && c.Users+some[i].Users > 0 { // an empty page needs no row
				news = append(news, c)
			}
		}
	}

	if len(gone) > 0 {
		if err := t.rows.Drop(ctx, gone); err != nil {
			return err
		}
	}
	if len(news) > 0 {
		return t.rows.Put(ctx, news)
	}

	return nil
}
