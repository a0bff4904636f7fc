package simulate

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func TestParseLine(t *testing.T) {
	at := time.Date(2015, 5, 17, 10, 5, 3, 0, time.UTC)
	const head, tail = `1.2.3.4 - - [17/May/2015:10:05:03 +0000] `, ` 200 203023`
	for name, tc := range map[string]struct {
		line string
		want request
	}{
		"common": {head + `"GET /a HTTP/1.0"` + tail, request{"1.2.3.4", "", "/a", at}},
		"combined": {
			head + `"GET /a HTTP/1.1"` + tail + ` "http://x/" "Mozilla (x; y)"`,
			request{"1.2.3.4", "Mozilla (x; y)", "/a", at},
		},
		"more fields": {
			head + `"GET /a HTTP/1.1"` + tail + ` "-" "M" "10.0.0.1" 0.003`, request{"1.2.3.4", "M", "/a", at},
		},
		"no size": {head + `"HEAD / HTTP/1.1" 304 -`, request{"1.2.3.4", "", "/", at}},
		"a user": {
			`::1 id Ann B. [17/May/2015:12:05:03 +0200] "GET / HTTP/1.1"` + tail,
			request{"::1", "", "/", at.In(time.FixedZone("", 7200))},
		},
		"query is left out":  {head + `"GET /a?b=/c?d HTTP/1.1"` + tail, request{"1.2.3.4", "", "/a", at}},
		"escapes stay":       {head + `"GET /a%20b+c HTTP/1.1"` + tail, request{"1.2.3.4", "", "/a%20b+c", at}},
		"spaces in the path": {head + `"GET /a b c HTTP/1.1"` + tail, request{"1.2.3.4", "", "/a b c", at}},
		"no protocol":        {head + `"GET /a"` + tail, request{"1.2.3.4", "", "/a", at}},
		"as proxies ask":     {head + `"GET http://h:80/a?b HTTP/1.1"` + tail, request{"1.2.3.4", "", "/a", at}},
		"a URL in the path": {
			head + `"GET /to/http://h/a HTTP/1.1"` + tail, request{"1.2.3.4", "", "/to/http://h/a", at},
		},
		"options": {head + `"OPTIONS * HTTP/1.0"` + tail, request{"1.2.3.4", "", "*", at}},
		"escaped quotes": {
			head + `"GET /a\"b HTTP/1.1"` + tail + ` "-" "a \"b\" c"`, request{"1.2.3.4", `a \"b\" c`, `/a\"b`, at},
		},
		"bytes, no UTF-8": {head + "\"GET /\xe8\xf1 HTTP/1.1\"" + tail, request{"1.2.3.4", "", "/\uFFFD", at}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseLine(tc.line)
			if err != nil || got.address != tc.want.address || got.agent != tc.want.agent || got.page != tc.want.page ||
				!got.at.Equal(tc.want.at) {
				t.Errorf("parseLine(%q) = %+v, %v", tc.line, got, err)
			}
		})
	}

	for _, bad := range []string{
		"", "-", "1.2.3.4", "1.2.3.4 - - 17/May/2015", head, head + `"GET /a`, head + `"GET /a HTTP/1.1"`,
		head + `"-" 408 0`,
		head + `"" 400 0`, head + `"\x16\x03" 400 0`, head + `"GET ?a HTTP/1.1"` + tail,
		head + `"GET /a HTTP/1.1" OK 1`, head + `"GET /a HTTP/1.1" 200 x`,
		head + `"GET /a HTTP/1.1"` + tail + ` "-" "no end`, head + `"GET /a HTTP/1.1"` + tail + ` no quotes`,
		head + `"GET /a HTTP/1.1"` + tail + ` "-"`,
		`1.2.3.4 - - [32/May/2015:10:05:03 +0000] "GET /a HTTP/1.1"` + tail,
	} {
		if got, err := parseLine(bad); !errors.Is(err, errLine) {
			t.Errorf("parseLine(%q) = %+v, %v", bad, got, err)
		}
	}
}

