package httppolicy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
)

// Values of headers that are the same in all answers. They must not be changed in place.
var (
	noStore = []string{"no-store"}
	noSniff = []string{"nosniff"}
)

// Cacheable lets every cache between the server and the client keep the answer for age. A refusal undoes it.
func Cacheable(h http.Header, age time.Duration) {
	h.Set("Cache-Control", fmt.Sprintf("public, max-age=%d, stale-while-revalidate=5", int(age.Seconds())))
}

// NotModified reports whether the client has the version of the answer that etag names, so that the answer is 304. It
// gives the answer that tag.
func NotModified(c *gin.Context, etag string) bool {
	c.Writer.Header().Set("ETag", etag)

	// The comparison is weak, as RFC 9110 wants it for If-None-Match.
	for has := range strings.SplitSeq(strings.Join(c.Request.Header["If-None-Match"], ","), ",") {
		has = strings.TrimPrefix(strings.TrimSpace(has), "W/")
		if has == etag || has == "*" {
			return true
		}
	}

	return false
}

// JSON returns the JSON of v, which must have one. It leaves "&" and "<" as they are: the content type and nosniff keep
// browsers from reading an answer as HTML.
func JSON(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	// The value is one of ours, so this is a defect.
	if err := e.Encode(v); err != nil {
		panic(err)
	}

	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// AnswerNothing writes an answer without a body, such as 204. No cache may keep it, unless Cacheable was called.
func AnswerNothing(w gin.ResponseWriter, status int) {
	h := w.Header()
	if h["Cache-Control"] == nil {
		h["Cache-Control"] = noStore
	}

	w.WriteHeader(status)
	w.WriteHeaderNow()
}

// Answer writes an answer with a body. No cache may keep it, unless Cacheable was called.
func Answer(w http.ResponseWriter, status int, contentType string, body []byte) {
	h := w.Header()
	own := []string{contentType, strconv.Itoa(len(body))} // one allocation for both
	h["Content-Type"] = own[0:1:1]
	h["Content-Length"] = own[1:2:2]
	h["X-Content-Type-Options"] = noSniff
	if h["Cache-Control"] == nil {
		h["Cache-Control"] = noStore
	}

	w.WriteHeader(status)
	_, _ = w.Write(body) // the client may be gone
}
