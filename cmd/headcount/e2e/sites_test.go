package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// The two sites of these tests. Calls that name no site are for the first one.
const (
	shopKey = "the key of the shop alone"
	blogKey = "the key of the blog alone"

	ofShop, ofBlog = "Headcount-Site: shop", "Headcount-Site: blog"
	inShop, inBlog = "Origin: https://www.shop.example", "Origin: https://blog.example"
	asShop, asBlog = "X-API-Key: " + shopKey, "X-API-Key: " + blogKey
)

var twoSites = []string{
	"--site=shop=https://shop.example,https://*.shop.example,http://own.example", "--site=blog=https://blog.example",
	"--api-key=shop:" + shopKey, "--api-key=blog:" + blogKey, "--page-stats=1h", "--presence-timeout=1m",
	"--public-top=*",
}

// sitesAnswer is the answer of /-/sites.
type sitesAnswer struct {
	Sites []struct {
		Name    string
		Origins []string
		Page    string
		Count   int
		Version string
	}
}

func (s *server) sites(t testing.TB, headers ...string) (all sitesAnswer) {
	t.Helper()
	a := s.get(t, "/-/sites", headers...)
	err := json.Unmarshal([]byte(a.body), &all)
	if err != nil || a.status != 200 || a.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}

	return all
}

// names returns the sites with their totals.
func (s sitesAnswer) names() (all []string) {
	for _, site := range s.Sites {
		all = append(all, fmt.Sprintf("%s %s %d", site.Name, site.Page, site.Count))
	}

	return all
}

// Two sites on one server have the same pages, users and counters, and never see each other. The shop uses gateway a,
// and the blog uses b. A store sees names that contain the site and nothing else of sites, so that one store is enough.
func TestServerTwoSites(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t).URL()
	flags := append([]string{"--api-key=" + apiKey, "--update-interval=10ms", "--leave-grace=300ms"}, twoSites...)
	all := startAll(t, overRedis(redis, flags...), overRedis(redis, flags...))
	a, b := all[0], all[1]

	buyer, reader := presenceOfSites(t, a, b)
	unreadOfSites(t, a, b, buyer, reader)
	countersOfSites(t, a, b, buyer, reader)
	refusalsOfSites(t, a)
}

// wantCount waits until every process answers that a page has a count.
func wantCount(t testing.TB, all []*server, page string, n int, headers ...string) {
	t.Helper()
	for _, s := range all {
		testkit.Eventually(t, fmt.Sprintf("%d on %s %v", n, page, headers), func() bool {
			c := s.get(t, "/"+page+"/counter", headers...).counter(t)
			return c.Count == n && c.Page == page
		})
	}
}

// awaitAll skips frames until each wanted frame has arrived, in any order.
func (c *client) awaitAll(wanted ...func(frame) bool) {
	c.t.Helper()
	c.await("frames in any order", func(f frame) bool {
		wanted = slices.DeleteFunc(wanted, func(want func(frame) bool) bool { return want(f) })
		return len(wanted) == 0
	})
}

