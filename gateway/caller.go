package gateway

import (
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

// writeIdentityProblem answers a request that Identify refused.
func writeIdentityProblem(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, errElsewhere):
		httppolicy.Problem(w, http.StatusForbidden, sentence(err), httppolicy.Because(httppolicy.ReasonSite))
	case errors.Is(err, identity.ErrKeysAway):
		httppolicy.Problem(w, http.StatusServiceUnavailable, err.Error(), httppolicy.RetryAfter(identity.KeysEvery))
	case errors.Is(err, identity.ErrNoToken):
		httppolicy.Problem(w, http.StatusUnauthorized, err.Error(), httppolicy.Because(httppolicy.ReasonNoToken))
	default:
		// RFC 6750: this error code belongs only to a token that the client sent.
		w.Header().Set("WWW-Authenticate", `Bearer realm="headcount", error="invalid_token"`)
		httppolicy.Problem(w, http.StatusUnauthorized, err.Error(), httppolicy.Because(httppolicy.ReasonBadToken))
	}
}

// public checks a request that needs no identity: it refuses one that carries a
// bad token. If it returns false, it has written the error answer.
func (g *Gateway) public(c *gin.Context) bool {
	if err := g.cfg.Identities.CheckToken(c.Request); err != nil {
		writeIdentityProblem(c.Writer, err)
		return false
	}
	return true
}

// admit limits how many different anonymous identities one address uses for
// writes. New and old identities both count. An identity that the address used
// lately costs nothing, and a server with an API key has no limit. If admit
// returns false, it has written the error answer.
func (g *Gateway) admit(c *gin.Context, id identity.Identity) bool {
	if id.Signed == "" || g.keys.Has(httppolicy.APIKey(c.Request)) {
		return true
	}
	ok, wait := g.limiter.Allow(g.cfg.Proxies.Addr(c.Request), uint64(id.Hash), time.Now())
	if !ok {
		g.metrics.limits[limitIdentities].Inc()
		httppolicy.Problem(c.Writer, http.StatusTooManyRequests, "This address has brought too many identities; send the id you were given, or wait.", httppolicy.Limited(g.limiter.Rate, wait))
	}
	return ok
}

// admitPages limits how many new pages one address, and all together, name in requests. A page that
// somebody here subscribes to or that was read lately is free, and a server with an API key has
// no limit. If admitPages returns false, it has written the error answer.
func (g *Gateway) admitPages(c *gin.Context, pages ...string) bool {
	fresh := g.hub.Unread(presence.CountTopics(pages))
	if fresh == 0 || g.keys.Has(httppolicy.APIKey(c.Request)) || g.admitNewTopics(g.cfg.Proxies.Addr(c.Request), fresh) {
		return true
	}
	g.refuseNewPages(c)
	return false
}

func (g *Gateway) refuseNewPages(c *gin.Context) {
	g.metrics.limits[limitRate].Inc()
	httppolicy.Problem(c.Writer, http.StatusTooManyRequests, "This address, or all clients together, have asked for too many pages that nobody else here has.", httppolicy.RetryAfter(comeBack))
}

// issue has the caller keep the identity.
func (g *Gateway) issue(c *gin.Context, id identity.Identity) {
	g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	tellFresh(c, id)
}

// tellFresh puts a new identity into a header, where a client that cannot keep the cookie
// reads it.
func tellFresh(c *gin.Context, id identity.Identity) {
	if id.Fresh {
		c.Header(identity.Header, id.Signed)
	}
}

// server reports whether the request has a valid API key. If it returns false, it
// has written the error answer.
func (g *Gateway) server(c *gin.Context) bool {
	key := httppolicy.APIKey(c.Request)
	if g.keys.Has(key) {
		return true
	}
	c.Header("WWW-Authenticate", `API-Key realm="headcount"`)
	detail := "The API key is wrong."
	switch {
	case len(g.keys) == 0:
		detail = "Only a server with an API key may call this, and no key is configured: start Headcount with --api-key."
	case key == "":
		detail = "Only a server may call this: send an API key in the header " + httppolicy.APIKeyHeader + "."
	}
	httppolicy.Problem(c.Writer, http.StatusUnauthorized, detail, httppolicy.Because(httppolicy.ReasonAPIKey))
	return false
}

// whose finds the user whose follows a request reads or changes. If ok is false,
// it has written the error answer.
type whose interface {
	whose(c *gin.Context) (user unread.User, id identity.Identity, ok bool)
}

// A request is about the follows of its caller, or of the user that a server names
// in the path.
type (
	caller struct{ g *Gateway }
	named  struct{ g *Gateway }
)

func (w caller) whose(c *gin.Context) (unread.User, identity.Identity, bool) {
	id, err := w.g.identify(c, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return unread.User{}, identity.Identity{}, false
	}
	tellFresh(c, id)
	return w.g.userOf(id.Site, id.User), id, true
}

func (w named) whose(c *gin.Context) (unread.User, identity.Identity, bool) {
	name, ok := w.g.userInPath(c)
	if !ok {
		return unread.User{}, identity.Identity{}, false
	}
	return w.g.userOf(siteOf(c), name), identity.Identity{}, true
}

// userInPath returns the id of the user that a server names in the path. If ok is false,
// it has written the error answer.
func (g *Gateway) userInPath(c *gin.Context) (id string, ok bool) {
	if !g.server(c) {
		return "", false
	}
	id, err := url.PathUnescape(c.Param("user"))
	if err == nil {
		err = identity.CheckUser(id)
	}
	if err != nil {
		badRequest(c, err.Error())
		return "", false
	}
	return id, true
}

// mayLook reports whether the request may see the dashboard: it has a valid API
// key, or no keys are configured.
func (g *Gateway) mayLook(c *gin.Context) bool {
	return len(g.keys) == 0 || g.keys.Has(httppolicy.APIKey(c.Request))
}

func needsKey(c *gin.Context) {
	httppolicy.Problem(c.Writer, http.StatusUnauthorized, "The dashboard needs an API key of --api-key: send one in the header "+httppolicy.APIKeyHeader+".", httppolicy.Because(httppolicy.ReasonAPIKey))
}
