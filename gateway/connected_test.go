package gateway

import (
	"maps"
	"strings"
	"testing"
	"time"
)

// A user is connected while a connection of the user is on a page. A user who only watches is not, nor is a crawler.
func TestConnected(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		r := s.open("/p/counter/events?join=1", "")
		cookie, _, _ := strings.Cut(r.response(200).Header.Get("Set-Cookie"), ";")
		s.looker("Cookie: " + cookie).say(`{"type":"join","page":"p"}`) // another tab of the same user
		s.looker().say(`{"type":"subscribe","page":"p"}`)
		s.looker(crawls).say(`{"type":"join","page":"p"}`)
		leaver := s.looker()
		leaver.say(`{"type":"join","page":"q"}`)
		// The messages were only sent. In a bubble a second is enough for all of them to be served.
		time.Sleep(time.Second)

		connected := maps.Collect(s.g.Connected())
		if len(connected) != 2 {
			t.Errorf("%d users are connected, want 2", len(connected))
		}

		for user, name := range connected {
			if s.g.callers.Identities.Hash(name) != user {
				t.Errorf("%q is not the name of user %d", name, user)
			}
		}

		leaver.say(`{"type":"leave","page":"q"}`)
		time.Sleep(time.Second)
		if n := len(maps.Collect(s.g.Connected())); n != 1 {
			t.Errorf("%d users are connected after one has left, want 1", n)
		}
	})
}
