package gateway

import (
	"bufio"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/calls"
	"headcount/gateway/identity"
	"headcount/gateway/websocket"
)

// problem checks that the answer is a problem document with this status.
func (g got) problem(t *testing.T, what string, status int) {
	t.Helper()
	if g.status != status || g.Get("Content-Type") != "application/problem+json" {
		t.Errorf("%s: %d %s %.300s, want a problem %d", what, g.status, g.Get("Content-Type"), g.text, status)
	}
}

// Every way in checks the origin, with the scheme that a trusted proxy reports. How origins match, and the headers of
// each status, are tested in identity and httppolicy.
func TestEveryWayInChecksTheOrigin(t *testing.T) {
	origins, err := identity.NewOrigins([]string{
		"https://site.example", "http://*.wild.example:8000", "https://*.deep.example",
	})
	if err != nil {
		t.Fatal(err)
	}

	proxies, err := identity.NewProxies([]string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}

	allows := func(cfg *Config) { cfg.API.Origins, cfg.Proxies = origins, proxies }

	for _, server := range []struct {
		tune  func(*Config)
		cases []originCase
	}{
		{nil, []originCase{
			{"http://gateway", true, nil},
			{"https://site.example", false, nil},
			{"http://site.example:80", true, []string{"Host: site.example"}},
			// X-Forwarded-Proto of a client that is no trusted proxy.
			{"https://site.example", false, []string{"Host: site.example", "X-Forwarded-Proto: https"}},
		}},
		{allows, []originCase{
			{"https://own.example", true, []string{"Host: own.example", "X-Forwarded-Proto: https"}},
			{"http://a.wild.example:8000", true, nil},
			{"https://a.deep.example", true, nil},
			{"null", false, nil},
		}},
	} {
		visits(t, 0, server.tune, func(t *testing.T, s *served) {
			for _, tc := range server.cases {
				tc.check(t, s)
			}
		})
	}
}

type originCase struct {
	origin string
	ok     bool
	more   []string // further headers
}

func (tc originCase) check(t *testing.T, s *served) {
	headers := append([]string{"Origin: " + tc.origin}, tc.more...)
	cors := func(what string, h http.Header) {
		t.Helper()
		origin := h.Get("Access-Control-Allow-Origin")
		credentials := h.Get("Access-Control-Allow-Credentials")
		allowed := origin == tc.origin && credentials == "true"
		silent := origin == "" && credentials == ""
		if tc.ok && !allowed || !tc.ok && !silent || !strings.Contains(h.Get("Vary"), "Origin") {
			t.Errorf("%s %s: the CORS headers are %v", tc.origin, what, h)
		}
	}

	get := s.do("GET", "/p/counter", "", headers...)
	if get.status != http.StatusOK {
		t.Errorf("GET of %s: %d %s, want 200", tc.origin, get.status, get.text)
	}

	// The gateway answers a GET of any origin, but a browser hands the answer to the page only if these headers allow
	// it. So errors have them, too.
	cors("GET", get.Header)
	cors("GET, 400", s.do("GET", "/-/counter", "", headers...).Header)
	preflight := s.do("OPTIONS", "/p/counter", "", append(headers, "Access-Control-Request-Method: PUT")...)
	cors("preflight", preflight.Header)

	host := "gateway"
	for _, line := range tc.more {
		if name, value, _ := strings.Cut(line, ": "); name == "Host" {
			host = value
		}
	}

	socket := func(status int) *http.Response {
		r := s.raw("GET /-/ws HTTP/1.1\r\nHost: " + host + "\r\nOrigin: " + tc.origin + "\r\n" +
			strings.Join(append(upgrade(notHost(tc.more)...), "", ""), "\r\n"))
		return r.response(status)
	}

	// Another origin is refused every call that counts a user.
	if !tc.ok {
		preflight.problem(t, "preflight", 403)
		s.do("PUT", "/p/counter", incrementBody, headers...).problem(t, "PUT", 403)
		s.do("GET", "/p/counter/events", "", headers...).problem(t, "SSE", 403)
		s.do("POST", "/p/changes", "", headers...).problem(t, "POST", 403)
		socket(http.StatusForbidden)
		return
	}

	welcome := socket(http.StatusSwitchingProtocols)
	cors("WebSocket", welcome.Header)
	me := append(headers, "Headcount-Id: "+s.tab().id)
	put := s.do("PUT", "/p/counter", incrementBody, me...)
	if put.status != http.StatusOK {
		t.Errorf("PUT of %s: %d %s, want 200", tc.origin, put.status, put.text)
	}

	cors("PUT", put.Header)
	cors("PUT, 404", s.do("PUT", "/nothing", "", me...).Header)
	cors("PUT, 413", s.do("PUT", "/p/counter", strings.Repeat("x", 5000), me...).Header)
}

