package gateway

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
	"pgregory.net/rapid"
)

func newTestOrigins(t testing.TB, patterns ...string) *Origins {
	t.Helper()
	o, err := NewOrigins(patterns)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

func TestNewOriginsRefusesPatterns(t *testing.T) {
	for pattern, mend := range map[string]string{
		"example.com":               "https://example.com",
		"//example.com":             "scheme",
		"://example.com":            "scheme",
		"*://example.com":           "one pattern for http:// and one for https://",
		"ht tp://example.com":       "scheme",
		"https://":                  "host",
		"https://:443":              "host",
		"https://example.com/":      "path",
		"https://example.com/app":   "path",
		"https://example.com?x":     "path",
		"https://user@example.com":  "user",
		"https://example.com:":      "port",
		"https://example.com:*":     "one pattern per port",
		"https://example.com:0":     "host",
		"https://example.com:65536": "host",
		"https://example.com:x":     "host",
		"https://a*.example.com":    "https://*.example.com",
		"https://*example.com":      "https://*.example.com",
		"https://**.example.com":    "https://*.example.com",
		"https://*..example.com":    "https://*.example.com",
		"https://.*":                "https://*.example.com",
		"https://exämple.com":       "xn--",
		"https://[::1":              "host",
		"https://[::*]":             "host",
		"https://[1.2.3.4]":         "host",
		"https://exa mple.com":      "host",
		"null":                      "never allowed",
		"Null":                      "never allowed",
		"https://a.com\nhttps://b":  "host",
	} {
		_, err := NewOrigins([]string{"https://good.example", pattern})
		if err == nil {
			t.Errorf("NewOrigins(%q) accepted", pattern)
			continue
		}
		text := err.Error()
		if !strings.HasPrefix(text, "allow-origins: ") || !strings.Contains(text, mend) || strings.Contains(text, "\n") {
			t.Errorf("NewOrigins(%q) = %s; want the mend %q", pattern, text, mend)
		}
	}
}

func TestAllowed(t *testing.T) {
	type call struct {
		origin, host string
		secure, want bool
	}
	for name, tc := range map[string]struct {
		patterns []string
		calls    []call
	}{
		"same origin": {nil, []call{
			{"", "example.com", false, true},
			{"http://example.com", "example.com", false, true},
			{"http://example.com", "example.com:80", false, true},
			{"http://example.com:80", "example.com", false, true},
			{"https://example.com", "example.com", true, true},
			{"https://example.com", "example.com:443", true, true},
			{"HTTP://Example.COM", "example.com", false, true},
			{"http://example.com", "EXAMPLE.com", false, true},
			{"http://localhost:8080", "localhost:8080", false, true},
			{"http://[::1]:8080", "[::1]:8080", false, true},
			{"http://[0:0::1]:8080", "[::1]:8080", false, true},
			{"http://example.com.", "example.com.", false, true},
			{"https://example.com", "example.com", false, false},
			{"http://example.com", "example.com", true, false},
			{"http://example.com:443", "example.com", true, false},
			{"http://example.com:8080", "example.com", false, false},
			{"http://localhost:8081", "localhost:8080", false, false},
			{"http://127.0.0.1:8080", "localhost:8080", false, false},
			{"http://a.example.com", "example.com", false, false},
			{"http://example.com.evil.test", "example.com", false, false},
			{"http://example.com.", "example.com", false, false},
			{"null", "example.com", false, false},
			{"null", "null", false, false},
			{"", "", false, true},
			{"http://", "", false, false},
			{"http://example.com/", "example.com", false, false},
			{"http://user@example.com", "example.com", false, false},
			{"http://example.com http://evil.test", "example.com", false, false},
			{"http://example.com, http://evil.test", "example.com", false, false},
			{"http:example.com", "example.com", false, false},
			{"http://example.com:080", "example.com", false, false},
			{"http://" + strings.Repeat("a", maxOrigin), strings.Repeat("a", maxOrigin), false, false},
		}},
		"exact": {[]string{" https://A.example ,http://b.example:3000", "https://c.example:443", "capacitor://localhost", "http://[::1]:3000"}, []call{
			{"https://a.example", "x", false, true},
			{"https://a.example:443", "x", false, true},
			{"http://a.example", "x", false, false},
			{"https://a.example:8443", "x", false, false},
			{"https://a.example.", "x", false, false},
			{"https://x.a.example", "x", false, false},
			{"http://b.example:3000", "x", false, true},
			{"http://b.example", "x", false, false},
			{"https://c.example", "x", false, true},
			{"capacitor://localhost", "x", false, true},
			{"http://[0::1]:3000", "x", false, true},
			{"http://x", "x", false, true},
			{"null", "x", false, false},
		}},
		"labels": {[]string{"https://*.example.com", "http://*.a.*.test:8000", "https://x.*"}, []call{
			{"https://a.example.com", "h", false, true},
			{"https://a.b.example.com", "h", false, true},
			{"https://A.Example.Com:443", "h", false, true},
			{"https://example.com", "h", false, false},
			{"https://aexample.com", "h", false, false},
			{"https://.example.com", "h", false, false},
			{"https://a..example.com", "h", false, false},
			{"https://a.example.com.", "h", false, false},
			{"https://a.example.com.evil.test", "h", false, false},
			{"http://a.example.com", "h", false, false},
			{"https://a.example.com:8443", "h", false, false},
			{"http://1.a.2.test:8000", "h", false, true},
			{"http://1.a.a.a.2.test:8000", "h", false, true},
			{"http://a.a.a.test:8000", "h", false, true},
			{"http://a.a.test:8000", "h", false, false},
			{"http://1.a.test:8000", "h", false, false},
			{"http://1.a.2.test", "h", false, false},
			{"https://x.y.z", "h", false, true},
			{"https://x", "h", false, false},
		}},
		"a scheme": {[]string{"https://*"}, []call{
			{"https://a", "h", false, true},
			{"https://a.b.c", "h", false, true},
			{"https://127.0.0.1", "h", false, true},
			{"https://[::1]", "h", false, true},
			{"http://a", "h", false, false},
			{"https://a:1", "h", false, false},
			{"null", "h", false, false},
		}},
		"everyone": {[]string{"*"}, []call{
			{"https://a.example", "h", false, true},
			{"http://[::1]:1", "h", false, true},
			{"chrome-extension://abcdef", "h", false, true},
			{"null", "h", false, false},
			{"NULL", "h", false, false},
			{"file://", "h", false, false},
			{"nonsense", "h", false, false},
			{"http://a\r\nX: y", "h", false, false},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newTestOrigins(t, tc.patterns...)
			for _, c := range tc.calls {
				r := &http.Request{Host: c.host, Header: http.Header{}}
				if c.origin != "" {
					r.Header.Set("Origin", c.origin)
				}
				if got := o.Allowed(r, c.secure); got != c.want {
					t.Errorf("origin %q, host %q, secure %v: %v", c.origin, c.host, c.secure, got)
				}
			}
		})
	}
	two := &http.Request{Host: "a", Header: http.Header{"Origin": {"http://a", "http://a"}}}
	if newTestOrigins(t, "*").Allowed(two, false) {
		t.Error("two Origin headers are allowed")
	}
}

// newOriginServer answers as a gateway might, behind the middleware.
func newOriginServer(t testing.TB, secure bool, patterns ...string) http.Handler {
	gin.SetMode(gin.TestMode)
	e := gin.New()
	e.UseEscapedPath = true
	e.HandleMethodNotAllowed = true
	e.Use(newTestOrigins(t, patterns...).Middleware(func(*http.Request) bool { return secure }))
	ok := func(c *gin.Context) { c.String(http.StatusOK, "done") }
	e.GET("/", ok)
	e.GET("/:page/counter", func(c *gin.Context) {
		addVary(c.Writer.Header(), "Accept", "Accept-Encoding")
		ok(c)
	})
	e.PUT("/:page/counter", ok)
	e.POST("/:page/changes", ok)
	e.DELETE("/:page/follow", ok)
	e.GET("/:page/counter/events", ok)
	e.GET("/-/ws", ok)
	e.NoRoute(func(c *gin.Context) { writeProblem(c.Writer, http.StatusNotFound, "") })
	e.NoMethod(func(c *gin.Context) { writeProblem(c.Writer, http.StatusMethodNotAllowed, "") })
	return e
}

func TestMiddleware(t *testing.T) {
	h := newOriginServer(t, false, "https://ok.example")
	const ok, evil, own = "https://ok.example", "https://evil.example", "http://gw.example"
	for name, tc := range map[string]struct {
		method, path, origin string
		headers              []string // name, value pairs
		status               int
		cors                 bool
		vary                 string
	}{
		"GET, no origin":            {"GET", "/p/counter", "", nil, 200, false, "Accept, Accept-Encoding"},
		"GET of a page, no origin":  {"GET", "/", "", nil, 200, false, "Origin"},
		"GET, allowed":              {"GET", "/p/counter", ok, nil, 200, true, "Accept, Accept-Encoding, Origin"},
		"GET, own":                  {"GET", "/p/counter", own, nil, 200, true, "Accept, Accept-Encoding, Origin"},
		"GET, not allowed":          {"GET", "/p/counter", evil, nil, 200, false, "Accept, Accept-Encoding, Origin"},
		"GET, null":                 {"GET", "/p/counter", "null", nil, 200, false, "Accept, Accept-Encoding, Origin"},
		"PUT, no origin":            {"PUT", "/p/counter", "", nil, 200, false, ""},
		"PUT, allowed":              {"PUT", "/p/counter", ok, nil, 200, true, "Origin"},
		"PUT, own":                  {"PUT", "/p/counter", own, nil, 200, true, "Origin"},
		"PUT, not allowed":          {"PUT", "/p/counter", evil, nil, 403, false, "Origin"},
		"PUT, own under https":      {"PUT", "/p/counter", "https://gw.example", nil, 403, false, "Origin"},
		"PUT, null":                 {"PUT", "/p/counter", "null", nil, 403, false, "Origin"},
		"POST, not allowed":         {"POST", "/p/changes", evil, nil, 403, false, "Origin"},
		"DELETE, not allowed":       {"DELETE", "/p/follow", evil, nil, 403, false, "Origin"},
		"DELETE, allowed":           {"DELETE", "/p/follow", ok, nil, 200, true, "Origin"},
		"PATCH, not allowed":        {"PATCH", "/p/counter", evil, nil, 403, false, "Origin"},
		"events, allowed":           {"GET", "/p/counter/events", ok, nil, 200, true, "Origin"},
		"events, not allowed":       {"GET", "/p/counter/events", evil, nil, 403, false, "Origin"},
		"events, no origin":         {"GET", "/p/counter/events", "", nil, 200, false, "Origin"},
		"WebSocket, not allowed":    {"GET", "/-/ws", evil, nil, 403, false, "Origin"},
		"WebSocket, null":           {"GET", "/-/ws", "null", nil, 403, false, "Origin"},
		"WebSocket, own":            {"GET", "/-/ws", own, nil, 200, true, "Origin"},
		"upgrade elsewhere":         {"GET", "/", evil, []string{"Upgrade", "websocket"}, 403, false, "Origin"},
		"page named like events":    {"GET", "/a%2Fcounter%2Fevents/counter", evil, nil, 200, false, "Accept, Accept-Encoding, Origin"},
		"404, allowed":              {"GET", "/no/such/thing", ok, nil, 404, true, "Origin"},
		"404, not allowed":          {"GET", "/no/such/thing", evil, nil, 404, false, "Origin"},
		"405, allowed":              {"PATCH", "/p/counter", ok, nil, 405, true, "Origin"},
		"OPTIONS, no preflight":     {"OPTIONS", "/p/counter", "", nil, 405, false, ""},
		"OPTIONS, evil, no request": {"OPTIONS", "/p/counter", evil, nil, 405, false, "Origin"},
		"preflight, allowed":        {"OPTIONS", "/p/counter", ok, []string{"Access-Control-Request-Method", "PUT"}, 204, true, "Origin"},
		"preflight, own":            {"OPTIONS", "/p/counter", own, []string{"Access-Control-Request-Method", "PUT"}, 204, true, "Origin"},
		"preflight, not allowed":    {"OPTIONS", "/p/counter", evil, []string{"Access-Control-Request-Method", "PUT"}, 403, false, "Origin"},
		"preflight, null":           {"OPTIONS", "/p/counter", "null", []string{"Access-Control-Request-Method", "GET"}, 403, false, "Origin"},
	} {
		t.Run(name, func(t *testing.T) {
			r := httptest.NewRequest(tc.method, "http://gw.example"+tc.path, nil)
			if tc.origin != "" {
				r.Header.Set("Origin", tc.origin)
			}
			for i := 0; i < len(tc.headers); i += 2 {
				r.Header.Set(tc.headers[i], tc.headers[i+1])
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != tc.status {
				t.Fatalf("status %d, want %d: %s", w.Code, tc.status, w.Body)
			}
			want := map[string]string{"Access-Control-Allow-Origin": "", "Access-Control-Allow-Credentials": "", "Vary": tc.vary}
			if tc.cors {
				want["Access-Control-Allow-Origin"] = tc.origin
				want["Access-Control-Allow-Credentials"] = "true"
			}
			if w.Code >= 400 {
				want["Content-Type"] = "application/problem+json"
			}
			if w.Code == 204 {
				want["Access-Control-Allow-Methods"] = corsMethods
				want["Access-Control-Allow-Headers"] = corsHeaders
				want["Access-Control-Max-Age"] = corsMaxAge
			}
			for k, v := range want {
				if got := strings.Join(w.Header()[k], "|"); got != v {
					t.Errorf("%s: %q, want %q", k, got, v)
				}
			}
		})
	}
}

func TestRefusalNamesTheMend(t *testing.T) {
	o := newTestOrigins(t)
	r := &http.Request{Host: "gw.example", Header: http.Header{"Origin": {"https://gw.example"}}}
	if got := o.refusal(r, "https://gw.example"); !strings.Contains(got, "--trusted-proxies") {
		t.Errorf("behind a proxy that is not trusted: %s", got)
	}
	r.Header.Set("Origin", "https://evil.example")
	if got := o.refusal(r, "https://evil.example"); !strings.Contains(got, "--allow-origins") {
		t.Errorf("from elsewhere: %s", got)
	}
}

func TestAddVaryKeepsOneLine(t *testing.T) {
	h := http.Header{"Vary": {"origin, accept", "X"}}
	addVary(h, "Accept", "Accept-Encoding", "Origin")
	if got := strings.Join(h["Vary"], "|"); got != "accept, X, Accept-Encoding, Origin" {
		t.Fatalf("Vary: %s", got)
	}
}

// Matching labels is matching the regular expression it stands for.
func TestLabelsMatchLikeAPattern(t *testing.T) {
	label := rapid.SampledFrom([]string{"a", "b", "*"})
	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.SliceOfN(label, 1, 6).Draw(t, "pattern")
		host := strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "a", ""}), 1, 8).Draw(t, "host"), ".")
		expr := strings.ReplaceAll(strings.Join(pattern, `\.`), "*", `[^.]+(\.[^.]+)*`)
		want := regexp.MustCompile("^" + expr + "$").MatchString(host)
		if got := matchLabels(pattern, host); got != want {
			t.Fatalf("matchLabels(%q, %q) = %v", pattern, host, got)
		}
	})
}

