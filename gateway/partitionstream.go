package gateway

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	firstRepeat = 100 * time.Millisecond // pause before ops without acknowledgement are sent again; it doubles …
	lastRepeat  = time.Second            // … up to this
	aliveBatch  = 1024                   // users in one beat

	// afterGrace is how long the roster remembers a grace that has ended. An owner that hands over or is
	// killed ends no presences, so the next owner may have to be sent the grace even then. The time is enough
	// to notice a death and for the next owner to receive the grace, even if the killed process restarts
	// meanwhile and takes the partition again.
	afterGrace = 8 * time.Second
)

// partitionStream is one partition's part of the roster: the partition's users at this gateway, and the
// numbered ops that report them to the owner. mu guards all fields but waiting.
//
// An entry's change goes from queue to flight and leaves flight when the owner has acknowledged the op, which
// means that the store has the change. The ops in flight are bounded and are repeated until then; the queue
// keeps only the fact that an entry changed, so its state when it leaves the queue decides the op.
type partitionStream struct {
	mu        sync.Mutex
	partition int
	users     map[presence.User]*userEntry
	alive     []presence.User // users with a connection; nil: must be built again; beats share it, so it is never changed
	// absent has the entries without a connection whose grace is running, or ended less than afterGrace ago,
	// each once. Until then lost connections may come back, and a next owner has to receive the grace.
	absent []*presenceEntry

	number uint64     // the stream's number
	first  uint64     // number of flight[0]
	acked  uint64     // ops of the stream up to this one are in the store
	flight []inFlight // ops sent and not done, see inFlight.done, in order; at most heartbeat.MaxOps
	queue  entryQueue // entries with changes to be sent
	// whole is 0 until all marked entries of queue have left it. Then the stream has reported every user that
	// was here when it began, and whole is heartbeat.Beat.Whole.
	whole    uint64
	announce bool // send whole and flight, even if nothing is new

	sent        time.Time     // when flight was last sent
	repeatAfter time.Duration // when flight is sent again, after sent
	kicked      bool          // the stream is in roster.kick

	waiting atomic.Bool // flight is not empty; read without mu
}

type inFlight struct {
	entry *presenceEntry
	op    heartbeat.Op
	// page and site say that the hub has received a count of the op's page, and of its site, that includes the join.
	page, site bool
}

// done reports whether an op that is in the store need not be repeated. A join also waits for the counts that include it:
// its acknowledgement may have overtaken another one, or may be the only one that was not lost, and then lacks them.
func (f *inFlight) done() bool {
	return f.op.Kind == heartbeat.Leave || f.entry.live == 0 || f.page && f.site
}

// arrival is a waiter whose join is in the store.
type arrival struct {
	waiter
	page string
}

// find returns the user's entry of the page, or nil.
func (s *partitionStream) find(u presence.User, page string) *presenceEntry {
	if user := s.users[u]; user != nil {
		return user.find(page)
	}
	return nil
}

// findOrAdd returns the user's entry of the page, and adds it if it is missing. It returns nil when the user
// has maxUserPages other entries.
func (s *partitionStream) findOrAdd(u presence.User, page string) *presenceEntry {
	if e := s.find(u, page); e != nil {
		return e
	}
	user := s.users[u]
	if user == nil {
		user = &userEntry{}
		s.users[u] = user
	}
	if len(user.entries) == maxUserPages {
		return nil
	}
	e := &presenceEntry{user: u, page: page}
	user.add(e)
	return e
}

func (s *partitionStream) forget(e *presenceEntry) {
	user := s.users[e.user]
	if user.remove(e); len(user.entries) == 0 {
		delete(s.users, e.user)
	}
}

