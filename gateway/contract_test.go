package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rs/zerolog"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/pipeline"
	"headcount/gateway/calls"
	"headcount/gateway/openapi"
	"headcount/gateway/pusher"
	"headcount/gateway/websocket"
	"headcount/presence"
	"headcount/presence/presencemem"
)

type noDashboard struct{}

func (noDashboard) JSON(context.Context, presence.Site, bool) ([]byte, error) {
	return []byte("{}\n"), nil
}

func (noDashboard) Top(context.Context, presence.Site) (presence.TopList, error) {
	return presence.TopList{Pages: []presence.PageUsers{{Page: "p", Users: 2}}}, nil
}

// cutOff is a store of counters in a region that has lost touch with another region, which the counter views:far
// depends on.
type cutOff struct{ counter.Store }

func (s cutOff) History(
	ctx context.Context, key string, step time.Duration, from, to int64,
) (counter.Counter, []counter.Gain, error) {
	c, gains, err := s.Store.History(ctx, key, step, from, to)
	c.Stale = key == "views:far"
	return c, gains, err
}

func (s cutOff) Dimension(ctx context.Context, key, name string) (counter.Counter, counter.Counted, error) {
	c, counted, err := s.Store.Dimension(ctx, key, name)
	c.Stale = key == "views:far"
	return c, counted, err
}

// everything returns a Config with all that a gateway can serve, and the API key "k".
func everything(t *testing.T) func(*Config) {
	rules, err := counter.ParseRules([]byte(`{"rules":[
		{"match":"views:*","kind":"sum","public":["read"],"buckets":["1m:24h"],"top":true,"dimensions":["country"]},
		{"match":"likes:*","kind":"members","public":["read","member"]},
		{"match":"visitors:*","kind":"unique","public":["read"]},
		{"match":"stock:*","kind":"exact","floor":0}]}`))

	if err != nil {
		t.Fatal(err)
	}

	// It is opened before the gateway, so that it is closed after the gateway.
	store := cutOff{countertest.InMemory(t, nil)}
	counters := pipeline.New(store, rules, counter.CombinerConfig{Instant: true}, zerolog.Nop())
	t.Cleanup(func() { _ = counters.Close() })
	return func(cfg *Config) {
		countersOf(t, cfg)
		cfg.Counters.Rules, cfg.Counters.Counters = rules, counters
		cfg.API.Minutes, cfg.API.PageStats = cfg.Store.(*presencemem.Store), 24*time.Hour
		cfg.API.Days, cfg.API.PageDays = cfg.Store.(*presencemem.Store), 400
		cfg.API.App = pusher.App{Key: "key", Secrets: []string{"secret"}}
		cfg.API.Pages = cfg.Store.(*presencemem.Store)
		cfg.API.Assets = fstest.MapFS{
			"index.html": {Data: []byte("<!doctype html>")}, "dashboard.html": {Data: []byte("<!doctype html>")},
			"headcount.js": {Data: []byte("export {};")},
		}
	}
}

// names returns all calls, as "METHOD /path".
func (s *served) names() (names []string) {
	for _, c := range s.g.table() {
		names = append(names, c.Method+" "+c.Path)
	}

	return names
}

// docs/http.md has every call, and no other, and says who may make it.
func TestDocsHaveEveryCall(t *testing.T) {
	who := map[calls.Who]string{calls.Anyone: "anyone", calls.Visitor: "visitor", calls.Server: "server"}
	text, err := os.ReadFile("../docs/http.md")
	if err != nil {
		t.Fatal(err)
	}

	rows := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([A-Z]+ /[^`]*)`[^|]*\\|([^|]*)").FindAllStringSubmatch(
		string(text), -1) {
		if _, twice := rows[row[1]]; twice {
			t.Errorf("docs/http.md has %s twice", row[1])
		}

		rows[row[1]] = strings.TrimSpace(row[2])
	}

	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		for _, c := range s.g.table() {
			name := c.Method + " " + c.Path
			said, has := rows[name]
			if !has {
				t.Errorf("docs/http.md lacks %s", name)
			}
			// For other calls the caller depends on rules and settings, which the document describes in words of its
			// own.
			if want, fixed := who[c.Who]; fixed && said != want {
				t.Errorf("docs/http.md says that %s is for %q, not %q", name, said, want)
			}

			delete(rows, name)
		}
	})

	for name := range rows {
		t.Errorf("docs/http.md has %s, which is no call", name)
	}
}

