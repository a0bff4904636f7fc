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

// writeJSON answers 200 with the JSON of v and a line end, as write does.
func writeJSON(c *gin.Context, v any) { write(c, "application/json", append(httppolicy.JSON(v), '\n')) }

// write answers 200 with a body that no cache may keep, unless Callers.Cacheable was called. The
// body is compressed if the request accepts gzip.
func write(c *gin.Context, kind string, body []byte) {
	if httppolicy.WantsGzip(c.Request) {
		c.Writer.Header().Set("Content-Encoding", "gzip")
		body = httppolicy.Gzip(nil, body)
	}
	httppolicy.Answer(c.Writer, kind, body)
}

// foreign is text that came from outside. In its JSON, HTML is escaped.
type foreign string

// MarshalJSON implements json.Marshaler.
func (s foreign) MarshalJSON() ([]byte, error) { return json.Marshal(string(s)) }
