package e2e

import (
	"fmt"
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
	path := "/" + pathEscape(page) + "/counter"
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
			t.Errorf("%s: %d %q %v", has, a.status, a.body, a.header)
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
	for _, path := range []string{counter, "/-/counters?page=" + url.QueryEscape(page), "/-/headcount.js", "/"} {
		plain, packed := s.get(t, path), s.get(t, path, "Accept-Encoding: gzip")
		if packed.header.Get("Content-Encoding") != "gzip" || gunzip(t, packed.body) != plain.body {
			t.Errorf("%s: %v, or another body", path, packed.header)
		}
		for _, a := range []answer{plain, packed} {
			if a.status != http.StatusOK || !strings.Contains(a.header.Get("Vary"), "Accept-Encoding") {
				t.Errorf("%s: %d, Vary %q", path, a.status, a.header.Get("Vary"))
			}
		}
	}

	a := s.get(t, counter, "Accept: text/html", "Accept-Encoding: gzip")

	html := gunzip(t, a.body)
	if strings.Contains(html, "<b>") || !strings.Contains(html, "&lt;b&gt;") || !strings.Contains(html, ">0<") ||
		!strings.Contains(html, "<!doctype html>") {
		t.Errorf("%s", html)
	}

	if a.header.Get("Vary") != "Accept, Accept-Encoding" || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("%v", a.header)
	}

	s.get(t, "/-/counter", "Accept: text/html").problem(t, http.StatusBadRequest)
}

func TestServerCounters(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")

	a, b := s.ws(t), s.ws(t)
	for _, p := range []string{"one", "two"} {
		a.join(p)
		a.awaitCount(p, 1)
	}

	b.join("two")
	b.awaitCount("two", 2)
	testkit.Eventually(t, "two on the site", func() bool { return s.count(t, "*") == 2 })

	got := s.get(t, "/-/counters?page=two&page=none&page=*&page=two&page=one&page=none")
	want := ""
	for _, p := range []string{"two", "none", "*", "one"} {
		want += "," + strings.TrimSpace(s.get(t, "/"+p+"/counter").body)
	}
	if strings.TrimSpace(got.body) != `{"counters":[`+want[1:]+`]}` ||
		got.header.Get("Content-Type") != "application/json" || got.header.Get("Cache-Control") != "no-store" {
		t.Errorf("got %s %v\nwant the counters of %s", got.body, got.header, want)
	}

	query := func(n int) string {
		q := "/-/counters?page=*"
		for i := range n - 1 {
			q += fmt.Sprintf("&page=p%d", i)
		}
		return q
	}

	if a := s.get(t, query(100)+"&page=*&page=p5&page=p98"); a.status != 200 || strings.Count(a.body, `"page"`) != 100 {
		t.Errorf("a hundred distinct pages: %d %s", a.status, a.body)
	}

	s.get(t, query(101)).problem(t, http.StatusBadRequest)
	s.get(t, "/-/counters").problem(t, http.StatusBadRequest)
	s.get(t, "/-/counters?page=one&page=a%0Ab").problem(t, http.StatusBadRequest)

	if head := do(t, "HEAD", s.url+query(3), ""); head.status != 200 || head.body != "" {
		t.Errorf("HEAD: %d %q", head.status, head.body)
	}
}

func TestServerPutBodies(t *testing.T) {
	t.Parallel()
	s := common(t)
	me := "Headcount-Id: " + s.ws(t).id
	path := "/" + pathEscape(fresh(t)) + "/counter"
	for body, want := range map[string]int{
		"":                                   400,
		"increment":                          400,
		`{}`:                                 400,
		`{"action":"reset"}`:                 400,
		`{"Action":"increment"}`:             400,
		`{"x":[1,{}],"action":"increment"}`:  400,
		" {\n\"action\": \"decrement\"}\r\n": 200,
		increment + strings.Repeat(" ", 4096-len(increment)): 200,
		increment + strings.Repeat(" ", 4097-len(increment)): 413,
		increment + strings.Repeat(" ", 1<<20):               413,
	} {
		a := s.put(t, path, body, me)
		if want == 200 {
			a.counter(t)
		} else {
			a.problem(t, want)
		}
	}
}

func TestServerStatuses(t *testing.T) {
	t.Parallel()
	s := common(t)
	for want, calls := range map[int]string{
		400: "PUT /-/counter, PUT /*/counter, PUT /%2A/counter, PUT //counter",
		404: "GET /nothing, PUT /nothing, DELETE /a/b/c, GET /metrics, GET /debug/pprof/",
		405: "POST /p/counter, DELETE /p/counter, PATCH /p/counter, PUT /p/counter/events, POST /p/counter/events, " +
			"POST /-/counters, PUT /-/counters, PUT /-/ws, POST /, DELETE /-/headcount.js",
	} {
		for call := range strings.SplitSeq(calls, ", ") {
			method, path, _ := strings.Cut(call, " ")
			body := ""
			if method == "PUT" {
				body = increment
			}
			a := do(t, method, s.url+path, body)
			a.problem(t, want)

			if allow := a.header.Get("Allow"); want == 405 && (allow == "" || strings.Contains(allow, method)) {
				t.Errorf("%s: Allow %q", call, allow)
			}
		}
	}
}

