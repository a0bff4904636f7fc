package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

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
		t.Fatalf("%d %s, %v", a.status, a.body, err)
	}

	for i, u := range is.Users {
		consistent := u.Online != u.Since.IsZero() && u.Online == (u.Pages > 0) && (!u.Online || u.LastSeen.IsZero())
		if u.User != names[i] || !consistent {
			t.Errorf("%+v, asked for %s", u, names[i])
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
		t.Errorf("%+v", is)
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

// Only servers learn who is here, and only about users whom they name.
func TestServerIsThisUserHere(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	for path, status := range map[string]int{
		"/-/users": 400, "/-/users?user=": 400, "/-/users?user=%07": 400, "/-/users/events": 400, "/-/users/a%07": 400,
	} {
		s.get(t, path, withKey).problem(t, status)
	}

	for _, path := range []string{"/-/users?user=a", "/-/users/a", "/-/users/events?user=a"} {
		s.get(t, path).problem(t, 401)
		s.get(t, path, "X-API-Key: wrong").problem(t, 401)
	}

	query := make(url.Values)
	for i := range 101 {
		query.Add("user", fmt.Sprint("u", i))
	}
	s.get(t, "/-/users?"+query.Encode(), withKey).problem(t, 400)

	do(t, "PUT", s.url+"/-/users/a%2Fb/pages/p", "", withKey).counter(t)
	a := s.get(t, "/-/users/a%2Fb", withKey)
	if !strings.HasPrefix(a.body, `{"user":"a/b","online":true,"since":"`) ||
		!strings.HasSuffix(a.body, `,"pages":1}`+"\n") {
		t.Errorf("%d %s", a.status, a.body)
	}

	do(t, "DELETE", s.url+"/-/users/a%2Fb/pages/p", "", withKey).counter(t)
	if a := s.get(t, "/-/users/a%2Fb", withKey); a.body != `{"user":"a/b","online":false}`+"\n" { // --last-seen is 0
		t.Errorf("%d %s", a.status, a.body)
	}

	do(t, "PUT", s.url+"/-/users/a%2Fb/pages/p", "", withKey).counter(t)
	a = s.get(t, "/-/users?user=c&user=a/b&user=c", withKey)
	if !strings.HasPrefix(a.body, `{"users":[{"user":"c","online":false},{"user":"a/b","online":true,`) {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A server says who is on a page, as often as it likes. Users who are here by a server's word and by a connection count
// once, and a user whom the server takes away is gone.
func TestClockServersSayWhoIsHere(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--jwt-secret="+jwtSecret, "--presence-timeout=2s", "--heartbeat-interval=500ms")
	page := func(user, page string) string { return s.url + "/-/users/" + user + "/pages/" + page }

	if c := do(t, "PUT", page("alice", "p"), "", withKey).counter(t); c.Count != 1 || c.Page != "p" {
		t.Errorf("alice is here: %+v", c)
	}
	if c := do(t, "PUT", page("alice", "p"), "{}", withKey).counter(t); c.Count != 1 {
		t.Errorf("alice is still here: %+v", c)
	}

	// A hold and a connection of one user.
	alice := s.dial(t, dialer{query: "token=" + hs256(t, jwt.MapClaims{"sub": "alice"})})
	alice.join("p")
	alice.takeCount("p", 1)
	if c := do(t, "PUT", page("al%2Fice", "p"), "", withKey).counter(t); c.Count != 2 {
		t.Errorf("another one: %+v", c)
	}
	for range 2 { // the second DELETE is about a user who is not here
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

	const many = 150 // more than one address may hold by PUT at once
	var wg sync.WaitGroup
	for part := range 10 {
		wg.Go(func() {
			for i := part; i < many; i += 10 {
				a, err := try("PUT", page(fmt.Sprint("user-", i), "full"), "", withKey)
				if err != nil || a.status != 200 {
					t.Errorf("user %d: %d %s, %v", i, a.status, a.body, err)
				}
			}
		})
	}
	wg.Wait()

	// The holds last 6 s, so a slow machine may have lost the first ones by now.
	if got := s.count(t, "full"); got > many {
		t.Errorf("%d are here", got)
	}
	testkit.Eventually(t, "users without a hold are gone",
		func() bool { return s.count(t, "full") == 0 && s.count(t, "p") == 0 })

	if log := s.log.String(); strings.Contains(log, "alice") {
		t.Error("a user is in the log")
	}
}

// A user, and a server for a user, can erase what is stored about the user: follows, unread counts, and memberships.
// Other users keep theirs.
func TestServerErasure(t *testing.T) {
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
	other.silent()
	erase("/-/me") // a user who was never here
	erase("/-/me", me.as())

	// A server erases what is stored about the other user.
	user := "/-/users/" + other.user
	do(t, "DELETE", s.url+user, "").problem(t, 401)
	a = do(t, "POST", s.url+"/api/v1/counters/likes:3/members", `{"add":["x",`+quoted(other.user)+`]}`, withKey)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}

	erase(user, withKey)
	erase(user, withKey)
	other.awaitUnread(0)
	if value("likes:1") != 0 || value("likes:2") != 0 || value("likes:3") != 1 {
		t.Error("the user is still a member")
	}
}

// A user who erases leaves only the sets that members may leave by their rule.
func TestServerErasureStaysWithinTheRules(t *testing.T) {
	t.Parallel()
	rules := t.TempDir() + "/rules.json"
	const text = `{"rules":[{"match":"fans:*","kind":"members","public":["read","member"]},` +
		`{"match":"banned:*","kind":"members","public":["read"]}]}`
	if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
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
		a := s.get(t, "/api/v1/counters/"+key+"/members/"+me.user, withKey)
		if !strings.Contains(a.body, fmt.Sprintf(`"member":%t`, want)) {
			t.Errorf("%s: %s", key, a.body)
		}
	}

	do(t, "DELETE", s.url+"/-/me", "", me.as()).noContent(t)
	in("fans:1", false)
	in("banned:1", true)

	do(t, "DELETE", s.url+"/-/users/"+me.user, "", withKey).noContent(t)
	in("banned:1", false)
}

// A user sees which pages changed, with titles and links, and reads them one by one.
func TestServerNotifications(t *testing.T) {
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
		for _, a := range []answer{
			s.get(t, "/-/me/notifications", c.as()), s.get(t, "/-/users/"+c.user+"/notifications", withKey),
		} {
			if err := json.Unmarshal([]byte(a.body), &got); err != nil || a.status != 200 {
				t.Fatalf("%d %s, %v", a.status, a.body, err)
			}

			lines := []string{fmt.Sprint(got.Count)}
			for _, n := range got.Notifications {
				lines = append(lines, fmt.Sprintf("%s %d %q %q", n.Page, n.Count, n.Title, n.URL))
			}
			slices.Sort(lines[1:]) // changes within one second have no order
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

	// Invalid titles, and links that could lead a reader astray.
	for _, bad := range []string{
		`{"title":""}`, `{"title":1}`, `{"title":null}`, `{"title":"a\nb"}`,
		`{"title":"` + strings.Repeat("x", 301) + `"}`,
		`{"url":"javascript:alert(1)"}`, `{"url":"//evil.example/"}`, `{"url":"/\\evil.example"}`, `{"url":"page"}`,
		`{"url":"https:/a"}`,
	} {
		do(t, "POST", s.url+"/c/changes", bad, withKey).problem(t, 400)
	}

	s.get(t, "/-/users/alice/notifications").problem(t, 401)
	do(t, "DELETE", s.url+"/-/me/notifications/*", "", c.as()).problem(t, 400)
}
