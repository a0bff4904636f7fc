package gateway

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
	"headcount/presence/heartbeat"
)

const (
	rosterTick  = 25 * time.Millisecond  // how exactly beats and repetitions keep their time
	firstRepeat = 100 * time.Millisecond // ops without an answer are sent again after this, then after twice as long …
	lastRepeat  = time.Second            // … up to this
	aliveBatch  = 1024                   // users in one list of the living

	// A grace that an owner has acknowledged may still be news to the next owner, also
	// when it ended a moment ago: an owner that hands over ends nobody's presence, nor
	// does one that was killed. So the roster remembers a grace for this much longer: until
	// a death is noticed, the partition has its next owner and that one has heard of the
	// grace, also when the process that was killed is back by then and takes it again.
	afterGrace = 8 * time.Second

	fewEntries   = 16     // of a user; more are found by an index, which takes memory
	maxUserPages = 10_000 // of a user, over all connections to this gateway; a join of another page is refused
)

// roster is the ground truth of who is connected to this gateway, by user and
// page, and the part that tells the owners of the partitions: joins and leaves
// at once and until they are acknowledged, the living at every interval.
//
// The users of one partition share a lane with its own lock; run is the one
// goroutine that sends.
type roster struct {
	source   heartbeat.Source
	interval time.Duration
	grace    time.Duration
	beats    Beats
	counts   acknowledged
	streams  []partitionStream
	kick     chan *partitionStream // lanes with something new to send; room for all, each in it once

	seen     observer     // of the seconds that joins wait for the store; nil: nobody
	repeated atomic.Int64 // joins and leaves sent again, since no answer came
}

var errTooManyPages = errors.New("the user is on too many pages")

// observer takes measurements. A prometheus.Observer is one.
type observer interface{ Observe(float64) }

// Beats carries beats to the owners of their partitions. SendBeat must not block,
// and may lose a beat.
type Beats interface{ SendBeat(b *heartbeat.Beat) }

// acknowledged takes the counts that come with acknowledgements.
type acknowledged interface{ Acknowledged(u presence.Update) }

// joiner is a connection that has joined a page. arrived is called when the store
// has the join, without the roster's locks.
type joiner interface{ arrived(page string) }

// waiter is a joiner that waits for the store.
type waiter struct {
	joiner
	since time.Time
}

// lane is one partition's part of the roster. mu guards all of it.
type partitionStream struct {
	mu         sync.Mutex
	partition  int
	users      map[presence.User]*userEntry
	number     uint64
	first      uint64          // number of flight[0]
	alive      []presence.User // the living, as last counted; not changed, since beats carry it
	aliveStale bool            // it has to be counted again
	flight     []inFlight      // sent and not acknowledged, in order; at most heartbeat.MaxOps
	// queue has the spots that have changed and are not in flight, each once: so
	// it is bounded by the connections and their pages, and by kept.
	queue    []*presenceEntry
	dequeued uint64 // how many entries have left the queue
	holes    int    // entries of spots that came and went before they were told
	// kept has the spots that nobody is at but whose grace runs, or ended less than
	// afterGrace ago, each once: who else may come back, and what the next owner is to
	// hear, is known until then.
	absent []*presenceEntry
	// The stream has told of everything when rest entries of queue have left it:
	// then whole is set, see heartbeat.Beat. announce says that the owner is to
	// hear of it, and of flight, whether or not there is something new.
	untilWhole  int
	whole       uint64
	announce    bool
	sent        time.Time     // when flight was last sent
	repeatAfter time.Duration // after this it is sent again
	kicked      bool

	waiting atomic.Bool // flight is not empty; read without mu
}

type inFlight struct {
	entry *presenceEntry
	op    heartbeat.Op
}

// resident is a user with something to tell of. What is done with one of its spots takes no longer
// when it has many: the pollers of all connections wait for the lane's lock.
type userEntry struct {
	entries []*presenceEntry          // at most maxUserPages
	index   map[string]*presenceEntry // by page; nil while there are few
}

