package member

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// seedOf returns the first seed whose cluster has at least that many processes.
func seedOf(least int) uint64 {
	for seed := uint64(1); ; seed++ {
		if len(newSimulation(seed, false).members) >= least {
			return seed
		}
	}
}

// clusterOf returns a started simulation of processes that share a store.
func clusterOf(least int) *simulation {
	s := newSimulation(seedOf(least), false)
	for _, m := range s.members {
		s.start(m)
	}

	return s
}

// TestAClusterStartsFromNothing: a cluster of any topology is soon ready.
func TestAClusterStartsFromNothing(t *testing.T) {
	for _, least := range []int{3, 5, 6} {
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			s := clusterOf(least)
			defer s.end()
			s.ready()

			if took := time.Since(begun); took > 2500*time.Millisecond {
				t.Errorf("%d processes were ready after %s, want 2.5s at most", len(s.members), took)
			}

			time.Sleep(simQuiet)
			s.check()
			if s.failed() {
				t.Error(s.failure)
			}
		})
	}
}

// TestRunningProcessesWinAfterALoss: a process with other settings starts at the very moment in which the store loses
// everything. It is refused, and the running processes go on.
func TestRunningProcessesWinAfterALoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := clusterOf(5)
		defer s.end()
		s.ready()

		time.Sleep(3 * time.Second)
		s.store.lose()
		stranger := &member{name: "stranger:7946", roles: []string{presence.RolePresence}, facts: "other settings"}
		s.start(stranger)

		select {
		case err := <-stranger.refused:
			if !errors.Is(err, presence.ErrFacts) {
				t.Errorf("the process with other settings ended with %v, want ErrFacts", err)
			}
		case <-time.After(5 * time.Second):
			t.Error("the process with other settings was not refused within 5 s")
		}

		stranger.life.kill(true)
		stranger.stop()
		time.Sleep(simQuiet)
		s.ready()
		s.check()
		if s.failed() || s.store.facts != "settings" {
			t.Errorf("broken: %q; the facts in the store are %q, want %q", s.failure, s.store.facts, "settings")
		}
	})
}

// TestANodeMayNotKnowAGateway: a gateway is suspended, the store is emptied, and a node starts that cannot know this
// gateway. The node may take over partitions before their owners have written them again, and declare them complete
// without the gateway's users. Still no count falls: the other owners know the gateway, and do not declare their
// partitions complete before it is back.
func TestANodeMayNotKnowAGateway(t *testing.T) {
	for moment := range moments(12) {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(seedOf(5), false) // gateways and nodes are apart
			defer s.end()

			late := s.leaveOutANode() // this node starts only when the store has been emptied
			s.startAll()

			s.watch(s.where, []string{presence.AllPages, "a"})
			for i := range simUsers {
				s.newVisitor(i, s.where[0], "a")
			}
			time.Sleep(8*time.Second + time.Duration(moment)*170*time.Millisecond)
			s.crowd.begin(s.crowd.users)

			still := s.members[slices.IndexFunc(s.members, func(m *member) bool { return m.name == s.where[0] })]
			still.life.freeze()
			s.store.lose()
			s.start(late)
			s.members = append(s.members, late)

			time.Sleep(2900 * time.Millisecond)
			still.life.thaw()
			time.Sleep(simQuiet)
			s.ready()
			s.check()
			if s.failed() {
				t.Errorf("moment %d: %s", moment, s.failure)
			}
		})
	}
}

// TestAFormerLeaseEndsNoProcess: soon after a process was started again, Redis fails over to a replica that has the
// lease of the former run instead of the new one. The process runs on.
func TestAFormerLeaseEndsNoProcess(t *testing.T) {
	overFormerLease(t, func(s *simulation, again *member, former presence.Process, moment int) {
		// The replica has the lease as it was at the end of the former run.
		until := time.Now().Add(leaseTTL)
		s.start(again)

		time.Sleep(time.Second + time.Duration(moment)*renewEvery/9)
		s.store.set(func() { s.store.leases[again.name] = simLease{former, until} })
	})
}

// TestAFormerLeaseArrivesLate: a process was started again and stands still before its first renewal, as everything on
// its machine does. The last renewal of the former run reaches the store only then. The process runs on.
func TestAFormerLeaseArrivesLate(t *testing.T) {
	overFormerLease(t, func(s *simulation, again *member, former presence.Process, moment int) {
		s.start(again)
		again.life.freeze()
		time.Sleep(time.Second + time.Duration(moment)*renewEvery/2)
		s.store.set(func() { s.store.leases[again.name] = simLease{former, time.Now().Add(leaseTTL)} })
		again.life.thaw()
	})
}

// overFormerLease lets a process of a cluster leave, and calls restart, which starts it again and gives the store the
// lease of the former run at one of several moments. All is right then.
func overFormerLease(t *testing.T, restart func(s *simulation, again *member, former presence.Process, moment int)) {
	t.Helper()
	for moment := range moments(9) {
		synctest.Test(t, func(t *testing.T) {
			s := clusterOf(3)
			defer s.end()
			s.ready()

			again := s.members[0]
			former := presence.Process{
				Name: again.name, Incarnation: again.process.self.Incarnation, Roles: again.roles,
			}
			s.leave(again)
			<-again.left

			restart(s, again, former, moment)

			time.Sleep(simQuiet)
			s.ready()
			if !s.failed() {
				s.check()
			}
			if s.failed() {
				t.Errorf("moment %d: %s", moment, s.failure)
			}
		})
	}
}

// TestAStartingProcessWaitsOutAnOutage: a node has just written its first lease when the store goes away. The store
// comes back empty. The node could not watch the gateways meanwhile, so it does not take partitions as if there were
// none.
func TestAStartingProcessWaitsOutAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seedOf(5), false) // gateways and nodes are apart
		defer s.end()
		late := s.leaveOutANode()
		s.startAll()

		s.start(late)
		s.members = append(s.members, late)
		time.Sleep(settling / 2)
		s.store.leave(false)
		s.store.lose()

		time.Sleep(2 * settling)
		s.store.comeBack()
		time.Sleep(settling)
		synctest.Wait()
		for partition := range simPartitions {
			if late.node.Owns(partition) {
				t.Errorf("the node owns partition %d, want none", partition)
			}
		}

		s.ready()
	})
}

// leaveOutANode takes the last node out of the members that startAll starts, and returns it.
func (s *simulation) leaveOutANode() *member {
	last := -1
	for i, m := range s.members {
		if slices.Contains(m.roles, presence.RolePresence) {
			last = i
		}
	}

	late := s.members[last]
	s.members = slices.Delete(s.members, last, last+1)

	return late
}
