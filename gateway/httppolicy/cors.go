package httppolicy

import (
	"net/http"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"
)

// Values of the CORS headers. They are lists, since "*" is not valid for requests with
// credentials.
const (
	corsMethods = "GET, HEAD, PUT, POST, DELETE"
	corsHeaders = "Content-Type, Authorization, Headcount-Id, X-API-Key, Idempotency-Key, Last-Event-ID, " +
		"Cache-Control, If-None-Match, Headcount-Site"
	corsExposed = "ETag, Retry-After, RateLimit, RateLimit-Policy, Headcount-Id, Idempotent-Replay"
	corsMaxAge  = "7200" // seconds; browsers keep a preflight no longer
)

// Origins decides from which origins scripts may use the server.
type Origins interface {
	// Allowed reports whether r may write or keep a connection open. secure says
	// whether the client speaks TLS.
	Allowed(r *http.Request, secure bool) bool
	// Refusal returns why Allowed has refused the request.
	Refusal(r *http.Request) string
}

// Proxies interprets the headers of proxies between a client and the server.
type Proxies interface {
	Secure(*http.Request) bool // reports whether the client uses TLS
}

// CORS returns a handler that sets the CORS headers for allowed origins, on answers
// and errors alike, and answers their preflights. Requests from other origins get
// 403, except requests that only read: the browser hides their answer from the page.
func CORS(origins Origins, proxies Proxies) gin.HandlerFunc {
	return func(c *gin.Context) {
		r := c.Request
		h := c.Writer.Header()
		from := r.Header.Get("Origin")

		// An answer to a request without an Origin needs the Vary header, too, since a cache may keep it. No cache
		// keeps the count of a page, unless Callers.Cacheable permits that, which then adds the header itself.
		if from != "" || !strings.HasSuffix(r.URL.Path, "/counter") {
			AddVary(h, "Origin")
		}

		// One empty Origin counts as none. With several, nobody knows which one is that of the page.
		if from == "" && len(r.Header["Origin"]) <= 1 {
			c.Next()
			return
		}

		preflight := r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
		if !origins.Allowed(r, proxies.Secure(r)) {
			if !preflight && isRead(r) {
				c.Next()
				return
			}
			Problem(c.Writer, http.StatusForbidden, origins.Refusal(r), Because(ReasonOrigin))
			c.Abort()
			return
		}

		h.Set("Access-Control-Allow-Origin", from)
		h.Set("Access-Control-Allow-Credentials", "true")
		if preflight {
			h.Set("Access-Control-Allow-Methods", corsMethods)
			h.Set("Access-Control-Allow-Headers", corsHeaders)
			h.Set("Access-Control-Max-Age", corsMaxAge)
			c.AbortWithStatus(http.StatusNoContent)
			return
		}
		h.Set("Access-Control-Expose-Headers", corsExposed)
		c.Next()
	}
}

// isRead reports whether r only reads and ends with one answer, unlike WebSocket and
// SSE.
func isRead(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		path := r.URL.EscapedPath() // the router matches the same form
		return path != "/-/ws" && !isStream(path) && r.Header.Get("Upgrade") == ""
	case http.MethodOptions:
		return true
	}

	return false
}

// isStream reports whether the path is that of an event stream.
func isStream(path string) bool {
	switch path {
	case "/api/v1/top/events", "/-/users/events", "/-/top/events":
		return true
	}
	counter, under := strings.CutPrefix(path, "/api/v1/counters/")
	ofCounter := under && strings.HasSuffix(counter, "/events")

	return ofCounter || strings.HasSuffix(path, "/counter/events")
}

// usualVary has Vary headers that are the same in most answers. They must not be changed in place.
var usualVary = []struct{ names, lines []string }{
	{names: []string{"Origin"}, lines: []string{"Origin"}},
	{names: []string{"Accept", "Accept-Encoding"}, lines: []string{"Accept, Accept-Encoding"}},
}

// AddVary adds names to the Vary header. The header then has one line with each name
// once, and Origin comes last.
func AddVary(h http.Header, names ...string) {
	// The common cases must not allocate.
	for _, usual := range usualVary {
		if h["Vary"] == nil && slices.Equal(names, usual.names) {
			h["Vary"] = usual.lines
			return
		}
	}

	var all []string
	last := ""
	add := func(name string) {
		known := slices.ContainsFunc(all, func(s string) bool { return strings.EqualFold(s, name) })
		switch {
		case known, name == "":
		case strings.EqualFold(name, "Origin"):
			last = name
		default:
			all = append(all, name)
		}
	}

	for _, line := range h["Vary"] {
		for name := range strings.SplitSeq(line, ",") {
			add(strings.TrimSpace(name))
		}
	}
	for _, name := range names {
		add(name)
	}

	if last != "" {
		all = append(all, last)
	}
	h["Vary"] = []string{strings.Join(all, ", ")}
}
