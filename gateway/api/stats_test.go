package api

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"headcount/presence/minutes"
)

// slowMinutes takes a while to answer.
type slowMinutes struct {
	takes time.Duration
	asked atomic.Int32
}

func (s *slowMinutes) Minutes(context.Context, string, int64) ([]minutes.Minute, error) {
	s.asked.Add(1)
	time.Sleep(s.takes)

	return []minutes.Minute{{At: minutes.Of(time.Now()), Joins: int64(s.asked.Load())}}, nil
}

// Visitors with the same question share an answer for a second. Different questions are answered one at a time, and
// servers do not wait for them.
func TestStatsTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := &slowMinutes{takes: 100 * time.Millisecond}
		h, _ := serve(t, []string{"k"}, Config{PageStats: 24 * time.Hour, Minutes: store})

		get := func(address int, target string, headers ...string) *httptest.ResponseRecorder {
			r := httptest.NewRequest(http.MethodGet, target, nil)
			r.RemoteAddr = fmt.Sprintf("192.0.2.%d:1", address)
			for i := 0; i < len(headers); i += 2 {
				r.Header.Set(headers[i], headers[i+1])
			}

			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			return w
		}

		began := time.Now()
		first := get(1, "/*/stats?last=1h&step=1m").Body.String()
		for _, when := range []struct {
			after time.Duration
			asked int32
		}{{899 * time.Millisecond, 1}, {time.Millisecond, 2}} {
			time.Sleep(when.after)
			if again := get(1, "/*/stats?last=1h&step=1m"); again.Code != 200 || store.asked.Load() != when.asked ||
				(again.Body.String() == first) != (when.asked == 1) {
				t.Errorf("%s later: %d %s, and the store was asked %d times", time.Since(began), again.Code,
					again.Body, store.asked.Load())
			}
		}
		time.Sleep(time.Second)

		began = time.Now()
		store.asked.Store(0)
		var refused atomic.Int32
		var visitors sync.WaitGroup

		for i := range 50 {
			visitors.Go(func() {
				if w := get(2+i, "/p/stats"); w.Code != 200 {
					t.Errorf("one of many visitors with the same question got %d %s, want 200", w.Code, w.Body)
				}
			})
		}
		synctest.Wait()

		// One address may use only its share of the turns.
		for i := range 50 {
			visitors.Go(func() {
				if get(1, fmt.Sprintf("/%d/stats", i)).Code == 429 {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()

		// So another visitor still gets a turn.
		visitors.Go(func() {
			if w := get(100, "/q/stats"); w.Code != 200 {
				t.Errorf("another visitor got %d %s, want 200", w.Code, w.Body)
			}
		})
		synctest.Wait()

		if n := store.asked.Load(); n != 1 || refused.Load() != 34 {
			t.Errorf("%d computations at once, want 1; %d questions are refused, want 34", n, refused.Load())
		}

		if w := get(1, "/other/stats", "X-API-Key", "k"); w.Code != 200 || time.Since(began) != store.takes {
			t.Errorf("a server got %d after %s, want 200 without a wait for visitors", w.Code, time.Since(began))
		}

		visitors.Wait()
		time.Sleep(time.Second) // until the pause after a question is over
	})
}

// Statistics say if the number of users in them is only the last known one.
func TestStatsOfAStaleCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, _ := serve(t, nil, Config{PageStats: 24 * time.Hour, Minutes: &slowMinutes{}})
		for page, stale := range map[string]bool{"p": false, "old": true} {
			body := call(t, h, http.StatusOK, http.MethodGet, "/"+page+"/stats").Body.String()
			if strings.Contains(body, `"stale":true`) != stale {
				t.Errorf("the statistics of %s are %s, want stale: %t", page, body, stale)
			}
		}
	})
}
