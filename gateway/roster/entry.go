package roster

import (
	"slices"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	fewEntries = 16 // entries of a user that are searched one by one; more have an index, which takes memory
)

// MaxUserPages bounds the pages of a user, over all connections to this gateway; a join of another page is refused.
const MaxUserPages = 10_000

// presenceEntry is one user on one page at this gateway.
type presenceEntry struct {
	user     presence.User
	page     string
	index    int            // position among the user's entries
	live     int            // connections that have joined
	lost     int            // connections that ended without a leave, and may come back until the end of the grace
	until    time.Time      // end of the last grace
	flying   int            // ops in flight; 0: the store has lastOp
	position uint64         // in the stream's queue, counting all entries ever pushed; valid only if queued
	lastOp   heartbeat.Kind // the last op sent to the owner; 0: none yet
	queued   bool           // the entry is in the stream's queue
	absent   bool           // the entry is in the stream's absent
	waiters  []waiter       // connections that have joined, and wait until the store has the join
}

// awaited reports whether c waits until the store has the entry.
func (e *presenceEntry) awaited(c Joiner) bool {
	return slices.ContainsFunc(e.waiters, func(w waiter) bool { return w.Joiner == c })
}

// op returns the op that reports the entry's present state to the owner.
func (e *presenceEntry) op() heartbeat.Op {
	op := heartbeat.Op{Kind: heartbeat.Join, User: e.user, Page: e.page}
	if e.live == 0 {
		op.Kind = heartbeat.Leave
		// The grace is sent as what is left of it, because clocks differ.
		if left := time.Until(e.until); e.lost > 0 && left > 0 {
			op.Grace = left
		}
	}

	return op
}

// beginGrace records that a connection of the entry ended without a leave, and may come back until the grace ends.
func (e *presenceEntry) beginGrace(now time.Time, grace time.Duration) {
	// Connections whose grace has ended do not come back any more.
	if now.After(e.until) {
		e.lost = 0
	}

	e.lost++
	e.until = now.Add(grace)
}

// remembersGrace reports whether the grace of lost connections is running, or ended less than afterGrace ago.
func (e *presenceEntry) remembersGrace(now time.Time) bool {
	return e.lost > 0 && now.Before(e.until.Add(afterGrace))
}

// entryState says what is to be done with an entry.
type entryState uint8

const (
	moving  entryState = iota // another op of the entry is queued or in flight, and its acknowledgement decides
	changed                   // the user has come or gone since the last op
	present                   // the store has the user
	inGrace                   // no connection is left, and a next owner may have to receive the grace
	gone                      // no connection is left, and nobody needs the entry
)

func (e *presenceEntry) state(now time.Time) entryState {
	if e.queued || e.flying > 0 {
		return moving
	}

	if !e.isReported() {
		return changed
	}

	if e.live > 0 {
		return present
	}

	if e.remembersGrace(now) {
		return inGrace
	}

	return gone
}

// isReported reports whether the last op still describes the entry: the user is connected, or is not.
func (e *presenceEntry) isReported() bool {
	connected := e.live > 0
	return connected == (e.lastOp == heartbeat.Join)
}

// takeWaiters ends the waiting of all waiters, and returns them as arrivals.
func (e *presenceEntry) takeWaiters() []arrival {
	arrivals := make([]arrival, len(e.waiters))
	for i, w := range e.waiters {
		arrivals[i] = arrival{w, e.page}
	}
	e.waiters = nil

	return arrivals
}

// userEntry has the entries of a user. Every call takes constant time, however many entries there are,
// because the pollers of all connections wait for the stream's lock.
type userEntry struct {
	entries []*presenceEntry          // at most MaxUserPages
	byPage  map[string]*presenceEntry // nil while there are few
}

// find returns the entry of the page, or nil.
func (u *userEntry) find(page string) *presenceEntry {
	if u.byPage != nil {
		return u.byPage[page]
	}

	for _, e := range u.entries {
		if e.page == page {
			return e
		}
	}

	return nil
}

func (u *userEntry) add(e *presenceEntry) {
	e.index = len(u.entries)
	u.entries = append(u.entries, e)

	// Most users have few pages, for which a map would take more than it saves.
	if u.byPage == nil && len(u.entries) > fewEntries {
		u.index()
		return
	}

	if u.byPage != nil {
		u.byPage[e.page] = e
	}
}

// index makes byPage.
func (u *userEntry) index() {
	u.byPage = make(map[string]*presenceEntry, 2*len(u.entries))
	for _, e := range u.entries {
		u.byPage[e.page] = e
	}
}

func (u *userEntry) remove(e *presenceEntry) {
	// The last entry takes the place of the removed one, so that no other entry moves.
	last := len(u.entries) - 1
	moved := u.entries[last]
	u.entries[e.index] = moved
	moved.index = e.index
	u.entries[last] = nil
	u.entries = u.entries[:last]
	delete(u.byPage, e.page)

	// The old array and the index may have room for thousands.
	if u.byPage != nil && last <= fewEntries/2 {
		u.entries = slices.Clone(u.entries)
		u.byPage = nil
	}
}

// entryQueue has the entries whose newest change is not in flight, each once. So it is bounded by the
// connections and their pages, and by the absent entries.
type entryQueue struct {
	entries []*presenceEntry // nil in the place of a withdrawn one
	popped  uint64           // how many entries have left the queue
	holes   int              // withdrawn entries that still have a place in entries
	marked  int              // how many of the first entries were queued at the last mark
}

func (q *entryQueue) push(e *presenceEntry) {
	e.queued = true
	e.position = q.popped + uint64(len(q.entries))
	q.entries = append(q.entries, e)
}

// pop removes and returns the first entry, or nil if it was withdrawn. The queue must not be empty.
func (q *entryQueue) pop() *presenceEntry {
	e := q.entries[0]
	q.entries[0] = nil
	q.entries = q.entries[1:]
	q.popped++
	q.marked = max(q.marked-1, 0)

	if e == nil {
		q.holes--
	} else {
		e.queued = false
	}

	// An empty queue frees the memory of a burst.
	if len(q.entries) == 0 {
		q.entries = nil
	}

	return e
}

// mark marks the entries that are in the queue now.
func (q *entryQueue) mark() { q.marked = len(q.entries) }

// withdraw removes an entry from the queue. It leaves a hole, and when most places are holes, it removes them.
func (q *entryQueue) withdraw(e *presenceEntry) {
	q.entries[e.position-q.popped] = nil
	q.holes++
	// A few holes are not worth a copy.
	if q.holes <= len(q.entries)/2+16 {
		return
	}

	full := make([]*presenceEntry, 0, len(q.entries)-q.holes)
	marked := 0
	for i, e := range q.entries {
		if e == nil {
			continue
		}
		if i < q.marked {
			marked++
		}

		e.position = q.popped + uint64(len(full))
		full = append(full, e)
	}

	q.entries = full
	q.marked = marked
	q.holes = 0
}
