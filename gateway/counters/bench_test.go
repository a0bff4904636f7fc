package counters

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
)

// BenchmarkCall is a call without the network: the handler, the combiner and the
// store in memory. "bare" is a handler that reads a body and answers the same JSON.
func BenchmarkCall(b *testing.B) {
	s := serve(b, nil)
	s.engine.POST("/bare", func(c *gin.Context) {
		var in struct {
			Delta int64 `json:"delta"`
		}
		if err := c.ShouldBindJSON(&in); err != nil {
			c.Status(http.StatusBadRequest)
			return
		}
		c.JSON(http.StatusOK, gin.H{"key": "views:1", "kind": "sum", "value": in.Delta, "updated_at": "2030-10-10T12:11:42Z", "version": "1-1", "exact": true})
	})
	for name, call := range map[string]struct{ path, body string }{
		"counter": {Root + "/views:1/increment", `{"delta":5}`},
		"bare":    {"/bare", `{"delta":5}`},
		"limit":   {LimitsRoot + "/user:1", `{"limit":1000000000000,"window":"1m"}`},
	} {
		b.Run(name, func(b *testing.B) {
			body := call.body
			r, err := http.NewRequest(http.MethodPost, "http://h"+call.path, nil)
			if err != nil {
				b.Fatal(err)
			}
			r.Header.Set("X-API-Key", "k")
			r.Header.Set("Content-Type", "application/json")
			r.ContentLength = int64(len(body))
			b.ReportAllocs()
			for b.Loop() {
				r.Body = io.NopCloser(strings.NewReader(body))
				w := httptest.NewRecorder()
				s.engine.ServeHTTP(w, r)
				if w.Code != http.StatusOK {
					b.Fatal(w.Code, w.Body)
				}
			}
		})
	}
}
