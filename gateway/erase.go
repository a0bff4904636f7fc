package gateway

import (
	"context"
	"time"

	"github.com/gin-gonic/gin"
)

// eraseTime is how long an erasure may take: it looks at every set. One that takes longer
// is 503, and goes on from the beginning when it is repeated.
const eraseTime = 25 * time.Second

// deleteMe erases what is kept of the caller, and has the browser forget who that was.
func (g *Gateway) deleteMe(c *gin.Context) {
	id, err := g.identify(c, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	if !id.Fresh && !g.erase(c, id.User, false) {
		return
	}
	g.cfg.Identities.ForgetCookie(c.Writer, c.Request, g.cfg.Proxies.Secure(c.Request))
	done(c)
}

// deleteUser erases what is kept of the user that a server names in the path.
func (g *Gateway) deleteUser(c *gin.Context) {
	if user, ok := g.userInPath(c); ok && g.erase(c, user, true) {
		done(c)
	}
}

// erase erases follows, what is unread, and memberships, all of the request's site. If it returns false, it has
// written the error answer.
func (g *Gateway) erase(c *gin.Context, user string, server bool) bool {
	return g.carryOutIn(c, eraseTime, func(ctx context.Context) error {
		if err := g.unread.Book().Forget(ctx, g.userOf(siteOf(c), user)); err != nil || g.counters == nil {
			return err
		}
		return g.counters.Erase(ctx, siteOf(c), user, server)
	})
}
