package policy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"golang.org/x/time/rate"
)

// maxCallers is how many callers Rates remember.
const maxCallers = 1 << 16

// Rates bound how often each caller may call: a token bucket for each. They
// remember maxCallers; beyond that the one that has not called for the longest time
// is forgotten, and has a whole burst again. They are safe for use by many goroutines.
type Rates struct {
	rate  rate.Limit
	burst int

	mu      sync.Mutex // guards all below
	callers *simplelru.LRU[Caller, *rate.Limiter]
}

// Caller is a user, or, when User is empty, an address.
type Caller struct {
	User string
	Addr netip.Addr
}

// NewRates returns Rates of that many calls a second, burst of them at once.
func NewRates(perSecond, burst int) *Rates {
	callers, err := simplelru.NewLRU[Caller, *rate.Limiter](maxCallers, nil)
	if err != nil { // a size under 1
		panic(err)
	}
	return &Rates{rate: rate.Limit(perSecond), burst: burst, callers: callers}
}

// Allow reports whether the caller may call now. If not, retryAfter is how long until
// it may. Of IPv6 one /64 is one address.
func (r *Rates) Allow(c Caller, now time.Time) (ok bool, retryAfter time.Duration) {
	return r.AllowN(c, 1, now)
}

// AllowN is Allow for n calls at once. If not all of them are allowed, none is taken.
func (r *Rates) AllowN(c Caller, n int, now time.Time) (ok bool, retryAfter time.Duration) {
	if c.User != "" {
		c.Addr = netip.Addr{}
	} else {
		c.Addr = limitKey(c.Addr)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	tokens, known := r.callers.Get(c)
	if !known {
		tokens = rate.NewLimiter(r.rate, r.burst)
		r.callers.Add(c, tokens)
	}
	if tokens.AllowN(now, n) {
		return true, 0
	}
	missing := float64(n) - tokens.TokensAt(now)
	return false, max(time.Nanosecond, time.Duration(missing/float64(r.rate)*float64(time.Second)))
}
