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

	fewSpots = 16     // of a user; more are found by an index, which takes memory
	maxSpots = 10_000 // of a user, over all connections to this gateway; a join of another page is refused
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
	lanes    []lane
	kick     chan *lane // lanes with something new to send; room for all, each in it once

	seen     observer     // of the seconds that joins wait for the store; nil: nobody
	repeated atomic.Int64 // joins and leaves sent again, since no answer came
}

var errTooManySpots = errors.New("the user is on too many pages")

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
type lane struct {
	mu     sync.Mutex
	id     int
	users  map[presence.User]*resident
	stream uint64
	first  uint64          // number of flight[0]
	alive  []presence.User // the living, as last counted; not changed, since beats carry it
	moved  bool            // it has to be counted again
	flight []flying        // sent and not acknowledged, in order; at most heartbeat.MaxOps
	// queue has the spots that have changed and are not in flight, each once: so
	// it is bounded by the connections and their pages, and by kept.
	queue []*spot
	left  uint64 // how many entries have left the queue
	empty int    // entries of spots that came and went before they were told
	// kept has the spots that nobody is at but whose grace runs, or ended less than
	// afterGrace ago, each once: who else may come back, and what the next owner is to
	// hear, is known until then.
	kept []*spot
	// The stream has told of everything when rest entries of queue have left it:
	// then whole is set, see heartbeat.Beat. announce says that the owner is to
	// hear of it, and of flight, whether or not there is something new.
	rest     int
	whole    uint64
	announce bool
	sent     time.Time     // when flight was last sent
	repeat   time.Duration // after this it is sent again
	kicked   bool

	waiting atomic.Bool // flight is not empty; read without mu
}

type flying struct {
	spot *spot
	op   heartbeat.Op
}

// resident is a user with something to tell of. What is done with one of its spots takes no longer
// when it has many: the pollers of all connections wait for the lane's lock.
type resident struct {
	spots []*spot          // at most maxSpots
	index map[string]*spot // by page; nil while there are few
}

// find returns the spot on the page, or nil.
func (res *resident) find(page string) *spot {
	if res.index != nil {
		return res.index[page]
	}
	for _, sp := range res.spots {
		if sp.page == page {
			return sp
		}
	}
	return nil
}

func (res *resident) add(sp *spot) {
	sp.at = len(res.spots)
	res.spots = append(res.spots, sp)
	switch {
	case res.index != nil:
		res.index[sp.page] = sp
	case len(res.spots) > fewSpots:
		res.index = make(map[string]*spot, 2*len(res.spots))
		for _, sp := range res.spots {
			res.index[sp.page] = sp
		}
	}
}

func (res *resident) remove(sp *spot) {
	last := len(res.spots) - 1
	moved := res.spots[last]
	res.spots[sp.at], moved.at = moved, sp.at
	res.spots[last] = nil
	res.spots = res.spots[:last]
	if delete(res.index, sp.page); res.index != nil && last <= fewSpots/2 {
		res.spots, res.index = slices.Clone(res.spots), nil // the memory of thousands must not stay with a few
	}
}

// spot is one user on one page at this gateway.
type spot struct {
	user   presence.User
	page   string
	at     int       // its place among the user's spots
	live   int       // connections that have joined
	lost   int       // connections that ended without a leave and may come back until
	until  time.Time // end of the last grace
	told   heartbeat.Kind
	acked  bool     // what was told is in the store
	kept   bool     // in lane.kept
	queued bool     // in queue
	entry  uint64   // then: which of all that were ever queued in the lane
	flying int      // its ops in flight
	wait   []waiter // joined, and waiting for the store to have it
}

func newRoster(source heartbeat.Source, partitions int, interval, grace time.Duration, beats Beats, counts acknowledged) *roster {
	r := &roster{
		source:   source,
		interval: interval,
		grace:    grace,
		beats:    beats,
		counts:   counts,
		lanes:    make([]lane, partitions),
		kick:     make(chan *lane, partitions),
	}
	for i := range r.lanes {
		l := &r.lanes[i]
		l.id, l.users, l.first = i, map[presence.User]*resident{}, 1
		// Streams of a former life are older, so their late answers are, too.
		l.stream = max(source.Incarnation, 1)
	}
	return r
}

