package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// userState is the answer about a user.
type userState struct {
	User     string
	Online   bool
	Since    time.Time
	Pages    int
	LastSeen time.Time `json:"last_seen"`
}

// users asks which of these users are here.
func (s *server) users(t testing.TB, names ...string) []userState {
	t.Helper()
	var is struct{ Users []userState }
	a := s.get(t, "/-/users?"+url.Values{"user": names}.Encode(), withKey)
	err := json.Unmarshal([]byte(a.body), &is)
	if err != nil || a.status != http.StatusOK || len(is.Users) != len(names) {
		t.Fatalf("the users %q: %d %s, error %v", names, a.status, a.body, err)
	}

	for i, u := range is.Users {
		consistent := u.Online != u.Since.IsZero() && u.Online == (u.Pages > 0) && (!u.Online || u.LastSeen.IsZero())
		if u.User != names[i] || !consistent {
			t.Errorf("the answer about %s is of another user, or contradicts itself: %+v", names[i], u)
		}
	}

	return is.Users
}

// smokeUsers asks gateway a about users who are at b, and follows one of them.
func smokeUsers(t *testing.T, a, b *server) {
	t.Helper()
	one := b.ws(t)
	many := []string{one.user, "nobody"}
	for i := range 50 {
		many = append(many, fmt.Sprint("nobody ", i))
	}

	st := a.sse(t, "/-/users/events?"+url.Values{"user": many[:2]}.Encode(), withKey)

	next := func(user string) (is userState) {
		t.Helper()
		for {
			select {
			case e := <-st.events:
				if err := json.Unmarshal([]byte(e.data), &is); err != nil || e.name != "user" {
					t.Fatalf("event %q: %s", e.name, e.data)
				}
				if is.User == user {
					return is
				}
			case <-time.After(testkit.Timeout):
				t.Fatal("no event")
			}
		}
	}

	if is := next(one.user); is.Online {
		t.Errorf("before it has joined: %+v", is)
	}

	before := time.Now().Add(-2 * time.Second) // the times are whole seconds
	pages := []string{fresh(t), fresh(t)}
	for _, page := range pages {
		one.join(page)
		one.awaitCount(page, 1)
	}

	// A tab at the other gateway is the same user.
	tab := a.again(t, one)
	tab.join(pages[0])
	tab.awaitCount(pages[0], 1)

	is := a.users(t, many...)
	online := slices.ContainsFunc(is[1:], func(u userState) bool { return u.Online })
	if is[0].Pages != 2 || is[0].Since.Before(before) || online {
		t.Errorf("users: %+v; want only the first online, on 2 pages, since %v or later", is, before)
	}

	testkit.Eventually(t, "an event that the user is on both pages", func() bool { return next(one.user).Pages == 2 })
	for _, c := range []*client{one, tab} {
		c.ws.CloseNow()
	}

	gone := time.Now().Add(-2 * time.Second) // the times are whole seconds
	seen := func(is userState) bool {
		return !is.Online && is.LastSeen.After(gone) && !is.LastSeen.After(time.Now())
	}

	testkit.Eventually(t, "an event that the user is gone", func() bool {
		is := next(one.user)
		if !is.Online && !seen(is) {
			t.Errorf("the event that the user is gone: %+v", is)
		}
		return !is.Online
	})

	for _, s := range []*server{a, b} {
		if is := s.users(t, one.user, many[1]); !seen(is[0]) || is[1].Online || !is[1].LastSeen.IsZero() {
			t.Errorf("after the user has left: %+v", is)
		}
	}

	if is := do(t, "DELETE", a.url+"/-/users/"+one.user, "", withKey); is.status != http.StatusNoContent {
		t.Errorf("erasing: %d %s", is.status, is.body)
	}
	if is := b.users(t, one.user); !is[0].LastSeen.IsZero() {
		t.Errorf("after the user was erased: %+v", is)
	}
	testkit.Eventually(t, "an event that the user is not known any more",
		func() bool { return next(one.user).LastSeen.IsZero() })
}

// A user, and a server for a user, can erase what is stored about the user: follows, unread counts, and memberships.
// Other users keep theirs. A user who erases leaves only the sets that members may leave by their rule.
func TestServerErasure(t *testing.T) {
	t.Parallel()
	rules := t.TempDir() + "/rules.json"
	const text = `{"rules":[{"match":"likes:*","kind":"members","public":["read","member"]},` +
		`{"match":"banned:*","kind":"members","public":["read"]}]}`
	if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startWithKey(t, "--data-dir="+t.TempDir(), "--counters="+rules)

	value := func(key string) int {
		t.Helper()
		var c struct{ Value int }
		a := s.get(t, "/api/v1/counters/"+key, withKey)
		if err := json.Unmarshal([]byte(a.body), &c); err != nil || a.status != 200 {
			t.Fatalf("GET %s: %d %s, error %v", key, a.status, a.body, err)
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
				t.Fatalf("becoming a member of %s: %d %s", key, a.status, a.body)
			}
		}
	}

	const banned = "banned:1/members/"
	s.call(t, "PUT", banned+me.user, "").lasting(t)
	isBanned := func(want bool) {
		t.Helper()
		if is := s.call(t, "GET", banned+me.user, "").lasting(t); *is.Member != want {
			t.Errorf("banned: %t, want %t", *is.Member, want)
		}
	}

	s.change(t, page, "")
	me.awaitUnread(1)
	other.awaitUnread(1)

	a := erase("/-/me", "Cookie: headcount_id="+me.id)
	if !strings.HasPrefix(a.header.Get("Set-Cookie"), "headcount_id=; Path=/; Max-Age=0") {
		t.Errorf("the cookie stays: %v", a.header)
	}

	me.awaitUnread(0)
	if got := s.get(t, "/-/me/follows", me.as()).body; strings.TrimSpace(got) != `{"follows":[]}` {
		t.Errorf("it is followed: %s", got)
	}

	if value("likes:1") != 1 || value("likes:2") != 1 {
		t.Error("the user is still a member")
	}
	isBanned(true)
	other.silent()
	erase("/-/me") // a user who was never here
	erase("/-/me", me.as())

	// A server erases what is stored about the other user.
	user := "/-/users/" + other.user
	do(t, "DELETE", s.url+user, "").problem(t, 401)
	a = do(t, "POST", s.url+"/api/v1/counters/likes:3/members", `{"add":["x",`+quoted(other.user)+`]}`, withKey)
	if a.status != 200 {
		t.Fatalf("adding members: %d %s", a.status, a.body)
	}

	erase(user, withKey)
	erase(user, withKey)
	erase("/-/users/"+me.user, withKey)
	isBanned(false)
	other.awaitUnread(0)
	if value("likes:1") != 0 || value("likes:2") != 0 || value("likes:3") != 1 {
		t.Error("the user is still a member")
	}
}
