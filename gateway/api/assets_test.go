package api

import (
	"net/http"
	"strings"
	"testing"
	"testing/fstest"
)

// A strong ETag stands for exactly these bytes.
func TestETagsOfEncodingsDiffer(t *testing.T) {
	h, _ := serve(t, nil, Config{Assets: fstest.MapFS{"a.js": {Data: []byte("text")}}})
	get := func(status int, headers ...string) *http.Response {
		return call(t, h, status, http.MethodGet, "/-/a.js", headers...).Result()
	}
	plain, packed := get(200).Header.Get("ETag"), get(200, "Accept-Encoding", "gzip").Header.Get("ETag")
	if plain == "" || packed == "" || plain == packed {
		t.Fatalf("%s and %s", plain, packed)
	}
	for _, resp := range []*http.Response{
		get(304, "If-None-Match", plain), get(304, "Accept-Encoding", "gzip", "If-None-Match", packed), get(200, "If-None-Match", packed),
	} {
		if !strings.Contains(resp.Header.Get("Vary"), "Accept-Encoding") {
			t.Errorf("%d without Vary: %v", resp.StatusCode, resp.Header)
		}
	}
}

// Browsers ask for favicon.ico by themselves. Pages may have that name, or begin like it.
func TestFavicon(t *testing.T) {
	h, _ := serve(t, nil, Config{Assets: fstest.MapFS{"icon.svg": {Data: []byte("<svg/>")}}})
	if kind := call(t, h, http.StatusOK, http.MethodGet, "/favicon.ico").Header().Get("Content-Type"); kind != "image/svg+xml" {
		t.Errorf("the icon is %s", kind)
	}
	for _, page := range []string{"favicon.ico", "favicon.ico.bak", "favicon", "f"} {
		body := call(t, h, http.StatusOK, http.MethodGet, "/"+page+"/counter").Body.String()
		if !strings.Contains(body, `"page":"`+page+`"`) {
			t.Errorf("the page %s: %s", page, body)
		}
	}
}
