package fanout

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/internal/wake"
	"headcount/presence"
)

// answersAtOnce bounds the subscribe requests of one subscriber that are answered per interval, possibly all at once:
// as many as a connection may have pages.
const answersAtOnce = presence.MaxPages

// atOnce is a time on the shard's clock that has always passed.
const atOnce = time.Duration(1)

// shard delivers updates to a part of the subscribers. One lock guards its state, and is never held during a write;
// only the goroutine of run writes.
//
// A subscriber gets a topic's newest update at once if its last one was sent at least an interval ago, and otherwise
// when the interval has passed. A newer update replaces it in the meantime, so updates never queue up.
type shard struct {
	hub      *Hub
	interval time.Duration // minimum time between two updates of one topic to one subscriber, while the budget suffices
	quantum  time.Duration // minimum time between two scans of a topic
	live     liveness
	start    time.Time
	wake     chan struct{} // has capacity 1: there is something to deliver
	figures  figures

	mu     sync.Mutex // guards the fields below, and the fields of Subscriber that say so
	topics map[presence.Topic]*topic
	seats  []seat
	rests  rests
	queues

	// only run uses it
	pace  pace
	pass  pass
	swept time.Duration // time of the last sweep
}

// figures are the Figures of one shard.
type figures struct{ delivered, conflated, busy, unwritten, silent atomic.Int64 }

// queues list what the next pass has to examine.
type queues struct {
	due     []*topic      // topics with a scan to come; without duplicates
	visits  []visit       // subscribers to serve at once
	asking  []*Subscriber // subscribers with subscribe requests to answer; without duplicates
	numbers []*Subscriber // subscribers whose unread count has changed; without duplicates
}

// pass is what one call of deliver writes.
type pass struct {
	id      uint64
	batch   []delivery // index 0 is unused, because it means none
	answers int        // number of deliveries that answer a subscribe request
	joined  []byte     // buffer for all texts of one client
	numbers []byte     // buffer for the texts of all numbers
}

// seat is an element of the shard's list of subscribers.
type seat struct {
	sub  *Subscriber
	look time.Duration // sweeps skip the seat until then
}

// visit is a subscriber to which a topic's update is delivered at once.
type visit struct {
	sub    *Subscriber
	topic  *topic
	missed bool // it was busy or paused when the update was delivered to others; otherwise it is new
}

// delivery is a text for one client; more chains further texts for the same client.
type delivery struct {
	sub     *Subscriber
	bytes   []byte
	more    int32 // index of the client's next delivery; 0: none
	chained bool  // it is not the first delivery of its client
}

// newShard returns a shard with a budget of deliveries per second.
func newShard(h *Hub, interval time.Duration, budget float64, live liveness) *shard {
	return &shard{
		hub:      h,
		pace:     pace{budget: budget, least: interval},
		interval: interval,
		// What is due within a tenth of an interval shares a pass.
		quantum: max(interval/10, time.Millisecond),
		live:    live,
		start:   time.Now(),
		wake:    make(chan struct{}, 1),
		topics:  map[presence.Topic]*topic{},
	}
}

// now returns the time on the shard's clock. The clock starts at one interval, so that nothing appears to have been
// sent a moment ago.
func (s *shard) now() time.Duration { return time.Since(s.start) + s.interval }

// earliest returns the earlier of two times, of which 0 means never.
func earliest(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}

	return a
}

// subscribeLocked returns the subscriber's place for the topic, and creates it if necessary.
func (s *shard) subscribeLocked(sub *Subscriber, name presence.Topic) *place {
	if p := sub.place(name); p != nil {
		return p
	}

	t := s.topics[name]
	if t == nil {
		t = &topic{name: name, encoder: s.hub.kinds[name.Kind].encoder}
		// An update that the hub publishes meanwhile waits for the shard's lock, and then finds the topic.
		s.topics[name] = t

		if u, known := s.hub.Want(name); known {
			t.update = u
			// Not 0, which says that there is no update.
			t.gen = 1
		}
	}

	sub.places = append(sub.places, place{topic: t, index: int32(len(t.subs))})
	t.subs = append(t.subs, subscription{sub: sub, early: earlyUpdates})

	return &sub.places[len(sub.places)-1]
}

