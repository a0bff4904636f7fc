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
	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
)

const (
	lately      = 10 * time.Minute // since the last use of an identity
	sizeAge     = 10 * time.Minute // maximum age of the number of a rule's counters
	maxExisting = 1 << 16          // counters known to exist; beyond it the least recently used one is dropped
)

// publicBounds limits the changes of callers without API key. Its methods may be called from any goroutine.
type publicBounds struct {
	changes    []*bounds.Rates // of a user, then of an address
	made       []*bounds.Rates // new counters, of an address, then of all
	identities *bounds.Identities
	seed       maphash.Seed
	existing   *lru.Cache[uint64, struct{}] // hashes of the names of counters

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

	return &publicBounds{
		changes:    []*bounds.Rates{bounds.NewRates(bounds.Changes), bounds.NewRates(bounds.ChangesOfAddress)},
		made:       []*bounds.Rates{bounds.NewRates(bounds.NewCounters), bounds.NewRates(bounds.NewCountersOfAll)},
		identities: bounds.NewIdentities(bounds.IdentitiesOfChanges, lately),
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
	refusal := a.bounds.admit(one, addr)
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
func (b *publicBounds) admit(one call, addr netip.Addr) error {
	caller := bounds.Caller{User: one.id.User, Addr: addr}

	// Anyone can get a fresh identity for each call, so these calls count for the address.
	if one.id.Fresh {
		caller.User = ""
	}
	if err := bounds.Admit(caller, 1, b.changes...); err != nil {
		return err
	}

	// The identity of a token is not free, so only other identities are limited per address.
	if one.id.Signed == "" {
		return nil
	}

	return b.identities.Admit(addr, uint64(one.id.Hash))
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
	if err := bounds.Admit(bounds.Caller{Addr: addr}, 1, b.made...); err != nil {
		return err
	}
	if !a.claim(ctx, one.rule, now) {
		const form = "There are as many counters like %s as callers without an API key may make, %d; " +
			"see max in the rules of counters."
		detail := fmt.Sprintf(form, one.rule.Written(), one.rule.Max)
		return calls.Refuse(errFull, detail, httppolicy.RetryAfter(sizeAge))
	}
	// The counter has been counted, so the next call need not count it, whether this change is made or refused.
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