// presenceOfSites leaves a buyer on page p of the shop, and a reader on page p of the blog.
func presenceOfSites(t *testing.T, a, b *server) (buyer, reader *client) {
	both := []*server{a, b}
	buyer = a.dial(t, dialer{headers: []string{inShop}})
	reader = b.dial(t, dialer{query: "id=" + buyer.id, headers: []string{inBlog}}) // with an id of the shop
	if reader.user == buyer.user {
		t.Errorf("the blog accepts an id of the shop: %q", reader.user)
	}

	for _, c := range []*client{buyer, reader} {
		c.join("p")
		c.awaitCount("p", 1)
		c.subscribe("*")
		c.awaitCount("*", 1)
	}

	stream := b.sse(t, "/p/counter/events", inBlog)
	stream.awaitCount(1)
	reader.skim()

	// Visitors come to the shop. The blog does not notice them.
	a.dial(t, dialer{query: "site=shop"}).join("p")
	buyer.awaitAll(func(f frame) bool { return f.counts("p", 2) }, func(f frame) bool { return f.counts("*", 2) })
	a.put(t, "/p/counter", increment, "Origin: https://shop.example").counter(t)
	buyer.awaitCount("p", 3)
	wantCount(t, both, "p", 3) // of the first site
	wantCount(t, both, "*", 3, ofShop)
	wantCount(t, both, "p", 1, inBlog, ofShop) // the origin decides
	wantCount(t, both, "*", 1, ofBlog)

	for _, f := range reader.skim() {
		if f.Type == "count" && *f.Count != 1 {
			t.Errorf("the blog receives a count of the shop: %s", f.text)
		}
	}

	b.put(t, "/q/counter", increment, ofBlog).counter(t)
	reader.awaitCount("*", 2)
	for _, s := range both {
		testkit.Eventually(t, "several of the blog", func() bool {
			body := s.get(t, "/-/counters?page=p&page=q&page=*&site=blog").body
			return strings.Count(body, `"count":1,`) == 2 && strings.Contains(body, `"page":"*","count":2,`)
		})

		if c := s.get(t, "/q/counter").counter(t); c.Version != "0-0" {
			t.Errorf("the shop has the blog's page: %+v", c)
		}

		for headers, want := range map[string][]string{
			withKey: {"shop * 3", "blog * 2"}, asShop: {"shop * 3"}, asBlog: {"blog * 2"},
		} {
			testkit.Eventually(t, "the totals of sites",
				func() bool { return slices.Equal(s.sites(t, headers).names(), want) })
		}

		testkit.Eventually(t, "the dashboard of the blog", func() bool {
			d := s.board(t, asBlog, ofBlog)
			return d.Site != nil && d.Site.Page == "*" && d.Site.Count == 2 && len(d.Pages) == 2 &&
				d.Pages[0].Page == "p" && len(d.Processes) == 0
		})

		testkit.Eventually(t, "the dashboard of the shop", func() bool {
			d := s.board(t, withKey)
			return d.Site != nil && d.Site.Count == 3 && len(d.Pages) == 1 && d.Pages[0].Page == "p" &&
				d.Pages[0].Count == 3 && len(d.Processes) > 0
		})

		for path, joins := range map[string]int{
			"/p/stats?site=shop": 3, "/p/stats?site=blog": 1, "/*/stats?site=blog": 2, "/q/stats": 0,
		} {
			if is := s.stats(t, path); is.Peak.Count != joins || strings.Contains(is.Page, "\x1f") {
				t.Errorf("%s: %+v, want a peak of %d", path, is, joins)
			}
		}
	}

	do(t, "PUT", b.url+"/-/users/ann/pages/p", "", asBlog, ofBlog).counter(t)
	stream.awaitCount(2)
	do(t, "DELETE", a.url+"/-/users/ann/pages/p", "", asShop).counter(t) // ann is not on the shop's page
	wantCount(t, both, "p", 3, ofShop)
	wantCount(t, both, "p", 2, ofBlog)

	// A list of pages has those of one site.
	a.topPages(t, "", inShop).await("p 3")
	b.topPages(t, "", ofBlog).await("p 2, q 1")
	b.topPages(t, "", asBlog, ofBlog).await("p 2, q 1")

	return buyer, reader
}

func unreadOfSites(t *testing.T, a, b *server, buyer, reader *client) {
	a.put(t, "/-/me/follows/news", "", buyer.as(), inShop).noContent(t)
	b.put(t, "/-/me/follows/news", "", reader.as(), inBlog).noContent(t)
	do(t, "PUT", b.url+"/-/users/ann/follows/news", "", asBlog, ofBlog).noContent(t)

	for range 2 { // the same key counts once on each site
		do(t, "POST", a.url+"/news/changes", "", asShop, "Idempotency-Key: k").noContent(t)
		do(t, "POST", b.url+"/news/changes", "", asBlog, ofBlog, "Idempotency-Key: k").noContent(t)
	}

	do(t, "POST", b.url+"/news/changes", "", withKey, ofBlog).noContent(t)
	buyer.awaitUnread(1)
	reader.awaitUnread(2)

	const none, one = `{"follows":[]}`, `{"follows":["news"],"unread":{"news":1}}`
	const two = `{"follows":["news"],"unread":{"news":2}}`
	for _, s := range []*server{a, b} {
		// An id of one site is unknown on the other.
		for header, want := range map[string][3]string{ofShop: {one, none, none}, ofBlog: {none, two, two}} {
			for i, got := range []answer{
				s.get(t, "/-/me/follows", buyer.as(), header), s.get(t, "/-/me/follows", reader.as(), header),
				s.get(t, "/-/users/ann/follows", withKey, header),
			} {
				if strings.TrimSpace(got.body) != want[i] {
					t.Errorf("follows with %s: %s, want %s", header, got.body, want[i])
				}
			}
		}
	}

	// A reset, an end of a follow and a change each affect one site.
	buyer.send(`{"type":"read"}`)
	buyer.awaitUnread(0)
	if got := b.get(t, "/-/me/unread", reader.as(), ofBlog).unread(t); got.Count != 2 {
		t.Errorf("a reset on the shop resets the blog: %+v", got)
	}

	do(t, "DELETE", a.url+"/-/me/follows/news", "", buyer.as(), ofShop).noContent(t)
	do(t, "POST", b.url+"/news/changes", "", asBlog, ofBlog).noContent(t)
	reader.awaitUnread(3)

	for _, f := range buyer.skim() {
		if f.Type == "unread" && *f.Count != 0 {
			t.Errorf("the shop receives an unread count of the blog: %s", f.text)
		}
	}
}

