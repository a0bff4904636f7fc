package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// ruleFile returns a file with the built-in rules of counters and a rule with a dimension.
func ruleFile(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "rules.json")
	text := `{"rules":[{"match":"views:*","kind":"sum","public":["read"],"buckets":["1m:24h","1h:90d"],"top":true},
		{"match":"votes:*","kind":"sum","public":["read","increment"]},
		{"match":"likes:*","kind":"members","public":["read","member"]},
		{"match":"visitors:*","kind":"unique","public":["read"],"buckets":["1h:90d"]},
		{"match":"stock:*","kind":"exact","floor":0,"public":["read"]},
		{"match":"sales:*","kind":"sum","dimensions":["country"]},
		{"match":"*","kind":"sum"}]}`

	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}

	return name
}

// overRedis returns the flags of a process in a cluster.
func overRedis(redis string, flags ...string) []string {
	return append([]string{"--redis=" + redis, "--cluster-listen=" + servertest.FreeAddr()}, flags...)
}

// TestServerSetups runs each kind of deployment. On each it runs the product's own simulator and a call of every kind.
// The simulator knows the truth and compares it with what every client receives and every gateway answers.
func TestServerSetups(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func(t *testing.T) [][]string{ // the flags of each process, gateways first
		"one process": func(t *testing.T) [][]string {
			return [][]string{{"--data-dir=" + t.TempDir()}}
		},
		"a cluster": func(t *testing.T) [][]string {
			redis := redistest.Start(t).URL()
			return [][]string{
				overRedis(redis, "--roles=gateway"), overRedis(redis, "--roles=gateway"),
				overRedis(redis, "--roles=presence"), overRedis(redis, "--roles=presence,dispatcher"),
			}
		},
		"two regions": func(t *testing.T) [][]string {
			us, eu := redistest.Start(t).URL(), redistest.Start(t).URL()
			database := "--postgres=" + pgtest.Single(t).Database(t)
			return [][]string{
				overRedis(us, "--region=us", "--peer=eu="+eu, database),
				overRedis(eu, "--region=eu", "--peer=us="+us, database),
			}
		},
		"PostgreSQL behind Redis": func(t *testing.T) [][]string {
			redis := redistest.Start(t).URL()
			database := "--postgres=" + pgtest.Single(t).Database(t)
			flags := []string{database, "--persist-interval=200ms"}
			return [][]string{overRedis(redis, flags...), overRedis(redis, flags...)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			hooks := newReceiver(t)
			flags := open(t)
			for i := range flags {
				flags[i] = append(flags[i], "--api-key="+apiKey, "--id-secret=0123456789abcdef0123456789abcdef",
					"--page-stats=1h", "--last-seen=30d", "--counters="+ruleFile(t),
					"--update-interval=10ms", "--leave-grace=300ms", "--webhook=page:hooked *="+hooks.URL,
					"--webhook=user:hooked*="+hooks.URL, "--webhook-secret="+hookSecret, "--webhook-settle=100ms")
			}

			all := startAll(t, flags...)
			a, b := all[0], all[min(1, len(all)-1)]

			if name == "two regions" {
				simulate(t, []*server{a, b}, "--users=20", "--tabs=1", "--duration=4s")

				// The scenario counters expects sums that are exact at once, as they are only within a region.
				smokePages(t, a, b, hooks)
				smokeUnread(t, a, a)
				smokeCounters(t, a, a, b)
				return
			}

			simulate(t, []*server{a, b}, "--users=20", "--duration=4s")
			simulate(t, []*server{a, b}, "--scenario=counters", "--users=8", "--pages=2", "--duration=2s")
			smokePages(t, a, b, hooks)
			smokeUnread(t, a, b)
			smokeUsers(t, a, b)

			a.hold(t, "PUT", "hooked", fresh(t))
			hooks.await("hooked", "user.online")

			smokeCounters(t, a, b, b)
			testkit.Eventually(t, "every process on the dashboard", func() bool {
				processes := a.board(t, withKey).Processes
				return len(processes) == len(all) &&
					!slices.ContainsFunc(processes,
						func(p process) bool { return p.Load["process_cpu_seconds_total"] <= 0 })
			})
		})
	}
}

