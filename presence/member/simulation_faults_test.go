package member

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"time"

	"headcount/internal/marks"
	"headcount/presence"
)

// fault is something that stays broken until heal is called.
type fault struct {
	kind  faultKind
	until time.Time
	heal  func()
}

// faultKind says which knowledge about users a fault destroys.
type faultKind int

const (
	harmless    faultKind = iota
	takeover              // partitions get other owners, which have only the store's data
	emptied               // the store has only data that owners write afterwards
	stormy                // datagrams are lost
	storeOutage           // the store is unavailable
)

// shadow is how long a fault affects the faults after it. After that time all partitions have their owners, and the
// store has its data.
const shadow = 12 * time.Second

// processName is the name of a process of the simulation.
var processName = regexp.MustCompile(`\w+:7946`)

// add records a fault that has begun. Only the owner and the store know a hold by PUT. When both lose it, the
// simulation no longer expects the hold.
func (s *simulation) add(kind faultKind, lasts time.Duration, what string, heal func()) {
	s.log("FAULT: %s, for %s", what, lasts)
	marks.Fault(processName.ReplaceAllString(what, "a process"))
	for _, f := range s.history {
		recent := time.Since(f.until) < shadow
		if recent && destroyBoth(kind, f.kind) {
			s.log("nobody can know who held what")
			s.crowd.forgetHolds()
			s.zombies = true
		}
	}

	f := &fault{kind: kind, until: time.Now().Add(lasts), heal: func() {
		s.log("healed: %s", what)
		heal()
	}}

	s.history = append(s.history, f)
	s.faults = append(s.faults, f)
	slices.SortStableFunc(s.faults, func(a, b *fault) int { return a.until.Compare(b.until) })
}

// destroyBoth reports whether two faults together destroy both copies of the holds: the owner's and the store's.
func destroyBoth(a, b faultKind) bool {
	return a == emptied && b == takeover || a == takeover && b == emptied
}

// excuse excludes users from the check that users who stay are counted, because no process could know that they stayed.
// If no user would be left to check, it excuses nobody. It reports whether any user is left.
func (s *simulation) excuse(users []*user) bool {
	if !s.crowd.spares(users) {
		return false
	}

	for _, u := range users {
		s.crowd.excuse(u)
	}

	return true
}

// healDue ends the faults whose time has come.
func (s *simulation) healDue(now time.Time) {
	for len(s.faults) > 0 && !s.faults[0].until.After(now) {
		f := s.faults[0]
		s.faults = s.faults[1:]

		if f.until.After(time.Now()) { // the round is over, so the fault is healed early
			f.until = time.Now()
		}

		f.heal()
	}
}

// between returns a random duration.
func (s *simulation) between(least, most time.Duration) time.Duration {
	return least + time.Duration(s.chance.Int64N(int64(most-least)))
}

// fail breaks something at random.
func (s *simulation) fail() {
	if s.alone {
		s.failAlone(s.members[0])
		return
	}

	m := s.members[s.chance.IntN(len(s.members))]
	kind := harmless // a process without partitions loses no knowledge about users
	if slices.Contains(m.roles, presence.RolePresence) {
		kind = takeover
	}

	// The next fault may excuse all holds. Without a user who has a tab and stays, nobody would be checked.
	if !s.crowd.spares(nil) {
		return
	}

	switch s.chance.IntN(10) {
	case 0:
		if s.spared(m) {
			s.crash(m, kind, true)
		}
	case 1:
		if s.spared(m) {
			s.crash(m, kind, s.chance.IntN(2) == 0)
		}
	case 2:
		if s.spared(m) {
			s.freeze(m, kind)
		}
	case 3, 4:
		if s.spared(m) {
			s.restart(m, kind)
		}
	case 5:
		s.storm()
	case 6:
		s.storeOutage()
	case 7:
		if time.Since(s.store.lostAt) > simTimeout {
			s.storeLoss()
		}
	case 8:
		if o := s.members[s.chance.IntN(len(s.members))]; o != m {
			s.cut(m, o)
		}
	case 9:
		if m.undisturbed() && slices.Contains(m.roles, presence.RoleGateway) {
			s.takeForDead(m)
		}
	}
}

// undisturbed reports whether the member runs, and no fault disturbs it.
func (m *member) undisturbed() bool { return m.running != nil && !m.leaving && !m.frozen }

// spared reports whether the cluster can do without m: m runs undisturbed, and other members do its roles meanwhile.
func (s *simulation) spared(m *member) bool {
	if !m.undisturbed() {
		return false
	}

	for _, role := range []string{presence.RoleGateway, presence.RolePresence} {
		if slices.Contains(m.roles, role) && !s.others(m, role) {
			return false
		}
	}

	return true
}

