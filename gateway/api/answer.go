package api

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/httppolicy"
)

const retryAfter = time.Second // of a 503

func badRequest(c *gin.Context, detail string) {
	httppolicy.Problem(c.Writer, http.StatusBadRequest, detail)
}

// Unavailable answers 503 with the reason.
func Unavailable(c *gin.Context, err error) {
	httppolicy.Problem(c.Writer, http.StatusServiceUnavailable, err.Error()+"; try again", httppolicy.RetryAfter(retryAfter))
}

// write answers 200 with a body that no cache may keep, unless Callers.Cacheable was called. The
// body is compressed if the request accepts gzip.
func write(c *gin.Context, kind string, body []byte) {
	if httppolicy.WantsGzip(c.Request) {
		c.Writer.Header().Set("Content-Encoding", "gzip")
		body = httppolicy.Gzip(nil, body)
	}
	httppolicy.Answer(c.Writer, kind, body)
}

// done answers 204.
func done(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	c.Status(http.StatusNoContent)
	c.Writer.WriteHeaderNow()
}

// appendQuoted appends s as a JSON string. It is for text that came from outside.
func appendQuoted(b []byte, s string) []byte {
	quoted, _ := json.Marshal(s) // every string can be encoded
	return append(b, quoted...)
}
