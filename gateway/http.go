package gateway

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"html/template"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/presence"
)

const (
	subprotocol  = "headcount.v1"
	maxBody      = 4096            // bytes of a request
	holdPatience = 3 * time.Second // for the store to have a hold
	readPatience = 3 * time.Second // for the store to answer
	comeBack     = time.Second     // Retry-After of a 503
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
	_ = e.SetTrustedProxies(nil) // ours decides whom to trust
	e.Use(g.recover, g.metrics.observe, g.cfg.Origins.Middleware(g.cfg.Proxies.Secure))
	e.NoRoute(func(c *gin.Context) { notFound(c) })
	e.NoMethod(func(c *gin.Context) {
		writeProblem(c.Writer, http.StatusMethodNotAllowed, "The path has no method "+c.Request.Method+"; see the Allow header.")
	})
	get := func(path string, h gin.HandlerFunc) {
		e.GET(path, h)
		e.HEAD(path, h)
	}
	get("/:page/counter", g.getCounter)
	e.PUT("/:page/counter", g.putCounter)
	e.GET("/:page/counter/events", g.getEvents)
	get("/-/counters", g.getCounters)
	e.GET("/-/ws", g.getSocket)
	g.notices(e, get)
	g.assets(get)
	return e
}

func notFound(c *gin.Context) {
	if p := c.Request.URL.EscapedPath(); strings.HasPrefix(p, "//counter") {
		badRequest(c, presence.CheckPage("").Error())
		return
	}
	writeProblem(c.Writer, http.StatusNotFound, "Nothing is here. A page id in a path is percent-encoded, its slashes too: /a%2Fb/counter.")
}

func badRequest(c *gin.Context, detail string) {
	writeProblem(c.Writer, http.StatusBadRequest, detail)
}

func unavailable(c *gin.Context, err error) {
	writeProblem(c.Writer, http.StatusServiceUnavailable, err.Error()+"; try again", retryAfter(comeBack))
}

// recover turns a panic, a defect of ours, into a 500 for its request alone.
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
		g.cfg.Log.Error().Interface("panic", v).Str("route", c.FullPath()).Stack().Msg("a request panicked")
		if !c.Writer.Written() {
			writeProblem(c.Writer, http.StatusInternalServerError, "A defect of the server; it has been logged.")
		}
		c.Abort()
	}()
	c.Next()
}

// page is the page of the path, checked; when it cannot be the answer has been
// written.
func page(c *gin.Context, check func(string) error) (string, bool) {
	name, err := url.PathUnescape(c.Param("page"))
	if err == nil {
		err = check(name)
	}
	if err != nil {
		badRequest(c, err.Error())
		return "", false
	}
	return name, true
}

// public lets a request pass that needs no identity, unless it carries a bad
// token.
func (g *Gateway) public(c *gin.Context) bool {
	if err := g.cfg.Identities.CheckToken(c.Request, false); err != nil {
		writeIdentityProblem(c.Writer, err)
		return false
	}
	return true
}

// counts reads counts, in the order of pages.
func (g *Gateway) counts(c *gin.Context, pages ...string) ([]presence.Count, bool) {
	if err := g.serving(); err != nil {
		unavailable(c, err)
		return nil, false
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), readPatience)
	defer cancel()
	counts, err := g.cfg.Store.Counts(ctx, pages)
	if err != nil {
		counts = make([]presence.Count, len(pages))
		for i := range counts {
			counts[i].Stale = true
		}
	}
	g.hub.remember(counts)
	for i := range counts {
		last, known := g.hub.last(pages[i])
		if !known && counts[i].Stale {
			last, known = g.hub.read.Get(pages[i])
		}
		switch {
		case counts[i].Stale && !known:
			unavailable(c, presence.ErrUnavailable)
			return nil, false
		case counts[i].Stale:
			counts[i] = last
			counts[i].Stale = true
		case known && last.Newer(counts[i]):
			counts[i] = last
		}
	}
	return counts, true
}

