package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"headcount/client"
	"headcount/internal/setting"
	"headcount/internal/testkit"
)

const answer = `{"at":1900000010000,"region":"us","state":{"level":"bad","text":"The store is away."},
"site":{"page":"*","count":12,"updated_at":null,"version":"0-0"},
"pages":[{"page":"news","count":9},{"page":"a\u001b[2Jb","count":4}],
"processes":[{"name":"gate:1","roles":["gateway"],"since":1900000000000,
"load":{"headcount_connections":5,"headcount_deliveries_total":300,"headcount_client_messages_total":2,
"process_resident_memory_bytes":1048576,"process_cpu_seconds_total":2}},
{"name":"dead:1","roles":["presence"],"since":1899990000000,"load":null}],
"regions":[{"name":"eu","lag":0.25,"heard":2,"left_out":true}],
"events":[{"at":1900000009000,"text":"The store is away."},{"at":1899999950000,"text":"dead:1 has gone."},
{"at":1899999940000,"text":"dead:1 is new."},{"at":1899999930000,"text":"The oldest."}]}`

func serve(t *testing.T, asked *atomic.Int64) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		switch {
		case r.URL.Path != "/-/dashboard/data":
			w.WriteHeader(http.StatusNotFound)
		case r.Header.Get("X-API-Key") != "key":
			w.WriteHeader(http.StatusUnauthorized)
		case r.Header.Get("Headcount-Site") == "other":
			w.WriteHeader(http.StatusForbidden)
		case r.Header.Get("Headcount-Site") != "":
			w.WriteHeader(http.StatusBadRequest)
			_, _ = io.WriteString(w, `{"title":"Bad Request","detail":"There is no such site."}`)
		default:
			_, _ = io.WriteString(w, answer+"\n")
		}
	}))

	t.Cleanup(s.Close)
	return s.URL
}

func TestServerOnce(t *testing.T) {
	var asked atomic.Int64
	url := serve(t, &asked)

	var out bytes.Buffer
	c := Command{URL: url + "/", APIKeys: []string{"key"}, Once: true, JSON: true}
	if err := c.Run(t.Context(), &out); err != nil || out.String() != answer+"\n" {
		t.Errorf("%v\n%s", err, &out)
	}

	// The same answer as text for people.
	out.Reset()
	c.JSON = false
	if err := c.Run(t.Context(), &out); err != nil {
		t.Error(err)
	}

	for _, want := range []string{
		"region us  users here 12", "gate:1", "10s", "1M", "does not answer", "left out of totals",
		"!! The store is away.\n", "2030-03-17 17:45  dead:1 has gone.\n", "The oldest.", "        9  news\n",
		"a\ufffd[2Jb",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the screen lacks %q:\n%s", want, &out)
		}
	}

	if strings.Contains(out.String(), "\x1b") {
		t.Errorf("the name of a page sends commands to the terminal:\n%q", out.String())
	}

	for _, tc := range []struct {
		c    Command
		want string
	}{
		{Command{URL: url, Once: true}, "--api-key"},
		{Command{URL: url, APIKeys: []string{"key"}, Site: "other", Once: true}, "--site"},
		// The keys of the server's settings, of which one is for this site.
		{Command{URL: url, APIKeys: []string{"first", "other:key"}, Site: "other", Once: true}, "--site"},
		{Command{URL: url, APIKeys: []string{"key"}, Site: "none", Once: true}, "400 There is no such site."},
		{Command{URL: url + "/elsewhere", Once: true}, "404"},
		{Command{URL: "ftp://x", Once: true}, "--url"},
		{Command{URL: url, JSON: true}, "--once"},
	} {
		if err := tc.c.Run(t.Context(), &out); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.c, err, tc.want)
		}
	}
}

