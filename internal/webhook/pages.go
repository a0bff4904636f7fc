package webhook

import (
	"context"
	"maps"
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
// and makes a Change where they differ. The fields after mu's are used by its run goroutine only.
type pages struct {
	service *Service
	hooks   []*Hook
	wake    chan struct{} // holds one: changed is not empty, or reload is set

	mu         sync.Mutex
	changed    map[string]presence.Count // newest counts by page, for the next round; at most maxPages
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
	reported   string    // the state last reported, see Change.Is
	belowSince time.Time // since when the count is lower than the reported state; zero: it is not
	peak       int64     // a new peak that is not reported yet; 0: none
	peakDay    string    // the day of peak
	dueAt      time.Time // when to read the count and judge it again; zero: at the next change
}

func newPages(s *Service, hooks []*Hook) *pages {
	return &pages{
		service: s, hooks: hooks, wake: make(chan struct{}, 1),
		changed: map[string]presence.Count{}, served: map[int]bool{}, known: map[subject]*state{}, due: map[subject]*state{},
	}
}

func (p *pages) serve(buckets []int) {
	p.mu.Lock()
	served := map[int]bool{}
	for _, b := range buckets {
		served[b] = true
		p.newBuckets = p.newBuckets || !p.served[b]
	}
	p.served, p.reload = served, true
	p.mu.Unlock()
	wake.Signal(p.wake)
}

func (p *pages) receive(updates []presence.Update) {
	changed := false
	p.mu.Lock()
	for _, u := range updates {
		if u.Kind != presence.KindCount {
			continue
		}
		name := u.Name()
		if !slices.ContainsFunc(p.hooks, func(h *Hook) bool { return h.matches(name) }) {
			continue
		}
		c, ok := presence.CountOf(u)
		old, known := p.changed[name]
		switch {
		case !ok || known && old.Newer(c):
		case !known && len(p.changed) >= maxPages:
			p.service.metrics.left.WithLabelValues("page").Inc()
		default:
			p.changed[name], changed = c, true
		}
	}
	p.mu.Unlock()
	if changed {
		wake.Signal(p.wake)
	}
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
	load := false
	for ctx.Err() == nil {
		p.mu.Lock()
		changed, served := p.changed, p.served
		p.changed = map[string]presence.Count{}
		load = load || p.reload
		if p.newBuckets {
			p.lastScan = time.Time{}
		}
		p.reload, p.newBuckets = false, false
		p.mu.Unlock()
		now := time.Now()
		if load {
			err := p.load(ctx, served, now)
			p.store.note(ctx, p.service.cfg.Log, err)
			load = err != nil
			at := now.Add(scanAfter)
			if next := p.lastScan.Add(scanEvery); next.After(at) {
				at = next
			}
			if p.nextScan.IsZero() || at.Before(p.nextScan) {
				p.nextScan = at
			}
		}
		if !p.nextScan.IsZero() && !now.Before(p.nextScan) {
			p.scan(ctx, served, now)
		}
		p.startDay(now)
		r := round{pages: p, now: now}
		for name, c := range changed {
			for _, h := range p.hooks {
				if served[presence.Bucket(name, presence.DefaultBuckets)] && h.matches(name) {
					r.judge(subject{h, name}, c, false)
				}
			}
		}
		p.readDue(ctx, &r)
		r.report(ctx)
		if !outage.Sleep(ctx, roundEvery) {
			return
		}
		wake.Wait(ctx, p.next(load), p.wake)
	}
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
		if s.hook.condition == peak && t.dueAt.IsZero() {
			p.set(s, t, now)
		}
	}
}

