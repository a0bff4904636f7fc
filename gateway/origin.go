package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"
)

// What a browser may do across origins. Lists, since "*" does not count where
// credentials are sent.
const (
	corsMethods = "GET, HEAD, PUT, POST, DELETE"
	corsHeaders = "Content-Type, Authorization, Headcount-Id, X-API-Key, Idempotency-Key, Last-Event-ID, Cache-Control"
	corsExposed = "Retry-After, Headcount-Id"
	corsMaxAge  = "7200" // seconds; browsers keep a preflight no longer
)

// maxOrigin bounds an Origin header, in bytes; a longer one is not allowed.
const maxOrigin = 320

// Origins decides which other origins may use the server. It never changes, so
// any goroutine may use it.
type Origins struct {
	everyone bool
	exact    map[webOrigin]bool
	globs    []originGlob
}

// webOrigin is an origin in its one written form: lower case, no default port,
// IPv6 in brackets and at its shortest.
type webOrigin struct{ scheme, host, port string }

// originGlob is an origin with a * among the labels of its host.
type originGlob struct {
	scheme, port string
	labels       []string
}

// NewOrigins reads patterns of the form scheme://host[:port], in whose host a
// label * stands for one or more labels; a lone * is every origin. Without any
// pattern only the same origin is allowed.
func NewOrigins(patterns []string) (*Origins, error) {
	o := &Origins{exact: make(map[webOrigin]bool)}
	for _, list := range patterns {
		for p := range strings.SplitSeq(list, ",") {
			if p = strings.TrimSpace(p); p == "" {
				continue
			}
			if err := o.add(p); err != nil {
				return nil, fmt.Errorf("allow-origins: %q: %w", shorten(p, 120), err)
			}
		}
	}
	return o, nil
}

func (o *Origins) add(pattern string) error {
	if pattern == "*" {
		o.everyone = true
		return nil
	}
	scheme, rest, ok := strings.Cut(strings.ToLower(pattern), "://")
	switch {
	case strings.EqualFold(pattern, "null"):
		return errors.New("this origin stands for any page that hides its own, so it is never allowed; leave it out")
	case !ok:
		return errors.New("no scheme; write it like https://example.com")
	case !isScheme(scheme):
		return errors.New("the scheme is none; write one pattern for http:// and one for https://")
	case strings.ContainsAny(rest, "/?#"):
		return errors.New("an origin has no path; end it after the host or port")
	case strings.Contains(rest, "@"):
		return errors.New("an origin names no user; write scheme://host[:port]")
	case strings.HasSuffix(rest, ":*"):
		return errors.New("a * cannot stand for a port; write one pattern per port")
	case strings.HasSuffix(rest, ":"):
		return errors.New("the port is missing; name it or leave out the colon")
	}
	host, port, ok := parseAuthority(strings.ReplaceAll(rest, "*", "x"))
	if !ok {
		return errors.New("no host, or one that is none; write scheme://host[:port], an international name in its xn-- form")
	}
	port = plainPort(scheme, port)
	if !strings.Contains(rest, "*") {
		o.exact[webOrigin{scheme, host, port}] = true
		return nil
	}
	host, _, _ = strings.Cut(rest, ":")
	labels := strings.Split(host, ".")
	for _, label := range labels {
		if label == "" || label != "*" && strings.Contains(label, "*") {
			return errors.New("a * stands for whole labels; write it between dots like https://*.example.com")
		}
	}
	o.globs = append(o.globs, originGlob{scheme: scheme, port: port, labels: labels})
	return nil
}

// Allowed reports whether r may use what writes and what stays open: it has no
// Origin, one that is allowed, or the server's own: the scheme by secure, host
// and port by r's Host. "null" never is.
func (o *Origins) Allowed(r *http.Request, secure bool) bool {
	switch values := r.Header["Origin"]; len(values) {
	case 0:
		return true
	case 1:
		return values[0] == "" || o.allows(values[0], r.Host, secure)
	default:
		return false
	}
}

func (o *Origins) allows(raw, host string, secure bool) bool {
	from, ok := parseOrigin(raw)
	if !ok {
		return false
	}
	if o.everyone || o.exact[from] {
		return true
	}
	if own := ownOrigin(host, secure); own == from && own.host != "" {
		return true
	}
	return slices.ContainsFunc(o.globs, func(g originGlob) bool {
		return g.scheme == from.scheme && g.port == from.port && matchLabels(g.labels, from.host)
	})
}

