package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// This is a server with a key for calls from servers.
const apiKey = "a key that is long enough"

const withKey = "X-API-Key: " + apiKey

func startWithKey(t testing.TB, flags ...string) *server {
	t.Helper()
	return start(t, append([]string{"--api-key=" + apiKey, "--update-interval=10ms", "--leave-grace=300ms"}, flags...)...)
}

// noContent says that the answer is a 204.
func (a answer) noContent(t testing.TB) {
	t.Helper()
	if a.status != http.StatusNoContent || a.body != "" {
		t.Fatalf("status %d, want 204: %s", a.status, a.body)
	}
}

// change says that a page was modified.
func (s *server) change(t testing.TB, page, body string, headers ...string) {
	t.Helper()
	do(t, "POST", s.url+"/"+url.PathEscape(page)+"/changes", body, append(headers, withKey)...).noContent(t)
}

// as is the header of c's user.
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
	if a.status != http.StatusOK || a.header.Get("Content-Type") != "application/json" || a.header.Get("Cache-Control") != "no-store" {
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

func TestUnread(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	tab := s.ws(t)
	other := s.again(t, tab)
	stranger := s.ws(t)
	page := fresh(t) + " a/b"
	if u := s.get(t, "/-/me/unread", tab.as()).unread(t); u.Count != 0 || u.UpdatedAt != nil {
		t.Errorf("there never was one: %+v", u)
	}
	s.change(t, page, "")
	s.follow(t, tab.as(), page)
	s.follow(t, tab.as(), page)
	tab.silent() // a follow begins with 0
	s.change(t, page, "")
	tab.awaitUnread(1)
	other.awaitUnread(1)
	if u := s.get(t, "/-/me/unread", tab.as()).unread(t); u.Count != 1 || u.UpdatedAt == nil {
		t.Errorf("after a change: %+v", u)
	}
	third := s.dial(t, dialer{query: "id=" + tab.id, unread: 1}) // also a new tab
	other.send(`{"type":"read"}`)
	for _, c := range []*client{tab, other, third} {
		c.awaitUnread(0)
		c.silent()
	}
	s.wantUnread(t, tab.as(), 0)
	s.change(t, page, "{}")
	tab.awaitUnread(1)
	if u := s.put(t, "/-/me/unread", `{"action":"reset"}`, tab.as()).unread(t); u.Count != 0 || u.UpdatedAt == nil {
		t.Errorf("after a reset: %+v", u)
	}
	other.awaitUnread(0)
	tab.awaitUnread(0)
	s.change(t, page, "")
	tab.awaitUnread(1)
	do(t, "DELETE", s.url+"/-/me/follows/"+url.PathEscape(page), "", tab.as()).noContent(t)
	do(t, "DELETE", s.url+"/-/me/follows/"+url.PathEscape(page), "", tab.as()).noContent(t)
	tab.awaitUnread(0)
	s.change(t, page, "")
	s.follow(t, tab.as(), page)
	tab.silent()
	s.wantUnread(t, tab.as(), 0)
	stranger.silent() // others hear nothing of this
}

func TestUnreadByServers(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--api-key=another one, just as long", "--jwt-secret="+jwtSecret)
	const user = "/-/users/alice%2F1%20%C3%BC"
	name := "alice/1 ü"
	c := s.dial(t, dialer{query: "token=" + hs256(t, jwt.MapClaims{"sub": name})})
	page := fresh(t)
	s.put(t, user+"/follows/"+url.PathEscape(page), `{"away_only":false}`, "X-API-Key: another one, just as long").noContent(t)
	s.change(t, page, "")
	c.awaitUnread(1)
	s.change(t, page, `{"by":`+quoted(name)+`}`) // a user's own change counts for nothing
	c.silent()
	s.change(t, page, `{"by":"bob"}`)
	c.awaitUnread(2)
	if u := s.get(t, user+"/unread", withKey).unread(t); u.Count != 2 {
		t.Errorf("%+v", u)
	}
	if got := s.get(t, user+"/follows", withKey).body; strings.TrimSpace(got) != `{"follows":[`+quoted(page)+`]}` {
		t.Errorf("follows: %s", got)
	}
	if u := s.put(t, user+"/unread", `{"action":"reset"}`, withKey).unread(t); u.Count != 0 {
		t.Errorf("%+v", u)
	}
	c.awaitUnread(0)
	do(t, "DELETE", s.url+user+"/follows/"+url.PathEscape(page), "", withKey).noContent(t)
	if got := s.get(t, user+"/follows", withKey).body; strings.TrimSpace(got) != `{"follows":[]}` {
		t.Errorf("follows: %s", got)
	}

	mine := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": name})
	for _, path := range []string{"/-/me/unread", "/-/me/follows"} {
		s.get(t, path).problem(t, 401)
		s.get(t, path, "Authorization: Bearer x").problem(t, 401)
		s.get(t, path, withKey).problem(t, 401) // a key alone names no user
		if got := s.get(t, path, mine).status; got != 200 {
			t.Errorf("%s: %d", path, got)
		}
	}
	s.put(t, "/-/me/follows/p", "").problem(t, 401)
	s.put(t, "/-/me/unread", `{"action":"reset"}`).problem(t, 401)
	do(t, "DELETE", s.url+"/-/me/follows/p", "").problem(t, 401)
	for _, bad := range []string{"X-API-Key: ", "X-API-Key: wrong", "X-API-Key: " + apiKey + " ", "X-API-Key: " + apiKey[:len(apiKey)-1], mine} {
		if strings.HasSuffix(bad, " ") && bad != "X-API-Key: " {
			continue // HTTP trims it
		}
		for _, call := range [][2]string{
			{"POST", "/p/changes"}, {"POST", "/-/changes"}, {"GET", user + "/unread"}, {"PUT", user + "/unread"}, {"GET", user + "/follows"},
			{"PUT", user + "/follows/p"}, {"DELETE", user + "/follows/p"},
		} {
			do(t, call[0], s.url+call[1], "", bad).problem(t, 401)
		}
	}
	if log := s.log.String(); strings.Contains(log, apiKey) || strings.Contains(log, "just as long") || strings.Contains(log, "alice") {
		t.Error("an API key or a user is in the log")
	}
}

func TestNoAPIKeyNoServers(t *testing.T) {
	t.Parallel()
	s := common(t)
	for _, key := range []string{"", "X-API-Key: ", "X-API-Key: x"} {
		headers := []string{key}
		if key == "" {
			headers = nil
		}
		do(t, "POST", s.url+"/p/changes", "", headers...).problem(t, 401)
		s.get(t, "/-/users/u/unread", headers...).problem(t, 401)
	}
}

func TestUnreadBadInput(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	me := s.ws(t).as()
	long := strings.Repeat("x", 129)
	for name, tc := range map[string]struct {
		method, path, body string
		headers            []string
		status             int
	}{
		"follow the site":             {"PUT", "/-/me/follows/*", "", nil, 400},
		"follow the site, escaped":    {"PUT", "/-/me/follows/%2A", "", nil, 400},
		"follow a reserved page":      {"PUT", "/-/me/follows/-", "", nil, 400},
		"follow a page too long":      {"PUT", "/-/me/follows/" + long, "", nil, 400},
		"follow a control character":  {"PUT", "/-/me/follows/a%07", "", nil, 400},
		"follow a mark of ours":       {"PUT", "/-/me/follows/%EE%80%80p", "", nil, 400},
		"unfollow the site":           {"DELETE", "/-/me/follows/*", "", nil, 400},
		"follow: no JSON":             {"PUT", "/-/me/follows/p", "yes", nil, 400},
		"follow: a list":              {"PUT", "/-/me/follows/p", "[]", nil, 400},
		"follow: null":                {"PUT", "/-/me/follows/p", "null", nil, 400},
		"follow: away_only a string":  {"PUT", "/-/me/follows/p", `{"away_only":"true"}`, nil, 400},
		"follow: away_only null":      {"PUT", "/-/me/follows/p", `{"away_only":null}`, nil, 400},
		"follow: away misspelt":       {"PUT", "/-/me/follows/p", `{"away":true}`, nil, 400},
		"follow: a large body":        {"PUT", "/-/me/follows/p", `{"x":"` + strings.Repeat("x", 4096) + `"}`, nil, 413},
		"follow by POST":              {"POST", "/-/me/follows/p", "", nil, 405},
		"nothing to follow":           {"PUT", "/-/me/follows/", "", nil, 404},
		"reset: no body":              {"PUT", "/-/me/unread", "", nil, 400},
		"reset: another action":       {"PUT", "/-/me/unread", `{"action":"increment"}`, nil, 400},
		"reset: no action":            {"PUT", "/-/me/unread", `{}`, nil, 400},
		"reset: more members":         {"PUT", "/-/me/unread", `{"action":"reset","page":"p"}`, nil, 400},
		"reset: a large body":         {"PUT", "/-/me/unread", `{"action":"reset","x":"` + strings.Repeat("x", 4096) + `"}`, nil, 413},
		"unread by DELETE":            {"DELETE", "/-/me/unread", "", nil, 405},
		"a list by PUT":               {"PUT", "/-/me/follows", "", nil, 405},
		"a query that is none":        {"GET", "/-/me/follows?after=%zz", "", nil, 400},
		"change the site":             {"POST", "/*/changes", "", []string{withKey}, 400},
		"change a reserved page":      {"POST", "/-/changes", "", []string{withKey}, 400},
		"change: by a number":         {"POST", "/p/changes", `{"by":1}`, []string{withKey}, 400},
		"change: by nobody":           {"POST", "/p/changes", `{"by":""}`, []string{withKey}, 400},
		"change: by null":             {"POST", "/p/changes", `{"by":null}`, []string{withKey}, 400},
		"change: by a long name":      {"POST", "/p/changes", `{"by":"` + strings.Repeat("x", 257) + `"}`, []string{withKey}, 400},
		"change: no JSON":             {"POST", "/p/changes", "x", []string{withKey}, 400},
		"change: more members":        {"POST", "/p/changes", `{"By":"bob"}`, []string{withKey}, 400},
		"change: a large body":        {"POST", "/p/changes", `{"x":"` + strings.Repeat("x", 4096) + `"}`, []string{withKey}, 413},
		"change: an empty key":        {"POST", "/p/changes", "", []string{withKey, "Idempotency-Key: "}, 400},
		"change: two keys":            {"POST", "/p/changes", "", []string{withKey, "Idempotency-Key: a", "Idempotency-Key: b"}, 400},
		"change: a long key":          {"POST", "/p/changes", "", []string{withKey, "Idempotency-Key: " + strings.Repeat("k", 256)}, 400},
		"change by GET":               {"GET", "/p/changes", "", nil, 405},
		"a user with a control":       {"GET", "/-/users/a%07/unread", "", []string{withKey}, 400},
		"a user that is too long":     {"GET", "/-/users/" + strings.Repeat("u", 257) + "/unread", "", []string{withKey}, 400},
		"follow from another origin":  {"PUT", "/-/me/follows/p", "", []string{"Origin: https://evil.example"}, 403},
		"end from another origin":     {"DELETE", "/-/me/follows/p", "", []string{"Origin: https://evil.example"}, 403},
		"change from another origin":  {"POST", "/p/changes", "", []string{withKey, "Origin: https://evil.example"}, 403},
		"reset from another origin":   {"PUT", "/-/me/unread", `{"action":"reset"}`, []string{"Origin: null"}, 403},
		"a preflight from another":    {"OPTIONS", "/-/me/follows/p", "", []string{"Origin: https://evil.example", "Access-Control-Request-Method: DELETE"}, 403},
		"nothing beside":              {"GET", "/-/me", "", nil, 405},
		"nothing beside, of somebody": {"GET", "/-/users/u", "", []string{withKey}, 405},
	} {
		t.Run(name, func(t *testing.T) {
			do(t, tc.method, s.url+tc.path, tc.body, append(tc.headers, me)...).problem(t, tc.status)
		})
	}
	if got := s.get(t, "/-/me/follows", me).body; strings.TrimSpace(got) != `{"follows":[]}` {
		t.Errorf("something of it is followed: %s", got)
	}
	do(t, "DELETE", s.url+"/-/me/follows/never%20followed", "", me).noContent(t)
}

func TestPreflightOfUnread(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--allow-origins=https://www.example.com")
	for path, method := range map[string]string{"/-/me/follows/p": "DELETE", "/-/me/unread": "PUT", "/p/changes": "POST"} {
		a := do(t, "OPTIONS", s.url+path, "", "Origin: https://www.example.com", "Access-Control-Request-Method: "+method, "Access-Control-Request-Headers: headcount-id,idempotency-key")
		h := a.header
		if a.status != 204 || !strings.Contains(h.Get("Access-Control-Allow-Methods"), method) || h.Get("Access-Control-Allow-Credentials") != "true" ||
			!strings.Contains(strings.ToLower(h.Get("Access-Control-Allow-Headers")), "idempotency-key") {
			t.Errorf("%s: %d %v", path, a.status, h)
		}
	}
}

// A client without an identity gets one by following, and no more of them than by PUT.
func TestFollowerGetsAnIdentity(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	a := s.put(t, "/-/me/follows/p", "")
	a.noContent(t)
	cookie, _, ok := strings.Cut(a.header.Get("Set-Cookie"), ";")
	if !ok || !strings.HasPrefix(cookie, "headcount_id=") {
		t.Fatalf("no cookie: %v", a.header)
	}
	if got := s.get(t, "/-/me/follows", "Cookie: "+cookie); strings.TrimSpace(got.body) != `{"follows":["p"]}` || got.header.Get("Set-Cookie") != "" {
		t.Errorf("%v %s", got.header, got.body)
	}
	if got := s.get(t, "/-/me/follows"); strings.TrimSpace(got.body) != `{"follows":[]}` || got.header.Get("Set-Cookie") != "" {
		t.Errorf("a new visitor: %v %s", got.header, got.body)
	}
	// Many at a time: a busy machine must not take longer over them than the limit allows.
	var limited atomic.Bool
	var hands sync.WaitGroup
	for range 16 {
		hands.Go(func() {
			for range 60 {
				if limited.Load() {
					return
				}
				a, err := try(http.MethodPut, s.url+"/-/me/follows/p", "")
				switch {
				case err != nil:
					t.Error(err)
					return
				case a.status == http.StatusTooManyRequests:
					a.problem(t, 429)
					limited.Store(true)
				}
			}
		})
	}
	hands.Wait()
	if !limited.Load() {
		t.Error("960 new identities at once")
	}
	s.put(t, "/-/me/follows/q", "", "Cookie: "+cookie).noContent(t)
}

func TestFollowsArePaged(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	me := s.ws(t)
	base := fresh(t)
	var want []string
	for i := range 1000 {
		want = append(want, fmt.Sprintf("%s/%d \"é\\", base, i))
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := w; i < len(want); i += 8 {
				if a, err := try("PUT", s.url+"/-/me/follows/"+url.PathEscape(want[i]), "", me.as()); err != nil || a.status != 204 {
					t.Errorf("%v %d %s", err, a.status, a.body)
				}
			}
		})
	}
	wg.Wait()
	s.put(t, "/-/me/follows/one%20more", "", me.as()).problem(t, 400)
	s.put(t, "/-/me/follows/"+url.PathEscape(want[7]), "", me.as()).noContent(t) // one that is there
	slices.Sort(want)
	var got []string
	pages := 0
	for after := ""; ; pages++ {
		a := s.get(t, "/-/me/follows?after="+url.QueryEscape(after), me.as())
		var list struct {
			Follows []string
			Next    *string
		}
		if err := json.Unmarshal([]byte(a.body), &list); err != nil || a.status != 200 {
			t.Fatalf("%v: %d %s", err, a.status, a.body)
		}
		got = append(got, list.Follows...)
		if list.Next == nil {
			break
		}
		if len(list.Follows) == 0 || after == *list.Next {
			t.Fatalf("next %q after %q", *list.Next, after)
		}
		after = *list.Next
	}
	if !slices.Equal(got, want) || pages < 2 {
		t.Errorf("%d pages of follows in %d answers, want %d", len(got), pages, len(want))
	}
	s.change(t, want[3], "")
	s.change(t, want[999], "")
	me.awaitUnread(2)
	if u := s.get(t, "/-/me/unread", me.as(), "Accept-Encoding: gzip"); gunzip(t, u.body) == "" || !strings.Contains(u.header.Get("Vary"), "Accept-Encoding") {
		t.Errorf("gzip: %v", u.header)
	}
}