// simulate runs the simulator against servers. It must find no wrong count.
func simulate(t *testing.T, servers []*server, flags ...string) {
	t.Helper()
	args := append([]string{"simulate", "--json", "--api-key=" + apiKey, "--leave-grace=300ms"}, flags...)
	for _, s := range servers {
		args = append(args, "--url="+s.url)
	}

	var progress bytes.Buffer
	cmd := exec.CommandContext(t.Context(), program, args...)
	cmd.Stderr = &progress
	out, err := cmd.Output()

	var report struct {
		OK          bool
		Error       string
		Wrong       []string
		Checkpoints []struct{}
	}
	if jerr := json.Unmarshal(out, &report); err != nil || jerr != nil || !report.OK || len(report.Checkpoints) == 0 {
		t.Fatalf("simulate %q: %v, %v: %s %s\n%s",
			flags, err, jerr, report.Error, strings.Join(report.Wrong, "\n"), &progress)
	}
}

// smokePages brings three users to a page, by gateways a and b.
func smokePages(t *testing.T, a, b *server, hooks *receiver) {
	t.Helper()
	page := "hooked " + fresh(t)
	path := "/" + url.PathEscape(page)

	one, two := a.ws(t), b.ws(t)
	one.join(page)
	one.awaitCount(page, 1)
	two.join(page)

	events := a.sse(t, path+"/counter/events")
	b.put(t, path+"/counter", increment).counter(t)
	for _, c := range []*client{one, two} {
		c.awaitCount(page, 3)
	}

	events.awaitCount(3)
	for _, s := range []*server{a, b} {
		testkit.Eventually(t, "the count of each gateway and its memory of the page", func() bool {
			is := s.stats(t, path+"/stats")
			return s.count(t, url.PathEscape(page)) == 3 && is.Now == 3 && is.Peak.Count > 0
		})

		var parts struct{ Regions map[string]int }
		body := s.get(t, path+"/counter?regions=1").body
		sum := 0

		if err := json.Unmarshal([]byte(body), &parts); err != nil {
			t.Fatal(err)
		}
		for _, n := range parts.Regions {
			sum += n
		}
		if sum != 3 {
			t.Errorf("the parts of the regions: %s", body)
		}
	}

	testkit.Eventually(t, "the webhook", func() bool { return len(hooks.received(page)) > 0 })

	// A leave reaches the other gateway.
	two.leave(page)
	one.awaitCount(page, 2)
}

// smokeUnread lets a user with tabs at gateways a and b follow a page that changes.
func smokeUnread(t *testing.T, a, b *server) {
	t.Helper()
	page := fresh(t)
	one := a.ws(t)
	two := b.again(t, one)

	a.follow(t, one.as(), page)
	b.change(t, page, "", "Idempotency-Key: k")
	a.change(t, page, "", "Idempotency-Key: k") // every gateway knows the key
	one.awaitUnread(1)
	two.awaitUnread(1)

	// Both tabs learn that the user has read.
	two.send(`{"type":"read"}`)
	one.awaitUnread(0)
	two.awaitUnread(0)

	a.change(t, page, `{"by":`+quoted(one.user)+`}`) // a user's own change does not count
	b.change(t, page, `{"by":"somebody else"}`)
	one.awaitUnread(1)
	two.awaitUnread(1)
	one.silent()

	for _, s := range []*server{a, b} {
		s.wantUnread(t, one.as(), 1)
	}
}

