package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const limitsRoot = "/api/v1/limits/"

// fightForALimit has 64 clients fight for 100 calls that may pass, over all processes, one of which
// is killed meanwhile if the place outlives it. No more than 100 pass, by no algorithm; a call
// that was not answered may have been one of them.
func fightForALimit(t *testing.T, ps *processes, kill bool) {
	t.Helper()
	const most, clients, tries = 100, 64, 6
	algorithms := []string{"fixed", "sliding", "log"}
	key := url.PathEscape(fresh(t))
	var passed, silent [3]atomic.Int64
	var answers atomic.Int64
	half := make(chan struct{})
	var wg sync.WaitGroup
	for i := range clients {
		wg.Go(func() {
			for n := range tries {
				a := (i + n) % len(algorithms)
				for at := i; ; at++ {
					r, err := try("POST", ps.at(at).url+limitsRoot+key, fmt.Sprintf(`{"limit":%d,"window":"31d","algorithm":%q}`, most, algorithms[a]), withKey)
					switch {
					case err != nil || r.status == http.StatusServiceUnavailable:
						silent[a].Add(1)
						time.Sleep(5 * time.Millisecond)
						continue
					case r.status == http.StatusOK:
						passed[a].Add(1)
					case r.status != http.StatusTooManyRequests:
						t.Errorf("%d %s", r.status, r.body)
					}
					if answers.Add(1) == clients {
						close(half)
					}
					break
				}
			}
		})
	}
	if kill {
		<-half
		ps.crash(0)
		ps.restart(0)
	}
	wg.Wait()
	for a, name := range algorithms {
		if n, s := passed[a].Load(), silent[a].Load(); n > most || n+s < most {
			t.Errorf("%s: %d passed and %d were not answered, the limit is %d", name, n, s, most)
		}
		for i := range ps.all {
			r := do(t, "POST", ps.at(i).url+limitsRoot+key, fmt.Sprintf(`{"limit":%d,"window":"31d","algorithm":%q}`, most, name), withKey)
			var got struct {
				Allowed          bool
				Limit, Remaining int64
				Reset            int64 `json:"reset_after_ms"`
			}
			if err := json.Unmarshal([]byte(r.body), &got); err != nil || r.status != 429 || got.Allowed || got.Limit != most || got.Remaining != 0 || r.header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: %d %s", name, r.status, r.body)
			}
			wait := (got.Reset + 999) / 1000
			for header, want := range map[string]string{"RateLimit": fmt.Sprintf(`"default";r=0;t=%d`, wait), "RateLimit-Policy": `"default";q=100;w=2678400`, "Retry-After": fmt.Sprint(wait)} {
				if is := r.header.Get(header); is != want {
					t.Errorf("%s: %q, want %q", header, is, want)
				}
			}
		}
	}
	do(t, "POST", ps.at(0).url+limitsRoot+key, `{"limit":1}`, withKey).problem(t, http.StatusBadRequest)
	do(t, "POST", ps.at(0).url+limitsRoot+key, `{"limit":1,"window":"1m"}`, "None: 1").problem(t, http.StatusForbidden)
	do(t, "GET", ps.at(0).url+limitsRoot+key, "", withKey).problem(t, http.StatusMethodNotAllowed)
}