// enqueue queues e, unless its present state is in flight, and wakes the sender. It does not wait until an
// earlier op is acknowledged. While the store is unavailable, a leave is not acknowledged although its grace
// is running, and the join of a user who returns must reach the owner before the grace ends.
func (r *roster) enqueue(s *partitionStream, e *presenceEntry) {
	if e.queued || e.flying > 0 && (e.live > 0) == (e.lastOp == heartbeat.Join) {
		return
	}
	s.queue.push(e)
	r.wake(s)
}

// restart begins a new stream, which reports everything again: the ops in flight and all joins. An owner that
// does not know the current stream knows no users of this gateway. If the stream continued, the owner would
// learn of a user from an op in flight, and would then not ask for the user's other pages.
func (r *roster) restart(s *partitionStream) {
	s.number++
	s.first, s.acked = 1, 0
	s.sent = time.Time{} // flight is sent again at the next tick
	s.repeatAfter = firstRepeat
	for i := range s.flight {
		f := &s.flight[i]
		f.page, f.site = false, false

		// Part of a leave's grace, or all of it, may have passed since the leave was first sent.
		if f.op.Kind == heartbeat.Leave && f.entry.live == 0 {
			f.op.Grace = max(min(f.op.Grace, time.Until(f.entry.until)), 0)
		}
	}
	for _, user := range s.users {
		r.requeueJoins(s, user)
	}
	for _, e := range s.absent { // the owner that receives this stream may not know these graces
		if e.live == 0 {
			r.enqueue(s, e)
		}
	}
	s.queue.mark()
	s.whole, s.announce = 0, true
	r.wake(s)
}

// requeueJoins queues all joins of the user again.
func (r *roster) requeueJoins(s *partitionStream, user *userEntry) {
	for _, e := range user.entries {
		if e.live > 0 && e.lastOp == heartbeat.Join {
			r.enqueue(s, e)
		}
	}
}

func (r *roster) wake(s *partitionStream) {
	if !s.kicked {
		s.kicked = true
		r.kick <- s
	}
}

// flush moves queued entries into flight, as far as there is room, and sends them.
func (r *roster) flush(s *partitionStream) {
	s.mu.Lock()
	s.kicked = false
	from := len(s.flight)
	for len(s.queue.entries) > 0 && len(s.flight) < heartbeat.MaxOps {
		e := s.queue.pop()
		if e == nil {
			continue
		}
		op := e.op()
		if e.flying > 0 && e.lastOp == op.Kind {
			continue // the entry has changed and changed back, so the op in flight is right
		}
		e.flying++
		e.lastOp = op.Kind
		s.alive = nil
		s.flight = append(s.flight, inFlight{entry: e, op: op})
	}
	if s.queue.marked == 0 && s.whole == 0 {
		s.whole, s.announce = s.first+uint64(len(s.flight)), true
	}
	var b *heartbeat.Beat
	if s.announce || len(s.flight) > from {
		if s.announce {
			from = 0
		}
		if from == 0 {
			s.sent, s.repeatAfter = time.Now(), firstRepeat
		}
		b = s.beatOf(r.source, from)
		s.announce = false
		s.waiting.Store(len(s.flight) > 0)
	}
	s.mu.Unlock()
	if b != nil {
		r.beats.SendBeat(b)
	}
}

// beatOf returns a beat with the ops of flight[from:].
func (s *partitionStream) beatOf(source heartbeat.Source, from int) *heartbeat.Beat {
	b := &heartbeat.Beat{Source: source, Partition: s.partition, Stream: s.number, First: s.first + uint64(from), Whole: s.whole}
	b.Ops = make([]heartbeat.Op, 0, len(s.flight)-from)
	for _, f := range s.flight[from:] {
		b.Ops = append(b.Ops, f.op)
	}
	return b
}

