package identity

import (
	"crypto/tls"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func newTestProxies(t testing.TB, cidrs ...string) *Proxies {
	t.Helper()
	p, err := NewProxies(cidrs)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestNewProxiesRefusesWhatIsNoNetwork(t *testing.T) {
	for _, bad := range []string{"10.0.0.0/33", "10.0.0/8", "localhost", "10.0.0.1:80", "fe80::1%eth0", "*", "a\nb"} {
		if _, err := NewProxies([]string{"10.0.0.0/8", bad}); err == nil ||
			!strings.Contains(err.Error(), "trusted-proxies") || strings.Contains(err.Error(), "\n") {
			t.Errorf("NewProxies(%q) = %v", bad, err)
		}
	}

	newTestProxies(t, "", " 10.1.2.3/8 ", "192.0.2.1", "::1", "fd00::/8")
}

// The address of a visitor is the last one in X-Forwarded-For that is no trusted proxy.
func TestAddr(t *testing.T) {
	p := newTestProxies(t, "10.0.0.0/8", "fd00::/8", "::ffff:172.16.0.0/108", "192.0.2.7")
	long := strings.Repeat("10.0.0.9,", 2*maxHops)

	for name, tc := range map[string]struct {
		peer string
		xff  []string
		want string
	}{
		"no header":              {"10.0.0.1:1", nil, "10.0.0.1"},
		"peer not trusted":       {"203.0.113.1:1", []string{"198.51.100.1"}, "203.0.113.1"},
		"peer trusted":           {"10.0.0.1:1", []string{"198.51.100.1"}, "198.51.100.1"},
		"single address trusted": {"192.0.2.7:1", []string{"198.51.100.1"}, "198.51.100.1"},
		"its neighbour not":      {"192.0.2.8:1", []string{"198.51.100.1"}, "192.0.2.8"},
		// Proxies append on the right, so a client can only forge what is left of the first untrusted address.
		"forged on the left":     {"10.0.0.1:1", []string{"1.1.1.1, 198.51.100.1"}, "198.51.100.1"},
		"two proxies":            {"10.0.0.1:1", []string{"198.51.100.1, 10.0.0.2"}, "198.51.100.1"},
		"two lines":              {"10.0.0.1:1", []string{"198.51.100.1", "10.0.0.2"}, "198.51.100.1"},
		"two lines, last counts": {"10.0.0.1:1", []string{"1.1.1.1", "198.51.100.1"}, "198.51.100.1"},
		"all trusted":            {"10.0.0.1:1", []string{"10.0.0.3, 10.0.0.2"}, "10.0.0.3"},
		// A malformed entry ends the search at the last trusted proxy.
		"garbage":              {"10.0.0.1:1", []string{"198.51.100.1, unknown, 10.0.0.2"}, "10.0.0.2"},
		"only garbage":         {"10.0.0.1:1", []string{"unknown"}, "10.0.0.1"},
		"empty elements":       {"10.0.0.1:1", []string{" , 198.51.100.1 ,,", ""}, "198.51.100.1"},
		"with a port":          {"10.0.0.1:1", []string{"198.51.100.1:443"}, "198.51.100.1"},
		"IPv6":                 {"[fd00::1]:1", []string{"2001:db8::1"}, "2001:db8::1"},
		"IPv6 in brackets":     {"[fd00::1]:1", []string{"[2001:db8::1]"}, "2001:db8::1"},
		"IPv6 with a port":     {"[fd00::1]:1", []string{"[2001:db8::1]:443"}, "2001:db8::1"},
		"IPv6 with a zone":     {"[fe80::1%eth0]:1", nil, "fe80::1"},
		"IPv4 in IPv6 form":    {"[::ffff:10.0.0.1]:1", []string{"::ffff:198.51.100.1"}, "198.51.100.1"},
		"network in IPv6 form": {"172.16.0.1:1", []string{"198.51.100.1"}, "198.51.100.1"},
		"no peer address":      {"@", []string{"198.51.100.1"}, "invalid IP"},
		"endless":              {"10.0.0.1:1", []string{"198.51.100.1," + long}, "10.0.0.9"},
	} {
		t.Run(name, func(t *testing.T) {
			r := &http.Request{RemoteAddr: tc.peer, Header: http.Header{"X-Forwarded-For": tc.xff}}
			if got := p.Addr(r).String(); got != tc.want {
				t.Fatalf("Addr = %s, want %s", got, tc.want)
			}

			if got, want := newTestProxies(t).Addr(r), orZero(tc.peer); got != want {
				t.Fatalf("with no proxies Addr = %s, want %s", got, want)
			}
		})
	}
}

func orZero(peer string) netip.Addr {
	addr, _ := parseHop(peer)
	return addr
}

// A request counts as secure if it came over TLS, or if a trusted proxy says so.
func TestSecure(t *testing.T) {
	p := newTestProxies(t, "10.0.0.0/8")
	for name, tc := range map[string]struct {
		peer  string
		tls   bool
		proto string
		want  bool
	}{
		"plain":            {"10.0.0.1:1", false, "", false},
		"TLS":              {"203.0.113.1:1", true, "http", true},
		"proxy":            {"10.0.0.1:1", false, "https", true},
		"proxy, WebSocket": {"10.0.0.1:1", false, "WSS", true},
		"proxy, plain":     {"10.0.0.1:1", false, "http", false},
		// The first entry is of the proxy that the visitor is connected to.
		"two proxies": {"10.0.0.1:1", false, "https, http", true},
		"not trusted": {"203.0.113.1:1", false, "https", false},
		"no peer":     {"", false, "https", false},
	} {
		t.Run(name, func(t *testing.T) {
			r := &http.Request{RemoteAddr: tc.peer, Header: http.Header{}}
			if tc.proto != "" {
				r.Header.Set("X-Forwarded-Proto", tc.proto)
			}
			if tc.tls {
				r.TLS = &tls.ConnectionState{}
			}

			if got := p.Secure(r); got != tc.want {
				t.Fatalf("Secure = %v, want %v", got, tc.want)
			}
		})
	}
}

// Whatever a client writes in front of the entries of proxies has no effect.
func TestClientsCannotForgeTheirAddress(t *testing.T) {
	p := newTestProxies(t, "10.0.0.0/8")
	rapid.Check(t, func(t *rapid.T) {
		forged := rapid.SliceOf(
			rapid.SampledFrom([]string{"", "10.0.0.1", "1.1.1.1", "::1", "x", "10.0.0.1:80", ","})).Draw(t, "forged")
		hops := rapid.IntRange(0, 5).Draw(t, "hops")
		chain := append(forged, "198.51.100.1")
		for range hops {
			chain = append(chain, "10.1.1.1")
		}

		// Some proxies add a header line of their own instead of appending to the last one.
		split := rapid.IntRange(0, len(chain)).Draw(t, "split")
		r := &http.Request{RemoteAddr: "10.0.0.1:1", Header: http.Header{"X-Forwarded-For": {
			strings.Join(chain[:split], ","), strings.Join(chain[split:], ", "),
		}}}

		if got := p.Addr(r).String(); got != "198.51.100.1" {
			t.Fatalf("Addr = %s from %q", got, r.Header)
		}
	})
}

func FuzzAddr(f *testing.F) {
	p := newTestProxies(f, "10.0.0.0/8", "::/1")

	f.Add("10.0.0.1:1", "1.1.1.1, [::1]:80, ::1%eth0, [", "https")
	f.Add("[::1]:x", ",,,]", ",")
	f.Fuzz(func(t *testing.T, peer, xff, proto string) {
		r := &http.Request{
			RemoteAddr: peer, Header: http.Header{"X-Forwarded-For": {xff}, "X-Forwarded-Proto": {proto}},
		}

		addr := p.Addr(r)
		if addr.Zone() != "" || addr.Is4In6() {
			t.Fatalf("Addr = %s", addr)
		}

		// What an untrusted peer writes has no effect.
		if !p.trusts(orZero(peer)) && (addr != orZero(peer) || p.Secure(r)) {
			t.Fatalf("the untrusted peer %s made its address %s, secure %v", peer, addr, p.Secure(r))
		}
	})
}
