package e2e

import (
	"net/http"
	"strings"
	"testing"
)

// Every way in checks the origin, with the scheme that a trusted proxy names. The matching of origins and the headers
// of each status are tested in gateway/identity and gateway/httppolicy.
func TestServerOrigins(t *testing.T) {
	t.Parallel()
	plain := start(t, "--leave-grace=0s")
	some := start(t, "--leave-grace=0s", "--allow-origins=https://site.example,http://*.wild.example:8000",
		"--allow-origins=https://*.deep.example", "--trusted-proxies=127.0.0.1")

	for _, tc := range []struct {
		s      *server
		origin string
		ok     bool
		more   []string
	}{
		{plain, plain.url, true, nil},
		{plain, "https://site.example", false, nil},
		{plain, "http://site.example:80", true, []string{"Host: site.example"}},
		// The header of a client that the server does not trust.
		{plain, "https://site.example", false, []string{"Host: site.example", "X-Forwarded-Proto: https"}},
		{some, "https://own.example", true, []string{"Host: own.example", "X-Forwarded-Proto: https"}},
		{some, "http://a.wild.example:8000", true, nil},
		{some, "https://a.deep.example", true, nil},
		{some, "null", false, nil},
	} {
		t.Run(tc.origin+strings.Join(tc.more, " "), func(t *testing.T) {
			s := tc.s
			headers := append([]string{"Origin: " + tc.origin}, tc.more...)
			cors := func(what string, h http.Header) {
				t.Helper()
				got := h.Get("Access-Control-Allow-Origin")
				credentials := h.Get("Access-Control-Allow-Credentials")
				allowed := got == tc.origin && credentials == "true"
				silent := got == "" && credentials == ""
				if tc.ok && !allowed || !tc.ok && !silent || !strings.Contains(h.Get("Vary"), "Origin") {
					t.Errorf("%s: CORS headers %v", what, h)
				}
			}

			get := s.get(t, "/p/counter", headers...)
			get.counter(t)
			cors("GET", get.header)
			cors("GET, 400", s.get(t, "/-/counter", headers...).header)

			preflight := do(t, "OPTIONS", s.url+"/p/counter", "",
				append(headers, "Access-Control-Request-Method: PUT")...)
			cors("preflight", preflight.header)

			// Every call that counts somebody is refused.
			if !tc.ok {
				preflight.problem(t, 403)
				s.put(t, "/p/counter", increment, headers...).problem(t, 403)
				s.get(t, "/p/counter/events", headers...).problem(t, 403)
				s.refused(t, dialer{headers: headers}).problem(t, 403)
				do(t, "POST", s.url+"/p/changes", "", headers...).problem(t, 403)
				return
			}

			c := s.dial(t, dialer{headers: headers})
			cors("WebSocket", c.resp.Header)
			me := append(headers, c.as())
			put := s.put(t, "/p/counter", increment, me...)
			put.counter(t)
			cors("PUT", put.header)
			cors("PUT, 404", s.put(t, "/nothing", "", me...).header)
			cors("PUT, 413", s.put(t, "/p/counter", strings.Repeat("x", 5000), me...).header)
			cors("SSE", s.sse(t, "/p/counter/events", me...).resp.Header)
		})
	}
}