// notHost returns the header lines other than Host.
func notHost(lines []string) (others []string) {
	for _, line := range lines {
		if !strings.HasPrefix(line, "Host: ") {
			others = append(others, line)
		}
	}

	return others
}

// raw sends text as it is, and returns the connection.
func (s *served) raw(text string) *raw {
	s.t.Helper()
	c, err := s.dial()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	r := &raw{t: s.t, Conn: c, in: bufio.NewReader(c)}
	r.write([]byte(text))

	return r
}

// A path that is no call, and what a call does not accept, is answered with a problem document and its status.
func TestStatusesOfCalls(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		for want, calls := range map[int]string{
			400: "PUT /-/counter, PUT /*/counter, PUT /%2A/counter, PUT //counter",
			404: "GET /nothing, PUT /nothing, DELETE /a/b/c, GET /metrics, GET /debug/pprof/",
			405: "POST /p/counter, DELETE /p/counter, PATCH /p/counter, PUT /p/counter/events, " +
				"POST /p/counter/events, POST /-/counters, PUT /-/counters, PUT /-/ws, POST /, " +
				"DELETE /-/headcount.js",
		} {
			for call := range strings.SplitSeq(calls, ", ") {
				method, path, _ := strings.Cut(call, " ")
				body := ""
				if method == "PUT" {
					body = incrementBody
				}
				g := s.do(method, path, body)
				g.problem(t, call, want)
				// A client that reads Allow and tries again must not find the refused method there.
				if allow := g.Get("Allow"); want == 405 && (allow == "" || strings.Contains(allow, method)) {
					t.Errorf("%s: Allow %q", call, allow)
				}
			}
		}

		// A browser gets the page that asks for the key, and must not store it.
		page := s.do("GET", "/-/dashboard", "", "Accept: text/html,*/*;q=0.8")
		if page.status != 401 || !strings.Contains(page.text, "<!doctype html>") || page.Get("ETag") != "" {
			t.Errorf("the dashboard without a key: %d %v %s", page.status, page.Header, page.text)
		}

		me := "Headcount-Id: " + s.tab().id
		for body, want := range map[string]int{
			"":                                   400,
			"increment":                          400,
			`{}`:                                 400,
			`{"action":"reset"}`:                 400,
			`{"Action":"increment"}`:             400,
			`{"x":[1,{}],"action":"increment"}`:  400,
			" {\n\"action\": \"decrement\"}\r\n": 200,
			incrementBody + strings.Repeat(" ", 4096-len(incrementBody)): 200,
			incrementBody + strings.Repeat(" ", 4097-len(incrementBody)): 413,
			incrementBody + strings.Repeat(" ", 1<<19):                   413,
		} {
			if g := s.do("PUT", "/p/counter", body, me); want == 200 && g.status != 200 {
				t.Errorf("%.40q: %d %s", body, g.status, g.text)
			} else if want != 200 {
				g.problem(t, fmt.Sprintf("%.40q", body), want)
			}
		}
	})
}