// unsubscribeLocked ends one of the subscriber's places.
func (s *shard) unsubscribeLocked(sub *Subscriber, place int) {
	p := sub.places[place]
	sub.places = slices.Delete(sub.places, place, place+1)

	// The last subscription takes the place of the ended one.
	t := p.topic

	last := int32(len(t.subs) - 1)
	if p.index != last {
		moved := t.subs[last]
		t.subs[p.index] = moved
		// The place of the moved subscription has to say where it is now.
		moved.sub.placeOf(t).index = p.index
	}
	// The array must not keep a client that has gone.
	t.subs[last] = subscription{}
	t.subs = t.subs[:last]

	if len(t.subs) == 0 {
		delete(s.topics, t.name)
		s.hub.Unwant(t.name)
	}
}

// askLocked answers a subscribe request in a form. A paused subscriber is not sent the same update again when it
// resumes.
func (s *shard) askLocked(sub *Subscriber, p *place, form Form) {
	x := &p.topic.subs[p.index]
	has := x.gen != 0 && x.form == form
	x.form = form
	if !sub.paused || !has {
		s.renewLocked(sub, p)
	}
}

// renewLocked makes the subscriber get the topic's update even if it already has it: at once, or an interval after the
// last one.
func (s *shard) renewLocked(sub *Subscriber, p *place) {
	x := &p.topic.subs[p.index]

	x.gen = 0
	x.shown = 0
	switch x.state {
	case withheld: // for Ready, which serves it
		return
	case overdue: // it stays so until Ready
	default:
		x.state = asking
	}

	// The subscriber is in s.asking exactly while its answerAt is not 0.
	switch {
	case sub.answerAt == 0:
		s.asking = append(s.asking, sub)
		sub.answerAt = atOnce
	case x.at == 0: // it waits for other answers, but was never sent this topic
		sub.answerAt = atOnce
	}
	wake.Signal(s.wake)
}

// readyLocked stops withholding a topic. It sends the update even if the client already has it: that may have been as a
// stale one.
func (s *shard) readyLocked(sub *Subscriber, p *place) {
	p.withheldAt = 0

	x := &p.topic.subs[p.index]
	x.state = following
	x.gen = 0
	x.shown = 0
	s.visitLocked(sub, p.topic, false)
}

// lapseLocked stops withholding a topic that was withheld for too long: from now on updates are sent as stale ones.
func (s *shard) lapseLocked(sub *Subscriber, p *place) {
	p.topic.subs[p.index].state = overdue
	s.visitLocked(sub, p.topic, false)
}

// visitLocked schedules the topic's update for the subscriber at once, unless what the subscription shows would not
// change.
func (s *shard) visitLocked(sub *Subscriber, t *topic, missed bool) {
	s.visits = append(s.visits, visit{sub, t, missed})
	wake.Signal(s.wake)
}

// update accepts a newer update of a topic.
func (s *shard) update(u presence.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()

	t := s.topics[u.Topic]
	// Every shard gets every update, and most have no client for it.
	if t == nil {
		return
	}

	// Of the same version, the two differ in the mark alone, and either may have overtaken the other on the way here.
	sameVersion := t.gen != 0 && u.Version == t.update.Version
	if sameVersion {
		u.Stale = s.staleInHub(u)
	}
	if t.gen != 0 && !replaces(&u, &t.update) {
		return
	}

	t.update = u
	t.gen++
	if t.gen == 0 { // it wrapped around, and 0 means that there is no update
		t.gen = 1
	}

	t.before = t.changed
	t.changed = s.now()
	// A scan looks at all subscribers, so a topic that changes all the time is scanned rarely, for the newest update.
	s.scanAtLocked(t, max(t.changed, t.scanned+s.quantum))
}

// staleInHub reports whether u is marked as stale by now, as the hub says if it still has that version.
func (s *shard) staleInHub(u presence.Update) bool {
	last, known := s.hub.Last(u.Topic)
	if known && last.Version == u.Version {
		return last.Stale
	}

	return u.Stale
}

// scanAtLocked schedules a scan of t.
func (s *shard) scanAtLocked(t *topic, at time.Duration) {
	if t.scanAt == 0 {
		s.due = append(s.due, t)
	}

	t.scanAt = earliest(t.scanAt, at)
	wake.Signal(s.wake)
}

