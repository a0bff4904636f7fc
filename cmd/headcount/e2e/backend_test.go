package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/golang-jwt/jwt/v5"
)

// A server says who is on a page, as often as it likes: users who are here by that and by
// a connection count once, and who is said to be gone is gone.
func TestServersSayWhoIsHere(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--jwt-secret="+jwtSecret, "--presence-timeout=1200ms", "--heartbeat-interval=400ms")
	page := func(user, page string) string { return s.url + "/-/users/" + user + "/pages/" + page }
	if c := do(t, "PUT", page("alice", "p"), "", withKey).counter(t); c.Count != 1 || c.Page != "p" {
		t.Errorf("alice is here: %+v", c)
	}
	if c := do(t, "PUT", page("alice", "p"), "{}", withKey).counter(t); c.Count != 1 {
		t.Errorf("alice is still here: %+v", c)
	}
	alice := s.dial(t, dialer{query: "token=" + hs256(t, jwt.MapClaims{"sub": "alice"})})
	alice.join("p")
	alice.takeCount("p", 1)
	if c := do(t, "PUT", page("al%2Fice", "p"), "", withKey).counter(t); c.Count != 2 {
		t.Errorf("another one: %+v", c)
	}
	for range 2 { // of who is not here, too
		if c := do(t, "DELETE", page("al%2Fice", "p"), "", withKey).counter(t); c.Count != 1 {
			t.Errorf("the other one is gone: %+v", c)
		}
	}
	if c := do(t, "DELETE", page("alice", "p"), "", withKey).counter(t); c.Count != 1 {
		t.Errorf("alice is gone, but for a connection: %+v", c)
	}
	alice.leave("p")
	do(t, "PUT", page("alice", "p"), "").problem(t, 401)
	do(t, "DELETE", page("alice", "p"), "", "X-API-Key: wrong").problem(t, 401)
	do(t, "PUT", page("alice", "*"), "", withKey).problem(t, 400)
	do(t, "PUT", page("a%07", "p"), "", withKey).problem(t, 400)
	do(t, "PUT", page("alice", "p"), `{"page":"q"}`, withKey).problem(t, 400)
	do(t, "PUT", page("alice", "p"), "[]", withKey).problem(t, 400)
	do(t, "GET", page("alice", "p"), "", withKey).problem(t, 405)

	const many = 150 // more than an address may bring by PUT at once
	var wg sync.WaitGroup
	for part := range 10 {
		wg.Go(func() {
			for i := part; i < many; i += 10 {
				if a, err := try("PUT", page(fmt.Sprint("user-", i), "full"), "", withKey); err != nil || a.status != 200 {
					t.Errorf("user %d: %d %s, %v", i, a.status, a.body, err)
				}
			}
		})
	}
	wg.Wait()
	// They are held for 3.6 s, so what is read now may have lost the first of them on a machine that was busy for long.
	if got := s.count(t, "full"); got > many {
		t.Errorf("%d are here", got)
	}
	eventually(t, "everyone whom nobody holds any more is gone", func() bool { return s.count(t, "full") == 0 && s.count(t, "p") == 0 })
	if log := s.log.String(); strings.Contains(log, "alice") {
		t.Error("a user is in the log")
	}
}
