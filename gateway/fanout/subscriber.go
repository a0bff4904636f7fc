package fanout

import (
	"slices"
	"sync/atomic"
	"time"

	"headcount/presence"
)

// How long Hold keeps a topic's updates back at most. After that the client gets them as stale ones, which do not claim
// to include the user who waits. An update that is stale anyway goes out earlier. A join takes longer than a second
// when a node has just died.
const (
	holdStale = time.Second
	holdFresh = 5 * time.Second
)

// Subscriber is a client in the fan-out. The client's struct embeds it; after
// Prepare and Enter any goroutine may call its methods, until Leave. The caller
// bounds the topics of one subscriber.
type Subscriber struct {
	shard *shard       // set by Prepare
	heard atomic.Int64 // the last sign of life, by Now

	// The shard's lock guards all below, but for client.
	expires time.Duration // when the client's time is over, by Now; 0: never
	pinged  time.Duration // an unanswered ping was sent then; 0: none
	places  []place
	number  number

	answerAt time.Duration // when its next subscribe is answered; 0: it is not in shard.asking
	answered time.Duration // its budget for answers is used up until then, see answer

	// What a delivery looks at is together at the end. So the embedding struct should
	// continue with what Busy reads.
	client Client // set by Prepare
	pass   uint64 // the last pass that had something for it
	tail   int32  // the last delivery in that pass
	index  int32  // in shard.seats; -1: it has left
	missed bool   // a delivery was not written
	paused bool   // no topics are sent to it, see Pause
	often  bool   // see PingOften

	numberQueued bool // it is in shard.numbers
}

// place is one topic of a subscriber.
type place struct {
	topic  *topic
	index  int32         // in topic.subs
	heldAt time.Duration // when the hold began; 0: the subscription is not held
}

// Prepare gives the subscriber a shard, and so a clock. Nothing is delivered before Enter.
// The client's time is over after lasts; 0: never.
func (h *Hub) Prepare(s *Subscriber, c Client, lasts time.Duration) {
	s.shard = h.shards[h.next.Add(1)%uint64(len(h.shards))]
	s.client = c
	s.number = number{now: unsent, sent: unsent}
	if lasts != 0 {
		s.expires = max(s.Now()+lasts, 1) // 0 would be never
	}
	s.Heard()
}

// PingOften makes a ping come after maxSilence even if Config.Ping is longer. It is called before Enter.
func (s *Subscriber) PingOften() { s.often = true }

// Now returns the time on the subscriber's clock.
func (s *Subscriber) Now() time.Duration { return s.shard.now() }

// Heard notes a sign of life.
func (s *Subscriber) Heard() { s.heard.Store(int64(s.Now())) }

func (s *Subscriber) lastHeard() time.Duration { return time.Duration(s.heard.Load()) }

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

	for len(s.places) > 0 {
		sh.unsubscribeLocked(s, len(s.places)-1)
	}

	s.places = nil

	last := len(sh.seats) - 1
	sh.seats[s.index] = sh.seats[last]
	sh.seats[s.index].sub.index = s.index
	sh.seats[last] = seat{}
	sh.seats = sh.seats[:last]
	s.index = -1
}

// Subscribe sends the newest updates of topics in a form: at once, also if the client has
// them, and whenever they change.
func (s *Subscriber) Subscribe(topics []presence.Topic, form Form) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	for i, name := range topics {
		if !slices.Contains(topics[:i], name) { // once is enough
			sh.askLocked(s, sh.subscribeLocked(s, name), form)
		}
	}
}

// Renew is Subscribe for one topic, in the form that its subscription has, or 0.
func (s *Subscriber) Renew(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := sh.subscribeLocked(s, t)
	sh.askLocked(s, p, p.topic.subs[p.index].form)
}

// Hold is Renew, but nothing of the topic is sent until Ready. When the hold has lasted too long, holdStale for an
// update that is stale and holdFresh for any other, updates are sent as stale ones until Ready.
func (s *Subscriber) Hold(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := sh.subscribeLocked(s, t)
	p.heldAt = sh.now()
	p.topic.subs[p.index].state = held
	sh.renewLocked(s, p)

	// Otherwise the sweep might not look at it before its next ping is due.
	seat := &sh.seats[s.index]
	seat.look = min(seat.look, p.heldAt+holdStale)
}

// Ready ends a Hold. The client gets the update that the hub has now, or a newer one.
func (s *Subscriber) Ready(t presence.Topic) {
	// Another goroutine may have given the hub its newest update, and not yet the shard.
	last, known := s.shard.hub.Last(t)
	if known {
		s.shard.update(last)
	}

	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()

	if p := s.place(t); p != nil && p.heldAt != 0 {
		s.shard.readyLocked(s, p)
	}
}

// Reform sends a topic in another form from now on, if there is a subscription. If again is
// set, the client gets the newest update in that form even if it has it in another one.
func (s *Subscriber) Reform(t presence.Topic, form Form, again bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	p := s.place(t)
	if p == nil {
		return
	}

	sub := &p.topic.subs[p.index]
	if sub.form == form {
		return
	}

	sub.form = form
	if again && sub.at != 0 { // a client that was never sent the topic gets it anyway
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

// Free serves a client that was busy with what it missed.
func (s *Subscriber) Free() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()

	for i := range s.places {
		p := &s.places[i]
		sub := &p.topic.subs[p.index]
		if s.missed {
			// Any of them may have been lost, also if this visit finds the client busy again or paused.
			sub.gen = 0
			sub.shown = 0
		}
		if sub.state != held && (s.missed || sub.gen != p.topic.gen) {
			sh.visitLocked(s, p.topic, true)
		}
	}

	if s.missed {
		s.number.sent = unsent
	}
	sh.queueNumberLocked(s)
	s.missed = false
}

// Pause stops the updates of topics to the subscriber, or, unless on, sends it at once all that have changed
// meanwhile. Its number is sent all the while.
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
		sub := &p.topic.subs[p.index]
		if sub.state != held && sub.gen != p.topic.gen {
			sh.visitLocked(s, p.topic, true)
		}
	}
}

// place returns the subscriber's place of the topic, or nil.
func (s *Subscriber) place(name presence.Topic) *place {
	for i := range s.places {
		if s.places[i].topic.name == name {
			return &s.places[i]
		}
	}

	return nil
}

// at is place for a topic of the shard.
func (s *Subscriber) at(t *topic) *place {
	for i := range s.places {
		if s.places[i].topic == t {
			return &s.places[i]
		}
	}

	return nil
}