// run delivers, and pings silent clients, until ctx ends.
func (s *shard) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()

	sweep := time.NewTicker(s.live.tick())
	defer sweep.Stop()

	for {
		select {
		case <-ctx.Done():
			return
		case <-s.wake:
		case <-timer.C:
		case <-sweep.C:
			s.sweep()
			continue
		}

		next := s.deliver()
		// If nothing is due later, only a wake-up brings work, and the timer may stay as it is.
		if next > 0 {
			timer.Reset(max(next-s.now(), 0))
		}
	}
}

// deliver makes one pass: it collects what is due while holding the lock, and writes without it. It returns when the
// next pass is due, or 0.
func (s *shard) deliver() (next time.Duration) {
	s.mu.Lock()
	now := s.now()
	next = s.collectLocked(now)
	s.mu.Unlock()

	s.write()
	written := len(s.pass.batch) - 1
	s.figures.delivered.Add(int64(written))

	// Answers are limited separately. If they counted here, a client that asks often would slow down the pages of
	// others.
	s.pace.spend(written-s.pass.answers, now)

	clear(s.pass.batch) // so that no subscriber is kept in memory

	return next
}

// collectLocked fills the pass with everything that is due, and returns when more will be due, or 0.
func (s *shard) collectLocked(now time.Duration) (next time.Duration) {
	s.pass.id++
	// Index 0 stays empty, so that delivery.more can be 0 when there is no further text.
	s.pass.batch = append(s.pass.batch[:0], delivery{})

	s.pass.answers = 0
	s.pass.numbers = s.pass.numbers[:0]

	// Visits come first: scans then find their subscribers served.
	s.visitAllLocked(now)
	next = s.answerAllLocked(now)

	later := s.due[:0]
	for _, t := range s.due {
		if t.scanAt <= now {
			t.scanAt = s.scanLocked(t, now)
		}
		if t.scanAt != 0 {
			later = append(later, t)
			next = earliest(next, t.scanAt)
		}
	}
	// Otherwise topics that have gone would stay in memory.
	clear(s.due[len(later):])
	s.due = later

	return earliest(next, s.offerNumbersLocked(now))
}

// visitAllLocked serves the scheduled visits.
func (s *shard) visitAllLocked(now time.Duration) {
	for _, v := range s.visits {
		p := v.sub.placeOf(v.topic)
		if p == nil { // the subscriber has left the topic
			continue
		}

		x := &p.topic.subs[p.index]
		if x.at == now && x.gen == p.topic.gen { // the subscriber was already visited in this pass
			continue
		}

		n := s.offerLocked(p.topic, x, now)
		if !v.missed { // the update was withheld for the client's join, so it is an answer to the client
			s.pass.answers += n
		}
	}

	clear(s.visits)
	s.visits = s.visits[:0]
}

// write writes the pass, with one write per client.
func (s *shard) write() {
	batch := s.pass.batch
	for i := 1; i < len(batch); i++ {
		d := &batch[i]
		// A chained delivery is written with the first one of its client.
		if d.chained {
			continue
		}

		// Copying costs less than a system call for each text.
		bytes := d.bytes
		if d.more != 0 {
			s.pass.joined = append(s.pass.joined[:0], bytes...)
			for j := d.more; j != 0; j = batch[j].more {
				s.pass.joined = append(s.pass.joined, batch[j].bytes...)
			}
			bytes = s.pass.joined
		}

		if err := d.sub.client.Try(bytes); err != nil {
			s.undelivered(d.sub, err)
		}
	}
}

// answerAllLocked answers the subscribe requests that may be answered now, and returns when the next one may be, or 0.
func (s *shard) answerAllLocked(now time.Duration) (next time.Duration) {
	later := s.asking[:0]

	for _, sub := range s.asking {
		if sub.answerAt <= now {
			sub.answerAt = s.answerLocked(sub, now)
		}
		if sub.answerAt != 0 {
			later = append(later, sub)
			next = earliest(next, sub.answerAt)
		}
	}
	// Otherwise clients that have gone would stay in memory.
	clear(s.asking[len(later):])
	s.asking = later

	return next
}

