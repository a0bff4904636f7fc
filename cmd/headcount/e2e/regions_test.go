package e2e

import (
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"headcount/counter/pgtest"
	"headcount/presence/redistest"
)

// Two sites in two regions, with one PostgreSQL beside them: pages and sums have one total in both regions, exact counters are the
// same ones at once, and the blog never sees anything of the shop.
func TestTwoSitesInTwoRegions(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Start(t)
	database := postgres.Database(t)
	redis := map[string]string{"us": redistest.Start(t).URL(), "eu": redistest.Start(t).URL()}
	flags := func(region, peer string) []string {
		return append([]string{"--region=" + region, "--redis=" + redis[region], "--peer=" + peer + "=" + redis[peer], "--postgres=" + database}, twoSites...)
	}
	us, eu := startBoth(t, flags("us", "eu"), flags("eu", "us"))
	both := []*server{us, eu}

	t.Run("pages", func(t *testing.T) {
		reader := eu.dial(t, dialer{headers: []string{inBlog}})
		reader.join("p")
		reader.awaitCount("p", 1)
		for _, s := range both {
			s.dial(t, dialer{headers: []string{inShop}}).join("p")
		}
		wantCount(t, both, "p", 2, ofShop)
		wantCount(t, both, "*", 2, ofShop)
		wantCount(t, both, "p", 1, ofBlog)
		wantCount(t, both, "*", 1, ofBlog)
		for _, f := range reader.skim() {
			if f.Type == "count" && *f.Count != 1 {
				t.Errorf("the blog hears of the shop: %s", f.text)
			}
		}
	})

	t.Run("unread", func(t *testing.T) {
		buyer := us.dial(t, dialer{headers: []string{inShop}})
		reader := us.dial(t, dialer{headers: []string{inBlog}})
		us.put(t, "/-/me/follows/news", "", buyer.as(), inShop).noContent(t)
		us.put(t, "/-/me/follows/news", "", reader.as(), inBlog).noContent(t)
		do(t, "POST", us.url+"/news/changes", "", asBlog, ofBlog).noContent(t)
		reader.awaitUnread(1)
		do(t, "POST", us.url+"/news/changes", "", asBlog, ofBlog).noContent(t)
		do(t, "POST", us.url+"/news/changes", "", asShop).noContent(t)
		reader.awaitUnread(2)
		buyer.awaitUnread(1)
		for _, f := range buyer.skim() {
			if f.Type == "unread" && *f.Count > 1 {
				t.Errorf("the shop hears of the blog: %s", f.text)
			}
		}
	})

	// of is a counter as a region knows it exactly.
	of := func(t testing.TB, s *server, key string, headers ...string) lasting {
		t.Helper()
		return s.call(t, "GET", key+"/exact", "", headers...).lasting(t)
	}
	t.Run("sums", func(t *testing.T) {
		watcher := eu.dial(t, dialer{headers: []string{inShop}})
		watcher.send(`{"type":"subscribe","counters":["views:1","stock:1"]}`)
		us.call(t, "POST", "views:1/increment", `{"delta":3}`, asShop).lasting(t)
		eu.call(t, "POST", "views:1/increment", `{"delta":4}`, asShop).lasting(t)
		eu.call(t, "POST", "views:1/increment", `{"delta":10}`, asBlog, ofBlog).lasting(t)
		us.call(t, "POST", "stock:1/increment", `{"delta":10}`, asShop).lasting(t)
		watcher.awaitAll(
			func(f frame) bool { return f.Type == "counter" && f.Key == "views:1" && f.Value == 7 },
			func(f frame) bool { return f.Type == "counter" && f.Key == "stock:1" && f.Value == 10 },
		)
		for _, s := range both {
			eventually(t, "the views of both sites", func() bool {
				return of(t, s, "views:1", asShop).Value == 7 && of(t, s, "views:1", ofBlog).Value == 10
			})
		}
	})

	t.Run("64 clients of both regions fight for the last 10", func(t *testing.T) {
		var got, refused atomic.Int64
		var wg sync.WaitGroup
		for i := range 64 {
			wg.Go(func() {
				a, err := try("POST", both[i%2].url+root+"stock:1/decrement", "", asShop)
				switch {
				case err == nil && a.status == http.StatusOK:
					got.Add(1)
				case err == nil && a.status == http.StatusConflict:
					refused.Add(1)
				default:
					t.Errorf("%d %s, %v", a.status, a.body, err)
				}
			})
		}
		wg.Wait()
		if got.Load() != 10 || refused.Load() != 54 {
			t.Errorf("%d got one and %d did not", got.Load(), refused.Load())
		}
		for _, s := range both {
			if c := of(t, s, "stock:1", asShop); c.Value != 0 || !c.Exact {
				t.Errorf("%+v", c)
			}
			if c := of(t, s, "stock:1", asBlog, ofBlog); c.UpdatedAt != nil || !c.Exact {
				t.Errorf("the blog's: %+v", c)
			}
			if all := s.ledger(t, "stock:1"); len(all) != 11 || all[10].After != 0 { // it adds up
				t.Errorf("%d entries: %+v", len(all), all)
			}
		}
	})

	t.Run("PostgreSQL is away", func(t *testing.T) {
		postgres.Kill()
		for i, s := range both {
			if a := s.call(t, "POST", "stock:1/increment", "", asShop); a.status != http.StatusServiceUnavailable {
				t.Errorf("an exact counter: %d %s", a.status, a.body)
			}
			batch := `{"changes":[{"key":"views:1"},{"key":"stock:1"}]}`
			if a := do(t, "POST", s.url+"/api/v1/counters", batch, asShop, "Content-Type: application/json"); a.status != http.StatusServiceUnavailable {
				t.Errorf("a batch with an exact counter: %d %s", a.status, a.body)
			}
			s.call(t, "POST", "views:2/increment", fmt.Sprintf(`{"delta":%d}`, i+1), asShop).lasting(t)
			if a := do(t, "GET", s.admin+"/readyz", ""); a.status != http.StatusOK {
				t.Errorf("not ready: %s", a.body)
			}
		}
		for _, s := range both {
			eventually(t, "the sum without PostgreSQL", func() bool { return of(t, s, "views:2", asShop).Value == 3 })
		}
		late := us.dial(t, dialer{headers: []string{inShop}})
		late.send(`{"type":"subscribe","counters":["stock:unknown","views:2"]}`)
		late.awaitCounter("views:2", 3, false)
		postgres.Restart(t)
		eventually(t, "exact counters are back", func() bool {
			a, err := try("POST", us.url+root+"stock:1/increment", "", asShop, "Idempotency-Key: back")
			return err == nil && a.status == http.StatusOK
		})
		eventually(t, "in the other region, too", func() bool {
			a, err := try("GET", eu.url+root+"stock:1/exact", "", asShop)
			return err == nil && a.status == http.StatusOK && a.lasting(t).Value == 1
		})
		if c := of(t, us, "views:1", asShop); c.Value != 7 {
			t.Errorf("%+v: of a batch that was not made", c)
		}
	})
}
