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
	firstRepeat = 100 * time.Millisecond // ops without an answer are sent again after this, then after twice as long …
	lastRepeat  = time.Second            // … up to this
	aliveBatch  = 1024                   // users in one beat

	// The next owner may not know of a grace that an owner has acknowledged, even of one that has just
	// ended: an owner that hands over, or is killed, ends nobody's presence. So the roster remembers a
	// grace for this much longer. That is enough to notice a death and for the partition to have a next
	// owner that has received the grace, also when the killed process is back by then and takes the
	// partition again.
	afterGrace = 8 * time.Second
)

// partitionStream is one partition's part of the roster: who is here, and the numbered ops by which the
// owner learns of it. mu guards all of it.
type partitionStream struct {
	mu        sync.Mutex
	partition int
	users     map[presence.User]*userEntry
	alive     []presence.User // users with a connection; nil: to be made again; never changed in place, since beats carry it
	// absent has the entries without a connection whose grace runs, or ended less than afterGrace ago,
	// each once. Until then others of the lost connections may come back, and a next owner has to
	// receive the grace.
	absent []*presenceEntry

	number uint64     // of the stream
	first  uint64     // number of flight[0]
	flight []inFlight // sent and not acknowledged, in order; at most heartbeat.MaxOps
	queue  entryQueue // to be sent
	// whole is set when all marked entries of queue have left it: then the stream has everything, see
	// heartbeat.Beat.
	whole    uint64
	announce bool // send whole and flight, even if nothing is new

	sent        time.Time     // when flight was last sent
	repeatAfter time.Duration // after this it is sent again
	kicked      bool          // it is in roster.kick

	waiting atomic.Bool // flight is not empty; read without mu
}

type inFlight struct {
	entry *presenceEntry
	op    heartbeat.Op
}

// arrival is a waiter whose page the store has.
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

// findOrAdd is find that adds an entry if there is none. It returns nil when the user has maxUserPages
// others.
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

// enqueue queues e, unless its present state is in flight, and wakes the sender. It does not wait for the
// answer to an earlier op: a leave is not answered while the store is away, and its grace runs.
func (r *roster) enqueue(s *partitionStream, e *presenceEntry) {
	if e.queued || e.flying > 0 && (e.live > 0) == (e.lastOp == heartbeat.Join) {
		return
	}
	s.queue.push(e)
	r.wake(s)
}

// restart begins a new stream, which has everything anew: what is in flight, and all joins. An owner that
// does not know the stream knows nobody here. It would learn of a user by an op in flight, and then not
// ask for the user's other pages.
func (r *roster) restart(s *partitionStream) {
	s.number++
	s.first = 1
	s.sent = time.Time{} // at the next tick
	s.repeatAfter = firstRepeat
	for i := range s.flight { // a leave may have waited for an owner for longer than its grace
		if f := &s.flight[i]; f.op.Kind == heartbeat.Leave && f.entry.live == 0 {
			f.op.Grace = max(min(f.op.Grace, time.Until(f.entry.until)), 0)
		}
	}
	for _, user := range s.users {
		r.requeueJoins(s, user)
	}
	for _, e := range s.absent { // the owner that has the grace may not be the one that gets this stream
		if e.live == 0 {
			r.enqueue(s, e)
		}
	}
	s.queue.mark()
	s.whole, s.announce = 0, true
	r.wake(s)
}

// requeueJoins has all joins of the user sent again.
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

// flush puts queued entries in flight, as far as there is room, and sends them.
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
			continue // it has changed and changed back: the op in flight says what it is
		}
		e.flying++
		e.lastOp = op.Kind
		s.alive = nil
		s.flight = append(s.flight, inFlight{e, op})
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

// beatOf returns the message with the ops of flight[from:].
func (s *partitionStream) beatOf(source heartbeat.Source, from int) *heartbeat.Beat {
	b := &heartbeat.Beat{Source: source, Partition: s.partition, Stream: s.number, First: s.first + uint64(from), Whole: s.whole}
	b.Ops = make([]heartbeat.Op, 0, len(s.flight)-from)
	for _, f := range s.flight[from:] {
		b.Ops = append(b.Ops, f.op)
	}
	return b
}

// resend repeats what has been in flight for too long.
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

// sendAlive sends the heartbeats of the stream's users.
func (r *roster) sendAlive(s *partitionStream) {
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
}

// endGraces forgets the absent entries whose grace is over.
func (s *partitionStream) endGraces(now time.Time) {
	s.absent = slices.DeleteFunc(s.absent, func(e *presenceEntry) bool {
		switch {
		case e.live > 0 || e.queued || e.flying > 0: // the next acknowledgement decides
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

// acknowledge ends the flight of the ops up to a number. It returns the waiters that need wait no longer.
func (r *roster) acknowledge(s *partitionStream, upTo uint64) (arrivals []arrival) {
	for len(s.flight) > 0 && s.first <= upTo {
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
			if !e.absent { // else endGraces forgets it
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
