package httppolicy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter/limit"
)

// maxCallers is how many callers Rates remember.
const maxCallers = 1 << 16

// Rates bound how often each caller may call. They remember maxCallers; beyond that the
// one that has not called for the longest time is forgotten, and has a whole burst again.
// They are safe for use by many goroutines.
type RateLimiter struct {
	Rate  limit.Rate // of each caller; it never changes
	began time.Time  // the times of callers count from then

	mu      sync.Mutex                             // guards all below
	callers *simplelru.LRU[Caller, *time.Duration] // when all of the caller's limit is back
}

// Caller is a user, or, when User is empty, an address.
type Caller struct {
	User string
	Addr netip.Addr
}

// NewRateLimiter returns Rates of that many calls a second, burst of them at once.
func NewRateLimiter(perSecond, burst int) *RateLimiter {
	return &RateLimiter{
		Rate: limit.PerSecond(perSecond, burst), began: time.Now(),
		callers: newLRU[Caller, *time.Duration](maxCallers, nil),
	}
}

// newLRU returns a map that forgets what was used longest ago.
func newLRU[K comparable, V any](size int, forget func(K, V)) *simplelru.LRU[K, V] {
	lru, err := simplelru.NewLRU(size, forget)
	if err != nil { // a size under 1
		panic(err)
	}
	return lru
}

// Allow reports whether the caller may call now. If not, retryAfter is how long until
// it may. Of IPv6 one /64 is one address.
func (r *RateLimiter) Allow(c Caller, now time.Time) (ok bool, retryAfter time.Duration) {
	return r.AllowN(c, 1, now)
}

// AllowN is Allow for n calls at once. If not all of them are allowed, none is taken.
func (r *RateLimiter) AllowN(c Caller, n int, now time.Time) (ok bool, retryAfter time.Duration) {
	if c.User != "" {
		c.Addr = netip.Addr{}
	} else {
		c.Addr = limitKey(c.Addr)
	}
	at := now.Sub(r.began)
	r.mu.Lock()
	defer r.mu.Unlock()
	back, known := r.callers.Get(c)
	if !known {
		back = new(at)
		r.callers.Add(c, back)
	}
	after, wait := r.Rate.Take(*back, at, n)
	if wait == 0 {
		*back = after
	}
	return wait == 0, wait
}
