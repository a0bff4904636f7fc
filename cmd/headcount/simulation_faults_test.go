package main

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// fault is something that is wrong until it is healed.
type fault struct {
	kind  faultKind
	until time.Time
	heal  func()
}

// faultKind is what a fault does to what is known of the users who stay.
type faultKind int

const (
	harmless faultKind = iota
	takeover           // partitions get other owners, who know what the store does
	emptied            // the store knows nothing but what owners write
	stormy             // datagrams are lost
	outage             // the store is away
)

// shadow is how long a fault is not over for those after it: owners, and what
// the store has, are settled then.
const shadow = 12 * time.Second

// hearsay is how long it takes until all have heard of new owners. A store that
// goes away before that leaves them waiting for heartbeats that go elsewhere.
const hearsay = 6 * time.Second

// add notes a fault that has begun. Two that together destroy all knowledge of
// a user excuse everybody.
func (s *simulation) add(kind faultKind, lasts time.Duration, what string, heal func()) {
	s.log("FAULT: %s, for %s", what, lasts)
	for _, f := range s.history {
		if kind == harmless || f.kind == harmless || kind == f.kind || time.Since(f.until) >= shadow {
			continue
		}
		if f.kind == outage || kind == outage && (f.kind != takeover || time.Since(f.until) >= hearsay) {
			continue
		}
		s.excuseAll()
		if kind == emptied || f.kind == emptied {
			s.zombies = true
		}
	}
	f := &fault{kind: kind, until: time.Now().Add(lasts), heal: func() {
		s.log("healed: %s", what)
		heal()
	}}
	s.faults, s.history = append(s.faults, f), append(s.history, f)
	slices.SortStableFunc(s.faults, func(a, b *fault) int { return a.until.Compare(b.until) })
}

func (s *simulation) excuseAll() {
	s.log("nobody can know who stayed")
	for _, u := range s.crowd.users {
		s.crowd.excuse(u)
	}
}

// healDue ends the faults whose time has come.
func (s *simulation) healDue(now time.Time) {
	for len(s.faults) > 0 && !s.faults[0].until.After(now) {
		f := s.faults[0]
		s.faults = s.faults[1:]
		if f.until.After(time.Now()) { // before its time: the round is over
			f.until = time.Now()
		}
		f.heal()
	}
}

// between is a random duration.
func (s *simulation) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.chance.Int64N(int64(most-least)))
}

// fail breaks something at random.
func (s *simulation) fail() {
	m := s.members[s.chance.IntN(len(s.members))]
	whole := m.running != nil && !m.leaving && !m.frozen
	kind := harmless
	if slices.Contains(m.roles, rolePresence) {
		kind = takeover
	}
	front := slices.Contains(m.roles, roleGateway)
	switch what := s.chance.IntN(9); {
	case what <= 4 && (!whole || front && !s.others(m, roleGateway) || kind == takeover && !s.others(m, rolePresence)):
	case what == 0:
		s.crash(m, kind, true)
	case what == 1:
		s.crash(m, kind, s.chance.IntN(2) == 0)
	case what == 2:
		s.freeze(m, kind)
	case what == 3 || what == 4:
		s.restart(m, kind)
	case what == 5:
		if s.net.weather.Load().lost == 0 {
			s.net.weather.Store(&weather{lost: 0.2, repeated: 0.1, late: 0.2, delay: 300 * time.Millisecond})
			s.add(stormy, s.between(5*time.Second, 15*time.Second), "datagrams are lost, repeated and late", func() {
				s.net.weather.Store(&weather{})
			})
		}
	case what == 6:
		if !s.store.away {
			silent := s.chance.IntN(2) == 0
			s.store.leave(silent)
			s.add(outage, s.between(500*time.Millisecond, 12*time.Second), fmt.Sprintf("the store is away, silently %t", silent), s.store.comeBack)
		}
	case what == 7 && time.Since(s.store.lostAt) > simTimeout:
		s.store.lose()
		s.add(emptied, shadow, "the store is emptied", func() {})
	case what == 8:
		if o := s.members[s.chance.IntN(len(s.members))]; o != m {
			s.cut(m, o)
		}
	}
}

// others reports whether a member beside m does the role.
func (s *simulation) others(m *member, role string) bool {
	return slices.ContainsFunc(s.members, func(o *member) bool { return o != m && o.serves(role) })
}

// crash ends a process without a word, and starts it again later.
func (s *simulation) crash(m *member, kind faultKind, noticed bool) {
	if !noticed {
		for _, u := range s.crowd.at(m.name) { // they find out when they are gone already
			s.crowd.excuse(u)
		}
	}
	s.scatter(m)
	r := m.running
	r.life.kill(noticed)
	m.running = nil
	s.add(kind, s.between(200*time.Millisecond, 9*time.Second), fmt.Sprintf("%s is dead, noticed %t", m.name, noticed), func() {
		r.stop()
		s.start(m)
	})
}

// scatter excuses those who have to leave m's gateway while another one stands
// still: whoever tries that one first may be too late elsewhere.
func (s *simulation) scatter(m *member) {
	if slices.ContainsFunc(s.members, func(o *member) bool { return o.running != nil && o.frozen && slices.Contains(o.roles, roleGateway) }) {
		for _, u := range s.crowd.at(m.name) {
			s.crowd.excuse(u)
		}
	}
}

// freeze has a process stand still for a while. Those that stand still for long
// have been declared dead before their own timers end anybody's presence.
func (s *simulation) freeze(m *member, kind faultKind) {
	lasts := s.between(200*time.Millisecond, 3*time.Second)
	if s.chance.IntN(2) == 0 {
		lasts = s.between(8*time.Second, 15*time.Second)
		for _, u := range s.crowd.at(m.name) {
			s.crowd.excuse(u)
		}
	}
	for _, u := range s.crowd.users { // who is on the way there could be too late elsewhere
		if slices.ContainsFunc(u.tabs, func(t *tab) bool { return !t.settled() }) {
			s.crowd.excuse(u)
		}
	}
	if kind == takeover && s.store.away { // nobody takes over from it, and its timers do not stand still
		s.excuseAll()
	}
	m.frozen = true
	r := m.running
	r.life.freeze()
	s.add(kind, lasts, m.name+" stands still", func() {
		r.frozen = false
		r.life.thaw()
	})
}

// cut parts two processes. Both still have the store, so nobody else takes over.
func (s *simulation) cut(a, b *member) {
	lasts := s.between(200*time.Millisecond, time.Second)
	if s.chance.IntN(2) == 0 {
		lasts = s.between(time.Second, 15*time.Second)
		s.excuseAll() // whoever moves to one of the two may be out of its grace before the other hears of it
	}
	ways := [][2]string{{a.name, b.name}, {b.name, a.name}}
	for _, w := range ways {
		s.net.cuts.Store(w, struct{}{})
	}
	s.add(harmless, lasts, a.name+" and "+b.name+" are parted", func() {
		for _, w := range ways {
			s.net.cuts.Delete(w)
		}
	})
}

// restart has a process leave as at SIGTERM, and starts it again.
func (s *simulation) restart(m *member, kind faultKind) {
	s.scatter(m)
	r := m.running
	r.leaving = true
	s.clients.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if gw := r.process.gateway; gw != nil {
			_ = gw.Drain(ctx)
		}
		r.process.leave(ctx)
		r.stop()
		r.life.kill(true)
		close(r.left)
	})
	s.add(kind, s.between(4*time.Second, 8*time.Second), m.name+" is told to leave", func() {
		<-r.left
		s.start(m)
	})
}