func (r *roster) lane(u presence.User) *lane { return &r.lanes[u.Partition(len(r.lanes))] }

// join notes that a connection of the user has joined the page. It returns
// true when the store has the user there already; otherwise c.arrived is
// called once it has. It returns errTooManySpots, and notes nothing, when the user is on
// maxSpots other pages.
func (r *roster) join(u presence.User, page string, c joiner) (stored bool, err error) {
	l := r.lane(u)
	l.mu.Lock()
	defer l.mu.Unlock()
	sp := l.spot(u, page)
	if sp == nil {
		return false, errTooManySpots
	}
	sp.live++
	l.moved = true
	if sp.lost > 0 && time.Now().Before(sp.until) {
		sp.lost-- // it has come back: nobody need wait for it any more
	} else {
		sp.lost = 0
	}
	if sp.stored() {
		return true, nil
	}
	sp.wait = append(sp.wait, waiter{c, time.Now()})
	r.tell(l, sp)
	return false, nil
}

// leave notes that a connection has left the page, or, when lost, that it
// ended without a leave: then the user stays for the grace.
func (r *roster) leave(u presence.User, page string, c joiner, lost bool) {
	l := r.lane(u)
	l.mu.Lock()
	defer l.mu.Unlock()
	sp := l.find(u, page)
	if sp == nil || sp.live == 0 {
		return
	}
	sp.live--
	l.moved = true
	sp.wait = slices.DeleteFunc(sp.wait, func(w waiter) bool { return w.joiner == c })
	if lost && r.grace > 0 {
		now := time.Now()
		if now.After(sp.until) {
			sp.lost = 0
		}
		sp.lost++
		sp.until = now.Add(r.grace)
	}
	if sp.live > 0 {
		return
	}
	if sp.told == 0 { // it came and went before anybody was told; the store may be away for long
		l.untell(sp)
		l.forget(sp)
		r.wake(l) // it may have been the last of what the stream had to tell
		return
	}
	r.tell(l, sp)
}

// untell takes a queued spot out of the queue. Its entry stays empty until the
// queue is mostly such entries.
func (l *lane) untell(sp *spot) {
	l.queue[sp.entry-l.left] = nil
	if l.empty++; l.empty <= len(l.queue)/2+16 {
		return
	}
	full := make([]*spot, 0, len(l.queue)-l.empty)
	rest := 0
	for i, sp := range l.queue {
		if sp == nil {
			continue
		}
		if i < l.rest {
			rest++
		}
		sp.entry = l.left + uint64(len(full))
		full = append(full, sp)
	}
	l.queue, l.rest, l.empty = full, rest, 0
}

// stored reports whether the store has what is told of the spot, and that is a join.
func (sp *spot) stored() bool { return sp.told == heartbeat.Join && sp.acked && !sp.queued }

// stored reports whether the store has the user on the page because of this gateway.
func (r *roster) stored(u presence.User, page string) bool {
	l := r.lane(u)
	l.mu.Lock()
	defer l.mu.Unlock()
	sp := l.find(u, page)
	return sp != nil && sp.stored()
}

// find returns the user's spot on the page, or nil.
func (l *lane) find(u presence.User, page string) *spot {
	if res := l.users[u]; res != nil {
		return res.find(page)
	}
	return nil
}

// spot is find that makes what is missing. It returns nil when the user has maxSpots others.
func (l *lane) spot(u presence.User, page string) *spot {
	if sp := l.find(u, page); sp != nil {
		return sp
	}
	res := l.users[u]
	if res == nil {
		res = &resident{}
		l.users[u] = res
	}
	if len(res.spots) == maxSpots {
		return nil
	}
	sp := &spot{user: u, page: page}
	res.add(sp)
	return sp
}

func (l *lane) forget(sp *spot) {
	res := l.users[sp.user]
	if res.remove(sp); len(res.spots) == 0 {
		delete(l.users, sp.user)
	}
}

// tell queues sp, unless what it is now is on its way, and wakes the sender. It
// does not wait for the answer to what was told before: a leave is not answered
// while the store is away, and its grace runs.
func (r *roster) tell(l *lane, sp *spot) {
	if sp.queued || sp.flying > 0 && (sp.live > 0) == (sp.told == heartbeat.Join) {
		return
	}
	sp.queued = true
	sp.entry = l.left + uint64(len(l.queue))
	l.queue = append(l.queue, sp)
	r.wake(l)
}

