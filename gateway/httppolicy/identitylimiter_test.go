package httppolicy

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"headcount/counter/limit"
)

const anonymousRate, anonymousBurst = 10, 100

var identities atomic.Uint64

// another has addr bring an identity that nobody has brought. Tests name identities below 1 << 32 themselves.
func another(l *IdentityLimiter, addr netip.Addr, now time.Time) (bool, time.Duration) {
	return l.Allow(addr, 1<<32+identities.Add(1), now)
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

	// Those that are known cost nothing, even now.
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

	// An identity that was not used for longer costs a token again, even before it is forgotten.
	now = now.Add(memory)
	if !l.known.Contains(usedIdentity{a, 7}) {
		t.Fatal("it is forgotten already")
	}
	allow(true, a, 7)
	for range anonymousBurst - 1 {
		another(l, a, now)
	}
	allow(false, a, stranger)

	now = now.Add(2 * memory)
	for range anonymousBurst {
		another(l, a, now)
	}
	allow(false, a, 7)
}

// What the limiter remembers is bounded, for one address and for all of them, and it shrinks
// when nobody uses it.
func TestIdentityLimiterMemoryIsBounded(t *testing.T) {
	l := NewIdentityLimiter(limit.PerSecond(1e9, 1e6), time.Minute)
	now := time.Unix(1_900_000_000, 0)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }

	for range 3 * maxKnown {
		another(l, addr(0), now)
	}
	if n := l.count[addr(0)]; n != maxKnown || l.known.Len() != maxKnown {
		t.Fatalf("%d identities of one address, %d in all", n, l.known.Len())
	}

	oldest, _, _ := l.known.GetOldest()
	for i := range 2 * maxKnownInAll {
		another(l, addr(i/1000), now)
	}
	if n := l.known.Len(); n != maxKnownInAll || !l.known.Contains(oldest) {
		t.Fatalf("%d identities in all, the first one forgotten: %v", n, !l.known.Contains(oldest))
	}

	now = now.Add(time.Minute)
	for range maxKnownInAll {
		another(l, addr(0), now)
	}
	if n := l.known.Len(); n != l.count[addr(0)] || n > maxKnown || len(l.count) != 1 {
		t.Fatalf("after a minute %d are known, %d of one address, of %d addresses", n, l.count[addr(0)], len(l.count))
	}
}
