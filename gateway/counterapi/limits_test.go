package counterapi

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"headcount/counter"
	"headcount/counter/countertest"
)

// limited is the answer to a call on a limit.
type limited struct {
	Allowed    bool
	Limit      int64
	Remaining  int64
	ResetAfter int64 `json:"reset_after_ms"`
}

var limitBody = regexp.MustCompile(`^\{"allowed":(true|false),"limit":\d+,"remaining":\d+,"reset_after_ms":\d+\}\n$`)

// parseLimit checks the form of an answer, and that its headers agree with its body.
func parseLimit(t *testing.T, w *httptest.ResponseRecorder, window int64) (got limited) {
	t.Helper()
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || !limitBody.MatchString(w.Body.String()) {
		t.Fatalf("%d %s", w.Code, w.Body)
	}

	h, wait := w.Header(), strconv.FormatInt((got.ResetAfter+999)/1000, 10)
	retry := wait
	if got.Allowed {
		retry = "" // an allowed call need not be tried again
	}

	for name, want := range map[string]string{
		"RateLimit":        fmt.Sprintf(`"default";r=%d;t=%s`, got.Remaining, wait),
		"RateLimit-Policy": fmt.Sprintf(`"default";q=%d;w=%d`, got.Limit, window),
		"Retry-After":      retry, "Content-Type": "application/json", "Cache-Control": "no-store",
	} {
		if is := strings.Join(h[name], ","); is != want {
			t.Errorf("%s of a %d: %q, want %q", name, w.Code, is, want)
		}
	}

	if status := map[bool]int{true: 200, false: 429}[got.Allowed]; w.Code != status {
		t.Errorf("the status is %d, want %d for %s", w.Code, status, w.Body)
	}

	return got
}

func TestLimits(t *testing.T) {
	s := serve(t, nil)
	const day = 24 * 60 * 60

	for i, step := range []struct {
		key, body string
		window    int64
		want      limited // without the time
	}{
		{"a", `{"limit":100,"window":"31d"}`, 31 * day, limited{true, 100, 99, 0}},
		{"a", `{"limit":100,"window":"31d","cost":43,"algorithm":"sliding"}`, 31 * day, limited{true, 100, 56, 0}},
		{"a", `{"limit":100,"window":"31d","cost":57}`, 31 * day, limited{false, 100, 56, 0}},
		{"a", `{"limit":100,"window":"31d","cost":56}`, 31 * day, limited{true, 100, 0, 0}},
		{"a", `{"algorithm":"fixed","window":"31d","limit":100}`, 31 * day, limited{true, 100, 99, 0}},
		{"a", `{"limit":100,"window":"31d","algorithm":"log"}`, 31 * day, limited{true, 100, 99, 0}},
		{"a", `{"limit":10000,"window":"744h","algorithm":"log","cost":9999}`, 31 * day, limited{true, 10000, 0, 0}},
		{"a", `{"limit":100,"window":"30d"}`, 30 * day, limited{true, 100, 99, 0}},
		{"no%20rule%2Ffits", `{"limit":1000000000000,"window":"1m"}`, 60, limited{true, 1e12, 1e12 - 1, 0}},
		{"b", `{"limit":1,"window":"1.5s"}`, 2, limited{true, 1, 0, 0}},
	} {
		// All steps have the same Idempotency-Key, which means nothing to a limit: asking twice costs twice.
		got := parseLimit(t, s.do("POST "+limitsRoot+"/"+step.key, step.body, key, "Idempotency-Key: x"), step.window)

		if got.ResetAfter <= 0 || got.ResetAfter > 2000*step.window {
			t.Errorf("step %d: all is back only after %d ms", i, got.ResetAfter)
		}

		got.ResetAfter = 0
		if got != step.want {
			t.Errorf("step %d: %+v, want %+v", i, got, step.want)
		}
	}
}

// TestLimitsAreLookedAtAndGivenBack: a cost of 0 changes nothing. A negative cost gives back at most what was taken. A
// deleted limit begins anew.
func TestLimitsAreLookedAtAndGivenBack(t *testing.T) {
	for _, algorithm := range []string{"fixed", "sliding", "log"} {
		t.Run(algorithm, func(t *testing.T) {
			s := serve(t, nil)
			ask := func(cost int) limited {
				t.Helper()
				body := fmt.Sprintf(`{"limit":10,"window":"31d","algorithm":%q,"cost":%d}`, algorithm, cost)
				got := parseLimit(t, s.do("POST "+limitsRoot+"/k", body, key), 31*24*60*60)
				// Nothing has to come back exactly when nothing was taken.
				if (got.ResetAfter == 0) != (got.Remaining == 10) {
					t.Errorf("of 10 remain %d, and all are back in %d ms", got.Remaining, got.ResetAfter)
				}

				got.ResetAfter = 0

				return got
			}

			forget := func() {
				t.Helper()
				if w := s.do("DELETE "+limitsRoot+"/k", "", key); w.Code != 204 || w.Body.Len() > 0 {
					t.Errorf("DELETE is answered %d %s, want 204", w.Code, w.Body)
				}
			}

			forget() // of a limit that was never used
			for _, step := range []struct {
				cost, remaining int
				allowed         bool
			}{
				{0, 10, true}, {-3, 10, true}, {7, 3, true}, {0, 3, true}, {4, 3, false}, {0, 3, true}, {-2, 5, true},
				{-100, 10, true},
				{10, 0, true}, {0, 0, true},
			} {
				want := limited{step.allowed, 10, int64(step.remaining), 0}
				if got := ask(step.cost); got != want {
					t.Fatalf("a cost of %d: %+v, want %+v", step.cost, got, want)
				}
			}

			forget()
			forget()
			if got := ask(0); got.Remaining != 10 {
				t.Errorf("after the deletion the limit is %+v, want all 10", got)
			}
		})
	}
}

