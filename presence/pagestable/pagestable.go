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
// lacks waits like any count. A row is deleted if presence does not know its page, as after a restart of a process that
// keeps users in memory, or if no pattern fits the page any more; not, however, if another process has written it since
// it was read. Rows without users are deleted by time.
package pagestable

import (
	"context"
	"slices"
	"sync"
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

	// maxRows bounds the rows of one statement. After one that took tooLong the next has half as many, down to minRows.
	maxRows = 10_000
	minRows = 100
	tooLong = 2 * time.Second
)

// Pages reads the counts of pages. A presence store implements it.
type Pages interface {
	presence.Counters
	presence.Lister
}

// rows is the table. Its methods may be called from any goroutine. They may change the order of their arguments.
type rows interface {
	// Put writes counts by one statement, except those whose rows are as new.
	Put(ctx context.Context, counts []presence.Count) error
	// Lacking returns those of counts that are newer than their rows.
	Lacking(ctx context.Context, counts []presence.Count) ([]presence.Count, error)
	// Occupied returns up to limit rows with users, in the order of pages, after the one with that name.
	Occupied(ctx context.Context, after string, limit int) ([]presence.Count, error)
	// Drop deletes the rows that still have the versions of counts.
	Drop(ctx context.Context, counts []presence.Count) error
	// Sweep deletes rows that have been without users for a day, and those beyond maxEmpty.
	Sweep(ctx context.Context) error
	// Grant lets applications read the table. It reports whether the user may do so.
	Grant(ctx context.Context) (may bool, err error)
	Close()
}

// Config tunes a Table.
type Config struct {
	Patterns []string // of the keys of pages, on every site
	URL      string   // of PostgreSQL
	Pages    Pages
	// ComeBack is how long after the start the store may lack users who stay. Nothing is compared meanwhile.
	ComeBack   time.Duration
	Registerer prometheus.Registerer // of the metrics; nil: none
	Log        zerolog.Logger
}

// Table keeps the table of one process. It is a dispatcher.Watcher.
type Table struct {
	cfg     Config
	rows    rows
	metrics metrics
	size    int // rows of the next statement; of the goroutine that writes

	mu      sync.Mutex // guards all below
	waiting map[string]entry
	served  map[int]bool // buckets
	doubt   bool         // something may have been missed
}

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
	t := &Table{cfg: cfg, rows: rows, size: maxRows, waiting: map[string]entry{}, doubt: true}
	t.metrics = newMetrics(cfg.Registerer, t.lag)

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
func (t *Table) Serve(buckets []int) {
	served := map[int]bool{}
	for _, b := range buckets {
		served[b] = true
	}

	t.mu.Lock()
	defer t.mu.Unlock()

	t.served = served
}

// Received has the counts among updates written. It does not block.
func (t *Table) Received(updates []presence.Update) {
	for _, u := range updates {
		if u.Kind != presence.KindCount || !t.matches(u.Name()) {
			continue
		}
		if c, ok := presence.CountOf(u); ok {
			t.queue(c)
		}
	}
}

// Lost has the table compared soon, because updates may have been missed.
func (t *Table) Lost() { t.setDoubt(true) }

func (t *Table) setDoubt(is bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.doubt = is
}

// matches reports whether the table has the page. The total of a site is no page.
func (t *Table) matches(name string) bool {
	key := presence.KeyOf(name)
	if key == presence.AllPages {
		return false
	}

	return slices.ContainsFunc(t.cfg.Patterns, func(match string) bool { return counter.Matches(match, key) })
}

// queue has a count wait to be written, in place of an older one.
func (t *Table) queue(c presence.Count) {
	t.mu.Lock()
	defer t.mu.Unlock()

	old, waits := t.waiting[c.Page]
	isOld := waits && !c.Newer(old.Count)
	if !waits {
		old.since = time.Now()
	}

	isLeftOut := !waits && len(t.waiting) >= maxWaiting
	switch {
	case c.Stale: // it may lack users
		t.doubt = true
	case isLeftOut:
		t.doubt = true
		t.metrics.left.Inc()
	case !isOld:
		t.waiting[c.Page] = entry{c, old.since}
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

// writeEach makes the statements. Ticks that a slow one takes are dropped.
func (t *Table) writeEach(ctx context.Context) {
	log := outage.Log{
		Log: t.cfg.Log, What: "headcount_pages in PostgreSQL",
		Mend: "counts wait until it takes them: see whether PostgreSQL runs, and whether the table is locked",
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()

	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}

		counts := t.oldest(t.size)
		if len(counts) == 0 {
			continue
		}
		start := time.Now()
		err := t.rows.Put(ctx, counts)
		if ctx.Err() != nil {
			return
		}
		log.Note(err)
		t.resize(time.Since(start))
		t.wrote(counts, err)
	}
}

// oldest returns the counts that have waited longest.
func (t *Table) oldest(n int) []presence.Count {
	t.mu.Lock()
	defer t.mu.Unlock()

	entries := make([]entry, 0, len(t.waiting))
	for _, e := range t.waiting {
		entries = append(entries, e)
	}
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

// resize has a statement end before its connection gives up.
func (t *Table) resize(took time.Duration) {
	if took > tooLong {
		t.size = max(t.size/2, minRows)
	} else {
		t.size = min(2*t.size, maxRows)
	}
}

// wrote notes the outcome of a statement. What it was is not known after an error, so the counts go on waiting.
func (t *Table) wrote(counts []presence.Count, err error) {
	if err != nil {
		t.metrics.failures.Inc()
		t.Lost()

		return
	}

	t.mu.Lock()
	defer t.mu.Unlock()

	for _, c := range counts {
		e := t.waiting[c.Page]
		if !e.Newer(c) {
			delete(t.waiting, c.Page)
			continue
		}

		e.since = time.Now() // it came during the statement
		t.waiting[c.Page] = e
	}
}

// compareEach compares until ctx ends. It also lets applications read the table, once.
func (t *Table) compareEach(ctx context.Context) {
	log := outage.Log{
		Log: t.cfg.Log, What: "headcount_pages, for its comparison with presence,",
		Mend: "it is tried every few seconds: see whether the table is locked",
	}
	granted := false
	last := time.Now().Add(t.cfg.ComeBack - checkPause)
	for outage.Sleep(ctx, every) {
		granted = granted || t.grant(ctx)

		served, doubt := t.state()
		pause := checkEvery
		if doubt {
			pause = checkPause
		}
		if len(served) == 0 || time.Since(last) < pause {
			continue
		}

		t.setDoubt(false)
		err := t.compare(ctx, served)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			t.Lost()
		}
		if !isAway(err) {
			log.Note(err)
		}
		last = time.Now()
	}
}

func (t *Table) state() (served map[int]bool, doubt bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	return t.served, t.doubt
}

// grant reports whether there is nothing more to grant.
func (t *Table) grant(ctx context.Context) (done bool) {
	may, err := t.rows.Grant(ctx)
	if err != nil {
		return false
	}
	if !may {
		t.cfg.Log.Warn().Str("mend", "as an administrator: "+adminSQL+"; then start a server again").
			Msg("applications cannot read headcount_pages: the user of --postgres may not make the role headcount_app")
	}

	return true
}
