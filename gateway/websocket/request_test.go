package websocket

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"
)

const upgradePath = "/-/ws"

// usual is an upgrade as a browser sends it.
const usual = "GET /-/ws?site=shop&id=a.b HTTP/1.1\r\nHost: shop.example:8080\r\nConnection: keep-alive, Upgrade\r\n" +
	"Pragma: no-cache\r\nCache-Control: no-cache\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0\r\n" +
	"upgrade: websocket\r\nORIGIN: https://shop.example\r\nSec-WebSocket-Version: 13\r\n" +
	"Accept-Encoding:gzip, deflate \t\r\nCookie: headcount_id=x; a=\"b\"\r\n" +
	"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n" +
	"Sec-WebSocket-Extensions: permessage-deflate\r\nSec-WebSocket-Protocol: headcount.v1\r\nX-Empty:\r\n\r\n"

func TestReadUpgrade(t *testing.T) {
	for _, head := range []string{usual, strings.Replace(usual, "?site=shop&id=a.b", "", 1)} {
		r, rest := ReadUpgrade([]byte(head+"frames"), upgradePath)
		if r == nil || string(rest) != "frames" {
			t.Fatalf("%q is a usual upgrade, but was read as %v, %q", head, r, rest)
		}
		sameAsNetHTTP(t, head+"frames", r, rest)
	}
}

// A request that differs from the usual form in any way is left to net/http.
func TestReadUpgradeLeavesTheUnusual(t *testing.T) {
	with := func(field string) string { return strings.Replace(usual, "Host:", field+"\r\nHost:", 1) }
	without := func(field string) string { return strings.Replace(usual, field, "X-Other:", 1) }
	first := func(line string) string {
		_, rest, _ := strings.Cut(usual, "\r\n")
		return line + "\r\n" + rest
	}

	for name, sent := range map[string]string{
		"nothing":                  "",
		"a part":                   usual[:len(usual)-1],
		"no fields":                "GET /-/ws HTTP/1.1\r\n\r\n",
		"another method":           first("POST /-/ws HTTP/1.1"),
		"another path":             first("GET /-/wss HTTP/1.1"),
		"a path below":             first("GET /-/ws/ HTTP/1.1"),
		"an escaped path":          first("GET /%2d/ws HTTP/1.1"),
		"an empty query":           first("GET /-/ws? HTTP/1.1"),
		"a fragment":               first("GET /-/ws?a#b HTTP/1.1"),
		"a space in the query":     first("GET /-/ws?a b HTTP/1.1"),
		"bytes in the query":       first("GET /-/ws?\xff HTTP/1.1"),
		"HTTP/1.0":                 first("GET /-/ws HTTP/1.0"),
		"two spaces":               first("GET  /-/ws HTTP/1.1"),
		"a space after":            first("GET /-/ws HTTP/1.1 "),
		"an absolute target":       first("GET http://shop.example/-/ws HTTP/1.1"),
		"an empty line before":     "\r\n" + usual,
		"lines without CR":         strings.ReplaceAll(usual, "\r\n", "\n"),
		"a line without CR":        strings.Replace(usual, "\r\nConnection", "\nConnection", 1),
		"a line without LF":        strings.Replace(usual, "\r\nConnection", "\rConnection", 1),
		"a line that continues":    with("X-A: b\r\n c"),
		"a space before the colon": with("X-A : b"),
		"a name that is empty":     with(": b"),
		"a name with a space":      with("X A: b"),
		"a name of other bytes":    with("X_A: b"),
		"no colon":                 with("X-A"),
		"a NUL":                    with("X-A: \x00"),
		"bytes above 127":          with("X-A: \xe4"),
		"a name twice":             with("X-A: b\r\nx-a: b"),
		"two hosts":                with("host: other.example"),
		"no host":                  without("Host:"),
		"an empty host":            strings.Replace(usual, "shop.example:8080", "", 1),
		"a host of other bytes":    strings.Replace(usual, "shop.example:8080", "shop@example", 1),
		"a length":                 with("Content-Length: 0"),
		"a body":                   with("Transfer-Encoding: chunked"),
		"a trailer":                with("Trailer: X-A"),
		"an expectation":           with("Expect: 100-continue"),
		"a connection that closes": strings.Replace(usual, "keep-alive, Upgrade", "close, Upgrade", 1),
		"an upgrade to another":    strings.Replace(usual, ": websocket", ": h2c", 1),
		"several upgrades":         strings.Replace(usual, ": websocket", ": h2c, websocket", 1),
		"no upgrade":               without("upgrade:"),
		"Pragma alone":             without("Cache-Control:"),
	} {
		if r, rest := ReadUpgrade([]byte(sent), upgradePath); r != nil || rest != nil {
			t.Errorf("%s: ReadUpgrade returns %v, %q, want nothing", name, r, rest)
		}
	}
}

// ReadUpgrade does not change the bytes, which net/http may have to read.
func TestReadUpgradeKeepsTheBytes(t *testing.T) {
	sent := []byte(usual)
	ReadUpgrade(sent, upgradePath)
	if string(sent) != usual {
		t.Errorf("%q has become %q", usual, sent)
	}
}

// FuzzReadUpgrade: what ReadUpgrade accepts is read by net/http as the same request.
func FuzzReadUpgrade(f *testing.F) {
	f.Add([]byte(usual))
	f.Add([]byte(usual + "\x81\x85\x00\x00\x00\x00hello"))
	f.Add([]byte("GET /-/ws HTTP/1.1\r\nHost: [::1]:8080\r\nConnection: upgrade\r\nUpgrade: WebSocket\r\n\r\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		before := string(sent)
		r, rest := ReadUpgrade(sent, upgradePath)
		if string(sent) != before {
			t.Fatalf("%q has become %q", before, sent)
		}
		if r != nil {
			sameAsNetHTTP(t, before, r, rest)
		}
	})
}

// sameAsNetHTTP compares a request, and what follows it, with what net/http reads.
func sameAsNetHTTP(t *testing.T, sent string, got *http.Request, rest []byte) {
	t.Helper()
	from := bufio.NewReader(strings.NewReader(sent))
	want, err := http.ReadRequest(from)
	if err != nil {
		t.Fatalf("net/http does not read %q: %v", sent, err)
	}

	after, _ := io.ReadAll(from)
	if !bytes.Equal(rest, after) {
		t.Fatalf("after %q remains %q, and for net/http %q", sent, rest, after)
	}

	if want.Body != http.NoBody || want.ContentLength != 0 || want.Close || len(want.Trailer) > 0 {
		t.Fatalf("for net/http %q has a body, or ends the connection", sent)
	}

	type parts struct {
		Method, URI, Host, Proto, Path, RawPath, Query string
		Header                                         http.Header
	}
	of := func(r *http.Request) parts {
		u := r.URL
		return parts{r.Method, r.RequestURI, r.Host, r.Proto, u.Path, u.RawPath, u.RawQuery, r.Header}
	}
	if g, w := of(got), of(want); !reflect.DeepEqual(g, w) || *got.URL != *want.URL {
		t.Fatalf("%q is\n%+v, and for net/http\n%+v", sent, g, w)
	}
}