// Every call that the table gives to servers alone is refused to a visitor.
func TestCallsOfServersNeedAKey(t *testing.T) {
	param := regexp.MustCompile(`\{\w+\}`)
	of := strings.NewReplacer("{key}", "views:1", "counters/{key}/aggregate", "counters/views:*/aggregate")

	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		for _, c := range s.g.table() {
			if c.Who != calls.Server {
				continue
			}

			path := param.ReplaceAllString(of.Replace(c.Path), "a")
			r, err := http.NewRequest(c.Method, "http://"+s.addr+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := s.http().Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()

			// Rules may open calls of counters to visitors, so there the answer is that this visitor is forbidden to
			// make it.
			want := http.StatusUnauthorized
			if strings.HasPrefix(c.Path, "/api/") {
				want = http.StatusForbidden
			}
			if resp.StatusCode != want {
				t.Errorf("%s %s without a key: %s, want %d", c.Method, path, resp.Status, want)
			}
		}
	})
}

// Real answers conform to openapi.json: each call succeeds once, and the refusals are tried.
func TestAnswersAreAsDocumented(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		// The document that clients download is the one that counts, so it is read through the gateway.
		served := s.do("GET", "/-/openapi.json", "")
		if served.status != http.StatusOK || served.Get("Content-Type") != "application/json" {
			t.Fatalf("openapi.json: %d %s", served.status, served.Header)
		}

		meta, err := os.ReadFile("testdata/openapi-3.1.schema.json")
		if err != nil {
			t.Fatal(err)
		}

		doc := parse(t, []byte(served.text))
		docs := newSchemas(t, map[string]any{"openapi.json": doc, "meta.json": parse(t, meta)})
		if err := docs.valid("meta.json", doc); err != nil {
			t.Errorf("openapi.json is no OpenAPI document: %v", err)
		}

		// The order matters: calls read what earlier ones have written.
		good := map[string]bool{}
		visitor := &exampleVisitor{served: s, doc: doc, docs: docs}
		for _, e := range slices.Concat(
			examplesOfPages(), examplesOfUnread(), examplesOfCounters(), examplesOfReservations(),
			examplesOfHistories(), examplesOfUsers(), examplesOfPusher(), examplesOfDocuments(),
		) {
			if visitor.tries(e) && e.status < 300 {
				good[e.call] = true
			}
		}

		// A call has one schema in the document, and with explain=1 the answer has another.
		_, text := s.ask("GET", "/p/counter?explain=1", "", serverKey)
		if err := docs.valid("openapi.json#/components/schemas/ExplainedCount", parse(t, []byte(text))); err != nil {
			t.Errorf("%s is not as documented: %v", text, err)
		}

		good["GET /app/{app}"] = true // TestPusher
		for _, stream := range []string{
			"/-/ws", "/{page}/counter/events", "/api/v1/counters/{key}/events", "/api/v1/top/events", "/-/users/events",
			"/-/top/events",
		} {
			good["GET "+stream] = true // TestFramesAreAsDocumented
		}

		// Without this, a new call could be added without an example, and its document would be checked by nothing.
		for _, call := range s.names() {
			if !good[call] {
				t.Errorf("no example of %s succeeds", call)
			}
		}
	})
}

// example is a call with the status of its answer. A header "Headcount-Id: " gets the id of the visitor as its value.
type example struct {
	call, path, body string
	status           int
	header           string
}

