package counterapi

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"headcount/gateway/bounds"
)

// Callers without an API key send large bodies slowly. At the bound a further large body is refused; small ones are
// not, nor are those of servers. Every body that arrives completely is carried out.
func TestHeldBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := serve(t, nil)
		large := strings.Repeat(" ", smallBody) + `{"delta":1}`

		var held sync.WaitGroup
		var ends []*io.PipeWriter
		for i := range bounds.LargeBodies.Max {
			// A pipe keeps the body open: the server has read the first part and waits for the rest, as from a slow
			// caller.
			body, end := io.Pipe()
			ends = append(ends, end)

			r := httptest.NewRequest(http.MethodPost, Root+"/votes:1/increment", body)
			r.Header.Set("User", fmt.Sprint("u", i))
			r.ContentLength = -1 // in chunks
			if i%2 == 0 {
				r.ContentLength = int64(len(large))
			}

			held.Go(func() {
				w := httptest.NewRecorder()
				s.engine.ServeHTTP(w, r)
				if w.Code != http.StatusOK {
					t.Errorf("large body %d is answered %d %s, want 200", i, w.Code, w.Body)
				}
			})

			_, _ = io.WriteString(end, large[:smallBody])
		}

		synctest.Wait() // until as many large bodies are being read as permitted

		ask := func(body string, status int, lines ...string) {
			t.Helper()
			w := s.do("POST /votes:1/increment", body, lines...)
			if w.Code != status || status == http.StatusServiceUnavailable && w.Header().Get("Retry-After") != "1" {
				t.Errorf("%d bytes, %s: %d, Retry-After %q, %s; want %d", len(body), lines, w.Code,
					w.Header().Get("Retry-After"), w.Body, status)
			}
		}

		// The bound is on large bodies of visitors: a small one passes, and so does a server's.
		ask(large, http.StatusServiceUnavailable, "User: late")
		ask(large[len(`{"delta":1}`):], http.StatusOK, "User: late")
		ask(large, http.StatusOK, key)

		for _, end := range ends {
			_, _ = io.WriteString(end, large[smallBody:])
			_ = end.Close()
		}

		held.Wait()
		ask(large, http.StatusOK, "User: late")
	})
}
