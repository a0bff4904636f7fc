package api

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/gin-gonic/gin"

	"headcount/gateway/calls"
	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/openapi"
	"headcount/presence"
)

// Engine returns an engine with the calls of a table, Calls among them, to which the caller may add routes. Paths are
// matched as they were sent, so a page with %2F in it stays one segment.
func (a *API) Engine(table []calls.Call) *gin.Engine {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.UseEscapedPath = true
	e.UnescapePathValues = false
	e.RedirectTrailingSlash = false
	e.HandleMethodNotAllowed = true
	_ = e.SetTrustedProxies(nil) // Callers.Proxies decides which proxies are trusted

	// Tracing, metrics and logging come first, so that they also see refused requests.
	if a.cfg.Tracer != nil {
		e.Use(a.traced)
	}
	e.Use(a.recover, a.noteRefusal, a.metrics.observe, closeAfterChunks)
	// Before the checks, because a page can read their refusals only with these headers.
	e.Use(httppolicy.CORS(a.cfg.Origins, a.callers.Proxies))
	for _, check := range []func(*gin.Context) error{
		calls.CheckKey(a.callers.Keys.Has), a.callers.checkToken, a.callers.findSite,
	} {
		e.Use(calls.Guard(a.parts.Log, check))
	}

	e.NoRoute(calls.Serve(a.parts.Log, NotFound))
	e.NoMethod(calls.Serve(a.parts.Log, RefuseMethod))
	calls.Register(e, a.parts.Log, table)
	calls.Register(e, a.parts.Log, a.otherFiles())
	a.openAPI = sync.OnceValue(func() *asset {
		return newAsset("openapi.json", openapi.OpenAPI(a.cfg.BasePath, table))
	})
	a.asyncAPI = sync.OnceValue(func() *asset {
		return newAsset("asyncapi.json", openapi.AsyncAPI(a.cfg.BasePath))
	})

	return e
}

// Below serves h under the path base. The path that h gets keeps its escapes, so a page with a
// slash in it stays one segment.
func Below(base string, h http.Handler) http.Handler {
	if base == "" {
		return h
	}

	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := r.URL.EscapedPath()
		if path == base { // relative URLs need the slash
			http.Redirect(w, r, base+"/", http.StatusPermanentRedirect)
			return
		}

		escaped, found := strings.CutPrefix(path, base)
		if !found || escaped[0] != '/' {
			httppolicy.Problem(w, http.StatusNotFound, "This server serves nothing outside of "+base+"/.")
			return
		}

		inner := *r
		inner.URL = &url.URL{Path: r.URL.Path[len(base):], RawPath: escaped, RawQuery: r.URL.RawQuery}
		h.ServeHTTP(w, &inner)
	})
}

// WithPageApps makes the page named apps available. The router would take /apps/counter for the beginning of a call of
// back ends, /apps/{app_id}/channels, and find no route. So the path is rewritten to /%61pps/counter, which is a page.
func WithPageApps(e http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rest, found := strings.CutPrefix(r.URL.EscapedPath(), "/apps/")
		if !found || strings.Contains(rest, "/") {
			e.ServeHTTP(w, r)
			return
		}

		// Copies, because the request belongs to the HTTP server.
		ofPage, link := *r, *r.URL
		link.RawPath = "/%61pps/" + rest
		ofPage.URL = &link
		e.ServeHTTP(w, &ofPage)
	})
}

// closeAfterChunks closes the connection after a request with Transfer-Encoding. The request may also have had a
// Content-Length, which the HTTP server removes. A proxy that goes by the Content-Length would see another end of the
// body, and another next request (RFC 9112, 6.3).
func closeAfterChunks(c *gin.Context) {
	if len(c.Request.TransferEncoding) > 0 && httppolicy.MayHideLength(c.Request) {
		c.Header("Connection", "close")
	}
}

// RefuseMethod answers 405. The Allow header has been set.
func RefuseMethod(c *gin.Context) (calls.Answer, error) {
	return calls.Answer{}, calls.Refuse(calls.ErrMethod,
		"This path does not allow the method "+c.Request.Method+"; see the Allow header.")
}

// ofOperators are paths of the admin address that people try at the public address.
var ofOperators = []string{"/healthz", "/readyz", "/metrics", "/debug/pprof/"}

// NotFound answers a request for an unknown path.
func NotFound(c *gin.Context) (calls.Answer, error) {
	path := c.Request.URL.EscapedPath()
	switch {
	case strings.HasPrefix(path, "//counter"):
		return calls.Answer{}, calls.Bad(presence.CheckPage("").Error())
	case strings.HasPrefix(path, counterapi.Root+"//"):
		return calls.Answer{}, calls.Bad("A counter has a key of 1 to 128 characters; this path has none.")
	}

	detail := "This path does not exist. A page id or a key in a path is percent-encoded, its slashes too: " +
		"/a%2Fb/counter."
	if slices.Contains(ofOperators, path) {
		detail = "This path is at the address of --admin-listen, not at that of visitors."
	}

	return calls.Answer{}, calls.Refuse(calls.ErrNotFound, detail)
}

// recover turns a panic, which is always a bug, into a 500 for its request.
func (a *API) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		// That is how a handler breaks a connection off on purpose.
		if v == http.ErrAbortHandler { //nolint:errorlint
			panic(v)
		}

		a.metrics.panics.Inc()
		id := httppolicy.RequestID(c.Writer.Header())
		a.parts.Log.Error().Interface("panic", v).Str("route", c.FullPath()).Str("request_id", id).Stack().
			Msg("a request panicked")
		// When a part of the answer is sent the status cannot be changed any more.
		if !c.Writer.Written() {
			httppolicy.Problem(c.Writer, http.StatusInternalServerError, httppolicy.DefectDetail)
		}
		c.Abort()
	}()

	c.Next()
}
