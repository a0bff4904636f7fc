package gateway

import (
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"

	"headcount/gateway/policy"
)

const comeBack = time.Second // Retry-After of a 503

func badRequest(c *gin.Context, detail string) {
	policy.Problem(c.Writer, http.StatusBadRequest, detail)
}

func unavailable(c *gin.Context, err error) {
	policy.Problem(c.Writer, http.StatusServiceUnavailable, err.Error()+"; try again", policy.RetryAfter(comeBack))
}

// write answers 200 with a body that no cache may keep. The body is compressed
// if the request accepts gzip.
func write(c *gin.Context, kind string, body []byte) {
	h := c.Writer.Header()
	h.Set("Content-Type", kind)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if policy.WantsGzip(c.Request) {
		h.Set("Content-Encoding", "gzip")
		body = policy.Gzip(nil, body)
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	c.Writer.WriteHeader(http.StatusOK)
	_, _ = c.Writer.Write(body) // the client may be gone
}

// done answers 204.
func done(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	c.Status(http.StatusNoContent)
	c.Writer.WriteHeaderNow()
}
