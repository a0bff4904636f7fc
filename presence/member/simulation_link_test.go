package member

import (
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
)

// TestAStalledLinkUndoesNothing: calls about holds are stalled on their way to the owners, and their users give up. The
// users then ask another gateway for the opposite and get an answer. When the old calls finally arrive, the answered
// ones stand, even if the users gave up so early that the old calls are still in time.
func TestAStalledLinkUndoesNothing(t *testing.T) {
	for _, action := range []string{"increment", "decrement"} {
		for _, patience := range []time.Duration{putPatience, time.Second} {
			synctest.Test(t, func(t *testing.T) {
				s := clusterOf(3)
				defer s.end()
				s.ready()
				time.Sleep(3 * time.Second)

				asks, answers := s.where[0], s.where[1]
				owners := s.members
				if s.members[0].gateway != nil { // all have all roles, and the asked one must own no user of the test
					owners = slices.DeleteFunc(slices.Clone(owners), func(m *member) bool { return m.name == asks })
				}

				ask := func(u *user, gateway, action string) bool {
					body := `{"action":"` + action + `"}`
					status, _ := s.requestWithin(patience, gateway, http.MethodPut, "/a/counter", u.token, body)
					return status == http.StatusOK
				}

				opposite := map[string]string{"increment": "decrement", "decrement": "increment"}[action]
				var stalled []*user
				for i := range 4 * simUsers {
					u := newUser(fmt.Sprint("u", i))
					if !ask(u, answers, opposite) {
						t.Fatal("a call over a good link failed")
					}
					stalled = append(stalled, u)
				}

				// The users' calls over the cut link get no answer in time.
				for _, m := range owners {
					s.net.cutLink(asks, m.name)
				}

				var all sync.WaitGroup
				said := make([]bool, len(stalled)) // was the call answered, because asks itself owns the user?
				for i, u := range stalled {
					all.Go(func() { said[i] = ask(u, asks, action) })
				}
				all.Wait()

				if !slices.Contains(said, false) {
					t.Error("no call was stalled, so the test proves nothing")
				}

				// Now the users ask for the opposite over a good link, and these calls are answered.
				want := int64(0)
				for _, u := range stalled {
					if !ask(u, answers, opposite) {
						t.Errorf("%s over a good link failed", opposite)
					}
					if opposite == "increment" {
						want++
					}
				}

				// Only now the old calls arrive.
				for _, m := range owners {
					s.net.healLink(asks, m.name)
				}
				time.Sleep(time.Second)

				counts, err := s.store.inner.Counts(t.Context(), []string{"a"})
				if err != nil || counts[0].Users != want {
					t.Errorf("%s after %s: the counts are %+v, %v; want %d", action, patience, counts, err, want)
				}
			})
		}
	}
}

// TestTheClockOfTheStoreIsSet: the store's clock jumps an hour ahead, and back, as after a failover to a server with
// another clock. Nobody who is present is missing from a count, and a moment later holds work again.
func TestTheClockOfTheStoreIsSet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := clusterOf(5)
		defer s.end()
		s.ready()
		s.watch(s.where, append([]string{presence.AllPages}, s.pages...))
		for i := range simUsers {
			s.newVisitor(i, s.where[i%len(s.where)], "a")
		}

		time.Sleep(5 * time.Second)
		s.crowd.begin(s.crowd.users)

		// The clock jumps ahead, back, behind the real time, and a little forward.
		for _, jump := range []time.Duration{time.Hour, -time.Hour, -time.Hour, 20 * time.Second} {
			s.store.mu.Lock()
			s.store.clock += jump
			s.store.mu.Unlock()

			time.Sleep(15 * time.Second)
			s.check()
			if s.failed() {
				t.Fatalf("%s: %s", jump, s.failure)
			}

			u := s.crowd.users[0] // counted on this page already
			for _, action := range []string{"increment", "decrement"} {
				body := `{"action":"` + action + `"}`
				status, said := s.request(s.where[0], http.MethodPut, "/a/counter", u.token, body)
				if status != http.StatusOK {
					t.Errorf("%s: %s is answered %d %s", jump, action, status, said)
				}
			}
		}
	})
}

// TestADispatcherThatIsNotHeard: no dispatcher reaches a certain gateway any more, but all reach the store. After
// PresenceTimeout at the latest the gateway's counts are stale, also those of pages that do not change. Soon after the
// link is back they are exact and not stale. The other gateway is right all the time.
func TestADispatcherThatIsNotHeard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seedOfRoles(presence.RoleDispatcher), false)
		defer s.end()
		s.startAll()
		s.watch(s.where, append([]string{presence.AllPages}, s.pages...))

		still := newUser("still")
		s.newTab(still, s.where[0], nil, "a")
		s.crowd.users = append(s.crowd.users, still)
		cut, there := s.where[0], s.where[1]

		wantStale := func(gateway string, want bool) {
			t.Helper()
			for _, w := range s.watchers {
				tab := w.tabs[0]
				if tab.home != gateway {
					continue
				}

				tab.mu.Lock()
				for page, last := range tab.last {
					if last.stale != want {
						t.Errorf("after %s: %s at %s is stale: %t", time.Since(s.begun), page, gateway, last.stale)
					}
				}
				tab.mu.Unlock()
			}
		}

		time.Sleep(10 * time.Second)
		wantStale(cut, false)

		for _, m := range s.members {
			if slices.Contains(m.roles, presence.RoleDispatcher) {
				s.net.cutLink(m.name, cut)
			}
		}

		for i := range 3 {
			s.newVisitor(i, there, "b")
		}
		time.Sleep(s.timeout)
		wantStale(cut, true)
		wantStale(there, false)

		for _, m := range s.members {
			s.net.healLink(m.name, cut)
		}

		time.Sleep(simQuiet)
		wantStale(cut, false)
		s.check()
		if s.failed() {
			t.Error(s.failure)
		}
	})
}

// TestAFurtherTabAfterACut: the link between a gateway and the owners is cut until the gateway's users time out.
// Further tabs of these users, opened during the cut and just after it, get no count that lacks the user, unless it is
// stale.
func TestAFurtherTabAfterACut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seedOfRoles(presence.RolePresence), false)
		defer s.end()
		s.startAll()
		s.watch(s.where, append([]string{presence.AllPages}, s.pages...))

		cut := s.where[0]
		for i := range simUsers {
			s.newVisitor(i, cut, "a")
		}

		furtherTabs := func(users []*user) {
			for _, u := range users {
				s.newTab(u, cut, nil, "a")
				time.Sleep(100 * time.Millisecond)
			}
		}
		time.Sleep(5 * time.Second)

		for _, m := range s.members {
			if slices.Contains(m.roles, presence.RolePresence) {
				s.net.cutLink(m.name, cut)
				s.net.cutLink(cut, m.name)
			}
		}
		time.Sleep(s.timeout + 3*time.Second)
		furtherTabs(s.crowd.users[:simUsers/2])

		for _, m := range s.members {
			s.net.healLink(m.name, cut)
			s.net.healLink(cut, m.name)
		}
		furtherTabs(s.crowd.users[simUsers/2:])

		time.Sleep(simQuiet)
		s.check()
		if s.failed() {
			t.Error(s.failure)
		}
	})
}

// seedOfRoles returns a seed in which some members have the given role alone.
func seedOfRoles(role string) uint64 {
	for seed := uint64(1); ; seed++ {
		alone := func(m *member) bool { return slices.Equal(m.roles, []string{role}) }
		if slices.ContainsFunc(newSimulation(seed, false).members, alone) {
			return seed
		}
	}
}