// A refused call about follows and unread counts has no effect.
func TestCallsAboutUnreadThatAreRefused(t *testing.T) {
	const key, evil = "X-API-Key: k", "Origin: https://evil.example"
	large := `{"x":"` + strings.Repeat("x", 4096) + `"}`
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		me := "Headcount-Id: " + s.tab().id
		for _, tc := range []struct {
			call, body string
			status     int
			header     string
		}{
			{"PUT /-/me/follows/*", "", 400, ""},
			{"PUT /-/me/follows/-", "", 400, ""},
			{"PUT /-/me/follows/a%07", "", 400, ""},
			{"DELETE /-/me/follows/*", "", 400, ""},
			{"PUT /-/me/follows/p", "yes", 400, ""},
			{"PUT /-/me/follows/p", large, 413, ""},
			{"POST /-/me/follows/p", "", 405, ""},
			{"PUT /-/me/follows/", "", 404, ""},
			{"PUT /-/me/unread", "", 400, ""},
			{"PUT /-/me/unread", incrementBody, 400, ""},
			{"PUT /-/me/unread", `{"action":"reset","page":"*"}`, 400, ""},
			{"PUT /-/me/unread", `{"action":"reset","page":null}`, 400, ""},
			{"PUT /-/me/unread", `{"action":"reset","pages":["p"]}`, 400, ""},
			{"DELETE /-/me/unread", "", 405, ""},
			{"PUT /-/me/follows", "", 405, ""},
			{"GET /-/me/follows?after=%zz", "", 400, ""},
			{"DELETE /-/me/notifications/*", "", 400, ""},
			{"POST /*/changes", "", 400, key},
			{"POST /-/changes", "", 400, key},
			{"POST /p/changes", `{"by":""}`, 400, key},
			{"POST /p/changes", `{"by":"` + strings.Repeat("x", 257) + `"}`, 400, key},
			{"POST /p/changes", large, 413, key},
			{"POST /p/changes", "", 400, key + "\nIdempotency-Key: "},
			{"POST /p/changes", "", 400, key + "\nIdempotency-Key: a\nIdempotency-Key: b"},
			{"POST /p/changes", "", 400, key + "\nIdempotency-Key: " + strings.Repeat("k", 256)},
			{"GET /p/changes", "", 405, ""},
			{"GET /-/users/a%07/unread", "", 400, key},
			{"PUT /-/me/follows/p", "", 403, evil},
			{"DELETE /-/me/follows/p", "", 403, evil},
			{"POST /p/changes", "", 403, key + "\n" + evil},
			{"PUT /-/me/unread", `{"action":"reset"}`, 403, "Origin: null"},
		} {
			method, path, _ := strings.Cut(tc.call, " ")
			headers := []string{me}
			if tc.header != "" {
				headers = append(headers, strings.Split(tc.header, "\n")...)
			}
			g := s.do(method, path, tc.body, headers...)
			g.problem(t, fmt.Sprintf("%s %.30s %q", tc.call, tc.body, tc.header), tc.status)
		}

		// Each refused call named this visitor, so a change by any of them shows here.
		if g := s.do("GET", "/-/me/follows", "", me); strings.TrimSpace(g.text) != `{"follows":[]}` {
			t.Errorf("a refused call changed the follows: %s", g.text)
		}
		if g := s.do("DELETE", "/-/me/follows/never%20followed", "", me); g.status != http.StatusNoContent {
			t.Errorf("DELETE of a page that was never followed: %d %s, want 204", g.status, g.text)
		}
	})
}

// A bad handshake is refused with its fault. A good one negotiates our subprotocol, or none.
func TestHandshakes(t *testing.T) {
	const (
		head    = "GET /-/ws HTTP/1.1\r\nHost: x\r\n"
		ask     = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
		version = "Sec-WebSocket-Version: 13\r\n"
		key     = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
		rest    = ask + version + key
		offer   = head + rest + "Sec-WebSocket-Protocol: "
	)
	inMemory(t, nil, func(t *testing.T, s *served) {
		for name, tc := range map[string]struct {
			request  string
			want     int
			protocol string
		}{
			"no subprotocol":    {head + rest, 101, ""},
			"ours among others": {offer + "other, headcount.v1, headcount.v2\r\n", 101, "headcount.v1"},
			"others alone":      {offer + "mqtt, headcount.v2, headcount.v11, headcount\r\n", 400, ""},
			"several tokens": {
				head + "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\n" + version + key, 101, "",
			},
			"no upgrade":              {head, 426, ""},
			"upgrade to another":      {head + "Connection: Upgrade\r\nUpgrade: h2c\r\n", 426, ""},
			"without Connection":      {head + "Upgrade: websocket\r\n" + version + key, 426, ""},
			"HTTP/1.0":                {strings.Replace(head, "1.1", "1.0", 1) + rest, 426, ""},
			"version 8":               {head + ask + "Sec-WebSocket-Version: 8\r\n" + key, 400, ""},
			"no version":              {head + ask + key, 400, ""},
			"no key":                  {head + ask + version, 400, ""},
			"a short key":             {head + ask + version + "Sec-WebSocket-Key: YQ==\r\n", 400, ""},
			"a key that is none":      {head + ask + version + "Sec-WebSocket-Key: !\r\n", 400, ""},
			"a POST":                  {"POST" + head[3:] + "Content-Length: 0\r\n" + rest, 405, ""},
			"an upgrade of a counter": {strings.Replace(head, "/-/ws", "/p/counter", 1) + rest, 200, ""},
		} {
			r := s.raw(tc.request + "\r\n")
			h := r.response(tc.want).Header
			if h.Get("Sec-WebSocket-Protocol") != tc.protocol || h.Get("Sec-WebSocket-Extensions") != "" {
				t.Errorf("%s: the headers are %v, want the subprotocol %q and no extensions", name, h, tc.protocol)
			}

			if tc.want < 400 {
				_ = r.Close()
				continue
			}
			if h.Get("Content-Type") != "application/problem+json" || h["Set-Cookie"] != nil ||
				tc.want == 426 && !strings.EqualFold(h.Get("Upgrade"), "websocket") {
				t.Errorf("%s: the refusal has the headers %v", name, h)
			}

			_ = r.Close()
		}
	})
}

