package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// topStream is an event stream of the pages with the most users.
type topStream struct {
	*stream
	watch *testkit.Stopwatch
	last  time.Time // of the last list after the first one, which comes at once
	lists int
}

func (s *server) topPages(t testing.TB, query string, headers ...string) *topStream {
	t.Helper()
	return &topStream{stream: s.sse(t, "/-/top/events"+query, headers...), watch: testkit.NewStopwatch(t)}
}

// next returns the next list, as "page 3, other 1".
func (st *topStream) next() string {
	st.t.Helper()
	select {
	case e := <-st.events:
		var is struct {
			Top []struct {
				Page  string
				Users int
			}
		}
		err := json.Unmarshal([]byte(e.data), &is)
		if err != nil || e.name != "top" || !strings.HasPrefix(e.data, `{"top":[`) {
			st.t.Fatalf("event %q: %s, %v", e.name, e.data, err)
		}

		// Lists are at least a second apart, but the test may read them late.
		if apart := e.at.Sub(st.last); apart < 500*time.Millisecond-st.watch.Lost() {
			st.t.Errorf("an event only %s after the one before: %s", apart, e.data)
		}

		st.lists++
		if st.lists > 1 {
			st.last = e.at
		}

		var list []string
		for _, p := range is.Top {
			list = append(list, fmt.Sprint(p.Page, " ", p.Users))
		}

		return strings.Join(list, ", ")

	case <-time.After(testkit.Timeout):
		st.t.Fatal("no event")
		return ""
	}
}

// await skips lists until the wanted one.
func (st *topStream) await(want string) {
	st.t.Helper()
	for got := st.next(); got != want; got = st.next() {
		st.t.Logf("not yet: %s", got)
	}
}

// silent fails if there is another list within two seconds.
func (st *topStream) silent() {
	st.t.Helper()
	select {
	case e := <-st.events:
		st.t.Errorf("an event, although nothing has changed: %s", e.data)
	case <-time.After(2 * time.Second):
	}
}

// holds creates n new visitors on a page.
func (s *server) holds(t testing.TB, page string, n int, headers ...string) {
	t.Helper()
	for range n {
		s.put(t, "/"+page+"/counter", increment, headers...).counter(t)
	}
}

// Servers see all pages. Visitors see the pages that --public-top opens, except the private ones.
func TestClockTopPages(t *testing.T) {
	t.Parallel()
	const longHolds = "--presence-timeout=1m"
	all := startAll(t,
		[]string{longHolds, "--private=secret/*", "--jwt-secret=" + jwtSecret},
		[]string{longHolds, "--private=blog/draft*", "--public-top=blog/*", "--public-top=news", "--api-key=" + apiKey},
		[]string{"--api-key=" + apiKey},
	)
	keyless, opened, closed := all[0], all[1], all[2]

	// One page that visitors may see, and one with a secret in its name.
	opened.holds(t, "blog%2Fa", 2)
	opened.holds(t, "reset%2Fx7Gq", 3)
	own := opened.topPages(t, "", withKey)
	own.await("reset/x7Gq 3, blog/a 2")

	visitor, one := opened.topPages(t, ""), opened.topPages(t, "?n=1")
	visitor.await("blog/a 2")
	one.await("blog/a 2")

	for _, page := range []string{"news", "blog%2Fdraft"} {
		do(t, "PUT", opened.url+"/-/users/ann/pages/"+page, "", withKey).counter(t)
		do(t, "PUT", opened.url+"/-/users/ben/pages/"+page, "", withKey).counter(t)
	}
	own.await("reset/x7Gq 3, blog/a 2, blog/draft 2, news 2") // pages with equal counts are sorted by name
	visitor.await("blog/a 2, news 2")
	one.silent()

	opened.holds(t, "news", 1)
	one.await("news 3")
	visitor.await("news 3, blog/a 2")
	visitor.silent()

	if a := opened.get(t, "/-/dashboard/access"); a.body != `{"key_needed":true,"top_needs_key":false}`+"\n" {
		t.Errorf("access: %s", a.body)
	}

	if a := closed.get(t, "/-/dashboard/access"); a.body != `{"key_needed":true,"top_needs_key":true}`+"\n" {
		t.Errorf("access: %s", a.body)
	}

	token := "Authorization: Bearer " + hs256(t, map[string]any{"sub": "ann"})
	for _, page := range []string{"open", "secret%2Fa"} {
		do(t, "PUT", keyless.url+"/"+page+"/counter", increment, token)
	}

	// Without API keys everybody sees the list, still without private pages.
	keyless.topPages(t, "").await("open 1")

	// With keys and without --public-top, visitors see no list.
	closed.topPages(t, "", withKey).await("")

	for _, s := range []*server{opened, closed} {
		s.get(t, "/-/top/events", "X-API-Key: wrong").problem(t, http.StatusUnauthorized)
	}
	a := closed.get(t, "/-/top/events")
	a.problem(t, http.StatusUnauthorized)
	if !strings.Contains(a.body, "--public-top") {
		t.Errorf("the refusal does not name the flag: %d %s", a.status, a.body)
	}

	keyless.get(t, "/-/top/events", "Authorization: Bearer x").problem(t, http.StatusUnauthorized)
	for _, query := range []string{"?n=0", "?n=101", "?n=-1", "?n=x", "?n=", "?n=1&n=2", "?n=%zz"} {
		keyless.get(t, "/-/top/events"+query).problem(t, http.StatusBadRequest)
	}
	keyless.topPages(t, "?n=100").await("open 1")
}

// The list is the same at all gateways, and has the users of all gateways.
func TestClockTopPagesOfACluster(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t).URL()
	flags := []string{"--presence-timeout=1m", "--public-top=a", "--public-top=b", "--api-key=" + apiKey}
	all := startAll(t, overRedis(redis, flags...), overRedis(redis, flags...))

	for i, s := range all {
		s.holds(t, "a", 1)
		s.holds(t, "b", 1+i)
		s.holds(t, "c", 3)
	}

	for _, s := range all {
		s.topPages(t, "").await("b 3, a 2")
		s.topPages(t, "", withKey).await("c 6, b 3, a 2")
	}
}

// While the store is away, streams of lists and of users mark what they have sent as stale.
func TestServerListsAreStaleWithoutTheStore(t *testing.T) {
	redis := redistest.Start(t)
	s := start(t, overRedis(redis.URL(), "--api-key="+apiKey, "--presence-timeout=1m")...)
	s.holds(t, "p", 1)
	s.call(t, "POST", "views:a/increment", `{"delta":2}`)

	streams := map[string]*stream{}
	for _, path := range []string{
		"/-/top/events", "/api/v1/top/events?match=views:*&last=1h", "/-/users/events?user=ann",
	} {
		streams[path] = s.sse(t, path, withKey)
	}
	await := func(when string, stale bool) {
		t.Helper()
		for path, st := range streams {
			for met := false; !met; {
				select {
				case e := <-st.events:
					empty := strings.Contains(e.data, `"top":[]`)
					met = !empty && strings.HasSuffix(e.data, `,"stale":true}`) == stale
				case <-time.After(testkit.Timeout):
					t.Fatalf("%s: no event of %s has stale %t", when, path, stale)
				}
			}
		}
	}

	await("at the beginning", false)

	redis.Pause()
	delete(streams, "/-/users/events?user=ann") // the owner of a user needs no store
	await("while the store is silent", true)

	redis.Resume()
	await("when it is back", false)
}
