package webhook

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"headcount/internal/outage"
	"headcount/internal/wake"
	"headcount/presence"
)

const (
	// maxPages bounds the pages with changed counts, and the pages with a state of each hook. Beyond
	// the bound a page is left out until its next change.
	maxPages = 100_000

	roundEvery = 100 * time.Millisecond // least time between two rounds
	retryAfter = time.Second            // after a failure, or a stale count
	readBatch  = 256                    // counts in one read
	dayLayout  = time.DateOnly

	// All pages of the store are scanned scanAfter after this process begins to serve a bucket. They are
	// also scanned when changes may have been missed, but at most once in scanEvery.
	scanAfter = time.Second
	scanEvery = time.Minute
)

// pages reports changes of pages. It compares the counts that it receives with the state last reported,
// and makes a Change where they differ. Only the goroutine of run uses the fields after those that mu guards.
type pages struct {
	service *Service
	hooks   []*Hook
	wake    chan struct{} // holds one: changed is not empty, or reload is set

	mu         sync.Mutex                // guards the fields up to the blank line
	changed    map[string]presence.Count // newest counts by page, for the next round; at most maxPages
	since      time.Time                 // when the first of changed came
	served     map[int]bool              // buckets
	reload     bool                      // served has changed, or updates may have been missed
	newBuckets bool                      // served has new buckets

	known    map[subject]*state // subjects with a reported state, or that are due; at most maxPages for each hook
	due      map[subject]*state // the elements of known whose dueAt is set
	day      string             // of the last round
	nextScan time.Time          // when to scan all pages; zero: not scheduled
	lastScan time.Time
	store    failing
}

// subject is a page as one hook sees it.
type subject struct {
	hook *Hook
	name string
}

// state is the state of a subject.
type state struct {
	reported   string           // the state last reported, see Change.Is
	belowSince time.Time        // since when the count is lower than the reported state; zero: it is not
	below      presence.Version // of the count at belowSince
	peak       int64            // a new peak that is not reported yet; 0: none
	peakDay    string           // the day of peak
	dueAt      time.Time        // when to read the count and judge it again; zero: at the next change
}

func newPages(s *Service, hooks []*Hook) *pages {
	return &pages{
		service: s,
		hooks:   hooks,
		wake:    make(chan struct{}, 1),
		changed: map[string]presence.Count{},
		served:  map[int]bool{},
		known:   map[subject]*state{},
		due:     map[subject]*state{},
	}
}

func (p *pages) serve(buckets []int) {
	defer wake.Signal(p.wake)

	p.mu.Lock()
	defer p.mu.Unlock()

	served := map[int]bool{}
	for _, b := range buckets {
		served[b] = true
		p.newBuckets = p.newBuckets || !p.served[b]
	}
	p.served = served
	p.reload = true
}

func (p *pages) receive(updates []presence.Update) {
	changed := false
	p.mu.Lock()
	for _, u := range updates {
		if u.Kind == presence.KindCount {
			changed = p.queueLocked(u) || changed
		}
	}
	p.mu.Unlock()

	if changed {
		wake.Signal(p.wake)
	}
}

// queueLocked queues a count for the next round, unless a newer one of the page is queued.
func (p *pages) queueLocked(u presence.Update) bool {
	name := u.Name()
	c, ok := presence.CountOf(u)
	// Pages without a hook must not take the place of others.
	matches := slices.ContainsFunc(p.hooks, func(h *Hook) bool { return h.matches(name) })
	if !ok || !matches {
		return false
	}

	old, known := p.changed[name]
	if known && old.Newer(c) {
		return false
	}
	if !known && len(p.changed) >= maxPages {
		p.service.metrics.left.WithLabelValues("page").Inc()
		return false
	}

	if len(p.changed) == 0 {
		p.since = time.Now()
	}
	p.changed[name] = c

	return true
}

// lost schedules a reload of the reported states and their counts, because updates may have been missed.
func (p *pages) lost() {
	p.mu.Lock()
	p.reload = true
	p.mu.Unlock()
	wake.Signal(p.wake)
}