// storm makes the network lose, repeat and delay datagrams for a while.
func (s *simulation) storm() {
	calm := s.net.weather.Load().lost == 0
	if !calm || !s.excuse(s.straying()) {
		return
	}

	s.net.weather.Store(&weather{lost: 0.2, repeated: 0.1, late: 0.2, delay: 300 * time.Millisecond})
	s.add(stormy, s.between(5*time.Second, 15*time.Second), "datagrams are lost, repeated and late", func() {
		s.net.weather.Store(&weather{})
	})
}

// storeOutage makes the store unavailable for a while.
func (s *simulation) storeOutage() {
	if s.store.away {
		return
	}

	// A silent store lets calls wait; otherwise it refuses them.
	silent := s.chance.IntN(2) == 0
	s.store.leave(silent)
	s.add(storeOutage, s.between(500*time.Millisecond, 12*time.Second),
		fmt.Sprintf("the store is away, silently %t", silent), s.store.comeBack)
}

// storeLoss empties the store. Follows and changes may come back as they were a moment before.
func (s *simulation) storeLoss() {
	what := "the store is emptied"
	moment := time.Time{}
	if s.chance.IntN(2) == 0 {
		what = "the store is older"
		moment = time.Now().Add(-s.between(0, 15*time.Second))
	}

	// The version of an unread change contains its millisecond. Versions after the loss must be above all earlier ones.
	s.store.mu.Lock()
	s.store.unread.closed = true
	s.store.mu.Unlock()
	time.Sleep(10 * time.Millisecond)

	s.store.loseAfter(moment)
	s.readers.lose(moment)
	s.add(emptied, shadow, what, func() {})
}

// takeForDead removes endpoints of a gateway, as a process does that wrongly takes the gateway for dead.
func (s *simulation) takeForDead(m *member) {
	life := presence.IncarnationName(m.name, m.process.self.Incarnation)

	s.store.mu.Lock()
	for b := range simBuckets {
		ends, err := s.store.inner.Attached(context.Background(), b)
		must(err)

		for _, e := range ends {
			// About two of three are removed, so that the gateway loses only a part.
			if e.Gateway == life && s.chance.IntN(3) > 0 {
				must(s.store.inner.Detach(context.Background(), life, []presence.Topic{e.Topic}))
			}
		}
	}
	s.store.mu.Unlock()

	s.add(harmless, 3*time.Second, "endpoints of "+m.name+" are lost", func() {})
}

// failAlone breaks the only process. Its next run does not know the present users, so nobody has to stay counted.
func (s *simulation) failAlone(m *member) {
	if !m.undisturbed() {
		return
	}

	for _, u := range s.crowd.users {
		s.crowd.excuse(u)
	}

	switch s.chance.IntN(3) {
	case 0:
		s.crash(m, takeover, s.chance.IntN(2) == 0)
	case 1:
		s.restart(m, takeover)
	case 2:
		s.freeze(m, harmless)
	}
}

// others reports whether another member than m has the role and does it.
func (s *simulation) others(m *member, role string) bool {
	return slices.ContainsFunc(s.members, func(o *member) bool { return o != m && o.serves(role) })
}

// crash ends a process without notice, and starts it again later.
func (s *simulation) crash(m *member, kind faultKind, noticed bool) {
	if !s.alone {
		// Clients that do not notice the crash reconnect too late to stay counted, so others must be left to check.
		noticed = noticed || !s.excuse(s.crowd.at(m.name))
		if !s.scatter(m) {
			return
		}
	}

	r := m.running
	r.life.kill(noticed)
	m.running = nil

	s.add(kind, s.between(200*time.Millisecond, 9*time.Second), fmt.Sprintf("%s is dead, noticed %t", m.name, noticed),
		func() {
			r.stop()
			s.start(m)
		})
}

// scatter excuses the users who have to leave m's gateway while another gateway is suspended: a user who tries the
// suspended one first may be too late elsewhere. It also excuses users whose return the owner may not receive. It
// reports whether a user is left who is not excused.
func (s *simulation) scatter(m *member) bool {
	suspended := slices.ContainsFunc(s.members, func(o *member) bool {
		return o.running != nil && o.frozen && slices.Contains(o.roles, presence.RoleGateway)
	})
	if suspended || s.unheard() {
		return s.excuse(s.crowd.at(m.name))
	}

	return true
}

