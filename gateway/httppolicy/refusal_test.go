package httppolicy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// A Content-Length is found in upper and lower case, and however the bytes are split.
func TestReceivedSeesLengths(t *testing.T) {
	for text, want := range map[string]bool{
		"PUT / HTTP/1.1\r\nContent-Length: 5\r\n":          true,
		"PUT / HTTP/1.1\r\nCONTENT-LENGTH:5\r\n":           true,
		"PUT / HTTP/1.1\r\ncontent-\r\ncontent-length: 5":  true,
		"PUT / HTTP/1.1\r\nX: coconcontent-length":         true,
		"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n": false,
		"content-lengt": false,
		"":              false,
	} {
		for _, size := range []int{1, 2, 7, len(text) + 1} {
			var r received
			for piece := range slices.Chunk([]byte(text), size) {
				r.note(piece)
			}

			if got := r.length.Load(); got != want {
				t.Errorf("%q in pieces of %d bytes: found is %v, want the opposite", text, size, got)
			}
		}
	}
}

// What the HTTP server refuses before any handler runs is a problem like any other refusal.
func TestServerRefusalsAreProblems(t *testing.T) {
	s := newLimitedServer(t, 1)

	for request, status := range map[string]int{
		"GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n":                            400,
		"GET / HTTP/1.1\r\n\r\n":                                          400,
		"GET / HTTP/1.1\r\nHost: h\r\nExpect: cake\r\n\r\n":               417,
		"GET / HTTP/1.0\r\nHost: h\r\nExpect: cake\r\n\r\n":               417,
		"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n":    501,
		"GET / HTTP/3.0\r\nHost: h\r\n\r\n":                               505,
		"GET / HTTP/1.1\r\nX: " + strings.Repeat("x", 2<<20) + "\r\n\r\n": 431,
	} {
		c, err := net.Dial("tcp", s.limiter.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.WriteString(c, request) }() // the server may not read all of it

		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("%.60q: %v", request, err)
		}

		body, err := io.ReadAll(resp.Body)
		kind := resp.Header.Get("Content-Type")
		if err != nil || resp.StatusCode != status || kind != "application/problem+json" ||
			!strings.Contains(string(body), `"detail":"The `) {
			t.Errorf("%.60q: %s, %q, %s, %v; want %d as a problem", request, resp.Status, kind, body, err, status)
		}

		_ = c.Close()
	}
}
