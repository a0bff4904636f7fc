package gateway

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"headcount/gateway/identity"
	"headcount/internal/testkit"
)

// noContent checks that the answer is a 204.
func (g got) noContent(t *testing.T) {
	t.Helper()
	if g.status != http.StatusNoContent || g.text != "" {
		t.Errorf("%d %s, want a 204", g.status, g.text)
	}
}

// is checks the text of an answer with status 200.
func (g got) is(t *testing.T, want string) {
	t.Helper()
	if text := strings.TrimSpace(g.text); g.status != http.StatusOK || text != want {
		t.Errorf("%d %s, want %s", g.status, text, want)
	}
}

const serverKey = "X-API-Key: k"

// Only servers may ask whether a user is here, and only about users whom they name.
func TestIsThisUserHere(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		for _, path := range []string{
			"/-/users", "/-/users?user=", "/-/users?user=%07", "/-/users/events", "/-/users/a%07",
		} {
			s.do("GET", path, "", serverKey).problem(t, path, 400)
		}

		for _, path := range []string{"/-/users?user=a", "/-/users/a", "/-/users/events?user=a"} {
			s.do("GET", path, "").problem(t, path, 401)
			s.do("GET", path, "", "X-API-Key: wrong").problem(t, path, 401)
		}

		query := make(url.Values)
		for i := range 101 {
			query.Add("user", fmt.Sprint("u", i))
		}

		s.do("GET", "/-/users?"+query.Encode(), "", serverKey).problem(t, "101 users", 400)

		begins := func(path, want string) {
			t.Helper()
			if g := s.do("GET", path, "", serverKey); g.status != http.StatusOK || !strings.HasPrefix(g.text, want) {
				t.Errorf("%d %s, want %s", g.status, g.text, want)
			}
		}

		s.do("PUT", "/-/users/a%2Fb/pages/p", "", serverKey)
		begins("/-/users/a%2Fb", `{"user":"a/b","online":true,"since":"`)
		begins("/-/users?user=c&user=a/b&user=c",
			`{"users":[{"user":"c","online":false},{"user":"a/b","online":true,`)
		s.do("DELETE", "/-/users/a%2Fb/pages/p", "", serverKey)
		begins("/-/users/a%2Fb", `{"user":"a/b","online":false`)
	})
}

// One answer has several counts, each once, in the order in which they were asked for.
func TestSeveralCounts(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		a, b := s.tab(), s.tab()
		for _, p := range []string{"one", "two"} {
			a.join(p)
			a.awaitCount(p, 1)
		}

		b.join("two")
		b.awaitCount("two", 2)
		testkit.Eventually(t, "two on the site", func() bool { return s.count("*") == 2 })

		// The single answers are the pattern: a client that asks for many pages at once gets the same text for each.
		want := ""
		for _, p := range []string{"two", "none", "*", "one"} {
			want += "," + strings.TrimSpace(s.do("GET", "/"+p+"/counter", "").text)
		}

		s.do("GET", "/-/counters?page=two&page=none&page=*&page=two&page=one&page=none", "").
			is(t, `{"counters":[`+want[1:]+`]}`)

		query := func(n int) string {
			q := "/-/counters?page=*"
			for i := range n - 1 {
				q += fmt.Sprintf("&page=p%d", i)
			}

			return q
		}

		g := s.do("GET", query(100)+"&page=*&page=p5&page=p98", "")
		if g.status != http.StatusOK || strings.Count(g.text, `"page"`) != 100 || g.Get("Cache-Control") != "no-store" {
			t.Errorf("a hundred different pages: %d %v %s, want 100 counts that are not cached",
				g.status, g.Header, g.text)
		}

		for _, path := range []string{query(101), "/-/counters", "/-/counters?page=one&page=a%0Ab"} {
			s.do("GET", path, "").problem(t, path, http.StatusBadRequest)
		}

		if head := s.do("HEAD", query(3), ""); head.status != http.StatusOK || head.text != "" {
			t.Errorf("HEAD: %d %q, want 200 without a body", head.status, head.text)
		}
	})
}

