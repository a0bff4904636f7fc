package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"headcount/counter/pgtest"
	"headcount/presence/redistest"
	"headcount/servertest"
)

// lasting is the outside form of a counter that lasts, and what answers add to it.
type lasting struct {
	Key       string  `json:"key"`
	Kind      string  `json:"kind"`
	Value     int64   `json:"value"`
	UpdatedAt *string `json:"updated_at"`
	Version   string  `json:"version"`
	Exact     bool    `json:"exact"`
	Stale     bool    `json:"stale"`
	Member    *bool   `json:"member"`
}

// place is where counters are kept.
type place struct {
	name  string
	open  func(t *testing.T) (flags []string) // of every process
	twice bool                                // two processes share it
	lasts bool                                // it outlives the process
}

var places = []place{
	{name: "memory", open: func(*testing.T) []string { return nil }},
	{name: "data directory", open: func(t *testing.T) []string { return []string{"--data-dir=" + t.TempDir()} }, lasts: true},
	{name: "Redis", open: func(t *testing.T) []string {
		return []string{"--redis=" + redistest.Start(t, redistest.Durable...).URL(), "--cluster-listen=" + servertest.FreeAddr()}
	}, twice: true, lasts: true},
	{name: "PostgreSQL", open: func(t *testing.T) []string { return []string{"--postgres=" + pgtest.Start(t).Database(t)} }, twice: true, lasts: true},
	{name: "Redis and PostgreSQL", open: func(t *testing.T) []string {
		// Redis keeps nothing here: what outlives it is in PostgreSQL.
		return []string{"--redis=" + redistest.Start(t).URL(), "--postgres=" + pgtest.Start(t).Database(t), "--persist-interval=100ms", "--cluster-listen=" + servertest.FreeAddr()}
	}, twice: true, lasts: true},
}

// processes share a place. A process that is killed starts again at another address.
type processes struct {
	t     *testing.T
	flags [][]string
	mu    sync.RWMutex // guards all
	all   []*server
}