// next returns the time until a subject is due, a scan or reload is, or the day ends.
func (p *pages) next(load bool) time.Duration {
	wait := time.Until(time.Now().Truncate(24 * time.Hour).Add(24 * time.Hour))
	if load {
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

// load reads the reported states of the pages in the served buckets, and makes these pages due. It forgets
// the pages of other buckets.
func (p *pages) load(ctx context.Context, served map[int]bool, now time.Time) error {
	known := map[subject]*state{}
	for _, h := range p.hooks {
		last, err := p.service.cfg.Store.Reported(ctx, h.ID)
		if err != nil {
			return err
		}
		for name, what := range last {
			if !served[presence.Bucket(name, presence.DefaultBuckets)] || len(known) >= maxPages*len(p.hooks) {
				continue
			}
			t := p.known[subject{h, name}]
			if t == nil {
				t = &state{}
			}
			t.reported, t.dueAt = what, now
			known[subject{h, name}] = t
		}
	}
	for s, t := range p.known { // not reported yet, or reported and lost by the store
		if known[s] == nil && served[presence.Bucket(s.name, presence.DefaultBuckets)] {
			t.reported, t.dueAt = "", now
			known[s] = t
		}
	}
	p.known, p.due = known, maps.Clone(known)
	return nil
}

// scan makes all pages due that match a hook and have no state: their first report may have been missed.
func (p *pages) scan(ctx context.Context, served map[int]bool, now time.Time) {
	err := p.service.cfg.Pages.Pages(ctx, func(names []string) {
		for _, name := range names {
			for _, h := range p.hooks {
				switch s := (subject{h, name}); {
				case p.known[s] != nil || !h.matches(name) || !served[presence.Bucket(name, presence.DefaultBuckets)]:
				case len(p.known) >= maxPages*len(p.hooks):
					p.service.metrics.left.WithLabelValues("page").Inc()
				default:
					p.set(s, &state{}, now)
				}
			}
		}
	})
	p.store.note(ctx, p.service.cfg.Log, err)
	if err != nil {
		p.nextScan = now.Add(outage.Jitter(retryAfter))
		return
	}
	p.nextScan, p.lastScan = time.Time{}, now
}

// readDue reads the counts of the subjects that are due, and judges them.
func (p *pages) readDue(ctx context.Context, r *round) {
	of := map[string][]subject{}
	var names []string
	for s, t := range p.due {
		if !t.dueAt.After(r.now) {
			if of[s.name] == nil {
				names = append(names, s.name)
			}
			of[s.name] = append(of[s.name], s)
		}
	}
	for chunk := range slices.Chunk(names, readBatch) {
		counts, err := p.service.cfg.Pages.Counts(ctx, chunk)
		for i, name := range chunk {
			for _, s := range of[name] {
				if err != nil {
					p.set(s, p.known[s], r.now.Add(outage.Jitter(retryAfter)))
					continue
				}
				r.judge(s, counts[i], true)
			}
		}
	}
}

// set sets when a subject is due; zero: at its next change. It forgets a subject that is not due and has no
// reported state.
func (p *pages) set(s subject, t *state, at time.Time) {
	switch t.dueAt = at; {
	case !at.IsZero():
		p.known[s], p.due[s] = t, t
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

// judge compares a count with the reported state. A rise is reported at once. A fall is reported only when
// the count has been low for Settle and was then read from the store; read says that it was read just now.
func (r *round) judge(s subject, c presence.Count, read bool) {
	p := r.pages
	t := p.known[s]
	if t == nil {
		if len(p.known) >= maxPages*len(p.hooks) {
			p.service.metrics.left.WithLabelValues("page").Inc()
			return
		}
		t = &state{}
	}
	if c.Stale { // it may lack users
		p.set(s, t, r.now.Add(outage.Jitter(retryAfter)))
		return
	}
	if s.hook.condition == peak {
		r.judgePeak(s, t, c)
		return
	}
	is := ""
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
	case t.belowSince.IsZero():
		t.belowSince = r.now
		p.set(s, t, r.now.Add(p.service.cfg.Settle))
	case read && r.now.Sub(t.belowSince) >= p.service.cfg.Settle:
		r.change(s, t, c, is)
	default:
		p.set(s, t, t.belowSince.Add(p.service.cfg.Settle))
	}
}

// judgePeak keeps a new peak for Settle, while it may rise further, and then reports it.
func (r *round) judgePeak(s subject, t *state, c presence.Count) {
	today := r.now.UTC().Format(dayLayout)
	day, greatest := parsePeak(t.reported)
	if t.peakDay == day && t.peak <= greatest { // another process has reported it
		t.peak = 0
	}
	if t.peak > 0 && t.peakDay < today {
		r.change(s, t, c, peakOf(t.peakDay, t.peak))
		return
	}
	if day != today {
		greatest = 0
	}
	if c.Users > max(greatest, t.peak) {
		if t.peak == 0 {
			t.dueAt = r.now.Add(r.pages.service.cfg.Settle)
		}
		t.peak, t.peakDay = c.Users, today
	}
	switch {
	case t.peak > 0 && !t.dueAt.After(r.now):
		r.change(s, t, c, peakOf(t.peakDay, t.peak))
	case t.peak > 0:
		r.pages.set(s, t, t.dueAt)
	case t.reported != "" && day != today && c.Users == 0: // a state of an earlier day is no longer needed
		r.change(s, t, c, "")
	default:
		r.pages.set(s, t, time.Time{})
	}
}

func peakOf(day string, greatest int64) string { return day + " " + strconv.FormatInt(greatest, 10) }

func parsePeak(s string) (day string, greatest int64) {
	day, number, _ := strings.Cut(s, " ")
	greatest, _ = strconv.ParseInt(number, 10, 64)
	return day, greatest
}

// change adds a change of the subject's reported state to is.
func (r *round) change(s subject, t *state, c presence.Count, is string) {
	kind, count := "", c.Users
	switch {
	case s.hook.condition == peak && is != "":
		kind, count = Peak, t.peak
	case s.hook.condition == threshold && is != "":
		kind = Over
	case s.hook.condition == occupation && is != "":
		kind = Occupied
	case s.hook.condition == occupation:
		kind = Vacated
	}
	change := Change{Hook: s.hook.ID, Subject: s.name, Was: t.reported, Is: is, kind: kind}
	if kind != "" {
		e := newEvent(kind, s.name, r.now)
		e.Page, e.Count = presence.KeyOf(s.name), &count
		switch kind {
		case Peak:
			e.Day = t.peakDay
		case Over:
			e.Threshold = &s.hook.limit
			fallthrough
		default:
			e.Version = c.Version.String()
		}
		change.Event = e.encode()
	}
	r.pages.set(s, t, r.now.Add(outage.Jitter(retryAfter))) // in case the report fails
	r.subjects, r.changes = append(r.subjects, s), append(r.changes, change)
}

// report reports the collected changes. Subjects whose change could not be reported stay due.
func (r *round) report(ctx context.Context) {
	if len(r.changes) == 0 {
		return
	}
	p := r.pages
	now, err := p.service.report(ctx, r.changes)
	p.store.note(ctx, p.service.cfg.Log, err)
	if err != nil {
		p.lost() // the store may have made some of the changes
	}
	for i, last := range now {
		s := r.subjects[i]
		t := p.known[s]
		if t.reported = last; last != r.changes[i].Is {
			continue // another process reported a change: the subject is due and is judged again
		}
		t.belowSince, t.peak, t.peakDay = time.Time{}, 0, ""
		at := time.Time{}
		if day, _ := parsePeak(last); s.hook.condition == peak && day != "" && day != r.now.UTC().Format(dayLayout) {
			at = r.now // the present count belongs to the next day
		}
		p.set(s, t, at)
	}
}
