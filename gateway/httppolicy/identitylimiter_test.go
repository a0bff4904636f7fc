package httppolicy

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"headcount/counter/limit"
)

const anonymousRate, anonymousBurst = 10, 100

var identities atomic.Uint64

// another has addr bring an identity that nobody has brought.
func another(l *IdentityLimiter, addr netip.Addr, now time.Time) (bool, time.Duration) {
	return l.Allow(addr, identities.Add(1), now)
}

func TestIdentityLimiter(t *testing.T) {
	l := NewIdentityLimiter(limit.PerSecond(anonymousRate, anonymousBurst), 21*time.Second)
	now := time.Unix(1_900_000_000, 0)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for i := range anonymousBurst {
		if ok, _ := another(l, a, now); !ok {
			t.Fatalf("call %d of the burst refused", i+1)
		}
	}
	ok, wait := another(l, a, now)
	if ok || wait <= 0 || wait > 100*time.Millisecond {
		t.Fatalf("after the burst: %v, %s", ok, wait)
	}
	if retrySeconds(wait) != "1" {
		t.Fatalf("Retry-After: %s", retrySeconds(wait))
	}
	if ok, _ := another(l, b, now); !ok {
		t.Fatal("one address pays for another")
	}
	now = now.Add(time.Second)
	for i := range anonymousRate {
		if ok, _ := another(l, a, now); !ok {
			t.Fatalf("call %d of the next second refused", i+1)
		}
	}
	if ok, _ := another(l, a, now); ok {
		t.Fatal("an eleventh call in a second")
	}
	if ok, _ := another(l, netip.Addr{}, now); !ok {
		t.Fatal("a peer without an address shares a bucket with others")
	}
}

func TestAddressesOfOneCustomer(t *testing.T) {
	for name, tc := range map[string]struct {
		a, b string
		same bool
	}{
		"one /64":           {"2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", true},
		"two /64":           {"2001:db8::1", "2001:db8:0:1::1", false},
		"IPv4 in IPv6 form": {"192.0.2.1", "::ffff:192.0.2.1", true},
		"two IPv4":          {"192.0.2.1", "192.0.2.2", false},
		"two mapped IPv4":   {"::ffff:192.0.2.1", "::ffff:192.0.2.2", false},
		"a zone":            {"fe80::1", "fe80::2%eth0", true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := limitKey(netip.MustParseAddr(tc.a)), limitKey(netip.MustParseAddr(tc.b))
			if (a == b) != tc.same {
				t.Fatalf("%s and %s", a, b)
			}
		})
	}
}

func TestIdentityLimiterForgetsTheLongestIdle(t *testing.T) {
	const most = 8
	l := newIdentityLimiter(limit.PerSecond(1, 2), most, 0)
	now := time.Unix(1_900_000_000, 0)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	for i := range most {
		another(l, addr(i), now)
		another(l, addr(i), now)
	}
	another(l, addr(0), now) // refused, but used
	another(l, addr(most), now)
	if l.addresses.Len() != most || l.addresses.Contains(addr(1)) || !l.addresses.Contains(addr(0)) {
		t.Fatalf("%d addresses, the idle one kept: %v", l.addresses.Len(), l.addresses.Contains(addr(1)))
	}
	if ok, _ := another(l, addr(0), now); ok {
		t.Fatal("a limited address was forgotten before idle ones")
	}
	// For a newcomer two idle addresses are forgotten.
	now = now.Add(l.idleFor)
	for i := range most {
		another(l, addr(100+i), now)
	}
	if l.addresses.Len() > most {
		t.Fatalf("%d addresses", l.addresses.Len())
	}
	now = now.Add(l.idleFor)
	for i := range most {
		another(l, addr(200), now.Add(time.Duration(i)))
		another(l, addr(201+i), now)
	}
	for i := range most {
		if l.addresses.Contains(addr(100 + i)) {
			t.Fatal("an idle address stayed")
		}
	}
}

