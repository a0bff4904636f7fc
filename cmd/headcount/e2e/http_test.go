package e2e

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestCounter(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	path := "/" + pathEscape(page) + "/counter"
	if a := s.get(t, path); strings.TrimSpace(a.body) != `{"page":`+quoted(page)+`,"count":0,"updated_at":null,"version":"0-0"}` {
		t.Errorf("a page nobody ever joined: %s", a.body)
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
		if one.Count != 1 || one.Page != page || !newer(t, one.Version, last) || at.Before(before) || at.After(time.Now()) {
			t.Errorf("round %d: %s after version %s", i, a.body, last)
		}
		again := s.get(t, path).counter(t)
		if again.Version != one.Version || *again.UpdatedAt != *one.UpdatedAt {
			t.Errorf("nothing changed, yet %+v became %+v", one, again)
		}
		if v := version(t, one.Version)[0]; v < uint64(before.Add(-time.Hour).UnixMilli()) || v > uint64(time.Now().Add(time.Hour).UnixMilli()) {
			t.Errorf("incarnation %d is not in unix milliseconds", v)
		}
		c.leave(page)
		c.silent()
		var zero counter
		eventually(t, "left", func() bool { zero = s.get(t, path).counter(t); return zero.Count == 0 })
		if !newer(t, zero.Version, one.Version) || zero.UpdatedAt == nil {
			t.Errorf("after %+v: %+v", one, zero)
		}
		last = zero.Version
	}
	a := s.get(t, path)
	for name, want := range map[string]string{
		"Cache-Control": "no-store", "Vary": "Accept, Accept-Encoding", "Content-Encoding": "", "Set-Cookie": "", "Access-Control-Allow-Origin": "",
		"Content-Length": strconv.Itoa(len(a.body)),
	} {
		if got := strings.Join(a.header[name], "|"); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	head := do(t, "HEAD", s.url+path, "")
	if head.status != http.StatusOK || head.body != "" || head.header.Get("Content-Type") != a.header.Get("Content-Type") ||
		head.header.Get("Content-Length") != a.header.Get("Content-Length") || head.header.Get("Cache-Control") != "no-store" || head.header.Get("Vary") != "Accept, Accept-Encoding" {
		t.Errorf("HEAD: %d %v", head.status, head.header)
	}
}

func TestCompression(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := pathEscape(fresh(t))
	for _, path := range []string{"/" + page + "/counter", "/-/counters?page=" + page, "/-/headcount.js", "/"} {
		plain := s.get(t, path)
		for accept, want := range map[string]bool{
			"gzip": true, "deflate, gzip;q=0.5, br": true, "*": true, "GZIP": true,
			"": false, "br": false, "identity": false, "gzip;q=0": false, "gzip;q=0, *": false, "identity, gzip;q=0.5": false,
		} {
			a := s.get(t, path, "Accept-Encoding: "+accept)
			if got := a.header.Get("Content-Encoding") == "gzip"; a.status != 200 || got != want {
				t.Errorf("%s, Accept-Encoding %q: %d, Content-Encoding %q", path, accept, a.status, a.header.Get("Content-Encoding"))
			} else if got && gunzip(t, a.body) != plain.body || !got && a.body != plain.body {
				t.Errorf("%s, Accept-Encoding %q: another body", path, accept)
			}
			if vary := a.header.Get("Vary"); !strings.Contains(vary, "Accept-Encoding") {
				t.Errorf("%s: Vary %q", path, vary)
			}
		}
	}
}

func TestHTMLForPeople(t *testing.T) {
	t.Parallel()
	s := common(t)
	c := s.ws(t)
	page := "<b>&'\" " + fresh(t)
	c.join(page)
	c.takeCount(page, 1)
	path := "/%3Cb%3E&'%22%20" + pathEscape(strings.TrimPrefix(page, "<b>&'\" ")) + "/counter"
	for accept, want := range map[string]bool{
		"text/html": true,
		"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": true, // browsers
		"text/html;q=0.9, application/json;q=0.8":                         true,
		"TEXT/HTML":                         true,
		"application/json, text/html;q=0.9": false,
		"application/json":                  false,
		"*/*":                               false,
		"":                                  false,
		"text/plain":                        false,
		"text/html;q=0":                     false,
		"text/html;q=0.5, */*":              false,
		"text/html, application/json":       false,
		"application/json;q=0.9, text/html;q=0.1": false,
	} {
		a := s.get(t, path, "Accept: "+accept)
		html := strings.HasPrefix(a.header.Get("Content-Type"), "text/html")
		if a.status != 200 || html != want {
			t.Errorf("Accept %q: %d %s", accept, a.status, a.header.Get("Content-Type"))
		}
		if a.header.Get("Vary") != "Accept, Accept-Encoding" || a.header.Get("Cache-Control") != "no-store" {
			t.Errorf("Accept %q: Vary %q, Cache-Control %q", accept, a.header.Get("Vary"), a.header.Get("Cache-Control"))
		}
		switch {
		case !html:
			if a.counter(t).Page != page {
				t.Errorf("%s", a.body)
			}
		case strings.Contains(a.body, "<b>") || !strings.Contains(a.body, "&lt;b&gt;") || !strings.Contains(a.body, ">1<"):
			t.Errorf("Accept %q: %s", accept, a.body)
		}
	}
	a := s.get(t, path, "Accept: text/html", "Accept-Encoding: gzip")
	if html := gunzip(t, a.body); !strings.Contains(html, "<!doctype html>") {
		t.Errorf("%s", html)
	}
	s.get(t, "/-/counter", "Accept: text/html").problem(t, http.StatusBadRequest)
}

func TestCounters(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	a, b := s.ws(t), s.ws(t)
	for _, p := range []string{"one", "two"} {
		a.join(p)
		a.awaitCount(p, 1)
	}
	b.join("two")
	b.awaitCount("two", 2)
	eventually(t, "two on the site", func() bool { return s.count(t, "*") == 2 })
	got := s.get(t, "/-/counters?page=two&page=none&page=*&page=two&page=one&page=none")
	want := ""
	for _, p := range []string{"two", "none", "*", "one"} {
		want += "," + strings.TrimSpace(s.get(t, "/"+p+"/counter").body)
	}
	if strings.TrimSpace(got.body) != `{"counters":[`+want[1:]+`]}` || got.header.Get("Content-Type") != "application/json" || got.header.Get("Cache-Control") != "no-store" {
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

func TestPutBodies(t *testing.T) {
	t.Parallel()
	s := common(t)
	me := "Headcount-Id: " + s.ws(t).id
	path := "/" + pathEscape(fresh(t)) + "/counter"
	for name, tc := range map[string]struct {
		body string
		want int
	}{
		"empty":                  {"", 400},
		"not JSON":               {"increment", 400},
		"a string":               {`"increment"`, 400},
		"an array":               {`[{"action":"increment"}]`, 400},
		"null":                   {`null`, 400},
		"no action":              {`{}`, 400},
		"action null":            {`{"action":null}`, 400},
		"action a number":        {`{"action":1}`, 400},
		"another action":         {`{"action":"reset"}`, 400},
		"empty action":           {`{"action":""}`, 400},
		"case of the value":      {`{"action":"Increment"}`, 400},
		"case of the member":     {`{"Action":"increment"}`, 400},
		"two objects":            {`{"action":"increment"}{}`, 400},
		"unfinished":             {`{"action":"increment"`, 400},
		"more members":           {`{"x":[1,{}],"action":"increment"}`, 400},
		"with space":             {" {\n\"action\": \"decrement\"}\r\n", 200},
		"4096 bytes":             {increment + strings.Repeat(" ", 4096-len(increment)), 200},
		"4097 bytes":             {increment + strings.Repeat(" ", 4097-len(increment)), 413},
		"4097 bytes of nonsense": {strings.Repeat("x", 4097), 413},
		"a megabyte":             {increment + strings.Repeat(" ", 1<<20), 413},
	} {
		t.Run(name, func(t *testing.T) {
			a := s.put(t, path, tc.body, me)
			if tc.want == 200 {
				a.counter(t)
				if a.header.Get("Cache-Control") != "no-store" {
					t.Errorf("Cache-Control %q", a.header.Get("Cache-Control"))
				}
			} else {
				a.problem(t, tc.want)
			}
		})
	}
	// A megabyte in chunks, of unknown length.
	w := s.rawDial(t)
	_ = w.SetDeadline(time.Now().Add(patience))
	fmt.Fprintf(w, "PUT %s HTTP/1.1\r\nHost: x\r\n%s\r\nTransfer-Encoding: chunked\r\n\r\n", path, me)
	a := readAnswer(t, w, func() {
		for range 1024 {
			if _, err := fmt.Fprintf(w, "400\r\n%s\r\n", strings.Repeat(" ", 1024)); err != nil {
				return
			}
		}
	})
	a.problem(t, http.StatusRequestEntityTooLarge)
	if got := s.get(t, path).counter(t); got.Count > 1 {
		t.Errorf("%+v", got)
	}
}

func TestStatuses(t *testing.T) {
	t.Parallel()
	s := common(t)
	for _, tc := range []struct {
		method, path string
		want         int
	}{
		{"POST", "/p/counter", 405}, {"DELETE", "/p/counter", 405}, {"PATCH", "/p/counter", 405},
		{"PUT", "/p/counter/events", 405}, {"POST", "/p/counter/events", 405}, {"POST", "/-/counters", 405}, {"PUT", "/-/counters", 405},
		{"POST", "/-/ws", 405}, {"PUT", "/-/ws", 405}, {"POST", "/", 405}, {"DELETE", "/-/headcount.js", 405},
		{"GET", "/nothing", 404}, {"PUT", "/nothing", 404}, {"DELETE", "/a/b/c", 404}, {"GET", "/metrics", 404}, {"GET", "/debug/pprof/", 404},
		{"GET", "/-/ws", 426},
		{"PUT", "/-/counter", 400}, {"PUT", "/*/counter", 400}, {"PUT", "/%2A/counter", 400}, {"PUT", "//counter", 400},
	} {
		t.Run(tc.method+" "+tc.path, func(t *testing.T) {
			body := ""
			if tc.method == "PUT" {
				body = increment
			}
			a := do(t, tc.method, s.url+tc.path, body)
			a.problem(t, tc.want)
			if allow := a.header.Get("Allow"); tc.want == 405 && (allow == "" || strings.Contains(allow, tc.method)) {
				t.Errorf("Allow %q", allow)
			}
			if tc.want == 426 && !strings.EqualFold(a.header.Get("Upgrade"), "websocket") {
				t.Errorf("Upgrade %q", a.header.Get("Upgrade"))
			}
		})
	}
}

func TestDemoPageAndClient(t *testing.T) {
	t.Parallel()
	s := common(t)
	for path, kind := range map[string]string{"/": "text/html", "/-/headcount.js": "text/javascript", "/-/headcount.d.ts": "text/plain"} {
		a := s.get(t, path)
		if a.status != 200 || !strings.HasPrefix(a.header.Get("Content-Type"), kind) || len(a.body) < 100 {
			t.Errorf("%s: %d %s, %d bytes", path, a.status, a.header.Get("Content-Type"), len(a.body))
		}
		if head := do(t, "HEAD", s.url+path, ""); head.status != 200 || head.body != "" {
			t.Errorf("HEAD %s: %d", path, head.status)
		}
	}
}

// Without an identity a caller may make 10 requests a second, and 100 at once.
func TestPutWithoutIdentityIsLimited(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s", "--presence-timeout=30s", "--trusted-proxies=127.0.0.0/8")
	put := func(headers ...string) answer { return s.put(t, "/p/counter", increment, headers...) }
	began := time.Now()
	first := put()
	passed := 1
	var last answer
	for ; passed < 1000; passed++ {
		if last = put(); last.status != http.StatusOK {
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
	if c := s.put(t, "/p/counter", increment, "Headcount-Id: "+first.header.Get("Headcount-Id")).counter(t); c.Count != passed {
		t.Errorf("one that renews its hold: %+v after %d", c, passed)
	}
	eventually(t, "an identity that a WebSocket made up is one more", func() bool { // one a tenth of a second may pass
		return put("Headcount-Id: "+s.ws(t).id).status == http.StatusTooManyRequests
	})
	eventually(t, "a forged identity is none", func() bool { // one a tenth of a second may pass
		return put("Headcount-Id: forged.forged", "Cookie: headcount_id=x").status == http.StatusTooManyRequests
	})
	put("X-Forwarded-For: 192.0.2.7").counter(t) // another address
	put("X-Forwarded-For: 198.51.100.1, 127.0.0.1").counter(t)
	if got := s.count(t, "p"); got < passed {
		t.Errorf("count %d after %d", got, passed)
	}
	wait, _ := strconv.Atoi(last.header.Get("Retry-After"))
	time.Sleep(time.Duration(wait) * time.Second)
	put().counter(t)
}

func TestEventStream(t *testing.T) {
	t.Parallel()
	const ping = 300 * time.Millisecond
	s := start(t, "--ping-interval="+ping.String(), "--leave-grace=0s", "--update-interval=10ms")
	st := s.sse(t, "/p/counter/events", "Accept: text/event-stream", "Last-Event-ID: 1-1")
	opened := time.Now()
	h := st.resp.Header
	if kind, _, _ := strings.Cut(h.Get("Content-Type"), ";"); kind != "text/event-stream" || !strings.Contains(h.Get("Cache-Control"), "no-store") && !strings.Contains(h.Get("Cache-Control"), "no-cache") {
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
		if i == 2 {
			break
		}
		last = e.Version
		c.leave("p")
		if e = st.take(); e.Count != 0 || !newer(t, e.Version, last) {
			t.Errorf("round %d: %s", i, e.data)
		}
		last = e.Version
	}
	if e := s.sse(t, "/p/counter/events").take(); e.Count != 1 {
		t.Errorf("another stream begins with %s", e.data)
	}
	for range 4 {
		select {
		case <-st.comments:
		case <-time.After(patience):
			t.Fatal("no comment")
		}
	}
	if took := time.Since(opened); took < 4*ping-ping/2 {
		t.Errorf("four comments within %s", took)
	}
	st.resp.Body.Close()
	eventually(t, "the stream is forgotten", func() bool { return s.metric(t, "headcount_connections") == 2 })
	if got := s.count(t, "*"); got != 1 {
		t.Errorf("streams count as present: %d", got)
	}
	s.get(t, "/%20%00/counter/events").problem(t, http.StatusBadRequest)
}

func TestRegionsOfOneRegion(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	c := s.ws(t)
	c.join(page)
	c.takeCount(page, 1)
	path := "/" + pathEscape(page) + "/counter"
	if a := s.get(t, path+"?regions=1"); !strings.HasSuffix(strings.TrimSpace(a.body), `,"regions":{"local":1}}`) || a.header.Get("Cache-Control") != "no-store" || !strings.Contains(a.body, `"count":1,`) {
		t.Errorf("one region has all of the count: %s", a.body)
	}
	for _, query := range []string{"", "?regions=", "?regions=0", "?regions"} {
		if a := s.get(t, path+query); a.status != http.StatusOK || strings.Contains(a.body, "regions") {
			t.Errorf("nobody asked for regions with %q: %d %s", query, a.status, a.body)
		}
	}
	if a := s.get(t, path+"?regions=1", "Accept: text/html"); !strings.Contains(a.body, "<h1>1</h1>") {
		t.Errorf("a person's browser: %s", a.body)
	}
}
