package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// These servers have a key for calls from servers.
const apiKey = "a key that is long enough"

const withKey = "X-API-Key: " + apiKey

func startWithKey(t testing.TB, flags ...string) *server {
	t.Helper()
	return start(t, append([]string{
		"--api-key=" + apiKey, "--update-interval=10ms", "--leave-grace=300ms",
	}, flags...)...)
}

// noContent requires that the answer is a 204.
func (a answer) noContent(t testing.TB) {
	t.Helper()
	if a.status != http.StatusNoContent || a.body != "" {
		t.Fatalf("status %d, want 204: %s", a.status, a.body)
	}
}

// change reports that a page was modified.
func (s *server) change(t testing.TB, page, body string, headers ...string) {
	t.Helper()
	do(t, "POST", s.url+"/"+url.PathEscape(page)+"/changes", body, append(headers, withKey)...).noContent(t)
}

// as returns the header of c's user.
func (c *client) as() string { return "Headcount-Id: " + c.id }

func (s *server) follow(t testing.TB, who, page string) {
	t.Helper()
	s.put(t, "/-/me/follows/"+url.PathEscape(page), "", who).noContent(t)
}

type unreadCount struct {
	Count     int     `json:"count"`
	UpdatedAt *string `json:"updated_at"`
}

// unread decodes a 200 with exactly the members of an unread count.
func (a answer) unread(t testing.TB) unreadCount {
	t.Helper()
	if a.status != http.StatusOK || a.header.Get("Content-Type") != "application/json" ||
		a.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("status %d, %v, want an unread count: %s", a.status, a.header, a.body)
	}

	var u unreadCount
	dec := json.NewDecoder(strings.NewReader(a.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&u); err != nil || !strings.Contains(a.body, `"updated_at"`) || u.Count < 0 {
		t.Fatalf("%v in %s", err, a.body)
	}

	if u.UpdatedAt != nil {
		at, err := time.Parse("2006-01-02T15:04:05Z", *u.UpdatedAt)
		if d := time.Since(at); err != nil || d < -5*time.Second || d > time.Hour {
			t.Errorf("updated_at %q: %v", *u.UpdatedAt, err)
		}
	}

	return u
}

func (s *server) wantUnread(t testing.TB, who string, n int) {
	t.Helper()
	if u := s.get(t, "/-/me/unread", who).unread(t); u.Count != n {
		t.Fatalf("unread %d, want %d", u.Count, n)
	}
}

// awaitUnread skips frames until the unread count is n.
func (c *client) awaitUnread(n int) frame {
	c.t.Helper()
	return c.await(fmt.Sprintf("unread %d", n), func(f frame) bool { return f.Type == "unread" && *f.Count == n })
}

func TestServerUnread(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	unreadOfAllPages(t, s)
	unreadOfOnePage(t, s)
}

func unreadOfAllPages(t *testing.T, s *server) {
	tab := s.ws(t)
	other, stranger := s.again(t, tab), s.ws(t)
	page := fresh(t) + " a/b"

	if u := s.get(t, "/-/me/unread", tab.as()).unread(t); u.Count != 0 || u.UpdatedAt != nil {
		t.Errorf("unread before any change: %+v, want 0 and no time", u)
	}

	s.change(t, page, "")
	s.follow(t, tab.as(), page)
	s.follow(t, tab.as(), page)
	tab.silent() // a follow begins at 0

	s.change(t, page, "{}")
	if u := s.get(t, "/-/me/unread", tab.as()).unread(t); u.Count != 1 || u.UpdatedAt == nil {
		t.Errorf("unread after a change: %+v, want 1 and its time", u)
	}

	tab.awaitUnread(1)
	third := s.dial(t, dialer{query: "id=" + tab.id, unread: 1}) // a new tab begins with the current count
	if u := s.put(t, "/-/me/unread", `{"action":"reset"}`, tab.as()).unread(t); u.Count != 0 || u.UpdatedAt == nil {
		t.Errorf("unread after a reset: %+v, want 0 and the time of the change", u)
	}

	for _, c := range []*client{tab, other, third} {
		c.awaitUnread(0)
		c.silent()
	}

	s.change(t, page, "")
	tab.awaitUnread(1)

	// The end of a follow takes its unread changes along, and a second end does nothing.
	for range 2 {
		do(t, "DELETE", s.url+"/-/me/follows/"+url.PathEscape(page), "", tab.as()).noContent(t)
	}

	tab.awaitUnread(0)

	s.change(t, page, "")
	s.follow(t, tab.as(), page)
	tab.silent()
	s.wantUnread(t, tab.as(), 0)

	stranger.silent() // other users receive nothing
}

