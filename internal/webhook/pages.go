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
	"headcount/presence"
)

const (
	// maxPages bounds the pages whose counts wait to be looked at, and those of which something
	// is known. Beyond it a page is left out until its next change.
	maxPages = 100_000

	roundEvery = 100 * time.Millisecond // least time between two looks at what changed
	lookAgain  = time.Second            // after a failure, or a count that was stale
	readAtOnce = 256                    // counts in one read
	dayLayout  = time.DateOnly

	// All pages are looked through scanAfter after a bucket is served anew. When changes may have been
	// missed they are, too, but at most once in scanEvery.
	scanAfter = time.Second
	scanEvery = time.Minute
)

// pages tells of pages. Its run goroutine alone uses what it knows of them.
type pages struct {
	service *Service
	hooks   []*Hook
	wake    chan struct{} // holds one: news has something, or served has changed

	mu     sync.Mutex
	news   map[string]presence.Count // the newest by page; at most maxPages
	served map[int]bool              // buckets
	moved  bool                      // served has changed, or something was missed
	fresh  bool                      // served has new buckets

	known map[subject]*told // where something was told, or is due; at most maxPages for each hook
	due   map[subject]*told // those of known that have a time
	day   string            // of the last round
	scan  time.Time         // when to look through all pages; zero: that is not needed
	since time.Time         // the last time
	store failing
}

// subject is what a hook is told of: a page.
type subject struct {
	hook *Hook
	name string
}

// told is what is known of a subject.
type told struct {
	last string    // what was told last
	low  time.Time // since when it is lower than what was told; zero: it is not
	high int64     // a peak that gathers; 0: none
	day  string    // of high
	at   time.Time // when to read the count and judge again; zero: at the next change
}

func newPages(s *Service, hooks []*Hook) *pages {
	return &pages{
		service: s, hooks: hooks, wake: make(chan struct{}, 1),
		news: map[string]presence.Count{}, served: map[int]bool{}, known: map[subject]*told{}, due: map[subject]*told{},
	}
}

func (p *pages) serve(buckets []int) {
	p.mu.Lock()
	served := map[int]bool{}
	for _, b := range buckets {
		served[b] = true
		p.fresh = p.fresh || !p.served[b]
	}
	p.served, p.moved = served, true
	p.mu.Unlock()
	p.signal()
}

func (p *pages) heard(updates []presence.Update) {
	news := false
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
		old, known := p.news[name]
		switch {
		case !ok || known && old.Newer(c):
		case !known && len(p.news) >= maxPages:
			p.service.metrics.left.WithLabelValues("page").Inc()
		default:
			p.news[name], news = c, true
		}
	}
	p.mu.Unlock()
	if news {
		p.signal()
	}
}

// lost has what was told read again, and the counts of it: changes may have been missed.
func (p *pages) lost() {
	p.mu.Lock()
	p.moved = true
	p.mu.Unlock()
	p.signal()
}

func (p *pages) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// run looks at what changed, and at what is due, until ctx ends.
func (p *pages) run(ctx context.Context) {
	load := false
	for ctx.Err() == nil {
		p.mu.Lock()
		news, served := p.news, p.served
		p.news = map[string]presence.Count{}
		load = load || p.moved
		if p.fresh {
			p.since = time.Time{}
		}
		p.moved, p.fresh = false, false
		p.mu.Unlock()
		now := time.Now()
		if load {
			err := p.load(ctx, served, now)
			p.store.note(ctx, p.service.cfg.Log, err)
			load = err != nil
			at := now.Add(scanAfter)
			if next := p.since.Add(scanEvery); next.After(at) {
				at = next
			}
			if p.scan.IsZero() || at.Before(p.scan) {
				p.scan = at
			}
		}
		if !p.scan.IsZero() && !now.Before(p.scan) {
			p.look(ctx, served, now)
		}
		p.turn(now)
		r := round{pages: p, now: now}
		for name, c := range news {
			for _, h := range p.hooks {
				if served[presence.Bucket(name, presence.DefaultBuckets)] && h.matches(name) {
					r.judge(subject{h, name}, c, false)
				}
			}
		}
		p.readDue(ctx, &r)
		r.tell(ctx)
		if !sleep(ctx, roundEvery, nil) {
			return
		}
		sleep(ctx, p.next(load), p.wake)
	}
}

