package counterapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/counter/limit"
	"headcount/counter/pipeline"
	"headcount/gateway/calls"
	"headcount/gateway/httppolicy"
	"headcount/gateway/identity"
	"headcount/presence"
)

const rules = `{"rules":[
{"match":"views:*","kind":"sum","public":["read"],"dimensions":["country"]},
{"match":"votes:*","kind":"sum","public":["read","increment"]},
{"match":"seats:*","kind":"exact","floor":0,"ceiling":3,"public":["read","increment"]},
{"match":"likes:*","kind":"members","public":["read","member"]},
{"match":"fans:*","kind":"members"},
{"match":"visitors:*","kind":"unique","public":["read","member"]},
{"match":"stock:*","kind":"exact","floor":-5},
{"match":"hits:*","kind":"sum","public":["read"],"buckets":["1m:24h","1h:90d"],"top":true},
{"match":"secret:*","kind":"sum","buckets":["1m:24h"],"top":true},
{"match":"people:*","kind":"unique","public":["read"],"buckets":["1h:90d"]},
{"match":"fresh:*","kind":"sum","public":["read"],"buckets":["1h:90d"],"stale":0},
{"match":"now:*","kind":"sum","public":["read"],"stale":0},
{"match":"private:*","kind":"sum"}]}`

var seed = maphash.MakeSeed()

// users identifies callers by the header User, as if by a token, or by a signed id if they have one.
type users struct{}

func (users) Site(c *gin.Context) presence.Site {
	return presence.SiteOf(c.GetHeader("Site"))
}

func (users) IsServer(r *http.Request) bool { return isKey(httppolicy.APIKey(r)) }

func isKey(key string) bool { return key == "k" }

func (users) Crawler(*http.Request) bool { return false }

func (users) Cacheable(*gin.Context, ...string) {}

func (users) Public(c *gin.Context) error {
	if c.GetHeader("User") == "expired" {
		return identity.ErrBadToken
	}

	return nil
}

func (users) Identify(c *gin.Context) (identity.Identity, error) {
	name := c.GetHeader("User")
	switch name {
	case "":
		return identity.Identity{User: "new", Fresh: true}, nil
	case "expired", "none":
		return identity.Identity{}, identity.ErrNoToken
	}

	id := identity.Identity{User: name}
	if signed := c.GetHeader("Headcount-Id"); signed != "" {
		id.Signed = signed
		id.Hash = presence.User(maphash.String(seed, signed))
	}

	return id, nil
}

func (users) Issue(c *gin.Context, id identity.Identity) { c.Header("Issued", id.User) }

func (users) Addr(r *http.Request) netip.Addr {
	if given := r.Header.Get("Addr"); given != "" {
		return netip.MustParseAddr(given)
	}
	return netip.MustParseAddrPort(r.RemoteAddr).Addr()
}

// nowhere is a Hub without subscribers.
type nowhere struct{}

func (nowhere) Update(presence.Update) {}
func (nowhere) Touch(presence.Topic)   {}

// served is an API over a store in memory.
type served struct {
	t      testing.TB
	engine *gin.Engine
	api    *API
}

func serve(t testing.TB, tune func(*Config)) *served {
	t.Helper()
	parsed, err := counter.ParseRules([]byte(rules))
	if err != nil {
		t.Fatal(err)
	}

	counters := countersIn(t, countertest.InMemory(t, nil), parsed, counter.CombinerConfig{Instant: true})
	cfg := Config{Rules: parsed, Counters: counters, Registerer: prometheus.NewRegistry(), Log: zerolog.Nop()}
	if tune != nil {
		tune(&cfg)
	}
	live := NewLive(cfg, nowhere{})
	api := New(cfg, users{}, live)
	gin.SetMode(gin.ReleaseMode)
	e := gin.New()
	// As api.Engine does. With the escaped path a key may have a slash in it.
	e.UseEscapedPath = true
	e.UnescapePathValues = false
	e.HandleMethodNotAllowed = true
	e.RedirectTrailingSlash = false
	e.Use(calls.Guard(cfg.Log, calls.CheckKey(isKey)))
	calls.Register(e, cfg.Log, api.Calls())
	return &served{t: t, engine: e, api: api}
}

// countersIn returns the counters over a store, until the test ends.
func countersIn(
	t testing.TB, store counter.Store, rules *counter.Rules, cfg counter.CombinerConfig,
) *pipeline.Counters {
	counters := pipeline.New(store, rules, cfg, zerolog.Nop())
	t.Cleanup(func() { _ = counters.Close() })
	return counters
}

// remote has counters on a server of its own.
type remote struct {
	*pipeline.Counters
	state interface{ Up() bool }
}

func (r remote) Remote() bool { return true }
func (r remote) Up() bool     { return r.state.Up() }

// do sends "METHOD path", below Root unless it is a limit, with header lines. A body is JSON unless a line says
// otherwise.
func (s *served) do(call, body string, lines ...string) *httptest.ResponseRecorder {
	s.t.Helper()
	method, path, _ := strings.Cut(call, " ")
	if !strings.HasPrefix(path, limitsRoot) && !strings.HasPrefix(path, TopRoot) {
		path = Root + path
	}
	r, err := http.NewRequest(method, "http://h"+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}

	r.RemoteAddr = "192.0.2.1:1234"
	for _, line := range lines {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Add(name, value)
	}

	w := httptest.NewRecorder()
	s.engine.ServeHTTP(w, r)
	return w
}

const key = "X-API-Key: k"

// slowReads has remote counters whose reads wait before they answer.
type slowReads struct {
	remote
	begun atomic.Int32
	open  chan struct{}
}

func (s *slowReads) Read(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	s.begun.Add(1)
	read, err := s.remote.Read(ctx, keys, member, lag)
	<-s.open
	return read, err
}

// Simultaneous reads that may lag share one call to the store. A read that begins after an acknowledged change sees the
// change.
func TestConcurrentReadsAreOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowReads{open: make(chan struct{})}
		s := serve(t, func(cfg *Config) {
			slow.remote = remote{cfg.Counters.(*pipeline.Counters), new(awayStore)}
			cfg.Counters = slow
		})

		var all sync.WaitGroup
		read := func(call, answer string) { all.Go(func() { s.want(call, "", 200, answer) }) }

		before := one("views:1", "sum", 0, "0")
		for range 50 {
			read("GET /views:1", before)
		}
		// An exact read may not lag, so it must not share a read that has begun before it.
		read("GET /views:1/exact", before)
		synctest.Wait()
		if n := slow.begun.Load(); n != 2 {
			t.Errorf("%d reads of the store, want 2: a shared one and the exact one", n)
		}

		// A read that began before the change must not answer calls that come after it.
		after := one("views:1", "sum", 1, "1")
		s.want("POST /views:1/increment", "", 200, after)
		// The first reads have the old value already and have not answered yet. A caller that has just changed the
		// counter must not be given it.
		read("GET /views:1", after)
		synctest.Wait()
		if n := slow.begun.Load(); n != 3 {
			t.Errorf("%d reads of the store, want 3: one more after the change", n)
		}

		close(slow.open)
		all.Wait()
	})
}

// want sends a call with an API key and compares the whole answer, in which times and incarnations are replaced.
func (s *served) want(call, body string, status int, answer string, lines ...string) {
	s.t.Helper()
	w := s.do(call, body, append(lines, key)...)

	if got := plain(w.Body.String()); w.Code != status || got != answer {
		s.t.Errorf("%s %s: %d %s\nwant %d %s", call, body, w.Code, got, status, answer)
	}
}

var changing = regexp.MustCompile(`"(updated_at|at|version)":"[^"-]*(-[0-9]+")?[^",}]*"?`)

