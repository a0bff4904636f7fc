package presencemem

import (
	"bytes"
	"container/list"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"headcount/presence"
	"headcount/presence/minutes"
)

const (
	dayPageBytes = 512 // approximate memory of a page without its name, its days and registers

	// daysUnwritten bounds how far the days in a data directory may be behind the end of the process that kept them,
	// which wrote them once a minute. If they are older, later processes have run without keeping days.
	daysUnwritten = 10 * time.Minute

	// dayBatch is how many entries one transaction of the data directory has. The file has free pages for one
	// transaction, and a page has 3 KB for a year.
	dayBatch = 512
)

// dayHistory keeps the days of pages. Store.mu guards it. Beyond the bound maxBytes it forgets the page that has not
// changed for the longest time. Registers of the running day count from the next minute with a change on.
type dayHistory struct {
	retention int64 // days; 0: nothing is kept
	maxBytes  int
	bytes     int
	pages     map[string]*pageDays
	order     *list.List // of *pageDays; the least recently changed comes first

	// With a data directory: the pages whose entries there are outdated, and the forgotten pages that still have some.
	disk   bool
	ended  time.Time // when the process before wrote last; zero: there was none
	dirty  map[*pageDays]struct{}
	erased []string
}

// pageDays are the days of one page.
type pageDays struct {
	page     string
	calendar *minutes.Calendar
	bytes    int
	weighed  int64 // the minute in which bytes was right
	written  int64 // the last completed day that the data directory has
	element  *list.Element
}

func newDayHistory(cfg Config) dayHistory {
	return dayHistory{
		retention: int64(cfg.PageDays),
		maxBytes:  cfg.PageDaysBytes,
		pages:     map[string]*pageDays{},
		order:     list.New(),
		dirty:     map[*pageDays]struct{}{},
	}
}

// remember records the counts that a Write changed, and its arrivals.
func (h *dayHistory) remember(touched map[*page]struct{}, arrivals []presence.Arrival, now time.Time) {
	if h.retention == 0 {
		return
	}

	for pg := range touched {
		h.count(pg.count.Page, pg.count.Users, now)
	}
	for _, a := range arrivals {
		h.touch(a.Page, now).calendar.Arrive(a.User, now)
	}

	h.bound(now)
}

// count records the count of a page.
func (h *dayHistory) count(page string, users int64, now time.Time) {
	r := h.touch(page, now)
	before := r.calendar.At()
	r.calendar.Count(users, now)

	// Once a day is enough: the oldest day expires when a new one begins.
	if day := minutes.DayOf(now); day > before {
		r.calendar.Trim(day - h.retention)
	}
}

// touch returns the days of a page that is about to change.
func (h *dayHistory) touch(page string, now time.Time) *pageDays {
	r := h.pages[page]
	if r == nil {
		r = h.add(page, &minutes.Calendar{})
	}

	h.order.MoveToBack(r.element)
	if h.disk {
		h.dirty[r] = struct{}{}
	}
	// Weighing works the waiting arrivals into the registers, so it is done once a minute at most.
	if at := minutes.Of(now); at != r.weighed {
		r.weighed = at
		h.weigh(r)
	}

	return r
}

func (h *dayHistory) add(page string, c *minutes.Calendar) *pageDays {
	r := &pageDays{page: page, calendar: c}
	r.element = h.order.PushBack(r)
	h.pages[page] = r

	h.weigh(r)
	return r
}

// weigh counts the bytes of a page anew.
func (h *dayHistory) weigh(r *pageDays) {
	is := dayPageBytes + len(r.page) + r.calendar.Bytes()
	h.bytes += is - r.bytes
	r.bytes = is
}

// bound forgets pages without users whose last day has expired, and those beyond maxBytes.
func (h *dayHistory) bound(now time.Time) {
	oldest := minutes.DayOf(now) - h.retention
	for front := h.order.Front(); front != nil; front = h.order.Front() {
		r := front.Value.(*pageDays)
		needed := r.calendar.Users() > 0 || r.calendar.At() >= oldest
		if h.bytes <= h.maxBytes && needed {
			return
		}

		// The file still has the page's days, until the next write.
		if h.disk {
			h.erased = append(h.erased, r.page)
		}
		h.bytes -= r.bytes
		h.order.Remove(front)
		delete(h.dirty, r)
		delete(h.pages, r.page)
	}
}

// confirm ends the presence of users who were on a page before a restart and have not come back. By now all owners have
// written their users, so pages has every page with users.
func (h *dayHistory) confirm(pages map[string]*page, now time.Time) {
	// Pages that nobody has joined again are not among those with users.
	for name, r := range h.pages {
		users := int64(0)
		if pg := pages[name]; pg != nil {
			users = pg.count.Users
		}
		if r.calendar.Users() != users {
			h.count(name, users, now)
		}
	}
}

