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

// TestNobodyIsHeldAfterGivingUp: users ask a suspended gateway for holds. They give up and end the holds, at any
// gateway. Afterwards no user may be present.
func TestNobodyIsHeldAfterGivingUp(t *testing.T) {
	alone := uint64(1)
	for !newSimulation(alone, false).alone {
		alone++
	}

	for name, seed := range map[string]uint64{"a process that is alone": alone, "a gateway of several": seedOf(5)} {
		synctest.Test(t, func(t *testing.T) {
			s := newSimulation(seed, false)
			defer s.end()
			s.startAll()
			s.watch(s.where, []string{presence.AllPages, "a"})
			time.Sleep(3 * time.Second)

			// The gateway is suspended, so the calls wait in its connections.
			still := s.members[slices.IndexFunc(s.members, func(m *member) bool { return m.gateway != nil })]
			still.life.freeze()

			ask := func(u *user, gateway, action string) bool {
				status, _ := s.request(gateway, http.MethodPut, "/a/counter", u.token, `{"action":"`+action+`"}`)
				return status == http.StatusOK
			}

			var asking sync.WaitGroup
			for i := range simUsers {
				asking.Go(func() {
					u := newUser(fmt.Sprint("u", i))
					if ask(u, still.name, "increment") {
						t.Errorf("%s: a call of %s was answered by the suspended gateway", name, u.name)
					}
					// If there is only one gateway, this is the suspended one.
					for !ask(u, s.where[len(s.where)-1], "decrement") {
						time.Sleep(300 * time.Millisecond)
					}
				})
			}

			time.Sleep(putPatience + time.Second)
			still.life.thaw()
			asking.Wait()

			// By now the gateway has handled the calls whose users gave up long ago.
			time.Sleep(simQuiet)
			s.check()
			if s.failed() {
				t.Errorf("%s: %s", name, s.failure)
			}
		})
	}
}