// However calls fall, an address gets no more than burst + rate × time. The wait that it
// is told is enough, and no longer than needed.
func TestIdentityLimiterLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		burst := rapid.IntRange(1, 20).Draw(t, "burst")
		perSecond := rapid.IntRange(1, 50).Draw(t, "rate")
		l := newIdentityLimiter(limit.PerSecond(perSecond, burst), 4, 0)
		start := time.Unix(1_900_000_000, 0)
		now := start
		a := netip.MustParseAddr("2001:db8::1")
		allowed := 0
		for i, n := 0, rapid.IntRange(1, 100).Draw(t, "calls"); i < n; i++ {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "ms")) * time.Millisecond)
			ok, wait := another(l, a, now)
			if ok {
				allowed++
			} else {
				if wait <= 0 || wait > time.Duration(float64(time.Second)/float64(perSecond))+time.Microsecond {
					t.Fatalf("told to wait %s at %d a second", wait, perSecond)
				}
				now = now.Add(wait + time.Microsecond)
				if ok, again := another(l, a, now); !ok {
					t.Fatalf("waited %s, told to wait %s more", wait, again)
				}
				allowed++
			}
			if most := float64(burst) + float64(perSecond)*now.Sub(start).Seconds() + 1e-3; float64(allowed) > most {
				t.Fatalf("%d calls in %s", allowed, now.Sub(start))
			}
			// Other addresses come and go, fewer than the limit.
			another(l, netip.AddrFrom4([4]byte{10, 0, 0, byte(i % 2)}), now)
		}
		if l.addresses.Len() > 4 {
			t.Fatalf("%d addresses", l.addresses.Len())
		}
	})
}

// What is limited is how many different identities an address brings, not how
// often it brings them.
func TestIdentityLimiterKnowsWhoCameLately(t *testing.T) {
	const (
		memory   = 21 * time.Second
		stranger = 1 << 60 // far from the identities that are counted up
	)
	l := NewIdentityLimiter(limit.PerSecond(anonymousRate, anonymousBurst), memory)
	now := time.Unix(1_900_000_000, 0)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	allow := func(want bool, addr netip.Addr, who uint64) {
		t.Helper()
		if ok, _ := l.Allow(addr, who, now); ok != want {
			t.Fatalf("identity %d from %s: %v", who, addr, ok)
		}
	}
	for who := range uint64(anonymousBurst) {
		allow(true, a, who)
	}
	for range 3 * anonymousBurst {
		allow(true, a, 7)
	}
	allow(false, a, stranger)
	for who := range uint64(anonymousBurst) {
		allow(true, a, who)
	}
	// An address that was silent no longer than the limiter remembers is known.
	for range 5 {
		now = now.Add(memory - 1)
		allow(true, a, 7)
		for range anonymousBurst { // nothing is left for others
			another(l, a, now)
		}
		allow(true, a, 7)
		allow(false, a, stranger)
	}
	// Another address has not brought it.
	for range anonymousBurst {
		another(l, b, now)
	}
	allow(false, b, 7)
	// An address that was silent for longer costs a token again.
	now = now.Add(2 * memory)
	for range anonymousBurst {
		another(l, a, now)
	}
	allow(false, a, 7)
}

// What the limiter remembers is bounded, for one address and for all of them.
func TestIdentityLimiterMemoryIsBounded(t *testing.T) {
	l := newIdentityLimiter(limit.PerSecond(1e9, 1e6), 1<<10, time.Minute)
	now := time.Unix(1_900_000_000, 0)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	for range 3 * maxKnown {
		another(l, addr(0), now)
	}
	a, _ := l.addresses.Peek(addr(0))
	if n := len(a.young); n != maxKnown || l.known != maxKnown {
		t.Fatalf("%d identities of one address, %d in all", n, l.known)
	}
	for i := range 2 * maxKnownInAll {
		another(l, addr(i/1000), now)
	}
	if l.known != maxKnownInAll {
		t.Fatalf("%d identities in all", l.known)
	}
	now = now.Add(time.Hour)
	for range 1 << 10 {
		another(l, addr(0), now)
	}
	sum := 0
	for _, a := range l.addresses.Values() {
		sum += len(a.young) + len(a.old)
	}
	if l.known != sum || sum > 1<<10 || l.addresses.Len() != 1 {
		t.Fatalf("after an hour %d are known, %d are counted, of %d addresses", sum, l.known, l.addresses.Len())
	}
}