// When many changes come at once, a client gets few frames, and the last one is right.
func TestUnreadIsConflated(t *testing.T) {
	t.Parallel()
	s := startWithKey(t, "--update-interval=200ms")
	c := s.ws(t)
	page := fresh(t)
	s.follow(t, c.as(), page)
	const n = 300
	var wg sync.WaitGroup
	begin := time.Now()
	for range 10 {
		wg.Go(func() {
			for range n / 10 {
				if a, err := try("POST", s.url+"/"+url.PathEscape(page)+"/changes", "", withKey); err != nil || a.status != 204 {
					t.Errorf("%v %d %s", err, a.status, a.body)
				}
			}
		})
	}
	frames, last := 0, 0
	c.await("the last", func(f frame) bool {
		if f.Type == "unread" {
			if *f.Count <= last {
				t.Errorf("unread went from %d to %d", last, *f.Count)
			}
			frames, last = frames+1, *f.Count
		}
		return last == n
	})
	wg.Wait()
	if most := int(time.Since(begin)/(200*time.Millisecond)) + 2; frames > most {
		t.Errorf("%d frames in %s, want at most %d", frames, time.Since(begin), most)
	}
}

// Two tabs that read while pages change end with the same number.
func TestReadsAndChangesRace(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	a := s.ws(t)
	b := s.again(t, a)
	pages := []string{fresh(t), fresh(t)}
	for _, p := range pages {
		s.follow(t, a.as(), p)
	}
	for range 10 {
		var wg sync.WaitGroup
		for _, p := range pages {
			wg.Go(func() {
				for range 20 {
					s.change(t, p, "")
				}
			})
		}
		for _, c := range []*client{a, b} {
			wg.Go(func() {
				for range 5 {
					c.send(`{"type":"read"}`)
					time.Sleep(rand.N(10 * time.Millisecond))
				}
			})
		}
		wg.Wait()
		final := -1
		eventually(t, "one number everywhere", func() bool {
			n := s.get(t, "/-/me/unread", a.as()).unread(t).Count
			final = n
			return a.lastUnread() == n && b.lastUnread() == n
		})
		for _, c := range []*client{a, b} { // and it stays
			c.skim()
			if n := c.lastUnread(); n != final || n < 0 || n > 40 {
				t.Fatalf("unread %d, want %d", n, final)
			}
		}
		a.send(`{"type":"read"}`)
		a.awaitUnread(0)
		eventually(t, "0 in both", func() bool { return a.lastUnread() == 0 && b.lastUnread() == 0 })
		s.wantUnread(t, a.as(), 0)
	}
}

