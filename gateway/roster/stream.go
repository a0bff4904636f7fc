package roster

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/internal/marks"
	"headcount/presence"
	"headcount/presence/heartbeat"
)

var (
	graceMoves       = marks.Sometimes("a grace goes on at a new owner")
	operationsRepeat = marks.Sometimes("joins and leaves are repeated")
)

const (
	firstRepeat = 100 * time.Millisecond // pause before ops without acknowledgement are sent again; it doubles …
	lastRepeat  = time.Second            // … up to this
	aliveBatch  = 1024                   // users in one beat

	// afterGrace is how long the roster remembers a grace that has ended. An owner that hands over or is killed
	// before the end does not remove the user, so the next owner has to be sent even a grace that is over. The time
	// is enough to notice a death and for the next owner to receive the grace, even if the killed process restarts
	// meanwhile and takes the partition again.
	afterGrace = 8 * time.Second
)

// stream is one partition's part of the roster: the partition's users at this gateway, and the
// numbered ops that report them to the owner. mu guards all fields but waiting.
//
// An entry's change goes from queue to flight and leaves flight when the owner has acknowledged the op, which
// means that the store has the change. The ops in flight are bounded and are repeated until then; the queue
// keeps only the fact that an entry changed, so its state when it leaves the queue decides the op.
type stream struct {
	mu        sync.Mutex
	partition int
	kick      chan<- *stream // Roster.kick
	users     map[presence.User]*userEntry
	// alive has the users with a connection; nil: must be built again; beats share it, so it is never changed
	alive []presence.User
	// absent has the entries without a connection whose grace is running, or ended less than afterGrace ago,
	// each once. Until then lost connections may come back, and a next owner has to receive the grace.
	absent []*presenceEntry

	number uint64     // the stream's number
	first  uint64     // number of flight[0]
	acked  uint64     // ops of the stream up to this one are in the store
	flight []inFlight // ops sent and not done, see inFlight.done, in order; at most heartbeat.MaxOps
	queue  entryQueue // entries with changes to be sent
	// whole is sent as heartbeat.Beat.Whole: it says with which op the stream has reported every user that was here
	// when it began. It is 0 until all these ops are known, which is when the marked entries have left queue.
	whole    uint64
	announce bool // send whole and flight, even if nothing is new

	sent        time.Time     // when flight was last sent
	repeatAfter time.Duration // when flight is sent again, after sent
	kicked      bool          // the stream is in Roster.kick

	waiting atomic.Bool // flight is not empty; read without mu
}

type inFlight struct {
	entry *presenceEntry
	op    heartbeat.Op
	// page and site say that the hub has received a count of the op's page, and of its site, that includes the join.
	page, site bool
}

// done reports whether an op that is in the store need not be repeated. A join is also repeated until the hub has the
// counts that include it: its acknowledgement may have come without them, if it overtook another one or others were
// lost.
func (f *inFlight) done() bool {
	return f.op.Kind == heartbeat.Leave || f.entry.live == 0 || f.page && f.site
}

// arrival is a waiter whose join is in the store.
type arrival struct {
	waiter
	page string
}

// idle reports whether the stream has neither users nor anything to send.
func (s *stream) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()

	return len(s.users)+len(s.flight)+len(s.queue.entries) == 0
}

// findLocked returns the user's entry of the page, or nil.
func (s *stream) findLocked(u presence.User, page string) *presenceEntry {
	if user := s.users[u]; user != nil {
		return user.find(page)
	}

	return nil
}

// findOrAddLocked returns the user's entry of the page, and adds it if it is missing. It returns nil when the user
// has MaxUserPages other entries.
func (s *stream) findOrAddLocked(u presence.User, page string) *presenceEntry {
	if e := s.findLocked(u, page); e != nil {
		return e
	}

	user := s.users[u]
	if user == nil {
		user = &userEntry{}
		s.users[u] = user
	}

	if len(user.entries) == MaxUserPages {
		return nil
	}

	e := &presenceEntry{user: u, page: page}
	user.add(e)

	return e
}

func (s *stream) forgetLocked(e *presenceEntry) {
	user := s.users[e.user]
	user.remove(e)
	if len(user.entries) == 0 {
		delete(s.users, e.user)
	}
}

// receive applies a node's reply. It returns the connections whose joins are now in the store.
func (s *stream) receive(a *heartbeat.Reply) (arrivals []arrival) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if a.Ask {
		s.answerLocked(a.Stream)
	}

	// answerLocked may have begun a new stream, so the number is compared only now.
	if a.Stream == s.number {
		if a.Reset {
			s.restartLocked()
		}
		arrivals = s.acknowledgeLocked(a)
	}

	// The owner has no session of these users, so it gets their joins again.
	for _, u := range a.Unknown {
		if user := s.users[u]; user != nil {
			s.requeueJoinsLocked(user)
		}
	}

	return arrivals
}