func unreadOfOnePage(t *testing.T, s *server) {
	tab := s.ws(t)
	page := fresh(t)
	one, other := page+" a/b", page+" c" // as the list is sorted
	for _, page := range []string{one, other} {
		s.follow(t, tab.as(), page)
		s.change(t, page, "")
		s.change(t, page, "")
	}

	tab.awaitUnread(4)

	follows := func(want string) {
		t.Helper()
		if got := s.get(t, "/-/me/follows", tab.as()).body; strings.TrimSpace(got) != want {
			t.Errorf("%s, want %s", got, want)
		}
	}

	both := `{"follows":[` + quoted(one) + `,` + quoted(other) + `]`
	follows(both + `,"unread":{` + quoted(one) + `:2,` + quoted(other) + `:2}}`)

	tab.send(`{"type":"read","page":"not followed"}`)
	tab.awaitUnread(4)
	tab.send(`{"type":"read","page":` + quoted(one) + `}`)
	tab.awaitUnread(2)
	follows(both + `,"unread":{` + quoted(other) + `:2}}`)

	// Impossible pages in a read frame are errors.
	for _, bad := range []string{`"*"`, `""`, `null`, `7`} {
		tab.send(`{"type":"read","page":` + bad + `}`)
		tab.await("an error", func(f frame) bool { return f.Type == "error" })
	}

	if u := s.put(t, "/-/me/unread", `{"action":"reset","page":"not followed"}`, tab.as()).unread(t); u.Count != 2 {
		t.Errorf("after a reset of a page that is not followed: %+v, want 2", u)
	}
	if u := s.put(t, "/-/me/unread", `{"action":"reset","page":`+quoted(other)+`}`, tab.as()).unread(t); u.Count != 0 {
		t.Errorf("after a reset of the page with both changes: %+v, want 0", u)
	}
	tab.awaitUnread(0)
	follows(both + `}`)
}

func TestServerUnreadByServers(t *testing.T) {
	t.Parallel()
	const second = "X-API-Key: another one, just as long"
	s := startWithKey(t, "--api-key=another one, just as long", "--jwt-secret="+jwtSecret)
	const user, name = "/-/users/alice%2F1%20%C3%BC", "alice/1 ü"
	mine := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": name})
	c := s.dial(t, dialer{headers: []string{mine}})

	page := fresh(t)
	follows := func(want string) {
		t.Helper()
		for path, header := range map[string]string{user: withKey, "/-/me": mine} {
			if got := s.get(t, path+"/follows", header).body; strings.TrimSpace(got) != `{"follows":[`+want+`]}` {
				t.Errorf("%s follows: %s, want %s", path, got, want)
			}
		}
	}

	s.put(t, user+"/follows/"+url.PathEscape(page), "", second).noContent(t)
	follows(quoted(page))
	s.change(t, page, `{"by":`+quoted(name)+`}`) // a user's own change does not count

	c.silent()
	s.change(t, page, `{"by":"bob"}`)
	c.awaitUnread(1)

	if u := s.get(t, user+"/unread", withKey).unread(t); u.Count != 1 {
		t.Errorf("unread after the change of another: %+v, want 1", u)
	}
	if u := s.put(t, user+"/unread", `{"action":"reset"}`, withKey).unread(t); u.Count != 0 {
		t.Errorf("unread after a reset: %+v, want 0", u)
	}
	c.awaitUnread(0)

	do(t, "DELETE", s.url+user+"/follows/"+url.PathEscape(page), "", withKey).noContent(t)
	follows("")

	for call, bad := range map[string][]string{ // a key alone names no user, and a user has no key
		"GET /-/me/unread, GET /-/me/follows, PUT /-/me/follows/p, PUT /-/me/unread, DELETE /-/me/follows/p": {
			"X-API-Key: " + apiKey, "Authorization: Bearer x",
		},
		"POST /p/changes, POST /-/changes, GET " + user + "/unread, PUT " + user + "/unread, GET " + user +
			"/follows, PUT " + user + "/follows/p, DELETE " + user + "/follows/p": {
			"X-API-Key: ", "X-API-Key: " + apiKey[:len(apiKey)-1], mine,
		},
	} {
		for call := range strings.SplitSeq(call, ", ") {
			method, path, _ := strings.Cut(call, " ")
			for _, header := range bad {
				do(t, method, s.url+path, "", header).problem(t, 401)
			}
		}
	}

	if log := s.log.String(); strings.Contains(log, apiKey) || strings.Contains(log, "just as long") ||
		strings.Contains(log, "alice") {
		t.Error("an API key or a user is in the log")
	}
}

func TestServerUnreadSurvivesARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir() + "/new/data"
	s := startWithKey(t, "--data-dir="+dir)
	c := s.ws(t)
	page, other := fresh(t), fresh(t)
	s.follow(t, c.as(), page)
	s.follow(t, c.as(), other)

	for i := range 5 {
		s.change(t, page, "", fmt.Sprint("Idempotency-Key: ", i))
	}
	s.change(t, other, `{"by":`+quoted(c.user)+`}`)
	before := s.get(t, "/-/me/unread", c.as()).body

	second, err := spawn("--data-dir=" + dir)
	if err == nil {
		second.Signal(syscall.SIGKILL)
		t.Fatal("two processes with one data directory")
	}
	if !strings.Contains(err.Error(), "in use by another process") || strings.Contains(err.Error(), "goroutine") {
		t.Errorf("the second process says %v", err)
	}

	c.close()
	if problem := s.end(); problem != "" {
		t.Fatal(problem)
	}

	s = startWithKey(t, "--data-dir="+dir)
	again := s.dial(t, dialer{query: "id=" + c.id, unread: 5})
	if again.user != c.user {
		t.Errorf("user %q came back as %q: the secret of ids is lost", c.user, again.user)
	}

	if after := s.get(t, "/-/me/unread", c.as()).body; after != before {
		t.Errorf("unread after the restart: %s, want %s as before", after, before)
	}

	// The keys of before the restart are still known.
	for i := range 5 {
		s.change(t, page, "", fmt.Sprint("Idempotency-Key: ", i)) // a known key
	}
	again.silent()

	s.change(t, page, "")
	again.awaitUnread(6)
	s.change(t, other, "")
	again.awaitUnread(7)
}
