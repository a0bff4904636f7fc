package fanout

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"headcount/presence"
)

// answersAtOnce is how many answers to its subscribes a subscriber gets in an
// interval, at once if it asks at once: as many as a connection may have pages.
const answersAtOnce = presence.MaxPages

// atOnce is a time on the shard's clock that is always over.
const atOnce = time.Duration(1)

// shard delivers updates to a part of the subscribers. Its state has one lock,
// which is never held while something is written; one goroutine, run, writes.
//
// Conflation: a topic's newest update goes to each subscriber at once if the
// last one went at least interval ago, else when that has passed. What is
// newer in the meantime takes its place, so nothing is ever queued.
type shard struct {
	hub      *Hub
	interval time.Duration // least time between two updates of one topic to one subscriber, when the budget has room
	quantum  time.Duration // least time between two looks at all subscribers of a topic
	live     liveness
	start    time.Time
	wake     chan struct{} // holds one: there is something to deliver

	delivered atomic.Int64 // updates written to subscribers
	conflated atomic.Int64 // updates that a newer one replaced before a subscriber got them
	busy      atomic.Int64 // writes put off, since the client had not taken the last one
	unwritten atomic.Int64 // writes to clients that were gone, or that failed
	silent    atomic.Int64 // clients closed, since they did not answer a ping

	mu      sync.Mutex // guards all below, and what the shard's subscribers say it guards
	topics  map[presence.Topic]*topic
	seats   []seat
	due     []*topic      // topics to look at, each once
	fresh   []visit       // subscribers to serve at once
	asking  []*Subscriber // with answers to their subscribes, each once
	numbers []*Subscriber // to be told their number, each once

	// run's own
	pace   pace
	pass   uint32
	swept  time.Duration // the last sweep
	batch  []delivery
	joined []byte

	numberText []byte // the numbers of one pass
}

// seat is a subscriber's place among the shard's.
type seat struct {
	sub  *Subscriber
	look time.Duration // a sweep has nothing to do for it before
}

// visit is a subscriber to serve at once with a topic.
type visit struct {
	sub    *Subscriber
	topic  *topic
	missed bool // it was busy when others were served; else it has come
}

// delivery is what one client gets in one pass; more chains further topics.
type delivery struct {
	sub     *Subscriber
	bytes   []byte
	more    int32 // index of the next delivery to the same client; 0: none
	chained bool  // not the first of its client
}

// newShard returns a shard that may make budget deliveries a second.
func newShard(h *Hub, interval time.Duration, budget float64, live liveness) *shard {
	return &shard{
		hub:      h,
		pace:     pace{budget: budget, least: interval},
		interval: interval,
		quantum:  max(interval/10, time.Millisecond),
		live:     live,
		start:    time.Now(),
		wake:     make(chan struct{}, 1),
		topics:   map[presence.Topic]*topic{},
	}
}

// now is the shard's clock. It begins at an interval, so that nothing seems to
// have been sent just before.
func (s *shard) now() time.Duration { return time.Since(s.start) + s.interval }

func (s *shard) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// subscribe is the subscriber's place of the topic, made when there is none.
func (s *shard) subscribe(sub *Subscriber, name presence.Topic) *place {
	if p := sub.place(name); p != nil {
		return p
	}
	t := s.topics[name]
	if t == nil {
		t = &topic{name: name, encoder: s.hub.kinds[name.Kind].encoder}
		s.topics[name] = t
		if u, known := s.hub.Want(name); known {
			t.update, t.gen = u, 1
		}
	}
	sub.places = append(sub.places, place{topic: t, index: int32(len(t.subs))})
	t.subs = append(t.subs, subscription{sub: sub, ready: true})
	return &sub.places[len(sub.places)-1]
}

// unsubscribe ends one of the subscriber's places.
func (s *shard) unsubscribe(sub *Subscriber, place int) {
	p := sub.places[place]
	sub.places = slices.Delete(sub.places, place, place+1)
	t := p.topic
	last := int32(len(t.subs) - 1)
	if p.index != last {
		moved := t.subs[last]
		t.subs[p.index] = moved
		moved.sub.at(t).index = p.index
	}
	t.subs[last] = subscription{}
	t.subs = t.subs[:last]
	if len(t.subs) == 0 {
		delete(s.topics, t.name)
		s.hub.Unwant(t.name)
	}
}