func FuzzParseLine(f *testing.F) {
	f.Add(`83.149.9.216 - - [17/May/2015:10:05:03 +0000] "GET /a%20b?x=y HTTP/1.1" 200 203023 "http://a/" ` +
		`"Mozilla/5.0 (X)"`)
	f.Add(`::1 - frank [10/Oct/2000:13:55:36 -0700] "OPTIONS * HTTP/1.0" 200 -`)
	f.Add(`1.2.3.4 - - [10/Oct/2000:13:55:36 -0700] "GET http://h" 200 1 "\"" "\\"`)
	f.Add("1.2.3.4 - - [10/Oct/2000:13:55:36 -0700] \"GET /\xff?\" 200 1")
	f.Add(`" [] "`)

	f.Fuzz(func(t *testing.T, line string) {
		req, err := parseLine(line)
		if err != nil {
			if !errors.Is(err, errLine) || req != (request{}) {
				t.Errorf("parseLine(%q) = %+v, %v", line, req, err)
			}

			return
		}

		noTime := req.at.IsZero() && !strings.Contains(line, "0001") // the year 1 is a valid time
		if req.address == "" || req.page == "" || strings.Contains(req.page, "?") || noTime {
			t.Errorf("parseLine(%q) = %+v", line, req)
		}
	})
}

func TestReadLog(t *testing.T) {
	const line = `1.2.3.4 - - [17/May/2015:10:05:03 +0000] "GET /a HTTP/1.1" 200 1` + "\n"
	long := strings.Repeat("x", 3*maxLine) + "\n"

	requests, lines, bad, err := readLog(strings.NewReader(line + "\n" + long + line + strings.TrimSuffix(line, "\n")))
	if err != nil || len(requests) != 3 || lines != 5 || bad != 2 {
		t.Errorf("readLog = %d requests, %d lines, %d bad, %v", len(requests), lines, bad, err)
	}
}

func TestSchedule(t *testing.T) {
	start := time.Date(2015, 5, 17, 0, 0, 0, 0, time.UTC)
	ask := func(address string, after time.Duration, page string) request {
		return request{address: address, page: page, at: start.Add(after)}
	}

	r := schedule([]request{
		ask("b", 20*time.Second, "/1"), // not in order
		ask("a", 0, "/1"),
		ask("a", time.Minute, "/2"),    // exactly the dwell time later: the visitor stays
		ask("a", 3*time.Minute, "/3"),  // the visitor comes back
		ask("b", 30*time.Second, "/1"), // the same page again
	}, time.Minute)

	want := []event{
		{0, 0, "/1", false}, {20 * time.Second, 1, "/1", false}, {30 * time.Second, 1, "/1", false},
		{time.Minute, 0, "/2", false},
		{90 * time.Second, 1, "", true}, {2 * time.Minute, 0, "", true}, {3 * time.Minute, 0, "/3", false},
		{4 * time.Minute, 0, "", true},
	}

	if !slices.Equal(r.events, want) || r.tally.Visits != 3 || r.tally.MostPresent != 2 || r.end != 4*time.Minute {
		t.Errorf("schedule: %+v, %+v", r.events, r.tally)
	}
}

// A visitor comes before leaving, leaves in the end, and is never present for longer than the dwell time after a
// request.
func TestScheduleIsWellFormed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		start := time.Date(2015, 5, 17, 0, 0, 0, 0, time.UTC)
		dwell := time.Duration(rapid.IntRange(1, 50).Draw(t, "dwell"))
		requests := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) request {
			return request{
				address: rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "address"),
				page:    rapid.SampledFrom([]string{"/1", "/2", "*"}).Draw(t, "page"),
				at:      start.Add(time.Duration(rapid.IntRange(0, 300).Draw(t, "at"))),
			}
		}), 1, 60).Draw(t, "requests")

		present, last := map[int]bool{}, map[int]time.Duration{}
		var before time.Duration

		for _, s := range schedule(requests, dwell).events {
			if s.at < before {
				t.Fatalf("event %+v is out of order", s)
			}
			before = s.at
			since := last[s.visitor]
			if s.leaves && (!present[s.visitor] || s.at != since+dwell) {
				t.Fatalf("event %+v: present %v since %v", s, present, last)
			}
			if !s.leaves && present[s.visitor] && s.at > since+dwell {
				t.Fatalf("event %+v: the visitor should have left before", s)
			}

			present[s.visitor] = !s.leaves
			if !s.leaves {
				last[s.visitor] = s.at
			}
		}

		for v, there := range present {
			if there {
				t.Fatalf("visitor %d never leaves", v)
			}
		}
	})
}