// answerLocked answers an owner that asks for the users of this gateway. known is the number of the stream that the
// owner knows.
func (s *stream) answerLocked(known uint64) {
	fromStart := s.first == 1 // the owner is sent all of this stream anyway
	if known != s.number && !fromStart {
		s.restartLocked()
		return
	}

	s.announce = true
	s.wakeLocked()
}

// enqueueLocked queues e, unless an op in flight already reports its present state, and wakes the sender. No earlier op
// in flight holds e back: while the store is unavailable, a leave is not acknowledged, but the join of a user who
// returns must reach the owner before the grace ends.
func (s *stream) enqueueLocked(e *presenceEntry) {
	underWay := e.flying > 0 && e.isReported()
	if e.queued || underWay {
		return
	}

	s.queue.push(e)
	s.wakeLocked()
}

// restartLocked begins a new stream, which reports everything again: the ops in flight and all joins. An owner that
// does not know the current stream knows no users of this gateway. If the stream continued, the owner would
// learn of a user from an op in flight, and would then not ask for the user's other pages.
func (s *stream) restartLocked() {
	s.number++
	s.first = 1
	s.acked = 0
	s.sent = time.Time{} // flight is sent again at the next tick
	s.repeatAfter = firstRepeat

	for i := range s.flight {
		f := &s.flight[i]
		// Counts of the former owner do not say what the next one counts.
		f.page, f.site = false, false

		// Part of a leave's grace, or all of it, may have passed since the leave was first sent.
		if f.op.Kind == heartbeat.Leave && f.entry.live == 0 {
			f.op.Grace = max(min(f.op.Grace, time.Until(f.entry.until)), 0)
		}
	}

	for _, user := range s.users {
		s.requeueJoinsLocked(user)
	}

	// The owner that receives this stream may not know these graces.
	for _, e := range s.absent {
		if e.live == 0 {
			graceMoves.Reached()
			s.enqueueLocked(e)
		}
	}

	s.queue.mark()
	s.whole = 0
	s.announce = true
	s.wakeLocked()
}

// requeueJoinsLocked queues all joins of the user again.
func (s *stream) requeueJoinsLocked(user *userEntry) {
	// Any other join is in the queue already.
	for _, e := range user.entries {
		if e.live > 0 && e.lastOp == heartbeat.Join {
			s.enqueueLocked(e)
		}
	}
}

func (s *stream) wakeLocked() {
	if !s.kicked {
		s.kicked = true
		// The channel has room for each stream once, so this never blocks.
		s.kick <- s
	}
}

// flush moves queued entries into flight, as far as there is room, and sends them.
func (r *Roster) flush(s *stream) {
	s.mu.Lock()
	b := s.nextBeatLocked(r.cfg.Source)
	s.mu.Unlock()

	if b != nil {
		r.cfg.Beats.SendBeat(b)
	}
}

// nextBeatLocked moves queued entries into flight, as far as there is room. It returns a beat with what is new, or nil.
func (s *stream) nextBeatLocked(source heartbeat.Source) *heartbeat.Beat {
	s.kicked = false
	from := len(s.flight)
	s.launchLocked()

	// Every user who was here when the stream began is in flight or acknowledged, so it is known which op is the last
	// of them.
	if s.queue.marked == 0 && s.whole == 0 {
		s.whole = s.first + uint64(len(s.flight))
		s.announce = true
	}

	if s.announce {
		from = 0
	} else if len(s.flight) == from {
		return nil
	}

	// Only a beat with all ops in flight puts off their repetition.
	if from == 0 {
		s.sent = time.Now()
		s.repeatAfter = firstRepeat
	}

	s.announce = false
	s.waiting.Store(len(s.flight) > 0)

	return s.beatLocked(source, from)
}

// launchLocked moves queued entries into flight, as far as there is room.
func (s *stream) launchLocked() {
	for len(s.queue.entries) > 0 && len(s.flight) < heartbeat.MaxOps {
		e := s.queue.pop()
		if e == nil {
			continue
		}

		// What the entry is by now is sent, so that changes in quick succession cost one op.
		op := e.op()
		if e.flying > 0 && e.lastOp == op.Kind {
			continue // the entry has changed and changed back, so the op in flight is right
		}

		e.flying++
		e.lastOp = op.Kind
		s.alive = nil
		s.flight = append(s.flight, inFlight{entry: e, op: op})
	}
}

// beatLocked returns a beat with the ops of flight[from:].
func (s *stream) beatLocked(source heartbeat.Source, from int) *heartbeat.Beat {
	b := &heartbeat.Beat{
		Source:    source,
		Partition: s.partition,
		Stream:    s.number,
		First:     s.first + uint64(from),
		Whole:     s.whole,
		Ops:       make([]heartbeat.Op, 0, len(s.flight)-from),
	}
	for _, f := range s.flight[from:] {
		b.Ops = append(b.Ops, f.op)
	}

	return b
}

// resendAll sends the ops in flight of all streams again. It reports whether a stream waits for acknowledgements.
func (r *Roster) resendAll(now time.Time) (waiting bool) {
	for i := range r.streams {
		s := &r.streams[i]
		if s.waiting.Load() {
			waiting = true
			r.resend(s, now)
		}
	}

	return waiting
}