func (g *Gateway) getCounter(c *gin.Context) {
	addVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	name, ok := page(c, presence.CheckReadable)
	if !ok || !g.public(c) {
		return
	}
	counts, ok := g.counts(c, name)
	if !ok {
		return
	}
	if c.Query("regions") == "1" && !wantsHTML(headerList(c.Request.Header, "Accept")) {
		write(c, "application/json", g.appendParts(c.Request.Context(), counts[0]))
		return
	}
	writeCounter(c, counts[0])
}

// appendParts is the counter with what each region has of it. While the store is
// away nobody knows, and it comes without.
func (g *Gateway) appendParts(ctx context.Context, count presence.Count) []byte {
	parts := []presence.Part{{Region: g.cfg.Region, Users: count.Users}}
	if g.cfg.Parts != nil {
		parts = nil
		ctx, cancel := context.WithTimeout(ctx, readPatience)
		defer cancel()
		if whole, all, err := g.cfg.Parts(ctx, count.Page); err == nil && !whole.Stale {
			count, parts = whole, all // read at once, so that the total is their sum
		}
	}
	body := append([]byte(nil), '{')
	body = count.AppendMembers(body)
	for i, p := range parts {
		if i == 0 {
			body = append(body, `,"regions":{`...)
		} else {
			body = append(body, ',')
		}
		body = appendQuoted(body, p.Region)
		body = append(body, ':')
		body = strconv.AppendInt(body, p.Users, 10)
	}
	if len(parts) > 0 {
		body = append(body, '}')
	}
	return append(body, "}\n"...)
}

// writeCounter answers with a counter, as JSON or, for people, as a page.
func writeCounter(c *gin.Context, count presence.Count) {
	if wantsHTML(headerList(c.Request.Header, "Accept")) {
		var b bytes.Buffer
		if err := counterPage.Execute(&b, count); err != nil {
			panic(err) // the template is ours, and so is the value
		}
		write(c, "text/html; charset=utf-8", b.Bytes())
		return
	}
	write(c, "application/json", append(count.AppendJSON(nil), '\n'))
}

