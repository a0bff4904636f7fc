package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/golang-jwt/jwt/v5"

	"headcount/internal/testkit"
)

// A refused request names its fault, and an id. At the level debug the log names the same fault under the same id, and
// a metric counts the reason.
func TestServerRefusedRequests(t *testing.T) {
	t.Parallel()
	s := start(t, "--log-level=debug", "--api-key="+apiKey, "--jwt-secret="+jwtSecret, "--max-connections=1")

	// Two sums of the greatest value each: one more does not fit into an int64, and neither does their aggregate.
	most, least := root+"sum:most", root+"sum:more"
	for _, path := range []string{most, least} {
		if a := do(t, "POST", s.url+path+"/adjust",
			`{"delta":9223372036854775807,"reason":"pair \ud83d\ude00, \\ud800","by":"ops"}`,
			withKey); a.status != 200 {
			t.Fatalf("adjusting %s: %d %s", path, a.status, a.body)
		}
	}

	refused := map[string]int{}
	for _, tc := range []refusal{
		{"GET /-/dashboard", "", "", 401, "api_key", "X-API-Key"},
		{"GET /-/dashboard/data", "", "X-API-Key: wrong", 401, "api_key", "X-API-Key"},
		{"POST /p/changes", "", "X-API-Key: wrong", 401, "api_key", "wrong"},
		{"GET " + most, "", "X-API-Key: wrong", 401, "api_key", "wrong"},
		{"PUT /p/counter", increment, "", 401, "no_token", "token"},
		{"GET /p/counter", "", "Authorization: Bearer x", 401, "bad_token", "token"},
		{"PUT /p/counter", increment, "Origin: https://evil.example", 403, "origin", "--allow-origins"},
		{"POST " + most + "/reset", `{}`, "", 403, "forbidden", "not public"},
		{"GET /nowhere", "", "", 404, "not_found", "does not exist"},
		{"POST /p/counter", "", "", 405, "method", "POST"},
		{"POST " + most + "/reset", strings.Repeat(" ", 300_000), withKey, 413, "too_large", "262144"},
		{"GET /-/ws", "", "", 426, "no_upgrade", "WebSocket"},
		// An aggregate only reads, so its detail does not say that nothing was changed.
		{"GET " + root + "sum%3A%2A/aggregate", "", withKey, 409, "conflict", "There is no answer"},
		{"POST " + most + "/increment", "", withKey, 409, "conflict", "Nothing was changed"},
		// Halves of surrogate pairs would all become the same text.
		{"POST " + most + "/reset", `{"reason":"\ud800","by":"ops"}`, withKey, 400, "bad_request", "surrogate"},
		{"POST " + most + "/reset", `{"reason":"r","by":"\ude00\ud83d"}`, withKey, 400, "bad_request", "surrogate"},
		{"POST " + root + "likes%3A1/members", `{"add":["\ud800"]}`, withKey, 400, "bad_request", "surrogate"},
		{"POST /api/v1/counters", `{"changes":[{"key":"views:\ud800"}]}`, withKey, 400, "bad_request", "surrogate"},
		{"PUT /-/users/alice/unread", `{"action":"reset","page":"\udfff"}`, withKey, 400, "bad_request", "surrogate"},
		{"POST /p/changes", `{"title":"\ud800"}`, withKey, 400, "bad_request", "surrogate"},
		{
			"POST /api/v1/counters", `{"changes":[{"key":"views:1"},{"key":"stock:1"}]}`, withKey, 400, "bad_request",
			"exact",
		},
		{"POST /p/changes", `{"unknown member \"":1}`, withKey, 400, "bad_request", "does not know"},
		{
			"POST " + root + "likes%3A1/members", `{"add":["alice"],"remove":["alice"]}`, withKey, 400, "bad_request",
			"in both add and remove",
		},
	} {
		s.refuses(t, tc)
		refused[tc.reason]++
	}

	if id := s.get(t, "/p/counter").header.Get("X-Request-Id"); id != "" {
		t.Errorf("a request that was answered has an id: %q", id)
	}

	s.hasCounted(t, refused)

	// The only connection that --max-connections permits.
	visitor := s.dial(t, dialer{
		headers: []string{"Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": "visitor", "in": 600})},
	})
	_, err := s.connect(dialer{
		headers: []string{"Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": "another", "in": 600})},
	})
	if err == nil {
		t.Error("there are more connections than the limit")
	}
	if n := s.metric(t, `headcount_http_refusals_total{reason="connections"}`); n != 1 {
		t.Errorf("%g refusals are counted for the number of connections, want 1", n)
	}

	for _, tc := range []struct{ message, code, detail string }{
		{`{"type":"heartbeat","x":"\ud800"}`, "bad_json", "surrogate"},
		{`{"type":"subscribe","counters":["views:\udfff"]}`, "bad_counter", "U+FFFD"},
		{`{"type":"join","page":"\ud83d"}`, "bad_page", "U+FFFD"},
		{`{"type":"alice"}`, "bad_type", "no message type"},
	} {
		visitor.send(tc.message)
		f := visitor.take(tc.code)
		if f.Code != tc.code {
			t.Errorf("%s: answered with %s, want %s", tc.message, f.text, tc.code)
		}

		s.hasLogged(t, map[string]any{
			"level": "debug", "reason": tc.code, "message": "a message was refused",
		}, tc.detail)
	}

	// Names of users, keys and members are the visitors' own: a fault is logged without quoting the request.
	for _, own := range []string{"alice", "views:", "unknown member"} {
		if strings.Contains(s.log.String(), own) {
			t.Errorf("the log has %q of a request", own)
		}
	}
}

