package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Below a base path everything is as below the root, and the names of pages keep their escapes. Nothing outside the
// base path is served.
func TestBelow(t *testing.T) {
	inner := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(r.URL.Path + " " + r.URL.RequestURI()))
	})

	for target, want := range map[string]struct {
		status int
		body   string // or the target of a redirect
	}{
		"/live/a%2Fb/counter?x=1": {http.StatusOK, "/a/b/counter /a%2Fb/counter?x=1"},
		"/live/":                  {http.StatusOK, "/ /"},
		"/live/live/x":            {http.StatusOK, "/live/x /live/x"},
		"/live":                   {http.StatusPermanentRedirect, "/live/"},
		"/lively/":                {http.StatusNotFound, ""},
		"/li%76e/":                {http.StatusNotFound, ""},
		"/":                       {http.StatusNotFound, ""},
	} {
		w := httptest.NewRecorder()
		Below("/live", inner).ServeHTTP(w, httptest.NewRequest(http.MethodGet, target, nil))

		got := w.Header().Get("Location")
		if w.Code == http.StatusOK {
			got = w.Body.String()
		}

		if w.Code != want.status || got != want.body {
			t.Errorf("%s: %d %q, want %d %q", target, w.Code, got, want.status, want.body)
		}
	}
}

// With a base path, the OpenAPI document names it.
func TestOpenAPIBelow(t *testing.T) {
	for base, want := range map[string]string{"": "/", "/live": "/live"} {
		h, _ := serve(t, nil, Config{BasePath: base})
		var document struct{ Servers []struct{ URL string } }
		w := call(t, h, http.StatusOK, http.MethodGet, "/-/openapi.json")

		if err := json.NewDecoder(w.Body).Decode(&document); err != nil || len(document.Servers) != 1 ||
			document.Servers[0].URL != want {
			t.Errorf("below %q: %+v, %v", base, document, err)
		}
	}
}

// A refusal says what the caller should do instead.
func TestRefusalsSayWhere(t *testing.T) {
	h, _ := serve(t, nil, Config{})

	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		body := call(t, h, http.StatusNotFound, "GET", path).Body.String()
		if !strings.Contains(body, "--admin-listen") {
			t.Errorf("%s: %s, want the hint --admin-listen", path, body)
		}
	}

	body := call(t, h, http.StatusBadRequest, "PUT", "/p/counter").Body.String()
	if !strings.Contains(body, "The body is missing") {
		t.Errorf("a call without a body is answered %s", body)
	}
}
