package gateway

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/rs/zerolog"
)

// Behind a proxy that replaces the Host header every origin is foreign. The answer and the log say so.
func TestRefusedOriginNamesTheHost(t *testing.T) {
	log := &bytes.Buffer{}
	inMemory(t, func(cfg *Config) { cfg.Log = zerolog.New(zerolog.SyncWriter(log)) }, func(t *testing.T, s *served) {
		// The log has only one line for all three.
		for range 3 {
			r := s.open("/-/ws", "", upgrade("Origin: http://counter.example")...)
			body, err := io.ReadAll(r.response(http.StatusForbidden).Body)
			if err != nil || !bytes.Contains(body, []byte(`Host \"h\"`)) ||
				!bytes.Contains(body, []byte("proxy_set_header Host $http_host")) {
				t.Fatalf("the answer is %s, %v; want the setting of the proxy", body, err)
			}

			_ = r.Close()
		}

		synctest.Wait()
		if n := strings.Count(log.String(), `"host":"h"`); n != 1 {
			t.Fatalf("%d lines in the log name the host, want 1", n)
		}
	})
}

// Every event stream is refused to pages of other origins, and accepts only GET.
func TestStreamsOfOtherOriginsAndMethods(t *testing.T) {
	inMemoryWith(t, everything, func(t *testing.T, s *served) {
		for _, path := range []string{
			"/p/counter/events", "/api/v1/counters/views:1/events", "/api/v1/top/events?match=views:*&last=1h",
			"/-/users/events?user=alice", "/-/top/events",
		} {
			for _, of := range []struct {
				method, origin string
				status         int
			}{
				{"GET", "http://evil.example", http.StatusForbidden},
				{"GET", "http://" + s.addr, http.StatusOK},
				{"HEAD", "http://" + s.addr, http.StatusMethodNotAllowed},
			} {
				r, err := http.NewRequest(of.method, "http://"+s.addr+path, nil)
				if err != nil {
					t.Fatal(err)
				}

				r.Header.Set("Origin", of.origin)
				r.Header.Set("X-API-Key", "k")

				resp, err := s.http().Do(r)
				if err != nil {
					t.Fatal(err)
				}

				_ = resp.Body.Close()
				if resp.StatusCode != of.status || of.status == http.StatusMethodNotAllowed &&
					resp.Header.Get("Allow") != "GET" {
					t.Errorf("%s %s of %s: %s, Allow %q",
						of.method, path, of.origin, resp.Status, resp.Header.Get("Allow"))
				}
			}
		}
	})
}

// After a request whose end others may see elsewhere the connection is closed. The server does not invite a body that
// it would refuse.
func TestServerBodies(t *testing.T) {
	t.Parallel()
	s := serveGateway(t, true, nil)
	const action = `{"action":"decrement"}`

	put := func(status int, body string, lines ...string) *raw {
		r := s.open("/", "")
		_, _ = io.Copy(io.Discard, r.response(404).Body)

		r.write([]byte("PUT /p/counter HTTP/1.1\r\nHost: h\r\n" + strings.Join(append(lines, "", ""), "\r\n") + body))
		resp := r.response(status)
		_, _ = io.Copy(io.Discard, resp.Body)
		return r
	}

	// What is left of such a body could be read as the next request, which may be that of another visitor behind the
	// same proxy.
	for _, r := range []*raw{
		put(200, "16\r\n"+action+"\r\n0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"),
		put(413, "", "Content-Length: 99999", "Expect: 100-continue"), // without a "100 Continue" before it
		put(413, "some bytes", "Content-Length: 9999"),                // the rest never comes
	} {
		r.expectEnd()
	}

	// The end of a body in chunks alone is clear, so the next request may follow.
	r := put(200, "16\r\n"+action+"\r\n0\r\n\r\n", "Transfer-Encoding: chunked")
	r.write([]byte("GET /p/counter HTTP/1.1\r\nHost: h\r\n\r\n"))
	r.response(200)
}

// A request that the HTTP server itself refuses gets the server's own answer.
func TestServerRefusalsOfTheHTTPServer(t *testing.T) {
	t.Parallel()
	s := serveGateway(t, true, nil)
	for request, want := range map[string]string{
		"GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n": "percent-encoded",
		"GET / HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 2<<20) +
			"\r\n\r\n": "header of the request is too large",
		"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n": "Transfer-Encoding",
		"GET / HTTP/3.0\r\nHost: h\r\n\r\n":                            "HTTP/1.1",
	} {
		r := s.open("/", "")
		_, _ = io.Copy(io.Discard, r.response(404).Body)
		go func() { _, _ = r.Write([]byte(request)) }() // ends with the connection

		resp, err := http.ReadResponse(r.in, nil)
		if err != nil {
			t.Fatalf("%.20q: %v", request, err)
		}

		body, err := io.ReadAll(resp.Body)
		if err != nil || !strings.Contains(string(body), want) {
			t.Errorf("%.20q: %d %s, %v", request, resp.StatusCode, body, err)
		}

		_ = r.Close()
	}
}
