package bounds

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/gateway/httppolicy"
)

// What Identities remember.
const (
	maxKnown      = 1 << 12 // identities remembered of one address
	maxKnownInAll = 1 << 17 // identities remembered in all
)

// Identities hold a bound on how many different identities each address uses. An identity that
// the address has used lately is free; any other identity is charged to the address's rate.
//
// They remember maxKnown identities of an address, and maxKnownInAll of all addresses.
// At these bounds they remember no further identity, which is then charged at each use. If they
// forgot an older identity instead, all users of a large shared address would be charged. They are
// safe for use by many goroutines.
type Identities struct {
	addresses *Rates        // of new identities
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

// NewIdentities returns Identities that hold the bound of an address on new ones. An identity used again within memory
// is free.
func NewIdentities(b *Bound, memory time.Duration) *Identities {
	l := &Identities{addresses: NewRates(b), memory: memory, count: map[netip.Addr]int{}}
	l.known = newLRU(maxKnownInAll, func(id usedIdentity, _ time.Time) {
		// Every removal comes here, also that of the oldest, so that count follows known.
		l.count[id.addr]--
		if l.count[id.addr] == 0 {
			delete(l.count, id.addr)
		}
	})

	return l
}

// Admit returns the refusal of an identity that is one too many of its address.
func (l *Identities) Admit(addr netip.Addr, identity uint64) error {
	wait := l.take(addr, identity, time.Now())
	if wait > 0 {
		return l.addresses.bound.Refusal(wait)
	}

	return nil
}

// take records the use of an identity. If the address may not use it, it returns how long until the address may use a
// new one.
func (l *Identities) take(addr netip.Addr, identity uint64, now time.Time) (wait time.Duration) {
	id := usedIdentity{httppolicy.Customer(addr), identity}

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
		wait := l.addresses.take(Caller{Addr: addr}, 1, now)
		if wait > 0 {
			return wait
		}
	}

	switch {
	case known:
		l.known.Add(id, now)
	case l.hasRoomLocked(id.addr):
		l.known.Add(id, now)
		l.count[id.addr]++
	}

	return 0
}

// hasRoomLocked reports whether one more identity of an address may be remembered.
func (l *Identities) hasRoomLocked(addr netip.Addr) bool {
	return l.memory > 0 && l.count[addr] < maxKnown && l.known.Len() < maxKnownInAll
}
