package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/golang-jwt/jwt/v5"

	"headcount/internal/testkit"
)

// A server says who is on a page, as often as it likes: users who are here by that and by
// a connection count once, and who is said to be gone is gone.
func TestServersSayWhoIsHere(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--jwt-secret="+jwtSecret, "--presence-timeout=2s", "--heartbeat-interval=500ms")
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
	// They are held for 6 s, so what is read now may have lost the first of them on a machine that was busy for long.
	if got := s.count(t, "full"); got > many {
		t.Errorf("%d are here", got)
	}
	testkit.Eventually(t, "everyone whom nobody holds any more is gone", func() bool { return s.count(t, "full") == 0 && s.count(t, "p") == 0 })
	if log := s.log.String(); strings.Contains(log, "alice") {
		t.Error("a user is in the log")
	}
}

// What is kept of a user is erased for the user, and for a server: follows, what is
// unread, and memberships. Others keep theirs.
func TestErasure(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--data-dir="+t.TempDir())
	value := func(key string) int {
		t.Helper()
		var c struct{ Value int }
		a := s.get(t, "/api/v1/counters/"+key, withKey)
		if err := json.Unmarshal([]byte(a.body), &c); err != nil || a.status != 200 {
			t.Fatalf("%d %s, %v", a.status, a.body, err)
		}
		return c.Value
	}
	erase := func(path string, headers ...string) answer {
		t.Helper()
		a := do(t, "DELETE", s.url+path, "", headers...)
		a.noContent(t)
		return a
	}
	me, other := s.ws(t), s.ws(t)
	page := fresh(t)
	for _, c := range []*client{me, other} {
		s.follow(t, c.as(), page)
		for _, key := range []string{"likes:1", "likes:2"} {
			if a := s.put(t, "/api/v1/counters/"+key+"/members/me", "", c.as()); a.status != 200 {
				t.Fatalf("%d %s", a.status, a.body)
			}
		}
	}
	s.change(t, page, "")
	me.awaitUnread(1)
	other.awaitUnread(1)
	if a := erase("/-/me", "Cookie: headcount_id="+me.id); !strings.HasPrefix(a.header.Get("Set-Cookie"), "headcount_id=; Path=/; Max-Age=0") {
		t.Errorf("the cookie stays: %v", a.header)
	}
	me.awaitUnread(0)
	if got := s.get(t, "/-/me/follows", me.as()).body; strings.TrimSpace(got) != `{"follows":[]}` {
		t.Errorf("it is followed: %s", got)
	}
	if value("likes:1") != 1 || value("likes:2") != 1 {
		t.Error("the user is still a member")
	}
	other.silent()
	erase("/-/me") // who was never here
	erase("/-/me", me.as())

	user := "/-/users/" + other.user
	do(t, "DELETE", s.url+user, "").problem(t, 401)
	if a := do(t, "POST", s.url+"/api/v1/counters/likes:3/members", `{"add":["x",`+quoted(other.user)+`]}`, withKey); a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	erase(user, withKey)
	erase(user, withKey)
	other.awaitUnread(0)
	if value("likes:1") != 0 || value("likes:2") != 0 || value("likes:3") != 1 {
		t.Error("the user is still a member")
	}
}

// Who erases leaves only those sets that the rule lets members leave.
func TestErasureStaysWithinTheRules(t *testing.T) {
	t.Parallel()
	rules := t.TempDir() + "/rules.json"
	if err := os.WriteFile(rules, []byte(`{"rules":[{"match":"fans:*","kind":"members","public":["read","member"]},{"match":"banned:*","kind":"members","public":["read"]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startWithKey(t, "--counters="+rules)
	me := s.ws(t)
	for _, key := range []string{"fans:1", "banned:1"} {
		if a := do(t, "PUT", s.url+"/api/v1/counters/"+key+"/members/"+me.user, "", withKey); a.status != 200 {
			t.Fatalf("%d %s", a.status, a.body)
		}
	}
	in := func(key string, want bool) {
		t.Helper()
		if a := s.get(t, "/api/v1/counters/"+key+"/members/"+me.user, withKey); !strings.Contains(a.body, fmt.Sprintf(`"member":%t`, want)) {
			t.Errorf("%s: %s", key, a.body)
		}
	}
	do(t, "DELETE", s.url+"/-/me", "", me.as()).noContent(t)
	in("fans:1", false)
	in("banned:1", true)
	do(t, "DELETE", s.url+"/-/users/"+me.user, "", withKey).noContent(t)
	in("banned:1", false)
}

// A user sees which pages changed and what was said of that, and reads them one by one.
func TestNotifications(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	c := s.ws(t)
	list := func(want string) {
		t.Helper()
		var got struct {
			Count         int
			Notifications []struct {
				Page, Title, URL string
				Count            int
			}
		}
		for _, a := range []answer{s.get(t, "/-/me/notifications", c.as()), s.get(t, "/-/users/"+c.user+"/notifications", withKey)} {
			if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 200 {
				t.Fatalf("%d %s, %v", a.status, a.body, err)
			}
			lines := []string{fmt.Sprint(got.Count)}
			for _, n := range got.Notifications {
				lines = append(lines, fmt.Sprintf("%s %d %q %q", n.Page, n.Count, n.Title, n.URL))
			}
			slices.Sort(lines[1:]) // changes of one second come in any order
			if text := strings.Join(lines, "; "); text != want {
				t.Errorf("got %s, want %s", text, want)
			}
		}
	}
	for _, page := range []string{"a/b", "c"} {
		s.follow(t, c.as(), page)
	}
	list("0")
	s.change(t, "a/b", `{"title":"\"New\" <b>","url":"https://a.example/?x=1"}`)
	s.change(t, "a/b", `{"by":"bob"}`)
	s.change(t, "c", `{"url":"/c#d"}`)
	c.awaitUnread(3)
	list(`3; a/b 2 "\"New\" <b>" "https://a.example/?x=1"; c 1 "" "/c#d"`)
	do(t, "DELETE", s.url+"/-/me/notifications/a%2Fb", "", c.as()).noContent(t)
	c.awaitUnread(1)
	list(`1; c 1 "" "/c#d"`)
	do(t, "DELETE", s.url+"/-/users/"+c.user+"/notifications/c", "", withKey).noContent(t)
	do(t, "DELETE", s.url+"/-/users/"+c.user+"/notifications/c", "", withKey).noContent(t)
	c.awaitUnread(0)
	list("0")
	for _, bad := range []string{
		`{"title":""}`, `{"title":1}`, `{"title":null}`, `{"title":"a\nb"}`, `{"title":"` + strings.Repeat("x", 301) + `"}`,
		`{"url":"javascript:alert(1)"}`, `{"url":"//evil.example/"}`, `{"url":"/\\evil.example"}`, `{"url":"page"}`, `{"url":"https:/a"}`,
	} {
		do(t, "POST", s.url+"/c/changes", bad, withKey).problem(t, 400)
	}
	s.get(t, "/-/users/alice/notifications").problem(t, 401)
	do(t, "DELETE", s.url+"/-/me/notifications/*", "", c.as()).problem(t, 400)
}