// turn has all peaks judged when a day has begun: each count is the first peak of its day.
func (p *pages) turn(now time.Time) {
	today := now.UTC().Format(dayLayout)
	if today == p.day {
		return
	}
	p.day = today
	for s, t := range p.known {
		if s.hook.what == peak && t.at.IsZero() {
			p.set(s, t, now)
		}
	}
}

// next is the time until something is due, or the day ends.
func (p *pages) next(load bool) time.Duration {
	wait := time.Until(time.Now().Truncate(24 * time.Hour).Add(24 * time.Hour))
	if load {
		wait = lookAgain
	}
	if !p.scan.IsZero() {
		wait = min(wait, time.Until(p.scan))
	}
	for _, t := range p.due {
		wait = min(wait, time.Until(t.at))
	}
	return max(wait, 0)
}

// load reads what was told of the pages of the buckets that are served, and has their counts read.
// It forgets the pages of others.
func (p *pages) load(ctx context.Context, served map[int]bool, now time.Time) error {
	known := map[subject]*told{}
	for _, h := range p.hooks {
		last, err := p.service.cfg.Store.Told(ctx, h.ID)
		if err != nil {
			return err
		}
		for name, what := range last {
			if !served[presence.Bucket(name, presence.DefaultBuckets)] || len(known) >= maxPages*len(p.hooks) {
				continue
			}
			t := p.known[subject{h, name}]
			if t == nil {
				t = &told{}
			}
			t.last, t.at = what, now
			known[subject{h, name}] = t
		}
	}
	for s, t := range p.known { // what is about to be told, or was before the store lost it
		if known[s] == nil && served[presence.Bucket(s.name, presence.DefaultBuckets)] {
			t.last, t.at = "", now
			known[s] = t
		}
	}
	p.known, p.due = known, maps.Clone(known)
	return nil
}

// look has the counts of all pages read that hooks are told of, and of which nothing was told.
func (p *pages) look(ctx context.Context, served map[int]bool, now time.Time) {
	err := p.service.cfg.Pages.Pages(ctx, func(names []string) {
		for _, name := range names {
			for _, h := range p.hooks {
				switch s := (subject{h, name}); {
				case p.known[s] != nil || !h.matches(name) || !served[presence.Bucket(name, presence.DefaultBuckets)]:
				case len(p.known) >= maxPages*len(p.hooks):
					p.service.metrics.left.WithLabelValues("page").Inc()
				default:
					p.set(s, &told{}, now)
				}
			}
		}
	})
	p.store.note(ctx, p.service.cfg.Log, err)
	if err != nil {
		p.scan = now.Add(outage.Jitter(lookAgain))
		return
	}
	p.scan, p.since = time.Time{}, now
}

// readDue reads the counts of what is due, and judges it.
func (p *pages) readDue(ctx context.Context, r *round) {
	of := map[string][]subject{}
	var names []string
	for s, t := range p.due {
		if !t.at.After(r.now) {
			if of[s.name] == nil {
				names = append(names, s.name)
			}
			of[s.name] = append(of[s.name], s)
		}
	}
	for chunk := range slices.Chunk(names, readAtOnce) {
		counts, err := p.service.cfg.Pages.Counts(ctx, chunk)
		for i, name := range chunk {
			for _, s := range of[name] {
				if err != nil {
					p.set(s, p.known[s], r.now.Add(outage.Jitter(lookAgain)))
					continue
				}
				r.judge(s, counts[i], true)
			}
		}
	}
}

// set sets when a subject is due; zero: at its next change. A subject of which nothing was told, and
// which is not due, is forgotten.
func (p *pages) set(s subject, t *told, at time.Time) {
	switch t.at = at; {
	case !at.IsZero():
		p.known[s], p.due[s] = t, t
	case t.last == "":
		delete(p.due, s)
		delete(p.known, s)
	default:
		p.known[s] = t
		delete(p.due, s)
	}
}

// round gathers what is to be told.
type round struct {
	pages    *pages
	now      time.Time
	subjects []subject
	changes  []Change
}