// run judges the counts that changed or are due, in rounds, until ctx ends.
func (p *pages) run(ctx context.Context) {
	failed := false // the last load
	for ctx.Err() == nil {
		work := p.take()
		now := time.Now()
		reloads := work.reload || failed
		scans := !p.nextScan.IsZero() && !now.Before(p.nextScan)
		// Before a scan once more: the process that served a bucket before may still have reported a page.
		if reloads || scans {
			err := p.load(ctx, work.served, now, reloads)
			p.store.note(ctx, p.service.cfg.Log, err)
			failed = err != nil
		}
		if reloads {
			p.scheduleScan(now)
		}
		if scans {
			p.scan(ctx, work.served, now)
		}

		p.startDay(now)
		r := round{pages: p, now: now}
		r.judgeEach(work)
		r.report(ctx, work.since)
		p.readDue(ctx, &r)

		// Meanwhile counts of busy pages replace each other.
		if !outage.Sleep(ctx, roundEvery) {
			return
		}
		wake.Wait(ctx, p.next(failed), p.wake)
	}
}

// work is the input of a round.
type work struct {
	changed map[string]presence.Count
	since   time.Time // when the first of changed came
	served  map[int]bool
	reload  bool
}

// take returns the work that has arrived since the last round.
func (p *pages) take() work {
	p.mu.Lock()
	defer p.mu.Unlock()

	w := work{changed: p.changed, since: p.since, served: p.served, reload: p.reload}
	// A bucket that is new here has pages that no scan of this process has seen, so the next one need not wait.
	if p.newBuckets {
		p.lastScan = time.Time{}
	}
	// A new map, since the round reads the old one without the lock.
	p.changed = map[string]presence.Count{}
	p.reload = false
	p.newBuckets = false

	return w
}

// scheduleScan has all pages scanned soon, and not more often than once in scanEvery.
func (p *pages) scheduleScan(now time.Time) {
	at := now.Add(scanAfter)
	next := p.lastScan.Add(scanEvery)
	if next.After(at) {
		at = next
	}

	if p.nextScan.IsZero() || at.Before(p.nextScan) {
		p.nextScan = at
	}
}

// serves reports whether the page is in one of the served buckets.
func serves(served map[int]bool, page string) bool {
	return served[presence.Bucket(page, presence.DefaultBuckets)]
}

// startDay makes all subjects of peaks due when a day has begun: the count at that moment is the first peak
// of the day.
func (p *pages) startDay(now time.Time) {
	today := now.UTC().Format(dayLayout)
	if today == p.day {
		return
	}

	p.day = today
	for s, t := range p.known {
		// A page that is due is judged in this round anyway, or is about to report the peak of the day before.
		if s.hook.condition == peak && t.dueAt.IsZero() {
			p.set(s, t, now)
		}
	}
}

// next returns the time until a subject is due, a scan or, if the last one failed, a reload is, or the day ends.
func (p *pages) next(failed bool) time.Duration {
	wait := time.Until(time.Now().Truncate(24 * time.Hour).Add(24 * time.Hour))
	if failed {
		wait = retryAfter
	}
	if !p.nextScan.IsZero() {
		wait = min(wait, time.Until(p.nextScan))
	}
	for _, t := range p.due {
		wait = min(wait, time.Until(t.dueAt))
	}

	return max(wait, 0)
}

// load reads the reported states of the pages in the served buckets. It makes those pages due whose state has changed,
// or all of them, because their counts may have changed unnoticed. It forgets the pages of other buckets.
func (p *pages) load(ctx context.Context, served map[int]bool, now time.Time, all bool) error {
	known := map[subject]*state{}
	for _, h := range p.hooks {
		last, err := p.service.cfg.Store.Reported(ctx, h.ID)
		if err != nil {
			return err
		}

		for name, what := range last {
			if !serves(served, name) || len(known) >= p.most() {
				continue
			}
			s := subject{h, name}
			// What this process knows besides stays: since when a count is low, and a new peak.
			known[s] = cmp.Or(p.known[s], &state{})
			known[s].isReported(what, now, all)
		}
	}

	for s, t := range p.known { // not reported yet, or reported and lost by the store
		if known[s] == nil && serves(served, s.name) {
			known[s] = t
			t.isReported("", now, all)
		}
	}

	p.known = known
	p.due = map[subject]*state{}
	for s, t := range known {
		if !t.dueAt.IsZero() {
			p.due[s] = t
		}
	}

	return nil
}