// plain returns a body without the parts that differ from run to run.
func plain(body string) string {
	body = changing.ReplaceAllString(strings.TrimSpace(body), `"$1":T$2`)

	return strings.NewReplacer(`"updated_at":T,`, "", `"version":T`, `"v":`, `"at":T,`, "").Replace(body)
}

func one(key, kind string, value int, version string, more ...string) string {
	updated := ""
	if version == "0" {
		updated = `"updated_at":null,`
	}
	return fmt.Sprintf(`{"key":%q,"kind":%q,"value":%d,%s"v":-%s","exact":true%s}`, key, kind, value, updated, version,
		strings.Join(more, ""))
}

// listOf returns the answer with several counters.
func listOf(counters ...string) string { return `{"counters":[` + strings.Join(counters, ",") + `]}` }

// Numbers: sums and exact counters can be read, changed, corrected and deleted.
func TestNumbers(t *testing.T) {
	s := serve(t, nil)
	s.want("GET /views:1", "", 200, one("views:1", "sum", 0, "0"))
	s.want("POST /views:1/increment", "", 200, one("views:1", "sum", 1, "1"))
	s.want("POST /views:1/increment", "{}", 200, one("views:1", "sum", 2, "2"))
	s.want("POST /views:1/increment", `{"delta":1000000000000,"dimensions":{"country":"de"}}`, 200,
		one("views:1", "sum", 1000000000002, "3"))
	s.want("POST /views:1/decrement", `{"delta":1000000000000}`, 200, one("views:1", "sum", 2, "4"))
	s.want("POST /views:1/decrement", `{"delta":5}`, 200, one("views:1", "sum", -3, "5"))
	s.want("GET /views:1/exact", "", 200, one("views:1", "sum", -3, "5"))
	// The recorder keeps the body, which a server would drop.
	s.want("HEAD /views:1", "", 200, one("views:1", "sum", -3, "5"))

	s.want("POST /views:1/adjust", `{"delta":-500,"reason":"bots","by":"ops"}`, 200, one("views:1", "sum", -503, "6"))
	s.want("POST /views:1/reset", `{"reason":"new","by":"ops"}`, 200, one("views:1", "sum", 0, "7"))
	// A reset to the value that is there changes nothing, so neither the version nor the ledger goes on.
	s.want("POST /views:1/reset", `{"reason":"again","by":"ops"}`, 200, one("views:1", "sum", 0, "7"))

	s.want("GET /views:1/ledger", "", 200,
		`{"entries":[{"seq":1,"op":"adjust","delta":-500,"before":-3,"after":-503,"reason":"bots","by":"ops"},`+
			`{"seq":2,"op":"reset","delta":503,"before":-503,"after":0,"reason":"new","by":"ops"}]}`)
	s.want("GET /views:1/ledger?limit=1", "", 200,
		`{"entries":[{"seq":1,"op":"adjust","delta":-500,"before":-3,"after":-503,"reason":"bots","by":"ops"}],`+
			`"next":1}`)
	s.want("GET /views:1/ledger?after=2", "", 200, `{"entries":[]}`)

	s.want("POST /stock:1/increment", `{"delta":10}`, 200, one("stock:1", "exact", 10, "1"))
	s.want("POST /stock:1/decrement", `{"delta":3}`, 200, one("stock:1", "exact", 7, "2"))
	s.want("GET /stock:1/ledger?after=1", "", 200,
		`{"entries":[{"seq":2,"op":"decrement","delta":-3,"before":10,"after":7}]}`)

	s.want("POST /stock:1/set", `{"value":42,"reason":"counted","by":"ops"}`, 200, one("stock:1", "exact", 42, "3"))
	s.want("POST /stock:1/set", `{"value":42,"reason":"again","by":"ops"}`, 200, one("stock:1", "exact", 42, "3"))
	s.want("POST /stock:1/increment", `{"reason":"found","by":"ann"}`, 200, one("stock:1", "exact", 43, "4"))
	s.want("POST /stock:1/decrement", `{"by":"bob"}`, 200, one("stock:1", "exact", 42, "5"))
	s.want("GET /stock:1/ledger?after=2", "", 200,
		`{"entries":[{"seq":3,"op":"set","delta":35,"before":7,"after":42,"reason":"counted","by":"ops"},`+
			`{"seq":4,"op":"increment","delta":1,"before":42,"after":43,"reason":"found","by":"ann"},{"seq":5,`+
			`"op":"decrement","delta":-1,"before":43,"after":42,"by":"bob"}]}`)
	s.want("POST /stock:9/set", `{"value":0,"reason":"counted","by":"ops"}`, 200, one("stock:9", "exact", 0, "0"))

	// A client that got no answer deletes again, and must not take the counter that is gone for a mistake.
	s.want("DELETE /stock:1", "", 204, "")
	s.want("DELETE /stock:1", "", 204, "")
	s.want("GET /stock:1", "", 200, one("stock:1", "exact", 0, "0"))
	s.want("GET /stock:1/ledger", "", 200, `{"entries":[]}`)

	if w := s.do("GET /a%2Fb", "", key); w.Code != 400 ||
		!strings.Contains(w.Body.String(), "no rule of --counters fits it") {
		t.Errorf("a key without a rule is answered %d %s", w.Code, w.Body)
	}
	s.want("POST /views:%C3%A4%2F%22/increment", "", 200, one(`views:ä/"`, "sum", 1, "1"))
}

func TestBatches(t *testing.T) {
	s := serve(t, nil)
	s.want("POST ",
		`{"changes":[{"key":"views:1"},{"key":"votes:1","delta":2},{"key":"views:1","delta":-4,`+
			`"dimensions":{"country":"de"}}]}`, 200,
		listOf(one("views:1", "sum", -3, "2"), one("votes:1", "sum", 2, "1"), one("views:1", "sum", -3, "2")))

	// Exact counters need batches of their own, which are refused as a whole at a bound.
	s.want("POST ", `{"changes":[{"key":"seats:1","delta":2}]}`, 200,
		listOf(one("seats:1", "exact", 2, "1")))
	w := s.do("POST ",
		`{"changes":[{"key":"stock:1"},{"key":"seats:1"},{"key":"seats:1"},{"key":"seats:2","delta":9}]}`, key)
	wantProblem(t, s.do("POST ", `{"changes":[{"key":"views:1"},{"key":"seats:1"}]}`, key), 400, "a batch of their own")
	wantConflict(t, w, "seats:1", 2, "ceiling is 3")

	// Nothing of the refused batch was made. And a key that is asked for twice is answered once.
	s.want("GET ?key=seats:1&key=views:1&key=seats:1&key=likes:9", "", 200,
		listOf(one("seats:1", "exact", 2, "1"), one("views:1", "sum", -3, "2"), one("likes:9", "members", 0, "0")))

	s.want("GET /views:*/aggregate", "", 200, `{"match":"views:*","counters":1,"value":-3}`)
	s.want("GET /%2A/aggregate", "", 200, `{"match":"*","counters":3,"value":1}`)
	s.want("GET /none:*/aggregate", "", 200, `{"match":"none:*","counters":0,"value":0}`)
}