// find returns the spot on the page, or nil.
func (user *userEntry) find(page string) *presenceEntry {
	if user.index != nil {
		return user.index[page]
	}
	for _, e := range user.entries {
		if e.page == page {
			return e
		}
	}
	return nil
}

func (user *userEntry) add(e *presenceEntry) {
	e.index = len(user.entries)
	user.entries = append(user.entries, e)
	switch {
	case user.index != nil:
		user.index[e.page] = e
	case len(user.entries) > fewEntries:
		user.index = make(map[string]*presenceEntry, 2*len(user.entries))
		for _, e := range user.entries {
			user.index[e.page] = e
		}
	}
}

func (user *userEntry) remove(e *presenceEntry) {
	last := len(user.entries) - 1
	moved := user.entries[last]
	user.entries[e.index], moved.index = moved, e.index
	user.entries[last] = nil
	user.entries = user.entries[:last]
	if delete(user.index, e.page); user.index != nil && last <= fewEntries/2 {
		user.entries, user.index = slices.Clone(user.entries), nil // the memory of thousands must not stay with a few
	}
}

// spot is one user on one page at this gateway.
type presenceEntry struct {
	user     presence.User
	page     string
	index    int       // its place among the user's spots
	live     int       // connections that have joined
	lost     int       // connections that ended without a leave and may come back until
	until    time.Time // end of the last grace
	lastOp   heartbeat.Kind
	acked    bool     // what was told is in the store
	absent   bool     // in lane.kept
	queued   bool     // in queue
	position uint64   // then: which of all that were ever queued in the lane
	flying   int      // its ops in flight
	waiters  []waiter // joined, and waiting for the store to have it
}

func newRoster(source heartbeat.Source, partitions int, interval, grace time.Duration, beats Beats, counts acknowledged) *roster {
	r := &roster{
		source:   source,
		interval: interval,
		grace:    grace,
		beats:    beats,
		counts:   counts,
		streams:  make([]partitionStream, partitions),
		kick:     make(chan *partitionStream, partitions),
	}
	for i := range r.streams {
		s := &r.streams[i]
		s.partition, s.users, s.first = i, map[presence.User]*userEntry{}, 1
		// Streams of a former life are older, so their late answers are, too.
		s.number = max(source.Incarnation, 1)
	}
	return r
}

func (r *roster) streamOf(u presence.User) *partitionStream {
	return &r.streams[u.Partition(len(r.streams))]
}

// join notes that a connection of the user has joined the page. It returns
// true when the store has the user there already; otherwise c.arrived is
// called once it has. It returns errTooManyPages, and notes nothing, when the user is on
// maxUserPages other pages.
func (r *roster) join(u presence.User, page string, c joiner) (stored bool, err error) {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.findOrAdd(u, page)
	if e == nil {
		return false, errTooManyPages
	}
	e.live++
	s.aliveStale = true
	if e.lost > 0 && time.Now().Before(e.until) {
		e.lost-- // it has come back: nobody need wait for it any more
	} else {
		e.lost = 0
	}
	if e.stored() {
		return true, nil
	}
	e.waiters = append(e.waiters, waiter{c, time.Now()})
	r.enqueue(s, e)
	return false, nil
}

// leave notes that a connection has left the page, or, when lost, that it
// ended without a leave: then the user stays for the grace.
func (r *roster) leave(u presence.User, page string, c joiner, lost bool) {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(u, page)
	if e == nil || e.live == 0 {
		return
	}
	e.live--
	s.aliveStale = true
	e.waiters = slices.DeleteFunc(e.waiters, func(w waiter) bool { return w.joiner == c })
	if lost && r.grace > 0 {
		now := time.Now()
		if now.After(e.until) {
			e.lost = 0
		}
		e.lost++
		e.until = now.Add(r.grace)
	}
	if e.live > 0 {
		return
	}
	if e.lastOp == 0 { // it came and went before anybody was told; the store may be away for long
		s.withdraw(e)
		s.forget(e)
		r.wake(s) // it may have been the last of what the stream had to tell
		return
	}
	r.enqueue(s, e)
}