var _ minutes.DayStore = (*Store)(nil)

// Days implements minutes.DayStore.
func (s *Store) Days(_ context.Context, page string, from int64) ([]minutes.Day, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	r := s.days.pages[page]
	if r == nil {
		return nil, nil
	}

	return r.calendar.Days(from)
}

// In the data directory, the bucket days has page -> the days that are over, and page, a zero byte -> the day of the
// last change. untilKey has when it was last written, in unix ms.

func openKey(page string) []byte { return append([]byte(page), 0) }

// loadDays fills the history from the file.
func (l *loader) loadDays(tx *bbolt.Tx) {
	if v := tx.Bucket(daysBucket).Get(untilKey); len(v) == 8 {
		l.days.ended = time.UnixMilli(int64(binary.BigEndian.Uint64(v)))
	}

	l.each(tx, daysBucket, func(k, open []byte) error {
		page, isOpen := bytes.CutSuffix(k, []byte{0})
		if !isOpen || len(page) == 0 {
			return nil
		}

		// bbolt's memory is valid within the transaction alone.
		past := bytes.Clone(tx.Bucket(daysBucket).Get(page))
		c, err := minutes.ParseCalendar(past, bytes.Clone(open))
		if err != nil {
			return fmt.Errorf("the days of a page: %w", err)
		}

		_, last := c.Past()
		l.days.add(string(page), c).written = last
		return nil
	})
}

// endOfRun continues the days of an earlier process. Alive is the last time at which that process is known to have run.
// If its users were recalled, they count as present until confirm; otherwise they count as gone since then.
func (h *dayHistory) endOfRun(recalled bool, alive, now time.Time) {
	h.disk = true

	// The file of present users is written more often, so it knows better when the process ended.
	if late := alive.Sub(h.ended); late > 0 && late < daysUnwritten {
		h.ended = alive
	}
	// The clock was ahead, and was set.
	if h.ended.After(now) {
		h.ended = now
	}
	recalled = recalled && now.Sub(h.ended) < daysUnwritten

	all := make([]*pageDays, 0, len(h.pages))
	for _, r := range h.pages {
		r.calendar.Trim(minutes.DayOf(now) - h.retention)
		// Nobody was present after the end of the process, as far as days are concerned.
		if r.calendar.Users() > 0 && !recalled {
			r.calendar.Count(0, h.ended)
			h.dirty[r] = struct{}{}
		}
		all = append(all, r)
	}

	// The file is sorted by page, the list by the time of the last change.
	slices.SortFunc(all, func(a, b *pageDays) int { return int(a.calendar.At() - b.calendar.At()) })
	for _, r := range all {
		h.order.MoveToBack(r.element)
	}

	h.bound(now)
}

// unwritten returns the entries that the data directory lacks. The caller says with done whether they are written.
func (h *dayHistory) unwritten(now time.Time) (puts []put, done func(error)) {
	for _, page := range h.erased {
		puts = append(puts, put{daysBucket, []byte(page), nil}, put{daysBucket, openKey(page), nil})
	}
	// More may be erased before done.
	erased := len(h.erased)

	taken := make(map[*pageDays]int64, len(h.dirty))
	for r := range h.dirty {
		past, last := r.calendar.Past()
		if last != r.written {
			puts = append(puts, put{daysBucket, []byte(r.page), past})
		}
		puts = append(puts, put{daysBucket, openKey(r.page), r.calendar.AppendOpen(nil)})
		taken[r] = last
	}
	clear(h.dirty)

	slices.SortStableFunc(puts, func(a, b put) int { return bytes.Compare(a.key, b.key) })
	puts = append(puts, put{daysBucket, untilKey, binary.BigEndian.AppendUint64(nil, uint64(now.UnixMilli()))})

	return puts, func(err error) {
		if err == nil {
			h.erased = h.erased[erased:]
		}

		for r, last := range taken {
			if err == nil {
				r.written = last
			} else if h.pages[r.page] == r {
				// A page that was forgotten meanwhile is among the erased ones.
				h.dirty[r] = struct{}{}
			}
		}
	}
}

// writeDays writes the days that the data directory lacks. After a failure they are written with the next minute.
func (s *Store) writeDays() {
	if s.days.retention == 0 {
		return
	}

	s.mu.Lock()
	puts, done := s.days.unwritten(time.Now())
	s.mu.Unlock()

	var err error
	// In parts, and without the store's lock, so that joins do not wait.
	for part := range slices.Chunk(puts, dayBatch) {
		// The last part says until when the days are known, so it must not follow one that failed.
		err = s.unread.disk.update(part, nil)
		if err != nil {
			break
		}
	}
	if err != nil {
		s.cfg.Log.Warn().Err(err).
			Msg("days of pages could not be written to the data directory; retrying with the next minute")
	}

	s.mu.Lock()
	done(err)
	s.mu.Unlock()
}