// The headers of an upgrade mean nothing to a call that opens no WebSocket, so they spare it no check.
func TestUpgradeHeadersSpareNoCheck(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		const hold = `{"action":"increment"}`
		for _, call := range []struct{ method, path, body string }{
			{"PUT", "/p/counter", hold}, {"GET", "/p/counter", ""}, {"GET", "/app/counter", ""},
			{"POST", "/api/v1/counters/views:1/increment", ""},
		} {
			lines := upgrade("X-API-Key: wrong")
			s.do(call.method, call.path, call.body, lines...).problem(t, call.method+" "+call.path, 401)
		}

		if n := s.count("p"); n != 0 {
			t.Errorf("%d are counted, want nobody: the server with the wrong key is no visitor", n)
		}
	})
}

// Page ids in paths and queries are equal in any percent-encoding.
func TestPercentEncoding(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		c := s.tab()
		for page, paths := range map[string]string{ // separated by spaces
			"a/b":              "/a%2Fb/counter /a%2fb/counter /-/counters?page=a%2Fb /-/counters?page=a/b",
			"a+b":              "/a+b/counter /a%2Bb/counter /-/counters?page=a%2Bb",
			"a b":              "/a%20b/counter /-/counters?page=a+b /-/counters?page=a%20b",
			"a%2Fb":            "/a%252Fb/counter /-/counters?page=a%252Fb",
			"ü":                "/%C3%BC/counter /%c3%bc/counter /ü/counter",
			"q":                "/%71/counter /-/counters?%70age=q /-/counters?other=x&page=q&z=1",
			"x/counter/events": "/x%2Fcounter%2Fevents/counter",
			"?":                "/%3F/counter",
			"#":                "/%23/counter",
			"a;b":              "/a;b/counter /-/counters?page=a%3Bb",
			"a&b":              "/a&b/counter?page=q /-/counters?page=a%26b",
			"a=b":              "/a=b/counter /-/counters?page=a=b",
			"*":                "/*/counter /%2A/counter /%2a/counter /-/counters?page=* /-/counters?page=%2A",
		} {
			// A page whose name was decoded wrongly would have nobody on it.
			if page != "*" {
				c.join(page)
				c.awaitCount(page, 1)
			}

			name := `"page":"` + page + `"`
			for path := range strings.FieldsSeq(paths) {
				g := s.do("GET", path, "")
				if g.status != http.StatusOK || !strings.Contains(g.text, name) ||
					page != "*" && !strings.Contains(g.text, name+`,"count":1,`) {
					t.Errorf("%s: want the page %s, got %d %s", path, name, g.status, g.text)
				}
			}
		}

		if e := s.stream("/%2A/counter/events").takeCount(1); e.Page != "*" {
			t.Errorf("the event is %s, want the page *", e.data)
		}

		for status, paths := range map[int]string{
			http.StatusBadRequest: "/-/counter /%2D/counter /./counter /%2E/counter /../counter /%2e%2E/counter " +
				"//counter /%FF/counter /a%00b/counter " +
				"/-/counter/events /-/counters /-/counters?page=a&page= /-/counters?page=- /-/counters?page=%FF " +
				"/-/counters?page=%zz /-/counters?Page=a",
			http.StatusNotFound: "/a/b/counter /a /a/ /a/counter/ /a/counters /-/nothing /counter " +
				"/a/counter/event /a/counter/events/ /-/ws/ /-/counters/",
		} {
			for path := range strings.FieldsSeq(paths) {
				s.do("GET", path, "").problem(t, path, status)
			}
		}

		for _, target := range []string{"/%zz/counter", "/100%/counter", "/%2/counter"} {
			r := s.raw("GET " + target + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
			r.response(http.StatusBadRequest)
		}
	})
}

