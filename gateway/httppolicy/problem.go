package httppolicy

import (
	"cmp"
	"crypto/rand"
	"maps"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"headcount/counter/limit"
)

// maxDetail bounds the detail of a problem, in bytes, since a detail may repeat what
// a client sent. A longer detail is cut and ends in an ellipsis.
const maxDetail = 512

// DefectDetail is the detail of a 500.
const DefectDetail = "The server has a defect; it has been logged."

// RequestIDHeader is the header of an answer with the request's id, which is also in the log.
const RequestIDHeader = "X-Request-Id"

// RequestID returns the id of the request that is answered with these headers. Only refused and
// traced requests have an id.
func RequestID(h http.Header) string {
	id := h.Get(RequestIDHeader)
	if id == "" {
		id = rand.Text()[:16]
		h.Set(RequestIDHeader, id)
	}

	return id
}

// An Option changes the answer of Problem.
type Option func(http.Header)

// RetryAfter asks the client to try again after d, rounded up to whole seconds and at
// least 1 s.
func RetryAfter(d time.Duration) Option {
	return func(h http.Header) { h.Set("Retry-After", retrySeconds(d)) }
}

// Limited sets the headers for a client that has used up its rate and may make the next call
// after wait.
func Limited(rate limit.Rate, wait time.Duration) Option {
	return func(h http.Header) {
		SetRateLimit(h, int64(rate.Burst), rate.RefillTime(), 0, wait)
		RetryAfter(wait)(h)
	}
}

// SetRateLimit sets the headers about a limit, which allowed and refused calls have: how many calls
// may pass in a window, how many are left, and when this number changes. A refusal adds RetryAfter.
func SetRateLimit(h http.Header, limit int64, window time.Duration, left int64, reset time.Duration) {
	// Set would write Ratelimit.
	h["RateLimit"] = []string{`"default";r=` + strconv.FormatInt(left, 10) + `;t=` + seconds(reset)}
	h["RateLimit-Policy"] = []string{`"default";q=` + strconv.FormatInt(limit, 10) + `;w=` + seconds(window)}
}

func retrySeconds(d time.Duration) string { return seconds(max(d, time.Second)) }

// seconds returns a time in whole seconds, rounded up.
func seconds(d time.Duration) string { return strconv.FormatInt(int64(math.Ceil(d.Seconds())), 10) }

// Problem answers with status and a problem of RFC 9457: type, title, status and, unless it is empty, detail, and
// request_id. detail may repeat what a client sent: it is cut to 512 bytes. Problem keeps the headers that are already
// set, such as those of CORS, and removes only headers that describe another body. A 401 gets a challenge unless it has
// one. net/http sends no body for HEAD.
func Problem(w http.ResponseWriter, status int, detail string, opts ...Option) {
	writeProblem(w, problem{Status: status, Detail: detail}, opts...)
}

// Conflict writes an answer with status 409 and a problem that also has the counter at fault and
// its value.
func Conflict(w http.ResponseWriter, detail, key string, value int64) {
	writeProblem(w, problem{Status: http.StatusConflict, Detail: detail, Key: &key, Value: &value})
}

type problem struct {
	Type   string  `json:"type"`
	Title  string  `json:"title"`
	Status int     `json:"status"`
	Detail string  `json:"detail,omitempty"`
	Key    *string `json:"key,omitempty"`
	Value  *int64  `json:"value,omitempty"`
	ID     string  `json:"request_id"`
}

// Reasons of refusals, where the status is not specific enough. Each is a label of a metric.
const (
	ReasonAPIKey      = "api_key"     // the API key is missing or wrong
	ReasonSignature   = "signature"   // a back end has not signed the request, or not rightly
	ReasonNoToken     = "no_token"    // the request needs a token
	ReasonBadToken    = "bad_token"   // the token is invalid or expired
	ReasonOrigin      = "origin"      // the origin is not allowed
	ReasonSite        = "site"        // the API key, or the calling page, belongs to another site
	ReasonConnections = "connections" // the server has its maximum of connections
	ReasonAddress     = "address"     // the address has its maximum of connections
	ReasonMemory      = "memory"      // the process has little memory left
)