// resend sends the ops in flight again, if they have waited for an acknowledgement for repeatAfter.
func (r *Roster) resend(s *stream, now time.Time) {
	s.mu.Lock()
	var b *heartbeat.Beat
	if len(s.flight) > 0 && now.Sub(s.sent) >= s.repeatAfter {
		b = s.beatLocked(r.cfg.Source, 0)
		s.sent = now
		s.repeatAfter = min(2*s.repeatAfter, lastRepeat)
		r.repeated.Add(int64(len(s.flight)))
		operationsRepeat.Reached()
	}
	s.mu.Unlock()

	// Send without the lock, because joins and leaves of the partition wait for it.
	if b != nil {
		r.cfg.Beats.SendBeat(b)
	}
}

// sendAlive sends the heartbeats of the stream's users, and returns their number.
func (r *Roster) sendAlive(s *stream) int {
	s.mu.Lock()
	alive := s.aliveLocked()
	s.endGracesLocked(time.Now())
	stream := s.number
	s.mu.Unlock()

	// The list may be used without the lock, since a change makes a new one.
	for part := range slices.Chunk(alive, aliveBatch) {
		r.cfg.Beats.SendBeat(&heartbeat.Beat{Source: r.cfg.Source, Partition: s.partition, Stream: stream, Alive: part})
	}

	return len(alive)
}

// aliveLocked returns the users with a connection whose join was sent.
func (s *stream) aliveLocked() []presence.User {
	if s.alive != nil {
		return s.alive
	}

	for u, user := range s.users {
		reported := func(e *presenceEntry) bool { return e.live > 0 && e.lastOp != 0 }
		if !slices.ContainsFunc(user.entries, reported) {
			continue
		}

		if s.alive == nil {
			// A new slice each time, because beats under way share the old one.
			s.alive = make([]presence.User, 0, len(s.users))
		}
		s.alive = append(s.alive, u)
	}

	return s.alive
}

// endGracesLocked forgets the absent entries whose grace ended afterGrace ago.
func (s *stream) endGracesLocked(now time.Time) {
	s.absent = slices.DeleteFunc(s.absent, func(e *presenceEntry) bool {
		// The user is back, or an op is on its way: acknowledgeLocked decides later what becomes of the entry.
		undecided := e.live > 0 || e.queued || e.flying > 0
		if !undecided && e.remembersGrace(now) {
			return false
		}

		e.absent = false
		if !undecided {
			s.forgetLocked(e)
		}

		return true
	})

	if len(s.absent) == 0 {
		s.absent = nil
	}
}

// noteCountsLocked notes which joins in flight the counts of a reply include.
func (s *stream) noteCountsLocked(a *heartbeat.Reply) {
	counted := make(map[string]bool, len(a.Counts))
	for _, c := range a.Counts {
		counted[c.Page] = true
	}

	for i := range s.flight {
		f, number := &s.flight[i], s.first+uint64(i)

		// An owner of an older release does not say what its counts include.
		unspecified := a.Counted == 0 && number <= a.Acked
		included := number <= a.Counted
		f.page = f.page || unspecified || included && counted[f.op.Page]
		f.site = f.site || unspecified || included && counted[presence.TotalOf(f.op.Page)]
	}
}

// acknowledgeLocked ends the flight of the ops that are done. It returns the waiters whose joins are now in the store.
func (s *stream) acknowledgeLocked(a *heartbeat.Reply) (arrivals []arrival) {
	s.noteCountsLocked(a)
	s.acked = max(s.acked, a.Acked)

	for len(s.flight) > 0 && s.first <= s.acked && s.flight[0].done() {
		now := time.Now()
		e := s.landLocked()
		// The owner answers, so the ops that follow get their full time.
		s.sent = now
		s.repeatAfter = firstRepeat

		switch e.state(now) {
		case moving: // a later op of the entry decides
		case changed:
			s.enqueueLocked(e)
		case present:
			arrivals = append(arrivals, e.takeWaiters()...)
		case inGrace:
			s.keepAbsentLocked(e)
		case gone:
			e.lost = 0
			if !e.absent { // otherwise endGracesLocked forgets the entry
				s.forgetLocked(e)
			}
		}
	}

	if len(s.flight) == 0 {
		s.flight = nil
		s.waiting.Store(false)
	}

	// There may be room in flight now for what is queued.
	if len(s.queue.entries) > 0 {
		s.wakeLocked()
	}

	return arrivals
}

// landLocked ends the flight of the first op, and returns its entry.
func (s *stream) landLocked() *presenceEntry {
	e := s.flight[0].entry
	s.flight[0] = inFlight{} // the array must not keep the entry in memory
	s.flight = s.flight[1:]
	s.first++
	e.flying--

	return e
}

func (s *stream) keepAbsentLocked(e *presenceEntry) {
	if !e.absent {
		e.absent = true
		s.absent = append(s.absent, e)
	}
}
