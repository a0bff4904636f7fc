package api

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/gin-gonic/gin"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/presence"
)

// Engine returns an engine with all calls of the API, to which the caller may add routes. Paths are
// matched as they were sent, so a page with %2F in it stays one segment.
func (a *API) Engine() *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.UseEscapedPath = true
	e.UnescapePathValues = false
	e.RedirectTrailingSlash = false
	e.HandleMethodNotAllowed = true
	_ = e.SetTrustedProxies(nil) // Callers.Proxies decides which proxies are trusted
	if a.cfg.Tracer != nil {
		e.Use(a.traced)
	}
	e.Use(a.recover, a.noteRefusal, a.metrics.observe, closeAfterChunks, httppolicy.CORS(a.cfg.Origins, a.callers.Proxies))
	e.Use(httppolicy.RefuseWrongKeys(a.callers.Keys.Has), a.callers.refuseBadTokens, a.callers.findSite)
	e.NoRoute(NotFound)
	e.NoMethod(RefuseMethod)
	httppolicy.Get(e, "/:page/counter", a.getCounter)
	e.PUT("/:page/counter", a.putCounter)
	e.PUT("/-/users/:user/pages/:page", func(c *gin.Context) { a.putPresence(c, true) })
	e.DELETE("/-/users/:user/pages/:page", func(c *gin.Context) { a.putPresence(c, false) })
	httppolicy.Get(e, "/:page/stats", a.getStats)
	httppolicy.Get(e, "/:page/badge.svg", a.getBadge)
	httppolicy.Get(e, "/:page/widget", a.getWidget)
	httppolicy.Get(e, counterapi.Root+"/:key/badge.svg", a.getCounterBadge)
	httppolicy.Get(e, "/-/counters", a.getCounters)
	e.DELETE("/-/me", a.deleteMe)
	httppolicy.Get(e, "/-/users", a.getUsers)
	httppolicy.Get(e, "/-/users/:user", a.getUser)
	e.DELETE("/-/users/:user", a.deleteUser)
	httppolicy.Get(e, sitesPath, a.getSites)
	e.POST("/:page/changes", a.postChange)
	a.followRoutes(e)
	a.assets(e)
	return e
}

// Below serves h under the path base. The path that h gets keeps its escapes, so a page with a
// slash in it stays one segment.
func Below(base string, h http.Handler) http.Handler {
	if base == "" {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		escaped, found := strings.CutPrefix(r.URL.EscapedPath(), base)
		switch {
		case found && escaped == "": // relative addresses need the slash
			http.Redirect(w, r, base+"/", http.StatusPermanentRedirect)
		case found && escaped[0] == '/':
			inner := *r
			inner.URL = &url.URL{Path: r.URL.Path[len(base):], RawPath: escaped, RawQuery: r.URL.RawQuery}
			h.ServeHTTP(w, &inner)
		default:
			httppolicy.Problem(w, http.StatusNotFound, "This server serves nothing outside of "+base+"/.")
		}
	})
}

// closeAfterChunks closes the connection after a request with a Transfer-Encoding that may
// also have had a Content-Length, which the HTTP server removes. A proxy that reads the
// Content-Length would find another end of the body, and another next request (RFC 9112, 6.3).
func closeAfterChunks(c *gin.Context) {
	if len(c.Request.TransferEncoding) > 0 && httppolicy.MayHideLength(c.Request) {
		c.Header("Connection", "close")
	}
}

// RefuseMethod answers 405. The Allow header has been set.
func RefuseMethod(c *gin.Context) {
	httppolicy.Problem(c.Writer, http.StatusMethodNotAllowed, "This path does not allow the method "+c.Request.Method+"; see the Allow header.")
}

// ofOperators are paths that people look for at the address of visitors.
var ofOperators = []string{"/healthz", "/readyz", "/metrics", "/debug/pprof/"}

// NotFound answers a request for a path that is no route.
func NotFound(c *gin.Context) {
	switch path := c.Request.URL.EscapedPath(); {
	case strings.HasPrefix(path, "//counter"):
		badRequest(c, presence.CheckPage("").Error())
	case strings.HasPrefix(path, counterapi.Root+"//"):
		badRequest(c, "A counter has a key of 1 to 128 characters; this path has none.")
	case slices.Contains(ofOperators, path):
		httppolicy.Problem(c.Writer, http.StatusNotFound, "This path is at the address of --admin-listen, not at that of visitors.")
	default:
		httppolicy.Problem(c.Writer, http.StatusNotFound, "This path does not exist. A page id or a key in a path is percent-encoded, its slashes too: /a%2Fb/counter.")
	}
}

// recover turns a panic, which is a defect, into a 500 for its own request.
func (a *API) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if v == http.ErrAbortHandler { //nolint:errorlint
			panic(v)
		}
		a.metrics.panics.Inc()
		a.parts.Log.Error().Interface("panic", v).Str("route", c.FullPath()).Str("request_id", httppolicy.RequestID(c.Writer.Header())).Stack().Msg("a request panicked")
		if !c.Writer.Written() {
			httppolicy.Problem(c.Writer, http.StatusInternalServerError, "The server has a defect; it has been logged.")
		}
		c.Abort()
	}()
	c.Next()
}