// Every way in applies the rules of page ids. The rules themselves are tested in package presence.
func TestPageIDs(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		for _, page := range []string{
			strings.Repeat("😀", 128), " a  b ", "a%2Fb", "-/ws", "می\u200Cخواهم", "ABC", "caf\u00e9", "cafe\u0301",
		} {
			path := "/" + url.PathEscape(page) + "/counter"
			me := s.tab()
			if g := s.do("GET", path, ""); g.Page != page || g.Count != 0 || g.Version != "0-0" {
				t.Errorf("before anybody came: %d %s, want count 0 of version 0-0", g.status, g.text)
			}

			me.join(page)
			me.takeCount(page, 1)
			if e := s.stream(path + "/events").takeCount(1); e.Page != page {
				t.Errorf("the event is %s, want page %q", e.data, page)
			}
			if g := s.do("GET", "/-/counters?page="+url.QueryEscape(page), ""); !strings.Contains(g.text, `"count":1`) {
				t.Errorf("/-/counters has %s, want count 1", g.text)
			}

			g := s.do("PUT", path, incrementBody, "Headcount-Id: "+me.id)
			if g.Page != page || g.Count != 1 {
				t.Errorf("PUT is answered %s, want count 1 of %q", g.text, page)
			}
		}

		for _, page := range []string{"", "-", ".", strings.Repeat("😀", 129), "\u200Da", "a\x00b", "*"} {
			path := "/" + url.PathEscape(page) + "/counter"
			me := s.tab()
			s.do("PUT", path, incrementBody, "Headcount-Id: "+me.id).problem(t, path, http.StatusBadRequest)

			// A refused id must be refused by every message, or a client could join what no call can read.
			types := []string{"join", "leave"}
			if page != "*" { // the total of the site can be read
				for _, path := range []string{path, path + "/events", "/-/counters?page=" + url.QueryEscape(page)} {
					s.do("GET", path, "").problem(t, path, http.StatusBadRequest)
				}

				types = append(types, "subscribe", "unsubscribe")
			}
			for _, kind := range types {
				me.say(`{"type":"` + kind + `","page":` + quoted(page) + `,"pages":[` + quoted(page) + `]}`)
				me.takeError("bad_page")
			}
		}
	})
}

// A connection has at most 100 topics, each counted once, whether it joined or subscribed. A frame that exceeds the
// limit changes nothing.
func TestHundredPages(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		c := s.tab()
		page := func(i int) string { return fmt.Sprint("p", i) }
		var all []string
		for i := range 99 {
			all = append(all, page(i))
		}
		for _, p := range all[:49] {
			c.join(p)
			c.awaitCount(p, 1)
		}

		c.subscribe("*")
		c.subscribe(append(all[20:], all[60:]...)...) // neither joined pages nor pages named twice count again
		c.awaitCount(page(98), 0)

		refused := func(p string) {
			t.Helper()
			f := c.take("a refusal")
			for f.Type == "count" && f.Page != p {
				f = c.take("a refusal")
			}
			if f.Code != "too_many_pages" || f.Page != "" && f.Page != p {
				t.Errorf("%s: got %s, want too_many_pages about this page", p, f.text)
			}
		}

		// 99 pages and the total of the site are 100 topics, so a further page is refused.
		c.join(page(100))
		refused(page(100))
		c.say(`{"type":"unsubscribe","pages":["p98"]}`)
		c.subscribe(page(97), page(101), page(102)) // one would fit, but not both, so nothing changes
		refused(page(102))

		for range 2 {
			c.join(page(101)) // the second time it is already one of the 100
			c.awaitCount(page(101), 1)
		}

		c.leave(page(20)) // the page stays by its earlier subscription
		c.awaitCount(page(20), 0)
		c.join(page(102))
		refused(page(102))

		// Without the subscription the page is gone, and another one fits.
		c.say(`{"type":"unsubscribe","pages":["p20"]}`)
		c.join(page(102))
		c.awaitCount(page(102), 1)
	})
}