// examplesOfPages returns examples of calls about the counts and the stats of pages, the sockets, and the users that a
// back end puts on a page.
func examplesOfPages() []example {
	const key, other = serverKey, "Origin: https://another.example"

	return []example{
		{"PUT /{page}/counter", "/p/counter", `{"action":"increment"}`, 200, ""},
		{"PUT /{page}/counter", "/p/counter", `{"action":"increment","x":1}`, 400, ""},
		{"PUT /{page}/counter", "/p/counter", strings.Repeat(" ", 5000), 413, ""},
		{"PUT /{page}/counter", "/p/counter", `{}`, 403, other},
		{"GET /{page}/counter", "/p/counter", "", 200, ""},
		{"GET /{page}/counter", "/p/counter?regions=1", "", 200, ""},
		{"GET /{page}/counter", "/-/counter", "", 400, ""},
		{"GET /{page}/counter", "/p/counter", "", 401, "X-API-Key: wrong"},
		{"PUT /{page}/counter", "/p/counter", `{"action":"increment"}`, 401, "X-API-Key: wrong"},
		{"GET /-/counters", "/-/counters?page=p&page=nobody", "", 200, ""},
		{"GET /-/counters", "/-/counters", "", 400, ""},
		{"GET /{page}/stats", "/p/stats", "", 200, ""},
		{"GET /{page}/stats", "/p/stats?last=30d&step=1d", "", 200, ""},
		{"GET /{page}/stats", "/p/stats?step=1d&format=csv", "", 200, ""},
		{"GET /{page}/stats", "/p/stats?step=1s", "", 400, ""},
		{"GET /{page}/stats", "/p/stats?format=xml", "", 400, ""},
		{"GET /{page}/badge.svg", "/p/badge.svg?label=reading&color=0066cc&background=%23333", "", 200, ""},
		{"GET /{page}/badge.svg", "/p/badge.svg?color=url(x)", "", 400, ""},
		{"GET /{page}/widget", "/p/widget?color=teal", "", 200, ""},
		{"GET /{page}/widget", "/-/widget", "", 400, ""},
		{"GET /-/ws", "/-/ws", "", 426, ""},
		{"GET /app/{app}", "/app/key", "", 426, ""},
		{"GET /{page}/counter", "/app/counter", "", 200, ""},
		{"PUT /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", "", 200, key},
		{"PUT /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", `{}`, 200, key},
		{"PUT /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", `{"away":true}`, 400, key},
		{"PUT /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", "", 401, "X-API-Key: wrong"},
		{"DELETE /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", "", 200, key},
		{"DELETE /-/users/{user}/pages/{page}", "/-/users/alice/pages/p", "", 401, ""},
		{"DELETE /-/users/{user}/pages/{page}", "/-/users/alice/pages/*", "", 400, key},
	}
}

// examplesOfUnread returns examples of calls about follows and unread notifications.
func examplesOfUnread() []example {
	const me, key = "Headcount-Id: ", serverKey

	return []example{
		{"PUT /-/me/follows/{page}", "/-/me/follows/p", `{}`, 204, me},
		{"PUT /-/me/follows/{page}", "/-/me/follows/p", `{"away":true}`, 400, me},
		{"PUT /-/users/{user}/follows/{page}", "/-/users/alice/follows/p", "", 204, key},
		{"POST /{page}/changes", "/p/changes", `{"by":"bob"}`, 204, key},
		{"POST /{page}/changes", "/p/changes", `{"By":"bob"}`, 400, key},
		{"POST /{page}/changes", "/p/changes", "", 401, ""},
		{"POST /{page}/changes", "/p/changes", `{"title":"New prices","url":"/pricing"}`, 204, key},
		{"POST /{page}/changes", "/p/changes", `{"url":"javascript:x"}`, 400, key},
		{"GET /-/me/notifications", "/-/me/notifications", "", 200, me},
		{"GET /-/users/{user}/notifications", "/-/users/alice/notifications", "", 200, key},
		{"DELETE /-/me/notifications/{page}", "/-/me/notifications/p", "", 204, me},
		{"DELETE /-/users/{user}/notifications/{page}", "/-/users/alice/notifications/p", "", 204, key},
		{"DELETE /-/users/{user}/notifications/{page}", "/-/users/alice/notifications/*", "", 400, key},
		{"GET /-/me/follows", "/-/me/follows", "", 200, me},
		{"GET /-/users/{user}/follows", "/-/users/alice/follows", "", 200, key},
		{"GET /-/me/unread", "/-/me/unread", "", 200, me},
		{"GET /-/users/{user}/unread", "/-/users/alice/unread", "", 200, key},
		{"GET /-/users/{user}/unread", "/-/users/nobody/unread", "", 200, key},
		{"PUT /-/me/unread", "/-/me/unread", `{"action":"reset"}`, 200, me},
		{"PUT /-/users/{user}/unread", "/-/users/alice/unread", `{"action":"reset"}`, 200, key},
		{"DELETE /-/me/follows/{page}", "/-/me/follows/p", "", 204, me},
		{"DELETE /-/users/{user}/follows/{page}", "/-/users/alice/follows/p", "", 204, key},
	}
}

