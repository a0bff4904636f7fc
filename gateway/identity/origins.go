package identity

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"headcount/presence"
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

// webOrigin is an origin in its canonical form: lower case, no default port, and
// IPv6 in brackets in its shortest form.
type webOrigin struct{ scheme, host, port string }

// originGlob is an origin with a * among the labels of its host.
type originGlob struct {
	scheme, port string
	labels       []string
}

// NewOrigins reads patterns of the form scheme://host[:port]. In the host, a label *
// stands for one or more labels. The pattern * allows every origin. Without a
// pattern only the same origin is allowed.
func NewOrigins(patterns []string) (*Origins, error) {
	o := &Origins{exact: make(map[webOrigin]bool)}
	for _, list := range patterns {
		// A variable of the environment has all patterns in one text.
		for p := range strings.SplitSeq(list, ",") {
			p = strings.TrimSpace(p)
			if p == "" {
				continue
			}

			if err := o.add(p); err != nil {
				return nil, fmt.Errorf("allow-origins: %q: %w", presence.Excerpt(p), err)
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
		return errors.New("the scheme is missing; write it like https://example.com")
	case !isScheme(scheme):
		return errors.New("the scheme is invalid; write one pattern for http:// and one for https://")
	case strings.ContainsAny(rest, "/?#"):
		return errors.New("an origin has no path; end it after the host or port")
	case strings.Contains(rest, "@"):
		return errors.New("remove the user name: write scheme://host[:port]")
	case strings.HasSuffix(rest, ":*"):
		return errors.New("a * cannot stand for a port; write one pattern per port")
	case strings.HasSuffix(rest, ":"):
		return errors.New("the port is missing; name it or leave out the colon")
	}

	// A * may stand only for labels, and a letter is valid wherever it is.
	host, port, ok := parseAuthority(strings.ReplaceAll(rest, "*", "x"))
	if !ok {
		return errors.New("the host is missing or invalid; write scheme://host[:port], " +
			"an international name in its xn-- form")
	}

	port = plainPort(scheme, port)
	if !strings.Contains(rest, "*") {
		o.exact[webOrigin{scheme, host, port}] = true
		return nil
	}

	// The host above has an x for each *, so it is cut out anew. IPv6 cannot have a *, so a colon begins the port.
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

// Allowed reports whether r may write or keep a connection open. It may if it has no
// Origin, an allowed one, or the server's own: the scheme follows from secure, host
// and port from r's Host. The origin "null" is never allowed.
func (o *Origins) Allowed(r *http.Request, secure bool) bool {
	values := r.Header["Origin"]
	switch len(values) {
	case 0:
		return true
	case 1:
		return values[0] == "" || o.allows(values[0], r.Host, secure)
	default: // several Origins contradict each other
		return false
	}
}

func (o *Origins) allows(raw, host string, secure bool) bool {
	from, ok := parseOrigin(raw)
	if !ok {
		return false
	}

	return from == ownOrigin(host, secure) || o.has(from)
}

// Refusal returns why Allowed has refused r and, if an operator can correct the cause, how.
func (o *Origins) Refusal(r *http.Request) string {
	from := r.Header.Get("Origin")
	// The usual cause: a proxy ends TLS, and is not named as trusted.
	if len(r.Header["Origin"]) == 1 && o.allows(from, r.Host, true) {
		return "The origin is this host's under https, but the request came without TLS. " +
			"Behind a proxy that ends TLS, name the proxy in --trusted-proxies."
	}

	return "Pages of the origin " + strconv.Quote(presence.Excerpt(from)) +
		" may not use this; --allow-origins names those that may. The request names the Host " +
		strconv.Quote(presence.Excerpt(r.Host)) +
		": if that is not what the browser shows, a proxy has replaced it; have it pass the browser's " +
		"(in nginx: proxy_set_header Host $http_host)."
}

// ownOrigin is the origin of pages that the server itself serves. Its host is empty
// if the Host header is invalid.
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

// parseAuthority reads host[:port] in lower case. An empty port means no port.
func parseAuthority(s string) (host, port string, ok bool) {
	if rest, six := strings.CutPrefix(s, "["); six {
		text, rest, closed := strings.Cut(rest, "]")
		// A zone has a meaning on one machine alone, and browsers send none.
		addr, err := netip.ParseAddr(text)
		if !closed || err != nil || !addr.Is6() || addr.Zone() != "" {
			return "", "", false
		}
		port, colon := strings.CutPrefix(rest, ":")
		return "[" + addr.String() + "]", port, (colon || rest == "") && isPort(port)
	}

	host, port, _ = strings.Cut(s, ":")
	// No name in the DNS is longer.
	if host == "" || len(host) > 255 {
		return "", "", false
	}

	if strings.ContainsFunc(host, notInHost) {
		return "", "", false
	}

	return host, port, isPort(port)
}

func notInHost(c rune) bool {
	return !isLower(c) && !isDigit(c) && !strings.ContainsRune("-_.", c)
}

func isLower(c rune) bool { return 'a' <= c && c <= 'z' }

func isDigit(c rune) bool { return '0' <= c && c <= '9' }

// isPort accepts a port as browsers write it, or an empty string.
func isPort(s string) bool {
	if s == "" {
		return true
	}

	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0 && s[0] != '0' && s[0] != '+'
}

// plainPort returns the port, or "" if it is the scheme's default.
func plainPort(scheme, port string) string {
	isDefault := scheme == "http" && port == "80" || scheme == "https" && port == "443"
	if isDefault {
		return ""
	}

	return port
}

// isScheme checks a scheme in lower case (RFC 3986, 3.1).
func isScheme(s string) bool {
	for i, c := range s {
		mayFollow := isDigit(c) || c == '+' || c == '-' || c == '.'
		if isLower(c) || i > 0 && mayFollow {
			continue
		}

		return false
	}

	return s != ""
}

// has reports whether the origin fits one of the patterns.
func (o *Origins) has(from webOrigin) bool {
	return o.everyone || o.exact[from] || slices.ContainsFunc(o.globs, func(g originGlob) bool {
		return g.scheme == from.scheme && g.port == from.port && matchLabels(g.labels, from.host)
	})
}

// matchLabels reports whether host fits a pattern. A host with an empty label, such as one that
// ends in a dot, is a different origin and fits none.
func matchLabels(pattern []string, host string) bool {
	labels := strings.Split(host, ".")

	return !slices.Contains(labels, "") && shareLabels(pattern, labels)
}

// patterns returns all patterns but *, the exact ones as globs without a *.
func (o *Origins) patterns() []originGlob {
	all := slices.Clone(o.globs)
	for from := range o.exact {
		all = append(all, originGlob{from.scheme, from.port, strings.Split(from.host, ".")})
	}

	return all
}

// shares reports whether there is an origin that both allow, and returns the pattern of o
// that allows it.
func (o *Origins) shares(other *Origins) (pattern string, both bool) {
	if o.everyone {
		return "*", true
	}
	// A site has at least one pattern.
	if other.everyone {
		return o.patterns()[0].String(), true
	}

	for _, a := range o.patterns() {
		for _, b := range other.patterns() {
			if a.scheme == b.scheme && a.port == b.port && shareLabels(a.labels, b.labels) {
				return a.String(), true
			}
		}
	}

	return "", false
}

func (g originGlob) String() string {
	port := g.port
	if port != "" {
		port = ":" + port
	}

	return g.scheme + "://" + strings.Join(g.labels, ".") + port
}

// shareLabels reports whether a host fits both patterns, in each of which * stands for one
// or more labels. A host is a pattern without a *. The time is bounded by the product of
// both lengths.
func shareLabels(a, b []string) bool {
	// fit[j] says whether some host fits both a[:i+1] and b[:j]; last has that for i-1.
	fit := make([]bool, len(b)+1)
	last := make([]bool, len(b)+1)
	fit[0] = true

	for i := range a {
		fit, last = last, fit
		fit[0] = false
		for j := range b {
			anyA := a[i] == "*"
			anyB := b[j] == "*"

			// Both end in this label, or one is a * that also takes the label before.
			before := last[j] || anyA && fit[j] || anyB && last[j+1]
			fit[j+1] = before && (anyA || anyB || a[i] == b[j])
		}
	}

	return fit[len(b)]
}
