package httppolicy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter/limit"
)

// maxCallers is how many callers a RateLimiter remembers.
const maxCallers = 1 << 16

// RateLimiter bounds how often each caller may call, by a token bucket for each. It remembers
// maxCallers; beyond the bound it forgets the caller that has not called for the longest time,
// which then has a whole burst again. It is safe for use by many goroutines.
type RateLimiter struct {
	Rate  limit.Rate // of each caller; it never changes
	began time.Time  // the times of callers count from then

	mu      sync.Mutex
	callers *simplelru.LRU[Caller, time.Duration] // when the caller's whole burst is available again; guarded by mu
}

// Caller is a user, or, when User is empty, an address.
type Caller struct {
	User string
	Addr netip.Addr // an IPv6 /64, the smallest network of a customer, counts as one address
}

// NewRateLimiter returns a RateLimiter that allows each caller perSecond calls a second, and
// burst calls at once.
func NewRateLimiter(perSecond, burst int) *RateLimiter {
	return newRateLimiter(limit.PerSecond(perSecond, burst), maxCallers)
}

func newRateLimiter(rate limit.Rate, callers int) *RateLimiter {
	return &RateLimiter{Rate: rate, began: time.Now(), callers: newLRU[Caller, time.Duration](callers, nil)}
}

// newLRU returns a map that forgets the least recently used entry.
func newLRU[K comparable, V any](size int, forget func(K, V)) *simplelru.LRU[K, V] {
	lru, _ := simplelru.NewLRU(size, forget) // fails only for a size under 1
	return lru
}

// Allow reports whether the caller may call now. If not, retryAfter is how long until
// it may.
func (r *RateLimiter) Allow(c Caller, now time.Time) (ok bool, retryAfter time.Duration) {
	return r.AllowN(c, 1, now)
}

// AllowN is Allow for n calls at once. If not all of them are allowed, none is charged.
func (r *RateLimiter) AllowN(c Caller, n int, now time.Time) (ok bool, retryAfter time.Duration) {
	if c.User != "" {
		// A user is one caller, whatever the address.
		c.Addr = netip.Addr{}
	} else {
		c.Addr = limitKey(c.Addr)
	}
	at := now.Sub(r.began)

	r.mu.Lock()
	defer r.mu.Unlock()

	back, known := r.callers.Get(c)
	if !known {
		back = at
	}

	after, wait := r.Rate.Take(back, at, n)
	if wait == 0 {
		r.callers.Add(c, after)
	}

	// Each call forgets at most two callers whose whole burst is available again, so that the
	// map shrinks after a flood and no call takes long.
	for range 2 {
		_, back, some := r.callers.GetOldest()
		if !some || back > at {
			break
		}
		r.callers.RemoveOldest()
	}

	return wait == 0, wait
}

// SharedLimiter bounds what each address, and all addresses together, may do.
type SharedLimiter struct{ address, all *RateLimiter }

// NewSharedLimiter returns a SharedLimiter with the rate of an address and that of all.
func NewSharedLimiter(address, all limit.Rate) *SharedLimiter {
	return &SharedLimiter{newRateLimiter(address, maxCallers), newRateLimiter(all, 1)}
}

// Admit charges n calls to the address and to all, and reports whether both rates allow them. If not, refusal has the
// headers of the answer.
func (l *SharedLimiter) Admit(addr netip.Addr, n int) (ok bool, refusal Option) {
	// The address comes first, so that what it is refused costs others nothing. What the rate of all refuses stays
	// charged to the address.
	now := time.Now()
	for _, of := range []struct {
		rates  *RateLimiter
		caller Caller
	}{{l.address, Caller{Addr: addr}}, {l.all, Caller{}}} {
		ok, wait := of.rates.AllowN(of.caller, n, now)
		if !ok {
			return false, Limited(of.rates.Rate, wait)
		}
	}

	return true, nil
}

// limitKey returns the /64 of an IPv6 address, and other addresses as they are.
func limitKey(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if !addr.Is6() {
		return addr
	}
	prefix, _ := addr.Prefix(64) // fails only for more bits than the address has

	return prefix.Addr()
}