// restart begins a new stream, which tells of everything anew: what is in
// flight, and all joins. Who does not know the stream knows nobody here. It
// learns of a user by whatever is in flight, and would then not ask for the
// user's other pages.
func (r *roster) restart(l *lane) {
	l.stream++
	l.first = 1
	l.sent = time.Time{} // at the next tick
	l.repeat = firstRepeat
	for i := range l.flight { // a leave may have waited for an owner for longer than its grace
		if f := &l.flight[i]; f.op.Kind == heartbeat.Leave && f.spot.live == 0 {
			f.op.Grace = max(min(f.op.Grace, time.Until(f.spot.until)), 0)
		}
	}
	for _, res := range l.users {
		r.renew(l, res)
	}
	for _, sp := range l.kept { // the owner that knows of the grace may not be the one that hears this
		if sp.live == 0 {
			r.tell(l, sp)
		}
	}
	l.rest, l.whole, l.announce = len(l.queue), 0, true
	r.wake(l)
}

// movedTo tells a partition's new owner of everything. An owner from before
// that has it again learns by the new stream that it has missed something.
func (r *roster) movedTo(partition int) {
	l := &r.lanes[partition]
	l.mu.Lock()
	defer l.mu.Unlock()
	r.restart(l)
}

// renew has all joins of the user told again.
func (r *roster) renew(l *lane, res *resident) {
	for _, sp := range res.spots {
		if sp.live > 0 && sp.told == heartbeat.Join {
			r.tell(l, sp)
		}
	}
}

func (r *roster) wake(l *lane) {
	if !l.kicked {
		l.kicked = true
		r.kick <- l
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
		case l := <-r.kick:
			r.flush(l)
		case now := <-tick.C:
			for i := range r.lanes {
				l := &r.lanes[i]
				if l.waiting.Load() {
					r.again(l, now)
				}
				if i%turns == turn {
					r.beat(l)
				}
			}
			turn = (turn + 1) % turns
		}
	}
}

// flush puts queued spots in flight, as far as there is room, and sends them.
func (r *roster) flush(l *lane) {
	l.mu.Lock()
	l.kicked = false
	from := len(l.flight)
	for len(l.queue) > 0 && len(l.flight) < heartbeat.MaxOps {
		sp := l.queue[0]
		l.queue[0] = nil
		l.queue = l.queue[1:]
		l.left++
		l.rest = max(l.rest-1, 0)
		if sp == nil {
			l.empty--
			continue
		}
		sp.queued = false
		op := heartbeat.Op{Kind: heartbeat.Join, User: sp.user, Page: sp.page}
		if sp.live == 0 {
			op.Kind = heartbeat.Leave
			if left := time.Until(sp.until); sp.lost > 0 && left > 0 {
				op.Grace = left
			}
		}
		if sp.flying > 0 && sp.told == op.Kind {
			continue // it went, or came, and is again what is on its way
		}
		sp.flying++
		sp.told, sp.acked = op.Kind, false
		l.moved = true
		l.flight = append(l.flight, flying{sp, op})
	}
	if len(l.queue) == 0 {
		l.queue = nil
	}
	if l.rest == 0 && l.whole == 0 {
		l.whole, l.announce = l.first+uint64(len(l.flight)), true
	}
	var b *heartbeat.Beat
	if l.announce || len(l.flight) > from {
		if l.announce {
			from = 0
		}
		if from == 0 {
			l.sent, l.repeat = time.Now(), firstRepeat
		}
		b = l.beatOf(r.source, from)
		l.announce = false
		l.waiting.Store(len(l.flight) > 0)
	}
	l.mu.Unlock()
	if b != nil {
		r.beats.SendBeat(b)
	}
}

// beatOf is the message with the ops of flight[from:].
func (l *lane) beatOf(source heartbeat.Source, from int) *heartbeat.Beat {
	b := &heartbeat.Beat{Source: source, Partition: l.id, Stream: l.stream, First: l.first + uint64(from), Whole: l.whole}
	b.Ops = make([]heartbeat.Op, 0, len(l.flight)-from)
	for _, f := range l.flight[from:] {
		b.Ops = append(b.Ops, f.op)
	}
	return b
}