func TestMembers(t *testing.T) {
	s := serve(t, nil)
	yes, no := `,"member":true`, `,"member":false`

	s.want("GET /likes:1/members/a", "", 200, one("likes:1", "members", 0, "0", no))
	s.want("PUT /likes:1/members/a", "", 200, one("likes:1", "members", 1, "1", yes))
	s.want("PUT /likes:1/members/a", "", 200, one("likes:1", "members", 1, "1", yes))

	s.want("POST /likes:1/members", `{"add":["b","c","b"],"remove":["a"]}`, 200, one("likes:1", "members", 2, "2"))
	s.want("GET /likes:1/members/a", "", 200, one("likes:1", "members", 2, "2", no))
	s.want("GET /likes:1/members/%62", "", 200, one("likes:1", "members", 2, "2", yes))
	s.want("DELETE /likes:1/members/b", "", 200, one("likes:1", "members", 1, "3", no))
	s.want("DELETE /likes:1/members/b", "", 200, one("likes:1", "members", 1, "3", no))

	// "me" is a name for the caller's own user, so all three calls mean the same member.
	s.want("PUT /likes:1/members/me", "", 200, one("likes:1", "members", 2, "4", yes), "User: ann")
	s.want("GET /likes:1/members/ann", "", 200, one("likes:1", "members", 2, "4", yes))
	s.want("GET /likes:1/members/me", "", 200, one("likes:1", "members", 2, "4", yes), "User: ann")

	s.want("POST /likes:1/reset", `{"reason":"new","by":"ops"}`, 200, one("likes:1", "members", 0, "5"))
	s.want("GET /likes:1/members/ann", "", 200, one("likes:1", "members", 0, "5", no))
	s.want("GET /likes:1/ledger", "", 200,
		`{"entries":[{"seq":1,"op":"reset","delta":-2,"before":2,"after":0,"reason":"new","by":"ops"}]}`)
}

// estimated is a counter of kind unique.
func estimated(key string, value int, version string, more ...string) string {
	text := one(key, "unique", value, version, append([]string{`,"error":0.0081`}, more...)...)

	return strings.Replace(text, `"exact":true`, `"exact":false`, 1)
}

func TestUniques(t *testing.T) {
	s := serve(t, nil)
	const yes = `,"member":true`

	s.want("GET /visitors:1", "", 200, estimated("visitors:1", 0, "0"))
	s.want("PUT /visitors:1/members/a", "", 200, estimated("visitors:1", 1, "1", yes))
	s.want("PUT /visitors:1/members/a", "", 200, estimated("visitors:1", 1, "1", yes))
	s.want("PUT /visitors:1/members/me", "", 200, estimated("visitors:1", 2, "2", yes), "User: ann")
	if w := s.do("PUT /visitors:1/members/me", "", "User: ann"); w.Code != 200 || w.Header().Get("Issued") != "ann" {
		t.Errorf("a visitor joins a unique counter: %d %s, want 200 for the issued user", w.Code, w.Body)
	}

	wantConflict(t, s.do("DELETE /visitors:1/members/me", "", "User: ann"), "visitors:1", 2,
		"it does not know its members")
	wantConflict(t, s.do("GET /visitors:1/members/me", "", "User: bob"), "visitors:1", 2,
		"it does not know its members")

	s.want("POST /visitors:1/members", `{"add":["a","b","c","b"]}`, 200, estimated("visitors:1", 4, "3"))
	s.want("POST /visitors:1/members", `{"add":["d"]}`, 200, estimated("visitors:1", 5, "4"), "Idempotency-Key: d")
	wantProblem(t, s.do("POST /visitors:1/members", `{"remove":["a"]}`, key), 400, `send only "add"`)

	s.want("GET /visitors:1/exact", "", 200, estimated("visitors:1", 5, "4"))
	// "a" is in both counters, so that a sum and a union differ.
	s.want("POST /visitors:2/members", `{"add":["a","z"]}`, 200, estimated("visitors:2", 2, "1"))
	s.want("GET ?key=visitors:2&key=views:1&key=visitors:1", "", 200,
		listOf(estimated("visitors:2", 2, "1"), one("views:1", "sum", 0, "0"), estimated("visitors:1", 5, "4")))

	// The aggregate of unique counters is a union, not a sum, so other kinds cannot be part of it.
	s.want("GET /visitors:*/aggregate", "", 200, `{"match":"visitors:*","counters":2,"value":6}`)
	s.want("POST /views:1/increment", "", 200, one("views:1", "sum", 1, "1"))
	wantConflict(t, s.do("GET /*/aggregate", "", key), "*", 0, "kind unique and of other kinds")

	s.want("POST /visitors:1/reset", `{"reason":"new","by":"ops"}`, 200, estimated("visitors:1", 0, "5"))
	s.want("GET /visitors:1/ledger", "", 200,
		`{"entries":[{"seq":1,"op":"reset","delta":-5,"before":5,"after":0,"reason":"new","by":"ops"}]}`)

	// The idempotency key is still known, and the answer has the present counter.
	if w := s.do("POST /visitors:1/members", `{"add":["d"]}`, key,
		"Idempotency-Key: d"); w.Header().Get("Idempotent-Replay") != "true" ||
		plain(w.Body.String()) != estimated("visitors:1", 0, "5") {
		t.Errorf("%d %s", w.Code, w.Body)
	}

	s.want("DELETE /visitors:1", "", 204, "")
	s.want("GET /visitors:1", "", 200, estimated("visitors:1", 0, "0"))
}

// ranged is an answer about a range.
type ranged struct {
	Key, Step string
	Points    []struct {
		At    time.Time
		Value int64
	}
	Total int64
}

func TestHistory(t *testing.T) {
	s := serve(t, nil)
	s.want("POST /hits:1/increment", `{"delta":5}`, 200, one("hits:1", "sum", 5, "1"))
	s.want("POST /hits:1/decrement", `{"delta":2}`, 200, one("hits:1", "sum", 3, "2"))
	s.want("POST /hits:1/adjust", `{"delta":-500,"reason":"bots","by":"ops"}`, 200, one("hits:1", "sum", -497, "3"))

	// Adjustments are no gains, so no window includes them.
	s.want("GET /hits:1/window?last=1h", "", 200, `{"key":"hits:1","last":"1h","value":3}`)
	s.want("GET /hits:1/window?last=30d", "", 200, `{"key":"hits:1","last":"30d","value":3}`)
	s.want("GET /hits:2/window?last=1h", "", 200, `{"key":"hits:2","last":"1h","value":0}`)
	if w := s.do("GET /hits:1/window?last=90s", ""); w.Code != 200 {
		t.Errorf("a public window is answered %d %s, want 200", w.Code, w.Body)
	}

	get := func(query, step string, points int) (a ranged) {
		t.Helper()
		w := s.do("GET /hits:1/range"+query, "")
		if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil || w.Code != 200 || a.Key != "hits:1" ||
			a.Step != step || len(a.Points) != points {
			t.Errorf("%s: %d %s, want %d points of %s", query, w.Code, w.Body, points, step)
		}
		return a
	}

	now := time.Now().UTC()
	a := get("", "1m", 60)
	// The minute may end between a change and the question, so the changes may lie in either of the last two steps.
	if last := a.Points[59]; a.Total != 3 || a.Points[58].Value+last.Value != 3 || last.At.After(now) ||
		now.Sub(last.At) > 2*time.Minute {
		t.Errorf("the history is %+v", a)
	}

	later := now.Add(time.Hour).Format(time.RFC3339)
	if a := get("?step=1h&to="+url.QueryEscape(later), "1h", 60); a.Total != 3 {
		t.Errorf("the history is %+v, want a total of 3", a)
	}

	// Steps begin at full multiples of their length in UTC, whatever zone the caller writes. So 36 hours touch four
	// steps of 12.
	from := now.Add(-36 * time.Hour).In(time.FixedZone("", 2*3600)).Format(time.RFC3339)
	if a := get("?step=12h&from="+url.QueryEscape(from), "12h", 4); a.Total != 3 || a.Points[3].Value != 3 {
		t.Errorf("the history is %+v, want 3 in the last of four points", a)
	}

	// The history goes with its counter: one that is created anew under the same key must not begin with it.
	s.want("DELETE /hits:1", "", 204, "")
	s.want("GET /hits:1/window?last=1h", "", 200, `{"key":"hits:1","last":"1h","value":0}`)
}

