package api

import (
	"context"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/bounds"
	"headcount/gateway/calls"
	"headcount/presence"
)

// An erasure scans every set. If it takes longer than eraseTimeout, it is answered with 503, and starts from the
// beginning when it is repeated.
const eraseTimeout = 25 * time.Second

// erasures limit how busy erasures keep the store. Those of servers do not wait for those of visitors.
type erasures struct {
	rates             *bounds.Rates // of visitors
	addresses         *bounds.Slots // of visitors
	visitors, servers bounds.Turn   // of erasures that scan the sets
}

func newErasures() erasures {
	return erasures{
		rates:     bounds.NewRates(bounds.Erasures),
		addresses: bounds.NewSlots(bounds.ErasuresOfAddress.Max),
		visitors:  bounds.NewTurn(bounds.ErasuresAtOnce.Max),
		servers:   bounds.NewTurn(bounds.ErasuresAtOnce.Max),
	}
}

// turn waits until an erasure may scan the sets. visitor is the slot of the visitor's address; nil: a server asks. The
// caller must call end afterwards.
func (e *erasures) turn(ctx context.Context, visitor *bounds.Slot) (end func(), err error) {
	turn := e.servers
	if visitor != nil {
		turn = e.visitors
	}

	end, err = turn.Wait(ctx, visitor)
	if err != nil {
		return nil, presence.ErrUnavailable
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
	refusal := bounds.Admit(bounds.Caller{Addr: addr}, 1, a.erasures.rates)
	if refusal != nil {
		return a.counted(LimitRate, refusal)
	}

	slot, fits := a.erasures.addresses.Enter(addr)
	if !fits {
		return a.counted(LimitRate, bounds.Erasures.Refusal(0))
	}
	defer slot.Leave()

	return a.erase(c, user, slot)
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
func (a *API) erase(c *gin.Context, user string, visitor *bounds.Slot) error {
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