// smokeCounters changes a counter of each kind by gateways a and b, which are in one region, and watches it from
// gateway c, which may be in another region.
func smokeCounters(t *testing.T, a, b, c *server) {
	t.Helper()
	views, likes, stock := "views:"+fresh(t), "likes:"+fresh(t), "stock:"+fresh(t)
	sales, people := "sales:"+fresh(t), "visitors:"+fresh(t)
	path := url.PathEscape
	look := c.ws(t)
	look.send(`{"type":"subscribe","counters":` + quoted([]string{views, likes, stock}) + `}`)

	// Sums.
	a.call(t, "POST", path(views)+"/increment", `{"delta":41}`).lasting(t)
	b.call(t, "POST", path(views)+"/increment", "").lasting(t)
	for i, s := range []*server{a, b, a} {
		r := s.call(t, "POST", path(views)+"/decrement", `{"delta":2}`, withKey, "Idempotency-Key: once")
		if replay := r.header.Get("Idempotent-Replay") == "true"; r.lasting(t).Value != 40 || replay != (i > 0) {
			t.Errorf("repetition %d: replay %t, %s", i, replay, r.body)
		}
	}
	look.awaitCounter(views, 40, false)
	testkit.Eventually(t, "the sum", func() bool { return c.exact(t, views) == 40 })
	for call, want := range map[string]string{
		"counters/" + path(views) + "/window?last=1h": `"value":40}`,
		"counters/" + path(views) + "/range?step=1h":  `"total":40}`,
		"top?match=views:*&last=1h&n=100":             `{"key":` + quoted(views) + `,"value":40}`,
	} {
		testkit.Eventually(t, call, func() bool {
			return strings.Contains(a.get(t, "/api/v1/"+call, withKey).body, want)
		})
	}

	a.call(t, "POST", path(views)+"/adjust", `{"delta":-40,"reason":"bots","by":"ops"}`).lasting(t)
	ledger := b.ledger(t, views)
	if len(ledger) != 1 || ledger[0].Delta != -40 || ledger[0].Reason != "bots" ||
		ledger[0].By != "ops" || ledger[0].Op != "adjust" {
		t.Errorf("ledger %+v", ledger)
	}

	for _, change := range []string{`{"delta":5,"dimensions":{"country":"de"}}`, `{"dimensions":{"country":"fr"}}`} {
		a.call(t, "POST", path(sales)+"/increment", change).lasting(t)
	}
	b.call(t, "POST", path(sales)+"/increment", `{"dimensions":{"planet":"x"}}`).problem(t, http.StatusBadRequest)
	testkit.Eventually(t, "the dimension", func() bool {
		return strings.Contains(b.call(t, "GET", path(sales)+"/dimensions/country?n=1", "").body,
			`"values":[{"value":"de","count":5}],"other":1}`)
	})

	// Sets: likes of visitors, and unique visitors. Only its own region knows whose like it is.
	like := c.call(t, "PUT", path(likes)+"/members/me", "", look.as()).lasting(t)
	if like.Value != 1 || like.Member == nil || !*like.Member {
		t.Errorf("like: %+v", like)
	}
	look.awaitCounter(likes, 1, true)

	edit := `{"add":["x","y"],"remove":[` + quoted(look.user) + `]}`
	if r := c.call(t, "POST", path(likes)+"/members", edit).lasting(t); r.Value != 2 {
		t.Errorf("members: %+v", r)
	}
	look.awaitCounter(likes, 2, false)

	a.call(t, "POST", path(people)+"/members", `{"add":["ann","bob"]}`)
	b.call(t, "POST", path(people)+"/members", `{"add":["bob","eve"]}`)
	testkit.Eventually(t, "the visitors of the hour", func() bool {
		return strings.Contains(c.call(t, "GET", path(people)+"/window?last=1h", "").body, `"value":3}`)
	})

	// Exact counters, which have the same value everywhere at once.
	a.call(t, "POST", path(stock)+"/increment", `{"delta":10}`).lasting(t)
	if r := c.call(t, "POST", path(stock)+"/decrement", `{"delta":4}`).lasting(t); r.Value != 6 {
		t.Errorf("in stock after 10 - 4: %+v, want 6", r)
	}

	a.call(t, "POST", path(stock)+"/decrement", `{"delta":7}`).problem(t, http.StatusConflict)
	batch := `{"changes":[{"key":` + quoted(stock+" 2") + `},{"key":` + quoted(stock) + `,"delta":-7}]}`
	do(t, "POST", b.url+"/api/v1/counters", batch, withKey).problem(t, http.StatusConflict)
	if first, second := c.exact(t, stock), c.exact(t, stock+" 2"); first != 6 || second != 0 {
		t.Errorf("%d and %d in stock after a refused batch, want 6 and 0", first, second)
	}
	if all := c.ledger(t, stock); len(all) != 2 || all[1].Op != "decrement" {
		t.Errorf("ledger %+v", all)
	}
	look.awaitCounter(stock, 6, false)

	// Limits.
	for i, s := range []*server{a, b} {
		r := do(t, "POST", s.url+"/api/v1/limits/"+path(fresh(t)[:5]), `{"limit":1,"window":"1h","algorithm":"log"}`,
			withKey)
		if r.status != []int{http.StatusOK, http.StatusTooManyRequests}[i] {
			t.Errorf("call %d on a limit of 1: %d %s", i, r.status, r.body)
		}
	}

	c.call(t, "DELETE", path(likes), "").noContent(t)
	look.await("the end of "+likes, func(f frame) bool { return f.Key == likes && f.Value == 0 && f.Version == "0-0" })
}