// The truth equals what a list of open tabs says, whatever the users do.
func TestTruthIsTheTabsThatAreOpen(t *testing.T) {
	type tab struct {
		user *user
		page string
	}
	users := []*user{newUser("a"), newUser("b"), newUser("c")}
	pages := []string{"/1", "/2", "/3", "*", strings.Repeat("x", 129)}

	rapid.Check(t, func(t *rapid.T) {
		truth := newTruth()

		var open []tab
		t.Repeat(map[string]func(*rapid.T){
			"enter": func(t *rapid.T) {
				tab := tab{rapid.SampledFrom(users).Draw(t, "user"), rapid.SampledFrom(pages).Draw(t, "page")}
				open = append(open, tab)
				truth.enter(tab.user, tab.page)
			},

			"exit": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip("the history has no users")
				}

				i := rapid.IntRange(0, len(open)-1).Draw(t, "tab")
				truth.exit(open[i].user, open[i].page)
				open = slices.Delete(open, i, i+1)
			},
			"exit of a user without tabs": func(t *rapid.T) { truth.exit(newUser("d"), "/1") },
			"": func(t *rapid.T) {
				there := map[string]map[*user]bool{wholeSite: {}}
				for _, tab := range open {
					if !validPage(tab.page) {
						continue // the truth ignores this, as the server does
					}

					if there[tab.page] == nil {
						there[tab.page] = map[*user]bool{}
					}
					there[tab.page][tab.user], there[wholeSite][tab.user] = true, true
				}

				// Users are counted once on each page and once on the site, however many tabs they have.
				for _, page := range pages {
					if got := truth.count(page); got != int64(len(there[page])) {
						t.Fatalf("page %q: truth is %d, open tabs say %d", page, got, len(there[page]))
					}
				}
			},
		})
	})
}

func TestLatencies(t *testing.T) {
	var empty latencies
	if empty.ms(0.5) != 0 || empty.ms(1) != 0 || empty.count() != 0 {
		t.Error("nothing has quantiles")
	}

	var l latencies
	for i := range 1000 {
		l.add(time.Duration(1000-i) * time.Millisecond)
	}

	for q, want := range map[float64]float64{0: 1, 0.5: 501, 0.99: 991, 1: 1000} {
		if got := l.ms(q); got != want {
			t.Errorf("quantile %v = %v ms, want %v", q, got, want)
		}
	}

	// A full reservoir keeps only a part of the samples.
	for range 2 * maxLatencies {
		l.add(2 * time.Second)
	}

	if len(l.kept) != maxLatencies || l.count() != 1000+2*maxLatencies || l.ms(0.5) != 2000 || l.ms(1) != 2000 {
		t.Errorf("%d of %d are kept; median %v, longest %v", len(l.kept), l.count(), l.ms(0.5), l.ms(1))
	}
}

func TestValidPage(t *testing.T) {
	for _, page := range []string{
		"a", "/", "a b", " ", "/a%2Fb?c#d", "Ünïcode 日本 ½ €", "e\u0301", "👩\u200d💻", "a\u200cb",
		strings.Repeat("é", 128), "...", "--",
	} {
		if !validPage(page) {
			t.Errorf("%q is refused", page)
		}
	}

	for _, page := range []string{
		"", "*", "-", ".", "..", strings.Repeat("a", 129), "a\x00", "a\tb", "a\n", "a\u00a0b", "\u200da", "a\u200c",
		"a\u202eb", "\ufeffa", "\ufffd", "\xff", "a\u2028",
	} {
		if validPage(page) {
			t.Errorf("%q is accepted", page)
		}
	}
}