func (p place) start(t *testing.T, flags ...string) *processes {
	t.Helper()
	shared := p.open(t)
	ps := &processes{t: t}
	n := 1
	if p.twice {
		n = 2
	}
	for range n {
		own := append([]string{"--api-key=" + apiKey, "--id-secret=0123456789abcdef0123456789abcdef", "--update-interval=10ms", "--leave-grace=300ms"}, flags...)
		for _, f := range shared {
			if strings.HasPrefix(f, "--cluster-listen=") {
				f = "--cluster-listen=" + servertest.FreeAddr() // each its own
			}
			own = append(own, f)
		}
		ps.flags = append(ps.flags, own)
	}
	ps.all = make([]*server, n)
	var wg sync.WaitGroup
	for i := range ps.all {
		wg.Go(func() { ps.all[i] = ps.launch(i) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, s := range ps.all {
			if s == nil {
				continue
			}
			if problem := s.end(); problem != "" {
				t.Error(problem)
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return ps
}

func (p *processes) launch(i int) *server {
	s, err := launch(p.flags[i]...)
	if err != nil {
		p.t.Error(err)
	}
	return s
}

// at returns one of the processes, whatever i is.
func (p *processes) at(i int) *server {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.all[i%len(p.all)]
}

// crash kills a process as a crash would, and restart starts it again.
func (p *processes) crash(i int) {
	s := p.at(i)
	s.signal(syscall.SIGKILL)
	s.killed(p.t)
}

func (p *processes) restart(i int) {
	again := p.launch(i % len(p.flags))
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all[i%len(p.all)] = again
}

const root = "/api/v1/counters/"

// call makes a call on a counter, as a server unless a line says who it is.
func (s *server) call(t testing.TB, method, path, body string, lines ...string) answer {
	t.Helper()
	if len(lines) == 0 {
		lines = []string{withKey}
	}
	if body != "" {
		lines = append(lines, "Content-Type: application/json")
	}
	return do(t, method, s.url+root+path, body, lines...)
}

// counter decodes a 200 with exactly the members of a counter.
func (a answer) lasting(t testing.TB) lasting {
	t.Helper()
	var c lasting
	dec := json.NewDecoder(strings.NewReader(a.body))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil || a.status != http.StatusOK {
		t.Fatalf("%d %s, want a counter: %v", a.status, a.body, err)
	}
	if a.header.Get("Cache-Control") != "no-store" || a.header.Get("Content-Type") != "application/json" {
		t.Errorf("headers %v", a.header)
	}
	if (c.UpdatedAt == nil) != (c.Version == "0-0") {
		t.Errorf("updated_at and version of %s", a.body)
	}
	return c
}

func (s *server) exact(t testing.TB, key string) int64 {
	t.Helper()
	return s.call(t, "GET", url.PathEscape(key)+"/exact", "").lasting(t).Value
}

type entry struct {
	Seq                  uint64
	At, Op, Reason, By   string
	Delta, Before, After int64
}

// ledger reads a whole ledger, page by page. It must add up; the ledger of an exact
// counter must have every change.
func (s *server) ledger(t testing.TB, key string) (all []entry) {
	t.Helper()
	for after := uint64(0); ; {
		var page struct {
			Entries []entry
			Next    *uint64
		}
		a := s.call(t, "GET", fmt.Sprintf("%s/ledger?limit=7&after=%d", url.PathEscape(key), after), "")
		if err := json.Unmarshal([]byte(a.body), &page); err != nil || a.status != http.StatusOK {
			t.Fatalf("%d %s: %v", a.status, a.body, err)
		}
		for _, e := range page.Entries {
			before := e.Before
			switch {
			case !strings.HasPrefix(key, "stock:"):
			case len(all) == 0:
				before = 0
			default:
				before = all[len(all)-1].After
			}
			if e.Seq != uint64(len(all)+1) || e.Before != before || e.Before+e.Delta != e.After {
				t.Fatalf("entry %+v after %d entries that end with %d", e, len(all), before)
			}
			all = append(all, e)
		}
		if page.Next == nil {
			return all
		}
		after = *page.Next
	}
}

// awaitCounter skips frames until the counter has the value and is mine or not.
func (c *client) awaitCounter(key string, value int64, mine bool) frame {
	c.t.Helper()
	return c.await(fmt.Sprintf("%s %d, mine %t", key, value, mine), func(f frame) bool {
		return f.Type == "counter" && f.Key == key && f.Value == value && f.Mine == mine && !f.Stale
	})
}

// Every call works in every place. What one process acknowledges, another process reads
// and shows.
// rulesFile has the built-in rules, and one with a dimension.
func rulesFile(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "rules.json")
	text := `{"rules":[{"match":"views:*","kind":"sum","public":["read"],"buckets":["1m:24h","1h:90d"],"top":true},
		{"match":"likes:*","kind":"members","public":["read","member"]},
		{"match":"visitors:*","kind":"unique","public":["read"],"buckets":["1h:90d"]},
		{"match":"stock:*","kind":"exact","floor":0,"public":["read"]},
		{"match":"sales:*","kind":"sum","dimensions":["country"]}]}`
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestCountersInEveryPlace(t *testing.T) {
	t.Parallel()
	for _, p := range places {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			ps := p.start(t, "--counters="+rulesFile(t))
			a, b := ps.at(0), ps.at(1)
			views, likes, stock := "views:"+fresh(t), "likes:"+fresh(t), "stock:"+fresh(t)
			v, l, st := url.PathEscape(views), url.PathEscape(likes), url.PathEscape(stock)

			look := b.ws(t)
			look.send(`{"type":"subscribe","counters":` + quoted([]string{views, likes}) + `}`)
			first := map[string]bool{}
			look.await("the first frame of each", func(f frame) bool { // in whatever order
				if f.Type == "counter" && f.Value == 0 && !f.Mine && !f.Stale {
					first[f.Key] = true
				}
				return first[views] && first[likes]
			})
			resp, err := browserless.Get(b.url + root + l + "/events")
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Fatal(resp, err)
			}
			defer resp.Body.Close()
			stream := bufio.NewReader(resp.Body)
			event := func() (c lasting) {
				t.Helper()
				for {
					line, err := stream.ReadString('\n')
					if err != nil {
						t.Fatal(err)
					}
					if data, ok := strings.CutPrefix(line, "data: "); ok {
						if err := json.Unmarshal([]byte(data), &c); err != nil {
							t.Fatal(err)
						}
						return c
					}
				}
			}
			if c := event(); c.Value != 0 || c.Version != "0-0" || c.Kind != "members" {
				t.Errorf("the stream begins with %+v", c)
			}

			if c := a.call(t, "POST", v+"/increment", `{"delta":41}`).lasting(t); c.Value != 41 || c.Kind != "sum" || !c.Exact {
				t.Errorf("increment: %+v", c)
			}
			if c := b.call(t, "POST", v+"/increment", "").lasting(t); c.Value != 42 {
				t.Errorf("increment: %+v", c)
			}
			look.awaitCounter(views, 42, false)
			for i, s := range []*server{a, b, a} {
				r := s.call(t, "POST", v+"/decrement", `{"delta":2}`, withKey, "Idempotency-Key: once")
				if replay := r.header.Get("Idempotent-Replay") == "true"; r.lasting(t).Value != 40 || replay != (i > 0) {
					t.Errorf("repetition %d: replay %t, %s", i, replay, r.body)
				}
			}
			if n := b.exact(t, views); n != 40 {
				t.Errorf("%d, want 40", n)
			}
			if c := a.call(t, "POST", v+"/adjust", `{"delta":-40,"reason":"bots","by":"ops"}`).lasting(t); c.Value != 0 {
				t.Errorf("adjust: %+v", c)
			}
			if all := b.ledger(t, views); len(all) != 1 || all[0].Delta != -40 || all[0].Reason != "bots" || all[0].By != "ops" || all[0].Op != "adjust" {
				t.Errorf("ledger %+v", all)
			}

			// Likes come from visitors, known by their cookies, and from servers, which
			// name the visitor.
			r := a.call(t, "PUT", l+"/members/me", "", look.as())
			if c := r.lasting(t); c.Value != 1 || c.Member == nil || !*c.Member {
				t.Errorf("like: %s", r.body)
			}
			look.awaitCounter(likes, 1, true)
			if c := event(); c.Value != 1 {
				t.Errorf("event %+v", c)
			}
			anyone := a.call(t, "PUT", l+"/members/me", "", "Cookie: none=1")
			id := anyone.header.Get("Headcount-Id")
			if anyone.lasting(t).Value != 2 || id == "" || !strings.Contains(anyone.header.Get("Set-Cookie"), "headcount_id="+id) {
				t.Errorf("%s %v", anyone.body, anyone.header)
			}
			look.awaitCounter(likes, 2, true)
			if c := b.call(t, "DELETE", l+"/members/me", "", "Cookie: headcount_id="+id).lasting(t); c.Value != 1 || *c.Member {
				t.Errorf("unlike: %+v", c)
			}
			if c := b.call(t, "GET", l+"/members/"+look.user, "").lasting(t); !*c.Member {
				t.Errorf("a member: %+v", c)
			}
			if c := a.call(t, "POST", l+"/members", `{"add":["x","y"],"remove":[`+quoted(look.user)+`]}`).lasting(t); c.Value != 2 {
				t.Errorf("members: %+v", c)
			}
			look.awaitCounter(likes, 2, false)

			// Stock, and batches that are made whole or not at all.
			batch := `{"changes":[{"key":` + quoted(stock) + `,"delta":10},{"key":` + quoted(views) + `},{"key":` + quoted(stock) + `,"delta":-4}]}`
			if r := do(t, "POST", a.url+strings.TrimSuffix(root, "/"), batch, withKey); r.status != 200 || strings.Count(r.body, `"value":6`) != 2 || strings.Count(r.body, `"value":1,`) != 1 {
				t.Errorf("batch: %d %s", r.status, r.body)
			}
			refused := do(t, "POST", b.url+strings.TrimSuffix(root, "/"), `{"changes":[{"key":`+quoted(views)+`},{"key":`+quoted(stock)+`,"delta":-7}]}`, withKey)
			refused.problem(t, http.StatusConflict)
			if !strings.Contains(refused.body, `"key":`+quoted(stock)+`,"value":6`) {
				t.Errorf("%s", refused.body)
			}
			if s, n := b.exact(t, stock), b.exact(t, views); s != 6 || n != 1 {
				t.Errorf("stock %d and views %d after a batch that was refused", s, n)
			}
			a.call(t, "POST", st+"/decrement", `{"delta":7}`).problem(t, http.StatusConflict)
			if all := a.ledger(t, stock); len(all) != 2 || all[1].Op != "decrement" {
				t.Errorf("ledger %+v", all)
			}
			several := b.get(t, "/api/v1/counters?key="+url.QueryEscape(likes)+"&key="+url.QueryEscape(stock))
			if several.status != 200 || !strings.Contains(several.body, `"kind":"members","value":2`) || !strings.Contains(several.body, `"kind":"exact","value":6`) {
				t.Errorf("several: %s", several.body)
			}
			if r := b.call(t, "GET", url.PathEscape("stock:"+t.Name())+"*/aggregate", ""); r.status != 200 || !strings.Contains(r.body, `"counters":1,"value":6}`) {
				t.Errorf("aggregate: %d %s", r.status, r.body)
			}

			if c := a.call(t, "POST", l+"/reset", `{"reason":"new year","by":"ops"}`).lasting(t); c.Value != 0 {
				t.Errorf("reset: %+v", c)
			}
			look.awaitCounter(likes, 0, false)
			before := a.call(t, "PUT", l+"/members/z", "").lasting(t)
			a.call(t, "DELETE", l, "").noContent(t)
			if f := look.await("the end of "+likes, func(f frame) bool { return f.Key == likes && f.Version == "0-0" }); f.Value != 0 {
				t.Errorf("deleted: %s", f.text)
			}
			if after := b.call(t, "PUT", l+"/members/z", "").lasting(t); after.Value != 1 || version(t, after.Version)[0] <= version(t, before.Version)[0] {
				t.Errorf("%+v after %+v was deleted", after, before)
			}

			// Visitors of the hour: who comes again, to whichever process, is counted once.
			people := url.PathEscape("visitors:" + fresh(t))
			a.call(t, "POST", people+"/members", `{"add":["ann","bob"]}`)
			b.call(t, "POST", people+"/members", `{"add":["bob","eve"]}`)
			a.call(t, "POST", people+"/reset", `{"reason":"a new page","by":"ops"}`)
			visited := func(s *server) {
				t.Helper()
				if r := s.call(t, "GET", people+"/window?last=1h", ""); r.status != 200 || !strings.Contains(r.body, `"value":3}`) {
					t.Errorf("window: %d %s", r.status, r.body)
				}
				if r := s.call(t, "GET", people+"/range?step=1d", ""); r.status != 200 || !strings.Contains(r.body, `"value":3}`) || !strings.Contains(r.body, `"total":3}`) {
					t.Errorf("range: %d %s", r.status, r.body)
				}
			}
			visited(b)

			// Sales under their country, also in a batch.
			sales := url.PathEscape("sales:" + fresh(t))
			a.call(t, "POST", sales+"/increment", `{"delta":5,"dimensions":{"country":"de"}}`)
			b.call(t, "POST", sales+"/decrement", `{"delta":2,"dimensions":{"country":"de"}}`)
			for range 2 {
				a.call(t, "POST", sales+"/increment", `{"dimensions":{"country":"fr"}}`, withKey, "Idempotency-Key: once")
			}
			decoded, err := url.PathUnescape(sales)
			if err != nil {
				t.Fatal(err)
			}
			batch = `{"changes":[{"key":` + quoted(decoded) + `,"dimensions":{"country":"it"}},{"key":` + quoted(stock) + `},{"key":` + quoted(decoded) + `,"delta":4,"dimensions":{"country":"de"}}]}`
			if r := do(t, "POST", a.url+strings.TrimSuffix(root, "/"), batch, withKey); r.status != 200 {
				t.Errorf("batch: %d %s", r.status, r.body)
			}
			stocked := a.exact(t, stock)
			a.call(t, "POST", sales+"/increment", `{"dimensions":{"planet":"x"}}`).problem(t, http.StatusBadRequest)
			sold := func(s *server) {
				t.Helper()
				want := `{"key":` + quoted(decoded) + `,"dimension":"country","values":[{"value":"de","count":7},{"value":"fr","count":1}],"other":1}` + "\n"
				if r := s.call(t, "GET", sales+"/dimensions/country?n=2", ""); r.status != 200 || r.body != want {
					t.Errorf("dimensions: %d %s, want %s", r.status, r.body, want)
				}
			}
			sold(b)
			top := func(s *server) {
				t.Helper()
				r := s.get(t, "/api/v1/top?match=views:*&last=1h&n=5")
				if want := `{"match":"views:*","last":"1h","top":[{"key":` + quoted(views) + `,"value":41}]}` + "\n"; r.status != 200 || r.body != want {
					t.Errorf("top: %d %s, want %s", r.status, r.body, want)
				}
			}
			top(b)
			b.get(t, "/api/v1/top?match=sales:*&last=1h").problem(t, http.StatusBadRequest)

			if !p.lasts {
				return
			}
			look.close()
			for i := range ps.all {
				ps.crash(i)
				ps.restart(i)
			}
			if n := ps.at(0).exact(t, stock); n != stocked {
				t.Errorf("stock %d after a crash, %d before", n, stocked)
			}
			sold(ps.at(0))
			top(ps.at(1))
			visited(ps.at(1))
			if c := ps.at(1).call(t, "POST", v+"/decrement", "", withKey, "Idempotency-Key: once"); c.header.Get("Idempotent-Replay") != "true" {
				t.Errorf("a key was forgotten: %s", c.body)
			}
		})
	}
}

// 64 clients fight for the last 10 of a stock, over two processes where there can be
// two. Meanwhile a process is killed and starts again. Each client repeats what was not
// answered, under its key. Exactly 10 get one, and the ledger says who took what. Then they
// fight for limits.
func TestTheLastTen(t *testing.T) {
	t.Parallel()
	for _, p := range places {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			ps := p.start(t)
			key := "stock:" + fresh(t)
			path := url.PathEscape(key)
			const rounds, clients, last = 3, 64, 10
			for round := range rounds {
				ps.at(0).call(t, "POST", path+"/increment", fmt.Sprintf(`{"delta":%d}`, last)).lasting(t)
				var got, gone, answers atomic.Int64
				half := make(chan struct{})
				var wg sync.WaitGroup
				for i := range clients {
					wg.Go(func() {
						for try0 := i; ; try0++ {
							r, err := try("POST", ps.at(try0).url+root+path+"/decrement", "", withKey, fmt.Sprintf("Idempotency-Key: %d/%d", round, i))
							switch {
							case err != nil || r.status == http.StatusServiceUnavailable:
								time.Sleep(5 * time.Millisecond)
								continue
							case r.status == http.StatusOK:
								got.Add(1)
							case r.status == http.StatusConflict:
								gone.Add(1)
							default:
								t.Errorf("%d %s", r.status, r.body)
							}
							if answers.Add(1) == 5 {
								close(half)
							}
							return
						}
					})
				}
				if p.lasts {
					<-half
					ps.crash(round)
					ps.restart(round)
				}
				wg.Wait()
				if got.Load() != last || gone.Load() != clients-last {
					t.Fatalf("round %d: %d of %d got one of the last %d, %d did not", round, got.Load(), clients, last, gone.Load())
				}
				if n := ps.at(round).exact(t, key); n != 0 {
					t.Fatalf("round %d: %d are left", round, n)
				}
			}
			if all := ps.at(0).ledger(t, key); len(all) != rounds*(last+1) {
				t.Errorf("%d entries, want %d", len(all), rounds*(last+1))
			}
			// Over Redis a process takes seconds to begin anew, and limits are not in it.
			fightForALimit(t, ps, p.lasts && !strings.HasPrefix(p.name, "Redis"))
		})
	}
}