// untell takes a queued spot out of the queue. Its entry stays empty until the
// queue is mostly such entries.
func (s *partitionStream) withdraw(e *presenceEntry) {
	s.queue[e.position-s.dequeued] = nil
	if s.holes++; s.holes <= len(s.queue)/2+16 {
		return
	}
	full := make([]*presenceEntry, 0, len(s.queue)-s.holes)
	rest := 0
	for i, e := range s.queue {
		if e == nil {
			continue
		}
		if i < s.untilWhole {
			rest++
		}
		e.position = s.dequeued + uint64(len(full))
		full = append(full, e)
	}
	s.queue, s.untilWhole, s.holes = full, rest, 0
}

// stored reports whether the store has what is told of the spot, and that is a join.
func (e *presenceEntry) stored() bool { return e.lastOp == heartbeat.Join && e.acked && !e.queued }

// stored reports whether the store has the user on the page because of this gateway.
func (r *roster) stored(u presence.User, page string) bool {
	s := r.streamOf(u)
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.find(u, page)
	return e != nil && e.stored()
}

// find returns the user's spot on the page, or nil.
func (s *partitionStream) find(u presence.User, page string) *presenceEntry {
	if user := s.users[u]; user != nil {
		return user.find(page)
	}
	return nil
}

// spot is find that makes what is missing. It returns nil when the user has maxUserPages others.
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

// tell queues e, unless what it is now is on its way, and wakes the sender. It
// does not wait for the answer to what was told before: a leave is not answered
// while the store is away, and its grace runs.
func (r *roster) enqueue(s *partitionStream, e *presenceEntry) {
	if e.queued || e.flying > 0 && (e.live > 0) == (e.lastOp == heartbeat.Join) {
		return
	}
	e.queued = true
	e.position = s.dequeued + uint64(len(s.queue))
	s.queue = append(s.queue, e)
	r.wake(s)
}

// restart begins a new stream, which tells of everything anew: what is in
// flight, and all joins. Who does not know the stream knows nobody here. It
// learns of a user by whatever is in flight, and would then not ask for the
// user's other pages.
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
	for _, e := range s.absent { // the owner that knows of the grace may not be the one that hears this
		if e.live == 0 {
			r.enqueue(s, e)
		}
	}
	s.untilWhole, s.whole, s.announce = len(s.queue), 0, true
	r.wake(s)
}

// movedTo tells a partition's new owner of everything. An owner from before
// that has it again learns by the new stream that it has missed something.
func (r *roster) movedTo(partition int) {
	s := &r.streams[partition]
	s.mu.Lock()
	defer s.mu.Unlock()
	r.restart(s)
}

// renew has all joins of the user told again.
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

// run sends until ctx ends.
func (r *roster) run(ctx context.Context) {
	step := min(rosterTick, r.interval/4)
	tick := time.NewTicker(step)
	defer tick.Stop()
	turns := max(int(r.interval/step), 1) // each lane has its beat in one of them
	for turn := 0; ; {
		select {
		case <-ctx.Done():
			return
		case s := <-r.kick:
			r.flush(s)
		case now := <-tick.C:
			for i := range r.streams {
				s := &r.streams[i]
				if s.waiting.Load() {
					r.resend(s, now)
				}
				if i%turns == turn {
					r.sendAlive(s)
				}
			}
			turn = (turn + 1) % turns
		}
	}
}