func TestHistoryThatIsRefused(t *testing.T) {
	s := serve(t, nil)
	for call, detail := range map[string]string{
		"GET /hits:1/range?from=yesterday":                   "one time such as",
		"GET /hits:1/range?from=2030-10-10T12:00:00Z&from=x": "one time such as",
		"GET /hits:1/range?to=1700000000":                    "one time such as",
		"GET /hits:1/range?step=x":                           "one duration such as",
		"GET /hits:1/range?step=0s":                          "one duration such as",
		"GET /hits:1/range?step=90s": "no multiple of a step that is " +
			"kept (1m:1d, 1h:90d)",
		"GET /hits:1/range?from=2020-10-10T12:00:00Z":                         "at most 1500",
		"GET /hits:1/range?from=2020-10-10T12:00:00Z&step=10d":                "longer ago than is kept",
		"GET /hits:1/range?from=2020-10-10T12:00:00Z&to=2020-10-10T11:00:00Z": "not before to",
		"GET /hits:1/range?%zz":                                               "cannot be read",
		"GET /hits:1/window":                                                  `"last" is missing`,
		"GET /hits:1/window?last=-1h":                                         "one duration such as",
		"GET /hits:1/window?last=91d":                                         "longer than is kept",
		"GET /votes:1/window?last=x":                                          "one duration such as",
	} {
		wantProblem(t, s.do(call, ""), 400, detail)
	}

	wantProblem(t, s.do("GET /private:1/range", ""), 403, "not public")
	s.want("POST /votes:1/increment", "", 200, one("votes:1", "sum", 1, "1"))
	wantConflict(t, s.do("GET /votes:1/range", ""), "votes:1", 1, `the rule "votes:*" keeps none`)
	wantConflict(t, s.do("GET /votes:1/window?last=1h", ""), "votes:1", 1, `the rule "votes:*" keeps none`)
}

func TestHistoryOfUniques(t *testing.T) {
	s := serve(t, nil)
	// The distinct members in several steps are fewer than the sum over the steps.
	s.want("POST /people:1/members", `{"add":["a","b","c"]}`, 200, estimated("people:1", 3, "1"))
	s.want("POST /people:1/members", `{"add":["b"]}`, 200, estimated("people:1", 3, "1"))
	s.want("GET /people:1/window?last=1d", "", 200, `{"key":"people:1","last":"1d","value":3}`)
	w := s.do("GET /people:1/range?step=12h", "")
	var people ranged
	if err := json.Unmarshal(w.Body.Bytes(), &people); err != nil || w.Code != 200 || len(people.Points) != 60 ||
		people.Total != 3 || people.Points[58].Value+people.Points[59].Value != 3 {
		t.Errorf("%d %s", w.Code, w.Body)
	}

	s.want("GET /people:2/window?last=90d", "", 200, `{"key":"people:2","last":"90d","value":0}`)
	wantProblem(t, s.do("GET /people:1/range?step=1m", ""), 400, "no multiple")
	wantConflict(t, s.do("GET /visitors:1/range", ""), "visitors:1", 0, `the rule "visitors:*" keeps none`)
}

func TestDimensions(t *testing.T) {
	s := serve(t, nil)
	s.want("GET /views:1/dimensions/country", "", 200, `{"key":"views:1","dimension":"country","values":[],"other":0}`)
	s.want("POST /views:1/increment", `{"delta":5,"dimensions":{"country":"de"}}`, 200, one("views:1", "sum", 5, "1"))
	s.want("POST /views:1/decrement", `{"delta":2,"dimensions":{"country":"de"}}`, 200, one("views:1", "sum", 3, "2"))

	for range 2 {
		s.want("POST /views:1/increment", `{"dimensions":{"country":"fr"}}`, 200, one("views:1", "sum", 4, "3"),
			"Idempotency-Key: f")
	}

	s.want("POST ",
		`{"changes":[{"key":"views:1","delta":3,"dimensions":{"country":"a \"b\""}},{"key":"views:1",`+
			`"dimensions":{"country":"it"}},{"key":"views:1"}]}`, 200,
		listOf(one("views:1", "sum", 9, "6"), one("views:1", "sum", 9, "6"), one("views:1", "sum", 9, "6")))

	all := `{"key":"views:1","dimension":"country","values":[{"value":"a \"b\"","count":3},{"value":"de",` +
		`"count":3},{"value":"fr","count":1},{"value":"it","count":1}],"other":0}`
	s.want("GET /views:1/dimensions/country", "", 200, all)
	s.want("GET /views:1/dimensions/country?n=2", "", 200,
		`{"key":"views:1","dimension":"country","values":[{"value":"a \"b\"","count":3},{"value":"de",`+
			`"count":3}],"other":2}`)

	// A reset does not change dimensions.
	s.want("POST /views:1/reset", `{"reason":"new","by":"ops"}`, 200, one("views:1", "sum", 0, "7"))
	s.want("GET /views:1/dimensions/%63ountry?n=1000", "", 200, all)

	for call, detail := range map[string]string{
		"GET /views:1/dimensions/planet":        "ask for country",
		"GET /votes:1/dimensions/country":       "it has none",
		"GET /likes:1/dimensions/country":       "it has none",
		"GET /views:1/dimensions/country?n=0":   "from 1 to 1000",
		"GET /views:1/dimensions/country?n=x":   "from 1 to 1000",
		"GET /views:1/dimensions/country?n=1%3": "cannot be read",
	} {
		wantProblem(t, s.do(call, "", key), 400, detail)
	}

	for call, body := range map[string]string{
		"POST /views:1/increment": `{"dimensions":{"planet":"x"}}`,
		"POST /votes:1/increment": `{"dimensions":{"country":"x"}}`,
		"POST /stock:1/increment": `{"dimensions":{"country":"x"}}`,
		"POST /views:1/decrement": `{"dimensions":{"country":""}}`,
	} {
		wantProblem(t, s.do(call, body, key), 400, "dimensions")
	}
	// Dimensions are for servers alone.
	wantProblem(t, s.do("GET /views:1/dimensions/country", ""), 403, "not public")
	wantProblem(t, s.do("GET /views:1/dimensions/planet", ""), 403, "not public")
	wantProblem(t, s.do("POST /votes:1/increment", `{"dimensions":{"country":"x"}}`, "User: ann"), 403,
		"without dimensions")
	wantProblem(t, s.do("POST /votes:1/increment", `{"dimensions":{"country":5}}`, "User: ann"), 400, "country")
	s.want("GET /votes:1", "", 200, one("votes:1", "sum", 0, "0"))

	// A counter of another kind has no dimensions.
	if r := s.api.cfg.Counters.Change(t.Context(),
		counter.Op{Changes: []counter.Change{{Key: "views:old", Rule: &counter.Rule{Kind: counter.Exact},
			Verb: counter.Add, Delta: 4}}}); r.Err != nil {
		t.Fatal(r.Err)
	}
	wantConflict(t, s.do("GET /views:old/dimensions/country", "", key), "views:old", 4, "no dimensions")

	s.want("DELETE /views:1", "", 204, "")
	s.want("GET /views:1/dimensions/country", "", 200, `{"key":"views:1","dimension":"country","values":[],"other":0}`)
}

