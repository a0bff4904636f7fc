package httppolicy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter/limit"
)

// Bounds of an IdentityLimiter.
const (
	maxKnown      = 1 << 12 // identities remembered of one address
	maxKnownInAll = 1 << 17 // identities remembered in all
)

// IdentityLimiter bounds how many different identities each address uses. An identity that
// the address has used lately is free; any other identity is charged to the address's rate.
//
// The limiter remembers maxKnown identities of an address, and maxKnownInAll of all addresses.
// At these bounds it remembers no further identity, which is then charged at each use. If it
// forgot an older identity instead, all users of a large shared address would be charged. It is
// safe for use by many goroutines.
type IdentityLimiter struct {
	Rate      limit.Rate // of new identities of each address; it never changes
	addresses *RateLimiter
	memory    time.Duration // how long an identity is remembered after its last use

	mu    sync.Mutex                              // guards all below
	known *simplelru.LRU[usedIdentity, time.Time] // when each was used last
	count map[netip.Addr]int                      // how many of known each address has
}

// usedIdentity is an identity that an address used.
type usedIdentity struct {
	addr netip.Addr
	who  uint64
}

// NewIdentityLimiter returns an IdentityLimiter that allows each address this rate of new
// identities. An identity used again within memory is free.
func NewIdentityLimiter(rate limit.Rate, memory time.Duration) *IdentityLimiter {
	l := &IdentityLimiter{
		Rate: rate, addresses: newRateLimiter(rate, maxCallers), memory: memory, count: map[netip.Addr]int{},
	}
	l.known = newLRU(maxKnownInAll, func(id usedIdentity, _ time.Time) {
		// Every removal comes here, also that of the oldest, so that count follows known.
		l.count[id.addr]--
		if l.count[id.addr] == 0 {
			delete(l.count, id.addr)
		}
	})

	return l
}

// Allow reports whether addr may use an identity. If not, retryAfter is how long until
// addr may use a new identity.
func (l *IdentityLimiter) Allow(addr netip.Addr, identity uint64, now time.Time) (ok bool, retryAfter time.Duration) {
	id := usedIdentity{limitKey(addr), identity}

	l.mu.Lock()
	defer l.mu.Unlock()

	// Each call forgets at most two identities, so that none takes long.
	for range 2 {
		_, used, some := l.known.GetOldest()
		if !some || now.Sub(used) < l.memory {
			break
		}
		l.known.RemoveOldest()
	}

	// Peek, since only a use that is allowed makes the identity younger.
	used, known := l.known.Peek(id)
	if !known || now.Sub(used) >= l.memory {
		ok, wait := l.addresses.Allow(Caller{Addr: addr}, now)
		if !ok {
			return false, wait
		}
	}

	switch {
	case known:
		l.known.Add(id, now)
	case l.hasRoomLocked(id.addr):
		l.known.Add(id, now)
		l.count[id.addr]++
	}

	return true, 0
}

// hasRoomLocked reports whether one more identity of an address may be remembered.
func (l *IdentityLimiter) hasRoomLocked(addr netip.Addr) bool {
	return l.memory > 0 && l.count[addr] < maxKnown && l.known.Len() < maxKnownInAll
}