// isReported records the reported state that the store returned for a subject. If it has changed, or anyway, the
// subject is judged against it again.
func (t *state) isReported(what string, now time.Time, anyway bool) {
	if anyway || t.reported != what {
		t.dueAt = now
	}
	t.reported = what
}

// most is how many subjects may have a state.
func (p *pages) most() int { return maxPages * len(p.hooks) }

// scan makes all pages due that match a hook and have no state: their first report may have been missed.
func (p *pages) scan(ctx context.Context, served map[int]bool, now time.Time) {
	err := p.service.cfg.Pages.Pages(ctx, func(names []string) {
		for _, name := range names {
			if serves(served, name) {
				p.find(name, now)
			}
		}
	})
	p.store.note(ctx, p.service.cfg.Log, err)
	if err != nil {
		p.nextScan = now.Add(outage.Jitter(retryAfter))
		return
	}

	p.nextScan = time.Time{}
	p.lastScan = now
}

// find makes a page due for the hooks that match and have no state of it.
func (p *pages) find(name string, now time.Time) {
	for _, h := range p.hooks {
		s := subject{h, name}
		// What is known is judged at its changes, and need not be read.
		if p.known[s] != nil || !h.matches(name) {
			continue
		}

		if t := p.stateOf(s); t != nil {
			p.set(s, t, now)
		}
	}
}

// stateOf returns the state of a subject, nil if there are too many.
func (p *pages) stateOf(s subject) *state {
	t := p.known[s]
	switch {
	case t != nil:
		return t
	case len(p.known) >= p.most():
		p.service.metrics.left.WithLabelValues("page").Inc()
		return nil
	default:
		return &state{}
	}
}

// readDue reads the counts of the subjects that are due, judges them, and reports their changes.
func (p *pages) readDue(ctx context.Context, r *round) {
	of := map[string][]subject{}
	var names []string
	for s, t := range p.due {
		if t.dueAt.After(r.now) {
			continue
		}
		if of[s.name] == nil {
			names = append(names, s.name)
		}
		of[s.name] = append(of[s.name], s)
	}

	for chunk := range slices.Chunk(names, readBatch) {
		seen := time.Now()
		counts, err := p.service.cfg.Pages.Counts(ctx, chunk)
		for i, name := range chunk {
			for _, s := range of[name] {
				if err != nil {
					// With jitter, or all of them would be read at the same moment again.
					p.set(s, p.known[s], r.now.Add(outage.Jitter(retryAfter)))
					continue
				}
				r.judge(s, counts[i], true)
			}
		}

		// Each chunk at once: what was read long ago is not reported.
		r.report(ctx, seen)
	}
}

// set sets when a subject is due; zero: at its next change. It forgets a subject that is not due and has no
// reported state.
func (p *pages) set(s subject, t *state, at time.Time) {
	t.dueAt = at
	switch {
	case !at.IsZero():
		p.known[s] = t
		p.due[s] = t
	case t.reported == "":
		delete(p.due, s)
		delete(p.known, s)
	default:
		p.known[s] = t
		delete(p.due, s)
	}
}

// round collects the changes of one round.
type round struct {
	pages    *pages
	now      time.Time
	subjects []subject
	changes  []Change
}

// judgeEach judges the counts that have changed, of the served buckets.
func (r *round) judgeEach(w work) {
	for name, c := range w.changed {
		// The bucket has moved since: its new owner judges the page.
		if !serves(w.served, name) {
			continue
		}
		for _, h := range r.pages.hooks {
			if h.matches(name) {
				r.judge(subject{h, name}, c, false)
			}
		}
	}
}

