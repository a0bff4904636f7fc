package gateway

import (
	"net/http"
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
	if policy.WantsGzip(c.Request) {
		c.Writer.Header().Set("Content-Encoding", "gzip")
		body = policy.Gzip(nil, body)
	}
	policy.Answer(c.Writer, kind, body)
}

// done answers 204.
func done(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	c.Status(http.StatusNoContent)
	c.Writer.WriteHeaderNow()
}