// flush puts queued spots in flight, as far as there is room, and sends them.
func (r *roster) flush(s *partitionStream) {
	s.mu.Lock()
	s.kicked = false
	from := len(s.flight)
	for len(s.queue) > 0 && len(s.flight) < heartbeat.MaxOps {
		e := s.queue[0]
		s.queue[0] = nil
		s.queue = s.queue[1:]
		s.dequeued++
		s.untilWhole = max(s.untilWhole-1, 0)
		if e == nil {
			s.holes--
			continue
		}
		e.queued = false
		op := heartbeat.Op{Kind: heartbeat.Join, User: e.user, Page: e.page}
		if e.live == 0 {
			op.Kind = heartbeat.Leave
			if left := time.Until(e.until); e.lost > 0 && left > 0 {
				op.Grace = left
			}
		}
		if e.flying > 0 && e.lastOp == op.Kind {
			continue // it went, or came, and is again what is on its way
		}
		e.flying++
		e.lastOp, e.acked = op.Kind, false
		s.aliveStale = true
		s.flight = append(s.flight, inFlight{e, op})
	}
	if len(s.queue) == 0 {
		s.queue = nil
	}
	if s.untilWhole == 0 && s.whole == 0 {
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

// beatOf is the message with the ops of flight[from:].
func (s *partitionStream) beatOf(source heartbeat.Source, from int) *heartbeat.Beat {
	b := &heartbeat.Beat{Source: source, Partition: s.partition, Stream: s.number, First: s.first + uint64(from), Whole: s.whole}
	b.Ops = make([]heartbeat.Op, 0, len(s.flight)-from)
	for _, f := range s.flight[from:] {
		b.Ops = append(b.Ops, f.op)
	}
	return b
}

// again repeats what has been in flight for too long.
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

// beat sends the heartbeats of the lane's users.
func (r *roster) sendAlive(s *partitionStream) {
	s.mu.Lock()
	if s.aliveStale {
		s.aliveStale, s.alive = false, nil
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

// endGraces forgets the spots whose grace is over.
func (s *partitionStream) endGraces(now time.Time) {
	s.absent = slices.DeleteFunc(s.absent, func(e *presenceEntry) bool {
		switch {
		case e.live > 0 || e.queued || e.flying > 0: // the answer to what is told decides
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

// receive takes a node's answer. Any goroutine may call it; it does not block.
func (r *roster) receive(a *heartbeat.Reply) {
	if a.Partition < 0 || a.Partition >= len(r.streams) {
		return
	}
	s := &r.streams[a.Partition]
	type arrival struct {
		waiter
		page string
	}
	var arrivals []arrival
	for _, c := range a.Counts { // before who asks learns that the store has it: another tab joins without waiting then
		r.counts.Acknowledged(c.Update())
	}
	s.mu.Lock()
	switch {
	case !a.Ask:
	case a.Stream == s.number || s.first == 1: // it knows this stream, or will by what is not acknowledged
		s.announce = true
		r.wake(s)
	default:
		r.restart(s)
	}
	if a.Stream == s.number {
		if a.Reset {
			r.restart(s)
		}
		for len(s.flight) > 0 && s.first <= a.Acked {
			e := s.flight[0].entry
			s.flight[0] = inFlight{}
			s.flight = s.flight[1:]
			s.first++
			s.sent, s.repeatAfter = time.Now(), firstRepeat
			e.flying--
			e.acked = e.flying == 0
			switch {
			case e.queued || e.flying > 0: // the answer to that will come
			case (e.live > 0) != (e.lastOp == heartbeat.Join):
				r.enqueue(s, e)
			case e.live == 0 && e.lost > 0 && time.Now().Before(e.until.Add(afterGrace)):
				if !e.absent {
					e.absent = true
					s.absent = append(s.absent, e)
				}
			case e.live == 0:
				e.lost = 0
				if !e.absent { // else at the next beat
					s.forget(e)
				}
			default:
				for _, c := range e.waiters {
					arrivals = append(arrivals, arrival{c, e.page})
				}
				e.waiters = nil
			}
		}
		if len(s.flight) == 0 {
			s.flight = nil
			s.waiting.Store(false)
		}
		if len(s.queue) > 0 {
			r.wake(s)
		}
	}
	for _, u := range a.Unknown {
		if user := s.users[u]; user != nil {
			r.requeueJoins(s, user)
		}
	}
	s.mu.Unlock()
	for _, ar := range arrivals {
		if r.seen != nil {
			r.seen.Observe(time.Since(ar.since).Seconds())
		}
		ar.arrived(ar.page)
	}
}
