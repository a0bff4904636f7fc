package gateway

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"pgregory.net/rapid"
)

func TestAddressLimiter(t *testing.T) {
	l := newAddressLimiter()
	now := time.Unix(1_900_000_000, 0)
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	for i := range anonymousBurst {
		if ok, _ := l.allow(a, now); !ok {
			t.Fatalf("call %d of the burst refused", i+1)
		}
	}
	ok, wait := l.allow(a, now)
	if ok || wait <= 0 || wait > 100*time.Millisecond {
		t.Fatalf("after the burst: %v, %s", ok, wait)
	}
	if retrySeconds(wait) != "1" {
		t.Fatalf("Retry-After: %s", retrySeconds(wait))
	}
	if ok, _ := l.allow(b, now); !ok {
		t.Fatal("one address pays for another")
	}
	now = now.Add(time.Second)
	for i := range anonymousRate {
		if ok, _ := l.allow(a, now); !ok {
			t.Fatalf("call %d of the next second refused", i+1)
		}
	}
	if ok, _ := l.allow(a, now); ok {
		t.Fatal("an eleventh call in a second")
	}
	if ok, _ := l.allow(netip.Addr{}, now); !ok {
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

func TestLimiterForgetsTheLongestIdle(t *testing.T) {
	const limit = 8
	l := newLimiter(1, 2, limit)
	now := time.Unix(1_900_000_000, 0)
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}) }
	for i := range limit {
		l.allow(addr(i), now)
		l.allow(addr(i), now)
	}
	l.allow(addr(0), now) // refused, but used
	l.allow(addr(limit), now)
	if len(l.buckets) != limit || l.buckets[addr(1)] != nil || l.buckets[addr(0)] == nil {
		t.Fatalf("%d buckets, the idle one kept: %v", len(l.buckets), l.buckets[addr(1)] != nil)
	}
	if ok, _ := l.allow(addr(0), now); ok {
		t.Fatal("a limited address was forgotten before idle ones")
	}
	// Two full buckets go for one that comes.
	now = now.Add(l.full)
	for i := range limit {
		l.allow(addr(100+i), now)
	}
	if len(l.buckets) > limit {
		t.Fatalf("%d buckets", len(l.buckets))
	}
	now = now.Add(l.full)
	for i := range limit {
		l.allow(addr(200), now.Add(time.Duration(i)))
		l.allow(addr(201+i), now)
	}
	for i := range limit {
		if l.buckets[addr(100+i)] != nil {
			t.Fatal("a full bucket stayed")
		}
	}
}

// However calls fall, an address gets no more than burst + rate × time, and
// the wait it is told is enough and no more than needed.
func TestLimiterLaws(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		burst := rapid.IntRange(1, 20).Draw(t, "burst")
		perSecond := rapid.IntRange(1, 50).Draw(t, "rate")
		l := newLimiter(rate.Limit(perSecond), burst, 4)
		start := time.Unix(1_900_000_000, 0)
		now := start
		a := netip.MustParseAddr("2001:db8::1")
		allowed := 0
		for i, n := 0, rapid.IntRange(1, 100).Draw(t, "calls"); i < n; i++ {
			now = now.Add(time.Duration(rapid.IntRange(0, 200).Draw(t, "ms")) * time.Millisecond)
			ok, wait := l.allow(a, now)
			if ok {
				allowed++
			} else {
				if wait <= 0 || wait > time.Duration(float64(time.Second)/float64(perSecond))+time.Microsecond {
					t.Fatalf("told to wait %s at %d a second", wait, perSecond)
				}
				now = now.Add(wait + time.Microsecond)
				if ok, again := l.allow(a, now); !ok {
					t.Fatalf("waited %s, told to wait %s more", wait, again)
				}
				allowed++
			}
			if most := float64(burst) + float64(perSecond)*now.Sub(start).Seconds() + 1e-3; float64(allowed) > most {
				t.Fatalf("%d calls in %s", allowed, now.Sub(start))
			}
			// Others come and go; there are fewer than the limit.
			l.allow(netip.AddrFrom4([4]byte{10, 0, 0, byte(i % 2)}), now)
		}
		if len(l.buckets) != l.idle.Len() || len(l.buckets) > 4 {
			t.Fatalf("%d buckets, %d in the list", len(l.buckets), l.idle.Len())
		}
	})
}

func TestLimiterByMany(t *testing.T) {
	l := newLimiter(1, 100, 16)
	now := time.Unix(1_900_000_000, 0)
	var mu sync.Mutex
	allowed := 0
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for range 50 {
				if ok, _ := l.allow(netip.MustParseAddr("192.0.2.1"), now); ok {
					mu.Lock()
					allowed++
					mu.Unlock()
				}
				l.allow(netip.MustParseAddr(fmt.Sprintf("10.0.0.%d", g)), now)
			}
		})
	}
	wg.Wait()
	if allowed != 100 {
		t.Fatalf("%d calls of a burst of 100", allowed)
	}
}

func BenchmarkLimiterFlood(b *testing.B) {
	l := newAddressLimiter()
	now := time.Unix(1_900_000_000, 0)
	b.ReportAllocs()
	i := uint32(0)
	for b.Loop() {
		i++
		l.allow(netip.AddrFrom4([4]byte{byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}), now)
	}
}
