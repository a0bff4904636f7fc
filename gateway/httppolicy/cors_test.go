package httppolicy

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"

	"headcount/gateway/identity"
)

// transport says of every request whether it came over TLS.
type transport bool

func (secure transport) Secure(*http.Request) bool { return bool(secure) }

// newOriginServer returns a handler that answers as a gateway might, behind CORS.
func newOriginServer(t testing.TB, secure bool, patterns ...string) http.Handler {
	t.Helper()
	origins, err := identity.NewOrigins(patterns)
	if err != nil {
		t.Fatal(err)
	}

	gin.SetMode(gin.TestMode)
	e := gin.New()
	e.UseEscapedPath = true
	e.HandleMethodNotAllowed = true
	e.Use(CORS(origins, transport(secure)))

	ok := func(c *gin.Context) { c.String(http.StatusOK, "done") }
	e.GET("/", ok)
	e.GET("/:page/counter", func(c *gin.Context) {
		AddVary(c.Writer.Header(), "Accept", "Accept-Encoding")
		ok(c)
	})
	e.PUT("/:page/counter", ok)
	e.POST("/:page/changes", ok)
	e.DELETE("/:page/follow", ok)
	e.GET("/:page/counter/events", ok)
	e.GET("/api/v1/top/events", ok)
	e.GET("/-/users/events", ok)
	e.GET("/-/top/events", ok)
	e.GET("/-/ws", ok)

	e.NoRoute(func(c *gin.Context) { Problem(c.Writer, http.StatusNotFound, "") })
	e.NoMethod(func(c *gin.Context) { Problem(c.Writer, http.StatusMethodNotAllowed, "") })

	return e
}

func TestCORS(t *testing.T) {
	h := newOriginServer(t, false, "https://ok.example")
	const ok, evil, own = "https://ok.example", "https://evil.example", "http://gw.example"

	for name, tc := range map[string]struct {
		method, path, origin string
		headers              []string // name, value pairs
		status               int
		cors                 bool
		vary                 string
	}{
		"GET, no origin":           {"GET", "/p/counter", "", nil, 200, false, "Accept, Accept-Encoding"},
		"GET of a page, no origin": {"GET", "/", "", nil, 200, false, "Origin"},
		"GET, allowed":             {"GET", "/p/counter", ok, nil, 200, true, "Accept, Accept-Encoding, Origin"},
		"GET, own":                 {"GET", "/p/counter", own, nil, 200, true, "Accept, Accept-Encoding, Origin"},
		"GET, not allowed":         {"GET", "/p/counter", evil, nil, 200, false, "Accept, Accept-Encoding, Origin"},
		"PUT, no origin":           {"PUT", "/p/counter", "", nil, 200, false, ""},
		"PUT, allowed":             {"PUT", "/p/counter", ok, nil, 200, true, "Origin"},
		"PUT, own":                 {"PUT", "/p/counter", own, nil, 200, true, "Origin"},
		"PUT, not allowed":         {"PUT", "/p/counter", evil, nil, 403, false, "Origin"},
		// Without TLS here, a page over TLS has another origin.
		"PUT, own under https":   {"PUT", "/p/counter", "https://gw.example", nil, 403, false, "Origin"},
		"DELETE, not allowed":    {"DELETE", "/p/follow", evil, nil, 403, false, "Origin"},
		"events, allowed":        {"GET", "/p/counter/events", ok, nil, 200, true, "Origin"},
		"events, not allowed":    {"GET", "/p/counter/events", evil, nil, 403, false, "Origin"},
		"events, no origin":      {"GET", "/p/counter/events", "", nil, 200, false, "Origin"},
		"top, not allowed":       {"GET", "/api/v1/top/events", evil, nil, 403, false, "Origin"},
		"pages, not allowed":     {"GET", "/-/top/events", evil, nil, 403, false, "Origin"},
		"users, not allowed":     {"GET", "/-/users/events", evil, nil, 403, false, "Origin"},
		"WebSocket, not allowed": {"GET", "/-/ws", evil, nil, 403, false, "Origin"},
		"WebSocket, own":         {"GET", "/-/ws", own, nil, 200, true, "Origin"},
		"upgrade elsewhere":      {"GET", "/", evil, []string{"Upgrade", "websocket"}, 403, false, "Origin"},
		// The escaped slashes belong to the name of the page, so this is no stream, which would be refused.
		"page named like events": {
			"GET", "/a%2Fcounter%2Fevents/counter", evil, nil, 200, false, "Accept, Accept-Encoding, Origin",
		},
		"404, allowed":              {"GET", "/no/such/thing", ok, nil, 404, true, "Origin"},
		"404, not allowed":          {"GET", "/no/such/thing", evil, nil, 404, false, "Origin"},
		"405, allowed":              {"PATCH", "/p/counter", ok, nil, 405, true, "Origin"},
		"OPTIONS, no preflight":     {"OPTIONS", "/p/counter", "", nil, 405, false, ""},
		"OPTIONS, evil, no request": {"OPTIONS", "/p/counter", evil, nil, 405, false, "Origin"},
		"preflight, allowed": {
			"OPTIONS", "/p/counter", ok, []string{"Access-Control-Request-Method", "PUT"}, 204, true, "Origin",
		},
		"preflight, not allowed": {
			"OPTIONS", "/p/counter", evil, []string{"Access-Control-Request-Method", "PUT"}, 403, false, "Origin",
		},
		"preflight, null": {
			"OPTIONS", "/p/counter", "null", []string{"Access-Control-Request-Method", "GET"}, 403, false, "Origin",
		},
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

			want := map[string]string{
				"Access-Control-Allow-Origin": "", "Access-Control-Allow-Credentials": "", "Vary": tc.vary,
			}
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

func TestAddVaryKeepsOneLine(t *testing.T) {
	h := http.Header{"Vary": {"origin, accept", "X"}}
	AddVary(h, "Accept", "Accept-Encoding", "Origin")
	if got := strings.Join(h["Vary"], "|"); got != "accept, X, Accept-Encoding, Origin" {
		t.Fatalf("Vary is %q, want one line with each name once", got)
	}
}
