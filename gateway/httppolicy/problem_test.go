package httppolicy

import (
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"
)

func TestWriteProblem(t *testing.T) {
	for name, tc := range map[string]struct {
		status  int
		detail  string
		opts    []Option
		body    string
		headers map[string]string
	}{
		"plain": {400, "The page is empty.", nil,
			`{"type":"about:blank","title":"Bad Request","status":400,"detail":"The page is empty."}`, nil},
		"no detail": {404, "", nil, `{"type":"about:blank","title":"Not Found","status":404}`, nil},
		"escaped": {400, "a=1&b=2 <b>\"\x00\u2028\xff", nil,
			`{"type":"about:blank","title":"Bad Request","status":400,"detail":"a=1&b=2 <b>\"\u0000\u2028\ufffd"}`,
			nil},
		"retry": {429, "", []Option{RetryAfter(1500 * time.Millisecond)},
			`{"type":"about:blank","title":"Too Many Requests","status":429}`, map[string]string{"Retry-After": "2"}},
		"retry soon": {503, "", []Option{RetryAfter(0)},
			`{"type":"about:blank","title":"Service Unavailable","status":503}`, map[string]string{"Retry-After": "1"}},
		"challenge": {401, "", nil,
			`{"type":"about:blank","title":"Unauthorized","status":401}`,
			map[string]string{"WWW-Authenticate": `Bearer realm="headcount"`}},
	} {
		t.Run(name, func(t *testing.T) {
			// A handler may have set headers of an answer before it fails.
			w := httptest.NewRecorder()
			w.Header().Set("Content-Encoding", "gzip")
			w.Header().Set(RequestIDHeader, "r")
			w.Header().Set("Content-Length", "7")
			w.Header().Set("Access-Control-Allow-Origin", "https://a.example")

			Problem(w, tc.status, tc.detail, tc.opts...)
			if got := w.Body.String(); w.Code != tc.status ||
				got != strings.TrimSuffix(tc.body, "}")+`,"request_id":"r"}`+"\n" {
				t.Fatalf("%d %s\nwant %s", w.Code, got, tc.body)
			}

			want := map[string]string{
				"Content-Type":                "application/problem+json",
				"Cache-Control":               "no-store",
				"X-Content-Type-Options":      "nosniff",
				"Content-Encoding":            "",
				"Access-Control-Allow-Origin": "https://a.example",
			}

			for k, v := range tc.headers {
				want[k] = v
			}

			for k, v := range want {
				if got := w.Header().Get(k); got != v {
					t.Errorf("%s: %q, want %q", k, got, v)
				}
			}
		})
	}
}

// lone is a listener with one connection.
type lone struct {
	pipes
	conn net.Conn
}

func (l *lone) Accept() (net.Conn, error) {
	c := l.conn
	l.conn = nil
	if c == nil {
		return nil, net.ErrClosed
	}

	return c, nil
}

func TestProblemOfHeadHasNoBody(t *testing.T) {
	client, there := net.Pipe()
	defer client.Close()
	server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		Problem(w, http.StatusNotFound, "There is nothing here.")
	})}
	_ = server.Serve(&lone{conn: there}) // the server goes on with the connection

	if _, err := io.WriteString(client, "HEAD / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}

	answer, err := io.ReadAll(client)
	head, body, ok := strings.Cut(string(answer), "\r\n\r\n")
	isProblem := strings.HasPrefix(head, "HTTP/1.1 404 ") &&
		strings.Contains(head, "\r\nContent-Type: application/problem+json")
	if err != nil || !ok || body != "" || !isProblem {
		t.Fatalf("the answer is %q, %v; want a problem without a body", answer, err)
	}
}

func FuzzProblemDetail(f *testing.F) {
	f.Add("plain")
	f.Add(strings.Repeat("é", maxDetail))
	f.Add(strings.Repeat("\x80", maxDetail+1))
	f.Add("\"}</script>\u202e\r\n")

	f.Fuzz(func(t *testing.T, detail string) {
		w := httptest.NewRecorder()
		Problem(w, 400, detail)
		var got struct{ Detail string }
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatalf("%q: %v", w.Body, err)
		}

		// Text that is valid in JSON, and not too long, is not changed.
		if utf8.ValidString(detail) && len(detail) <= maxDetail && got.Detail != detail {
			t.Fatalf("%q became %q", detail, got.Detail)
		}

		// Logs and terminals show a body in one line. A character may take six bytes in JSON.
		line, ended := strings.CutSuffix(w.Body.String(), "\n")
		if !ended || len(line) > 6*maxDetail+200 || strings.ContainsAny(line, "\r\n") {
			t.Fatalf("unsafe body %q", w.Body)
		}

		if short := shorten(detail, maxDetail); len(short) > maxDetail || utf8.ValidString(detail) &&
			!utf8.ValidString(short) {
			t.Fatalf("the detail was cut to %q", short)
		}
	})
}
