package member

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestASlowStoreDeclaresNobodyDead: one process dies while all calls of the store, but those for leases, take nearly as
// long as they may. No other process is declared dead.
func TestASlowStoreDeclaresNobodyDead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var s *simulation
		for seed := uint64(1); s == nil || len(s.members) < 4; seed++ {
			s = newSimulation(seed, false)
		}

		defer s.end()
		s.startAll()
		s.watch(s.where, append([]string{"*"}, s.pages...))
		time.Sleep(5 * time.Second)

		// Calls for leases stay fast: if the store delayed those, processes could rightly be declared dead.
		s.store.set(func() { s.store.slow = renewLimit - 10*time.Millisecond })

		i := slices.IndexFunc(s.members, func(m *member) bool { return m.gateway != nil })
		dead := s.members[i]
		dead.life.kill(true)
		s.members = slices.Delete(s.members, i, i+1)

		for begun := time.Now(); time.Since(begun) < 30*time.Second; time.Sleep(100 * time.Millisecond) {
			for _, m := range s.members {
				there := m.process.Members()
				for _, o := range s.members {
					if !slices.ContainsFunc(there, func(p presence.Process) bool { return p.Name == o.name }) {
						t.Fatalf("%s died %s ago, and %s takes %s for dead",
							dead.name, time.Since(begun), m.name, o.name)
					}
				}
			}
		}

		dead.stop()
		// The simulation ends without the dead process.
		s.where = slices.DeleteFunc(s.where, func(gw string) bool { return gw == dead.name })
	})
}