// judge compares a count with the reported state. A rise is reported at once. A fall is reported only when
// the count has been low for Settle and was then read from the store; read says that it was read just now.
func (r *round) judge(s subject, c presence.Count, read bool) {
	p := r.pages
	t := p.stateOf(s)
	switch {
	case t == nil:
		return
	case c.Stale: // it may lack users
		p.set(s, t, r.now.Add(outage.Jitter(retryAfter)))
		return
	case s.hook.condition == peak:
		r.judgePeak(s, t, c)
		return
	case s.hook.condition == everyCount:
		r.judgeCount(s, t, c, read)
		return
	}

	is := ""
	// The limit of an occupation is 0.
	if c.Users > s.hook.limit {
		is = "1"
	}
	switch {
	case is == t.reported:
		t.belowSince = time.Time{}
		p.set(s, t, time.Time{})
	case is != "":
		t.belowSince = time.Time{}
		r.change(s, t, c, is)
	default:
		r.judgeFall(s, t, c, read)
	}
}

// judgeCount reports a count that differs from the one last reported, and not sooner than every after that. read says
// that the count was read just now.
func (r *round) judgeCount(s subject, t *state, c presence.Count, read bool) {
	last := parseReportedCount(t.reported)
	next := last.at.Add(s.hook.every)

	changed := c.Users != last.users
	// A publication may be older than the count of the last event, or a clock that went back has given all counts lower
	// versions. Only a read tells.
	isUnsure := changed && !read && c.Version.Compare(last.version) < 0
	// Clocks differ, and are set: the last event may have a time that is far ahead.
	isRecent := r.now.Sub(last.at).Abs() < s.hook.every
	// Nobody need know any more when the last event was, so the state can go when the interval is over.
	empty := t.reported != "" && last.users == 0 && !changed
	waits := (changed || empty) && isRecent
	switch {
	case waits:
		r.pages.set(s, t, next)
	case isUnsure:
		r.pages.set(s, t, r.now)
	case changed:
		r.change(s, t, c, reportedCount{c.Users, c.Version, r.now}.String())
	case empty: // the interval is over, so that nothing need be remembered of the page
		r.change(s, t, c, "")
	default:
		r.pages.set(s, t, time.Time{})
	}
}

// reportedCount is the reported state of everyCount: the count of the last event, and its time. The empty state is the
// zero reportedCount.
type reportedCount struct {
	users   int64
	version presence.Version
	at      time.Time
}

func (l reportedCount) String() string {
	return fmt.Sprintf("%d %s %d", l.users, l.version, l.at.UnixMilli())
}

func parseReportedCount(state string) (last reportedCount) {
	fields := strings.Fields(state)
	if len(fields) != 3 {
		return last
	}

	ms, _ := strconv.ParseInt(fields[2], 10, 64) // String wrote it
	last.at = time.UnixMilli(ms)
	last.users, _ = strconv.ParseInt(fields[0], 10, 64)
	last.version, _ = presence.ParseVersion(fields[1])

	return last
}

// judgeFall reports a count as low when it has been so for Settle. A received count may be older than the store's, so
// only a count that was just read decides.
func (r *round) judgeFall(s subject, t *state, c presence.Count, read bool) {
	if t.belowSince.IsZero() || r.mayHaveRisen(s, t, c) {
		t.belowSince = r.now
		t.below = c.Version
	}

	settled := t.belowSince.Add(r.pages.service.cfg.Settle)
	if read && !r.now.Before(settled) {
		r.change(s, t, c, "")
		return
	}

	r.pages.set(s, t, settled)
}

// mayHaveRisen reports whether a count that is low may have been high, unnoticed, since it was noticed to be low.
func (r *round) mayHaveRisen(s subject, t *state, c presence.Count) bool {
	// Whoever was on the page has changed the version of its count.
	if s.hook.condition == occupation {
		return c.Version != t.below
	}

	return r.pages.service.isLate(t.belowSince.Add(r.pages.service.cfg.Settle), r.now)
}