func TestTop(t *testing.T) {
	s := serve(t, nil)
	s.want("GET "+TopRoot+"?match=hits:*&last=1h", "", 200, `{"match":"hits:*","last":"1h","top":[]}`)

	for n := range 12 {
		key := "hits:" + strconv.Itoa(n)
		s.want("POST /"+key+"/increment", fmt.Sprintf(`{"delta":%d}`, n+1), 200, one(key, "sum", n+1, "1"))
	}

	s.want("POST /hits:3/decrement", `{"delta":3}`, 200, one("hits:3", "sum", 1, "2"))
	s.want("POST /hits:1/adjust", `{"delta":5000,"reason":"bots","by":"ops"}`, 200, one("hits:1", "sum", 5002, "2"))
	s.want("GET "+TopRoot+"?match=hits:*&last=1h&n=2", "", 200,
		`{"match":"hits:*","last":"1h","top":[{"key":"hits:11","value":12},{"key":"hits:10","value":11}]}`)
	s.want("GET "+TopRoot+"?match=hits:*&last=90d&n=1", "", 200,
		`{"match":"hits:*","last":"90d","top":[{"key":"hits:11","value":12}]}`)

	// A deleted counter leaves the list. A counter that was reset stays: the list is of what was gained, which a reset
	// does not undo.
	s.want("DELETE /hits:11", "", 204, "")
	s.want("POST /hits:10/reset", `{"reason":"new","by":"ops"}`, 200, one("hits:10", "sum", 0, "2"))

	w := s.do("GET "+TopRoot+"?match=hits:*&last=2h", "") // it is public, and this question is new
	if w.Code != 200 || strings.Count(w.Body.String(), `"key"`) != 10 ||
		!strings.Contains(w.Body.String(), `[{"key":"hits:10","value":11},{"key":"hits:9","value":10}`) {
		t.Errorf("the list is answered %d %s, want ten keys, hits:10 first", w.Code, w.Body)
	}

	for query, detail := range map[string]string{
		"":                                    "match",
		"?match=hits:*&match=views:*&last=1h": "one rule",
		"?match=hits:1&last=1h":               "no rule",
		"?match=hits*&last=1h":                "no rule",
		"?match=views:*&last=1h":              "keeps none",
		"?match=hits:*":                       `"last" is missing`,
		"?match=hits:*&last=x":                "one duration",
		"?match=hits:*&last=91d":              "longer than is kept",
		"?match=hits:*&last=1h&n=0":           "from 1 to 100",
		"?match=hits:*&last=1h&n=101":         "from 1 to 100",
		"?match=%zz":                          "cannot be read",
	} {
		wantProblem(t, s.do("GET "+TopRoot+query, "", key), 400, detail)
	}

	wantProblem(t, s.do("GET "+TopRoot+"?match=secret:*&last=1h", ""), 403, "not public")
	wantProblem(t, s.do("GET "+TopRoot+"?match=hits:*&last=1h", "", "User: expired"), 401, "token")
	wantProblem(t, s.do("GET "+TopRoot+"?match=none:*&last=1h", "", "X-API-Key: wrong"), 401, "wrong")
	if w := s.do("POST "+TopRoot, "", key); w.Code != 405 {
		t.Errorf("POST: %d", w.Code)
	}
}

// wantProblem checks a problem document that says what to do.
func wantProblem(t *testing.T, w *httptest.ResponseRecorder, status int, detail string) {
	t.Helper()

	var p struct {
		Status int
		Detail string
	}
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Code != status || p.Status != status ||
		!strings.Contains(p.Detail, detail) {
		t.Errorf("%d %s, want %d with %q", w.Code, w.Body, status, detail)
	}

	if w.Header().Get("Content-Type") != "application/problem+json" || w.Header().Get("Cache-Control") != "no-store" {
		t.Errorf("the problem has the headers %v", w.Header())
	}

	// A caller may repeat the call after that time, so it is on answers that a repetition may change, and on no other.
	if retry := w.Header().Get("Retry-After"); (status == 429 || status == 503) != (retry != "") {
		t.Errorf("a %d has Retry-After %q", status, retry)
	}
}

func wantConflict(t *testing.T, w *httptest.ResponseRecorder, key string, value int64, detail string) {
	t.Helper()
	wantProblem(t, w, http.StatusConflict, detail)

	var p struct {
		Key   *string
		Value *int64
	}
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Key == nil || *p.Key != key || p.Value == nil ||
		*p.Value != value {
		t.Errorf("%s, want key %q and value %d", w.Body, key, value)
	}
}

// Every mistake of a caller has its own answer. If there are several, the first one is answered.
func TestProblems(t *testing.T) {
	s := serve(t, nil)
	for _, m := range slices.Concat(mistakesOfCallers(), mistakesInBodies()) {
		t.Run(fmt.Sprintf("%.40s %.40s %d", m.call, strings.ToValidUTF8(m.body, "?"), m.status), func(t *testing.T) {
			wantProblem(t, s.do(m.call, m.body, m.lines...), m.status, m.detail)
		})
	}

	if w := s.do("GET /%2A/aggregate", "", key); !strings.Contains(w.Body.String(), `"counters":0,`) {
		t.Errorf("a refused call changed a counter: %s", w.Body)
	}

	// Paths without a route: calls of later versions, and methods that a path does not have.
	for call, status := range map[string]int{
		"GET /views:1/dimensions":          404,
		"GET /":                            404,
		"POST /views:1/dimensions/country": 405,
		"PUT /views:1":                     405,
		"GET /views:1/increment":           405,
		"POST /views:1":                    405,
	} {
		if w := s.do(call, "", key); w.Code != status {
			t.Errorf("%s: %d, want %d", call, w.Code, status)
		}
	}
}

// mistake is a call that is refused.
type mistake struct {
	call, body string
	lines      []string // key is the first line of a server
	status     int
	detail     string
}

const form = "Content-Type: application/x-www-form-urlencoded"

// mistakesOfCallers are mistakes in API keys, names, rights and identities. They are answered before those in bodies: a
// caller without the right learns nothing about what a body has to be.
func mistakesOfCallers() []mistake {
	long := strings.Repeat("k", 129)
	many := strings.Repeat(" ", MaxBody+1)
	var hundred []string
	for i := range 101 {
		hundred = append(hundred, fmt.Sprintf("key=views:%d", i))
	}

	return []mistake{
		{"GET /views:1", "", []string{"X-API-Key: x"}, 401, "API key"},
		{"POST /" + long + "/increment", "{", []string{"X-API-Key: x"}, 401, "API key"},
		{"POST ", "{", []string{"X-API-Key: x"}, 401, "API key"},
		{"GET ?key=" + long, "", []string{"X-API-Key: x"}, 401, "API key"},
		{"GET /*/aggregate", "", []string{"X-API-Key: x"}, 401, "API key"},
		{"PUT /likes:1/members/me", "", []string{"X-API-Key: x"}, 401, "API key"},

		{"GET /" + long, "", nil, 400, "128 characters"},
		{"GET /.", "", []string{key}, 400, "Send 1 to 128"},
		{"GET /-", "", []string{key}, 400, "Send 1 to 128"},
		{"GET /a*b", "", []string{key}, 400, "only a match has"},
		{"GET /nothing", "", []string{key}, 400, "no rule"},
		{"POST /" + long + "/increment", "{", []string{form}, 400, "128 characters"},
		{"PUT /likes:1/members/" + long, "", []string{key}, 400, "Send 1 to 128"},
		{"PUT /likes:1/members/..", "", []string{key}, 400, "Send 1 to 128"},
		{"PUT /private:1/members/" + long, "", nil, 400, "Send 1 to 128"},
		{"GET /views:1/aggregate", "", nil, 400, "it has no *"},
		{"GET /a*b*/aggregate", "", []string{key}, 400, "only at the end"},
		{"GET ", "", []string{key}, 400, "1 to 100 distinct"},
		{"GET ?" + strings.Join(hundred, "&"), "", []string{key}, 400, "1 to 100 distinct"},
		{"GET ?key=views:1&key=a*", "", nil, 400, "only a match has"},
		{"GET ?key=%zz", "", []string{key}, 400, "cannot be read"},

		{"GET /private:1", "", nil, 403, "not public"},
		{"GET /private:1/exact", "", []string{"User: ann"}, 403, "not public"},
		{"GET ?key=views:1&key=private:1", "", nil, 403, "not public"},
		{"POST /views:1/increment", many, []string{form}, 403, "not public"},
		{"POST /votes:1/decrement", "", nil, 403, "not public"},
		{"POST /votes:1/increment", `{"delta":2}`, nil, 403, "but by 1"},
		{"POST /private:1/increment", "", []string{"User: none"}, 403, "not public"},
		{"PUT /likes:1/members/a", "", []string{"User: a"}, 403, "not public"},
		{"PUT /fans:1/members/me", "", []string{"User: a"}, 403, "not public"},
		{"POST /likes:1/members", `{"add":["a"]}`, nil, 403, "not public"},
		{"POST /views:1/reset", "{", nil, 403, "not public"},
		{"POST /views:1/adjust", "{", nil, 403, "not public"},
		{"GET /views:1/ledger?limit=x", "", nil, 403, "not public"},
		{"GET /views:*/aggregate", "", nil, 403, "not public"},
		{"DELETE /views:1", "", nil, 403, "not public"},
		{"POST ", "{", []string{form}, 403, "not public"},

		{"POST /votes:1/increment", "{", []string{"User: none"}, 401, "token"},
		{"PUT /likes:1/members/me", "", []string{"User: expired"}, 401, "token"},
		{"GET /likes:1/members/me", "", []string{"User: none"}, 401, "token"},
		{"GET /views:1", "", []string{"User: expired"}, 401, "token"},
		{"PUT /likes:1/members/me", "", []string{key}, 401, "no identity"},
		{"DELETE /likes:1/members/me", "", []string{key}, 401, "no identity"},
	}
}

