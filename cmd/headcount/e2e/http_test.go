package e2e

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/internal/testkit"
)

func TestServerCounter(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	path := "/" + url.PathEscape(page) + "/counter"
	a := s.get(t, path)
	if strings.TrimSpace(a.body) != `{"page":`+quoted(page)+`,"count":0,"updated_at":null,"version":"0-0"}` {
		t.Errorf("a page that nobody ever joined: %s", a.body)
	}

	c := s.ws(t)
	last := "0-0"
	for i := range 3 {
		before := time.Now().Truncate(time.Second)
		c.join(page)
		c.takeCount(page, 1)

		a := s.get(t, path)
		one := a.counter(t)
		at, _ := time.Parse(time.RFC3339, *one.UpdatedAt)
		if one.Count != 1 || one.Page != page || !newer(t, one.Version, last) || at.Before(before) ||
			at.After(time.Now()) {
			t.Errorf("round %d: %s after version %s", i, a.body, last)
		}

		again := s.get(t, path).counter(t)
		if again.Version != one.Version || *again.UpdatedAt != *one.UpdatedAt {
			t.Errorf("nothing changed, yet %+v became %+v", one, again)
		}

		if v := version(t, one.Version)[0]; v < uint64(before.Add(-time.Hour).UnixMilli()) ||
			v > uint64(time.Now().Add(time.Hour).UnixMilli()) {
			t.Errorf("incarnation %d is not in unix milliseconds", v)
		}

		c.leave(page)
		c.silent()
		var zero counter
		testkit.Eventually(t, "left", func() bool {
			zero = s.get(t, path).counter(t)
			return zero.Count == 0
		})
		if !newer(t, zero.Version, one.Version) || zero.UpdatedAt == nil {
			t.Errorf("after %+v: %+v", one, zero)
		}
		last = zero.Version
	}

	a = s.get(t, path)
	for name, want := range map[string]string{
		"Cache-Control": "no-store", "Vary": "Accept, Accept-Encoding", "Content-Encoding": "", "Set-Cookie": "",
		"Access-Control-Allow-Origin": "",
		"Content-Length":              strconv.Itoa(len(a.body)),
	} {
		if got := strings.Join(a.header[name], "|"); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}

	head := do(t, "HEAD", s.url+path, "")
	if head.status != http.StatusOK || head.body != "" ||
		head.header.Get("Content-Type") != a.header.Get("Content-Type") ||
		head.header.Get("Content-Length") != a.header.Get("Content-Length") ||
		head.header.Get("Cache-Control") != "no-store" || head.header.Get("Vary") != "Accept, Accept-Encoding" {
		t.Errorf("HEAD: %d %v", head.status, head.header)
	}
}