// A client without an identity gets one with its first follow.
func TestAFollowerGetsAnIdentity(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		g := s.do("PUT", "/-/me/follows/p", "")
		g.noContent(t)

		cookie, _, ok := strings.Cut(g.Get("Set-Cookie"), ";")
		if !ok || !strings.HasPrefix(cookie, "headcount_id=") {
			t.Fatalf("the follow sets no cookie: %v", g.Header)
		}

		for line, want := range map[string]string{
			"Cookie: " + cookie: `{"follows":["p"]}`,
			"":                  `{"follows":[]}`, // a new visitor
		} {
			g := s.do("GET", "/-/me/follows", "", line)
			g.is(t, want)
			if g.Get("Set-Cookie") != "" {
				t.Errorf("a GET sets a cookie: %v", g.Header)
			}
		}

		s.do("PUT", "/-/me/follows/q", "", "Cookie: "+cookie).noContent(t)
	})
}

// A browser may refuse the cookie of a server that serves pages of another site. Such a page finds its id in a header
// of each answer, and a follow is stored only if the page sends the id.
func TestFollowFromAnotherSite(t *testing.T) {
	origins, err := identity.NewOrigins([]string{"https://shop.example"})
	if err != nil {
		t.Fatal(err)
	}

	inMemory(t, func(cfg *Config) { cfg.API.Origins = origins }, func(t *testing.T, s *served) {
		const path = "/-/me/follows/p"
		shop := []string{"Origin: https://shop.example", "Sec-Fetch-Site: cross-site"}
		issued := func(g got) string {
			t.Helper()
			id := g.Get("Headcount-Id")
			if id == "" || !strings.Contains(g.Get("Access-Control-Expose-Headers"), "Headcount-Id") {
				t.Fatalf("the page cannot read an id: %d %v", g.status, g.Header)
			}

			return "Headcount-Id: " + id
		}

		// A follow without the id is refused. The refusal has an id to use and no cookie.
		refused := s.do("PUT", path, "", shop...)
		refused.problem(t, "a follow without an id", http.StatusBadRequest)
		looked := s.do("GET", "/-/me/follows", "", shop...)
		if !strings.Contains(refused.text, "Headcount-Id") || refused.Get("Set-Cookie")+looked.Get("Set-Cookie") != "" {
			t.Errorf("want a refusal about Headcount-Id, and no cookies: %v %s, %v",
				refused.Header, refused.text, looked.Header)
		}

		for what, id := range map[string]string{
			"the id of the refusal":     issued(refused),
			"the id of a GET":           issued(looked),
			"a new one for a broken id": issued(s.do("PUT", path, "", append(shop, "Headcount-Id: broken")...)),
			"one that is a cookie, too": issued(s.do("PUT", path, "", shop[0])),
		} {
			me := append(shop, id)
			again := s.do("PUT", path, "", me...)
			again.noContent(t)
			if id := again.Get("Headcount-Id"); id != "" {
				t.Errorf("%s: another id is issued: %s", what, id)
			}

			s.do("GET", "/-/me/follows", "", me...).is(t, `{"follows":["p"]}`)
		}
	})
}