// examplesOfCounters returns examples of calls about changes and reads of counters.
func examplesOfCounters() []example {
	const me, key = "Headcount-Id: ", serverKey

	return []example{
		{
			"POST /api/v1/counters/{key}/increment", "/api/v1/counters/views:1/increment",
			`{"delta":5,"dimensions":{"country":"de"}}`, 200, key,
		},
		{"POST /api/v1/counters/{key}/increment", "/api/v1/counters/views:1/increment", `{"Delta":5}`, 400, key},
		{"POST /api/v1/counters/{key}/increment", "/api/v1/counters/views:1/increment", "", 403, ""},
		{"POST /api/v1/counters/{key}/increment", "/api/v1/counters/likes:1/increment", "", 409, key},
		{
			"POST /api/v1/counters/{key}/increment", "/api/v1/counters/views:1/increment", "x", 415,
			"X-API-Key: k\nContent-Type: text/plain",
		},
		{"POST /api/v1/counters/{key}/increment", "/api/v1/counters/stock:1/increment", `{"delta":3}`, 200, key},
		{"POST /api/v1/counters/{key}/decrement", "/api/v1/counters/stock:1/decrement", "", 200, key},
		{"POST /api/v1/counters/{key}/decrement", "/api/v1/counters/stock:1/decrement", `{"delta":9}`, 409, key},
		{
			"POST /api/v1/counters", "/api/v1/counters",
			`{"changes":[{"key":"views:1"},{"key":"views:2","delta":-1}]}`, 200, key,
		},
		{
			"GET /api/v1/counters/{key}/badge.svg", "/api/v1/counters/views:1/badge.svg?label=reads&color=teal", "",
			200, "",
		},
		{"GET /api/v1/counters/{key}/badge.svg", "/api/v1/counters/views:1/badge.svg?color=url(x)", "", 400, ""},
		{
			"POST /api/v1/counters/{key}/set", "/api/v1/counters/stock:1/set",
			`{"value":2,"reason":"counted","by":"ops"}`, 200, key,
		},
		{
			"POST /api/v1/counters/{key}/adjust", "/api/v1/counters/views:1/adjust",
			`{"delta":-1,"reason":"bots","by":"ops"}`, 200, key,
		},
		{
			"POST /api/v1/counters/{key}/reset", "/api/v1/counters/views:2/reset", `{"reason":"bots","by":"ops"}`,
			200, key,
		},
		{"POST /api/v1/counters/{key}/members", "/api/v1/counters/likes:1/members", `{"add":["a"]}`, 200, key},
		{"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/me", "", 200, me},
		{"GET /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/a", "", 200, key},
		{"DELETE /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/a", "", 200, key},
		{"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/a", `{}`, 200, key},
		{
			"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/b", `{"membr":1}`, 400,
			key,
		},
		{
			"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/b", "x", 415,
			key + "\nContent-Type: text/plain",
		},
		{
			"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/b",
			strings.Repeat(" ", 300_000), 413, key,
		},
		{
			"DELETE /api/v1/counters/{key}/members/{member}", "/api/v1/counters/likes:1/members/a", `{"membr":1}`,
			400, key,
		},
		{"PUT /api/v1/counters/{key}/members/{member}", "/api/v1/counters/visitors:1/members/ann", "", 200, key},
		{"GET /api/v1/counters/{key}", "/api/v1/counters/visitors:1", "", 200, ""},
		{"GET /api/v1/counters/{key}", "/api/v1/counters/none:1", "", 400, ""},
		{"GET /api/v1/counters/{key}/exact", "/api/v1/counters/views:1/exact", "", 200, ""},
		{"GET /api/v1/counters", "/api/v1/counters?key=views:1&key=views:9", "", 200, ""},
	}
}

