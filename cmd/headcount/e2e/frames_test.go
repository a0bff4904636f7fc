package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

func TestWelcome(t *testing.T) {
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

func TestFrames(t *testing.T) {
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
		"unknown members are ignored":                {{`{"extra":{"page":1},"type":"join","page":"P","pages":7,"x":null}`, []string{"P 1"}}},
		"space around":                               {{" \r\n\t{ \"type\" : \"join\" , \"page\" : \"P\" } \n", []string{"P 1"}}},
		"escapes":                                    {{`{"\u0074ype":"jo\u0069n","page":"P\u0020\ud83d\ude00"}`, []string{"P 😀 1"}}},
		"heartbeat with members":                     {{`{"type":"heartbeat","page":5}`, []string{`{"type":"heartbeat"}`}}},
		"not JSON":                                   {{`hello`, []string{"bad_json"}}},
		"nothing":                                    {{``, []string{"bad_json"}}},
		"precision a string":                         {{`{"type":"subscribe","pages":["P"],"precision":"2"}`, []string{"bad_json"}}},
		"no digits":                                  {{`{"type":"subscribe","pages":["P"],"precision":0}`, []string{"bad_json"}}},
		"half a digit":                               {{`{"type":"subscribe","pages":["P"],"precision":1.5}`, []string{"bad_json"}}},
		"ten digits":                                 {{`{"type":"subscribe","pages":["P"],"precision":10}`, []string{"bad_json"}}},
		"nine digits":                                {{`{"type":"subscribe","pages":["P"],"precision":9}`, []string{"P 0"}}},
		"half of it":                                 {{`{"type":"join","page":"P"`, []string{"bad_json"}}},
		"two of them":                                {{join + join, []string{"bad_json"}}},
		"an array":                                   {{`[` + join + `]`, []string{"bad_json"}}},
		"a string":                                   {{`"join"`, []string{"bad_json"}}},
		"null":                                       {{`null`, []string{"bad_json"}}},
		"a number":                                   {{`1`, []string{"bad_json"}}},
		"type null":                                  {{`{"type":null,"page":"P"}`, []string{"bad_json"}}},
		"type a number":                              {{`{"type":1,"page":"P"}`, []string{"bad_json"}}},
		"type a list":                                {{`{"type":["join"],"page":"P"}`, []string{"bad_json"}}},
		"page null":                                  {{`{"type":"join","page":null}`, []string{"bad_json"}}},
		"page a number":                              {{`{"type":"join","page":1}`, []string{"bad_json"}}},
		"page a list":                                {{`{"type":"leave","page":["P"]}`, []string{"bad_json"}}},
		"page an object":                             {{`{"type":"leave","page":{}}`, []string{"bad_json"}}},
		"page true":                                  {{`{"type":"join","page":true}`, []string{"bad_json"}}},
		"pages null":                                 {{`{"type":"subscribe","pages":null}`, []string{"bad_json"}}},
		"pages a string":                             {{`{"type":"subscribe","pages":"P"}`, []string{"bad_json"}}},
		"pages with a number":                        {{`{"type":"subscribe","pages":["P",1]}`, []string{"bad_json"}}},
		"pages with null":                            {{`{"type":"unsubscribe","pages":["P",null]}`, []string{"bad_json"}}},
		"pages an object":                            {{`{"type":"subscribe","pages":{"0":"P"}}`, []string{"bad_json"}}},
		"no type":                                    {{`{"page":"P"}`, []string{"bad_type"}}},
		"an empty object":                            {{`{}`, []string{"bad_type"}}},
		"an empty type":                              {{`{"type":""}`, []string{"bad_type"}}},
		"an unknown type":                            {{`{"type":"dance","page":"P"}`, []string{"bad_type"}}},
		"a type of the server":                       {{`{"type":"count","page":"P","count":5}`, []string{"bad_type"}}},
		"types are case-sensitive":                   {{`{"type":"Join","page":"P"}`, []string{"bad_type"}}},
		"member names are case-sensitive: type":      {{`{"Type":"join","page":"P"}`, []string{"bad_type"}}},
		"member names are case-sensitive: both":      {{`{"TYPE":"leave","type":"join","Page":"Q","page":"P"}`, []string{"P 1"}}},
		"member names are case-sensitive: after":     {{`{"type":"join","page":"P","Page":"Q","PAGE":1,"Type":"leave"}`, []string{"P 1"}}},
		"no page":                                    {{`{"type":"join"}`, []string{"bad_page"}}},
		"page under another name":                    {{`{"type":"join","Page":"P"}`, []string{"bad_page"}}},
		"no pages":                                   {{`{"type":"subscribe","page":"P"}`, []string{"bad_page"}}},
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

// An error names the page that caused it, and other errors name none.
func TestErrorsNameThePageAtFault(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	long := strings.Repeat("x", 129)
	c.join(long)
	if f := c.takeError("bad_page"); f.Page == nil || !strings.HasPrefix(long, *f.Page) || *f.Page == "" {
		t.Errorf("%s", f.text)
	}
	c.join("-")
	if f := c.takeError("bad_page"); f.Page == nil || *f.Page != "-" {
		t.Errorf("%s", f.text)
	}
	c.send(`{"type":"join","page":""}`)
	if f := c.takeError("bad_page"); f.Page == nil || *f.Page != "" {
		t.Errorf("%s", f.text)
	}
	for _, text := range []string{`x`, `{"type":"join","page":1}`, `{"type":"x","page":"p"}`} {
		c.send(text)
		if f := c.take("error"); f.Type != "error" || f.Page != nil {
			t.Errorf("after %s: %s", text, f.text)
		}
	}
}

func TestSite(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s", "--update-interval=10ms")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("*")
	if f := watcher.takeCount("*", 0); f.UpdatedAt != nil || f.Version != "0-0" {
		t.Errorf("nobody was ever here: %s", f.text)
	}
	p, q := fresh(t), fresh(t)
	a.join(p)
	a.takeCount(p, 1)
	watcher.takeCount("*", 1)
	a.join(q) // the same user on another page is no other user
	a.takeCount(q, 1)
	b := s.ws(t)
	b.join(q)
	b.takeCount(q, 2)
	watcher.takeCount("*", 2)
	a.leave(p)
	a.leave(q)
	watcher.takeCount("*", 1)
	b.close()
	watcher.takeCount("*", 0)
	if got := s.count(t, "*"); got != 0 {
		t.Errorf("GET says %d", got)
	}
}

func TestHundredPages(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	base := fresh(t)
	page := func(i int) string { return fmt.Sprintf("%s/%d", base, i) }
	c.subscribe("*")
	c.take("count of the site")
	var joined []string
	for i := range 49 {
		c.join(page(i))
		c.awaitCount(page(i), 1)
		joined = append(joined, page(i))
	}
	c.subscribe(joined...) // known already: they do not count twice
	var more []string
	for i := 49; i < 99; i++ {
		more = append(more, page(i))
	}
	c.subscribe(more[:25]...)
	c.subscribe(append(more, more...)...) // duplicates once: exactly 100 with the site
	seen := map[string]bool{}
	c.await("counts of all", func(f frame) bool {
		if f.Type == "count" && *f.Page != "*" {
			seen[*f.Page] = true
		}
		return len(seen) == 99
	})
	c.skim()
	news := func(fs []frame) (rest []frame) { // other tests come and go on the site, and a busy client is told again what it has
		for _, f := range fs {
			if f.Type != "count" || f.Page != nil && slices.Contains([]string{page(100), page(101), page(102)}, *f.Page) {
				rest = append(rest, f)
			}
		}
		return rest
	}
	refused := func(what string, page string) {
		t.Helper()
		fs := news(c.skim())
		if len(fs) != 1 || fs[0].Type != "error" || fs[0].Code != "too_many_pages" {
			t.Fatalf("%s: %v", what, fs)
		}
		if page != "" && (fs[0].Page == nil || *fs[0].Page != page) {
			t.Errorf("%s: no page in %s", what, fs[0].text)
		}
	}
	c.join(page(100))
	refused("a join of the 101st", page(100))
	c.subscribe(page(100))
	refused("a subscribe of the 101st", "")
	c.unsubscribe(page(98))
	c.subscribe(page(97), page(101), page(102)) // one would fit, not both: nothing changes
	refused("a subscribe that would pass 100", "")
	c.join(page(101))
	c.awaitCount(page(101), 1)
	c.join(page(101)) // still 100
	c.awaitCount(page(101), 1)
	c.join(page(102))
	refused("another 101st", page(102))
	c.leave(page(0)) // an own subscription since: still there
	c.awaitCount(page(0), 0)
	c.join(page(102))
	refused("a join after a leave of what is subscribed to as well", page(102))
	c.unsubscribe(page(0))
	c.join(page(102))
	c.awaitCount(page(102), 1)
}

func TestSizesAndEncodings(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	bystander := s.ws(t)
	bystander.join(page)
	bystander.takeCount(page, 1)

	padded := func(n int) string {
		m := `{"type":"heartbeat","pad":"`
		return m + strings.Repeat("x", n-len(m)-2) + `"}`
	}
	t.Run("4096 bytes", func(t *testing.T) {
		c := s.ws(t)
		c.send(padded(4096))
		if f := c.take("heartbeat"); f.Type != "heartbeat" {
			t.Errorf("%s", f.text)
		}
	})
	for name, write := range map[string]func(*rawSocket){
		"4097 bytes":             func(w *rawSocket) { w.send(0x81, padded(4097)) },
		"4097 bytes of a binary": func(w *rawSocket) { w.send(0x82, padded(4097)) },
		"in two fragments": func(w *rawSocket) {
			w.send(0x01, padded(4097)[:4000])
			w.send(0x80, padded(4097)[4000:])
		},
		"in many fragments": func(w *rawSocket) {
			w.send(0x01, "")
			for range 41 {
				w.send(0x00, strings.Repeat("x", 100))
			}
		},
		"a length of a terabyte": func(w *rawSocket) {
			_, _ = w.Write([]byte{0x81, 0xff, 0, 0, 1, 0, 0, 0, 0, 0, 1, 2, 3, 4})
			_, _ = w.Write(make([]byte, 5000))
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := s.rawWS(t, 0)
			w.t = t
			write(w)
			code, texts := w.closing()
			if code != 1009 || len(texts) != 3 || !strings.HasPrefix(texts[2], `{"type":"error","code":"too_large","message":"`) {
				t.Errorf("close %d after %q", code, texts)
			}
		})
	}
	t.Run("fragments and pings between", func(t *testing.T) {
		w := s.rawWS(t, 0)
		w.t = t
		w.send(0x01, `{"type":`)
		w.send(0x89, "how are you")
		w.send(0x00, ``)
		w.send(0x80, `"heartbeat"}`)
		var got []string
		for len(got) < 4 {
			first, payload, err := w.frame()
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, fmt.Sprintf("%x %s", first, payload))
		}
		if got[2] != "8a how are you" || got[3] != `81 {"type":"heartbeat"}` {
			t.Errorf("%q", got)
		}
	})
	for name, write := range map[string]func(*rawSocket){
		"invalid UTF-8":              func(w *rawSocket) { w.send(0x81, "{\"type\":\"join\",\"page\":\"\xff\"}") },
		"an encoded surrogate":       func(w *rawSocket) { w.send(0x81, "{\"type\":\"join\",\"page\":\"\xed\xa0\x80\"}") },
		"overlong":                   func(w *rawSocket) { w.send(0x81, "{\"type\":\"join\",\"page\":\"\xc0\x80\"}") },
		"half a character":           func(w *rawSocket) { w.send(0x81, "\xe2\x82") },
		"invalid in a fragment":      func(w *rawSocket) { w.send(0x01, "\"\xe2\x82"); w.send(0x80, "x\"") },
		"in what is no JSON anyway":  func(w *rawSocket) { w.send(0x81, "\xff\xfe\xfd") },
		"in a member nobody asks of": func(w *rawSocket) { w.send(0x81, "{\"type\":\"heartbeat\",\"x\":\"\x80\"}") },
	} {
		t.Run(name, func(t *testing.T) {
			w := s.rawWS(t, 0)
			w.t = t
			write(w)
			if code, texts := w.closing(); code != 1007 {
				t.Errorf("close %d after %q", code, texts)
			}
		})
	}
	t.Run("a character in two fragments", func(t *testing.T) {
		w := s.rawWS(t, 0)
		w.t = t
		w.send(0x01, "{\"type\":\"heartbeat\",\"x\":\"\xe2\x82")
		w.send(0x80, "\xac\"}")
		for range 2 {
			_, _, _ = w.frame()
		}
		if _, payload, err := w.frame(); string(payload) != `{"type":"heartbeat"}` {
			t.Errorf("%s %v", payload, err)
		}
	})
	t.Run("binary", func(t *testing.T) {
		c := s.ws(t)
		c.write(websocket.MessageBinary, []byte(`{"type":"heartbeat"}`))
		c.takeError("binary")
		c.write(websocket.MessageBinary, []byte("\xff\x00"))
		c.takeError("binary")
		c.silent() // and stays open
	})
	bystander.silent() // and saw nothing of all this
}

func TestTwentiethErrorCloses(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	bystander := s.ws(t)
	bystander.join(page)
	bystander.takeCount(page, 1)
	c := s.ws(t)
	c.join(page)
	c.takeCount(page, 2)
	bystander.takeCount(page, 2)
	for i := range 19 {
		switch i % 4 {
		case 0:
			c.send(`{`)
			c.takeError("bad_json")
		case 1:
			c.send(`{"type":"x"}`)
			c.takeError("bad_type")
		case 2:
			c.join("")
			c.takeError("bad_page")
		case 3:
			c.write(websocket.MessageBinary, nil)
			c.takeError("binary")
		}
		c.silent() // still there, and good frames do not make it forget
	}
	c.send(`{`)
	c.takeError("bad_json")
	c.takeError("too_many_errors")
	c.takeClose(websocket.StatusPolicyViolation)
	if f := bystander.awaitCount(page, 1); f.Type != "count" {
		t.Error(f.text)
	}
	bystander.silent()
}
