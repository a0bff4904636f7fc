package presencemem

import (
	"bytes"
	"container/list"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.etcd.io/bbolt"

	"headcount/hyperloglog"
	"headcount/presence"
	"headcount/presence/minutes"
)

const (
	minuteBytes = 96  // approximate memory of a minute without its registers
	pageBytes   = 256 // approximate memory of a page without its name and minutes

	minuteBatch = 4096 // entries in one transaction of the data directory
)

// pageHistory keeps the minutes of pages. Store.mu guards it. Beyond the bound maxBytes it
// forgets the page that has not changed for the longest time. (The registers of the running
// minute do not count towards the bound.)
type pageHistory struct {
	retention int64 // minutes; 0: nothing is kept
	maxBytes  int
	bytes     int
	pages     map[string]*pageMinutes
	order     *list.List // of *pageMinutes; the least recently changed comes first
	disk      bool       // there is a data directory

	// With a data directory: the pages with minutes that are not written yet, and the keys
	// that are not deleted yet. They are bounded like the pages and their minutes.
	dirty  map[*pageMinutes]struct{}
	erased [][]byte
}

// pageMinutes are the minutes of one page. The last one may be the running minute,
// whose arrivals are still in running.
type pageMinutes struct {
	page    string
	minutes []minutes.Minute // empty only within pageHistory.minute
	running minutes.Visits
	bytes   int
	written int64 // minutes up to this one are in the data directory
	taken   int64 // minutes up to this one are there, or being written
	element *list.Element
}

func newPageHistory(cfg Config) pageHistory {
	return pageHistory{
		retention: int64(cfg.PageStats / time.Minute),
		maxBytes:  cfg.PageStatsBytes,
		pages:     map[string]*pageMinutes{},
		order:     list.New(),
		dirty:     map[*pageMinutes]struct{}{},
	}
}

// remember records the counts that a Write changed, and its arrivals.
func (b *pageHistory) remember(touched map[*page]struct{}, arrivals []presence.Arrival, now time.Time) {
	if b.retention == 0 {
		return
	}

	at := minutes.Of(now)

	for pg := range touched {
		// The greatest count includes the one at the beginning of the minute, which minute has put there.
		m := b.minute(pg.count.Page, at).last()
		m.Max = max(m.Max, pg.count.Users)
		m.Last = pg.count.Users
	}

	for _, a := range arrivals {
		b.minute(a.Page, at).running.Add(a.User)
	}

	b.bound(at)
}

func (r *pageMinutes) last() *minutes.Minute { return &r.minutes[len(r.minutes)-1] }

// minute returns the minutes of a page, and adds the running minute if it is missing.
func (b *pageHistory) minute(page string, at int64) *pageMinutes {
	r := b.pages[page]
	if r == nil {
		r = b.add(page)
	}

	b.order.MoveToBack(r.element)
	b.markDirty(r)

	users := int64(0)
	if len(r.minutes) > 0 {
		b.rewind(r, at)
		if r.last().At >= at { // later if the clock was corrected
			// It may be in the data directory already, without what comes now.
			r.written = min(r.written, r.last().At-1)
			return r
		}
		// The minute before has ended, and its registers count from now on.
		b.addBytes(r, r.close())
		users = r.last().Last
	}

	b.append(r, minutes.Minute{At: at, Counted: true, Max: users, Last: users})
	// Once a minute is enough, however often the page changes.
	b.trim(r, at-b.retention)

	return r
}

// rewind moves what was counted in later minutes to a minute if the clock was ahead, and was set. Otherwise everything
// would count in the future until the clock is there.
func (b *pageHistory) rewind(r *pageMinutes, at int64) {
	if r.last().At <= at+minutes.MaxAhead {
		return
	}

	b.addBytes(r, r.close())
	m := minutes.Minute{At: at, Counted: true, Last: r.last().Last}

	for n := len(r.minutes) - 1; n >= 0 && r.minutes[n].At >= at; n-- {
		later := &r.minutes[n]
		m.Max = max(m.Max, later.Max)
		m.Joins += later.Joins
		m.Visitors.Merge(later.Visitors)

		b.erase(r, n)
		r.minutes = r.minutes[:n]
	}
	b.append(r, m)

	b.markDirty(r)
	r.written = min(r.written, at-1)
	r.taken = min(r.taken, at-1)
}

func (b *pageHistory) add(page string) *pageMinutes {
	r := &pageMinutes{page: page}
	r.element = b.order.PushBack(r)
	b.pages[page] = r

	b.addBytes(r, pageBytes+len(page))
	return r
}

// markDirty records that the data directory lacks a minute of the page.
func (b *pageHistory) markDirty(r *pageMinutes) {
	if b.disk {
		b.dirty[r] = struct{}{}
	}
}