func TestUsersHaveOneIdentity(t *testing.T) {
	u := newUser("x")
	id, release, err := u.claim(t.Context())
	if id != "" || err != nil {
		t.Fatalf("claim = %q, %v", id, err)
	}

	// The other tabs wait until the first tab has an id.
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, _, err := u.claim(gone); err == nil {
		t.Error("a second tab did not wait for the first one")
	}

	if ok, renamed := u.acceptWelcome("", "u1", "u1.a"); !ok || renamed {
		t.Error("the first id was not adopted")
	}
	release()
	release() // a second call has no effect
	if id, _, _ := u.claim(t.Context()); id != "u1.a" {
		t.Errorf("the second tab got %q", id)
	}

	if ok, renamed := u.acceptWelcome("u1.a", "u1", "u1.b"); !ok || renamed || u.signed() != "u1.b" {
		t.Error("a new signature of the same user was not accepted")
	}

	// The server forgot the user, and two tabs notice: the id that the first one gets is the user's new one.
	if ok, renamed := u.acceptWelcome("u1.b", "u2", "u2.c"); !ok || !renamed {
		t.Error("the new id of the first tab that noticed was not adopted")
	}
	if ok, _ := u.acceptWelcome("u1.b", "u3", "u3.c"); ok || u.signed() != "u2.c" {
		t.Error("the second tab that noticed must dial again with the user's new id")
	}
}

func TestReportReadsWell(t *testing.T) {
	r := Report{
		Scenario: "mixed", Checkpoints: []Checkpoint{{Name: "final", Users: 3}},
		Wrong: []string{`page "p": 1, true is 2`}, WrongCounts: 1,
		ErrorFrames: map[string]int64{"bad_page": 2}, RefusedJoins: 2, JoinToSeen: Latency{Samples: 1},
		Churn: &ChurnReport{}, Replay: &ReplayReport{},
	}

	text := r.text()
	for _, want := range []string{
		"3 users", `WRONG          page "p": 1, true is 2`, "wrong counts   1\n", "2 joins refused", "whole site",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the report lacks %q:\n%s", want, text)
		}
	}

	var out bytes.Buffer
	if err := r.write(&out, true); err != nil || bytes.Count(out.Bytes(), []byte("\n")) != 1 ||
		!json.Valid(out.Bytes()) {
		t.Errorf("JSON: %v %s", err, out.String())
	}
}

// A client may see any value that was true at some moment since its last change.
func TestDistanceFromTheTruth(t *testing.T) { synctest.Test(t, distanceFromTheTruth) }

func distanceFromTheTruth(t *testing.T) {
	tr := newTruth()
	a := newUser("a")
	b := newUser("b")
	c := newUser("c")

	start := time.Now()
	tr.enter(a, "p")
	tr.enter(b, "p")

	time.Sleep(time.Millisecond)
	later := time.Now()
	time.Sleep(time.Millisecond)

	tr.exit(a, "p")
	tr.enter(c, "p")
	time.Sleep(time.Millisecond)
	// User b stayed, a left and c came: since the moment later any count from 1 to 3 was possible.

	for _, tc := range []struct {
		n     int64
		since time.Time
		want  int64
	}{
		{0, start, 0}, {3, start, 0}, {4, start, 1}, {0, later, 1}, {1, later, 0}, {3, later, 0}, {5, later, 2},
		{3, time.Now(), 1}, {2, time.Now(), 0},
	} {
		if got := tr.distance("p", tc.n, tc.since); got != tc.want {
			t.Errorf("distance of %d since %s is %d, want %d", tc.n, tc.since.Sub(start), got, tc.want)
		}
	}
}