// resend sends the ops in flight again, if they have waited for an acknowledgement for repeatAfter.
func (r *roster) resend(s *partitionStream, now time.Time) {
	s.mu.Lock()
	var b *heartbeat.Beat
	if len(s.flight) > 0 && now.Sub(s.sent) >= s.repeatAfter {
		b = s.beatOf(r.source, 0)
		s.sent, s.repeatAfter = now, min(2*s.repeatAfter, lastRepeat)
		r.repeated.Add(int64(len(s.flight)))
	}
	s.mu.Unlock()
	if b != nil {
		r.beats.SendBeat(b)
	}
}

// sendAlive sends the heartbeats of the stream's users, and returns their number.
func (r *roster) sendAlive(s *partitionStream) int {
	s.mu.Lock()
	if s.alive == nil {
		for u, user := range s.users {
			if slices.ContainsFunc(user.entries, func(e *presenceEntry) bool { return e.live > 0 && e.lastOp != 0 }) {
				if s.alive == nil {
					s.alive = make([]presence.User, 0, len(s.users))
				}
				s.alive = append(s.alive, u)
			}
		}
	}
	s.endGraces(time.Now())
	alive, stream := s.alive, s.number
	s.mu.Unlock()
	for part := range slices.Chunk(alive, aliveBatch) {
		r.beats.SendBeat(&heartbeat.Beat{Source: r.source, Partition: s.partition, Stream: stream, Alive: part})
	}
	return len(alive)
}

// endGraces forgets the absent entries whose grace ended afterGrace ago.
func (s *partitionStream) endGraces(now time.Time) {
	s.absent = slices.DeleteFunc(s.absent, func(e *presenceEntry) bool {
		switch {
		case e.live > 0 || e.queued || e.flying > 0: // acknowledge decides what becomes of the entry
			e.absent = false
		case e.lost == 0 || !now.Before(e.until.Add(afterGrace)):
			e.absent = false
			s.forget(e)
		}
		return !e.absent
	})
	if len(s.absent) == 0 {
		s.absent = nil
	}
}

// noteCounts notes which joins in flight the counts of a reply include.
func (s *partitionStream) noteCounts(a *heartbeat.Reply) {
	counted := make(map[string]bool, len(a.Counts))
	for _, c := range a.Counts {
		counted[c.Page] = true
	}

	for i := range s.flight {
		f, number := &s.flight[i], s.first+uint64(i)

		// An owner of an older release does not say what its counts include.
		unsaid := a.Counted == 0 && number <= a.Acked
		included := number <= a.Counted
		f.page = f.page || unsaid || included && counted[f.op.Page]
		f.site = f.site || unsaid || included && counted[presence.TotalOf(f.op.Page)]
	}
}

// acknowledge removes the ops that are done from flight. It returns the waiters whose joins are now in the store.
func (r *roster) acknowledge(s *partitionStream, a *heartbeat.Reply) (arrivals []arrival) {
	s.noteCounts(a)
	s.acked = max(s.acked, a.Acked)
	for len(s.flight) > 0 && s.first <= s.acked && s.flight[0].done() {
		e := s.flight[0].entry
		s.flight[0] = inFlight{}
		s.flight = s.flight[1:]
		s.first++
		s.sent, s.repeatAfter = time.Now(), firstRepeat
		e.flying--
		switch {
		case e.queued || e.flying > 0: // the next acknowledgement decides
		case (e.live > 0) != (e.lastOp == heartbeat.Join):
			r.enqueue(s, e)
		case e.live == 0 && e.lost > 0 && time.Now().Before(e.until.Add(afterGrace)):
			if !e.absent {
				e.absent = true
				s.absent = append(s.absent, e)
			}
		case e.live == 0:
			e.lost = 0
			if !e.absent { // otherwise endGraces forgets the entry
				s.forget(e)
			}
		default:
			for _, w := range e.waiters {
				arrivals = append(arrivals, arrival{w, e.page})
			}
			e.waiters = nil
		}
	}
	if len(s.flight) == 0 {
		s.flight = nil
		s.waiting.Store(false)
	}
	if len(s.queue.entries) > 0 {
		r.wake(s)
	}
	return arrivals
}