// What is read as an origin is one, to the letter, and reads the same again.
func FuzzOrigin(f *testing.F) {
	for _, s := range []string{"https://example.com", "http://[::1]:80", "null", "https://a@b", "a://b:1", "http://*", "http://[::ffff:1.2.3.4]", "https://x:443"} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, s, host string) {
		if from, ok := parseOrigin(s); ok {
			u, err := url.Parse(strings.ToLower(s))
			if err != nil || u.Scheme != from.scheme || u.User != nil || u.Path != "" || u.RawQuery != "" || u.Fragment != "" {
				t.Fatalf("%q is %+v, but %+v, %v", s, from, u, err)
			}
			if !strings.HasPrefix(from.host, "[") && u.Hostname() != from.host {
				t.Fatalf("%q has host %q, not %q", s, u.Hostname(), from.host)
			}
			text := from.scheme + "://" + from.host
			if from.port != "" {
				text += ":" + from.port
			}
			if again, ok := parseOrigin(text); !ok || again != from {
				t.Fatalf("%q is %+v, but %q is %+v", s, from, text, again)
			}
		}
		r := &http.Request{Host: host, Header: http.Header{"Origin": {s}}}
		if o, err := NewOrigins([]string{"https://*.example.com"}); err != nil || o.Allowed(r, true) && s != "" && !strings.HasPrefix(strings.ToLower(s), "https://") {
			t.Fatalf("%q is allowed at %q: %v", s, host, err)
		}
		if o, err := NewOrigins([]string{s}); err == nil && strings.EqualFold(s, "null") {
			t.Fatalf("%+v of %q", o, s)
		}
	})
}