// renew has the subscriber sent the topic's update, also when it has it: at once, or
// an interval after the last one.
func (s *shard) renew(sub *Subscriber, p *place) {
	x := &p.topic.subs[p.index]
	x.gen, x.shown = 0, 0
	if !x.ready {
		return
	}
	x.asked = true
	switch {
	case sub.answerAt == 0:
		s.asking = append(s.asking, sub)
		sub.answerAt = atOnce
	case x.at == 0:
		sub.answerAt = atOnce
	}
	s.wakeUp()
}

// ready ends a hold.
func (s *shard) ready(sub *Subscriber, p *place) {
	p.since = 0
	p.topic.subs[p.index].ready = true
	s.visit(sub, p.topic, false)
}

// visit has the subscriber served with the topic's update at once; also when it
// has it, if its subscription says nothing of what it is shown.
func (s *shard) visit(sub *Subscriber, t *topic, missed bool) {
	s.fresh = append(s.fresh, visit{sub, t, missed})
	s.wakeUp()
}

// update takes a newer update of a topic.
func (s *shard) update(u presence.Update) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.topics[u.Topic]
	if t == nil || t.gen != 0 && !replaces(&u, &t.update) {
		return
	}
	t.update = u
	if t.gen++; t.gen == 0 {
		t.gen = 1
	}
	s.look(t, max(s.now(), t.scanned+s.quantum))
}

// look has all subscribers of t looked at.
func (s *shard) look(t *topic, at time.Duration) {
	if t.queued {
		t.at = min(t.at, at)
	} else {
		t.queued, t.at = true, at
		s.due = append(s.due, t)
	}
	s.wakeUp()
}

// run delivers and keeps an eye on silent connections until ctx ends.
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
		if next := s.deliver(); next > 0 {
			timer.Reset(max(next-s.now(), 0))
		}
	}
}

// deliver is one pass: it collects what is due under the lock and writes it
// without. It returns when the next pass is due, or 0.
func (s *shard) deliver() (next time.Duration) {
	s.mu.Lock()
	now := s.now()
	s.pass++
	s.batch = append(s.batch[:0], delivery{}) // index 0 stands for none
	answers := 0                              // of the batch
	for _, v := range s.fresh {
		if p := v.sub.at(v.topic); p != nil {
			if sub := &p.topic.subs[p.index]; sub.at != now { // else it was asked for twice
				before := len(s.batch)
				s.offer(p.topic, sub, now)
				if !v.missed {
					answers += len(s.batch) - before
				}
			}
		}
	}
	clear(s.fresh)
	s.fresh = s.fresh[:0]
	before := len(s.batch)
	next = s.answerAll(now)
	answers += len(s.batch) - before
	later := s.due[:0]
	for _, t := range s.due {
		if t.at > now {
			later = append(later, t)
		} else if t.at = s.scan(t, now); t.at != 0 {
			later = append(later, t)
		} else {
			t.queued = false
			continue
		}
		if next == 0 || t.at < next {
			next = t.at
		}
	}
	clear(s.due[len(later):])
	s.due = later
	if at := s.offerNumbers(now); next == 0 || at != 0 && at < next {
		next = at
	}
	s.mu.Unlock()

	for i := 1; i < len(s.batch); i++ {
		d := &s.batch[i]
		if d.chained {
			continue
		}
		bytes := d.bytes
		if d.more != 0 {
			s.joined = append(s.joined[:0], bytes...)
			for j := d.more; j != 0; j = s.batch[j].more {
				s.joined = append(s.joined, s.batch[j].bytes...)
			}
			bytes = s.joined
		}
		if err := d.sub.client.Try(bytes); err != nil {
			s.undelivered(d.sub, err)
		}
	}
	s.delivered.Add(int64(len(s.batch) - 1))
	// Answers are bounded by themselves. If they counted here, who asks often would
	// slow down the pages of others.
	s.pace.spend(len(s.batch)-1-answers, now)
	clear(s.batch)
	return next
}

