package presenceredis

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"headcount/presence"
	"headcount/presence/minutes"
	"headcount/scripts"
)

const (
	// maxPendingMinutes bounds the minutes that wait to be written, of counts and of
	// arrivals each. Further ones are dropped.
	maxPendingMinutes = 65_536

	minuteBatch     = 200             // minutes in one run of remember.lua
	visitBatch      = 50              // the same of arrivals, whose registers Redis merges into days
	minuteInterval  = time.Second     // between two writes
	minuteLastWrite = 2 * time.Second // for the last write, at Close
	entryBytes      = 14              // of a minute, see remember.lua
	endedBytes      = 21              // of a minute that ended, see remembered in page.lua
)

// minuteWriter writes minutes of pages. Scripts that change counts keep the greatest
// count of the running minute with the count, and report a minute that has ended; the
// process that receives the report writes that minute. Arrivals are collected here, and
// written once a minute for each page, as absolute numbers of this process.
type minuteWriter struct {
	store     *Store
	retention int64 // minutes; 0: nothing is kept
	days      int   // how many are kept

	mu     sync.Mutex
	writer string        // the name of this process in the fields of arrivals
	latest int64         // the last minute that arrivals were collected for
	counts []endedMinute // in the order in which they ended
	visits map[visit]*minutes.Visits
}

// endedMinute is a minute of a page that has ended; entry is its form in Redis, and the area.
type endedMinute struct {
	bucket      int
	page, entry string
}

// visit is a page in one minute.
type visit struct {
	page string
	at   int64
}

// keep writes minutes until ctx ends, and then everything, including the running minute.
func (m *minuteWriter) keep(ctx context.Context) {
	look := time.NewTicker(minuteInterval)
	defer look.Stop()

	for {
		select {
		case <-look.C:
			m.write(ctx, minutes.Of(time.Now()))
		case <-ctx.Done():
			// The last write needs a context of its own, with a short limit because Close waits for it.
			last, cancel := context.WithTimeout(context.Background(), minuteLastWrite)
			defer cancel()
			m.write(last, minutes.Of(time.Now())+1)
			return
		}
	}
}