func mistakesInBodies() []mistake {
	many := strings.Repeat(" ", MaxBody+1)
	var thousand []string
	for i := range 1001 {
		thousand = append(thousand, fmt.Sprintf(`{"key":"views:%d"}`, i))
	}

	return []mistake{
		{"POST /views:1/increment", many, []string{key}, 413, "262144"},
		{"POST /views:1/increment", `{"delta":1}`, []string{key, form}, 415, "application/json"},
		{"POST /views:1/increment", `{"delta":1}`, []string{key, "Content-Type: ;"}, 415, "application/json"},
		{"POST /views:1/increment", `{"delta":1}`, []string{key, "Content-Encoding: gzip"}, 415, "Content-Encoding"},
		{"POST ", `{}`, []string{key, "Content-Type: text/plain"}, 415, "application/json"},

		{"POST /views:1/increment", `{"delta":1`, []string{key}, 400, "comma or }"},
		{"POST /views:1/increment", `{"dleta":1}`, []string{key}, 400,
			`"dleta" is unknown; the body has delta and dimensions`},
		{"POST /views:1/increment", `{"delta":0}`, []string{key}, 400, "from 1 to 1000000000000"},
		{"POST /views:1/increment", `{"delta":1000000000001}`, []string{key}, 400, "from 1 to 1000000000000"},
		{"POST /views:1/increment", `{"delta":1.5}`, []string{key}, 400, "whole number"},
		{"POST /views:1/increment", `{"dimensions":{"city":"x"}}`, []string{key}, 400, "only country"},
		{"POST /views:1/increment", `{"dimensions":{"country":""}}`, []string{key}, 400, "1 to 128 characters"},
		{"POST /votes:1/increment", `{"dimensions":{"city":"x"}}`, nil, 403, "without dimensions"},
		{"POST /views:1/adjust", `{"delta":0,"reason":"r","by":"b"}`, []string{key}, 400, "missing or 0"},
		{"POST /views:1/adjust", `{"delta":9223372036854775808,"reason":"r","by":"b"}`, []string{key}, 400, "64 bits"},
		{"POST /views:1/adjust", `{"delta":1,"by":"b"}`, []string{key}, 400, "reason"},
		{"POST /stock:1/set", `{"reason":"r","by":"b"}`, []string{key}, 400, "value: it is missing"},
		{"POST /stock:1/set", `{"value":1,"reason":"r"}`, []string{key}, 400, "by: it is missing"},
		{"POST /stock:1/set", `{"value":1.5,"reason":"r","by":"b"}`, []string{key}, 400, "whole number"},
		{"POST /stock:1/set", `{"value":1,"reason":"r","by":"b"}`, nil, 403, "not public"},
		{"POST /views:1/increment", `{"reason":"r"}`, []string{key}, 400,
			`"reason" is unknown; the body has delta and dimensions`},
		{"POST /stock:1/increment", `{"x":"r"}`, []string{key}, 400,
			`"x" is unknown; the body has delta, reason and by`},
		{"POST /stock:1/increment", `{"reason":""}`, []string{key}, 400, "1 to 200"},
		{"POST /views:1/reset", `{"reason":"r"}`, []string{key}, 400, "by: it is missing"},
		{"POST /views:1/reset", `{"reason":"` + strings.Repeat("r", 201) + `","by":"b"}`, []string{key}, 400,
			"1 to 200"},
		{"POST /likes:1/members", `{}`, []string{key}, 400, "there are no members"},
		{"POST /likes:1/members", `{"add":["a"],"remove":["a"]}`, []string{key}, 400, "send it in one"},
		{"POST /likes:1/members", `{"add":["."]}`, []string{key}, 400, "bad member"},
		{"POST ", `{"changes":[]}`, []string{key}, 400, "1 to 1000"},
		{"POST ", `{"changes":[` + strings.Join(thousand, ",") + `]}`, []string{key}, 400, "more than 1000"},
		{"POST ", `{"changes":[{"key":"views:1","delta":0}]}`, []string{key}, 400, "it is 0"},
		{"POST ", `{"changes":[{"delta":1}]}`, []string{key}, 400, "key is missing"},
		{"POST ", `{"changes":[{"key":"a*"}]}`, []string{key}, 400, "bad key"},
		{"POST /views:1/increment", "", []string{key, "Idempotency-Key: "}, 400, "1 to 255 bytes"},
		{"POST /views:1/increment", "", []string{key, "Idempotency-Key: a", "Idempotency-Key: b"}, 400,
			"1 to 255 bytes"},
		{"POST ", `{"changes":[{"key":"views:1"}]}`, []string{key, "Idempotency-Key: " + strings.Repeat("x", 256)},
			400, "1 to 255 bytes"},
		{"GET /views:1/ledger?limit=0", "", []string{key}, 400, `"limit" is one whole number from 1 to 1000`},
		{"GET /views:1/ledger?limit=1001", "", []string{key}, 400, "1 to 1000"},
		{"GET /views:1/ledger?after=-1", "", []string{key}, 400, `"after" is one whole number`},
		{"GET /views:1/ledger?after=1&after=2", "", []string{key}, 400, `"after" is one whole number`},
		{"GET /views:1/ledger?%zz", "", []string{key}, 400, "cannot be read"},
	}
}