// lastUnread is the newest unread count that has come.
func (c *client) lastUnread() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range slices.Backward(c.frames) {
		if f.Type == "unread" {
			if *f.Count < 0 {
				c.t.Errorf("%s", f.text)
			}
			return *f.Count
		}
	}
	return -1
}

// A change while the user is on the page does not count when the follow is for changes
// while away only.
func TestAwayOnly(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	bell := s.ws(t)
	page := fresh(t)
	s.put(t, "/-/me/follows/"+url.PathEscape(page), `{"away_only":true}`, bell.as()).noContent(t)
	s.change(t, page, "")
	bell.awaitUnread(1)
	reader := s.dial(t, dialer{query: "id=" + bell.id, unread: 1})
	reader.join(page)
	reader.awaitCount(page, 1)
	s.settled(t, page, bell, 1)
	s.change(t, page, "")
	s.change(t, page, `{"by":"somebody"}`)
	bell.silent()
	s.wantUnread(t, bell.as(), 1)
	second := s.dial(t, dialer{query: "id=" + bell.id, unread: 1})
	second.join(page)
	second.awaitCount(page, 1)
	reader.leave(page)
	reader.silent()
	s.change(t, page, "")
	s.wantUnread(t, bell.as(), 1)
	second.close()
	time.Sleep(time.Second) // the grace is over: the user is away
	s.change(t, page, "")
	bell.awaitUnread(2)
	bell.send(`{"type":"read"}`)
	bell.awaitUnread(0)
	reader.join(page)
	reader.awaitCount(page, 1)
	s.settled(t, page, bell, 0)
	s.put(t, "/-/me/follows/"+url.PathEscape(page), "", bell.as()).noContent(t) // and now every change
	s.change(t, page, "")
	bell.awaitUnread(1)
}

