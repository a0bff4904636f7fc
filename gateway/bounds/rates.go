package bounds

import (
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"headcount/gateway/httppolicy"
)

// maxCallers is how many callers Rates remember.
const maxCallers = 1 << 16

// Rates hold a bound on how often, by a token bucket for each that has the bound. They remember
// maxCallers; beyond that they forget the one that has not called for the longest time,
// which then has a whole burst again. They are safe for use by many goroutines.
type Rates struct {
	bound *Bound
	began time.Time // the times of callers count from then

	mu      sync.Mutex
	callers *simplelru.LRU[Caller, time.Duration] // when the caller's whole burst is available again; guarded by mu
}

// Caller is who calls: an address and, where it is known, the user.
type Caller struct {
	User string
	Addr netip.Addr
}

// NewRates returns Rates that hold a bound, and have charged nothing.
func NewRates(b *Bound) *Rates { return newRates(b, maxCallers) }

func newRates(b *Bound, callers int) *Rates {
	return &Rates{bound: b, began: time.Now(), callers: newLRU[Caller, time.Duration](callers, nil)}
}

// newLRU returns a map that forgets the least recently used entry.
func newLRU[K comparable, V any](size int, forget func(K, V)) *simplelru.LRU[K, V] {
	lru, _ := simplelru.NewLRU(size, forget) // fails only for a size under 1
	return lru
}

// Admit charges n calls of a caller to each of the rates. It returns the refusal of the first one that does not allow
// them, and charges nothing to those after it, so the rate that is shared by most has to come last: what the others
// refuse costs nobody else anything. What a later one refuses stays charged to those before it.
func Admit(c Caller, n int, rates ...*Rates) error {
	if n == 0 {
		return nil
	}

	now := time.Now()
	for _, r := range rates {
		wait := r.take(c, n, now)
		if wait > 0 {
			return r.bound.Refusal(wait)
		}
	}

	return nil
}

// take charges n calls to a caller. If they are too many, it charges none, and returns how long until they may be made.
func (r *Rates) take(c Caller, n int, now time.Time) (wait time.Duration) {
	c = r.bound.Each.holder(c)
	at := now.Sub(r.began)

	r.mu.Lock()
	defer r.mu.Unlock()

	back, known := r.callers.Get(c)
	if !known {
		back = at
	}

	after, wait := r.bound.Take(back, at, n)
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

	return wait
}

// holder returns who has the bound when a caller calls.
func (k Key) holder(c Caller) Caller {
	if k == Everybody {
		return Caller{}
	}

	// A user is one caller, whatever the address.
	if k == User && c.User != "" {
		return Caller{User: c.User}
	}

	return Caller{Addr: httppolicy.Customer(c.Addr)}
}