// examplesOfReservations returns examples of calls about reservations of an exact counter.
func examplesOfReservations() []example {
	const key = serverKey

	return []example{
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart/7","amount":1,"for":"10m"}`, 201, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart/7","amount":1,"for":"10m"}`, 200, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart/7","amount":2,"for":"10m"}`, 409, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart 8","amount":3,"for":"10m"}`, 409, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/likes:1/reservations",
			`{"id":"cart 8","amount":3,"for":"10m"}`, 409, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart 8","amount":3,"for":"32d"}`, 400, key,
		},
		{"GET /api/v1/counters/{key}", "/api/v1/counters/stock:1", "", 200, key},
		{"GET /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations", "", 200, key},
		{"GET /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations?after=*", "", 400, key},
		{"GET /api/v1/counters/{key}/reservations", "/api/v1/counters/likes:1/reservations", "", 409, key},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/commit",
			"/api/v1/counters/stock:1/reservations/cart%2F7/commit", "", 200, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/commit",
			"/api/v1/counters/stock:1/reservations/cart%2F7/commit", `{}`, 200, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/commit",
			"/api/v1/counters/stock:1/reservations/none/commit", "", 404, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/cancel",
			"/api/v1/counters/stock:1/reservations/cart%2F7/cancel", "", 409, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/cancel",
			"/api/v1/counters/stock:1/reservations/none/cancel", `{"x":1}`, 400, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations", "/api/v1/counters/stock:1/reservations",
			`{"id":"cart 8","amount":1,"for":"1s"}`, 201, key,
		},
		{
			"POST /api/v1/counters/{key}/reservations/{id}/cancel",
			"/api/v1/counters/stock:1/reservations/cart%208/cancel", "", 200, key,
		},
	}
}

// examplesOfHistories returns examples of calls about what is kept about counters over time, top lists, and limits.
func examplesOfHistories() []example {
	const key = serverKey

	return []example{
		{"GET /api/v1/counters/{key}/ledger", "/api/v1/counters/stock:1/ledger?limit=1", "", 200, key},
		{"GET /api/v1/counters/{key}/ledger", "/api/v1/counters/stock:1/ledger", "", 200, key},
		{"GET /api/v1/counters/{key}/ledger", "/api/v1/counters/views:1/ledger", "", 200, key},
		{"GET /api/v1/counters/{key}/range", "/api/v1/counters/views:1/range", "", 200, ""},
		{"GET /api/v1/counters/{key}/range", "/api/v1/counters/likes:1/range", "", 409, ""},
		{"GET /api/v1/counters/{key}/window", "/api/v1/counters/views:1/window?last=1h", "", 200, ""},
		{
			"GET /api/v1/counters/{key}/dimensions/{name}", "/api/v1/counters/views:1/dimensions/country", "", 200,
			key,
		},
		{"GET /api/v1/counters/{key}/range", "/api/v1/counters/views:far/range", "", 200, ""},
		{"GET /api/v1/counters/{key}/window", "/api/v1/counters/views:far/window?last=1h", "", 200, ""},
		{
			"GET /api/v1/counters/{key}/dimensions/{name}", "/api/v1/counters/views:far/dimensions/country", "",
			200, key,
		},
		{"GET /api/v1/counters/{key}/aggregate", "/api/v1/counters/views:*/aggregate", "", 200, key},
		{"GET /api/v1/top", "/api/v1/top?match=views:*&last=1h", "", 200, ""},
		{"POST /api/v1/limits/{key}", "/api/v1/limits/a", `{"limit":1,"window":"1h"}`, 200, key},
		{"POST /api/v1/limits/{key}", "/api/v1/limits/a", `{"limit":1,"window":"1h"}`, 429, key},
		{"POST /api/v1/limits/{key}", "/api/v1/limits/a", `{}`, 400, key},
		{"DELETE /api/v1/limits/{key}", "/api/v1/limits/a", "", 204, key},
		{"DELETE /api/v1/counters/{key}", "/api/v1/counters/views:1", "", 204, key},
	}
}