// A process is killed again and again while it counts. What was acknowledged is there.
// What was not acknowledged counts once when it is repeated.
func TestCountingThroughCrashes(t *testing.T) {
	t.Parallel()
	for _, p := range places {
		if !p.lasts {
			continue
		}
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			ps := p.start(t)
			votes, likes := "votes:"+fresh(t), "likes:"+fresh(t)
			const rounds, clients = 4, 16
			var acknowledged, sent atomic.Int64
			type change struct{ key, body, id string }
			for round := range rounds {
				var mu sync.Mutex
				var open []change // not answered
				stop := make(chan struct{})
				begun := make(chan struct{}, 1<<16)
				var wg sync.WaitGroup
				for i := range clients {
					wg.Go(func() {
						for n := 0; ; n++ {
							select {
							case <-stop:
								return
							default:
							}
							c := change{votes + "/increment", "", fmt.Sprintf("%d/%d/%d", round, i, n)}
							if i%2 == 0 {
								c.key, c.body = likes+"/members", `{"add":[`+quoted("m"+c.id)+`]}`
							}
							sent.Add(1)
							r, err := try("POST", ps.at(i).url+root+escaped(c.key), c.body, withKey, "Idempotency-Key: "+c.id)
							if err == nil && r.status == http.StatusOK {
								acknowledged.Add(1)
							} else {
								mu.Lock()
								open = append(open, c)
								mu.Unlock()
								return // it is gone
							}
							select {
							case begun <- struct{}{}:
							default:
							}
						}
					})
				}
				for range 100 {
					<-begun
				}
				ps.crash(round)
				close(stop)
				wg.Wait()
				ps.restart(round)
				sum := ps.at(0).exact(t, votes) + ps.at(1).exact(t, likes)
				if sum < acknowledged.Load() || sum > sent.Load() {
					t.Fatalf("round %d: %d are counted, of %d acknowledged and %d sent", round, sum, acknowledged.Load(), sent.Load())
				}
				for _, c := range open {
					eventually(t, "the answer to a repetition", func() bool {
						r, err := try("POST", ps.at(round+1).url+root+escaped(c.key), c.body, withKey, "Idempotency-Key: "+c.id)
						return err == nil && r.status == http.StatusOK
					})
					acknowledged.Add(1)
				}
				if sum := ps.at(0).exact(t, votes) + ps.at(1).exact(t, likes); sum != sent.Load() {
					t.Fatalf("round %d: %d are counted, of %d that were acknowledged", round, sum, sent.Load())
				}
			}
		})
	}
}