// judgePeak keeps a new peak for Settle, while it may rise further, and then reports it.
func (r *round) judgePeak(s subject, t *state, c presence.Count) {
	today := r.now.UTC().Format(dayLayout)
	day, greatest := parsePeak(t.reported)
	if t.peakDay == day && t.peak <= greatest { // another process has reported it
		t.peak = 0
	}
	// The day of the new peak is over, so it rises no further.
	if t.peak > 0 && t.peakDay < today {
		r.change(s, t, c, peakOf(t.peakDay, t.peak))
		return
	}

	// The reported peak is one of another day.
	if day != today {
		greatest = 0
	}
	if c.Users > max(greatest, t.peak) {
		// Settle counts from the first rise, or a count that rises all day would never be reported.
		if t.peak == 0 {
			t.dueAt = r.now.Add(r.pages.service.cfg.Settle)
		}
		t.peak = c.Users
		t.peakDay = today
	}

	isObsolete := t.reported != "" && day != today && c.Users == 0
	switch {
	case t.peak > 0:
		r.judgeNewPeak(s, t, c)
	case isObsolete: // nobody asks for a state of an earlier day
		r.change(s, t, c, "")
	default:
		r.pages.set(s, t, time.Time{})
	}
}

// judgeNewPeak reports a peak that had its time to rise.
func (r *round) judgeNewPeak(s subject, t *state, c presence.Count) {
	if t.dueAt.After(r.now) {
		r.pages.set(s, t, t.dueAt)
		return
	}

	r.change(s, t, c, peakOf(t.peakDay, t.peak))
}

func peakOf(day string, greatest int64) string { return day + " " + strconv.FormatInt(greatest, 10) }

func parsePeak(s string) (day string, greatest int64) {
	day, number, _ := strings.Cut(s, " ")
	greatest, _ = strconv.ParseInt(number, 10, 64)

	return day, greatest
}

// change adds a change of the subject's reported state to is.
func (r *round) change(s subject, t *state, c presence.Count, is string) {
	kind := s.hook.event(is)
	change := Change{Hook: s.hook.ID, Subject: s.name, Was: t.reported, Is: is, kind: kind}
	if kind != "" {
		e := newEvent(kind, s.name)
		e.Page = presence.KeyOf(s.name)
		e.Count = &c.Users
		e.Version = c.Version.String()

		switch kind {
		case Peak: // of some count before this one
			e.Count = &t.peak
			e.Day = t.peakDay
			e.Version = ""
		case Over:
			e.Threshold = &s.hook.limit
		}
		change.Event = e.encode()
	}

	r.pages.set(s, t, r.now.Add(outage.Jitter(retryAfter))) // in case the report fails
	r.subjects = append(r.subjects, s)
	r.changes = append(r.changes, change)
}

// event returns the type of the event when the reported state of a page becomes is; empty: there is none.
func (h *Hook) event(is string) string {
	// A count that falls to its threshold has no event, and no peak or interval has one when it ends.
	if is == "" {
		return map[condition]string{occupation: Vacated}[h.condition]
	}

	return map[condition]string{occupation: Occupied, threshold: Over, peak: Peak, everyCount: Count}[h.condition]
}

// report reports the collected changes, which were judged by counts of the time seen. Subjects whose change could not
// be reported stay due, so that their counts are read.
func (r *round) report(ctx context.Context, seen time.Time) {
	if len(r.changes) == 0 {
		return
	}

	p := r.pages
	now, err := p.service.report(ctx, seen, r.changes)
	p.store.note(ctx, p.service.cfg.Log, err)
	// The store may have made some of the changes. But if they were late, it has not been asked.
	if err != nil && !errors.Is(err, errLate) {
		p.lost()
	}

	for i, last := range now {
		s := r.subjects[i]
		t := p.known[s]
		// The store has this state now, whoever reported it, so the next change has to replace it.
		t.reported = last
		if last != r.changes[i].Is {
			continue // another process reported a change: the subject is due and is judged again
		}

		t.belowSince = time.Time{}
		t.peak = 0
		t.peakDay = ""
		p.set(s, t, r.after(s, last))
	}

	r.subjects = nil
	r.changes = nil
}

// after returns when a subject is judged again whose state was reported; zero: at its next change.
func (r *round) after(s subject, reported string) time.Time {
	if s.hook.condition == everyCount && reported != "" {
		return parseReportedCount(reported).at.Add(s.hook.every) // the count may have changed since
	}

	day, _ := parsePeak(reported)
	isPast := day != "" && day != r.now.UTC().Format(dayLayout)
	if s.hook.condition == peak && isPast {
		return r.now // the present count belongs to the next day
	}

	return time.Time{}
}