var counterPage = template.Must(template.New("counter").Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<link rel="icon" href="/-/icon.svg" type="image/svg+xml">
<title>{{.Users}} · {{.Page}}</title>
<h1>{{.Users}}</h1>
<p>viewing <strong>{{if eq .Page "*"}}the whole site{{else}}{{.Page}}{{end}}</strong> now{{if .Stale}} (last known){{end}}{{with .Without}} (without {{.}}, not heard for long){{end}}</p>
<p>{{if .Updated.IsZero}}Nobody has been here yet.{{else}}Last change <time>{{.Updated.UTC.Format "2006-01-02T15:04:05Z"}}</time>{{end}}</p>
</html>
`))

// write answers 200 with a body that is never to be kept, compressed when asked.
func write(c *gin.Context, kind string, body []byte) {
	h := c.Writer.Header()
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if wantsGzip(headerList(c.Request.Header, "Accept-Encoding")) {
		h.Set("Content-Encoding", "gzip")
		body = gzipBytes(nil, body)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	c.Writer.WriteHeader(http.StatusOK)
	_, _ = c.Writer.Write(body) // the client may be gone
}

func (g *Gateway) getCounters(c *gin.Context) {
	addVary(c.Writer.Header(), "Accept", "Accept-Encoding")
	query, err := url.ParseQuery(c.Request.URL.RawQuery)
	if err != nil {
		badRequest(c, "The query cannot be read: "+err.Error()+". Ask as ?page=a&page=b, percent-encoded.")
		return
	}
	var pages []string
	for _, name := range query["page"] {
		if slices.Contains(pages, name) {
			continue
		}
		if err := presence.CheckReadable(name); err != nil {
			badRequest(c, err.Error())
			return
		}
		if pages = append(pages, name); len(pages) > presence.MaxPages {
			break
		}
	}
	if len(pages) == 0 || len(pages) > presence.MaxPages {
		badRequest(c, "Ask for 1 to 100 distinct pages, as ?page=a&page=b.")
		return
	}
	if !g.public(c) {
		return
	}
	counts, ok := g.counts(c, pages...)
	if !ok {
		return
	}
	body := []byte(`{"counters":[`)
	for i, count := range counts {
		if i > 0 {
			body = append(body, ',')
		}
		body = count.AppendJSON(body)
	}
	write(c, "application/json", append(body, "]}\n"...))
}

// readBody reads a body; when it cannot the answer has been written.
func readBody(c *gin.Context) ([]byte, bool) {
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		writeProblem(c.Writer, http.StatusRequestEntityTooLarge, "A body has at most 4096 bytes.")
		return nil, false
	case err != nil:
		badRequest(c, "The body could not be read.")
		return nil, false
	}
	return body, true
}

// readAction reads a body of the form {"action":"…"}; when it cannot the answer
// has been written.
func readAction(c *gin.Context, actions ...string) (string, bool) {
	body, ok := readBody(c)
	if !ok {
		return "", false
	}
	var members map[string]json.RawMessage
	var action *string
	if err := json.Unmarshal(body, &members); err != nil || members == nil {
		badRequest(c, `The body is a JSON object: {"action":"`+actions[0]+`"}`+because(err)+".")
		return "", false
	}
	if err := json.Unmarshal(members["action"], &action); err != nil || action == nil || !slices.Contains(actions, *action) {
		badRequest(c, `"action" is one of: `+strings.Join(actions, ", ")+".")
		return "", false
	}
	return *action, true
}

func (g *Gateway) putCounter(c *gin.Context) {
	name, ok := page(c, presence.CheckPage)
	if !ok {
		return
	}
	id, err := g.cfg.Identities.Identify(c.Request, false)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	action, ok := readAction(c, "increment", "decrement")
	if !ok {
		return
	}
	if !g.admit(c, id) {
		return
	}
	if err := g.ready(); err != nil {
		unavailable(c, err)
		return
	}
	ctx, cancel := context.WithTimeout(c.Request.Context(), holdPatience)
	defer cancel()
	if err := g.cfg.Hold(ctx, id.Hash, name, action == "increment"); err != nil {
		if errors.Is(err, presence.ErrTooMany) {
			writeProblem(c.Writer, http.StatusTooManyRequests, err.Error(), retryAfter(comeBack))
			return
		}
		unavailable(c, presence.ErrUnavailable)
		return
	}
	if counts, ok := g.counts(c, name); ok {
		if counts[0].Stale { // the caller's change may not be in it
			unavailable(c, presence.ErrUnavailable)
			return
		}
		g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
		if id.Fresh { // for who cannot keep the cookie: as welcome has it
			c.Header(IDHeader, id.Signed)
		}
		write(c, "application/json", append(counts[0].AppendJSON(nil), '\n'))
	}
}

// admit bounds the new identities that one address gets by writing; when there
// were too many the answer has been written.
func (g *Gateway) admit(c *gin.Context, id Identity) bool {
	if !id.Fresh {
		return true
	}
	ok, wait := g.limiter.allow(g.cfg.Proxies.Addr(c.Request), time.Now())
	if !ok {
		writeProblem(c.Writer, http.StatusTooManyRequests, "Too many requests without an identity from this address; send the id you were given, or wait.", retryAfter(wait))
	}
	return ok
}

// reserve takes a place for a long connection; when there is none the answer
// has been written. Who has one gives it back by leaving.
func (g *Gateway) reserve(c *gin.Context) bool {
	g.entry.Lock()
	err := g.serving()
	if g.draining.Load() {
		err = errDraining
	}
	if err == nil {
		g.conns.Add(1)
	}
	g.entry.Unlock()
	if err != nil {
		unavailable(c, err)
		return false
	}
	if n := g.connections.Add(1); n > int64(g.cfg.MaxConnections) {
		g.release()
		g.metrics.refused.Inc()
		writeProblem(c.Writer, http.StatusServiceUnavailable, "This gateway has as many connections as it may.", retryAfter(5*time.Second))
		return false
	}
	return true
}

// release gives back what reserve took.
func (g *Gateway) release() {
	g.connections.Add(-1)
	g.conns.Done()
}

func (g *Gateway) getSocket(c *gin.Context) {
	r := c.Request
	if problem, status := upgradeProblem(r); status != 0 {
		if status == http.StatusUpgradeRequired {
			c.Header("Upgrade", "websocket")
			c.Header("Connection", "Upgrade")
		}
		c.Header("Sec-WebSocket-Version", "13")
		writeProblem(c.Writer, status, problem)
		return
	}
	id, err := g.cfg.Identities.Identify(r, true)
	if err != nil {
		writeIdentityProblem(c.Writer, err)
		return
	}
	if !g.reserve(c) {
		return
	}
	g.cfg.Identities.SetCookie(c.Writer, r, id, g.cfg.Proxies.Secure(r))
	if err := g.accept(c.Writer, r, id); err != nil {
		g.release()
		g.cfg.Log.Debug().Err(err).Msg("upgrade failed")
	}
}

// upgradeProblem says why r is no WebSocket handshake of ours, before the
// library is asked, whose answers are plain text.
func upgradeProblem(r *http.Request) (detail string, status int) {
	if !r.ProtoAtLeast(1, 1) || !hasToken(r.Header, "Connection", "upgrade") || !hasToken(r.Header, "Upgrade", "websocket") {
		return "This is a WebSocket endpoint: send an upgrade, with the subprotocol " + subprotocol + ".", http.StatusUpgradeRequired
	}
	if r.Header.Get("Sec-WebSocket-Version") != "13" {
		return "Only version 13 of the WebSocket protocol is spoken.", http.StatusBadRequest
	}
	if keys := r.Header.Values("Sec-WebSocket-Key"); len(keys) != 1 || !validKey(keys[0]) {
		return "The handshake needs one Sec-WebSocket-Key of 16 bytes in base64.", http.StatusBadRequest
	}
	if len(r.Header.Values("Sec-WebSocket-Protocol")) > 0 && !hasToken(r.Header, "Sec-WebSocket-Protocol", subprotocol) {
		return "The only subprotocol is " + subprotocol + "; offer it or none.", http.StatusBadRequest
	}
	return "", 0
}

// hasToken reports whether a comma-separated header has the token.
func hasToken(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for t := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(t), token) {
				return true
			}
		}
	}
	return false
}

func validKey(key string) bool {
	b, err := base64.StdEncoding.DecodeString(strings.TrimSpace(key))
	return err == nil && len(b) == 16
}

func (g *Gateway) getEvents(c *gin.Context) {
	name, ok := page(c, presence.CheckReadable)
	if !ok {
		return
	}
	id, err := g.cfg.Identities.Identify(c.Request, true)
	if err != nil && !errors.Is(err, ErrNoToken) {
		writeIdentityProblem(c.Writer, err)
		return
	}
	if !g.reserve(c) {
		return
	}
	if err == nil {
		g.cfg.Identities.SetCookie(c.Writer, c.Request, id, g.cfg.Proxies.Secure(c.Request))
	}
	if err := g.stream(c.Writer, id, name, c.GetHeader("Last-Event-ID")); err != nil {
		g.release()
		g.cfg.Log.Debug().Err(err).Msg("event stream failed")
	}
}

// stream answers with an event stream that lasts until either side ends it:
// the end of the connection is the end of the body, so the fan-out can write
// events as they are. A client that comes back with the id of the newest count
// is not sent that again.
func (g *Gateway) stream(w gin.ResponseWriter, id Identity, name, lastID string) error {
	c, err := g.open(w, id.Hash, id.Expires)
	if err != nil {
		return err
	}
	c.events = true
	head := w.Header()
	head.Set("Content-Type", "text/event-stream")
	head.Set("Cache-Control", "no-store")
	head.Set("X-Accel-Buffering", "no") // nginx would keep events back
	head.Set("X-Content-Type-Options", "nosniff")
	head.Set("Connection", "close")
	head.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	c.start(responseHead(http.StatusOK, head), func() {
		has, err := presence.ParseVersion(lastID)
		if err == nil && !g.hub.staleLately() {
			c.shard.resume(c, name, has)
		} else {
			_ = c.shard.watch(c, []string{name}, 0) // one page is never too many
		}
	})
	return nil
}
