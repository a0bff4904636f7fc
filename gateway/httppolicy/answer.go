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

// Get adds a route for GET, and for HEAD, whose answer has no body.
func Get(e *gin.Engine, path string, h gin.HandlerFunc) {
	e.GET(path, h)
	e.HEAD(path, h)
}

// Values of headers that are the same in all answers. They must not be changed in place.
var (
	noStore    = []string{"no-store"}
	noSniff    = []string{"nosniff"}
	varyOrigin = []string{"Origin"}
)

// Cacheable lets every cache between the server and the client keep the answer for age. A refusal undoes it.
func Cacheable(h http.Header, age time.Duration) {
	h.Set("Cache-Control", fmt.Sprintf("public, max-age=%d, stale-while-revalidate=5", int(age.Seconds())))
}

// NotModified answers 304 and returns true if the client has the version of the answer that etag names. Otherwise it
// gives the answer that tag.
func NotModified(c *gin.Context, etag string) bool {
	h := c.Writer.Header()
	h.Set("ETag", etag)

	for _, has := range strings.Split(strings.Join(c.Request.Header["If-None-Match"], ","), ",") {
		has = strings.TrimPrefix(strings.TrimSpace(has), "W/")
		if has != etag && has != "*" {
			continue
		}

		if h["Cache-Control"] == nil {
			h["Cache-Control"] = noStore
		}

		c.Status(http.StatusNotModified)
		c.Writer.WriteHeaderNow()

		return true
	}

	return false
}

// JSON returns the JSON of v, which must have one. It leaves "&" and "<" as they are: the content type and nosniff keep
// browsers from reading an answer as HTML.
func JSON(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err)
	}

	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Answer writes an answer with status 200 and a body that no cache may keep, unless Cacheable was called.
func Answer(w http.ResponseWriter, contentType string, body []byte) {
	AnswerWith(w, http.StatusOK, contentType, body)
}

// NoContent answers 204.
func NoContent(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	c.Status(http.StatusNoContent)
	c.Writer.WriteHeaderNow()
}

// AnswerWith is Answer with another status.
func AnswerWith(w http.ResponseWriter, status int, contentType string, body []byte) {
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
