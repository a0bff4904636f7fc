package api

import (
	"errors"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"

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
	// CacheReads is how long proxies may answer public GETs themselves, in whole seconds. 0: not
	// at all.
	CacheReads time.Duration
	Private    Matches   // pages that need an API key, or a token whose claim pages has them
	PublicTop  PublicTop // pages that visitors may see in the list of the pages with the most users
	CountBots  bool      // crawlers are counted like people
}

// Callers finds out who sends a request: a visitor of a site, or a server with an API key.
type Callers struct {
	Access
	Grace   RestartGrace
	Ignored *prometheus.CounterVec // clients that are not counted, by reason
}

// RestartGrace is the time after a restart during which counts may lack users who have yet to
// come back.
type RestartGrace interface {
	// Note looks for signs that a client was here before the restart. It must be called before
	// the client gets a count.
	Note(r *http.Request, id identity.Identity)
	// Doubtful reports whether counts are stale for that reason.
	Doubtful() bool
}

// ErrElsewhere refuses a page of one site that would act as its visitor on another.
var ErrElsewhere = errors.New("this page is of another site, and a visitor is somebody else there; ask without a site")

// Site returns the site that a request is for.
func (w *Callers) Site(c *gin.Context) presence.Site { return siteOf(c) }

// Cacheable lets proxies keep the answer to a public GET for CacheReads, unless it is about a private page.
func (w *Callers) Cacheable(c *gin.Context, pages ...string) {
	if w.CacheReads == 0 || slices.ContainsFunc(pages, w.Private.Has) {
		return
	}
	h := c.Writer.Header()
	httppolicy.Cacheable(h, w.CacheReads)
	httppolicy.AddVary(h, "Origin") // for the CORS headers
	if len(w.Sites.All()) > 1 {     // what Sites.Of goes by
		httppolicy.AddVary(h, identity.SiteHeader, "Sec-Fetch-Site")
	}
}

// IsServer reports whether the request has a valid API key.
func (w *Callers) IsServer(r *http.Request) bool { return w.Keys.Has(httppolicy.APIKey(r)) }

// Addr returns the address of the client, as proxies that are trusted name it.
func (w *Callers) Addr(r *http.Request) netip.Addr { return w.Proxies.Addr(r) }

// Identity returns who sent the request, as a user of its site. query says whether the
// URL's parameters count. RefuseIdentity answers an error.
func (w *Callers) Identity(c *gin.Context, query bool) (identity.Identity, error) {
	site := siteOf(c)
	if w.Sites.Elsewhere(c.Request, w.Proxies.Secure(c.Request), site) {
		return identity.Identity{}, ErrElsewhere
	}
	id, err := w.Identities.Identify(c.Request, site, query)
	w.Grace.Note(c.Request, id)
	return id, err
}

// Identify returns who sent the request, whatever the URL's parameters say. If ok is false, it
// has written the error answer.
func (w *Callers) Identify(c *gin.Context) (id identity.Identity, ok bool) {
	id, err := w.Identity(c, false)
	if err != nil {
		RefuseIdentity(c.Writer, err)
	}
	return id, err == nil
}

// RefuseIdentity answers a request with an error of Identity.
func RefuseIdentity(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, ErrElsewhere):
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

// Public checks a request that needs no identity: it refuses one that carries a
// bad token. If it returns false, it has written the error answer.
func (w *Callers) Public(c *gin.Context) bool {
	if err := w.Identities.CheckToken(c.Request); err != nil {
		RefuseIdentity(c.Writer, err)
		return false
	}
	return true
}

// refuseBadTokens refuses a bad token beside an API key, whose calls need no identity and look at none.
func (w *Callers) refuseBadTokens(c *gin.Context) {
	if w.IsServer(c.Request) && c.FullPath() != "" && !c.IsWebsocket() && !w.Public(c) {
		c.Abort()
	}
}

// Issue has the caller keep the identity.
func (w *Callers) Issue(c *gin.Context, id identity.Identity) {
	w.SetCookie(c, id)
	setFresh(c, id)
}

// SetCookie has a browser keep the identity.
func (w *Callers) SetCookie(c *gin.Context, id identity.Identity) {
	w.Identities.SetCookie(c.Writer, c.Request, id, w.Proxies.Secure(c.Request))
}

// setFresh puts a new identity into a header, for clients that cannot keep the cookie.
func setFresh(c *gin.Context, id identity.Identity) {
	if id.Fresh {
		c.Header(identity.Header, id.Signed)
	}
}

// Server reports whether the request has a valid API key. If it returns false, it
// has written the error answer.
func (w *Callers) Server(c *gin.Context) bool {
	if w.IsServer(c.Request) {
		return true
	}
	detail := "The API key is wrong."
	switch {
	case len(w.Keys) == 0:
		detail = "Only a server with an API key may call this, and no key is configured: start Headcount with --api-key."
	case httppolicy.APIKey(c.Request) == "":
		detail = "Only a server may call this: send an API key in the header " + httppolicy.APIKeyHeader + "."
	}
	httppolicy.RefuseKey(c.Writer, detail)
	return false
}

// userInPath returns the id of the user that a server names in the path. If ok is false,
// it has written the error answer.
func (w *Callers) userInPath(c *gin.Context) (id string, ok bool) {
	if !w.Server(c) {
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

// UserOf identifies a user of a site in follows.
func (w *Callers) UserOf(site presence.Site, id string) unread.User {
	return unread.User(w.Identities.Hash128(site.Qualify(id)))
}

// follower returns the user whose follows a request reads or changes: the one that a server names in the
// path, or else the caller, whose identity it returns too. If ok is false, it has written the error answer.
func (w *Callers) follower(c *gin.Context) (user unread.User, id identity.Identity, ok bool) {
	if _, named := c.Params.Get("user"); named {
		name, ok := w.userInPath(c)
		return w.UserOf(siteOf(c), name), id, ok
	}
	if id, ok = w.Identify(c); ok {
		setFresh(c, id)
	}
	return w.UserOf(id.Site, id.User), id, ok
}
