package gateway

import (
	"context"
	"crypto/hmac"
	"crypto/md5"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/gateway/identity"
	"headcount/gateway/pusher"
	"headcount/presence"
	"headcount/presence/presencemem"
)

// signed returns a path with the parameters of a query and the signature of an app's back end with the key "key" and
// the secret "secret".
func signed(method, path, query, body string) string {
	params, _ := url.ParseQuery(query)
	params.Set("auth_key", "key")
	params.Set("auth_version", "1.0")
	params.Set("auth_timestamp", fmt.Sprint(time.Now().Unix()))
	if body != "" {
		sum := md5.Sum([]byte(body))
		params.Set("body_md5", hex.EncodeToString(sum[:]))
	}

	var pairs []string
	for _, name := range slices.Sorted(maps.Keys(params)) {
		pairs = append(pairs, name+"="+params.Get(name))
	}

	mac := hmac.New(sha256.New, []byte("secret"))
	mac.Write([]byte(method + "\n" + path + "\n" + strings.Join(pairs, "&")))

	return path + "?" + params.Encode() + "&auth_signature=" + hex.EncodeToString(mac.Sum(nil))
}

// scanned lists pages as a scan of Redis does: some of them twice, and some without users.
type scanned struct {
	*presencemem.Store
	more []string
}

func (s scanned) Pages(ctx context.Context, fn func([]string)) error {
	fn(s.more)
	return s.Store.Pages(ctx, fn)
}

// forBackEnds is a Config with an app, and the API key "k".
func forBackEnds(cfg *Config) {
	cfg.API.App = pusher.App{Key: "key", Secrets: []string{"secret"}}
	cfg.API.Pages = scanned{cfg.Store.(*presencemem.Store), []string{"news", "nobody", "*"}}
	cfg.Keys, _ = identity.NewSiteKeys([]string{"k"}, cfg.Sites)
}

// ask makes a call, and returns the status and the body of the answer.
func (s *served) ask(method, path, body string, lines ...string) (int, string) {
	s.t.Helper()
	answer := s.do(method, path, body, lines...)

	return answer.status, strings.TrimSpace(answer.text)
}

// The back end of an app can list its channels, and the events that it triggers are changes of their pages.
func TestBackEndsOfPusher(t *testing.T) {
	inMemory(t, forBackEnds, func(t *testing.T, s *served) {
		expect := func(method, path, query, body string, status int, want string) {
			t.Helper()
			got, text := s.ask(method, signed(method, path, query, body), body)
			if got != status || !strings.Contains(text, want) {
				t.Errorf("%s %s?%s: %d %s, want %d %s", method, path, query, got, text, status, want)
			}
		}

		expect("GET", "/apps/1/channels", "", "", 200, `{"channels":{}}`)
		for user, page := range map[string]string{"ann": "news", "bob": "news", "eve": "a%2Fb"} {
			if status, text := s.ask("PUT", "/-/users/"+user+"/pages/"+page, "", "X-API-Key: k"); status != 200 {
				t.Fatal(text)
			}
		}

		expect("GET", "/apps/1/channels", "", "", 200, `{"channels":{"a/b":{},"news":{}}}`)
		expect("GET", "/apps/any-id/channels", "filter_by_prefix=ne&info=subscription_count,user_count", "", 200,
			`{"channels":{"news":{"subscription_count":2,"user_count":2}}}`)
		expect("GET", "/apps/1/channels/news", "info=subscription_count", "", 200,
			`{"occupied":true,"subscription_count":2}`)
		expect("GET", "/apps/1/channels/a%2Fb", "", "", 200, `{"occupied":true}`)
		expect("GET", "/apps/1/channels/sport", "info=user_count", "", 200, `{"occupied":false,"user_count":0}`)
		expect("GET", "/apps/1/channels/*", "", "", 400, "reserved")
		expect("GET", "/apps/1/channels", "info=cache", "", 400, "subscription_count and user_count")
		expect("GET", "/apps/1/channels", "site=shop", "", 400, "shop")

		unread := func(want string) {
			t.Helper()
			if _, text := s.ask("GET", "/-/users/ann/follows", "", "X-API-Key: k"); !strings.Contains(text, want) {
				t.Errorf("ann has %s, want %s", text, want)
			}
		}

		for _, page := range []string{"news", "sport"} {
			if status, text := s.ask("PUT", "/-/users/ann/follows/"+page, "", "X-API-Key: k"); status != 204 {
				t.Fatal(text)
			}
		}

		const changed = `{"name":"headcount:changed","data":"{}",`

		expect("POST", "/apps/1/events", "", changed+`"channels":["news","sport","nobody"]}`, 200, `{}`)
		unread(`{"news":1,"sport":1}`)
		expect("POST", "/apps/1/batch_events", "",
			`{"batch":[`+changed+`"channel":"news"},`+changed+`"channel":"news"}]}`, 200, `{}`)
		unread(`{"news":3,"sport":1}`)

		// A refused call changes nothing, not even the first pages of a batch.
		expect("POST", "/apps/1/events", "", `{"name":"order.shipped","channel":"news","data":"{}"}`, 403,
			"carries no messages")
		expect("POST", "/apps/1/batch_events", "",
			`{"batch":[`+changed+`"channel":"news"},{"name":"x","channel":"news"}]}`, 403, "headcount:changed")
		expect("POST", "/apps/1/events", "", changed+`"channels":["news","*"]}`, 400, "is no page")
		expect("POST", "/apps/1/events", "", changed+`"channel":"news","more":"`+strings.Repeat("x", 128<<10)+`"}`, 413,
			"131072 bytes")
		unread(`{"news":3,"sport":1}`)

		// A page may be called "apps".
		for path, want := range map[string]int{
			"/apps/counter": 200, "/apps/stats": 404, "/apps/counter/x": 404, "/apps/1/channels/a/users": 404,
		} {
			if status, text := s.ask("GET", path, ""); status != want {
				t.Errorf("%s: %d %s, want %d", path, status, text, want)
			}
		}

		s.open("/apps/counter/events", "").response(200)
	})
}