// The twentieth error closes the connection, whatever the errors are, and whatever good frames come between them.
func TestTwentiethErrorCloses(t *testing.T) {
	visits(t, 0, nil, func(t *testing.T, s *served) {
		c := s.tab()
		bad := []struct{ frame, code string }{
			{`{`, "bad_json"}, {`{"type":"x"}`, "bad_type"}, {`{"type":"join","page":""}`, "bad_page"},
		}
		// A good frame between two errors must not set their number back, or a client could make errors without end.
		for i := range 19 {
			c.say(bad[i%3].frame)
			c.takeError(bad[i%3].code)
			c.silent()
		}

		c.say(`{`)
		c.takeError("bad_json")
		c.takeError("too_many_errors")
		c.expectClose(websocket.StatusPolicyViolation)
	})
}

// The metrics count the error that ends a connection like any other.
func TestTheErrorsThatEndConnectionsAreCounted(t *testing.T) {
	reg := prometheus.NewRegistry()
	visits(t, 0, func(cfg *Config) { cfg.Registerer = reg }, func(t *testing.T, s *served) {
		c := s.tab()
		for range 20 {
			c.say(`{`)
			c.takeError("bad_json")
		}
		c.takeError("too_many_errors")

		s.tab()
		s.expire()

		for metric, label := range map[string]string{
			"headcount_client_errors_total": calls.CodeTooManyErrors,
			"headcount_limits_hit_total":    "errors",
		} {
			if n := counted(t, reg, metric, label); n != 1 {
				t.Errorf("%s of %s is %v, want 1", metric, label, n)
			}
		}
		if n := counted(t, reg, "headcount_client_errors_total", calls.CodeTokenExpired); n != 1 {
			t.Errorf("%v errors were because of a token that has expired, want 1", n)
		}
	})
}