// again repeats what has been in flight for too long.
func (r *roster) again(l *lane, now time.Time) {
	l.mu.Lock()
	var b *heartbeat.Beat
	if len(l.flight) > 0 && now.Sub(l.sent) >= l.repeat {
		b = l.beatOf(r.source, 0)
		l.sent, l.repeat = now, min(2*l.repeat, lastRepeat)
		r.repeated.Add(int64(len(l.flight)))
	}
	l.mu.Unlock()
	if b != nil {
		r.beats.SendBeat(b)
	}
}

// beat sends the heartbeats of the lane's users.
func (r *roster) beat(l *lane) {
	l.mu.Lock()
	if l.moved {
		l.moved, l.alive = false, nil
		for u, res := range l.users {
			if slices.ContainsFunc(res.spots, func(sp *spot) bool { return sp.live > 0 && sp.told != 0 }) {
				if l.alive == nil {
					l.alive = make([]presence.User, 0, len(l.users))
				}
				l.alive = append(l.alive, u)
			}
		}
	}
	l.endGraces(time.Now())
	alive, stream := l.alive, l.stream
	l.mu.Unlock()
	for part := range slices.Chunk(alive, aliveBatch) {
		r.beats.SendBeat(&heartbeat.Beat{Source: r.source, Partition: l.id, Stream: stream, Alive: part})
	}
}

// endGraces forgets the spots whose grace is over.
func (l *lane) endGraces(now time.Time) {
	l.kept = slices.DeleteFunc(l.kept, func(sp *spot) bool {
		switch {
		case sp.live > 0 || sp.queued || sp.flying > 0: // the answer to what is told decides
			sp.kept = false
		case sp.lost == 0 || !now.Before(sp.until.Add(afterGrace)):
			sp.kept = false
			l.forget(sp)
		}
		return !sp.kept
	})
	if len(l.kept) == 0 {
		l.kept = nil
	}
}

// receive takes a node's answer. Any goroutine may call it; it does not block.
func (r *roster) receive(a *heartbeat.Reply) {
	if a.Partition < 0 || a.Partition >= len(r.lanes) {
		return
	}
	l := &r.lanes[a.Partition]
	type arrival struct {
		waiter
		page string
	}
	var arrivals []arrival
	for _, c := range a.Counts { // before who asks learns that the store has it: another tab joins without waiting then
		r.counts.Acknowledged(c.Update())
	}
	l.mu.Lock()
	switch {
	case !a.Ask:
	case a.Stream == l.stream || l.first == 1: // it knows this stream, or will by what is not acknowledged
		l.announce = true
		r.wake(l)
	default:
		r.restart(l)
	}
	if a.Stream == l.stream {
		if a.Reset {
			r.restart(l)
		}
		for len(l.flight) > 0 && l.first <= a.Acked {
			sp := l.flight[0].spot
			l.flight[0] = flying{}
			l.flight = l.flight[1:]
			l.first++
			l.sent, l.repeat = time.Now(), firstRepeat
			sp.flying--
			sp.acked = sp.flying == 0
			switch {
			case sp.queued || sp.flying > 0: // the answer to that will come
			case (sp.live > 0) != (sp.told == heartbeat.Join):
				r.tell(l, sp)
			case sp.live == 0 && sp.lost > 0 && time.Now().Before(sp.until.Add(afterGrace)):
				if !sp.kept {
					sp.kept = true
					l.kept = append(l.kept, sp)
				}
			case sp.live == 0:
				sp.lost = 0
				if !sp.kept { // else at the next beat
					l.forget(sp)
				}
			default:
				for _, c := range sp.wait {
					arrivals = append(arrivals, arrival{c, sp.page})
				}
				sp.wait = nil
			}
		}
		if len(l.flight) == 0 {
			l.flight = nil
			l.waiting.Store(false)
		}
		if len(l.queue) > 0 {
			r.wake(l)
		}
	}
	for _, u := range a.Unknown {
		if res := l.users[u]; res != nil {
			r.renew(l, res)
		}
	}
	l.mu.Unlock()
	for _, ar := range arrivals {
		if r.seen != nil {
			r.seen.Observe(time.Since(ar.since).Seconds())
		}
		ar.arrived(ar.page)
	}
}