// escaped is a path of a key and the call on it.
func escaped(path string) string {
	i := strings.LastIndexByte(path, '/')
	return url.PathEscape(path[:i]) + path[i:]
}

// outage is a server of a store.
type outage interface{ Kill() }

// While the store is away, changes get 503, what is known is read and shown as stale,
// and the process is not ready. Afterwards everything is as before.
func TestTheStoreOfCountersIsAway(t *testing.T) {
	t.Parallel()
	redis := func(t *testing.T) (outage, func(), []string) {
		r := redistest.Start(t, redistest.Durable...)
		return r, func() { r.Restart(t) }, []string{"--redis=" + r.URL(), "--cluster-listen=" + servertest.FreeAddr()}
	}
	postgres := func(t *testing.T) (outage, func(), []string) {
		p := pgtest.Start(t)
		return p, func() { p.Restart(t) }, []string{"--postgres=" + p.Database(t)}
	}
	for name, open := range map[string]func(*testing.T) (outage, func(), []string){"Redis": redis, "PostgreSQL": postgres} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, restart, flags := open(t)
			s := startWithKey(t, flags...)
			likes := "likes:" + fresh(t)
			path := url.PathEscape(likes)
			c := s.ws(t)
			s.call(t, "PUT", path+"/members/me", "", c.as()).lasting(t)
			c.send(`{"type":"subscribe","counters":` + quoted([]string{likes}) + `}`)
			c.awaitCounter(likes, 1, true)
			store.Kill()
			s.call(t, "PUT", path+"/members/x", "").problem(t, http.StatusServiceUnavailable)
			if f := c.await("a stale counter", func(f frame) bool { return f.Type == "counter" && f.Stale }); f.Value != 1 || !f.Mine || f.Exact {
				t.Errorf("%s", f.text)
			}
			if got := s.call(t, "GET", path, "").lasting(t); !got.Stale || got.Value != 1 {
				t.Errorf("%+v, want it stale", got)
			}
			s.call(t, "GET", path+"/exact", "").problem(t, http.StatusServiceUnavailable)
			s.call(t, "GET", "views:nobody%20knows", "").problem(t, http.StatusServiceUnavailable)
			if r := do(t, "GET", s.admin+"/readyz", ""); r.status != http.StatusServiceUnavailable {
				t.Errorf("readyz %d %s", r.status, r.body)
			}
			restart()
			eventually(t, "a change after the restart", func() bool {
				return s.call(t, "PUT", path+"/members/x", "").status == http.StatusOK
			})
			c.awaitCounter(likes, 2, true)
			eventually(t, "readiness", func() bool { return do(t, "GET", s.admin+"/readyz", "").status == http.StatusOK })
		})
	}
}