// examplesOfUsers returns examples of calls about the users themselves.
func examplesOfUsers() []example {
	const me, key, other = "Headcount-Id: ", serverKey, "Origin: https://another.example"

	return []example{
		{"DELETE /-/me", "/-/me", "", 204, me},
		{"DELETE /-/me", "/-/me", "", 403, other},
		{"GET /-/users", "/-/users?user=alice&user=bob", "", 200, key},
		{"GET /-/users", "/-/users?user=alice", "", 401, ""},
		{"GET /-/users/{user}", "/-/users/alice", "", 200, key},
		{"DELETE /-/users/{user}", "/-/users/alice", "", 204, key},
		{"DELETE /-/users/{user}", "/-/users/alice", "", 401, ""},
	}
}

// examplesOfPusher returns examples of calls about the back end of an app of Pusher.
func examplesOfPusher() []example {
	const channels, events, batches = "/apps/1/channels", "/apps/1/events", "/apps/1/batch_events"
	const changed = `{"name":"headcount:changed","channel":"p"}`
	const batch = `{"batch":[` + changed + `]}`

	return []example{
		{
			"GET /apps/{app_id}/channels", signed("GET", channels, "info=user_count,subscription_count", ""), "",
			200, "",
		},
		{"GET /apps/{app_id}/channels", channels, "", 401, ""},
		{"GET /apps/{app_id}/channels/{channel}", signed("GET", channels+"/p", "info=user_count", ""), "", 200, ""},
		{"GET /apps/{app_id}/channels/{channel}", signed("GET", channels+"/*", "", ""), "", 400, ""},
		{"POST /apps/{app_id}/events", signed("POST", events, "", changed), changed, 200, ""},
		{"POST /apps/{app_id}/events", signed("POST", events, "", "{}"), "{}", 403, ""},
		{"POST /apps/{app_id}/batch_events", signed("POST", batches, "", batch), batch, 200, ""},
	}
}

// examplesOfDocuments returns examples of calls about pages for browsers, documents, sites and the dashboard.
func examplesOfDocuments() []example {
	const key = serverKey

	return []example{
		{"GET /{page}/counter", "/p/counter", "", 304, "If-None-Match: *"},
		{"GET /", "/", "", 200, ""},
		{"GET /-/headcount.js", "/-/headcount.js", "", 200, ""},
		{"GET /-/openapi.json", "/-/openapi.json", "", 200, ""},
		{"GET /-/asyncapi.json", "/-/asyncapi.json", "", 200, ""},
		{"GET /-/sites", "/-/sites", "", 200, key},
		{"GET /-/sites", "/-/sites", "", 401, ""},
		{"GET /", "/?site=other", "", 400, ""},
		{"GET /-/me/unread", "/-/me/unread", "", 400, "Headcount-Site: other"},
		{"GET /-/dashboard", "/-/dashboard", "", 200, key},
		{"GET /-/dashboard", "/-/dashboard", "", 401, ""},
		{"GET /-/dashboard", "/-/dashboard", "", 401, "Accept: text/html"},
		{"GET /-/dashboard/access", "/-/dashboard/access", "", 200, ""},
		{"GET /-/dashboard/data", "/-/dashboard/data", "", 200, key},
		{"GET /-/dashboard/data", "/-/dashboard/data", "", 401, ""},
	}
}

// exampleVisitor makes the calls of examples, as one visitor.
type exampleVisitor struct {
	*served
	doc  any // openapi.json
	docs schemas
	id   string // the one that the gateway issued last
}

