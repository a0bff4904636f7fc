package e2e

import (
	"net/http"
	"strings"
	"testing"
)

func TestOrigins(t *testing.T) {
	t.Parallel()
	plain := start(t, "--leave-grace=0s")
	some := start(t, "--leave-grace=0s", "--allow-origins=https://site.example,http://*.wild.example:8000", "--allow-origins=https://*.deep.example", "--trusted-proxies=127.0.0.1")
	every := start(t, "--leave-grace=0s", "--allow-origins=*")
	for _, tc := range []struct {
		s      *server
		origin string
		ok     bool
		more   []string
	}{
		{plain, plain.url, true, nil},
		{plain, strings.ToUpper(plain.url), true, nil},
		{plain, "https" + strings.TrimPrefix(plain.url, "http"), false, nil},
		{plain, "http://127.0.0.1", false, nil},
		{plain, "https://site.example", false, nil},
		{plain, "null", false, nil},
		{plain, "nonsense", false, nil},
		{plain, "http://site.example", true, []string{"Host: site.example"}},
		{plain, "http://site.example:80", true, []string{"Host: site.example"}},
		{plain, "https://site.example", false, []string{"Host: site.example", "X-Forwarded-Proto: https"}}, // the header of somebody whom the server does not trust
		{some, "https://own.example", true, []string{"Host: own.example", "X-Forwarded-Proto: https"}},
		{some, some.url, true, nil},
		{some, "https://site.example", true, nil},
		{some, "https://SITE.example", true, nil},
		{some, "https://site.example:443", true, nil},
		{some, "https://site.example:444", false, nil},
		{some, "http://site.example", false, nil},
		{some, "https://a.site.example", false, nil},
		{some, "https://site.example.evil.example", false, nil},
		{some, "https://evilsite.example", false, nil},
		{some, "http://a.wild.example:8000", true, nil},
		{some, "http://a.b.c.wild.example:8000", true, nil},
		{some, "http://wild.example:8000", false, nil},
		{some, "http://a.wild.example", false, nil},
		{some, "https://a.wild.example:8000", false, nil},
		{some, "http://awild.example:8000", false, nil},
		{some, "https://a.deep.example", true, nil},
		{some, "https://a.deep.example.evil.example", false, nil},
		{some, "https://a.deep.example/", false, nil},
		{some, "https://evil.example https://site.example", false, nil},
		{some, "null", false, nil},
		{every, "https://anything.example:1234", true, nil},
		{every, "null", false, nil},
		{every, "file://", false, nil},
	} {
		name := tc.origin + strings.Join(tc.more, " ")
		t.Run(name, func(t *testing.T) {
			s := tc.s
			headers := append([]string{"Origin: " + tc.origin}, tc.more...)
			cors := func(what string, h http.Header, want bool) {
				t.Helper()
				got, credentials := h.Get("Access-Control-Allow-Origin"), h.Get("Access-Control-Allow-Credentials")
				if want && (got != tc.origin || credentials != "true") || !want && (got != "" || credentials != "") {
					t.Errorf("%s: CORS headers %q, %q; allowed: %t", what, got, credentials, want)
				}
				if !strings.Contains(h.Get("Vary"), "Origin") {
					t.Errorf("%s: Vary %q", what, h.Get("Vary"))
				}
			}
			get := s.get(t, "/p/counter", headers...)
			get.counter(t)
			cors("GET", get.header, tc.ok)
			if vary := get.header.Get("Vary"); !strings.HasPrefix(vary, "Accept, Accept-Encoding") {
				t.Errorf("Vary %q", vary)
			}
			counters := s.get(t, "/-/counters?page=p", headers...)
			cors("GET counters", counters.header, tc.ok)
			missing := s.get(t, "/-/counter", headers...)
			missing.problem(t, 400)
			cors("GET, 400", missing.header, tc.ok)

			preflight := do(t, "OPTIONS", s.url+"/p/counter", "", append(headers, "Access-Control-Request-Method: PUT", "Access-Control-Request-Headers: content-type,headcount-id,authorization")...)
			if !tc.ok {
				preflight.problem(t, 403)
				cors("preflight", preflight.header, false)
				s.put(t, "/p/counter", increment, headers...).problem(t, 403)
				s.get(t, "/p/counter/events", headers...).problem(t, 403)
				s.refused(t, dialer{headers: headers}).problem(t, 403)
				for _, method := range []string{"POST", "DELETE"} {
					do(t, method, s.url+"/p/changes", "", headers...).problem(t, 403)
				}
				return
			}
			cors("preflight", preflight.header, true)
			if preflight.status != 204 && preflight.status != 200 || !strings.Contains(preflight.header.Get("Access-Control-Allow-Methods"), "PUT") {
				t.Errorf("preflight: %d %v", preflight.status, preflight.header)
			}
			for _, name := range []string{"content-type", "headcount-id", "authorization"} {
				if !strings.Contains(strings.ToLower(preflight.header.Get("Access-Control-Allow-Headers")), name) {
					t.Errorf("preflight allows no %s: %q", name, preflight.header.Get("Access-Control-Allow-Headers"))
				}
			}
			c := s.dial(t, dialer{headers: headers})
			me := append(headers, "Headcount-Id: "+c.id)
			put := s.put(t, "/p/counter", increment, me...)
			put.counter(t)
			cors("PUT", put.header, true)
			bad := s.put(t, "/p/counter", "nonsense", me...)
			bad.problem(t, 400)
			cors("PUT, 400", bad.header, true)
			gone := s.put(t, "/nothing", "", me...)
			gone.problem(t, 404)
			cors("PUT, 404", gone.header, true)
			wrong := do(t, "DELETE", s.url+"/p/counter", "", me...)
			wrong.problem(t, 405)
			cors("DELETE, 405", wrong.header, true)
			large := s.put(t, "/p/counter", strings.Repeat("x", 5000), me...)
			large.problem(t, 413)
			cors("PUT, 413", large.header, true)
			st := s.sse(t, "/p/counter/events", me...)
			cors("SSE", st.resp.Header, true)
			if e := st.take(); e.Count < 1 {
				t.Errorf("%s", e.data)
			}
			cors("WebSocket", c.resp.Header, true)
		})
	}
	if a := plain.put(t, "/p/counter", increment); a.status != 200 || a.header.Get("Access-Control-Allow-Origin") != "" {
		t.Errorf("without an Origin: %d %v", a.status, a.header)
	}
}
