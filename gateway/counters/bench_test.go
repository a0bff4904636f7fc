package counters

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/gin-gonic/gin"
)

// BenchmarkIncrement is a call without the network: the handler, the combiner and the
// store in memory. "bare" is a handler that reads a body and answers the same JSON.
func BenchmarkIncrement(b *testing.B) {
	const body = `{"delta":5}`
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
	for name, path := range map[string]string{"counter": Root + "/views:1/increment", "bare": "/bare"} {
		b.Run(name, func(b *testing.B) {
			r, err := http.NewRequest(http.MethodPost, "http://h"+path, nil)
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
