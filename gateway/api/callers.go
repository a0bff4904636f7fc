package api

import (
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
	"headcount/unread"
)

// Access identifies callers and decides what they may call.
type Access struct {
	Identities *identity.Identities
	Sites      *identity.Sites
	Keys       identity.SiteKeys // of servers; empty: no server may call
	Proxies    *identity.Proxies
	// CacheReads is how long proxies may cache the answers to public GETs, in whole seconds. 0: not at all.
	CacheReads time.Duration
	Private    Matches   // pages that need an API key, or a token whose claim pages has them
	PublicTop  PublicTop // pages that visitors may see in the list of the pages with the most users
	CountBots  bool      // crawlers are counted like people
}

// Callers identifies the sender of a request: a visitor of a site, or a server with an API key.
type Callers struct {
	Access
	Restart RestartDoubt
	Ignored *prometheus.CounterVec // clients that are not counted, by reason
}

// RestartDoubt is the time after a restart during which counts may lack users that have not reconnected yet.
type RestartDoubt interface {
	// Note checks whether the client was connected before the restart. It must be called before the client gets a
	// count.
	Note(r *http.Request, id identity.Identity)
	// Doubtful reports whether counts are stale for that reason.
	Doubtful() bool
}

// ErrElsewhere refuses a request from a page of one site that would act as its visitor on another site.
var ErrElsewhere = calls.Refuse(calls.ErrOtherSite,
	"This page is of another site, and a visitor is somebody else there; ask without a site.")

// Site returns the site that a request is for.
func (w *Callers) Site(c *gin.Context) presence.Site { return siteOf(c) }

// Cacheable allows proxies to cache the answer to a public GET for CacheReads, unless it is about a private page.
func (w *Callers) Cacheable(c *gin.Context, pages ...string) {
	if w.CacheReads == 0 || slices.ContainsFunc(pages, w.Private.Has) {
		return
	}

	h := c.Writer.Header()
	httppolicy.Cacheable(h, w.CacheReads)

	// The CORS headers depend on the origin. With several sites, the answer also depends on everything that Sites.Of
	// reads.
	httppolicy.AddVary(h, "Origin")
	if len(w.Sites.All()) > 1 {
		httppolicy.AddVary(h, identity.SiteHeader, "Sec-Fetch-Site")
	}
}

// IsServer reports whether the request has a valid API key.
func (w *Callers) IsServer(r *http.Request) bool { return w.Keys.Has(httppolicy.APIKey(r)) }

// Addr returns the address of the client, as reported by trusted proxies.
func (w *Callers) Addr(r *http.Request) netip.Addr { return w.Proxies.Addr(r) }

// Identity returns the sender of the request as a user of its site. query says whether to consider the URL's
// parameters.
func (w *Callers) Identity(c *gin.Context, query bool) (identity.Identity, error) {
	site := siteOf(c)
	if w.Sites.Elsewhere(c.Request, w.Proxies.Secure(c.Request), site) {
		return identity.Identity{}, ErrElsewhere
	}

	id, err := w.Identities.Identify(c.Request, site, query)
	w.Restart.Note(c.Request, id)

	return id, err
}

// Identify returns the sender of the request, without considering the URL's parameters.
func (w *Callers) Identify(c *gin.Context) (identity.Identity, error) { return w.Identity(c, false) }

// Public returns an error if a request that needs no identity carries a bad token.
func (w *Callers) Public(c *gin.Context) error { return w.Identities.CheckToken(c.Request) }

// checkToken returns an error if a request with an API key also carries a bad token, which would otherwise go
// unnoticed.
func (w *Callers) checkToken(c *gin.Context) error {
	// A path that does not exist is 404 in any case, and upgrades are refused by their own handlers.
	if !w.IsServer(c.Request) || c.FullPath() == "" || calls.IsUpgrade(c) {
		return nil
	}

	return w.Public(c)
}

// Issue sends the caller its identity to keep.
func (w *Callers) Issue(c *gin.Context, id identity.Identity) {
	w.SetCookie(c, id)
	setFresh(c, id)
}

// SetCookie makes a browser keep the identity.
func (w *Callers) SetCookie(c *gin.Context, id identity.Identity) {
	w.Identities.SetCookie(c.Writer, c.Request, id, w.Proxies.Secure(c.Request))
}

// setFresh sends a new identity in a header, for clients that cannot keep the cookie.
func setFresh(c *gin.Context, id identity.Identity) {
	if id.Fresh {
		c.Header(identity.Header, id.Signed)
	}
}

// Server returns an error unless the request has a valid API key.
func (w *Callers) Server(c *gin.Context) error {
	if w.IsServer(c.Request) {
		return nil
	}

	detail := "The API key is wrong."
	switch {
	case len(w.Keys) == 0:
		detail = "Only a server with an API key may call this, and no key is configured: start Headcount with " +
			"--api-key."
	case httppolicy.APIKey(c.Request) == "":
		detail = "Only a server may call this: send an API key in the header " + httppolicy.APIKeyHeader + "."
	}

	return calls.Refuse(calls.ErrNoKey, detail)
}

// userInPath returns the id of the user that a server names in the path.
func (w *Callers) userInPath(c *gin.Context) (string, error) {
	if err := w.Server(c); err != nil {
		return "", err
	}

	id, err := url.PathUnescape(c.Param("user"))
	if err == nil {
		err = identity.CheckUser(id)
	}
	if err != nil {
		return "", calls.Bad(err.Error())
	}

	return id, nil
}

// UserOf identifies a user of a site in follows.
func (w *Callers) UserOf(site presence.Site, id string) unread.User {
	return unread.User(w.Identities.Hash128(site.Qualify(id)))
}

// follower returns the user whose follows a request reads or changes: the user that a server names in the path, or else
// the caller, whose identity it also returns.
func (w *Callers) follower(c *gin.Context) (user unread.User, id identity.Identity, err error) {
	if _, named := c.Params.Get("user"); named {
		name, err := w.userInPath(c)
		return w.UserOf(siteOf(c), name), id, err
	}

	// Without a user in the path, the request is about the caller, who must keep a new identity.
	id, err = w.Identify(c)
	if err != nil {
		return user, id, err
	}
	setFresh(c, id)

	return w.UserOf(id.Site, id.User), id, nil
}