// Middleware sets the CORS headers for allowed origins, so that every answer
// and every error carries them, and answers their preflights. To others it
// answers 403, but for reading: that they may, and their browser keeps the
// answer from the page. secure says whether a client speaks TLS.
func (o *Origins) Middleware(secure func(*http.Request) bool) gin.HandlerFunc {
	return func(c *gin.Context) {
		r, h := c.Request, c.Writer.Header()
		from := r.Header.Get("Origin")
		// Without an Origin the answer varies too, should a cache keep it; that
		// of a counter none keeps.
		if from != "" || !strings.HasSuffix(r.URL.Path, "/counter") {
			addVary(h, "Origin")
		}
		preflight := r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != ""
		switch {
		case from == "" && len(r.Header["Origin"]) <= 1:
			c.Next()
		case !o.Allowed(r, secure(r)):
			if !preflight && isRead(r) {
				c.Next()
				return
			}
			writeProblem(c.Writer, http.StatusForbidden, o.refusal(r, from))
			c.Abort()
		default:
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
}

// refusal says why, and names the mend where it is an operator's.
func (o *Origins) refusal(r *http.Request, from string) string {
	if len(r.Header["Origin"]) == 1 && o.allows(from, r.Host, true) {
		return "The origin is this host's under https, but the request came without TLS. Behind a proxy that ends TLS, name the proxy in --trusted-proxies."
	}
	return "Pages of the origin " + strconv.Quote(shorten(from, 100)) + " may not use this; --allow-origins names those that may."
}

// isRead reports whether r only reads and is over at once, as opposed to
// WebSocket and SSE.
func isRead(r *http.Request) bool {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		path := r.URL.EscapedPath() // what routes are matched with
		return path != "/-/ws" && !strings.HasSuffix(path, "/counter/events") && r.Header.Get("Upgrade") == ""
	case http.MethodOptions:
		return true
	}
	return false
}

// addVary adds names to the one Vary header, each once, Origin last.
func addVary(h http.Header, names ...string) {
	var all []string
	last := ""
	add := func(name string) {
		switch {
		case name == "" || slices.ContainsFunc(all, func(s string) bool { return strings.EqualFold(s, name) }):
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

// ownOrigin is the origin of pages that the server itself serves; its host is
// empty when the Host header is none.
func ownOrigin(hostport string, secure bool) webOrigin {
	scheme := "http"
	if secure {
		scheme = "https"
	}
	host, port, ok := parseAuthority(strings.ToLower(hostport))
	if !ok {
		return webOrigin{}
	}
	return webOrigin{scheme, host, plainPort(scheme, port)}
}

// parseOrigin reads an Origin header. "null", lists and everything else that is
// not scheme://host[:port] is refused.
func parseOrigin(s string) (webOrigin, bool) {
	if len(s) > maxOrigin {
		return webOrigin{}, false
	}
	scheme, rest, ok := strings.Cut(strings.ToLower(s), "://")
	if !ok || !isScheme(scheme) {
		return webOrigin{}, false
	}
	host, port, ok := parseAuthority(rest)
	return webOrigin{scheme, host, plainPort(scheme, port)}, ok
}

// parseAuthority reads host[:port] in lower case; an empty port is none.
func parseAuthority(s string) (host, port string, ok bool) {
	if rest, six := strings.CutPrefix(s, "["); six {
		text, rest, closed := strings.Cut(rest, "]")
		addr, err := netip.ParseAddr(text)
		if !closed || err != nil || !addr.Is6() || addr.Zone() != "" {
			return "", "", false
		}
		port, colon := strings.CutPrefix(rest, ":")
		return "[" + addr.String() + "]", port, (colon || rest == "") && isPort(port)
	}
	host, port, _ = strings.Cut(s, ":")
	if host == "" || len(host) > 255 {
		return "", "", false
	}
	for i := range len(host) {
		switch c := host[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_', c == '.':
		default:
			return "", "", false
		}
	}
	return host, port, isPort(port)
}

// isPort accepts a port as browsers write it, or none.
func isPort(s string) bool {
	if s == "" {
		return true
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0 && s[0] != '0' && s[0] != '+'
}

// plainPort leaves out a port that goes without saying.
func plainPort(scheme, port string) string {
	if scheme == "http" && port == "80" || scheme == "https" && port == "443" {
		return ""
	}
	return port
}

// isScheme checks a scheme in lower case (RFC 3986, 3.1).
func isScheme(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z':
		case i > 0 && ('0' <= c && c <= '9' || c == '+' || c == '-' || c == '.'):
		default:
			return false
		}
	}
	return s != ""
}

// matchLabels reports whether the labels of host match pattern, whose * stand
// for one or more of them. A * first takes one label, and more when the rest
// does not fit; going back to the last * alone is enough, so the time is
// bounded by the product of both lengths.
func matchLabels(pattern []string, host string) bool {
	labels := make([]string, 0, 16)
	for label := range strings.SplitSeq(host, ".") {
		if label == "" {
			return false // "a..b", or a host that ends in a dot: an origin of its own
		}
		labels = append(labels, label)
	}
	p, l := 0, 0
	star, taken := -1, 0 // the last * of pattern, and where what it took ends
	for l < len(labels) {
		switch {
		case p < len(pattern) && pattern[p] == "*":
			star, taken = p, l+1
			p, l = p+1, l+1
		case p < len(pattern) && pattern[p] == labels[l]:
			p, l = p+1, l+1
		case star >= 0:
			taken++
			p, l = star+1, taken
		default:
			return false
		}
	}
	return p == len(pattern)
}
