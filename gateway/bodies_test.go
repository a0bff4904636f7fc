package gateway

import (
	"bufio"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
)

// TestBodiesToTheByte pins the text of answers: clients may compare it.
func TestBodiesToTheByte(t *testing.T) { inMemoryWith(t, everything, bodiesToTheByte) }

func bodiesToTheByte(t *testing.T, s *served) {
	open := func(method, path, body string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.addr+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("X-API-Key", "k")

		resp, err := s.http().Do(req)
		if err != nil {
			t.Fatal(err)
		}

		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}

	do := func(method, path, body string) string {
		t.Helper()
		resp := open(method, path, body)
		answer, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode >= 300 {
			t.Fatalf("%s %s: %s %s, %v", method, path, resp.Status, answer, err)
		}
		return string(answer)
	}

	moment := regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"`)
	pins := func(method, path, body, want string) {
		t.Helper()
		if got := moment.ReplaceAllString(do(method, path, body), "TIME"); got != want {
			t.Errorf("%s %s answers\n%s, want\n%s", method, path, got, want)
		}
	}

	// A title and a page name with all characters that JSON and HTML escape.
	odd := url.PathEscape(`é "<&>\`)
	pins("GET", "/-/users/ann/follows", "", `{"follows":[]}`+"\n")
	pins("GET", "/-/users/ann/notifications", "", `{"count":0,"notifications":[]}`+"\n")
	pins("GET", "/-/users/ann/unread", "", `{"count":0,"updated_at":null}`+"\n")

	for _, page := range []string{odd, "b"} {
		do("PUT", "/-/users/ann/follows/"+page, "")
	}
	do("POST", "/"+odd+"/changes", `{"title":"\"New\" <b>","url":"https://a.example/?x=1&y=2"}`)

	pins("GET", "/-/users/ann/follows", "", `{"follows":["b","é \"<&>\\"],"unread":{"é \"<&>\\":1}}`+"\n")
	pins("GET", "/-/users/ann/notifications", "",
		`{"count":1,"notifications":[{"page":"é \"<&>\\","count":1,"updated_at":TIME,`+
			`"title":"\"New\" \u003cb\u003e","url":"https://a.example/?x=1\u0026y=2"}]}`+"\n")
	pins("GET", "/-/users/ann/unread", "", `{"count":1,"updated_at":TIME}`+"\n")
	pins("PUT", "/-/users/ann/unread", `{"action":"reset"}`, `{"count":0,"updated_at":TIME}`+"\n")

	do("PUT", "/-/users/ann/pages/p", "")
	pins("GET", "/-/users/ann", "", `{"user":"ann","online":true,"since":TIME,"pages":1}`+"\n")
	pins("GET", `/-/users?user=a"<b&user=ann`, "",
		`{"users":[{"user":"a\"<b","online":false},{"user":"ann","online":true,"since":TIME,"pages":1}]}`+"\n")
	pins("GET", "/"+odd+"/stats?last=1m&step=1m", "",
		`{"page":"é \"<&>\\","now":0,"peak":{"count":0,"at":null},"joins":0,"visitors":0,`+
			`"points":[{"at":TIME,"max":0,"joins":0},{"at":TIME,"max":0,"joins":0}]}`+"\n")

	// A stream does not end, so only its first data is read.
	for path, want := range map[string]string{
		"/-/top/events?n=1":            `{"top":[{"page":"p","users":2}]}`,
		"/-/users/events?user=ann":     `{"user":"ann","online":true,"since":TIME,"pages":1}`,
		"/-/users/events?user=%3Cx%3E": `{"user":"<x>","online":false}`,
	} {
		resp := open("GET", path, "")

		for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				if got := moment.ReplaceAllString(data, "TIME"); got != want {
					t.Errorf("%s sends\n%s, want\n%s", path, got, want)
				}
				break
			}
		}
	}
}
