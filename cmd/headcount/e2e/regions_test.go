package e2e

import (
	"bytes"
	"strings"
	"testing"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// TestServerARegionMovesToAnotherRedis moves a region by export and import, while another region runs on. The counts of
// that region move along and are counted once, even though the region sends them again.
func TestServerARegionMovesToAnotherRedis(t *testing.T) {
	t.Parallel()
	usRedis := redistest.Start(t)
	us, eu := usRedis.URL(), redistest.Start(t).URL()
	database := "--postgres=" + pgtest.Single(t).Database(t)

	usFlags := func() []string { return overRedis(us, "--region=us", "--peer=eu="+eu, database) }
	there := startWithKey(t, overRedis(eu, "--region=eu", "--peer=us="+us, database)...)
	here := startWithKey(t, usFlags()...)

	change := func(s *server, key, verb, body string) {
		t.Helper()
		if a := s.call(t, "POST", key+"/"+verb, body); a.status != 200 {
			t.Fatalf("%s %s: %d %s", key, verb, a.status, a.body)
		}
	}
	await := func(s *server, values ...string) {
		t.Helper()
		got := ""
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("want %q in %s", values, got)
			}
		})

		testkit.Eventually(t, strings.Join(values, " "), func() bool {
			got = do(t, "GET", s.url+"/api/v1/counters?key=views:1&key=likes:1&key=visitors:1&key=stock:1", "",
				withKey).body
			for _, value := range values {
				if !strings.Contains(got, value) {
					return false
				}
			}
			return true
		})
	}

	// Both regions count.
	change(here, "views:1", "increment", `{"delta":3}`)
	change(there, "views:1", "increment", `{"delta":4}`)
	change(here, "likes:1", "members", `{"add":["ann","bob"]}`)
	change(there, "likes:1", "members", `{"add":["cid"]}`)
	change(here, "visitors:1", "members", `{"add":["x","y"]}`)
	change(there, "visitors:1", "members", `{"add":["y","z"]}`)
	change(here, "stock:1", "increment", `{"delta":10}`)
	change(there, "stock:1", "decrement", `{"delta":1}`)

	all := []string{`"sum","value":7,`, `"members","value":3,`, `"unique","value":3,`, `"exact","value":9,`}
	await(here, all...)
	await(there, all...)

	// The region moves into an empty Redis.
	if problem := here.end(); problem != "" {
		t.Fatal(problem)
	}
	var exported bytes.Buffer
	headcount(t, nil, &exported, "export", "--regions", "--redis="+us, database)

	usRedis.Flush(t)
	headcount(t, &exported, nil, "import", "--regions", "--redis="+us, database)

	here = startWithKey(t, usFlags()...)
	await(here, all...)

	// Both regions continue from the same values.
	change(here, "views:1", "increment", `{"delta":10}`)
	change(there, "views:1", "increment", `{"delta":20}`)
	change(here, "likes:1", "members", `{"add":["dan"],"remove":["ann"]}`)
	change(here, "visitors:1", "members", `{"add":["w"]}`)
	change(here, "stock:1", "decrement", `{"delta":2}`)

	all = []string{`"sum","value":37,`, `"members","value":3,`, `"unique","value":4,`, `"exact","value":7,`}
	await(here, all...)
	await(there, all...)
}