// A process waits for a PostgreSQL that does not answer yet, and refuses one of a newer
// version with one line.
func TestStartWithPostgres(t *testing.T) {
	t.Parallel()
	p := pgtest.Start(t)
	database := p.Database(t)
	p.Kill()
	s, err := spawn("--postgres="+database, "--api-key="+apiKey, "--data-dir="+t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if problem := s.end(); problem != "" {
			t.Error(problem)
		}
	})
	if r := do(t, "GET", s.admin+"/readyz", ""); r.status != http.StatusServiceUnavailable {
		t.Errorf("readyz %d %s", r.status, r.body)
	}
	s.call(t, "POST", "views:1/increment", "").problem(t, http.StatusServiceUnavailable)
	p.Restart(t)
	eventually(t, "readiness", func() bool { return do(t, "GET", s.admin+"/readyz", "").status == http.StatusOK })
	if c := s.call(t, "POST", "views:1/increment", "").lasting(t); c.Value != 1 {
		t.Errorf("%+v", c)
	}
	p.Exec(t, database, `insert into headcount_migrations (version_id, is_applied) values (999, true)`)
	refused(t, "newer", "--postgres="+database)
}

// refused starts a process that must end with status 2 and one line that says so.
func refused(t *testing.T, says string, flags ...string) {
	t.Helper()
	s, err := spawn(flags...)
	if err == nil {
		s.signal(syscall.SIGKILL)
		t.Fatalf("it started with %q", flags)
	}
	_, text, _ := strings.Cut(err.Error(), "\n")
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "{") { // the log comes before
			lines = append(lines, line)
		}
	}
	if len(lines) != 1 || !strings.HasPrefix(lines[0], "headcount: --") || !strings.Contains(lines[0], says) {
		t.Errorf("%q: it says %q, want one line with %q", flags, lines, says)
	}
}

