package httppolicy

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/counter/limit"
)

// Bounds of a Limiter.
const (
	maxAddresses  = 1 << 16 // addresses remembered
	maxKnown      = 1 << 11 // identities of one address remembered in one generation
	maxKnownInAll = 1 << 17 // identities remembered in all
)

// Limiter bounds how many different identities an address uses. Each address has a
// rate of its own; an IPv6 /64, the least that one customer gets, counts as one address.
// An identity that the address used lately costs nothing.
//
// The limiter remembers at most maxAddresses. At the bound it forgets the address
// that was idle the longest; if the limit of that address is not all back by then, the
// address gains a new burst. The limiter remembers at most maxKnown identities of an
// address in a generation, and maxKnownInAll of all addresses. An identity beyond
// these bounds costs one each time it is used. A Limiter is safe for use by many
// goroutines.
type IdentityLimiter struct {
	Rate    limit.Rate    // of each address; it never changes
	began   time.Time     // the times of addresses count from then
	memory  time.Duration // an identity is remembered for at least this long after its last use, and for at most twice as long
	idleFor time.Duration // after this idle time all of the limit is back and no identity is remembered

	mu        sync.Mutex // guards all below
	addresses *simplelru.LRU[netip.Addr, *address]
	known     int // identities remembered, of all addresses
}

type address struct {
	back time.Duration // when all of its limit is back
	used time.Duration

	// The identities used in this generation, and in the generation before.
	young, old map[uint64]struct{}
	turned     time.Duration // when this generation began
}

// NewIdentityLimiter returns a Limiter that allows each address this rate of new identities. One
// used again within memory costs nothing.
func NewIdentityLimiter(rate limit.Rate, memory time.Duration) *IdentityLimiter {
	return newIdentityLimiter(rate, maxAddresses, memory)
}

// newIdentityLimiter returns a Limiter that remembers so many addresses.
func newIdentityLimiter(rate limit.Rate, addresses int, memory time.Duration) *IdentityLimiter {
	l := &IdentityLimiter{Rate: rate, began: time.Now(), memory: memory, idleFor: max(rate.Window(), 2*memory)}
	l.addresses = newLRU(addresses, func(_ netip.Addr, a *address) { l.known -= len(a.young) + len(a.old) })
	return l
}

// Allow reports whether addr may use the identity who. If not, retryAfter is how long
// until addr may use a new identity.
func (l *IdentityLimiter) Allow(addr netip.Addr, who uint64, now time.Time) (ok bool, retryAfter time.Duration) {
	addr = limitKey(addr)
	at := now.Sub(l.began)
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.address(addr, at)
	l.turn(a, at)
	if !a.knows(who) {
		back, wait := l.Rate.Take(a.back, at, 1)
		if wait > 0 {
			return false, wait
		}
		a.back = back
	}
	l.remember(a, who)
	return true, 0
}

func (a *address) knows(who uint64) bool {
	if _, ok := a.young[who]; ok {
		return true
	}
	_, ok := a.old[who]
	return ok
}

// turn begins a new generation when the last one is over.
func (l *IdentityLimiter) turn(a *address, now time.Duration) {
	age := now - a.turned
	if age < l.memory {
		return
	}
	l.known -= len(a.old)
	a.old, a.young, a.turned = a.young, nil, now
	if age >= 2*l.memory {
		l.known -= len(a.old)
		a.old = nil
	}
}

func (l *IdentityLimiter) remember(a *address, who uint64) {
	if _, ok := a.young[who]; ok || len(a.young) >= maxKnown || l.known >= maxKnownInAll || l.memory == 0 {
		return
	}
	if a.young == nil {
		a.young = make(map[uint64]struct{})
	}
	a.young[who] = struct{}{}
	l.known++
}

// address returns what is kept of addr, and marks it as used last.
func (l *IdentityLimiter) address(addr netip.Addr, now time.Duration) *address {
	a, found := l.addresses.Get(addr)
	// Each call forgets at most two that are idle: the map shrinks again after a flood, and
	// no call takes long.
	for range 2 {
		if _, last, ok := l.addresses.GetOldest(); !ok || last == a || now-last.used < l.idleFor {
			break
		}
		l.addresses.RemoveOldest()
	}
	if !found {
		a = &address{back: now, used: now, turned: now}
		l.addresses.Add(addr, a)
	}
	a.used = max(a.used, now)
	return a
}

// limitKey returns the /64 of an IPv6 address, and other addresses as they are: one
// customer has at least a /64.
func limitKey(addr netip.Addr) netip.Addr {
	addr = addr.Unmap().WithZone("")
	if !addr.Is6() {
		return addr
	}
	prefix, err := addr.Prefix(64)
	if err != nil {
		return addr
	}
	return prefix.Addr()
}
