package api

import (
	"context"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	// An erasure looks at every set. One that takes longer than eraseTimeout is answered with 503, and
	// starts again from the beginning when it is repeated.
	eraseTimeout = 25 * time.Second

	// One call of a visitor can keep the store busy for all of that time. So an address may make
	// eraseRate calls a second and eraseBurst at once, and the gateway looks at sets for erasesAtOnce,
	// of one address for one.
	eraseRate    = 1
	eraseBurst   = 5
	erasesAtOnce = 2
	maxErasures  = eraseBurst + eraseRate*int(eraseTimeout/time.Second) // of one address
)

// erasures bound how busy erasures keep the store. Those of servers do not wait for those of visitors.
type erasures struct {
	rates             *httppolicy.RateLimiter  // of visitors
	addresses         *httppolicy.AddressSlots // of visitors
	visitors, servers chan struct{}            // semaphores: an element for each erasure that looks at sets
}

func newErasures() erasures {
	return erasures{
		httppolicy.NewRateLimiter(eraseRate, eraseBurst), httppolicy.NewAddressSlots(maxErasures),
		make(chan struct{}, erasesAtOnce), make(chan struct{}, erasesAtOnce),
	}
}

// turn waits until an erasure may look at sets. visitor is the slot of the visitor's address; nil: a server
// asks. The caller calls end after that.
func (e *erasures) turn(ctx context.Context, visitor *httppolicy.AddressSlot) (end func(), err error) {
	turns := []chan struct{}{e.servers}
	if visitor != nil {
		turns = []chan struct{}{visitor.Turn(), e.visitors}
	}
	taken := 0
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

// deleteMe erases the data of the caller, and has the browser forget the identity.
func (a *API) deleteMe(c *gin.Context) {
	id, ok := a.callers.Identify(c)
	if !ok {
		return
	}
	if unknown := id.Fresh && !id.Derived; !unknown {
		addr, limits := a.callers.Addr(c.Request), a.erasures
		ok, wait := limits.rates.Allow(httppolicy.Caller{Addr: addr}, time.Now())
		var slot *httppolicy.AddressSlot
		if ok {
			slot, ok = limits.addresses.Enter(addr)
			defer slot.Leave()
		}
		if !ok {
			const detail = "This address has erased too often lately; erase again later."
			a.tooMany(c, LimitRate, detail, httppolicy.Limited(limits.rates.Rate, wait))
			return
		}
		if !a.erase(c, id.User, slot) {
			return
		}
	}
	a.callers.Identities.ForgetCookie(c.Writer, c.Request, siteOf(c), a.callers.Proxies.Secure(c.Request))
	httppolicy.NoContent(c)
}

// deleteUser erases the data of the user that a server names in the path.
func (a *API) deleteUser(c *gin.Context) {
	if user, ok := a.callers.userInPath(c); ok && a.erase(c, user, nil) {
		httppolicy.NoContent(c)
	}
}

// erase erases the user's follows, unread changes, last departure and memberships in the request's site.
// visitor is the slot of the visitor's address; nil: a server asks. If erase returns false, it has written
// the error answer.
func (a *API) erase(c *gin.Context, user string, visitor *httppolicy.AddressSlot) bool {
	return a.call(c, eraseTimeout, func(ctx context.Context) error {
		if err := a.parts.Follows.Forget(ctx, a.callers.UserOf(siteOf(c), user)); err != nil {
			return err
		}
		// Also with --last-seen 0: an earlier process may have had another setting.
		if err := a.cfg.LastSeen.ForgetSeen(ctx, a.callers.Identities.Hash(siteOf(c).Qualify(user))); err != nil {
			return err
		}
		end, err := a.erasures.turn(ctx, visitor)
		if err != nil {
			return err
		}
		defer end()
		return a.parts.Counters.Erase(ctx, siteOf(c), user, visitor == nil)
	})
}