// Calls of back ends without a valid signature are refused, and say why.
func TestUnsignedBackEnds(t *testing.T) {
	inMemory(t, forBackEnds, func(t *testing.T, s *served) {
		const body = `{"name":"headcount:changed","channel":"news"}`
		good := signed("POST", "/apps/1/events", "", body)
		old := signed("GET", "/apps/1/channels", "", "")
		for _, c := range []struct {
			method, path, body, says string
			lines                    []string
		}{
			{"GET", "/apps/1/channels", "", "auth_signature", nil},
			// The API key is for other calls.
			{"GET", "/apps/1/channels", "", "auth_signature", []string{"X-API-Key: k"}},
			{"GET", signed("GET", "/apps/2/channels", "", "")[len("/apps/2/channels"):], "", "path", nil},
			{"HEAD", old, "", "", nil},
			{"GET", strings.Replace(old, "auth_key=key", "auth_key=kei", 1), "", "--pusher-key", nil},
			{"GET", old + "0", "", "--pusher-secret", nil},
			{"POST", good, body + " ", "body_md5", nil},
			{"POST", signed("POST", "/apps/1/events", "", ""), body, "body_md5", nil},
		} {
			path := c.path
			if strings.HasPrefix(path, "?") {
				path = "/apps/1/channels" + path
			}
			status, text := s.ask(c.method, path, c.body, c.lines...)
			if status != http.StatusUnauthorized || !strings.Contains(text, c.says) {
				t.Errorf("%s %s: %d %s, want 401 with %s", c.method, path, status, text, c.says)
			}
		}

		// A timestamp is valid for ten minutes, as with Pusher.
		time.Sleep(10 * time.Minute)
		if status, text := s.ask("GET", old, ""); status != 200 {
			t.Errorf("with a timestamp of ten minutes ago: %d %s, want 200", status, text)
		}

		// Timestamps have whole seconds, so after one second more this one may still be in time.
		time.Sleep(2 * time.Second)
		if status, text := s.ask("GET", old, ""); status != 401 || !strings.Contains(text, "clock") {
			t.Errorf("with an older timestamp: %d %s, want 401 about the clock", status, text)
		}

		// No refused call has marked a page as changed.
		if _, text := s.ask("GET", "/-/users/ann/follows", "", "X-API-Key: k"); strings.Contains(text, "unread") {
			t.Errorf("a refused call changed a page: %s", text)
		}
	})
}

