package policy

import (
	"container/list"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits for anonymous identities.
const (
	anonymousRate  = 10      // new identities a second, of one address
	anonymousBurst = 100     // new identities at once, of one address
	maxAddresses   = 1 << 16 // addresses remembered
	maxKnown       = 1 << 11 // identities of one address remembered in one generation
	maxKnownInAll  = 1 << 17 // identities remembered in all
)

// Limiter bounds how many different identities an address uses. Each address has a
// token bucket; an IPv6 /64, the least that one customer gets, counts as one address.
// An identity that the address used lately costs no token.
//
// The limiter remembers at most limit addresses. At the bound it forgets the address
// that was idle the longest; if the bucket of that address is not full by then, the
// address gains a new burst. The limiter remembers at most maxKnown identities of an
// address in a generation, and maxKnownInAll of all addresses. An identity beyond
// these bounds costs a token each time it is used. A Limiter is safe for use by many
// goroutines.
type Limiter struct {
	rate    rate.Limit
	burst   int
	limit   int
	memory  time.Duration // an identity is remembered for at least this long after its last use, and for at most twice as long
	idleFor time.Duration // after this idle time a bucket is full and remembers no identity

	mu      sync.Mutex
	buckets map[netip.Addr]*list.Element // of *addressBucket
	idle    list.List                    // of *addressBucket, the last used one in front
	known   int                          // identities remembered, in all buckets
}

type addressBucket struct {
	addr   netip.Addr
	tokens *rate.Limiter
	used   time.Time

	// The identities used in this generation, and in the generation before.
	young, old map[uint64]struct{}
	turned     time.Time // when this generation began
}

// NewLimiter returns a Limiter for anonymous identities. An identity used again
// within memory costs nothing.
func NewLimiter(memory time.Duration) *Limiter {
	return newLimiter(anonymousRate, anonymousBurst, maxAddresses, memory)
}

// newLimiter returns a Limiter. The rate, burst and limit must be positive.
func newLimiter(perSecond rate.Limit, burst, limit int, memory time.Duration) *Limiter {
	full := time.Duration(float64(burst) / float64(perSecond) * float64(time.Second))
	return &Limiter{
		rate:    perSecond,
		burst:   burst,
		limit:   limit,
		memory:  memory,
		idleFor: max(full, 2*memory),
		buckets: make(map[netip.Addr]*list.Element),
	}
}

// Allow reports whether addr may use the identity who. If not, retryAfter is how long
// until addr may use a new identity.
func (l *Limiter) Allow(addr netip.Addr, who uint64, now time.Time) (ok bool, retryAfter time.Duration) {
	addr = limitKey(addr)
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(addr, now)
	l.turn(b, now)
	if !b.knows(who) && !b.tokens.AllowN(now, 1) {
		missing := 1 - b.tokens.TokensAt(now)
		return false, max(time.Nanosecond, time.Duration(missing/float64(l.rate)*float64(time.Second)))
	}
	l.remember(b, who)
	return true, 0
}

func (b *addressBucket) knows(who uint64) bool {
	if _, ok := b.young[who]; ok {
		return true
	}
	_, ok := b.old[who]
	return ok
}

// turn begins a new generation when the last one is over.
func (l *Limiter) turn(b *addressBucket, now time.Time) {
	age := now.Sub(b.turned)
	if age < l.memory {
		return
	}
	l.known -= len(b.old)
	b.old, b.young, b.turned = b.young, nil, now
	if age >= 2*l.memory {
		l.known -= len(b.old)
		b.old = nil
	}
}

func (l *Limiter) remember(b *addressBucket, who uint64) {
	if _, ok := b.young[who]; ok || len(b.young) >= maxKnown || l.known >= maxKnownInAll || l.memory == 0 {
		return
	}
	if b.young == nil {
		b.young = make(map[uint64]struct{})
	}
	b.young[who] = struct{}{}
	l.known++
}

// bucket returns the bucket of addr, and marks it as used last.
func (l *Limiter) bucket(addr netip.Addr, now time.Time) *addressBucket {
	e, found := l.buckets[addr]
	if found {
		l.idle.MoveToFront(e)
	}
	// Each call removes at most two buckets: the map shrinks again after a flood, and
	// no call takes long.
	for range 2 {
		last := l.idle.Back()
		if last == nil || last == e {
			break
		}
		b := last.Value.(*addressBucket)
		if (found || len(l.buckets) < l.limit) && now.Sub(b.used) < l.idleFor {
			break
		}
		l.idle.Remove(last)
		delete(l.buckets, b.addr)
		l.known -= len(b.young) + len(b.old)
	}
	if found {
		b := e.Value.(*addressBucket)
		if now.After(b.used) {
			b.used = now
		}
		return b
	}
	b := &addressBucket{addr: addr, tokens: rate.NewLimiter(l.rate, l.burst), used: now, turned: now}
	l.buckets[addr] = l.idle.PushFront(b)
	return b
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
