package identity

import (
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

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
			t.Errorf("NewOrigins(%q) accepts the pattern, want an error", pattern)
			continue
		}

		text := err.Error()
		if !strings.HasPrefix(text, "allow-origins: ") || !strings.Contains(text, mend) ||
			strings.Contains(text, "\n") {
			t.Errorf("NewOrigins(%q) = %s; want the remedy %q", pattern, text, mend)
		}
	}
}

// originCall is a request with an Origin header, unless it is empty, and whether it is allowed.
type originCall struct {
	origin, host string
	secure, want bool
}

var originCalls = map[string]struct {
	patterns []string
	calls    []originCall
}{
	"same origin": {nil, []originCall{
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
		// The scheme and the port are parts of an origin.
		{"https://example.com", "example.com", false, false},
		{"http://example.com", "example.com", true, false},
		{"http://example.com:443", "example.com", true, false},
		{"http://example.com:8080", "example.com", false, false},
		{"http://localhost:8081", "localhost:8080", false, false},
		{"http://127.0.0.1:8080", "localhost:8080", false, false},
		{"http://a.example.com", "example.com", false, false},
		{"http://example.com.evil.test", "example.com", false, false},
		{"http://example.com.", "example.com", false, false},
		// What is no origin is never equal to the host, however it is written.
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
	"exact": {[]string{
		" https://A.example ,http://b.example:3000", "https://c.example:443", "capacitor://localhost",
		"http://[::1]:3000",
	}, []originCall{
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
	"labels": {[]string{"https://*.example.com", "http://*.a.*.test:8000", "https://x.*"}, []originCall{
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
	"a scheme": {[]string{"https://*"}, []originCall{
		{"https://a", "h", false, true},
		{"https://a.b.c", "h", false, true},
		{"https://127.0.0.1", "h", false, true},
		{"https://[::1]", "h", false, true},
		{"http://a", "h", false, false},
		{"https://a:1", "h", false, false},
		{"null", "h", false, false},
	}},
	"everyone": {[]string{"*"}, []originCall{
		{"https://a.example", "h", false, true},
		{"http://[::1]:1", "h", false, true},
		{"chrome-extension://abcdef", "h", false, true},
		{"null", "h", false, false},
		{"NULL", "h", false, false},
		{"file://", "h", false, false},
		{"nonsense", "h", false, false},
		{"http://a\r\nX: y", "h", false, false},
	}},
}

func TestAllowed(t *testing.T) {
	for name, tc := range originCalls {
		t.Run(name, func(t *testing.T) {
			o := newTestOrigins(t, tc.patterns...)
			for _, c := range tc.calls {
				r := &http.Request{Host: c.host, Header: http.Header{}}
				if c.origin != "" {
					r.Header.Set("Origin", c.origin)
				}

				if got := o.Allowed(r, c.secure); got != c.want {
					t.Errorf("Allowed is %[4]v for origin %[1]q, host %[2]q, secure %[3]v",
						c.origin, c.host, c.secure, got)
				}
			}
		})
	}

	// No browser sends two origins, and something behind the gateway might read the other one.
	two := &http.Request{Host: "a", Header: http.Header{"Origin": {"http://a", "http://a"}}}
	if newTestOrigins(t, "*").Allowed(two, false) {
		t.Error("two Origin headers are allowed")
	}
}

// A refusal names the setting that would permit the origin.
func TestRefusalSaysWhatToDo(t *testing.T) {
	o := newTestOrigins(t)
	r := &http.Request{Host: "gw.example", Header: http.Header{"Origin": {"https://gw.example"}}}
	if got := o.Refusal(r); !strings.Contains(got, "--trusted-proxies") {
		t.Errorf("behind an untrusted proxy the refusal is %s, want --trusted-proxies in it", got)
	}

	r.Header.Set("Origin", "https://evil.example")
	if got := o.Refusal(r); !strings.Contains(got, "--allow-origins") {
		t.Errorf("to a foreign page the refusal is %s, want --allow-origins in it", got)
	}
}

// matchLabels gives the same result as a regular expression for the labels.
func TestLabelsMatchLikeAPattern(t *testing.T) {
	label := rapid.SampledFrom([]string{"a", "b", "*"})

	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.SliceOfN(label, 1, 6).Draw(t, "pattern")
		host := strings.Join(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "c", "a", ""}), 1, 8).Draw(t, "host"),
			".")

		// A star stands for one label or more.
		expr := strings.ReplaceAll(strings.Join(pattern, `\.`), "*", `[^.]+(\.[^.]+)*`)
		want := regexp.MustCompile("^" + expr + "$").MatchString(host)

		if got := matchLabels(pattern, host); got != want {
			t.Fatalf("matchLabels(%q, %q) = %v", pattern, host, got)
		}
	})
}

// What is accepted as an origin is one, letter by letter, and is parsed to the same value again.
func FuzzOrigin(f *testing.F) {
	for _, s := range []string{
		"https://example.com", "http://[::1]:80", "null", "https://a@b", "a://b:1", "http://*",
		"http://[::ffff:1.2.3.4]", "https://x:443",
	} {
		f.Add(s, s)
	}

	f.Fuzz(func(t *testing.T, s, host string) {
		if from, ok := parseOrigin(s); ok {
			u, err := url.Parse(strings.ToLower(s))
			if err != nil || u.Scheme != from.scheme || u.User != nil || u.Path != "" || u.RawQuery != "" ||
				u.Fragment != "" {
				t.Fatalf("%q is %+v, but %+v, %v", s, from, u, err)
			}

			// Addresses of IPv6 are written in their shortest form, which url.Parse leaves as they came.
			if !strings.HasPrefix(from.host, "[") && u.Hostname() != from.host {
				t.Fatalf("%q has host %q, not %q", s, u.Hostname(), from.host)
			}

			// The text of the parsed origin is parsed to the same value.
			text := from.scheme + "://" + from.host
			if from.port != "" {
				text += ":" + from.port
			}
			if again, ok := parseOrigin(text); !ok || again != from {
				t.Fatalf("%q is %+v, but %q is %+v", s, from, text, again)
			}
		}

		r := &http.Request{Host: host, Header: http.Header{"Origin": {s}}}
		if o, err := NewOrigins([]string{"https://*.example.com"}); err != nil || o.Allowed(r, true) && s != "" &&
			!strings.HasPrefix(strings.ToLower(s), "https://") {
			t.Fatalf("%q is allowed at %q: %v", s, host, err)
		}

		// Every sandboxed frame has the origin null, so permitting null would permit everybody.
		if o, err := NewOrigins([]string{s}); err == nil && strings.EqualFold(s, "null") {
			t.Fatalf("%+v of %q", o, s)
		}
	})
}