// crowded has a user on each page.
type crowded struct{ scanned }

func (crowded) Counts(_ context.Context, pages []string) ([]presence.Count, error) {
	counts := make([]presence.Count, len(pages))
	for i, page := range pages {
		counts[i] = presence.Count{Page: page, Users: 1}
	}

	return counts, nil
}

// A back end that asks for more channels than an answer holds is told to filter.
func TestBackEndsAskForFewerChannels(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		forBackEnds(cfg)
		pages := crowded{cfg.API.Pages.(scanned)}
		for i := range 10_001 {
			pages.more = append(pages.more, fmt.Sprintf("p%d", i))
		}

		pages.more = pages.more[3:] // without the pages of forBackEnds: exactly one page more than an answer holds
		cfg.API.Pages = pages
	}, func(t *testing.T, s *served) {
		for query, want := range map[string]int{"": 400, "filter_by_prefix=p1": 200} {
			status, text := s.ask("GET", signed("GET", "/apps/1/channels", query, ""), "")
			if status != want || want == 400 && !strings.Contains(text, "filter_by_prefix") {
				t.Errorf("%s: %d %.200s, want %d", query, status, text, want)
			}
		}
	})
}

// slowly lists its pages in a second, and counts the lists.
type slowly struct {
	scanned
	lists *atomic.Int64
}

func (s slowly) Pages(ctx context.Context, fn func([]string)) error {
	s.lists.Add(1)
	time.Sleep(time.Second)

	return s.scanned.Pages(ctx, fn)
}

// Back ends that ask for the same channels at the same time have the store scanned once.
func TestBackEndsShareAList(t *testing.T) {
	var lists atomic.Int64
	inMemory(t, func(cfg *Config) {
		forBackEnds(cfg)
		cfg.API.Pages = slowly{cfg.API.Pages.(scanned), &lists}
	}, func(t *testing.T, s *served) {
		var asking sync.WaitGroup
		for range 10 {
			asking.Go(func() {
				status, text := s.ask("GET", signed("GET", "/apps/1/channels", "", ""), "")
				if status != http.StatusOK {
					t.Errorf("%d %s", status, text)
				}
			})
		}
		// All ten began before the first list was complete, since in a bubble no time passes while one of them can run.
		asking.Wait()

		// Whoever asks later gets a list of then.
		if status, text := s.ask("GET", signed("GET", "/apps/1/channels", "", ""), ""); status != http.StatusOK {
			t.Errorf("%d %s", status, text)
		}
		if n := lists.Load(); n != 2 {
			t.Errorf("the store was scanned %d times, want 2", n)
		}
	})
}

// Without a secret these calls do not exist. With sites each site has its own channels.
func TestBackEndsWithoutSecretAndOfSites(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		forBackEnds(cfg)
		cfg.API.App.Secrets = nil
	}, func(t *testing.T, s *served) {
		if status, text := s.ask("GET", signed("GET", "/apps/1/channels", "", ""), ""); status != 404 {
			t.Errorf("without a secret: %d %s, want 404", status, text)
		}
	})

	inMemory(t, func(cfg *Config) {
		cfg.Sites, _ = identity.NewSites([]string{"shop=https://shop.example", "blog=https://blog.example"})
		forBackEnds(cfg)
	}, func(t *testing.T, s *served) {
		for site, page := range map[string]string{"shop": "a", "blog": "b"} {
			if status, text := s.ask("PUT", "/-/users/ann/pages/"+page+"?site="+site, "",
				"X-API-Key: k"); status != 200 {
				t.Fatal(text)
			}
		}

		// Without a site in the call the first one is meant.
		for query, want := range map[string]string{"": "a", "site=shop": "a", "site=blog": "b"} {
			_, text := s.ask("GET", signed("GET", "/apps/1/channels", query, ""), "")
			if text != `{"channels":{"`+want+`":{}}}` {
				t.Errorf("%q: %s, want the channel %s", query, text, want)
			}
		}

		_, text := s.ask("GET", signed("GET", "/apps/1/channels", "", ""), "", "Headcount-Site: blog")
		if text != `{"channels":{"b":{}}}` {
			t.Errorf("the channels of the other site are %s, want b", text)
		}
	})
}