func TestServerDemoPageAndClient(t *testing.T) {
	t.Parallel()
	s := common(t)
	for path, kind := range map[string]string{
		"/": "text/html", "/-/headcount.js": "text/javascript", "/-/headcount.d.ts": "text/plain",
	} {
		a := s.get(t, path)
		if a.status != 200 || !strings.HasPrefix(a.header.Get("Content-Type"), kind) || len(a.body) < 100 {
			t.Errorf("%s: %d %s, %d bytes", path, a.status, a.header.Get("Content-Type"), len(a.body))
		}

		if head := do(t, "HEAD", s.url+path, ""); head.status != 200 || head.body != "" {
			t.Errorf("HEAD %s: %d", path, head.status)
		}
	}
}

// Without an identity, a caller may make 10 requests a second, and 100 at once.
func TestClockPutWithoutIdentityIsLimited(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s", "--presence-timeout=2m", "--trusted-proxies=127.0.0.0/8")
	put := func(headers ...string) answer { return s.put(t, "/p/counter", increment, headers...) }

	began := time.Now()
	first := put()

	passed := 1

	var last answer
	for ; passed < 1000; passed++ {
		last = put()
		if last.status != http.StatusOK {
			break
		}
	}

	if most := 100 + int(10*time.Since(began).Seconds()) + 1; passed < 100 || passed > most {
		t.Errorf("%d passed, want 100 to %d", passed, most)
	}

	last.problem(t, http.StatusTooManyRequests)
	if last.header.Get("Set-Cookie") != "" {
		t.Error("a refused call got an identity")
	}

	if got := last.header.Get("RateLimit-Policy"); got != `"default";q=100;w=10` {
		t.Errorf("RateLimit-Policy: %s", got)
	}

	renewed := s.put(t, "/p/counter", increment, "Headcount-Id: "+first.header.Get("Headcount-Id"))
	if c := renewed.counter(t); c.Count != passed {
		t.Errorf("a caller that renews its hold: %+v after %d", c, passed)
	}

	// One call per tenth of a second may pass.
	testkit.Eventually(t, "an identity made for a WebSocket is one more", func() bool {
		return put("Headcount-Id: "+s.ws(t).id).status == http.StatusTooManyRequests
	})
	testkit.Eventually(t, "a forged identity is none", func() bool {
		return put("Headcount-Id: forged.forged", "Cookie: headcount_id=x").status == http.StatusTooManyRequests
	})

	put("X-Forwarded-For: 192.0.2.7").counter(t) // another address
	put("X-Forwarded-For: 198.51.100.1, 127.0.0.1").counter(t)
	if got := s.count(t, "p"); got < passed {
		t.Errorf("count %d after %d", got, passed)
	}

	// The server keeps its promise of Retry-After.
	wait, _ := strconv.Atoi(last.header.Get("Retry-After"))
	time.Sleep(time.Duration(wait) * time.Second)
	put().counter(t)
}

func TestClockEventStream(t *testing.T) {
	t.Parallel()
	const ping = 300 * time.Millisecond
	s := start(t, "--ping-interval="+ping.String(), "--leave-grace=0s", "--update-interval=10ms")
	opened := time.Now()

	st := s.sse(t, "/p/counter/events", "Accept: text/event-stream", "Last-Event-ID: 1-1")
	h := st.resp.Header
	if kind, _, _ := strings.Cut(h.Get("Content-Type"), ";"); kind != "text/event-stream" ||
		!strings.Contains(h.Get("Cache-Control"), "no-store") && !strings.Contains(h.Get("Cache-Control"), "no-cache") {
		t.Errorf("headers %v", h)
	}

	if len(h["Set-Cookie"]) != 1 || h.Get("Access-Control-Allow-Origin") != "" || h.Get("Content-Length") != "" {
		t.Errorf("headers %v", h)
	}

	if e := st.take(); e.Count != 0 || e.Version != "0-0" || e.UpdatedAt != nil {
		t.Errorf("the first event: %s", e.data)
	}

	c := s.ws(t)
	last := "0-0"
	for i := range 3 {
		c.join("p")
		e := st.take()
		if e.Count != 1 || !newer(t, e.Version, last) {
			t.Errorf("round %d: %s", i, e.data)
		}

		last = e.Version
		if i == 2 {
			break
		}

		c.leave("p")
		e = st.take()
		if e.Count != 0 || !newer(t, e.Version, last) {
			t.Errorf("round %d: %s", i, e.data)
		}
		last = e.Version
	}

	// A stream that comes back begins with the newest count, whichever count it received last.
	for _, id := range []string{"1-1", "", "x", last} {
		if e := s.sse(t, "/p/counter/events", "Last-Event-ID: "+id).take(); e.Count != 1 || e.id != last {
			t.Errorf("after %q a stream begins with %s", id, e.data)
		}
	}

	for range 2 {
		select {
		case <-st.comments:
		case <-time.After(testkit.Timeout):
			t.Fatal("no comment")
		}
	}

	if took := time.Since(opened); took < 2*ping-ping/2 {
		t.Errorf("two comments within %s", took)
	}

	before := s.metric(t, "headcount_connections")
	st.resp.Body.Close()
	testkit.Eventually(t, "the stream is forgotten",
		func() bool { return s.metric(t, "headcount_connections") == before-1 })

	testkit.Eventually(t, "one on the site: streams do not count as present",
		func() bool { return s.count(t, "*") == 1 })
	s.get(t, "/%20%00/counter/events").problem(t, http.StatusBadRequest)
}