// answerLocked answers subscribe requests of one subscriber: each topic at most once per interval, and at most
// answersAtOnce in total. The total matters because a topic that is left and subscribed again has no record of its last
// answer. It returns when to continue, or 0 when all are answered.
func (s *shard) answerLocked(sub *Subscriber, now time.Duration) (again time.Duration) {
	step := s.interval / answersAtOnce
	// Answers that an interval did not use are not saved up for the next one.
	sub.answered = max(sub.answered, now-s.interval)
	for i := range sub.places {
		t := sub.places[i].topic

		x := &t.subs[sub.places[i].index]
		if x.gen != 0 { // it was sent an update after it asked, if it did
			x.answered()
			continue
		}
		if !x.asks() {
			continue
		}

		at := x.at + s.interval
		if x.at == 0 || at <= now {
			if sub.answered+step <= now {
				x.answered()
				n := s.offerLocked(t, x, now)
				s.pass.answers += n
				sub.answered += step * time.Duration(n)
				continue
			}

			// Wait for a whole interval, to answer several at a time.
			at = sub.answered + s.interval
		}
		again = earliest(again, at)
	}

	if again != 0 {
		again = max(again, now+s.quantum)
	}

	return again
}

// scanLocked offers t's update to all subscribers that do not have it, and returns when to scan again, or 0 if none is
// left that can be served later by a scan.
func (s *shard) scanLocked(t *topic, now time.Duration) (again time.Duration) {
	t.scanned = now
	interval := s.pace.interval(len(t.subs))

	for i := range t.subs {
		x := &t.subs[i]
		if x.gen == t.gen || x.state == withheld {
			continue
		}

		at := t.dueAt(x, interval)
		// A subscription that was never sent an update (x.at is 0) need not wait.
		if x.at != 0 && at > now {
			again = earliest(again, at)
			continue
		}

		if s.offerLocked(t, x, now) > 0 && x.early > 0 {
			x.early--
		}
	}

	if again != 0 {
		// Subscribers whose intervals end at nearly the same time share a pass.
		again = max(again, now+s.quantum)
	}

	return again
}

// offerLocked adds t's update to the pass, unless the subscriber would see no difference, and returns the number of
// deliveries. It skips paused clients, and clients whose last write is not complete; these are served when it is.
func (s *shard) offerLocked(t *topic, x *subscription, now time.Duration) (deliveries int) {
	mustWait := x.state == withheld || x.sub.paused || x.sub.client.Busy()
	if t.gen == 0 || mustWait {
		return 0
	}

	offered := t.text(x.form, x.state == overdue)

	if x.gen != 0 {
		// The updates in between were never sent to the subscriber.
		s.figures.conflated.Add(int64(t.gen - x.gen - 1))
	}
	x.gen = t.gen // also if nothing is sent: the client needs no more than it has

	looksSame := x.shown != 0 && x.shown == offered.shown
	if looksSame || len(offered.bytes) == 0 {
		return 0
	}

	x.at = now
	x.shown = offered.shown
	s.chainLocked(x.sub, offered.bytes)
	return 1
}

// chainLocked adds a text for the client to the pass.
func (s *shard) chainLocked(sub *Subscriber, bytes []byte) {
	p := &s.pass
	d := delivery{sub: sub, bytes: bytes, chained: sub.pass == p.id}

	i := int32(len(p.batch))
	// All texts of a client in one pass go out in one write.
	if d.chained {
		p.batch[sub.tail].more = i
	} else {
		sub.pass = p.id
	}
	sub.tail = i

	p.batch = append(p.batch, d)
}

// undelivered handles a write that failed before any byte was sent.
func (s *shard) undelivered(sub *Subscriber, err error) {
	if !errors.Is(err, ErrBusy) {
		s.figures.unwritten.Add(1)
		if !errors.Is(err, net.ErrClosed) {
			_ = sub.client.Close() // closing makes the client leave
		}

		return
	}

	s.figures.busy.Add(1)
	s.mu.Lock()
	sub.missed = true
	s.mu.Unlock()

	if !sub.client.Busy() { // the write was completed before missed was set
		sub.Free()
	}
}