func countersOfSites(t *testing.T, a, b *server, buyer, reader *client) {
	for _, c := range []*client{buyer, reader} {
		for _, key := range []string{"likes:1", "views:1"} {
			c.send(`{"type":"subscribe","counters":[` + quoted(key) + `]}`)
			c.awaitCounter(key, 0, false)
		}
	}

	for range 2 { // each site has idempotency keys of its own
		a.call(t, "POST", "views:1/increment", `{"delta":3}`, asShop, ofShop, "Idempotency-Key: v").lasting(t)
		b.call(t, "POST", "views:1/increment", `{"delta":5}`, asBlog, ofBlog, "Idempotency-Key: v").lasting(t)
	}

	a.call(t, "PUT", "likes:1/members/me", "", inShop, buyer.as()).lasting(t)

	buyer.awaitAll(
		func(f frame) bool { return f.Type == "counter" && f.Key == "views:1" && f.Value == 3 },
		func(f frame) bool { return f.Type == "counter" && f.Key == "likes:1" && f.Value == 1 && f.Mine },
	)

	reader.awaitCounter("views:1", 5, false)

	for _, f := range reader.skim() {
		if f.Key == "likes:1" && f.Value != 0 {
			t.Errorf("the blog receives the shop's like: %s", f.text)
		}
	}
	for _, s := range []*server{a, b} {
		for header, want := range map[string]string{ofShop: "3", ofBlog: "5"} {
			for _, key := range []string{"views:1", "likes:1"} {
				value := map[string]int64{
					ofShop + "views:1": 3, ofBlog + "views:1": 5, ofShop + "likes:1": 1,
				}[header+key]
				c := s.call(t, "GET", key+"/exact", "", withKey, header).lasting(t)
				if c.Value != value || c.Key != key {
					t.Errorf("%s of %s: %+v, want %d", key, header, c, value)
				}
			}

			for path, answer := range map[string]string{
				"counters/v*/aggregate":           `{"match":"v*","counters":1,"value":` + want + `}`,
				"top?match=views:*&last=1h":       `"top":[{"key":"views:1","value":` + want + `}]`,
				"counters/views:1/window?last=1h": `{"key":"views:1","last":"1h","value":` + want + `}`,
			} {
				testkit.Eventually(t, path+" on "+header, func() bool {
					return strings.Contains(s.get(t, "/api/v1/"+path, withKey, header).body, answer)
				})
			}
		}
	}

	for _, header := range []string{ofShop, ofBlog} { // each site has its own limit
		for i, s := range []*server{a, b} {
			got := do(t, "POST", s.url+"/api/v1/limits/login", `{"limit":1,"window":"1h"}`, withKey, header,
				"Content-Type: application/json")
			if got.status != []int{http.StatusOK, http.StatusTooManyRequests}[i] {
				t.Errorf("call %d on the limit of %s: %d %s", i, header, got.status, got.body)
			}
		}
	}

	a.call(t, "DELETE", "views:1", "", asShop).noContent(t)
	if blog := b.call(t, "GET", "views:1/exact", "", withKey, ofBlog).lasting(t).Value; blog != 5 {
		t.Errorf("a DELETE on the shop leaves %d views of the blog, want 5", blog)
	}
}