func (b *pageHistory) append(r *pageMinutes, m minutes.Minute) {
	r.minutes = append(r.minutes, m)
	b.addBytes(r, minuteBytes+len(m.Visitors.Bytes()))
}

func (b *pageHistory) addBytes(r *pageMinutes, bytes int) {
	r.bytes += bytes
	b.bytes += bytes
}

// close moves the running arrivals into the last minute, and returns by how many bytes
// it has grown.
func (r *pageMinutes) close() int {
	last := r.last()
	before := len(last.Visitors.Bytes())

	// The clock may have been set back, so the minute may have arrivals already.
	last.Joins += r.running.Joins
	last.Visitors = r.visitors()
	r.running = minutes.Visits{}

	return len(last.Visitors.Bytes()) - before
}

// visitors returns a copy of the last minute's registers, running arrivals included.
func (r *pageMinutes) visitors() hyperloglog.Registers {
	fresh := r.running.Registers()
	all := fresh.Clone()
	all.Merge(r.last().Visitors)
	return all
}

// trim forgets the minutes before oldest, except the last of them, whose final count is
// valid until the next minute that is kept.
func (b *pageHistory) trim(r *pageMinutes, oldest int64) {
	n := 0
	for n+1 < len(r.minutes) && r.minutes[n+1].At <= oldest {
		b.erase(r, n)
		n++
	}

	r.minutes = slices.Delete(r.minutes, 0, n)
}

// erase accounts for a minute that is about to be forgotten.
func (b *pageHistory) erase(r *pageMinutes, i int) {
	m := &r.minutes[i]
	b.addBytes(r, -minuteBytes-len(m.Visitors.Bytes()))
	// What was never taken to be written need not be deleted.
	if b.disk && m.At <= r.taken {
		b.erased = append(b.erased, minuteKey(r.page, m.At))
	}
}

// bound forgets pages without users whose last minute has expired, and those beyond
// maxBytes.
func (b *pageHistory) bound(at int64) {
	for front := b.order.Front(); front != nil; front = b.order.Front() {
		r := front.Value.(*pageMinutes)
		// A page with users stays, however old its last change: the count still holds.
		needed := r.last().Last > 0 || r.last().At > at-b.retention
		if b.bytes <= b.maxBytes && needed {
			return
		}

		for i := range r.minutes {
			b.erase(r, i)
		}

		b.bytes -= r.bytes
		b.order.Remove(front)
		delete(b.dirty, r)
		delete(b.pages, r.page)
	}
}

var _ minutes.Store = (*Store)(nil)

// Minutes implements minutes.Store.
func (s *Store) Minutes(_ context.Context, page string, from int64) ([]minutes.Minute, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	r := s.history.pages[page]
	if r == nil {
		return nil, nil
	}

	byTime := func(m minutes.Minute, at int64) int { return int(m.At - at) }
	first, found := slices.BinarySearchFunc(r.minutes, from, byTime)
	if !found {
		first = max(0, first-1)
	}

	list := slices.Clone(r.minutes[first:])
	last := &list[len(list)-1]
	last.Joins += r.running.Joins
	// A copy: those of the store go on growing.
	last.Visitors = r.visitors()

	return list, nil
}

// In the data directory, the bucket minutes has page, a zero byte, 4 bytes of minute ->
// greatest count, last count, arrivals. untilKey has the minute in which it was last
// written.

var untilKey = []byte{0}

func minuteKey(page string, at int64) []byte {
	return binary.BigEndian.AppendUint32(append([]byte(page), 0), uint32(at))
}

func minuteValue(m minutes.Minute) []byte {
	b := binary.AppendUvarint(nil, uint64(m.Max))
	b = binary.AppendUvarint(b, uint64(m.Last))
	return minutes.AppendVisits(b, m.Joins, m.Visitors)
}

func parseMinute(k, v []byte) (page string, m minutes.Minute, err error) {
	n := len(k) - 5
	if n < 1 || k[n] != 0 {
		return "", m, errors.New("it names no page")
	}

	m = minutes.Minute{At: int64(binary.BigEndian.Uint32(k[n+1:])), Counted: true}
	for _, to := range []*int64{&m.Max, &m.Last} {
		u, size := binary.Uvarint(v)
		if size <= 0 {
			return "", m, errors.New("it is truncated")
		}
		*to = int64(u)
		v = v[size:]
	}

	m.Joins, m.Visitors, err = minutes.ParseVisits(bytes.Clone(v))
	return string(k[:n]), m, err
}