// A caller without an identity may make 10 requests a second, and 100 at once.
func TestPutWithoutIdentityIsLimited(t *testing.T) {
	proxies, err := identity.NewProxies([]string{"127.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}

	visits(t, 0, func(cfg *Config) { cfg.Proxies = proxies }, func(t *testing.T, s *served) {
		put := func(lines ...string) got { return s.do("PUT", "/p/counter", incrementBody, lines...) }
		first := put()
		passed := 0
		last := first
		for last.status == http.StatusOK && passed < 1000 {
			passed++
			last = put()
		}

		if passed < 100 || passed > 101 { // no time has passed
			t.Errorf("%d passed, want 100", passed)
		}

		last.problem(t, "one more", http.StatusTooManyRequests)
		if last.Get("Set-Cookie") != "" || last.Get("RateLimit-Policy") != `"default";q=100;w=10` {
			t.Errorf("the refusal has the headers %v, want no cookie and the policy of 100 in 10 s", last.Header)
		}

		// A renewal makes nobody new, so a visitor who is here already is not punished for the flood of others behind
		// the same address.
		if g := put("Headcount-Id: " + first.Get("Headcount-Id")); g.Count != passed {
			t.Errorf("a caller that renews its hold gets %s, want the count %d", g.text, passed)
		}

		// These two have no hold yet. An id that costs nothing to get must not be a way around the limit.
		put("Headcount-Id: "+s.tab().id).problem(t, "an identity made for a WebSocket", http.StatusTooManyRequests)
		put("Headcount-Id: forged.forged", "Cookie: headcount_id=x").problem(t, "a forged identity",
			http.StatusTooManyRequests)
		for _, another := range []string{"192.0.2.7", "198.51.100.1, 127.0.0.1"} {
			if g := put("X-Forwarded-For: " + another); g.status != http.StatusOK {
				t.Errorf("another address, %s: %d %s, want 200", another, g.status, g.text)
			}
		}

		// After the seconds in Retry-After the next call is accepted.
		wait, _ := strconv.Atoi(last.Get("Retry-After"))
		time.Sleep(time.Duration(wait) * time.Second)
		if g := put(); wait < 1 || g.status != http.StatusOK {
			t.Errorf("after Retry-After, %d s: %d %s, want 200", wait, g.status, g.text)
		}
	})
}

// A back end says who is on a page, at any rate. A user who is present by its word and by a connection counts once, and
// a user whom it removes is gone.
func TestBackEndsSayWhoIsHere(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		defer s.dispatch()()
		const key = "X-API-Key: k"
		page := func(user, page string) string { return "/-/users/" + user + "/pages/" + page }
		alice := s.tab()
		user := url.PathEscape(alice.user)
		for _, step := range []struct {
			method, user, body string
			want               int
		}{
			{"PUT", user, "", 1},
			{"PUT", user, "{}", 1},
			{"join", "", "", 1},
			{"PUT", "al%2Fice", "", 2},
			{"DELETE", "al%2Fice", "", 1},
			{"DELETE", "al%2Fice", "", 1}, // this user is not here
			{"DELETE", user, "", 1},       // the user stays by a connection
		} {
			if step.method == "join" {
				alice.join("p")
				alice.takeCount("p", step.want)
				continue
			}
			g := s.do(step.method, page(step.user, "p"), step.body, key)
			if g.status != http.StatusOK || g.Count != step.want || g.Page != "p" {
				t.Errorf("%s %s: %d %s, want %d", step.method, step.user, g.status, g.text, step.want)
			}
		}

		// The hold was removed before, and now the connection leaves, so the page must be empty at the end.
		alice.leave("p")

		for _, bad := range []struct {
			method, path, body, header string
			status                     int
		}{
			{"PUT", page("alice", "p"), "", "", 401},
			{"DELETE", page("alice", "p"), "", "X-API-Key: wrong", 401},
			{"PUT", page("alice", "*"), "", key, 400},
			{"PUT", page("a%07", "p"), "", key, 400},
			{"PUT", page("alice", "p"), `{"page":"q"}`, key, 400},
			{"PUT", page("alice", "p"), "[]", key, 400},
			{"GET", page("alice", "p"), "", key, 405},
		} {
			s.do(bad.method, bad.path, bad.body, bad.header).problem(t, bad.method+" "+bad.path, bad.status)
		}

		const many = 150 // more than one address may hold by PUT at once
		for i := range many {
			if g := s.do("PUT", page(fmt.Sprint("user-", i), "full"), "", key); g.Count != i+1 {
				t.Errorf("user %d: %d %s, want the next count", i, g.status, g.text)
			}
		}

		time.Sleep(time.Minute) // holds end before that
		if full, p := s.count("full"), s.count("p"); full != 0 || p != 0 {
			t.Errorf("%d and %d users are counted after their holds ended, want 0 and 0", full, p)
		}
	})
}

// A stream of a top list begins with the list, and sends it again after changes, at most once a second. Invalid lists
// are refused before the stream begins.
func TestTopEvents(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		add := func(key string, delta int) {
			g := s.do("POST", "/api/v1/counters/"+key+"/increment", fmt.Sprint(`{"delta":`, delta, `}`), serverKey)
			if g.status != http.StatusOK {
				t.Fatalf("the increment is answered %d %s, want 200", g.status, g.text)
			}
		}

		add("views:a", 2)
		st := s.stream("/api/v1/top/events?match=views:*&last=1h&n=2")
		const form = `{"match":"views:*","last":"1h","top":[%s{"key":"views:a","value":2}]}`
		if e := st.take(); e.name != "top" || e.data != fmt.Sprintf(form, "") {
			t.Fatalf("the stream begins with %s, want an empty list", e.data)
		}

		last, value := time.Now(), 0
		for _, delta := range []int{3, 5} {
			for range 10 { // one event, or several
				add("views:b", delta)
				value += delta
			}

			want := fmt.Sprintf(form, fmt.Sprintf(`{"key":"views:b","value":%d},`, value))
			// The list may be sent between two increments, so events are read until the last increment is in one.
			for data := ""; data != want; {
				data = st.take().data
				if apart := time.Since(last); value > 30 && apart < 900*time.Millisecond {
					t.Errorf("only %s after another event: %s", apart, data)
				}

				last = time.Now()
			}
		}

		for _, query := range []string{
			"", "?match=views:*", "?match=none:*&last=1h", "?match=views:*&last=1000d", "?match=views:*&last=1h&n=101",
		} {
			s.do("GET", "/api/v1/top/events"+query, "").problem(t, query, http.StatusBadRequest)
		}
	})
}