// A change beyond a bound, or of another kind, is answered 409 with the present value.
func TestConflicts(t *testing.T) {
	var log bytes.Buffer
	s := serve(t, func(cfg *Config) { cfg.Log = zerolog.New(&log) })

	for _, call := range []string{"POST /views:1/increment", "POST /seats:1/increment", "PUT /likes:1/members/a"} {
		if w := s.do(call, "", key); w.Code != 200 {
			t.Fatalf("%s: %d %s", call, w.Code, w.Body)
		}
	}

	for _, tc := range []struct {
		call, body, key string
		value           int64
		detail          string
	}{
		{"POST /seats:1/increment", `{"delta":3}`, "seats:1", 1, "its ceiling is 3; send a change that stays"},
		{"POST /seats:1/decrement", `{"delta":2}`, "seats:1", 1, "its floor is 0"},
		{"POST /seats:2/decrement", ``, "seats:2", 0, "its floor is 0"},
		{"POST /seats:1/adjust", `{"delta":-2,"reason":"r","by":"b"}`, "seats:1", 1, "its floor is 0"},
		{"POST /seats:1/set", `{"value":-1,"reason":"r","by":"b"}`, "seats:1", 1, "its floor is 0"},
		{"POST /seats:1/set", `{"value":4,"reason":"r","by":"b"}`, "seats:1", 1, "its ceiling is 3"},
		{"POST /views:1/set", `{"value":4,"reason":"r","by":"b"}`, "views:1", 1,
			"it is of kind sum; only an exact counter is set"},
		{"POST /views:1/adjust", `{"delta":9223372036854775807,"reason":"r","by":"b"}`, "views:1", 1, "64 bits"},
		{"POST /likes:1/increment", ``, "likes:1", 1, "it is of kind members; only a sum"},
		{"POST /likes:2/adjust", `{"delta":2,"reason":"r","by":"b"}`, "likes:2", 0, "it is of kind members"},
		{"POST /views:1/members", `{"add":["a"]}`, "views:1", 1, "it is of kind sum; only a counter of kind members"},
		{"PUT /views:1/members/a", ``, "views:1", 1, "it is of kind sum"},
		{"GET /views:1/members/a", ``, "views:1", 1, "it is of kind sum"},
		{"DELETE /stock:1/members/a", ``, "stock:1", 0, "it is of kind exact"},
		{"GET /visitors:1/members/a", ``, "visitors:1", 0, "it is of kind unique; it does not know its members"},
		{"DELETE /visitors:1/members/a", ``, "visitors:1", 0, "it is of kind unique"},
		{"POST /visitors:1/increment", ``, "visitors:1", 0, "it is of kind unique; only a sum"},
		{"POST /visitors:1/adjust", `{"delta":1,"reason":"r","by":"b"}`, "visitors:1", 0, "it is of kind unique"},
		{"POST ", `{"changes":[{"key":"views:1"},{"key":"likes:1"},{"key":"votes:1","delta":9}]}`, "likes:1", 1,
			"it is of kind members"},
		{"POST ", `{"changes":[{"key":"seats:1","delta":2},{"key":"seats:1","delta":1}]}`, "seats:1", 1,
			"its ceiling is 3"},
	} {
		t.Run(tc.call, func(t *testing.T) { wantConflict(t, s.do(tc.call, tc.body, key), tc.key, tc.value, tc.detail) })
	}

	// Anybody can make such mistakes, so they must not be able to fill the log.
	if log.Len() > 0 {
		t.Errorf("the log must not have mistakes of callers: %s", &log)
	}

	s.want("GET ?key=views:1&key=seats:1&key=likes:1", "", 200,
		`{"counters":[`+one("views:1", "sum", 1, "1")+","+one("seats:1", "exact", 1, "1")+","+one("likes:1", "members",
			1, "1")+`]}`)
}

// An idempotency key changes nothing a second time. It is known only within its own space.
func TestReplays(t *testing.T) {
	s := serve(t, nil)
	// All steps send the same Idempotency-Key, so only the spaces tell them apart: a server, a visitor, another
	// visitor, and batches.
	for i, step := range []struct {
		call, body string
		lines      []string
		value      string // a part of the answer
		replay     bool
	}{
		{"POST /votes:1/increment", `{"delta":5}`, []string{key}, `"value":5`, false},
		{"POST /votes:1/increment", `{"delta":5}`, []string{key}, `"value":5`, true},
		{"POST /votes:1/decrement", `{"delta":2}`, []string{key}, `"value":5`, true}, // the bodies need not be equal
		{"POST /votes:2/increment", ``, []string{key}, `"value":1`, false},
		{"POST /votes:1/increment", ``, []string{"User: ann"}, `"value":6`, false},
		{"POST /votes:1/increment", ``, []string{"User: ann"}, `"value":6`, true},
		{"POST /votes:1/increment", ``, []string{"User: bob"}, `"value":7`, false},
		{"POST ", `{"changes":[{"key":"votes:1"}]}`, []string{key}, `"value":8`, false},
		{"POST ", `{"changes":[{"key":"votes:2"}]}`, []string{key}, `"value":1`, true}, // all batches share a space
		{"POST /likes:1/members", `{"add":["a"]}`, []string{key}, `"value":1`, false},
		{"POST /likes:1/members", `{"add":["b"]}`, []string{key}, `"value":1`, true},
		{"DELETE /votes:1", ``, []string{key}, ``, false},
		{"POST /votes:1/increment", ``, []string{key}, `"value":0`, true}, // the key outlives its counter
	} {
		w := s.do(step.call, step.body, append(step.lines, "Idempotency-Key: x")...)
		if got := w.Header().Get("Idempotent-Replay") == "true"; w.Code/100 != 2 || got != step.replay ||
			!strings.Contains(w.Body.String(), step.value) {
			t.Errorf("step %d, %s is answered %d, replay %t, %s", i, step.call, w.Code, got, w.Body)
		}
	}

	// A refused change does not use up its key.
	wantConflict(t, s.do("POST /seats:1/decrement", "", key, "Idempotency-Key: y"), "seats:1", 0, "floor")
	if w := s.do("POST /seats:1/increment", "", key, "Idempotency-Key: y"); w.Code != 200 ||
		w.Header().Get("Idempotent-Replay") != "" {
		t.Errorf("the change is answered %d %v, want 200 and no replay", w.Code, w.Header())
	}
}

// Visitors may do what a rule opens, each user and each address without an identity at a limited rate.
func TestPublicCalls(t *testing.T) {
	s := serve(t, nil)
	if w := s.do("GET ?key=views:1&key=likes:1", ""); w.Code != 200 {
		t.Errorf("a public read is answered %d %s, want 200", w.Code, w.Body)
	}

	if w := s.do("POST /votes:1/increment", `{"delta":1,"dimensions":{}}`); w.Code != 200 ||
		w.Header().Get("Issued") != "new" {
		t.Errorf("a public increment is answered %d %v, want 200 and a new identity", w.Code, w.Header())
	}

	for _, method := range []string{"GET", "DELETE"} { // these issue no identity
		if w := s.do(method+" /likes:1/members/me", ""); w.Code != 200 || w.Header().Get("Issued") != "" ||
			!strings.Contains(w.Body.String(), `"member":false`) {
			t.Errorf("%s of one's own membership is answered %d %v %s, want false without a new identity",
				method, w.Code, w.Header(), w.Body)
		}
	}

	if w := s.do("PUT /likes:1/members/me", "", "User: ann"); w.Code != 200 || w.Header().Get("Issued") != "ann" ||
		!strings.Contains(w.Body.String(), `"member":true`) {
		t.Errorf("PUT of one's own membership is answered %d %v %s, want true", w.Code, w.Header(), w.Body)
	}

	for _, who := range []string{"User: bob", "Other: address"} {
		refused := 0
		for i := range 60 {
			// All kinds of changes use up the same rate. A DELETE by somebody new changes nothing, so it is left out
			// there.
			call := []string{"POST /votes:1/increment", "PUT /likes:1/members/me", "DELETE /likes:1/members/me"}[i%3]
			if who[0] == 'O' {
				call = []string{"POST /votes:1/increment", "PUT /likes:1/members/me"}[i%2]
			}
			if w := s.do(call, "", who); w.Code != 200 {
				wantProblem(t, w, 429, "later")
				for name, want := range map[string]string{"RateLimit": `"default";r=0;t=1`,
					"RateLimit-Policy": `"default";q=20;w=2`, "Retry-After": "1"} {
					if is := w.Header()[name]; len(is) != 1 || is[0] != want {
						t.Errorf("%s: %q, want %q", name, is, want)
					}
				}
				refused++
			}
		}

		// One of the burst of 20 may be used up already, and a busy machine gives some back.
		if refused == 0 || refused > 41 {
			t.Errorf("%s: %d of 60 refused", who, refused)
		}
	}

	// A change beyond a bound is refused for that reason, even if the caller is over the limit.
	for range 3 {
		s.do("POST /seats:1/increment", "", key)
	}
	// A visitor over the limit who is told "later" would come back for a place that does not exist.
	for range 60 {
		wantConflict(t, s.do("POST /seats:1/increment", "", "User: eve"), "seats:1", 3, "ceiling")
	}

	if w := s.do("GET /views:1", "", "User: eve"); w.Code != 200 {
		t.Errorf("a read was limited: %d", w.Code)
	}
}

