package fanout

import "time"

// liveness says when a silent client is dead.
type liveness struct {
	ping time.Duration // silence before a ping
	pong time.Duration // silence after it before the end
}

func (l liveness) tick() time.Duration {
	return max(min(time.Second, min(l.ping, l.pong)/8), 5*time.Millisecond)
}

// verdict is what is to be done about a client last heard at heard, to
// which a ping was sent at pinged (0: none is unanswered).
func (l liveness) verdict(now, heard, pinged time.Duration) (ping, dead bool) {
	switch {
	case pinged != 0 && heard < pinged:
		return false, now-pinged >= l.pong
	default:
		return now-max(heard, pinged) >= l.ping, false
	}
}

// next is when verdict may say something else, unless the client is heard.
func (l liveness) next(heard, pinged time.Duration) time.Duration {
	if pinged != 0 && heard < pinged {
		return pinged + l.pong
	}
	return max(heard, pinged) + l.ping
}

// sweep pings the clients that have been silent, closes those that do not answer,
// and tells those whose time is over.
func (s *shard) sweep() {
	type task struct { // without a closure: pings are most of what an idle gateway does
		sub *Subscriber
		do  func(s *shard, sub *Subscriber, at time.Duration)
	}
	var tasks []task
	s.mu.Lock()
	now := s.now()
	suspended := s.swept != 0 && now-s.swept > s.live.tick()+s.live.pong/2
	s.swept = now
	for i := range s.seats {
		seat := &s.seats[i]
		if now < seat.look && !suspended {
			continue // without touching the subscriber, which is not in the cache
		}
		sub := seat.sub
		if suspended && sub.lastHeard() < sub.pinged {
			sub.pinged = now // the process stood still: its clients get their time again
		}
		ping, dead := s.live.verdict(now, sub.lastHeard(), sub.pinged)
		switch {
		case dead:
			s.silent.Add(1)
			tasks = append(tasks, task{sub, (*shard).close})
		case sub.expires != 0 && now >= sub.expires:
			sub.expires = 0 // once is enough
			tasks = append(tasks, task{sub, (*shard).expire})
		case ping:
			sub.pinged = now
			tasks = append(tasks, task{sub, (*shard).ping})
		}
		seat.look = s.live.next(sub.lastHeard(), sub.pinged)
		if sub.expires != 0 {
			seat.look = min(seat.look, sub.expires)
		}
		for i := range sub.places {
			p := &sub.places[i]
			if p.since == 0 {
				continue
			}
			held := now - p.since
			stale := p.topic.gen != 0 && p.topic.update.Stale
			switch {
			case held < holdPatience:
				seat.look = min(seat.look, p.since+holdPatience)
			case !stale && held < holdLonger:
				seat.look = min(seat.look, now+holdPatience) // it may be stale by then
			default:
				s.ready(sub, p)
			}
		}
	}
	s.mu.Unlock()
	for _, t := range tasks {
		t.do(s, t.sub, now)
	}
}

// ping pings a client, which the sweep at that time has noted. One that could not
// be sent the ping owes no answer, and the next sweep tries again.
func (s *shard) ping(sub *Subscriber, at time.Duration) {
	if sub.client.Ping() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub.index >= 0 && sub.pinged == at {
		sub.pinged = 0
		s.seats[sub.index].look = 0
	}
}

func (s *shard) close(sub *Subscriber, _ time.Duration)  { _ = sub.client.Close() } // which has it leave
func (s *shard) expire(sub *Subscriber, _ time.Duration) { sub.client.Expire() }
