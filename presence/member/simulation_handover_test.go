package member

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestALateReturnDuringAHandover: users return at the end of their grace, while the node that knows of the grace hands
// over. Some gateways know the next owner before that owner itself does, so for a while no node receives the return.
// Still no count may fall.
func TestALateReturnDuringAHandover(t *testing.T) {
	for moment := range moments(20) {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(seedOf(5), false) // gateways and nodes are apart
			defer s.end()

			var nodes, others []*member
			for _, m := range s.members {
				if slices.Contains(m.roles, presence.RolePresence) {
					nodes = append(nodes, m)
				} else {
					others = append(others, m)
				}
			}

			// The gateways learn of the first node's lease at once, and of the other nodes' leases late.
			s.start(nodes[0])
			time.Sleep(renewEvery / 9)
			for _, m := range others {
				s.start(m)
			}

			time.Sleep(renewEvery * 7 / 9)
			for _, m := range nodes[1:] {
				s.start(m)
			}
			s.ready()

			s.watch(s.where, []string{presence.AllPages, "a"})
			for i := range simUsers {
				s.newVisitor(i, "", "a")
			}
			time.Sleep(5*time.Second + time.Duration(moment)*renewEvery/20)

			s.crowd.begin(s.crowd.users)
			for _, u := range s.crowd.users {
				u.tabs[0].move(s.where[0], 1700*time.Millisecond)
			}

			// The handover begins before the users are back. The grace ends at 2 s.
			time.Sleep(700 * time.Millisecond)
			s.restart(nodes[0], takeover)

			time.Sleep(simQuiet)
			s.healDue(time.Now())
			s.ready()
			if s.failed() {
				t.Errorf("moment %d: %s", moment, s.failure)
			}
		})
	}
}

// TestALeaseEndsForGood: a process that has left runs on for a while, until its last calls have been answered. It does
// not renew its lease meanwhile.
func TestALeaseEndsForGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := wholesOf(1)
		defer s.end()
		s.startAll()

		r := s.members[0].running
		r.leaving = true
		s.clients.Go(func() {
			r.process.Leave(t.Context())

			// Long enough for several renewals, if the process still made them.
			time.Sleep(3 * renewEvery)

			for _, m := range s.members[1:] {
				if slices.ContainsFunc(*m.process.members.Load(), func(p presence.Process) bool {
					return p.Name == s.members[0].name
				}) {
					t.Errorf("%s still lists the process that has left", m.name)
				}
			}

			r.stop()
			r.life.kill(true)
			close(r.left)
		})
		<-r.left
	})
}