var errAway = fmt.Errorf("test: %w", counter.ErrUnavailable)

// awayStore is a store of a server that may be away.
type awayStore struct {
	counter.Store
	away  atomic.Bool
	reads atomic.Int64
}

func (o *awayStore) Up() bool { return !o.away.Load() }

func (o *awayStore) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	if o.away.Load() {
		results := make([]counter.Result, len(ops))
		for i := range results {
			results[i].Err = errAway
		}
		return results
	}
	return o.Store.Apply(ctx, ops)
}

func (o *awayStore) Read(
	ctx context.Context, keys []string, member string, lag time.Duration,
) ([]counter.Reading, error) {
	o.reads.Add(1)
	if o.away.Load() {
		return nil, errAway
	}
	return o.Store.Read(ctx, keys, member, lag)
}

func (o *awayStore) Ledger(ctx context.Context, key string, after uint64, limit int) (counter.Ledger, error) {
	if o.away.Load() {
		return counter.Ledger{}, errAway
	}
	return o.Store.Ledger(ctx, key, after, limit)
}

func (o *awayStore) Limit(ctx context.Context, calls []limit.Request) []counter.LimitResult {
	if o.away.Load() {
		results := make([]counter.LimitResult, len(calls))
		for i := range results {
			results[i].Err = errAway
		}
		return results
	}
	return o.Store.Limit(ctx, calls)
}

func (o *awayStore) Aggregate(ctx context.Context, prefix string) (counter.Aggregate, error) {
	if o.away.Load() {
		return counter.Aggregate{}, errAway
	}
	return o.Store.Aggregate(ctx, prefix)
}

// While the store is away, changes get 503. Reads that may lag get the last known value, as stale, or 503 if there is
// none.
func TestTheStoreIsAway(t *testing.T) {
	store := &awayStore{Store: countertest.InMemory(t, nil)}
	s := serve(t, func(cfg *Config) {
		cfg.Counters = remote{countersIn(t, store, cfg.Rules, counter.CombinerConfig{}), store}
	})

	s.want("POST /views:1/increment", "", 200, one("views:1", "sum", 1, "1"))
	s.want("POST /now:1/increment", "", 200, one("now:1", "sum", 1, "1"))
	// Each of these was read or changed while the store was there, so its value is known. views:2 never was.
	s.want("GET /likes:1", "", 200, one("likes:1", "members", 0, "0"))

	store.away.Store(true)
	stale := func(c string) string {
		return strings.Replace(c, `"exact":true`, `"exact":false,"stale":true`, 1)
	}

	s.want("GET /views:1", "", 200, stale(one("views:1", "sum", 1, "1")))
	s.want("GET ?key=likes:1&key=views:1", "", 200,
		`{"counters":[`+stale(one("likes:1", "members", 0, "0"))+","+stale(one("views:1", "sum", 1, "1"))+"]}")

	for _, call := range []string{
		"GET /views:1/exact", "GET /views:2", "GET ?key=views:1&key=views:2", "GET /now:1",
		"GET /views:1/ledger", "GET /views:*/aggregate", "GET /likes:1/members/a",
		"POST /views:1/increment", "PUT /likes:1/members/a", "DELETE /views:1",
	} {
		wantProblem(t, s.do(call, "", key), 503, "cannot be reached")
	}
	wantProblem(t, s.do("POST ", `{"changes":[{"key":"views:1"}]}`, key), 503, "same Idempotency-Key")

	store.away.Store(false)
	s.want("GET /views:1", "", 200, one("views:1", "sum", 1, "1"))
}

// full is a Writer whose writes wait until they are let go.
type full struct {
	counter.Store
	may chan struct{}
}

func (f *full) Apply(ctx context.Context, ops []counter.Op) []counter.Result {
	<-f.may
	return f.Store.Apply(ctx, ops)
}

// When the queue of changes is full, further ones get 503, and those in the queue are made later.
func TestTheQueueIsFull(t *testing.T) {
	store := &full{Store: countertest.InMemory(t, nil), may: make(chan struct{})}
	s := serve(t, func(cfg *Config) {
		cfg.Counters = countersIn(t, store, cfg.Rules, counter.CombinerConfig{QueueSize: 2})
	})

	busy := make(chan int, 8)
	for range 8 { // one is written, two wait
		go func() { busy <- s.do("POST /views:1/increment", "", key).Code }() // ends once the store may
	}

	// One change is being written and two are queued, so five answers come at once. Which callers get them does not
	// matter.
	for range 5 {
		if code := <-busy; code != 503 {
			t.Errorf("with a full queue a change is answered %d, want 503", code)
		}
	}
	wantProblem(t, s.do("POST /views:2/increment", "", key), 503, "was not made")

	close(store.may)
	for range 3 {
		if code := <-busy; code != 200 {
			t.Errorf("a change that waited in the queue is answered %d, want 200", code)
		}
	}

	// Three changes in two writes: the two that waited were made together.
	s.want("GET /views:1/exact", "", 200, one("views:1", "sum", 3, "2"))
}

// A counter keeps the kind that it was created with, and the log says once that its rule has another.
func TestARuleChangedItsKind(t *testing.T) {
	var log strings.Builder
	store := countertest.InMemory(t, nil)
	s := serve(t, func(cfg *Config) {
		cfg.Counters, cfg.Log = countersIn(t, store, cfg.Rules,
			counter.CombinerConfig{Instant: true}), zerolog.New(&log)
	})

	was := counter.Rule{Match: "views:*", Kind: counter.Members}
	if r := store.Apply(t.Context(), []counter.Op{{Changes: []counter.Change{{Key: "views:1", Rule: &was,
		Verb: counter.Edit, Join: []string{"a"}}}}}); r[0].Err != nil {
		t.Fatal(r[0].Err)
	}

	// Twice, since the log must not have a line for each call.
	for range 2 {
		wantConflict(t, s.do("POST /views:1/increment", "", key), "views:1", 1, "kind members")
		s.want("GET /views:1", "", 200, one("views:1", "members", 1, "1"))
	}

	s.want("PUT /views:1/members/b", "", 200, one("views:1", "members", 2, "2", `,"member":true`))
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), `"match":"views:*"`) {
		t.Errorf("the log has %d lines, want 1 that names the rule: %s", n, &log)
	}
}

// Whatever the path and the query, a call that fails is answered with a problem document.
func FuzzPaths(f *testing.F) {
	f.Add("GET", "/views:1/members/a%2F", "", "limit=1")
	f.Add("POST", "/%ff/increment", `{"delta":1}`, "")
	f.Add("GET", "", "", "key=a&key=%00")
	f.Add("GET", "/*/aggregate", "", "after=18446744073709551616")
	f.Add("PUT", "/likes:1/members/me", "", "")
	f.Fuzz(func(t *testing.T, method, path, body, query string) {
		s := serve(t, nil)
		u, err := url.Parse("http://h" + Root + path)
		if err != nil || !strings.HasPrefix(u.EscapedPath(), Root) {
			return
		}

		u.RawQuery = query
		r, err := http.NewRequest(method, u.String(), strings.NewReader(body))
		if err != nil {
			return
		}

		r.RemoteAddr = "192.0.2.1:1234"
		r.Header.Set("X-API-Key", "k")
		w := httptest.NewRecorder()
		s.engine.ServeHTTP(w, r)
		switch w.Code {
		case 200, 204, 400, 404, 405, 409, 401:
		default:
			t.Fatalf("%s %s: %d %s", method, u, w.Code, w.Body)
		}

		if w.Code == 200 && method != "HEAD" && !json.Valid(w.Body.Bytes()) {
			t.Fatalf("%s %s: %s", method, u, w.Body)
		}
	})
}
