package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

func TestServerWelcome(t *testing.T) {
	t.Parallel()
	s := common(t)
	c := s.ws(t) // checks that welcome comes first, then unread 0
	c.mu.Lock()
	w := c.frames[0]
	c.mu.Unlock()
	if w.HeartbeatMS != sharedPing.Milliseconds() {
		t.Errorf("heartbeat_ms %d, want the ping interval: %s", w.HeartbeatMS, w.text)
	}
	if user, signature, ok := strings.Cut(c.id, "."); !ok || user != c.user || signature == "" {
		t.Errorf("user %q is not id %q without its signature", c.user, c.id)
	}
	if o := s.ws(t); o.user == c.user {
		t.Error("two users with the same id")
	}
	c.silent()
	c.send(`{"type":"read"}`)
	if f := c.take("unread"); f.text != `{"type":"unread","count":0}` {
		t.Errorf("read was answered with %s", f.text)
	}
}

// A step is a frame to send and the frames that must come, in order, with no others. P
// and Q stand for two pages.
type step struct {
	send string
	want []string // "P 1" is a count, "bad_page" an error
}

func TestServerFrames(t *testing.T) {
	t.Parallel()
	s := common(t)
	const (
		join        = `{"type":"join","page":"P"}`
		leave       = `{"type":"leave","page":"P"}`
		subscribe   = `{"type":"subscribe","pages":["P"]}`
		unsubscribe = `{"type":"unsubscribe","pages":["P"]}`
	)
	for name, steps := range map[string][]step{
		"join answers with the joiner":               {{join, []string{"P 1"}}},
		"a join again answers again":                 {{join, []string{"P 1"}}, {join, []string{"P 1"}}},
		"subscribe answers":                          {{subscribe, []string{"P 0"}}},
		"a subscribe again answers again":            {{subscribe, []string{"P 0"}}, {subscribe, []string{"P 0"}}},
		"several at once":                            {{`{"type":"subscribe","pages":["P","Q"]}`, []string{"P 0", "Q 0"}}},
		"none at all":                                {{`{"type":"subscribe","pages":[]}`, nil}, {`{"type":"unsubscribe","pages":[]}`, nil}},
		"twice in one frame":                         {{`{"type":"subscribe","pages":["P","P"]}`, []string{"P 0"}}, {`{"type":"subscribe","pages":["P","P"]}`, []string{"P 0"}}},
		"join after subscribe":                       {{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}},
		"leave ends the join's subscription":         {{join, []string{"P 1"}}, {leave, nil}},
		"leave leaves an own subscription":           {{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}, {leave, []string{"P 0"}}},
		"leave leaves a later own subscription":      {{join, []string{"P 1"}}, {subscribe, []string{"P 1"}}, {leave, []string{"P 0"}}},
		"unsubscribe leaves presence":                {{join, []string{"P 1"}}, {unsubscribe, nil}, {subscribe, []string{"P 1"}}},
		"unsubscribe, then leave":                    {{join, []string{"P 1"}}, {unsubscribe, nil}, {leave, nil}},
		"unsubscribe ends an own one":                {{subscribe, []string{"P 0"}}, {unsubscribe, nil}, {join, []string{"P 1"}}, {leave, nil}},
		"unsubscribe ends both":                      {{subscribe, []string{"P 0"}}, {join, []string{"P 1"}}, {unsubscribe, nil}, {leave, nil}},
		"join after unsubscribe subscribes again":    {{join, []string{"P 1"}}, {unsubscribe, nil}, {join, []string{"P 1"}}},
		"join, leave, join":                          {{join, []string{"P 1"}}, {leave, nil}, {join, []string{"P 1"}}},
		"leaving what is not there is silent":        {{leave, nil}, {unsubscribe, nil}, {`{"type":"unsubscribe","pages":["*"]}`, nil}},
		"leave twice is silent":                      {{join, []string{"P 1"}}, {leave, nil}, {leave, nil}},
		"leave without join keeps a subscription":    {{subscribe, []string{"P 0"}}, {leave, nil}, {join, []string{"P 1"}}},
		"one of the pages is bad: nothing changes":   {{`{"type":"subscribe","pages":["P",""]}`, []string{"bad_page"}}, {join, []string{"P 1"}}, {leave, nil}},
		"the site can be subscribed to, not joined":  {{`{"type":"join","page":"*"}`, []string{"bad_page *"}}},
		"an error names the page":                    {{`{"type":"subscribe","pages":["P","Q\u0007"]}`, []string{"bad_page Q\a"}}},
		"half a surrogate pair":                      {{`{"type":"join","page":"P\ud83d"}`, []string{"bad_page P\uFFFD"}}},
		"errors change nothing and the rest goes on": {{join, []string{"P 1"}}, {`{"type":"leave","page":5}`, []string{"bad_json"}}, {subscribe, []string{"P 1"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := fresh(t)
			p, q := base+" p", base+" q"
			pages := strings.NewReplacer("P", quoted(p)[1:len(quoted(p))-1], "Q", quoted(q)[1:len(quoted(q))-1])
			words := strings.NewReplacer("P", p, "Q", q)
			c := s.ws(t)
			for _, st := range steps {
				c.send(pages.Replace(st.send))
				missing := map[string]bool{}
				for _, w := range st.want {
					missing[words.Replace(w)] = true
				}
				for range st.want {
					f := c.take(fmt.Sprint(st.want))
					got := f.text
					switch {
					case f.Type == "count":
						checkCounter(t, counter{*f.Page, *f.Count, f.UpdatedAt, f.Version, f.Stale})
						got = fmt.Sprintf("%s %d", *f.Page, *f.Count)
					case f.Type == "error" && f.Message != "":
						if got = f.Code; f.Page != nil && missing[f.Code+" "+*f.Page] {
							got += " " + *f.Page
						}
					}
					if !missing[got] {
						t.Fatalf("after %s: want %q, got %s", st.send, st.want, f.text)
					}
					delete(missing, got)
				}
				c.silent()
			}
		})
	}
}

// A connection has 100 pages, each once, however it wants them; what would pass that changes nothing.
func TestServerHundredPages(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	base := fresh(t)
	page := func(i int) string { return fmt.Sprintf("%s/%d", base, i) }
	var all []string
	for i := range 99 {
		all = append(all, page(i))
	}
	for _, p := range all[:49] {
		c.join(p)
		c.awaitCount(p, 1)
	}
	c.subscribe("*")
	c.subscribe(append(all[20:], all[60:]...)...) // known already, or named twice: they do not count twice
	c.awaitCount(page(98), 0)
	refused := func(p string) {
		t.Helper()
		f := c.await("a refusal", func(f frame) bool { return f.Type == "error" || f.isCount(p) })
		if f.Code != "too_many_pages" || f.Page != nil && *f.Page != p {
			t.Errorf("%s: %s", p, f.text)
		}
	}
	c.join(page(100))
	refused(page(100))
	c.unsubscribe(page(98))
	c.subscribe(page(97), page(101), page(102)) // one would fit, not both: nothing changes
	refused(page(102))
	for range 2 {
		c.join(page(101)) // the second time it is one of the 100
		c.awaitCount(page(101), 1)
	}
	c.leave(page(20)) // an own subscription since: still there
	c.awaitCount(page(20), 0)
	c.join(page(102))
	refused(page(102))
	c.unsubscribe(page(20))
	c.join(page(102))
	c.awaitCount(page(102), 1)
}

// Good frames between do not make the server forget errors, of whatever kinds.
func TestServerTwentiethErrorCloses(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	bad := []struct{ frame, code string }{{`{`, "bad_json"}, {`{"type":"x"}`, "bad_type"}, {`{"type":"join","page":""}`, "bad_page"}}
	for i := range 19 {
		c.send(bad[i%3].frame)
		c.takeError(bad[i%3].code)
		c.silent()
	}
	c.send(`{`)
	c.takeError("bad_json")
	c.takeError("too_many_errors")
	c.takeClose(websocket.StatusPolicyViolation)
}
