package fanout

import (
	"slices"
	"sync/atomic"
	"time"

	"headcount/presence"
)

// How long Withhold keeps back a topic's updates at most. After that the client gets them marked as stale, which means
// that they may not include the waiting user. An update that is stale anyway is sent earlier. A join can take longer
// than a second when a node has just died.
const (
	withholdStale = time.Second
	withholdFresh = 5 * time.Second
)

// Subscriber is a client in the fan-out. The client's struct embeds it. After Prepare and Enter any goroutine may call
// its methods, until Leave. The caller bounds the number of topics of a subscriber.
type Subscriber struct {
	shard   *shard       // set by Prepare
	aliveAt atomic.Int64 // time of the last sign of life, by Now

	// The shard's lock guards the fields below, except client.
	expires time.Duration // when the client's time is over, by Now; 0: never
	pinged  time.Duration // when it was last pinged; a later sign of life is the answer; 0: no ping was sent
	places  []place
	number  number

	answerAt time.Duration // when its next subscribe request is answered; 0: it is not in shard.asking
	answered time.Duration // time until which its answers are used up; each answer moves it on, see answerLocked

	// The fields that a delivery reads are together at the end. The embedding struct should continue with the fields
	// that Busy reads, so that they share cache lines.
	client Client // set by Prepare
	pass   uint64 // the last pass that had a delivery for it
	tail   int32  // index of its last delivery in that pass
	index  int32  // in shard.seats; -1: it has left
	missed bool   // a delivery was not written
	paused bool   // updates of topics are not sent, see Pause
	often  bool   // see PingOften

	numberQueued bool // it is in shard.numbers
}

// place is one topic of a subscriber.
type place struct {
	topic      *topic
	index      int32         // index of the subscription in topic.subs
	withheldAt time.Duration // since when the topic is withheld; 0: it is not
}

// Prepare assigns a shard, and thereby a clock, to the subscriber. Nothing is delivered before Enter. After the
// duration lasts, the client's time is over; 0: never.
func (h *Hub) Prepare(s *Subscriber, c Client, lasts time.Duration) {
	s.shard = h.shards[h.next.Add(1)%uint64(len(h.shards))]
	s.client = c
	s.number = number{now: unsent, sent: unsent}
	if lasts != 0 {
		s.expires = max(s.Now()+lasts, 1) // 0 would be never
	}
	s.MarkAlive()
}

// PingOften limits the silence before a ping to maxSilence, even if Config.Ping is longer. It must be called before
// Enter.
func (s *Subscriber) PingOften() { s.often = true }

// Now returns the time on the subscriber's clock.
func (s *Subscriber) Now() time.Duration { return s.shard.now() }

// MarkAlive records a sign of life.
func (s *Subscriber) MarkAlive() { s.aliveAt.Store(int64(s.Now())) }

func (s *Subscriber) lastAlive() time.Duration { return time.Duration(s.aliveAt.Load()) }

// Enter adds the subscriber to its shard.
func (s *Subscriber) Enter() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	s.index = int32(len(sh.seats))
	sh.seats = append(sh.seats, seat{sub: s})
}

// Leave removes the subscriber with all its topics.
func (s *Subscriber) Leave() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	// From the end, so that no place moves.
	for len(s.places) > 0 {
		sh.unsubscribeLocked(s, len(s.places)-1)
	}

	s.places = nil

	// The last seat takes the place of this one, so that leaving costs the same with any number of clients.
	last := len(sh.seats) - 1
	sh.seats[s.index] = sh.seats[last]
	sh.seats[s.index].sub.index = s.index
	sh.seats[last] = seat{}
	sh.seats = sh.seats[:last]
	s.index = -1
}

// Subscribe sends the newest updates of topics in a form: once now, even if the client has them, and whenever they
// change.
func (s *Subscriber) Subscribe(topics []presence.Topic, form Form) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	for i, name := range topics {
		if !slices.Contains(topics[:i], name) { // skip duplicates
			sh.askLocked(s, sh.subscribeLocked(s, name), form)
		}
	}
}

// Renew is Subscribe for one topic, in the form of the existing subscription, or 0.
func (s *Subscriber) Renew(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := sh.subscribeLocked(s, t)
	sh.askLocked(s, p, p.topic.subs[p.index].form)
}

// Withhold is Renew, but no update of the topic is sent until Ready. If that takes too long, updates are sent marked as
// stale until Ready: after withholdStale if they are stale anyway, otherwise after withholdFresh.
func (s *Subscriber) Withhold(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := sh.subscribeLocked(s, t)
	p.withheldAt = sh.now()
	p.topic.subs[p.index].state = withheld
	sh.renewLocked(s, p)

	// Without this, the sweep might not look at the subscriber before its next ping is due.
	seat := &sh.seats[s.index]
	seat.look = min(seat.look, p.withheldAt+withholdStale)
}

// Ready ends what Withhold began. The client gets the hub's current update, or a newer one.
func (s *Subscriber) Ready(t presence.Topic) {
	// Another goroutine may have passed the topic's newest update to the hub, but not yet to the shard.
	last, known := s.shard.hub.Last(t)
	if known {
		s.shard.update(last)
	}

	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()

	if p := s.place(t); p != nil && p.withheldAt != 0 {
		s.shard.readyLocked(s, p)
	}
}

// Reform changes the form of a subscription, if there is one. If again is set, the newest update is sent in the new
// form even if the client has it in the old one.
func (s *Subscriber) Reform(t presence.Topic, form Form, again bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := s.place(t)
	if p == nil {
		return
	}

	x := &p.topic.subs[p.index]
	if x.form == form {
		return
	}

	x.form = form
	if again && x.at != 0 { // a client that was never sent the topic gets it anyway
		sh.renewLocked(s, p)
	}
}

// Unsubscribe ends the subscription of a topic, if there is one.
func (s *Subscriber) Unsubscribe(t presence.Topic) {
	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()

	for i := range s.places {
		if s.places[i].topic.name == t {
			s.shard.unsubscribeLocked(s, i)
			return
		}
	}
}

// Free delivers to the client what it missed while it was busy.
func (s *Subscriber) Free() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	for i := range s.places {
		p := &s.places[i]
		x := &p.topic.subs[p.index]
		if s.missed {
			// Any of the updates may have been lost. This is recorded now, because the client may be busy or paused
			// again when it is visited.
			x.gen = 0
			x.shown = 0
		}
		if x.state != withheld && (s.missed || x.gen != p.topic.gen) {
			sh.visitLocked(s, p.topic, true)
		}
	}

	if s.missed {
		s.number.sent = unsent
	}
	sh.queueNumberLocked(s)
	s.missed = false
}

// Pause stops the updates of topics to the subscriber, or, if on is false, resumes them and sends everything that has
// changed. The subscriber's number is not affected.
func (s *Subscriber) Pause(on bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	if s.paused == on {
		return
	}

	s.paused = on
	if on {
		return
	}

	for i := range s.places {
		p := &s.places[i]
		x := &p.topic.subs[p.index]
		if x.state != withheld && x.gen != p.topic.gen {
			sh.visitLocked(s, p.topic, true)
		}
	}
}

// place returns the subscriber's place for the topic, or nil.
func (s *Subscriber) place(name presence.Topic) *place {
	for i := range s.places {
		if s.places[i].topic.name == name {
			return &s.places[i]
		}
	}

	return nil
}

// placeOf is place by the shard's topic.
func (s *Subscriber) placeOf(t *topic) *place {
	for i := range s.places {
		if s.places[i].topic == t {
			return &s.places[i]
		}
	}

	return nil
}
