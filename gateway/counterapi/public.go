package counterapi

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	lru "github.com/hashicorp/golang-lru/v2"

	"headcount/counter"
	"headcount/counter/limit"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

// Limits of callers without API key, in one gateway. Identities are free, so limits per user alone would limit nobody:
// addresses are limited, too. An IPv6 /64 counts as one address.
const (
	userRate      = 10               // changes per second of a user, and of an address for requests without an identity
	userBurst     = 20               // at once
	addressRate   = 100              // changes per second of all users of an address
	addressBurst  = 1000             // at once
	identityRate  = 10               // anonymous identities per second of an address, besides those used lately
	identityBurst = 300              // at once
	lately        = 10 * time.Minute // since the last use of an identity

	newRate     = 10  // new counters per second of an address
	newBurst    = 500 // at once
	allNewRate  = 100 // new counters per second of all addresses together
	allNewBurst = 10_000
	sizeAge     = 10 * time.Minute // maximum age of the number of a rule's counters
	maxExisting = 1 << 16          // counters known to exist; beyond it the least recently used one is dropped
)

// publicBounds limits the changes of callers without API key. Its methods may be called from any goroutine.
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
	counting bool      // a caller is counting; others use the old number
}

func newPublicBounds() *publicBounds {
	existing, _ := lru.New[uint64, struct{}](maxExisting) // fails only for a size below 1
	ofAddress := limit.PerSecond(newRate, newBurst)
	ofAll := limit.PerSecond(allNewRate, allNewBurst)

	return &publicBounds{
		users:      httppolicy.NewRateLimiter(userRate, userBurst),
		addresses:  httppolicy.NewRateLimiter(addressRate, addressBurst),
		made:       httppolicy.NewSharedLimiter(ofAddress, ofAll),
		identities: httppolicy.NewIdentityLimiter(limit.PerSecond(identityRate, identityBurst), lately),
		seed:       maphash.MakeSeed(),
		existing:   existing,
		sizes:      map[*counter.Rule]*ruleSize{},
	}
}

var errFull = fmt.Errorf("%w: the rule has its maximum of counters", calls.ErrRate)

// limit returns an error if a caller without API key has reached a limit with a change. A change that the counter would
// refuse anyway gets that error instead.
func (a *API) limit(c *gin.Context, one call, change *counter.Change) error {
	ctx, cancel := a.within(c)
	defer cancel()

	addr := a.callers.Addr(c.Request)
	now := time.Now()
	refusal := a.bounds.admit(one, addr, now)
	if refusal == nil {
		refusal = a.admitNew(ctx, one, change, addr, now)
	}
	if refusal == nil {
		return nil
	}

	// If a bound or the kind refuses the change, waiting is no use, so that error takes precedence.
	known, err := a.read(ctx, []string{one.key}, "", one.rule.MaxAge)
	if err == nil {
		if conflict := change.Refusal(known[0].Counter); conflict != nil {
			return a.refused(c, []counter.Change{*change}, conflict)
		}
	}

	if errors.Is(refusal, errFull) {
		a.metrics.full.Inc()
	} else {
		a.metrics.limited.Inc()
	}

	return refusal
}

// admit returns an error if a caller has reached a limit for changes in general.
func (b *publicBounds) admit(one call, addr netip.Addr, now time.Time) error {
	caller := httppolicy.Caller{User: one.id.User}

	// Anyone can get a fresh identity for each call, so these calls count for the address.
	if one.id.Fresh {
		caller = httppolicy.Caller{Addr: addr}
	}
	// The user comes first, so that what a user is refused costs the address nothing.
	ok, wait := b.users.Allow(caller, now)
	if !ok {
		const form = "Counters may be changed %d times a second by one user, and by one address that brings no " +
			"identity, %d at once; send the change again later."
		detail := fmt.Sprintf(form, userRate, userBurst)
		return calls.Refuse(calls.ErrRate, detail, httppolicy.Limited(b.users.Rate, wait))
	}

	ok, wait = b.addresses.Allow(httppolicy.Caller{Addr: addr}, now)
	if !ok {
		const form = "All users of one address together may change counters %d times a second, %d at once; " +
			"send the change again later."
		detail := fmt.Sprintf(form, addressRate, addressBurst)
		return calls.Refuse(calls.ErrRate, detail, httppolicy.Limited(b.addresses.Rate, wait))
	}

	// The identity of a token is not free, so only other identities are limited per address.
	if one.id.Signed == "" {
		return nil
	}
	ok, wait = b.identities.Allow(addr, uint64(one.id.Hash), now)
	if !ok {
		return calls.Refuse(calls.ErrRate, "This address has brought too many identities; send the id you were given, "+
			"or wait.", httppolicy.Limited(b.identities.Rate, wait))
	}

	return nil
}

// admitNew returns an error if a change must not create its counter. It returns nil if the counter exists. It also
// returns nil if the store cannot say, because then the change will fail as well.
func (a *API) admitNew(
	ctx context.Context, one call, change *counter.Change, addr netip.Addr, now time.Time,
) error {
	b := a.bounds
	hash := maphash.String(b.seed, one.key)

	// Leaving a set does not create it.
	onlyLeaves := change.Verb == counter.Edit && len(change.Join) == 0
	if onlyLeaves || b.existing.Contains(hash) {
		return nil
	}

	// Whether a counter exists hardly ever changes, so this read may lag where others may not.
	known, err := a.read(ctx, []string{one.key}, "", max(one.rule.MaxAge, time.Second))
	if err != nil {
		return nil
	}
	if known[0].Touched() {
		b.existing.Add(hash, struct{}{})
		return nil
	}

	// The rate comes first, since claim may ask the store.
	ok, header := b.made.Admit(addr, 1)
	if !ok {
		return calls.Refuse(calls.ErrRate, "Too many new counters have been made lately, by this address or by all; "+
			"send the change again later.", header)
	}
	if !a.claim(ctx, one.rule, now) {
		const form = "There are as many counters like %s as callers without an API key may make, %d; " +
			"see max in the rules of counters."
		detail := fmt.Sprintf(form, one.rule.Written(), one.rule.Max)
		return calls.Refuse(errFull, detail, httppolicy.RetryAfter(sizeAge))
	}
	// It is counted now, whether the change is made or refused.
	b.existing.Add(hash, struct{}{})

	return nil
}

// claim counts one more counter of a rule, and reports whether the rule's maximum allows it. It asks the store at most
// once per sizeAge. So with several gateways, the maximum may be exceeded by the counters that the others have created
// since.
func (a *API) claim(ctx context.Context, rule *counter.Rule, now time.Time) bool {
	prefix, several := strings.CutSuffix(rule.Match, "*")
	// Such a rule has one counter.
	if !several {
		return true
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
		// Counting may take long; in the meantime other callers use the old number.
		s.counting = true
		b.mu.Unlock()
		n, err := a.cfg.Counters.Size(ctx, prefix)
		b.mu.Lock()
		s.counting = false
		// After a failure the old number counts, and the next caller asks again.
		if err == nil {
			s.counters = n
			s.counted = now
		}
	}

	if s.counters >= rule.Max {
		return false
	}
	// Counted here, too, so that the bound holds until the store is asked again.
	s.counters++

	return true
}
