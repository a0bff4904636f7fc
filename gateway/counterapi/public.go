package counterapi

import (
	"context"
	"fmt"
	"hash/maphash"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Limits of callers without API key, in one gateway. Identities cost nothing, so a limit of each user alone would limit
// nobody. An IPv6 /64 is one address.
const (
	userRate      = 10               // changes a second of a user, and of an address that brings no identity
	userBurst     = 20               // at once
	addressRate   = 100              // changes a second of all users of an address
	addressBurst  = 1000             // at once
	identityRate  = 10               // different anonymous identities a second of an address, not counting those used lately
	identityBurst = 300              // at once
	lately        = 10 * time.Minute // since the last use of an identity

	newRate     = 10  // new counters a second of an address
	newBurst    = 500 // at once
	allNewRate  = 100 // new counters a second of all
	allNewBurst = 10_000
	sizeAge     = 10 * time.Minute // longest age of the number of a rule's counters
	maxExisting = 1 << 16          // counters known to exist; beyond that the one used longest ago is forgotten
)

// publicBounds limit the changes of callers without API key. They are safe for use by many goroutines.
type publicBounds struct {
	users, addresses *httppolicy.RateLimiter
	made             *httppolicy.SharedLimiter // new counters
	identities       *httppolicy.IdentityLimiter
	seed             maphash.Seed
	existing         *lru.Cache[uint64, struct{}] // hashes of the names of counters

	mu    sync.Mutex
	sizes map[*counter.Rule]*ruleSize // guarded by mu; one for each public rule
}

// ruleSize is an estimate of how many counters a rule has.
type ruleSize struct {
	counters int64
	counted  time.Time // zero: never
	counting bool      // one caller counts, and the others use the old number
}

func newPublicBounds() *publicBounds {
	existing, _ := lru.New[uint64, struct{}](maxExisting) // fails only for a size under 1
	return &publicBounds{
		users: httppolicy.NewRateLimiter(userRate, userBurst), addresses: httppolicy.NewRateLimiter(addressRate, addressBurst),
		made:       httppolicy.NewSharedLimiter(limit.PerSecond(newRate, newBurst), limit.PerSecond(allNewRate, allNewBurst)),
		identities: httppolicy.NewIdentityLimiter(limit.PerSecond(identityRate, identityBurst), lately),
		seed:       maphash.MakeSeed(), existing: existing, sizes: map[*counter.Rule]*ruleSize{},
	}
}

// refusal is a 429.
type refusal struct {
	detail string
	header httppolicy.Option
	full   bool // the rule has its maximum of counters
}

// limited reports whether a caller without API key has reached a limit. If so, it has written the error answer.
func (a *API) limited(c *gin.Context, one call, change *counter.Change) bool {
	if one.server {
		return false
	}
	ctx, cancel := a.within(c)
	defer cancel()
	addr, now := a.callers.Addr(c.Request), time.Now()
	r := a.bounds.refuses(one, addr, now)
	if r == nil {
		r = a.refusesNew(ctx, one, change, addr, now)
	}
	if r == nil {
		return false
	}
	if known, err := a.read(ctx, []string{one.key}, "", one.rule.Stale); err == nil {
		if conflict := change.Refusal(known[0].Counter); conflict != nil {
			a.refused(c, []counter.Change{*change}, conflict)
			return true
		}
	}
	if r.full {
		a.metrics.full.Inc()
	} else {
		a.metrics.limited.Inc()
	}
	httppolicy.Problem(c.Writer, http.StatusTooManyRequests, r.detail, r.header)
	return true
}

// refuses returns the limit that a caller has reached with any change, or nil.
func (b *publicBounds) refuses(one call, addr netip.Addr, now time.Time) *refusal {
	caller := httppolicy.Caller{User: one.id.User}
	if one.id.Fresh {
		caller = httppolicy.Caller{Addr: addr}
	}
	if ok, wait := b.users.Allow(caller, now); !ok {
		return &refusal{
			detail: fmt.Sprintf("Counters may be changed %d times a second by one user, and by one address that brings no identity, %d at once; send the change again later.", userRate, userBurst),
			header: httppolicy.Limited(b.users.Rate, wait),
		}
	}
	if ok, wait := b.addresses.Allow(httppolicy.Caller{Addr: addr}, now); !ok {
		return &refusal{
			detail: fmt.Sprintf("All users of one address together may change counters %d times a second, %d at once; send the change again later.", addressRate, addressBurst),
			header: httppolicy.Limited(b.addresses.Rate, wait),
		}
	}
	if one.id.Signed == "" { // the identity is a token's, and not to be had for nothing
		return nil
	}
	if ok, wait := b.identities.Allow(addr, uint64(one.id.Hash), now); !ok {
		return &refusal{
			detail: "This address has brought too many identities; send the id you were given, or wait.",
			header: httppolicy.Limited(b.identities.Rate, wait),
		}
	}
	return nil
}

// refusesNew returns why a change may not create its counter, or nil, also if the counter exists.
func (a *API) refusesNew(ctx context.Context, one call, change *counter.Change, addr netip.Addr, now time.Time) *refusal {
	b, hash := a.bounds, maphash.String(a.bounds.seed, one.key)
	if b.existing.Contains(hash) || change.Verb == counter.Edit && len(change.Join) == 0 {
		return nil
	}
	known, err := a.read(ctx, []string{one.key}, "", max(one.rule.Stale, time.Second))
	if err != nil { // the change will fail too
		return nil
	}
	if known[0].Version != (presence.Version{}) {
		b.existing.Add(hash, struct{}{})
		return nil
	}
	if ok, header := b.made.Admit(addr, 1); !ok {
		return &refusal{detail: "Too many new counters have been made lately, by this address or by all; send the change again later.", header: header}
	}
	if a.full(ctx, one.rule, now) {
		return &refusal{
			full: true, header: httppolicy.RetryAfter(sizeAge),
			detail: fmt.Sprintf("There are as many counters like %s as callers without an API key may make, %d; see max in the rules of counters.", one.rule.Written(), one.rule.Max),
		}
	}
	b.existing.Add(hash, struct{}{})
	return nil
}

// full reports whether a rule has its maximum of counters; if not, it counts one more. It asks the store at most once in
// sizeAge, so with several gateways there may be as many more as the others have created since.
func (a *API) full(ctx context.Context, rule *counter.Rule, now time.Time) bool {
	prefix, several := strings.CutSuffix(rule.Match, "*")
	if !several {
		return false
	}
	b := a.bounds
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.sizes[rule]
	if s == nil {
		s = &ruleSize{}
		b.sizes[rule] = s
	}
	if !s.counting && now.Sub(s.counted) > sizeAge {
		s.counting = true
		b.mu.Unlock()
		n, err := a.cfg.Counters.Size(ctx, prefix)
		b.mu.Lock()
		if s.counting = false; err == nil {
			s.counters, s.counted = n, now
		}
	}
	if s.counters >= rule.Max {
		return true
	}
	s.counters++
	return false
}
