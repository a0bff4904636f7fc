package fanout

import (
	"slices"
	"sync/atomic"
	"time"

	"headcount/presence"
)

// Hold keeps a topic's update back for these times at most: one that says that it is stale, and any other, which
// does not say that it lacks the user who waits. A join takes as long as that when a node has just died.
const (
	holdPatience = time.Second
	holdLonger   = 5 * time.Second
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

	answerAt time.Duration // it is in shard.asking, and answered then at the earliest; 0: it is not there
	answered time.Duration // the answers that it got are paid for until then

	// What a delivery looks at is together at the end, and before what the embedding
	// struct has next: that should be what Busy reads.
	client Client // set by Prepare
	pass   uint32 // the last pass that had something for it
	tail   int32  // the last delivery in that pass
	index  int32  // in shard.seats; -1: it has left
	missed bool   // a delivery was not written
	paused bool   // it is sent no topics, see Pause
	numberState
}

// place is one topic of a subscriber.
type place struct {
	topic *topic
	index int32         // in topic.subs
	since time.Duration // held since; 0: not held
}

// Prepare finds a shard for the subscriber, so that it has a clock. Nothing is
// delivered before Enter. The client's time is over after lasts; 0: never.
func (h *Hub) Prepare(s *Subscriber, c Client, lasts time.Duration) {
	s.shard = h.shards[h.next.Add(1)%uint64(len(h.shards))]
	s.client = c
	if lasts != 0 {
		s.expires = max(s.Now()+lasts, 1)
	}
	s.Heard()
}

// Now is the subscriber's clock.
func (s *Subscriber) Now() time.Duration { return s.shard.now() }

// Heard notes a sign of life.
func (s *Subscriber) Heard() { s.heard.Store(int64(s.Now())) }

func (s *Subscriber) lastHeard() time.Duration { return time.Duration(s.heard.Load()) }

// Enter makes the subscriber one of its shard's.
func (s *Subscriber) Enter() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	s.index = int32(len(sh.seats))
	sh.seats = append(sh.seats, seat{sub: s})
}

// Leave takes the subscriber out, with all its topics.
func (s *Subscriber) Leave() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for len(s.places) > 0 {
		sh.unsubscribe(s, len(s.places)-1)
	}
	s.places = nil
	last := len(sh.seats) - 1
	sh.seats[s.index] = sh.seats[last]
	sh.seats[s.index].sub.index = s.index
	sh.seats[last] = seat{}
	sh.seats = sh.seats[:last]
	s.index = -1
}

// Subscribe has the newest updates of topics sent in a form: at once, also when
// the client has them, and from then on.
func (s *Subscriber) Subscribe(topics []presence.Topic, form Form) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for i, name := range topics {
		if !slices.Contains(topics[:i], name) { // once is enough
			p := sh.subscribe(s, name)
			p.topic.subs[p.index].form = form
			sh.renew(s, p)
		}
	}
}

// Renew is Subscribe to one topic in the form that it has, or 0.
func (s *Subscriber) Renew(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	sh.renew(s, sh.subscribe(s, t))
}

// Hold is Renew, but nothing of the topic is sent until Ready, or until
// holdPatience has passed, holdLonger if the update is not stale.
func (s *Subscriber) Hold(t presence.Topic) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	p := sh.subscribe(s, t)
	p.since = sh.now()
	p.topic.subs[p.index].ready = false
	sh.renew(s, p)
	seat := &sh.seats[s.index]
	seat.look = min(seat.look, p.since+holdPatience)
}

// Ready ends Hold, if it lasts. The update is one that the hub had before.
func (s *Subscriber) Ready(t presence.Topic) {
	// Whoever brought the hub its newest update may still be on the way to the
	// shard with it.
	last, known := s.shard.hub.Last(t)
	if known {
		s.shard.update(last)
	}
	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()
	if p := s.place(t); p != nil && p.since != 0 {
		s.shard.ready(s, p)
	}
}

// Has reports whether the subscriber was sent an update of the topic since it last asked for it.
func (s *Subscriber) Has(t presence.Topic) bool {
	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()
	p := s.place(t)
	return p != nil && p.topic.subs[p.index].gen != 0
}

// Reform has a topic sent in that form from now on, if there is a subscription. When
// again is set, the client is sent it also if it has the newest update in another form.
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
	if again && sub.at != 0 {
		sh.renew(s, p)
	}
}

// Resume subscribes to a topic of which the client has the update that an Encoder
// would call shown: it is sent another one.
func (s *Subscriber) Resume(t presence.Topic, form Form, shown uint64) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	p := sh.subscribe(s, t)
	sub := &p.topic.subs[p.index]
	sub.form, sub.shown = form, shown
	sh.visit(s, p.topic, false)
}

// Unsubscribe ends the subscription of a topic, if there is one.
func (s *Subscriber) Unsubscribe(t presence.Topic) {
	s.shard.mu.Lock()
	defer s.shard.mu.Unlock()
	for i := range s.places {
		if s.places[i].topic.name == t {
			s.shard.unsubscribe(s, i)
			return
		}
	}
}

// Free has a client that was busy served with what it missed.
func (s *Subscriber) Free() {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	for i := range s.places {
		p := &s.places[i]
		sub := &p.topic.subs[p.index]
		if s.missed {
			sub.shown = 0
		}
		if sub.ready && (s.missed || sub.gen != p.topic.gen) {
			sh.visit(s, p.topic, true)
		}
	}
	if s.numberState.known {
		s.numberState.again = s.numberState.again || s.missed
		sh.queueNumber(s)
	}
	s.missed = false
}

// Pause has no topic sent to the subscriber, or, unless on, all of which there is news that it was not sent, at once. Its
// number is sent all the while.
func (s *Subscriber) Pause(on bool) {
	sh := s.shard
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if s.paused == on {
		return
	}
	if s.paused = on; on {
		return
	}
	for i := range s.places {
		p := &s.places[i]
		if sub := &p.topic.subs[p.index]; sub.ready && sub.gen != p.topic.gen {
			sh.visit(s, p.topic, true)
		}
	}
}

// place is the subscriber's place of the topic, or nil.
func (s *Subscriber) place(name presence.Topic) *place {
	for i := range s.places {
		if s.places[i].topic.name == name {
			return &s.places[i]
		}
	}
	return nil
}

// at is place of a topic that the shard has.
func (s *Subscriber) at(t *topic) *place {
	for i := range s.places {
		if s.places[i].topic == t {
			return &s.places[i]
		}
	}
	return nil
}