// minutesEnded queues the minutes that a run of counts.lua or merge.lua reports as ended.
func (m *minuteWriter) minutesEnded(bucket int, text string) {
	if m.retention == 0 {
		return
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	for len(text) >= 2 {
		end := 2 + int(text[0])<<8 + int(text[1])
		if len(text) < end+endedBytes {
			return
		}

		if len(m.counts) < maxPendingMinutes {
			m.counts = append(m.counts, endedMinute{bucket, text[2:end], text[end : end+endedBytes]})
		}
		text = text[end+endedBytes:]
	}
}

// arrived collects the arrivals of a change that is written.
func (m *minuteWriter) arrived(arrivals []presence.Arrival) {
	if len(arrivals) == 0 || m.retention == 0 {
		return
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	m.advanceLocked(minutes.Of(time.Now()))

	for _, a := range arrivals {
		if v := m.visitsLocked(visit{a.Page, m.latest}); v != nil {
			v.Add(a.User)
		}
	}
}

// advanceLocked moves latest to a minute, but to no earlier one, which may be written already. After the clock was set
// back by more than a minute it does, under another name: otherwise arrivals would wait until the clock has caught up.
func (m *minuteWriter) advanceLocked(now int64) {
	m.latest = max(m.latest, now)
	if m.latest <= now+1 {
		return
	}

	m.writer = rand.Text()
	m.latest = now
	for key, v := range m.visits {
		if key.at <= now {
			continue
		}

		delete(m.visits, key)
		m.visitsLocked(visit{key.page, now}).Merge(v) // there is room, since one has gone
	}
}

// visitsLocked returns the arrivals on a page in a minute, or nil if there are too many of others.
func (m *minuteWriter) visitsLocked(key visit) *minutes.Visits {
	v := m.visits[key]
	if v == nil && len(m.visits) < maxPendingMinutes {
		v = &minutes.Visits{}
		m.visits[key] = v
	}

	return v
}

// part is what one run of remember.lua writes: minutes of one bucket that have ended, or arrivals.
type part struct {
	*scriptRun
	bucket int
	counts []endedMinute
	visits []visit
}

// write writes the queued counts, and the arrivals of the minutes that are earlier than before. Data that cannot be
// written waits for the next call. Data that was written must not wait again: it would be appended to its string in
// Redis a second time. Only one goroutine calls write.
func (m *minuteWriter) write(ctx context.Context, before int64) {
	parts := m.take(before)
	if len(parts) == 0 {
		return
	}

	m.run(ctx, parts)

	// A key that holds data of another program concerns one page. It must not hold up the pages that are written
	// together with that one.
	var whole, alone []part
	for _, p := range parts {
		if errors.Is(p.Err, ErrForeign) && len(p.counts)+len(p.visits) > 1 {
			alone = append(alone, m.split(p)...)
		} else {
			whole = append(whole, p)
		}
	}
	m.run(ctx, alone)

	m.requeue(append(whole, alone...))
}

// take takes what is to be written, in parts that Redis can carry out without holding up others.
func (m *minuteWriter) take(before int64) (parts []part) {
	m.mu.Lock()
	defer m.mu.Unlock()

	// remember.lua takes the arrivals of a minute from a process once. So none may be added to minutes that are
	// written now.
	m.advanceLocked(before)

	ended := map[int][]endedMinute{} // by bucket
	for _, e := range m.counts {
		ended[e.bucket] = append(ended[e.bucket], e)
	}
	m.counts = nil

	visited := map[int][]visit{} // by bucket
	for key := range m.visits {
		switch {
		// Redis was away for so long that nobody would read them.
		case key.at < before-m.retention:
			delete(m.visits, key)
		case key.at < before:
			b := presence.Bucket(key.page, m.store.cfg.Buckets)
			visited[b] = append(visited[b], key)
		}
	}

	for _, list := range ended {
		for some := range slices.Chunk(list, minuteBatch) {
			parts = append(parts, m.countsPart(some))
		}
	}

	// Arrivals stay in m.visits until they are written, where Minutes finds them.
	for b, list := range visited {
		for some := range slices.Chunk(list, visitBatch) {
			parts = append(parts, m.visitsPartLocked(b, some))
		}
	}

	return parts
}

// run carries out the runs of parts. Each run has its error.
func (m *minuteWriter) run(ctx context.Context, parts []part) {
	runs := make([]*scriptRun, len(parts))
	for i, p := range parts {
		runs[i] = p.scriptRun
	}

	if err := m.store.conn.Run(ctx, runs); err != nil {
		m.store.cfg.Log.Debug().Err(err).Msg("minutes of pages could not be written; retrying")
	}
}

// split returns a part for each minute of p.
func (m *minuteWriter) split(p part) (parts []part) {
	m.mu.Lock()
	defer m.mu.Unlock()

	for some := range slices.Chunk(p.counts, 1) {
		parts = append(parts, m.countsPart(some))
	}
	for some := range slices.Chunk(p.visits, 1) {
		parts = append(parts, m.visitsPartLocked(p.bucket, some))
	}

	return parts
}

// requeue puts the parts that were not written back into the queue. A part for a key that holds data of another program
// can never be written, so it is dropped.
func (m *minuteWriter) requeue(parts []part) {
	m.mu.Lock()
	defer m.mu.Unlock()

	var failed []endedMinute
	for _, p := range parts {
		if p.Err != nil && !errors.Is(p.Err, ErrForeign) {
			failed = append(failed, p.counts...)
			continue
		}

		for _, key := range p.visits {
			delete(m.visits, key)
		}
	}

	// Minutes that could not be written go before those that ended meanwhile: the queue is in the order of time.
	m.counts = append(failed[:min(len(failed), maxPendingMinutes-len(m.counts))], m.counts...)
}

// countsPart returns the part of ended minutes of one bucket.
func (m *minuteWriter) countsPart(ended []endedMinute) part {
	run := m.rememberRun(len(ended), 0)
	for _, e := range ended {
		run.Keys = append(run.Keys, m.store.at().minutesKey(e.bucket, e.page))
		run.Args = append(run.Args, e.entry)
	}
	if m.days > 0 {
		for _, e := range ended {
			run.Keys = append(run.Keys, m.store.at().daysKey(e.bucket, e.page))
		}
	}

	return part{scriptRun: run, counts: ended}
}

// rememberRun returns a run of remember.lua for so many ended minutes and arrivals of minutes, which the caller adds.
func (m *minuteWriter) rememberRun(counts, visits int) *scriptRun {
	return &scriptRun{
		Script: scripts.Remember,
		Args:   []any{m.retention*60 + 3600, m.retention * entryBytes, counts, visits, m.days},
	}
}

// kept says which statistics of pages the store keeps: 0 none, 1 minutes, 2 minutes and days.
func (m *minuteWriter) kept() int {
	switch {
	case m.retention == 0:
		return 0
	case m.days == 0:
		return 1
	}
	return 2
}

// visitsPartLocked returns the part of arrivals in one bucket.
func (m *minuteWriter) visitsPartLocked(bucket int, visits []visit) part {
	run := m.rememberRun(0, len(visits))
	at := m.store.at()
	for _, key := range visits {
		v := m.visits[key]
		run.Keys = append(run.Keys, at.visitsKey(bucket, key.at/60, key.page))
		// Each process has a field of its own: none can add to the registers of another one.
		field := append(binary.BigEndian.AppendUint32(nil, uint32(key.at)), m.writer...)
		run.Args = append(run.Args, field, minutes.AppendVisits(nil, v.Joins, v.Registers()))
	}
	if m.days == 0 {
		return part{scriptRun: run, bucket: bucket, visits: visits}
	}

	for _, key := range visits {
		run.Keys = append(run.Keys, at.daysKey(bucket, key.page))
	}
	for _, key := range visits {
		run.Keys = append(run.Keys, at.registersKey(bucket, key.at/minutes.MinutesOfDay, key.page))
	}
	run.Keys = append(run.Keys, at.spareKey(bucket))

	return part{scriptRun: run, bucket: bucket, visits: visits}
}

var _ minutes.Store = (*Store)(nil)

// Minutes implements minutes.Store. It includes the arrivals that this process has not
// written yet; those of other processes are up to a minute old.
func (s *Store) Minutes(ctx context.Context, page string, from int64) ([]minutes.Minute, error) {
	if err := s.learnFormat(ctx); err != nil {
		return nil, err
	}

	bucket := presence.Bucket(page, s.cfg.Buckets)
	running, writer := s.minutes.unwritten(page, from) // before Redis is read, which may then have the same numbers
	run := &scriptRun{Script: scripts.Minutes, Keys: []string{
		s.at().stateKey(bucket), s.at().pagePrefix(bucket) + page, s.at().minutesKey(bucket, page),
	}}
	// One hour more than has begun here, because the clocks of other processes may be ahead.
	for hour := from / 60; hour <= minutes.Of(time.Now())/60+1; hour++ {
		run.Keys = append(run.Keys, s.at().visitsKey(bucket, hour, page))
	}
	if err := s.conn.Run(ctx, []*scriptRun{run}); err != nil {
		return nil, fmt.Errorf("presenceredis: minutes of a page: %w", err)
	}

	reply := run.Reply.([]any)
	list, err := countedMinutes(reply, from)
	if err != nil {
		return nil, fmt.Errorf("presenceredis: minutes of a page: %w", err)
	}

	for _, hash := range reply[4:] {
		fields := hash.([]any)
		for i := 0; i+1 < len(fields); i += 2 {
			name := fields[i].(string) // a minute, and the process that wrote it
			if len(name) <= 4 {
				continue
			}

			m := minutes.Minute{At: int64(binary.BigEndian.Uint32([]byte(name)))}
			_, here := running[m.At]
			ours := here && name[4:] == writer // running has newer numbers
			if ours || m.At < from {
				continue
			}

			m.Joins, m.Visitors, err = minutes.ParseVisits([]byte(fields[i+1].(string)))
			if err != nil {
				return nil, fmt.Errorf("presenceredis: arrivals on a page: %w: %w", ErrForeign, err)
			}
			list = append(list, m)
		}
	}

	for _, m := range running {
		list = append(list, m)
	}

	slices.SortStableFunc(list, func(a, b minutes.Minute) int { return int(a.At - b.At) })

	return list, nil
}

// countedMinutes returns the minutes with counts since from, and the last one before.
func countedMinutes(reply []any, from int64) (list []minutes.Minute, err error) {
	text := []byte(reply[3].(string))
	if len(text)%entryBytes != 0 {
		return nil, fmt.Errorf("%w: minutes of %d bytes", ErrForeign, len(text))
	}

	number := func(b []byte) int64 { // of five bytes
		return int64(binary.BigEndian.Uint64(append(make([]byte, 3, 8), b...)))
	}
	for ; len(text) > 0; text = text[entryBytes:] {
		list = append(list, minutes.Minute{
			At: int64(binary.BigEndian.Uint32(text)), Counted: true, Max: number(text[4:9]), Last: number(text[9:14]),
		})
	}

	// The minute of the last change is in the page's own string. The list may have it already; equal copies do no harm.
	at := reply[0].(int64)
	if at > 0 {
		list = append(list, minutes.Minute{At: at, Counted: true, Max: reply[1].(int64), Last: reply[2].(int64)})
	}

	slices.SortStableFunc(list, func(a, b minutes.Minute) int { return int(a.At - b.At) })

	// A page that is forgotten had no users. The process that should have reported that may have been killed.
	if at == 0 && len(list) > 0 {
		list[len(list)-1].Last = 0
	}

	first := 0
	for first+1 < len(list) && list[first+1].At <= from {
		first++
	}

	return list[first:], nil
}

// unwritten returns the arrivals on a page that wait to be written, by minute, and under which name.
func (m *minuteWriter) unwritten(page string, from int64) (waiting map[int64]minutes.Minute, writer string) {
	waiting = map[int64]minutes.Minute{}

	m.mu.Lock()
	defer m.mu.Unlock()
	for at := max(from, m.latest-m.retention); at <= m.latest; at++ {
		if v := m.visits[visit{page, at}]; v != nil {
			registers := v.Registers()
			// A copy, since arrived goes on adding to the registers.
			waiting[at] = minutes.Minute{At: at, Joins: v.Joins, Visitors: registers.Clone()}
		}
	}

	return waiting, m.writer
}