func refusalsOfSites(t *testing.T, s *server) {
	// A key of one site is refused for the other site, and every call refuses an unknown site.
	for _, headers := range [][]string{{asBlog}, {asBlog, inShop}, {asShop, ofBlog}} {
		for _, call := range [][3]string{
			{"POST", "/p/changes", ""}, {"GET", "/-/users/u/unread", ""},
			{"POST", "/api/v1/counters/views:1/increment", ""},
			{"GET", "/-/dashboard/data", ""}, {"PUT", "/p/counter", increment}, {"GET", "/p/counter", ""},
		} {
			got := do(t, call[0], s.url+call[1], call[2], headers...)
			got.problem(t, 403)
			if !strings.Contains(got.body, "holds for the site") {
				t.Errorf("%v with %v: %s", call, headers, got.body)
			}
		}

		s.refused(t, dialer{headers: headers}).problem(t, 403)
	}

	s.get(t, "/-/top/events", asShop, ofBlog).problem(t, 403)
	s.get(t, "/-/sites").problem(t, 401)
	for _, path := range []string{
		"/p/counter", "/-/counters?page=p", "/p/counter/events", "/-/me/unread", "/api/v1/counters/views:1",
		"/api/v1/top", "/-/sites", "/p/stats", "/",
	} {
		s.get(t, path, "Headcount-Site: other").problem(t, 400)
	}

	s.get(t, "/p/counter?site=default").problem(t, 400) // not one of the sites
	s.refused(t, dialer{query: "site=other"}).problem(t, 400)

	// A page of the shop, on the server's own origin, is no visitor of the blog, and reads its public data.
	own := []string{ofBlog, "Host: own.example", "Sec-Fetch-Site: same-origin"}
	for _, path := range []string{"/-/me/unread", "/-/me/notifications", "/api/v1/counters/likes:1/members/me"} {
		s.get(t, path, own...).problem(t, 403)
		if got := s.get(t, path, own[1:]...); got.status != 200 {
			t.Errorf("%s of its own site: %d %s", path, got.status, got.body)
		}
	}

	s.get(t, "/p/counter", own...).counter(t)

	// Pages of other origins may not use the server, and pages of the sites may.
	s.put(t, "/p/counter", increment, "Origin: https://evil.example", ofShop).problem(t, 403)
	got := do(t, "OPTIONS", s.url+"/p/counter", "", inBlog, "Access-Control-Request-Method: PUT")
	if got.status != 204 || got.header.Get("Access-Control-Allow-Origin") != "https://blog.example" ||
		!strings.Contains(got.header.Get("Access-Control-Allow-Headers"), "Headcount-Site") {
		t.Errorf("a preflight of the blog: %d %v", got.status, got.header)
	}
}

// A server without --site has one site, whose name is default. Its data are those of that site, if the server gets
// others later.
func TestServerSitesBesideTheDefaultSite(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{"--data-dir=" + dir, "--id-secret=a secret for tests"}
	s := startWithKey(t, flags...)

	c := s.dial(t, dialer{query: "site=default"})
	c.join("p")
	c.awaitCount("p", 1)
	testkit.Eventually(t, "one on the site", func() bool {
		return slices.Equal(s.sites(t, withKey).names(), []string{"default * 1"})
	})
	if got := s.sites(t, withKey); len(got.Sites[0].Origins) != 0 {
		t.Errorf("the site has origins without a flag: %+v", got)
	}
	s.get(t, "/p/counter?site=shop").problem(t, 400)
	s.get(t, "/p/counter", "Headcount-Site: shop").problem(t, 400)
	wantCount(t, []*server{s}, "*", 1, "Headcount-Site: default")

	s.follow(t, c.as(), "p")
	s.change(t, "p", "")
	s.call(t, "POST", "views:1/increment", `{"delta":7}`).lasting(t)

	if what := s.end(); what != "" {
		t.Fatal(what)
	}
	s = startWithKey(t, append(flags, "--site=shop=https://shop.example", "--site=default=https://www.example")...)
	s.wantUnread(t, c.as(), 0) // calls that name no site are for the first one

	if got := s.get(t, "/-/me/unread", c.as(), "Origin: https://www.example").unread(t); got.Count != 1 {
		t.Errorf("unread on the second site: %+v, want 1 as before", got)
	}

	if got := s.call(t, "GET", "views:1/exact", "", withKey, "Headcount-Site: default").lasting(t); got.Value != 7 {
		t.Errorf("the counter of the second site: %+v, want 7 as before", got)
	}
	if got := s.call(t, "GET", "views:1/exact", "").lasting(t); got.Value != 0 {
		t.Errorf("the counter of the first site: %+v, want 0", got)
	}
}