// unheard reports whether the owner may not learn in time that a user has returned through another gateway. The link
// between the two may be cut; and while datagrams are lost, six in a row may be, until the grace ends. The design lists
// the faults that change no count of users who stay: "a page reload, a reconnect within `leave-grace`, a rolling
// restart of any role (with at least two of the role), the loss of a presence node, and a Redis that comes back empty".
// A lost link is not among them: without it the owner cannot distinguish such a user from one who left.
func (s *simulation) unheard() bool { return s.parted() || s.net.weather.Load().lost > 0 }

// moving returns the users who are connecting to a gateway, or have to leave it.
func (s *simulation) moving() (users []*user) {
	for _, u := range s.crowd.users {
		if slices.ContainsFunc(u.tabs, func(t *tab) bool { return !t.settled() }) {
			users = append(users, u)
		}
	}

	for _, m := range s.members {
		if m.running != nil && m.leaving {
			users = append(users, s.crowd.at(m.name)...)
		}
	}

	return users
}

// straying returns the users who are moving, and those who may soon move because their gateway is suspended.
func (s *simulation) straying() []*user {
	users := s.moving()
	for _, m := range s.members {
		if m.running != nil && m.frozen {
			users = append(users, s.crowd.at(m.name)...)
		}
	}

	return users
}

// parted reports whether the link between any two processes is cut.
func (s *simulation) parted() bool {
	parted := false
	s.net.cuts.Range(func(any, any) bool {
		parted = true
		return false
	})

	return parted
}

// freeze suspends a process for a while. After a long suspension it is declared dead before its own timers end
// anybody's presence.
func (s *simulation) freeze(m *member, kind faultKind) {
	if !s.excuse(s.moving()) { // users who are connecting to m could reach another gateway too late
		return
	}

	lasts := s.between(200*time.Millisecond, 3*time.Second)
	if s.chance.IntN(2) == 0 && s.excuse(s.crowd.at(m.name)) {
		lasts = s.between(8*time.Second, 15*time.Second)
	} else if lasts > simPong/2 && s.unheard() && !s.excuse(s.crowd.at(m.name)) { // its clients may leave it
		return
	}

	m.frozen = true
	r := m.running
	// Later exactly this life of the process is thawed: m may have another one by then.
	r.life.freeze()

	began := time.Now()
	s.add(kind, lasts, m.name+" stands still", func() {
		r.frozen = false
		r.life.thaw()

		for _, u := range s.surfers {
			u.stoodStill(time.Since(began))
		}
	})
}

// cut cuts the link between two processes. Both still reach the store, so no other process takes over.
func (s *simulation) cut(a, b *member) {
	// A short cut ends before its users time out at the owner.
	lasts := s.between(200*time.Millisecond, time.Second)
	isLong := s.chance.IntN(2) == 0 && s.excuse(slices.Concat(s.crowd.at(a.name), s.crowd.at(b.name), s.straying()))
	if isLong {
		lasts = s.between(time.Second, 15*time.Second) // longer than the owner waits for their heartbeats
	}

	// A gateway repeats a join within a second, so a second after the cut the owner knows all its users.
	s.mu.Lock()
	for _, m := range []*member{a, b} {
		if isLong {
			s.cutOff[m.name] = time.Now()
		}
		until := time.Now().Add(lasts + 1500*time.Millisecond)
		if until.After(s.apart[m.name]) {
			s.apart[m.name] = until
		}
	}
	s.mu.Unlock()

	ways := [][2]string{{a.name, b.name}, {b.name, a.name}}
	for _, w := range ways {
		s.net.cutLink(w[0], w[1])
	}

	s.add(harmless, lasts, a.name+" and "+b.name+" are parted", func() {
		for _, w := range ways {
			s.net.healLink(w[0], w[1])
		}
	})
}

// restart makes a process leave, as SIGTERM does, and starts it again.
func (s *simulation) restart(m *member, kind faultKind) {
	if !s.alone && !s.scatter(m) {
		return
	}

	s.leave(m)
	s.add(kind, s.between(4*time.Second, 8*time.Second), m.name+" is told to leave", func() {
		// Two processes with one name would fight for its lease.
		<-m.left
		s.start(m)
	})
}

// leave makes a process leave, as SIGTERM does.
func (s *simulation) leave(m *member) {
	r := m.running
	r.leaving = true

	s.clients.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()

		if gw := r.gateway; gw != nil {
			gw.Drain(ctx)
		}

		r.process.Leave(ctx)
		r.stop()
		r.life.kill(true)
		close(r.left)
	})
}