// What changed while the user was on the page stays seen when the process ends in good
// order. After a crash it counts, but at most what came in the last minute.
func TestAwayOnlyOverRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startWithKey(t, "--data-dir="+dir)
	c := s.ws(t)
	page := fresh(t)
	s.put(t, "/-/me/follows/"+url.PathEscape(page), `{"away_only":true}`, c.as()).noContent(t)
	for _, end := range []struct {
		signal syscall.Signal
		unread int
	}{{syscall.SIGTERM, 0}, {syscall.SIGKILL, 2}} {
		c.join(page)
		c.awaitCount(page, 1)
		s.settled(t, page, c, 0)
		s.change(t, page, "")
		s.change(t, page, "")
		s.wantUnread(t, c.as(), 0)
		if end.signal == syscall.SIGTERM {
			if problem := s.end(); problem != "" {
				t.Fatal(problem)
			}
		} else {
			s.signal(end.signal)
			s.killed(t)
		}
		s = startWithKey(t, "--data-dir="+dir)
		c = s.dial(t, dialer{query: "id=" + c.id, unread: end.unread})
	}
}

// settled waits until a join counts for a follow of the kind away-only. That takes some
// milliseconds longer than the page's count, so it uses a page of its own.
func (s *server) settled(t testing.TB, page string, c *client, n int) {
	t.Helper()
	time.Sleep(300 * time.Millisecond)
	s.wantUnread(t, c.as(), n)
}

