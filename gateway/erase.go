package gateway

import (
	"context"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/presence"
)

const (
	// eraseTime is how long an erasure may take: it looks at every set. One that takes longer
	// is 503, and goes on from the beginning when it is repeated.
	eraseTime = 25 * time.Second

	// One visitor's call can keep the store busy for all of that time, so an address has so many a
	// second, and so many at once, and the gateway makes so many at a time.
	eraseRate    = 1
	eraseBurst   = 5
	erasesAtOnce = 2
)

// erasures bound what erasures cost others. Those of servers do not wait for those of visitors.
type erasures struct {
	addresses         *httppolicy.RateLimiter // of visitors
	visitors, servers chan struct{}           // each holds one for each erasure that looks at sets
}

func newErasures() erasures {
	return erasures{httppolicy.NewRateLimiter(eraseRate, eraseBurst), make(chan struct{}, erasesAtOnce), make(chan struct{}, erasesAtOnce)}
}

// turn waits for the right to look at sets, and takes it.
func (e *erasures) turn(ctx context.Context, server bool) (end func(), err error) {
	turns := e.visitors
	if server {
		turns = e.servers
	}
	select {
	case turns <- struct{}{}:
		return func() { <-turns }, nil
	case <-ctx.Done():
		return nil, presence.ErrUnavailable
	}
}

// deleteMe erases what is kept of the caller, and has the browser forget who that was.
func (g *Gateway) deleteMe(c *gin.Context) {
	id, err := g.identify(c, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	if !id.Fresh {
		if ok, wait := g.erasures.addresses.Allow(httppolicy.Caller{Addr: g.cfg.Proxies.Addr(c.Request)}, time.Now()); !ok {
			g.metrics.limits[limitRate].Inc()
			httppolicy.Problem(c.Writer, http.StatusTooManyRequests, "This address has erased too often lately; erase again later.", httppolicy.Limited(g.erasures.addresses.Rate, wait))
			return
		}
		if !g.erase(c, id.User, false) {
			return
		}
	}
	g.cfg.Identities.ForgetCookie(c.Writer, c.Request, siteOf(c), g.cfg.Proxies.Secure(c.Request))
	done(c)
}

// deleteUser erases what is kept of the user that a server names in the path.
func (g *Gateway) deleteUser(c *gin.Context) {
	if user, ok := g.userInPath(c); ok && g.erase(c, user, true) {
		done(c)
	}
}

// erase erases follows, what is unread, and memberships, all of the request's site. If it returns
// false, it has written the error answer.
func (g *Gateway) erase(c *gin.Context, user string, server bool) bool {
	return g.carryOutIn(c, eraseTime, func(ctx context.Context) error {
		if err := g.unread.Follows().Forget(ctx, g.userOf(siteOf(c), user)); err != nil || g.counters == nil {
			return err
		}
		end, err := g.erasures.turn(ctx, server)
		if err != nil {
			return err
		}
		defer end()
		return g.counters.Erase(ctx, siteOf(c), user, server)
	})
}
