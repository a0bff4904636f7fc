package gateway

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/rs/zerolog"

	"headcount/gateway/counterapi"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/gateway/socket"
	"headcount/presence"
)

// routes builds the public handler. Paths are matched as they were sent, so a
// page with %2F in it stays one segment.
func (g *Gateway) routes() http.Handler {
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	e.UseEscapedPath = true
	e.UnescapePathValues = false
	e.RedirectTrailingSlash = false
	e.HandleMethodNotAllowed = true
	_ = e.SetTrustedProxies(nil) // Config.Proxies decides which proxies are trusted
	if g.cfg.Tracer != nil {
		e.Use(g.traced)
	}
	e.Use(g.recover, g.told, g.metrics.observe, closeAfterChunks, httppolicy.CORS(&toldOrigins{Origins: g.cfg.Origins, log: g.cfg.Log}, g.cfg.Proxies), g.inSite)
	e.NoRoute(func(c *gin.Context) { notFound(c) })
	e.NoMethod(func(c *gin.Context) {
		httppolicy.Problem(c.Writer, http.StatusMethodNotAllowed, "This path does not allow the method "+c.Request.Method+"; see the Allow header.")
	})
	httppolicy.Get(e, "/:page/counter", g.getCounter)
	e.PUT("/:page/counter", g.putCounter)
	e.PUT("/-/users/:user/pages/:page", func(c *gin.Context) { g.putPresence(c, true) })
	e.DELETE("/-/users/:user/pages/:page", func(c *gin.Context) { g.putPresence(c, false) })
	e.GET("/:page/counter/events", g.getEvents)
	httppolicy.Get(e, "/:page/stats", g.getStats)
	httppolicy.Get(e, "/:page/badge.svg", g.getBadge)
	httppolicy.Get(e, "/:page/widget", g.getWidget)
	httppolicy.Get(e, "/-/counters", g.getCounters)
	e.DELETE("/-/me", g.deleteMe)
	e.DELETE("/-/users/:user", g.deleteUser)
	httppolicy.Get(e, sitesPath, g.getSites)
	e.GET("/-/ws", g.getSocket)
	g.unreadRoutes(e)
	if g.counters != nil {
		g.counters.Routes(e)
		e.GET(counterapi.Root+"/:key/events", g.getCounterEvents)
	}
	g.assets(e)
	return e
}

// below serves everything under the path base. What it hands on keeps its escapes, so a
// page with a slash in it stays one segment.
func below(base string, h http.Handler) http.Handler {
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

// closeAfterChunks closes the connection after a request with a Transfer-Encoding.
// Such a request may also have had a Content-Length, which the HTTP server removes.
// A proxy that reads the Content-Length would find another end of the body, and
// another next request (RFC 9112, 6.3).
func closeAfterChunks(c *gin.Context) {
	if len(c.Request.TransferEncoding) > 0 {
		c.Header("Connection", "close")
	}
}

// tellEvery is the least time between two log lines about refused origins.
const tellEvery = time.Minute

// toldOrigins are Origins that also log a refusal, at most once per tellEvery.
type toldOrigins struct {
	*identity.Origins
	log  zerolog.Logger
	mu   sync.Mutex
	told time.Time // guarded by mu
}

// Refusal returns the refusal of Origins, and may log it.
func (o *toldOrigins) Refusal(r *http.Request) string {
	why := o.Origins.Refusal(r)
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); o.told.IsZero() || now.Sub(o.told) >= tellEvery {
		o.told = now
		o.log.Warn().Str("origin", presence.Excerpt(r.Header.Get("Origin"))).Str("host", presence.Excerpt(r.Host)).
			Msg("the request of a page was refused; is its origin missing in --allow-origins, or does a proxy replace the Host header (in nginx: proxy_set_header Host $http_host)? This is logged at most once a minute")
	}
	return why
}

func notFound(c *gin.Context) {
	if p := c.Request.URL.EscapedPath(); strings.HasPrefix(p, "//counter") {
		badRequest(c, presence.CheckPage("").Error())
		return
	}
	if strings.HasPrefix(c.Request.URL.EscapedPath(), counterapi.Root+"//") {
		badRequest(c, "A counter has a key of 1 to 128 characters; this path has none.")
		return
	}
	httppolicy.Problem(c.Writer, http.StatusNotFound, "This path does not exist. A page id or a key in a path is percent-encoded, its slashes too: /a%2Fb/counter.")
}

// recover turns a panic, which is a defect, into a 500 for its own request.
func (g *Gateway) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		if v == http.ErrAbortHandler { //nolint:errorlint
			panic(v)
		}
		g.metrics.panics.Inc()
		g.cfg.Log.Error().Interface("panic", v).Str("route", c.FullPath()).Str("request_id", httppolicy.RequestID(c.Writer.Header())).Stack().Msg("a request panicked")
		if !c.Writer.Written() {
			httppolicy.Problem(c.Writer, http.StatusInternalServerError, "The server has a defect; it has been logged.")
		}
		c.Abort()
	}()
	c.Next()
}

// acceptFails notes that no new client can be accepted, since this process has too
// many open files. A nil err means that clients are accepted again.
func (g *Gateway) acceptFails(err error) {
	if err == nil {
		g.shut.Store(nil)
		g.cfg.Log.Info().Msg("new clients are accepted again")
		return
	}
	err = fmt.Errorf("new clients cannot be accepted, since this process has too many open files; raise ulimit -n, or lower --max-connections: %w", err)
	g.shut.Store(&err)
	g.cfg.Log.Error().Msg(err.Error())
}

// Listener returns the listener for the HTTP server that serves Handler; it accepts the
// clients of l.
func (g *Gateway) Listener(l net.Listener) *httppolicy.ConnLimiter {
	silence := g.cfg.PingInterval + g.cfg.PongTimeout + g.cfg.WriteTimeout // the longest time that a ping, its answer and a write may take together
	return httppolicy.NewConnLimiter(l, silence, g.cfg.MaxConnections, g.acceptFails, g.metrics.evicted)
}

// BelowTLS prepares the connections of limiter for an HTTP server that speaks TLS: limiter
// bounds handshakes, and a connection that the gateway takes over from that server then
// needs no goroutine.
func BelowTLS(limiter *httppolicy.ConnLimiter) net.Listener {
	limiter.SpeakTLS()
	return socket.Listener{Listener: limiter}
}