// statusReasons are the reasons of all other refusals.
var statusReasons = map[int]string{
	http.StatusBadRequest:            "bad_request",
	http.StatusUnauthorized:          "unauthorized",
	http.StatusForbidden:             "forbidden",
	http.StatusNotFound:              "not_found",
	http.StatusMethodNotAllowed:      "method",
	http.StatusConflict:              "conflict",
	http.StatusRequestEntityTooLarge: "too_large",
	http.StatusUnsupportedMediaType:  "media_type",
	http.StatusUpgradeRequired:       "no_upgrade",
	http.StatusTooManyRequests:       "rate",
	http.StatusInternalServerError:   "defect",
	http.StatusServiceUnavailable:    "unavailable",
}

const otherReason = "other"

// Reasons returns all reasons that Refusal may return.
func Reasons() []string {
	return append(slices.Collect(maps.Values(statusReasons)), otherReason,
		ReasonAPIKey, ReasonSignature, ReasonNoToken, ReasonBadToken, ReasonOrigin, ReasonSite, ReasonConnections,
		ReasonAddress, ReasonMemory)
}

// Header fields that carry data for the log. They are set after the header was sent, so they do
// not reach the client.
const (
	reasonKey = "Reason"
	detailKey = "Detail"
)

// Because sets the reason of a refusal.
func Because(reason string) Option { return func(h http.Header) { h.Set(reasonKey, reason) } }

// Refusal returns why Problem refused the request that was answered with this header: a reason for
// a metric, and the detail. reason is empty if Problem did not answer it.
func Refusal(h http.Header) (reason, detail string) {
	return h.Get(reasonKey), h.Get(detailKey)
}

var quotation = regexp.MustCompile(`"(?:[^"\\]|\\.)*(?:"|$)`)

// Unquoted returns a detail for the log, without users, pages and keys: it removes all quoted text,
// since a detail quotes everything that a client sent.
func Unquoted(detail string) string { return quotation.ReplaceAllString(detail, `"…"`) }

func writeProblem(w http.ResponseWriter, p problem, opts ...Option) {
	h := w.Header()
	reason, body := p.describe(h, opts...)
	w.WriteHeader(p.Status)
	w.Write(body) // the client may be gone

	// For the log: the header is sent, so these do not reach the client.
	h.Set(reasonKey, reason)
	h.Set(detailKey, p.Detail)
}

// describe completes p, sets the headers of the answer, and returns the reason of the refusal and the body.
func (p *problem) describe(h http.Header, opts ...Option) (reason string, body []byte) {
	// The handler may have described the body that it meant to send.
	h.Del("Content-Encoding")
	h.Del("ETag")
	h.Del("Last-Modified")

	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if p.Status == http.StatusUnauthorized && h.Get("WWW-Authenticate") == "" {
		h.Set("WWW-Authenticate", `Bearer realm="headcount"`)
	}
	// Options come last, so that they may replace what is set above, such as the challenge.
	for _, opt := range opts {
		opt(h)
	}

	reason = cmp.Or(h.Get(reasonKey), statusReasons[p.Status], otherReason)
	// Because has left it here for this moment; it must not reach the client.
	h.Del(reasonKey)
	p.ID = RequestID(h)
	p.Type = "about:blank"
	p.Title = http.StatusText(p.Status)
	p.Detail = shorten(p.Detail, maxDetail)
	body = append(JSON(p), '\n') // as every JSON answer ends, for terminals
	h.Set("Content-Length", strconv.Itoa(len(body)))

	return reason, body
}

// shorten cuts s to at most n bytes, but not within a character.
func shorten(s string, n int) string {
	const ellipsis = "…"
	if len(s) <= n {
		return s
	}

	end := n - len(ellipsis)
	for end > 0 && !utf8.RuneStart(s[end]) {
		end--
	}

	return s[:end] + ellipsis
}

// bodyTimeout is how long a client may continue to send a refused body before the connection
// is reset.
const bodyTimeout = time.Second

// RefuseBody answers a request without reading its body, and ends the connection. net/http would
// first read the rest of a body that is not much too large, for as long as the client takes to
// send it.
func RefuseBody(w http.ResponseWriter, status int, detail string, opts ...Option) {
	w.Header().Set("Connection", "close")

	// Without a deadline the connection ends later.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))

	Problem(w, status, detail, opts...)
}