// tries makes the call of an example, and reports whether its answer has the status. It checks the answer against the
// document.
func (v *exampleVisitor) tries(e example) bool {
	t := v.t
	method, _, _ := strings.Cut(e.call, " ")
	req, err := http.NewRequest(method, "http://"+v.addr+e.path, strings.NewReader(e.body))
	if err != nil {
		t.Fatal(err)
	}

	for line := range strings.Lines(e.header) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		req.Header.Set(name, strings.TrimSpace(value))
		if name == "Headcount-Id" {
			req.Header.Set(name, v.id)
		}
	}

	resp, err := v.http().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()

	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != e.status {
		t.Errorf("%s: %s %s, want %d, %v", e.call, resp.Status, body, e.status, err)
		return false
	}

	// The visitor keeps the id that an answer gave to it: calls about "me" are refused without one.
	if id := resp.Header.Get("Headcount-Id"); id != "" {
		v.id = id
	}

	if err := documented(v.doc, e.call, resp, body, v.docs.valid); err != nil {
		t.Errorf("%s answered %s %s, which is not as documented: %v", e.call, resp.Status, body, err)
	}

	return true
}

// schemas has the JSON schemas of some documents.
type schemas struct {
	t        *testing.T
	compiler *jsonschema.Compiler
}

func newSchemas(t *testing.T, documents map[string]any) schemas {
	t.Helper()
	compiler := jsonschema.NewCompiler()
	for name, document := range documents {
		if err := compiler.AddResource(name, document); err != nil {
			t.Fatal(err)
		}
	}

	return schemas{t, compiler}
}

// valid returns how a value differs from the schema at this place of a document.
func (s schemas) valid(at string, value any) error {
	schema, err := s.compiler.Compile(at)
	if err != nil {
		s.t.Fatal(err)
	}

	return schema.Validate(value)
}

// documented returns how the answer to a call differs from openapi.json.
func documented(doc any, call string, resp *http.Response, body []byte, valid func(at string, value any) error) error {
	method, path, _ := strings.Cut(call, " ")
	at := []string{"paths", path, strings.ToLower(method), "responses", strconv.Itoa(resp.StatusCode)}
	answer, ok := find(doc, at...).(map[string]any)
	if !ok {
		return errors.New("there is no such status")
	}

	// Refusals that all calls share are described once, among the components.
	if ref, ok := answer["$ref"].(string); ok {
		at = strings.Split(strings.TrimPrefix(ref, "#/"), "/")
		answer = find(doc, at...).(map[string]any)
	}

	if len(body) == 0 && answer["content"] == nil {
		return nil
	}

	media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if err != nil || find(answer, "content", media) == nil {
		return fmt.Errorf("the media type %q is not described: %w", media, err)
	}

	// Only JSON has a schema.
	if !strings.HasSuffix(media, "json") {
		return nil
	}

	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return err
	}

	// A JSON pointer has escapes of its own, and here it is part of a URL.
	for i, step := range at {
		at[i] = url.PathEscape(strings.NewReplacer("~", "~0", "/", "~1").Replace(step))
	}
	return valid("openapi.json#/"+strings.Join(at, "/")+"/content/"+strings.Replace(media, "/", "~1", 1)+"/schema",
		value)
}

// find follows the steps into nested objects.
func find(in any, steps ...string) any {
	for _, step := range steps {
		object, _ := in.(map[string]any)
		in = object[step]
	}
	return in
}