// refusal is a request that is refused, and how.
type refusal struct {
	call, body, headers string
	status              int
	reason, detail      string
}

// refuses makes a request, and holds that the client's answer and the log tell the same fault under the same id.
func (s *server) refuses(t *testing.T, want refusal) {
	t.Helper()
	method, path, _ := strings.Cut(want.call, " ")
	var headers []string
	if want.headers != "" {
		headers = append(headers, want.headers)
	}

	// Within the program the reason and the detail travel as headers; they must not leave it.
	a := do(t, method, s.url+path, want.body, headers...)
	a.problem(t, want.status)
	if a.header.Get("Reason")+a.header.Get("Detail") != "" {
		t.Errorf("headers %v", a.header)
	}

	var p struct {
		Detail, Key string
		ID          string `json:"request_id"`
	}
	err := json.Unmarshal([]byte(a.body), &p)
	saysChanged := strings.Contains(p.Detail, "changed")
	if err != nil || !strings.Contains(p.Detail, want.detail) || want.status == 409 && method == "GET" && saysChanged {
		t.Errorf("%s %.80s: %s, want %q, error %v", want.call, want.body, a.body, want.detail, err)
	}
	if id := a.header.Get("X-Request-Id"); len(p.ID) != 16 || p.ID != id {
		t.Errorf("%s: the id %q in the problem and %q in the head", want.call, p.ID, id)
	}

	s.hasLogged(t, map[string]any{
		"level": "debug", "request_id": p.ID, "method": method, "status": float64(want.status), "reason": want.reason,
		"message": "a request was refused",
	}, want.detail)
}

// hasCounted holds that the metrics have these refusals, by reason, and no others.
func (s *server) hasCounted(t *testing.T, refused map[string]int) {
	t.Helper()
	metrics := do(t, "GET", s.admin+"/metrics", "").body
	for reason, n := range refused {
		line := fmt.Sprintf("headcount_http_refusals_total{reason=%q} %d\n", reason, n)
		if !strings.Contains(metrics, line) {
			t.Errorf("the metrics have no %s", line)
		}
	}

	if n := s.metric(t, "headcount_http_refusals_total"); int(n) != 23 {
		t.Errorf("%g refusals are counted, want 23", n)
	}
}

// hasLogged waits for a log line with these members, whose detail contains words.
func (s *server) hasLogged(t testing.TB, want map[string]any, words string) {
	t.Helper()
	testkit.Eventually(t, fmt.Sprint("a log line with ", want), func() bool {
	line:
		for text := range strings.Lines(s.log.String()) {
			var has map[string]any
			_ = json.Unmarshal([]byte(text), &has) // a line that is no JSON has no members
			for name, value := range want {
				if has[name] != value {
					continue line
				}
			}

			if detail, _ := has["detail"].(string); strings.Contains(detail, words) {
				return true
			}
		}

		return false
	})
}
