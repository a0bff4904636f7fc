package counterapi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"

	"github.com/gin-gonic/gin"

	"headcount/counter"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

// nobody is the permission of a call that rules cannot make public: it always needs an API key.
const nobody counter.Public = 0

// call is a request on one counter.
type call struct {
	key    string // with the site: see presence.Site.Qualify
	rule   *counter.Rule
	server bool              // it has an API key
	id     identity.Identity // of a caller without API key that changes something
}

// handler carries out a call for one counter.
type handler func(*gin.Context, call) (calls.Answer, error)

// on returns a handler for callers that have permission p on the counter in the path.
func (a *API) on(p counter.Public, h handler) calls.Handler {
	return func(c *gin.Context) (calls.Answer, error) {
		one, err := a.counter(c, p)
		if err != nil {
			return calls.Answer{}, err
		}

		return h(c, one)
	}
}

// Find returns the name and the rule of a site's counter, or why there is none.
func (a *API) Find(site presence.Site, key string) (name string, rule *counter.Rule, err error) {
	if err := counter.CheckKey(key); err != nil {
		return "", nil, err
	}

	// Some rules match any text, so only a valid key may get here.
	rule = a.cfg.Rules.In(site).Find(key)
	if rule == nil {
		return "", nil, fmt.Errorf("%w: no rule of --counters fits it", counter.ErrKey)
	}

	return site.Qualify(key), rule, nil
}

// param returns a parameter of the path, which the router leaves escaped.
func param(c *gin.Context, name string) (string, error) { return url.PathUnescape(c.Param(name)) }

// counter returns the call for the counter in the path, if the caller has permission p.
func (a *API) counter(c *gin.Context, p counter.Public) (call, error) {
	one, err := a.named(c)
	if err != nil {
		return one, err
	}
	if err := one.permits(p); err != nil {
		return one, err
	}

	switch {
	// The API key is all that identifies a server.
	case one.server:
		return one, nil
	case p == counter.PublicRead:
		// A read needs no identity, but a bad token must not go unnoticed.
		return one, a.callers.Public(c)
	}

	one.id, err = a.callers.Identify(c)
	return one, err
}

// named returns the call for the counter in the path.
func (a *API) named(c *gin.Context) (call, error) {
	one := call{server: a.callers.IsServer(c.Request)}
	key, err := param(c, "key")
	if err == nil {
		one.key, one.rule, err = a.Find(a.callers.Site(c), key)
	}
	if err != nil {
		return one, badCounter(err)
	}

	return one, nil
}

// permits returns an error unless the caller has permission p.
func (one *call) permits(p counter.Public) error { return permits(one.server, one.rule, p) }

// permits returns an error unless a caller has permission p under a rule.
func permits(server bool, rule *counter.Rule, p counter.Public) error {
	// Every rule allows the empty permission, so it is asked for by itself.
	public := p != nobody && rule.Allows(p)
	if server || public {
		return nil
	}

	return notPublic("")
}

// body reads the body.
func (a *API) body(c *gin.Context, server bool) ([]byte, error) {
	if err := checkMedia(c.Request.Header); err != nil {
		return nil, err
	}
	// A client that waits for 100 Continue is refused before it sends the body.
	if c.Request.ContentLength > MaxBody {
		return nil, errTooLong
	}

	text, err := a.readBody(c, server)
	switch {
	case errors.As(err, new(*http.MaxBytesError)):
		return nil, errTooLong
	case errors.Is(err, calls.ErrBodies):
		return nil, err
	case err != nil:
		return nil, calls.Bad("The body could not be read; send as many bytes as Content-Length says.")
	}

	return text, nil
}

// checkMedia returns an error unless the Content-Type is plain JSON or missing.
func checkMedia(h http.Header) error {
	for _, given := range h["Content-Type"] {
		// Nearly all clients send exactly this value, and comparing is cheaper than parsing.
		if given == "" || given == "application/json" {
			continue
		}

		media, _, err := mime.ParseMediaType(given)
		if err != nil || media != "application/json" {
			return errNotJSON
		}
	}

	coding := h.Get("Content-Encoding")
	if coding != "" && coding != "identity" {
		return errCompressed
	}

	return nil
}

// readBody reads a body of at most MaxBody bytes. A body takes memory for as long as its client takes to send it, so
// callers without API key may have only bounds.LargeBodies large ones in progress at a time.
func (a *API) readBody(c *gin.Context, server bool) ([]byte, error) {
	n, r := c.Request.ContentLength, c.Request.Body
	if r == nil || n == 0 {
		return nil, nil
	}

	// A body with a Content-Length is bounded already; a chunked one needs a limit.
	if n < 0 {
		r = http.MaxBytesReader(c.Writer, r, MaxBody)
	}

	// A small body takes so little memory that it is not counted.
	small := n >= 0 && n <= smallBody
	if server || small {
		return readAll(nil, r, n)
	}

	// A chunked body is counted only once the client has sent more than smallBody.
	begin, err := readAll(nil, io.LimitReader(r, smallBody), -1)
	if err != nil || len(begin) < smallBody {
		return begin, err
	}

	select {
	case a.large <- struct{}{}:
		defer func() { <-a.large }()
		return readAll(begin, r, n)
	default:
		return nil, errLargeBodies
	}
}

// readAll returns a body of n bytes, of which begin has been read already, and reads the rest from r. If n is negative,
// the body ends where r ends.
func readAll(begin []byte, r io.Reader, n int64) ([]byte, error) {
	if n < 0 {
		rest, err := io.ReadAll(r)
		return append(begin, rest...), err
	}

	// The Content-Length is at most MaxBody, so one allocation is safe.
	b := append(make([]byte, 0, n), begin...)[:n]
	_, err := io.ReadFull(r, b[len(begin):])

	return b, err
}

// idempotencyKey returns the hash of the request's Idempotency-Key, or the zero value if it has none.
func idempotencyKey(c *gin.Context, space, caller string) (id counter.IdempotencyKey, err error) {
	key, problem := httppolicy.IdempotencyKey(c.Request)
	if problem != "" {
		return id, calls.Bad(problem)
	}
	if key == "" {
		return id, nil
	}

	return counter.NewIdempotencyKey(space, caller, key), nil
}

// within returns a context with the time limit of a request. A store in this process needs no limit.
func (a *API) within(c *gin.Context) (context.Context, context.CancelFunc) {
	if !a.cfg.Counters.Remote() {
		return c.Request.Context(), func() {}
	}

	return context.WithTimeout(c.Request.Context(), patience)
}