// answerAll answers the subscribes that may be answered now, and returns when the
// next may be, or 0.
func (s *shard) answerAll(now time.Duration) (next time.Duration) {
	later := s.asking[:0]
	for _, sub := range s.asking {
		if sub.answerAt <= now {
			sub.answerAt = s.answer(sub, now)
		}
		if sub.answerAt == 0 {
			continue
		}
		later = append(later, sub)
		if next == 0 || sub.answerAt < next {
			next = sub.answerAt
		}
	}
	clear(s.asking[len(later):])
	s.asking = later
	return next
}

// answer answers subscribes of one subscriber: each topic at most once per
// interval, and answersAtOnce in all, since a topic that was left and is wanted
// again has no past. It returns when to go on, or 0 when all are answered.
func (s *shard) answer(sub *Subscriber, now time.Duration) (again time.Duration) {
	step := s.interval / answersAtOnce
	sub.answered = max(sub.answered, now-s.interval)
	for i := range sub.places {
		t := sub.places[i].topic
		x := &t.subs[sub.places[i].index]
		if !x.asked {
			continue
		}
		at := x.at + s.interval
		switch {
		case x.gen != 0: // it was told since it asked
			x.asked = false
			continue
		case x.at == 0 || at <= now:
			if sub.answered+step <= now {
				x.asked = false
				before := len(s.batch)
				s.offer(t, x, now)
				sub.answered += step * time.Duration(len(s.batch)-before)
				continue
			}
			at = sub.answered + s.interval // not one by one
		}
		if again == 0 || at < again {
			again = at
		}
	}
	if again != 0 {
		again = max(again, now+s.quantum)
	}
	return again
}

// scan offers t's update to all subscribers that do not have it, and returns
// when to look again, or 0 when all have been served or cannot be now.
func (s *shard) scan(t *topic, now time.Duration) (again time.Duration) {
	t.scanned = now
	interval := s.pace.interval(len(t.subs))
	for i := range t.subs {
		sub := &t.subs[i]
		if sub.gen == t.gen || !sub.ready {
			continue
		}
		if at := sub.at + interval; sub.at != 0 && at > now {
			if again == 0 || at < again {
				again = at
			}
			continue
		}
		s.offer(t, sub, now)
	}
	if again != 0 {
		again = max(again, now+s.quantum)
	}
	return again
}

// offer adds t's update to what the subscriber gets in this pass, unless it
// would see no difference. One that has not taken its last write is left
// alone; it is served when it has. So is one that is paused.
func (s *shard) offer(t *topic, sub *subscription, now time.Duration) {
	if t.gen == 0 || !sub.ready || sub.sub.paused || sub.sub.client.Busy() {
		return
	}
	x := t.text(sub.form)
	if sub.gen != 0 {
		s.conflated.Add(int64(t.gen - sub.gen - 1))
	}
	sub.gen = t.gen
	if sub.shown != 0 && sub.shown == x.shown || len(x.bytes) == 0 {
		return
	}
	sub.at, sub.shown = now, x.shown
	s.chain(sub.sub, x.bytes)
}

// chain adds bytes to what the client gets in this pass.
func (s *shard) chain(sub *Subscriber, bytes []byte) {
	d := delivery{sub: sub, bytes: bytes, chained: sub.pass == s.pass}
	if i := int32(len(s.batch)); d.chained {
		s.batch[sub.tail].more, sub.tail = i, i
	} else {
		sub.pass, sub.tail = s.pass, i
	}
	s.batch = append(s.batch, d)
}

// undelivered deals with a write that was not even begun.
func (s *shard) undelivered(sub *Subscriber, err error) {
	if !errors.Is(err, ErrBusy) {
		s.unwritten.Add(1)
		if !errors.Is(err, net.ErrClosed) {
			_ = sub.client.Close() // which has it leave
		}
		return
	}
	s.busy.Add(1)
	s.mu.Lock()
	sub.missed = true
	s.mu.Unlock()
	if !sub.client.Busy() { // it became free before missed was set
		sub.Free()
	}
}