func TestProblemsOfLimits(t *testing.T) {
	s := serve(t, nil)
	const good, path = `{"limit":100,"window":"1m"}`, "POST " + limitsRoot + "/k"
	long, many := strings.Repeat("k", 129), strings.Repeat(" ", MaxBody+1)
	for _, tc := range []struct {
		call, body string
		lines      []string
		status     int
		detail     string
	}{
		{"POST " + limitsRoot + "/" + long, "{", []string{"X-API-Key: x"}, 401, "API key"},
		{"POST " + limitsRoot + "/" + long, "{", nil, 400, "128 characters"},
		{"POST " + limitsRoot + "/a*", good, []string{key}, 400, "Send 1 to 128"},
		{"POST " + limitsRoot + "/-", good, []string{key}, 400, "Send 1 to 128"},
		{path, many, nil, 403, "send an API key"},
		{path, good, []string{"User: ann"}, 403, "send an API key"},
		{path, many, []string{key}, 413, "262144"},
		{path, good, []string{key, "Content-Type: text/plain"}, 415, "application/json"},
		{path, "", []string{key}, 400, "want an object"},
		{path, good + "x", []string{key}, 400, "nothing more"},
		{path, `{"window":"1m"}`, []string{key}, 400, "limit: send a whole number from 1 to 1000000000000"},
		{path, `{"limit":100}`, []string{key}, 400, "window: send a duration from 1s to 31d"},
		{path, `{"limit":0,"window":"1m"}`, []string{key}, 400, "from 1 to 1000000000000"},
		{path, `{"limit":1000000000001,"window":"1m"}`, []string{key}, 400, "from 1 to 1000000000000"},
		{path, `{"limit":1e3,"window":"1m"}`, []string{key}, 400, "limit: want a whole number"},
		{path, `{"limit":5,"window":60}`, []string{key}, 400, "window: at byte"},
		{path, `{"limit":5,"window":"60"}`, []string{key}, 400, "is not a duration"},
		{path, `{"limit":5,"window":"999ms"}`, []string{key}, 400, "from 1s to 31d"},
		{path, `{"limit":5,"window":"31d1s"}`, []string{key}, 400, "from 1s to 31d"},
		{path, `{"limit":5,"window":"1.0000005s"}`, []string{key}, 400, "whole milliseconds"},
		{path, `{"limit":5,"window":"1m","cost":6}`, []string{key}, 400,
			"cost: send a whole number up to the limit, 5; 0 only looks"},
		{path, `{"limit":5,"window":"1m","cost":-1000000000001}`, []string{key}, 400, "a negative one gives back"},
		{"DELETE " + limitsRoot + "/a*", "", []string{key}, 400, "Send 1 to 128"},
		{"DELETE " + limitsRoot + "/k", "", nil, 403, "send an API key"},
		{"DELETE " + limitsRoot + "/k", "", []string{"X-API-Key: x"}, 401, "API key"},
		{path, `{"limit":5,"window":"1m","cost":1.5}`, []string{key}, 400, "cost: want a whole number"},
		{path, `{"limit":5,"window":"1m","algorithm":"Log"}`, []string{key}, 400, "send fixed, sliding or log"},
		{path, `{"limit":10001,"window":"1m","algorithm":"log"}`, []string{key}, 400, "remembers at most 10000"},
		{path, `{"limit":5,"window":"1m","costs":1}`, []string{key}, 400,
			`"costs" is unknown; the body has limit, window, cost and algorithm`},
		{path, `{"limit":5,"limit":5,"window":"1m"}`, []string{key}, 400, "twice"},
	} {
		t.Run(fmt.Sprintf("%.40s %.40s %d", tc.call, tc.body, tc.status), func(t *testing.T) {
			wantProblem(t, s.do(tc.call, tc.body, tc.lines...), tc.status, tc.detail)
		})
	}

	for call, status := range map[string]int{
		"GET " + limitsRoot + "/k": 405, "PUT " + limitsRoot + "/k": 405,
		"POST " + limitsRoot: 404, "POST " + limitsRoot + "/a/b": 404,
	} {
		if w := s.do(call, "", key); w.Code != status {
			t.Errorf("%s: %d, want %d", call, w.Code, status)
		}
	}

	if got := parseLimit(t, s.do(path, good, key), 60); got.Remaining != 99 {
		t.Errorf("refused calls were charged: %+v remains, want 99", got)
	}
}

func TestTheStoreOfLimitsIsAway(t *testing.T) {
	store := &awayStore{Store: countertest.InMemory(t, nil)}
	s := serve(t, func(cfg *Config) {
		cfg.Counters = remote{countersIn(t, store, cfg.Rules, counter.CombinerConfig{}), store}
	})
	const call, body = "POST " + limitsRoot + "/k", `{"limit":2,"window":"31d"}`

	parseLimit(t, s.do(call, body, key), 31*24*60*60)

	// The calls without an answer cost nothing here, since they never reached the store.
	store.away.Store(true)
	wantProblem(t, s.do(call, body, key), 503, "decide whether to let it pass")
	store.away.Store(false)

	if got := parseLimit(t, s.do(call, body, key), 31*24*60*60); !got.Allowed || got.Remaining != 0 {
		t.Errorf("the limit is %+v, want it allowed with nothing left", got)
	}
}
