package api

import (
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/andybalholm/brotli"
)

// An asset is sent in the encoding that the client prefers. Its strong ETag stands for exactly these bytes.
func TestAssetsAreEncoded(t *testing.T) {
	const text = "export const text = 'text';"
	h, _ := serve(t, nil, Config{Assets: fstest.MapFS{"a.js": {Data: []byte(text)}}})

	get := func(status int, headers ...string) *http.Response {
		return call(t, h, status, http.MethodGet, "/-/a.js", headers...).Result()
	}

	etags := map[string]string{}
	for accept, want := range map[string]struct {
		encoding string
		unpack   func(io.Reader) (io.Reader, error)
	}{
		"":                  {"", func(r io.Reader) (io.Reader, error) { return r, nil }},
		"gzip":              {"gzip", func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }},
		"gzip, deflate, br": {"br", func(r io.Reader) (io.Reader, error) { return brotli.NewReader(r), nil }},
	} {
		resp := get(200, "Accept-Encoding", accept)
		unpacked, err := want.unpack(resp.Body)
		if err != nil {
			t.Fatal(err)
		}

		body, err := io.ReadAll(unpacked)
		if err != nil || string(body) != text || resp.Header.Get("Content-Encoding") != want.encoding {
			t.Errorf("with Accept-Encoding %q: %q, %v, %v", accept, body, err, resp.Header)
		}
		etags[accept] = resp.Header.Get("ETag")
	}

	for accept, etag := range etags {
		resp := get(304, "Accept-Encoding", accept, "If-None-Match", etag)
		if !strings.Contains(resp.Header.Get("Vary"), "Accept-Encoding") {
			t.Errorf("a 304 without Vary: %v", resp.Header)
		}

		for other := range etags {
			if other != accept {
				get(200, "Accept-Encoding", other, "If-None-Match", etag)
			}
		}
	}
}

// A part of the client whose content is named in the query may be cached for good. Under any other name the client asks
// again.
func TestNamedContentIsImmutable(t *testing.T) {
	const text = "export const text = 'text';"
	h, _ := serve(t, nil, Config{Assets: fstest.MapFS{"a.js": {Data: []byte(text)}}})

	sum := sha256.Sum256([]byte(text))
	for query, want := range map[string]string{
		"":                                "no-cache",
		"?" + hex.EncodeToString(sum[:4]): "public, max-age=31536000, immutable",
		"?1":                              "no-cache",
		"?00000000":                       "no-cache", // of another release: the present content is sent
	} {
		w := call(t, h, http.StatusOK, http.MethodGet, "/-/a.js"+query)
		if got := w.Header().Get("Cache-Control"); got != want || w.Body.String() != text {
			t.Errorf("%q has Cache-Control %q, want %q", query, got, want)
		}
	}
}

// Browsers ask for favicon.ico by themselves. A page may have a name that contains it.
func TestFavicon(t *testing.T) {
	h, _ := serve(t, nil, Config{Assets: fstest.MapFS{"icon.svg": {Data: []byte("<svg/>")}}})
	icon := call(t, h, http.StatusOK, http.MethodGet, "/favicon.ico")
	if kind := icon.Header().Get("Content-Type"); kind != "image/svg+xml" {
		t.Errorf("the icon has the type %s, want image/svg+xml", kind)
	}

	for _, page := range []string{"favicon.ico", "favicon.ico.bak", "favicon", "f"} {
		body := call(t, h, http.StatusOK, http.MethodGet, "/"+page+"/counter").Body.String()
		if !strings.Contains(body, `"page":"`+page+`"`) {
			t.Errorf("the page %s is answered %s, want its count", page, body)
		}
	}
}
