package gateway

import (
	"container/list"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Limits for calls without any identity, per address.
const (
	anonymousRate  = 10      // calls a second
	anonymousBurst = 100     // calls at once
	maxAddresses   = 1 << 16 // addresses remembered
)

// addressLimiter is a token bucket per address, of IPv6 per /64, the least
// that one customer gets. It remembers at most limit addresses; at the bound
// the one idle for longest is forgotten, which gives nothing away when its
// bucket is full again, and else a new burst. Buckets that are full again are
// dropped as others come. Safe for use by many goroutines.
type addressLimiter struct {
	rate  rate.Limit
	burst int
	limit int
	full  time.Duration // idle for this long, a bucket is full

	mu      sync.Mutex
	buckets map[netip.Addr]*list.Element // of *addressBucket
	idle    list.List                    // of *addressBucket, the one used last in front
}

type addressBucket struct {
	addr   netip.Addr
	tokens *rate.Limiter
	used   time.Time
}

func newAddressLimiter() *addressLimiter {
	return newLimiter(anonymousRate, anonymousBurst, maxAddresses)
}

// newLimiter needs a positive rate, burst and limit.
func newLimiter(perSecond rate.Limit, burst, limit int) *addressLimiter {
	return &addressLimiter{
		rate:    perSecond,
		burst:   burst,
		limit:   limit,
		full:    time.Duration(float64(burst) / float64(perSecond) * float64(time.Second)),
		buckets: make(map[netip.Addr]*list.Element),
	}
}

// allow takes a token of addr, or says how long there will be none.
func (l *addressLimiter) allow(addr netip.Addr, now time.Time) (ok bool, retryAfter time.Duration) {
	addr = limitKey(addr)
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.bucket(addr, now)
	if b.tokens.AllowN(now, 1) {
		return true, 0
	}
	missing := 1 - b.tokens.TokensAt(now)
	return false, max(time.Nanosecond, time.Duration(missing/float64(l.rate)*float64(time.Second)))
}

// bucket returns the bucket of addr, now the one used last.
func (l *addressLimiter) bucket(addr netip.Addr, now time.Time) *addressBucket {
	if e, ok := l.buckets[addr]; ok {
		l.idle.MoveToFront(e)
		b := e.Value.(*addressBucket)
		if now.After(b.used) {
			b.used = now
		}
		return b
	}
	// Two leave at most for one that comes, so the map shrinks again after a
	// flood and no call does more than a little work.
	for range 2 {
		last := l.idle.Back()
		if last == nil {
			break
		}
		b := last.Value.(*addressBucket)
		if len(l.buckets) < l.limit && now.Sub(b.used) < l.full {
			break
		}
		l.idle.Remove(last)
		delete(l.buckets, b.addr)
	}
	b := &addressBucket{addr: addr, tokens: rate.NewLimiter(l.rate, l.burst), used: now}
	l.buckets[addr] = l.idle.PushFront(b)
	return b
}

// limitKey is what addresses of one customer have in common.
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
