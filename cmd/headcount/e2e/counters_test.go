package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/golang-jwt/jwt/v5"
)

// lasting is the outside form of a durable counter, with the members that some answers add.
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

const root = "/api/v1/counters/"

// call makes a call on a counter, with the API key of a server unless lines authenticate it otherwise.
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

// lasting decodes a 200 with exactly the members of a counter.
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

// ledger reads a whole ledger, page by page. Its entries must add up, and the ledger of an exact counter must have
// every change.
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

// refused starts a process that must end with status 2 and one line that contains says.
func refused(t *testing.T, says string, flags ...string) {
	t.Helper()
	s, err := spawn(flags...)
	if err == nil {
		s.Signal(syscall.SIGKILL)
		t.Fatalf("it started with %q", flags)
	}

	_, text, _ := strings.Cut(err.Error(), "\n")

	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "{") { // JSON lines are the log
			lines = append(lines, line)
		}
	}

	if len(lines) != 1 || !strings.HasPrefix(lines[0], "headcount: --") || !strings.Contains(lines[0], says) {
		t.Errorf("%q: it says %q, want one line with %q", flags, lines, says)
	}
}

// The rules of a file apply, to pages of other origins too.
func TestServerRulesOfAFile(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "rules.json")
	const text = `{"rules":[{"match":"seats","kind":"exact","floor":-1,"ceiling":2,"public":["read","increment"],` +
		`"stale":0}]}`
	if err := os.WriteFile(rules, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := startWithKey(t, "--counters="+rules, "--allow-origins=https://a.example", "--jwt-secret="+jwtSecret)

	token := "Authorization: Bearer " + hs256(t, jwt.MapClaims{"sub": "ann", "in": 3600})
	const origin = "Origin: https://a.example"

	// A public increment needs a token here, from any permitted origin.
	s.call(t, "POST", "seats/increment", "", origin).problem(t, http.StatusUnauthorized)
	r := s.call(t, "POST", "seats/increment", "", origin, token, "Idempotency-Key: k")
	if r.lasting(t).Value != 1 || r.header.Get("Access-Control-Allow-Origin") != "https://a.example" ||
		!strings.Contains(r.header.Get("Access-Control-Expose-Headers"), "Idempotent-Replay") {
		t.Errorf("a public increment: %s %v, want 1 and the CORS headers", r.body, r.header)
	}
	if r := s.call(t, "GET", "seats", "", origin); r.lasting(t).Value != 1 || r.header.Get("Set-Cookie") != "" {
		t.Errorf("a public read: %s %v, want 1 and no cookie", r.body, r.header)
	}

	s.call(t, "GET", "seats", "", "Authorization: Bearer x").problem(t, http.StatusUnauthorized)
	s.call(t, "POST", "seats/increment", "", "Origin: https://b.example", token).problem(t, http.StatusForbidden)
	s.call(t, "GET", "seats/events", "", "Origin: https://b.example").problem(t, http.StatusForbidden)
	s.call(t, "GET", "views:1", "").problem(t, http.StatusBadRequest)
	s.call(t, "POST", "seats/increment", `{"delta":2}`).problem(t, http.StatusConflict)
}
