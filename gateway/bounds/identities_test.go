package bounds

import (
	"net/netip"
	"sync/atomic"
	"testing"
	"time"
)

const anonymousRate, anonymousBurst = 10, 100

var identities atomic.Uint64

// another makes addr bring a new identity. Tests name identities below 1 << 32 themselves.
func another(l *Identities, addr netip.Addr, now time.Time) (wait time.Duration) {
	return l.take(addr, 1<<32+identities.Add(1), now)
}

// TestIdentities: an address may bring a burst of new identities at once, and then ten a second.
func TestIdentities(t *testing.T) {
	l := NewIdentities(ofAddress(anonymousRate, anonymousBurst), 21*time.Second)
	now := time.Unix(1_900_000_000, 0)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

	for i := range anonymousBurst {
		if wait := another(l, a, now); wait > 0 {
			t.Fatalf("call %d of the burst refused", i+1)
		}
	}

	wait := another(l, a, now)
	if wait <= 0 || wait > 100*time.Millisecond {
		t.Fatalf("after the burst the wait is %s, want 100ms at most", wait)
	}

	if wait := another(l, b, now); wait > 0 {
		t.Fatal("an address is limited because of another one")
	}

	now = now.Add(time.Second)
	for i := range anonymousRate {
		if wait := another(l, a, now); wait > 0 {
			t.Fatalf("call %d of the next second refused", i+1)
		}
	}
	if wait := another(l, a, now); wait == 0 {
		t.Fatal("an eleventh identity within a second was accepted")
	}

	if wait := another(l, netip.Addr{}, now); wait > 0 {
		t.Fatal("a peer without an address is limited because of others")
	}
}

// The limit is on how many different identities an address brings, not on how often it brings them.
func TestIdentitiesKnowsWhoCameLately(t *testing.T) {
	const (
		memory   = 21 * time.Second
		stranger = 1 << 60 // far from the identities that are counted up
	)
	l := NewIdentities(ofAddress(anonymousRate, anonymousBurst), memory)
	now := time.Unix(1_900_000_000, 0)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")

	allow := func(want bool, addr netip.Addr, who uint64) {
		t.Helper()
		if wait := l.take(addr, who, now); (wait == 0) != want {
			t.Fatalf("identity %d from %s waits %s", who, addr, wait)
		}
	}

	for who := range uint64(anonymousBurst) {
		allow(true, a, who)
	}
	for range 3 * anonymousBurst {
		allow(true, a, 7)
	}
	allow(false, a, stranger)

	// Known identities cost nothing, even now.
	for who := range uint64(anonymousBurst) {
		allow(true, a, who)
	}

	// An identity that is used again within the limiter's memory stays known.
	for range 5 {
		now = now.Add(memory - 1)
		allow(true, a, 7)
		for range anonymousBurst { // this leaves nothing for new identities
			another(l, a, now)
		}
		allow(true, a, 7)
		allow(false, a, stranger)
	}

	// From another address the same identity is new.
	for range anonymousBurst {
		another(l, b, now)
	}
	allow(false, b, 7)

	// An identity that was unused for longer costs a token again, even before it is forgotten.
	now = now.Add(memory)
	if !l.known.Contains(usedIdentity{a, 7}) {
		t.Fatal("the identity was forgotten already, so the test proves nothing")
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

// The memory of the limiter is bounded, for each address and in all, and shrinks when it is not used.
func TestIdentitiesMemoryIsBounded(t *testing.T) {
	l := NewIdentities(ofAddress(1e9, 1e6), time.Minute)
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
