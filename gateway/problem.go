package gateway

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// maxDetail bounds the detail of a problem, in bytes: it may repeat what a
// client sent. What is longer is cut there and ends in an ellipsis.
const maxDetail = 512

// A problemOption changes the answer of writeProblem.
type problemOption func(http.Header)

// retryAfter tells the client when to come back: in whole seconds, rounded up,
// at least 1.
func retryAfter(d time.Duration) problemOption {
	return func(h http.Header) { h.Set("Retry-After", retrySeconds(d)) }
}

func retrySeconds(d time.Duration) string {
	return strconv.FormatInt(max(1, int64(math.Ceil(d.Seconds()))), 10)
}

// allowMethods names the methods that a 405 must name.
func allowMethods(methods ...string) problemOption {
	return func(h http.Header) { h.Set("Allow", strings.Join(methods, ", ")) }
}

// writeProblem answers with status and a problem of RFC 9457: type, title,
// status and, unless it is empty, detail. detail may hold what a client sent:
// it is escaped, also for HTML, and cut to 512 bytes. Headers that are set
// already stay, those of CORS among them; only what describes another body
// goes. A 401 gets a challenge unless it has one. net/http leaves out the body
// when it answers HEAD.
func writeProblem(w http.ResponseWriter, status int, detail string, opts ...problemOption) {
	h := w.Header()
	h.Del("Content-Encoding")
	h.Del("ETag")
	h.Del("Last-Modified")
	h.Set("Content-Type", "application/problem+json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if status == http.StatusUnauthorized && h.Get("WWW-Authenticate") == "" {
		h.Set("WWW-Authenticate", `Bearer realm="headcount"`)
	}
	for _, opt := range opts {
		opt(h)
	}
	body, err := json.Marshal(struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
	}{"about:blank", http.StatusText(status), status, shorten(detail, maxDetail)})
	if err != nil {
		panic(err) // four plain members
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(status)
	w.Write(body) // the client may be gone; there is nobody else to tell
}

// writeIdentityProblem answers a request that Identify refused.
func writeIdentityProblem(w http.ResponseWriter, err error) {
	switch {
	case errors.Is(err, ErrKeysAway):
		writeProblem(w, http.StatusServiceUnavailable, err.Error(), retryAfter(keysEvery))
	case errors.Is(err, ErrNoToken):
		writeProblem(w, http.StatusUnauthorized, err.Error())
	default:
		// RFC 6750: the code is for a token that was presented.
		w.Header().Set("WWW-Authenticate", `Bearer realm="headcount", error="invalid_token"`)
		writeProblem(w, http.StatusUnauthorized, err.Error())
	}
}

// shorten shortens s to at most n bytes, not in the middle of a character.
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
