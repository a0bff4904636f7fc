package member

import (
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence"
	"headcount/webhook"
)

// TestWhoWasTimedOutIsToldOfAgain: the links between a gateway and all nodes are cut until its users time out and
// webhooks report that. The users stay on their page, and afterwards webhooks report them as online again, without
// another join.
func TestWhoWasTimedOutIsToldOfAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seedOf(5), false) // gateways and nodes are apart
		defer s.end()
		s.startAll()
		for i := range simUsers {
			s.newVisitor(i, s.where[0], "a")
		}
		s.receiver.awaits(t, webhook.Online)

		s.crowd.begin(nil) // in this round nobody has to stay counted
		ways := s.waysToNodes(s.where[0])
		for _, w := range ways {
			s.net.cutLink(w[0], w[1])
		}
		s.receiver.awaits(t, webhook.Offline)

		for _, w := range ways {
			s.net.healLink(w[0], w[1])
		}
		s.receiver.awaits(t, webhook.Online)

		time.Sleep(simQuiet)
		s.check()
		if s.failed() {
			t.Error(s.failure)
		}
	})
}

// waysToNodes returns the links between a gateway and all nodes, in both directions.
func (s *simulation) waysToNodes(gateway string) (ways [][2]string) {
	for _, m := range s.members {
		if m.serves(presence.RolePresence) {
			ways = append(ways, [2]string{gateway, m.name}, [2]string{m.name, gateway})
		}
	}

	return ways
}

// awaits waits until the last event about each user with tabs has the given type. It waits for two minutes at most.
func (r *receiver) awaits(t *testing.T, kind string) {
	t.Helper()
	late := ""
	for range 120 {
		time.Sleep(time.Second)

		late = ""
		r.mu.Lock()
		for _, u := range r.s.crowd.users {
			if last := r.told["user "+u.name]; last.Type != kind {
				late = u.name
			}
		}
		r.mu.Unlock()
		if late == "" {
			return
		}
	}

	t.Fatalf("after two minutes the last event about %s is not %q", late, kind)
}
