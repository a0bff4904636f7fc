package api

import (
	"context"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	// An erasure scans every set. If it takes longer than eraseTimeout, it is answered with 503, and starts from the
	// beginning when it is repeated.
	eraseTimeout = 25 * time.Second

	// One call of a visitor can keep the store busy for all of that time. So an address may make eraseRate calls per
	// second and eraseBurst at once. The gateway runs erasesAtOnce scans at a time, at most one for each address.
	eraseRate    = 1
	eraseBurst   = 5
	erasesAtOnce = 2
	maxErasures  = eraseBurst + eraseRate*int(eraseTimeout/time.Second) // of one address
)

// erasures limit how busy erasures keep the store. Those of servers do not wait for those of visitors.
type erasures struct {
	rates             *httppolicy.RateLimiter  // of visitors
	addresses         *httppolicy.AddressSlots // of visitors
	visitors, servers chan struct{}            // semaphores: an element for each erasure that looks at sets
}

func newErasures() erasures {
	return erasures{
		rates:     httppolicy.NewRateLimiter(eraseRate, eraseBurst),
		addresses: httppolicy.NewAddressSlots(maxErasures),
		visitors:  make(chan struct{}, erasesAtOnce),
		servers:   make(chan struct{}, erasesAtOnce),
	}
}

// turn waits until an erasure may scan the sets. visitor is the slot of the visitor's address; nil: a server asks. The
// caller must call end afterwards.
func (e *erasures) turn(ctx context.Context, visitor *httppolicy.AddressSlot) (end func(), err error) {
	turns := []chan struct{}{e.servers}
	if visitor != nil {
		// First the address, so that only one erasure of it at a time waits among all visitors.
		turns = []chan struct{}{visitor.Turn(), e.visitors}
	}

	taken := 0
	// It gives back only what was taken, so it also ends an attempt that gave up.
	end = func() {
		for _, turn := range turns[:taken] {
			<-turn
		}
	}
	for _, turn := range turns {
		select {
		case turn <- struct{}{}:
			taken++
		case <-ctx.Done():
			end()
			return nil, presence.ErrUnavailable
		}
	}

	return end, nil
}

// deleteMe erases the data of the caller, and makes the browser forget the identity.
func (a *API) deleteMe(c *gin.Context) (calls.Answer, error) {
	id, err := a.callers.Identify(c)
	if err != nil {
		return calls.Answer{}, err
	}

	// A caller that was unknown before this call has no data.
	unknown := id.Fresh && !id.Derived
	if !unknown {
		if err := a.eraseVisitor(c, id.User); err != nil {
			return calls.Answer{}, err
		}
	}
	secure := a.callers.Proxies.Secure(c.Request)
	a.callers.Identities.ForgetCookie(c.Writer, c.Request, siteOf(c), secure)

	return calls.NoContent, nil
}

// eraseVisitor is erase for a visitor, within the limits of its address.
func (a *API) eraseVisitor(c *gin.Context, user string) error {
	addr := a.callers.Addr(c.Request)
	allowed, wait := a.erasures.rates.Allow(httppolicy.Caller{Addr: addr}, time.Now())
	if !allowed {
		return a.erasedTooOften(wait)
	}

	// The rate alone would let an address queue erasures faster than they end.
	slot, fits := a.erasures.addresses.Enter(addr)
	if !fits {
		return a.erasedTooOften(wait)
	}
	defer slot.Leave()

	return a.erase(c, user, slot)
}

func (a *API) erasedTooOften(wait time.Duration) error {
	return a.tooMany(LimitRate, "This address has erased too often lately; erase again later.",
		httppolicy.Limited(a.erasures.rates.Rate, wait))
}

// deleteUser erases the data of the user that a server names in the path.
func (a *API) deleteUser(c *gin.Context) (calls.Answer, error) {
	user, err := a.callers.userInPath(c)
	if err != nil {
		return calls.Answer{}, err
	}

	return calls.NoContent, a.erase(c, user, nil)
}

// erase erases the user's follows, unread changes, last departure and memberships in the request's site.
// visitor is the slot of the visitor's address; nil: a server asks.
func (a *API) erase(c *gin.Context, user string, visitor *httppolicy.AddressSlot) error {
	site := siteOf(c)

	return a.carryOut(c, eraseTimeout, func(ctx context.Context) error {
		if err := a.parts.Follows.Forget(ctx, a.callers.UserOf(site, user)); err != nil {
			return err
		}
		// Do this even if --last-seen is 0, because an earlier process may have had another setting.
		if err := a.cfg.LastSeen.ForgetSeen(ctx, a.callers.Identities.Hash(site.Qualify(user))); err != nil {
			return err
		}

		// Wait for a turn only now: the steps before take a call or two, but the rest scans every set.
		end, err := a.erasures.turn(ctx, visitor)
		if err != nil {
			return err
		}
		defer end()

		return a.parts.Counters.Erase(ctx, site, user, visitor == nil)
	})
}