// minute reads one entry. The entries are sorted by page and then by time.
func (l *loader) minute(k, v []byte) error {
	// This entry is of no page: it says when the file was written.
	if bytes.Equal(k, untilKey) {
		return nil
	}

	page, m, err := parseMinute(k, v)
	if err != nil {
		return fmt.Errorf("a minute of a page: %w", err)
	}

	b := l.history
	r := b.pages[page]
	if r == nil {
		r = b.add(page)
	}

	b.append(r, m)
	r.written = m.At
	r.taken = m.At
	return nil
}

// endOfRun ends the minutes of an earlier process: its users have been gone since until, the
// last minute that it wrote.
func (b *pageHistory) endOfRun(until int64, now time.Time) {
	b.disk = true

	at := minutes.Of(now)
	all := make([]*pageMinutes, 0, len(b.pages))
	for _, r := range b.pages {
		b.rewind(r, at)
		if last := r.last(); last.Last > 0 {
			// The count ends with the process: a minute with 0 users at the end says so.
			if end := min(max(until, last.At), at); end > last.At {
				b.append(r, minutes.Minute{At: end, Counted: true, Max: last.Last})
			} else {
				last.Last = 0
				r.written = min(r.written, last.At-1)
			}
			b.markDirty(r)
		}

		b.trim(r, at-b.retention)
		all = append(all, r)
	}

	slices.SortFunc(all, func(a, b *pageMinutes) int { return int(a.last().At - b.last().At) })
	for _, r := range all {
		b.order.MoveToBack(r.element)
	}

	b.bound(at)
}

// unwritten returns the entries that the data directory lacks: of finished minutes, and
// with end also of the running one. The caller calls done once they are written.
func (b *pageHistory) unwritten(at int64, end bool) (puts []put, done func()) {
	before := at
	if end {
		before++
	}

	for _, key := range b.erased {
		puts = append(puts, put{minutesBucket, key, nil})
	}
	erased := len(b.erased)

	written := map[*pageMinutes]int64{}
	for r := range b.dirty {
		// From behind, since only the last few are not written.
		for i := len(r.minutes) - 1; i >= 0 && r.minutes[i].At > r.written; i-- {
			m := r.minutes[i]
			if m.At >= before {
				continue
			}

			if i == len(r.minutes)-1 {
				m.Joins += r.running.Joins
				m.Visitors = r.visitors()
			}

			puts = append(puts, put{minutesBucket, minuteKey(r.page, m.At), minuteValue(m)})
			written[r] = max(written[r], m.At)
			r.taken = max(r.taken, m.At)
		}
	}

	slices.SortStableFunc(puts, func(a, b put) int { return bytes.Compare(a.key, b.key) })
	puts = append(puts, put{minutesBucket, untilKey, binary.BigEndian.AppendUint32(nil, uint32(at))})

	return puts, func() {
		// Others may have been erased during the write.
		b.erased = b.erased[erased:]
		for r, at := range written {
			// The clock was set during the write, and the minutes were moved.
			if at > r.taken {
				continue
			}

			r.written = at
			if r.written >= r.last().At {
				delete(b.dirty, r)
			}
		}
	}
}

// keepMinutes writes finished minutes, and days, once a minute, until Close.
func (s *Store) keepMinutes() {
	for {
		now := time.Now()
		// A second after the minute, so that all of its changes are in.
		next := time.NewTimer(now.Truncate(time.Minute).Add(time.Minute + time.Second).Sub(now))

		select {
		case <-next.C:
			s.writeMinutes(false)
			s.writeDays()
		case <-s.closing:
			next.Stop()
			s.writeMinutes(true)
			s.writeDays()
			return
		}
	}
}

// writeMinutes writes the minutes that the data directory lacks. After a failure they
// are written with the next minute.
func (s *Store) writeMinutes(end bool) {
	s.mu.Lock()
	puts, done := s.history.unwritten(minutes.Of(time.Now()), end)
	s.mu.Unlock()

	for part := range slices.Chunk(puts, minuteBatch) {
		if err := s.unread.disk.update(part, nil); err != nil {
			s.cfg.Log.Warn().Err(err).
				Msg("minutes of pages could not be written to the data directory; retrying with the next minute")
			// Without done everything counts as unwritten, and is written again: an entry has absolute numbers.
			return
		}
	}

	s.mu.Lock()
	done()
	s.mu.Unlock()
}

// loadMinutes fills the history from the file.
func (l *loader) loadMinutes(tx *bbolt.Tx) {
	l.each(tx, minutesBucket, l.minute)

	until := int64(0)
	if v := tx.Bucket(minutesBucket).Get(untilKey); len(v) == 4 {
		until = int64(binary.BigEndian.Uint32(v))
	}

	l.history.endOfRun(until, l.now)
}
