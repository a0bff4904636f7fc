package gateway

import (
	"bytes"
	"encoding/xml"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/rs/zerolog"

	"headcount/internal/servertest"
)

// Behind a proxy that replaces the Host every origin is foreign: the answer and the log
// say so.
func TestRefusedOriginNamesTheHost(t *testing.T) {
	log := &servertest.Log{}
	s := serveGateway(t, true, func(cfg *Config) { cfg.Log = zerolog.New(log) })
	for range 3 {
		r := s.open("/-/ws", "", "Origin: http://counter.example", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
			"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
		body, err := io.ReadAll(r.response(http.StatusForbidden).Body)
		if err != nil || !bytes.Contains(body, []byte(`Host \"h\"`)) || !bytes.Contains(body, []byte("proxy_set_header Host $http_host")) {
			t.Fatalf("%s, %v", body, err)
		}
		_ = r.Close()
	}
	if n := strings.Count(log.String(), `"host":"h"`); n != 1 {
		t.Fatalf("%d lines in the log", n)
	}
}

// A strong ETag stands for exactly these bytes.
func TestETagsOfEncodingsDiffer(t *testing.T) {
	s := serveGateway(t, true, func(cfg *Config) { cfg.Assets = fstest.MapFS{"a.js": {Data: []byte("text")}} })
	get := func(status int, lines ...string) *http.Response {
		return s.open("/-/a.js", "", append(lines, "Connection: close")...).response(status)
	}
	plain, packed := get(200).Header.Get("ETag"), get(200, "Accept-Encoding: gzip").Header.Get("ETag")
	if plain == "" || packed == "" || plain == packed {
		t.Fatalf("%s and %s", plain, packed)
	}
	for _, resp := range []*http.Response{
		get(304, "If-None-Match: "+plain), get(304, "Accept-Encoding: gzip", "If-None-Match: "+packed), get(200, "If-None-Match: "+packed),
	} {
		if !strings.Contains(resp.Header.Get("Vary"), "Accept-Encoding") {
			t.Errorf("%d without Vary: %v", resp.StatusCode, resp.Header)
		}
	}
}

// Browsers ask for favicon.ico by themselves. Pages may have that name, or begin like it.
func TestFavicon(t *testing.T) {
	s := serveGateway(t, true, func(cfg *Config) { cfg.Assets = fstest.MapFS{"icon.svg": {Data: []byte("<svg/>")}} })
	if kind := s.open("/favicon.ico", "", "Connection: close").response(http.StatusOK).Header.Get("Content-Type"); kind != "image/svg+xml" {
		t.Errorf("the icon is %s", kind)
	}
	for _, page := range []string{"favicon.ico", "favicon.ico.bak", "favicon", "f"} {
		body, err := io.ReadAll(s.open("/"+page+"/counter", "", "Connection: close").response(http.StatusOK).Body)
		if err != nil || !strings.Contains(string(body), `"page":"`+page+`"`) {
			t.Errorf("the page %s: %s, %v", page, body, err)
		}
	}
}

// The connection ends after a request whose end others may see elsewhere. The server
// asks for no body that it would refuse.
func TestBodies(t *testing.T) {
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
	for _, r := range []*raw{
		put(200, "16\r\n"+action+"\r\n0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"),
		put(413, "", "Content-Length: 99999", "Expect: 100-continue"), // a 100 would come first
		put(413, "some bytes", "Content-Length: 9999"),                // and the rest never comes
	} {
		r.expectEnd()
	}
}

// What the HTTP server itself refuses is answered with its own problem.
func TestRefusalsOfTheHTTPServer(t *testing.T) {
	t.Parallel()
	s := serveGateway(t, true, nil)
	for request, want := range map[string]string{
		"GET /%zz HTTP/1.1\r\nHost: h\r\n\r\n":                                       "percent-encoded",
		"GET / HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 2<<20) + "\r\n\r\n": "header of the request is too large",
		"PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n":               "Transfer-Encoding",
		"GET / HTTP/3.0\r\nHost: h\r\n\r\n":                                          "HTTP/1.1",
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

// What a query brings into a badge and a widget stays text, and a site may frame the widget.
func TestBadgeAndWidget(t *testing.T) {
	s := serveGateway(t, true, nil)
	get := func(path string) (string, http.Header) {
		t.Helper()
		resp := s.open(path, "", "Connection: close").response(http.StatusOK)
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(body), resp.Header
	}
	svg, head := get("/p/badge.svg?label=%22%3E%3Cscript%3E%26&color=0066cc&background=teal")
	var parsed struct {
		XMLName xml.Name
		Title   string `xml:"title"`
	}
	if err := xml.Unmarshal([]byte(svg), &parsed); err != nil || parsed.XMLName.Local != "svg" || parsed.Title != `0 "><script>&` {
		t.Errorf("%v: %+v in %s", err, parsed, svg)
	}
	if !strings.Contains(svg, `fill="#0066cc"`) || !strings.Contains(svg, `fill="teal"`) || head.Get("Content-Type") != "image/svg+xml" || head.Get("Cache-Control") != "no-store" {
		t.Errorf("%v %s", head, svg)
	}
	html, head := get("/%3Cb%3E%22/widget?label=%3Cscript%3E&color=abc&background=%23fff")
	if !strings.Contains(html, `<live-count page="&lt;b&gt;&#34;">0</live-count> &lt;script&gt;`) || !strings.Contains(html, "color: #abc; background: #fff ") {
		t.Errorf("%s", html)
	}
	if !strings.Contains(html, `src="../-/headcount.js"`) { // which is right below --base-path, too
		t.Errorf("the widget's script: %s", html)
	}
	if policy := head.Get("Content-Security-Policy"); !strings.Contains(policy, "frame-ancestors *") || strings.Contains(policy, "unsafe") {
		t.Errorf("%s", policy)
	}
	if html, _ := get("/*/widget"); !strings.Contains(html, `<live-count page="*" watch>`) {
		t.Errorf("the whole site cannot be joined: %s", html)
	}
	if svg, _ := get("/p/badge.svg?color=RebeccaPurple&background=%23abcd"); !strings.Contains(svg, `fill="rebeccapurple"`) || !strings.Contains(svg, `fill="#abcd"`) {
		t.Errorf("a name in another case, four digits: %s", svg)
	}
	if svg, _ := get("/p/badge.svg?color="); !strings.Contains(svg, `fill="#06c"`) || !strings.Contains(svg, `fill="#444"`) {
		t.Errorf("no colours: %s", svg)
	}
	for _, bad := range []string{"color=blurple", "background=inherit", "color=%7Bx%7D", "color=12345", "background=red%3Bx", "label=" + strings.Repeat("x", 41), "label=a%01b", "label=%FF"} {
		for _, what := range []string{"badge.svg", "widget"} {
			_ = s.open("/p/"+what+"?"+bad, "").response(http.StatusBadRequest)
		}
	}
}