func TestSettingsOfCountersThatCannotWork(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "rules.json")
	if err := os.WriteFile(rules, []byte(`{"rules":[{"match":"a:*","kind":"exact","ceiling":-1}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	refused(t, `rule 1 ("a:*"): ceiling: -1 cannot be`, "--counters="+rules)
	refused(t, "does not begin with postgres://", "--postgres=mysql://h/d")
	refused(t, "shorter than --persist-interval", "--cold-after=1s", "--persist-interval=2s")
	refused(t, "not a duration", "--persist-interval=soon")
}

// The rules of a file apply, to pages of other origins too.
func TestRulesOfAFile(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "rules.json")
	if err := os.WriteFile(rules, []byte(`{"rules":[{"match":"seats","kind":"exact","floor":-1,"ceiling":2,"public":["read","increment"],"stale":0}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startWithKey(t, "--counters="+rules, "--allow-origins=https://a.example", "--jwt-secret="+jwtSecret)
	token := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": "ann", "in": 3600})
	const origin = "Origin: https://a.example"
	s.call(t, "POST", "seats/increment", "", origin).problem(t, http.StatusUnauthorized)
	r := s.call(t, "POST", "seats/increment", "", origin, token, "Idempotency-Key: k")
	if r.lasting(t).Value != 1 || r.header.Get("Access-Control-Allow-Origin") != "https://a.example" || !strings.Contains(r.header.Get("Access-Control-Expose-Headers"), "Idempotent-Replay") {
		t.Errorf("%s %v", r.body, r.header)
	}
	if r := s.call(t, "GET", "seats", "", origin); r.lasting(t).Value != 1 || r.header.Get("Set-Cookie") != "" {
		t.Errorf("%s %v", r.body, r.header)
	}
	s.call(t, "GET", "seats", "", "Authorization: Bearer x").problem(t, http.StatusUnauthorized)
	s.call(t, "POST", "seats/increment", "", "Origin: https://b.example", token).problem(t, http.StatusForbidden)
	s.call(t, "GET", "seats/events", "", "Origin: https://b.example").problem(t, http.StatusForbidden)
	s.call(t, "GET", "views:1", "").problem(t, http.StatusBadRequest)
	s.call(t, "POST", "seats/increment", `{"delta":2}`).problem(t, http.StatusConflict)
}