func TestScreen(t *testing.T) {
	load := func(deliveries, cpu float64) map[string]float64 {
		return map[string]float64{"headcount_deliveries_total": deliveries, "process_cpu_seconds_total": cpu}
	}
	s := screen{
		before: &data{
			At: 1000, Processes: []process{
				{Name: "a", Since: 1, Load: load(100, 1)}, {Name: "again", Since: 1, Load: load(900, 9)},
			},
		},
		now: &data{At: 3000, Processes: []process{
			{Name: "a", Since: 1, Load: load(500, 2)}, {Name: "again", Since: 2, Load: load(5, 0)},
		},
			Pages:  []count{{Page: "one"}, {Page: strings.Repeat("日", 200)}, {Page: "three"}},
			Events: []event{{Text: "e1"}, {Text: "e2"}, {Text: "e3"}, {Text: "e4"}}},
	}

	if some := s.text(80, 24); !strings.Contains(some, "  e3\n") || strings.Contains(some, "e4") ||
		!strings.Contains(some, "three") {
		t.Errorf("a terminal shows the newest events, and pages below them:\n%s", some)
	}

	// Without a terminal everything is drawn. Rates are differences of the two answers.
	whole := s.text(0, 0)
	for _, want := range []string{" 50% ", " 200 ", "three"} {
		if !strings.Contains(whole, want) {
			t.Errorf("the text lacks %q:\n%s", want, whole)
		}
	}

	for line := range strings.Lines(whole) {
		if strings.HasPrefix(line, "again") && strings.Count(line, " -") < 3 {
			t.Errorf("a restarted process has rates: %s", line)
		}
	}

	// On a terminal of any size nothing may scroll or wrap.
	for _, size := range [][2]int{{80, 24}, {20, 9}, {1, 1}} {
		lines := strings.Split(strings.TrimSuffix(s.text(size[0], size[1]), "\n"), "\n")
		if len(lines) > size[1] {
			t.Errorf("%d lines on a screen of %d", len(lines), size[1])
		}
		for _, line := range lines {
			if columns(line) > size[0] {
				t.Errorf("%q is wider than %d", line, size[0])
			}
		}
	}

	if got := (screen{}).text(80, 24); !strings.Contains(got, "asking") {
		t.Errorf("before the first answer the screen is %q", got)
	}
}

// While the server is away the last answer stays on the screen, with the reason. The program keeps asking until its
// context ends.
func TestServerWatch(t *testing.T) {
	var asked atomic.Int64
	var away atomic.Bool
	server := serve(t, &asked)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if away.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}

		http.Redirect(w, r, server+r.URL.Path, http.StatusTemporaryRedirect)
	}))
	defer proxy.Close()

	ctx, cancel := context.WithCancel(t.Context())

	screens := make(chan string)
	out := writer(func(p []byte) (int, error) {
		select {
		case screens <- string(p):
		case <-ctx.Done():
		}
		return len(p), nil
	})

	ended := make(chan error, 1)
	go func() {
		ended <- watch(ctx, client.NewAPI(client.Config{URL: proxy.URL, APIKey: "key"}), time.Millisecond, out,
			func() (int, int) { return 80, 24 })
	}()

	until := func(words ...string) {
		t.Helper()
		testkit.Eventually(t, "a screen with "+strings.Join(words, " and "), func() bool {
			s := <-screens
			if !strings.HasPrefix(s, home) || !strings.HasSuffix(s, restBelow) || strings.Count(s, "\n") > 23 {
				t.Errorf("the screen is drawn as %q", s)
			}
			return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(s, word) })
		})
	}

	until("asking")
	until("region us")

	// A failed answer keeps the last screen.
	away.Store(true)
	until("region us", "502")

	away.Store(false)
	until("region us", "gate:1")

	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestExplained(t *testing.T) {
	for name, tc := range map[string]struct {
		answer, want string
	}{
		"two regions": {
			`{"counter":{"page":"a\u001b[2Jb","count":17},"explain":{"people":12,"connections":19,"held":1,` +
				`"leaving":2,"ignored":3,"regions":{"us":5,"eu":12},"moving":false}}`,
			"a\ufffd[2Jb: 17\n       12  from the region eu\n        5  from the region us\nIn the region of this " +
				"server: 12 people\n" +
				"        9  with a connection (19 connections)\n        1  by a hold alone\n        2  whose last " +
				"connection is gone, in their grace\n" +
				"Not counted: 3 connections of crawlers\nNothing moves: the parts add up to the count.\n",
		},
		"moving": {
			`{"counter":{"page":"p"},"explain":{"moving":true}}`,
			"p: 0\nIn the region of this server: 0 people\n        0  with a connection (0 connections)\n        0  " +
				"by a hold alone\n" +
				"        0  whose last connection is gone, in their grace\nNot counted: 0 connections of crawlers\n" +
				"Changes are under way, so the parts may not add up yet. Ask again.\n",
		},
	} {
		var is explained
		if err := json.Unmarshal([]byte(tc.answer), &is); err != nil {
			t.Fatal(err)
		}

		if got := is.text(); got != tc.want {
			t.Errorf("%s:\n%s", name, got)
		}
	}

	for _, c := range []Explain{{URL: "http://127.0.0.1:1"}, {Page: "p", URL: "ftp://127.0.0.1"}} {
		if err := c.Run(t.Context(), io.Discard); !errors.As(err, new(*setting.Error)) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}