// A user follows at most 1,000 pages, and gets the list in parts.
func TestFollowsArePaged(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		me := "Headcount-Id: " + s.tab().id
		var want []string
		for i := range 1000 {
			page := fmt.Sprintf("%d \"é\\", i)
			want = append(want, page)
			s.do("PUT", "/-/me/follows/"+url.PathEscape(page), "", me).noContent(t)
		}

		s.do("PUT", "/-/me/follows/one%20more", "", me).problem(t, "one more", http.StatusBadRequest)
		s.do("PUT", "/-/me/follows/"+url.PathEscape(want[7]), "", me).noContent(t) // followed already

		slices.Sort(want)
		var all []string
		for after := ""; ; {
			g := s.do("GET", "/-/me/follows?after="+url.QueryEscape(after), "", me)
			var list struct {
				Follows []string
				Next    *string
			}
			if err := json.Unmarshal([]byte(g.text), &list); err != nil || len(list.Follows) == 0 {
				t.Fatalf("%v: %d %s", err, g.status, g.text)
			}

			all = append(all, list.Follows...)
			if list.Next == nil {
				break
			}
			after = *list.Next
		}

		if !slices.Equal(all, want) {
			t.Errorf("%d follows, want these %d in order", len(all), len(want))
		}

		// One page of the first part and one of the last: a change has to reach a follower wherever the page is in the
		// list.
		for _, page := range []string{want[3], want[999]} {
			s.do("POST", "/"+url.PathEscape(page)+"/changes", "", serverKey).noContent(t)
		}

		testkit.Eventually(t, "two unread changes", func() bool {
			return strings.Contains(s.do("GET", "/-/me/unread", "", me).text, `{"count":2,`)
		})
	})
}

// A user sees which pages have changed, with titles and links, and reads them one by one.
func TestNotifications(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		c := s.tab()
		me, user := "Headcount-Id: "+c.id, "/-/users/"+url.PathEscape(c.user)
		list := func(want string) {
			t.Helper()
			lists := map[string]string{"/-/me/notifications": me, user + "/notifications": serverKey}
			for path, line := range lists {
				said := ""
				defer func() {
					if t.Failed() {
						t.Logf("%s: %s, want %s", path, said, want)
					}
				}()

				testkit.Eventually(t, path+" has "+want, func() bool {
					said = listed(t, s.do("GET", path, "", line).text)
					return said == want
				})
			}
		}

		for _, page := range []string{"a%2Fb", "c"} {
			s.do("PUT", "/-/me/follows/"+page, "", me).noContent(t)
		}

		list("0")
		for _, change := range [][2]string{
			{"a%2Fb", `{"title":"\"New\" <b>","url":"https://a.example/?x=1"}`}, {"a%2Fb", `{"by":"bob"}`},
			{"c", `{"url":"/c#d"}`},
		} {
			s.do("POST", "/"+change[0]+"/changes", change[1], serverKey).noContent(t)
		}

		list(`3; a/b 2 "\"New\" <b>" "https://a.example/?x=1"; c 1 "" "/c#d"`)

		s.do("DELETE", "/-/me/notifications/a%2Fb", "", me).noContent(t)
		list(`1; c 1 "" "/c#d"`)
		// The second call finds nothing to delete, and succeeds all the same, as a repeated one must.
		for range 2 {
			s.do("DELETE", user+"/notifications/c", "", serverKey).noContent(t)
		}

		list("0")

		// Invalid titles, and links that could mislead a reader.
		for _, bad := range []string{
			`{"title":""}`, `{"title":1}`, `{"title":null}`, `{"title":"a\nb"}`,
			`{"title":"` + strings.Repeat("x", 301) + `"}`,
			`{"url":"javascript:alert(1)"}`, `{"url":"//evil.example/"}`, `{"url":"/\\evil.example"}`,
			`{"url":"page"}`, `{"url":"https:/a"}`,
		} {
			s.do("POST", "/c/changes", bad, serverKey).problem(t, bad, http.StatusBadRequest)
		}

		s.do("GET", "/-/users/alice/notifications", "").problem(t, "a visitor", http.StatusUnauthorized)
	})
}

// listed returns an answer about notifications in one line.
func listed(t *testing.T, text string) string {
	t.Helper()
	var is struct {
		Count         int
		Notifications []struct {
			Page, Title, URL string
			Count            int
		}
	}
	if err := json.Unmarshal([]byte(text), &is); err != nil {
		t.Fatalf("%v in %s", err, text)
	}

	lines := []string{fmt.Sprint(is.Count)}
	for _, n := range is.Notifications {
		lines = append(lines, fmt.Sprintf("%s %d %q %q", n.Page, n.Count, n.Title, n.URL))
	}
	slices.Sort(lines[1:]) // changes within the same second have no order

	return strings.Join(lines, "; ")
}