func TestUnreadSurvivesARestart(t *testing.T) {
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
		second.signal(syscall.SIGKILL)
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
		t.Errorf("%s was %s", after, before)
	}
	for i := range 5 {
		s.change(t, page, "", fmt.Sprint("Idempotency-Key: ", i)) // known already
	}
	again.silent()
	s.change(t, page, "")
	again.awaitUnread(6)
	s.change(t, other, "")
	again.awaitUnread(7)
}

// killed waits for the end of a server that was killed, which is no fault of its own.
func (s *server) killed(t testing.TB) {
	t.Helper()
	select {
	case <-s.gone:
	case <-time.After(patience):
		t.Fatal("it is not dead")
	}
	s.ended.Do(func() { s.what = s.log.Complaint() })
}

// A process is killed in the middle of 10,000 changes. Each change that was acknowledged
// counts once, and the others are sent again.
func TestKilledWhileChanging(t *testing.T) {
	t.Parallel()
	const changes, workers = 10_000, 32
	dir := t.TempDir()
	s := startWithKey(t, "--data-dir="+dir)
	c := s.ws(t)
	page := fresh(t)
	s.follow(t, c.as(), page)
	c.close()

	var acked [changes]atomic.Bool
	send := func(s *server, i int) bool {
		a, err := try("POST", s.url+"/"+url.PathEscape(page)+"/changes", "", withKey, "Idempotency-Key: change "+strconv.Itoa(i))
		if err == nil && a.status != http.StatusNoContent {
			t.Errorf("change %d: %d %s", i, a.status, a.body)
		}
		return err == nil && a.status == http.StatusNoContent
	}
	run := func(s *server, begun *atomic.Int64) {
		var wg sync.WaitGroup
		var next atomic.Int64
		for range workers {
			wg.Go(func() {
				for i := int(next.Add(1)) - 1; i < changes; i = int(next.Add(1)) - 1 {
					if acked[i].Load() {
						continue
					}
					if begun.Add(1) == changes/2 {
						s.signal(syscall.SIGKILL)
					}
					if send(s, i) {
						acked[i].Store(true)
					} else if begun.Load() >= changes/2 {
						return // it is gone
					}
				}
			})
		}
		wg.Wait()
	}
	var begun atomic.Int64
	run(s, &begun)
	s.killed(t)
	known := 0
	for i := range acked {
		if acked[i].Load() {
			known++
		}
	}
	if known < changes/4 || known >= changes {
		t.Fatalf("%d of %d changes were acknowledged before the end", known, changes)
	}

	s = startWithKey(t, "--data-dir="+dir)
	if n := s.get(t, "/-/me/unread", c.as()).unread(t).Count; n < known || n > known+workers {
		t.Errorf("%d changes after the end, %d had been acknowledged and at most %d more were under way", n, known, workers)
	}
	begun.Store(-1 << 40) // nothing is killed from here on
	run(s, &begun)
	s.wantUnread(t, c.as(), changes)
	for i := range 50 {
		if !send(s, i*changes/50) {
			t.Error("a change that is known already was refused")
		}
	}
	s.wantUnread(t, c.as(), changes)
}