func parse(t *testing.T, text []byte) any {
	t.Helper()
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// Real frames and events conform to asyncapi.json.
func TestFramesAreAsDocumented(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		doc := parse(t, openapi.AsyncAPI(""))
		docs := documentedFrames{newSchemas(t, map[string]any{"asyncapi.json": doc}), map[string]bool{}}

		r := s.open("/-/ws", "", upgrade()...)
		r.response(http.StatusSwitchingProtocols)
		docs.talk(r)

		for path, kinds := range map[string][]string{
			"/p/counter/events": {"count"}, "/p/counter/events?join=1": {"join", "count"},
			"/api/v1/counters/views:1/events": {"counter"}, "/api/v1/top/events?match=views:*&last=1h": {"top"},
			"/-/users/events?user=alice": {"user"}, "/-/top/events": {"pages_top"},
		} {
			docs.follow(s.open(path, "", serverKey), path, kinds)
		}

		// Only a gateway that drains sends the frame reconnect, so this frame comes last.
		var drained sync.WaitGroup
		drained.Go(func() { s.g.Drain(t.Context()) })
		docs.until(r, "reconnect")
		_ = r.Close()
		drained.Wait()

		// A message that the document has and nobody sends is one that readers would wait for in vain.
		for name := range find(doc, "components", "messages").(map[string]any) {
			if !docs.shown[name] {
				t.Errorf("no example of %s was sent or received", name)
			}
		}
	})
}

// documentedFrames checks frames and events against asyncapi.json.
type documentedFrames struct {
	schemas
	shown map[string]bool // the messages of which an example was checked
}

func (d documentedFrames) check(name string, text []byte) {
	d.t.Helper()
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err == nil {
		err = d.valid("asyncapi.json#/components/messages/"+name+"/payload", value)
	}
	if err != nil {
		d.t.Errorf("%s is not as documented: %v", text, err)
	}

	d.shown[name] = true
}

// until reads and checks frames until one of this kind.
func (d documentedFrames) until(r *raw, kind string) {
	d.t.Helper()
	for {
		opcode, text, err := r.frame()
		var f struct{ Type string }
		if err != nil {
			d.t.Fatalf("%v, while waiting for a frame %s", err, kind)
		}
		if opcode != websocket.Text {
			continue
		}
		if err := json.Unmarshal(text, &f); err != nil {
			d.t.Fatal(err)
		}

		d.check("server_"+f.Type, text)
		if f.Type == kind {
			return
		}
	}
}

// say checks a frame and sends it.
func (d documentedFrames) say(r *raw, text string) {
	d.t.Helper()
	var f struct{ Type string }
	if err := json.Unmarshal([]byte(text), &f); err != nil {
		d.t.Fatal(err)
	}

	d.check("client_"+f.Type, []byte(text))
	r.write([]byte(masked(websocket.Text, text)))
}

// talk sends every kind of frame that a client may send, and awaits every kind that answers.
func (d documentedFrames) talk(r *raw) {
	d.t.Helper()
	d.until(r, "welcome")
	d.until(r, "unread")
	d.say(r, `{"type":"join","page":"p"}`)
	d.until(r, "count")
	d.say(r, `{"type":"subscribe","pages":["p","*"],"counters":["likes:1"],"precision":2}`)
	d.until(r, "counter")

	for _, text := range []string{
		`{"type":"unsubscribe","counters":["likes:1"]}`,
		`{"type":"leave","page":"p"}`,
		`{"type":"read"}`,
		`{"type":"read","page":"p"}`,
		`{"type":"pause"}`,
		`{"type":"resume"}`,
		`{"type":"heartbeat"}`,
	} {
		d.say(r, text)
	}
	d.until(r, "heartbeat")

	// This frame is wrong on purpose, so it is not checked against the document.
	r.write([]byte(masked(websocket.Text, `{"type":"join","page":"*"}`)))
	d.until(r, "error")
}

// follow reads an event stream until it has had events of these kinds, and checks them.
func (d documentedFrames) follow(stream *raw, path string, kinds []string) {
	d.t.Helper()
	_ = stream.response(http.StatusOK)
	lines := bufio.NewScanner(stream.in)
	for len(kinds) > 0 && lines.Scan() {
		// Comments keep a silent stream open.
		line := lines.Text()
		if line == "" || line[0] == ':' {
			continue
		}

		name, value, _ := strings.Cut(line, ": ")
		if name == "event" && value != strings.TrimPrefix(kinds[0], "pages_") {
			d.t.Errorf("%s has an event %q, want %q", path, value, kinds[0])
		}
		if name == "data" {
			d.check("event_"+kinds[0], []byte(value))
			kinds = kinds[1:]
		}
	}
}