// A count has its version as ETag, and a client that has the version gets no body. With --cache-reads, proxies may
// cache public answers, and nothing else.
func TestServerCachedReads(t *testing.T) {
	t.Parallel()
	s := start(t, "--cache-reads=2s", "--api-key=k", "--leave-grace=0s", "--private=team/*")

	c := s.ws(t)
	c.join("p")
	c.awaitCount("p", 1)

	const kept = "public, max-age=2, stale-while-revalidate=5"
	a := s.get(t, "/p/counter")
	tag := `"` + a.counter(t).Version + `"`
	if a.header.Get("ETag") != tag || a.header.Get("Cache-Control") != kept {
		t.Errorf("ETag %s, Cache-Control %q; want %s, %q",
			a.header.Get("ETag"), a.header.Get("Cache-Control"), tag, kept)
	}

	for _, has := range []string{tag, "W/" + tag, `"1-1", ` + tag, "*"} {
		a := s.get(t, "/p/counter", "If-None-Match: "+has)
		if a.status != http.StatusNotModified || a.body != "" || a.header.Get("ETag") != tag ||
			a.header.Get("Cache-Control") != kept || a.header.Get("Vary") != "Accept, Accept-Encoding, Origin" {
			t.Errorf("If-None-Match %s: %d %q %v, want 304", has, a.status, a.body, a.header)
		}
	}

	const exposed, taken = "Access-Control-Expose-Headers", "Access-Control-Allow-Headers"

	preflight := do(t, "OPTIONS", s.url+"/p/counter", "", "Origin: "+s.url, "Access-Control-Request-Method: GET")
	a = s.get(t, "/p/counter", "Origin: "+s.url)
	if !strings.Contains(a.header.Get(exposed), "ETag") ||
		!strings.Contains(preflight.header.Get(taken), "If-None-Match") {
		t.Errorf("scripts of other origins cannot use the ETag: %v, %v", a.header, preflight.header)
	}

	// A change makes the client's version an old one.
	c.leave("p")
	testkit.Eventually(t, "left", func() bool { return s.count(t, "p") == 0 })
	if a := s.get(t, "/p/counter", "If-None-Match: "+tag); a.status != http.StatusOK || a.header.Get("ETag") == tag {
		t.Errorf("after a change: %d, ETag %s", a.status, a.header.Get("ETag"))
	}

	for path, want := range map[string]string{
		"/-/counters?page=p": kept, "/p/badge.svg": kept, "/p/stats": kept,
		"/api/v1/counters/views:1": kept, "/api/v1/counters?key=views:1": kept,
		"/api/v1/counters/views:1/badge.svg": kept,
		"/api/v1/counters/views:1/exact":     "no-store", "/api/v1/counters/mine": "no-store",
		"/api/v1/counters?key=views:1&key=mine": "no-store",
		"/api/v1/counters/mine/badge.svg":       "no-store", "/api/v1/counters/views:1/range": "no-store",
		"/-/counter": "no-store", "/-/me/unread": "no-store",
		"/team%2Fa/counter": "no-store", "/team%2Fa/badge.svg": "no-store", "/team%2Fa/stats": "no-store",
		"/-/counters?page=p&page=team/a": "no-store",
	} {
		a := s.get(t, path, "X-API-Key: k")
		if a.header.Get("Cache-Control") != want || a.header.Get("Set-Cookie") != "" {
			t.Errorf("%s: Cache-Control %q, want %q", path, a.header.Get("Cache-Control"), want)
		}
	}

	a = do(t, "PUT", s.url+"/p/counter", `{"action":"increment"}`)
	if a.status != http.StatusOK || a.header.Get("Cache-Control") != "no-store" || a.header.Get("ETag") != "" {
		t.Errorf("PUT: %d %v", a.status, a.header)
	}
}

// Every answer honours what the client accepts: HTML for people, in which names stay text, and gzip.
func TestServerRepresentations(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := "<b>&'\" " + fresh(t)
	counter := "/" + url.PathEscape(page) + "/counter"
	for path, kind := range map[string]string{
		counter: "application/json", "/-/counters?page=" + url.QueryEscape(page): "application/json",
		"/": "text/html", "/-/headcount.js": "text/javascript", "/-/headcount.d.ts": "text/plain",
	} {
		plain, packed := s.get(t, path), s.get(t, path, "Accept-Encoding: gzip")
		if packed.header.Get("Content-Encoding") != "gzip" || gunzip(t, packed.body) != plain.body {
			t.Errorf("%s: %v, or another body", path, packed.header)
		}
		for _, a := range []answer{plain, packed} {
			if a.status != http.StatusOK || !strings.Contains(a.header.Get("Vary"), "Accept-Encoding") ||
				!strings.HasPrefix(a.header.Get("Content-Type"), kind) {
				t.Errorf("%s: %d, %v", path, a.status, a.header)
			}
		}
		if head := do(t, "HEAD", s.url+path, ""); head.status != http.StatusOK || head.body != "" {
			t.Errorf("HEAD %s: %d %q", path, head.status, head.body)
		}
	}

	a := s.get(t, counter, "Accept: text/html", "Accept-Encoding: gzip")

	html := gunzip(t, a.body)
	if strings.Contains(html, "<b>") || !strings.Contains(html, "&lt;b&gt;") || !strings.Contains(html, ">0<") ||
		!strings.Contains(html, "<!doctype html>") {
		t.Errorf("the page's name is not escaped, or the count 0 is missing: %s", html)
	}

	if a.header.Get("Vary") != "Accept, Accept-Encoding" || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("the headers of the HTML page: %v", a.header)
	}

	s.get(t, "/-/counter", "Accept: text/html").problem(t, http.StatusBadRequest)
}