// judge compares a count with what was told. read says that the count was read just now.
func (r *round) judge(s subject, c presence.Count, read bool) {
	p := r.pages
	t := p.known[s]
	if t == nil {
		if len(p.known) >= maxPages*len(p.hooks) {
			p.service.metrics.left.WithLabelValues("page").Inc()
			return
		}
		t = &told{}
	}
	if c.Stale { // it may lack users
		p.set(s, t, r.now.Add(outage.Jitter(lookAgain)))
		return
	}
	if s.hook.what == peak {
		r.judgePeak(s, t, c)
		return
	}
	is := ""
	if c.Users > s.hook.limit {
		is = "1"
	}
	switch {
	case is == t.last:
		t.low = time.Time{}
		p.set(s, t, time.Time{})
	case is != "":
		t.low = time.Time{}
		r.change(s, t, c, is)
	case t.low.IsZero():
		t.low = r.now
		p.set(s, t, r.now.Add(p.service.cfg.Settle))
	case read && r.now.Sub(t.low) >= p.service.cfg.Settle:
		r.change(s, t, c, is)
	default:
		p.set(s, t, t.low.Add(p.service.cfg.Settle))
	}
}

// judgePeak gathers a new peak, and tells it when it is due.
func (r *round) judgePeak(s subject, t *told, c presence.Count) {
	today := r.now.UTC().Format(dayLayout)
	day, greatest := parsePeak(t.last)
	if t.day == day && t.high <= greatest { // another process has told it
		t.high = 0
	}
	if t.high > 0 && t.day < today {
		r.change(s, t, c, peakOf(t.day, t.high))
		return
	}
	if day != today {
		greatest = 0
	}
	if c.Users > max(greatest, t.high) {
		if t.high == 0 {
			t.at = r.now.Add(r.pages.service.cfg.Settle)
		}
		t.high, t.day = c.Users, today
	}
	switch {
	case t.high > 0 && !t.at.After(r.now):
		r.change(s, t, c, peakOf(t.day, t.high))
	case t.high > 0:
		r.pages.set(s, t, t.at)
	case t.last != "" && day != today && c.Users == 0: // nothing is left to compare with
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

// change has it told that a subject is now so.
func (r *round) change(s subject, t *told, c presence.Count, is string) {
	kind, count := "", c.Users
	switch {
	case s.hook.what == peak && is != "":
		kind, count = Peak, t.high
	case s.hook.what == threshold && is != "":
		kind = Over
	case s.hook.what == occupation && is != "":
		kind = Occupied
	case s.hook.what == occupation:
		kind = Vacated
	}
	change := Change{Hook: s.hook.ID, Subject: s.name, Was: t.last, Is: is, kind: kind}
	if kind != "" {
		e := newEvent(kind, s.name, r.now)
		e.Page, e.Count = presence.KeyOf(s.name), &count
		switch kind {
		case Peak:
			e.Day = t.day
		case Over:
			e.Threshold = &s.hook.limit
			fallthrough
		default:
			e.Version = c.Version.String()
		}
		change.Event = e.encode()
	}
	r.pages.set(s, t, r.now.Add(outage.Jitter(lookAgain))) // unless it is told
	r.subjects, r.changes = append(r.subjects, s), append(r.changes, change)
}

// tell tells what was gathered. What could not be told is due again.
func (r *round) tell(ctx context.Context) {
	if len(r.changes) == 0 {
		return
	}
	p := r.pages
	now, err := p.service.tell(ctx, r.changes)
	p.store.note(ctx, p.service.cfg.Log, err)
	if err != nil {
		p.lost() // what was told is unknown
	}
	for i, last := range now {
		s := r.subjects[i]
		t := p.known[s]
		if t.last = last; last != r.changes[i].Is {
			continue // somebody else told something: it is read and judged again
		}
		t.low, t.high, t.day = time.Time{}, 0, ""
		at := time.Time{}
		if day, _ := parsePeak(last); s.hook.what == peak && day != "" && day != r.now.UTC().Format(dayLayout) {
			at = r.now // the count of now belongs to the next day
		}
		p.set(s, t, at)
	}
}
