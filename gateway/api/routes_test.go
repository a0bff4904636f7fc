package api

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// Below a base path everything is as it is below the root, and a page's name keeps its
// escapes. Nothing else is served.
func TestBelow(t *testing.T) {
	inner := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte(r.URL.Path + " " + r.URL.RequestURI()))
	})

	for target, want := range map[string]struct {
		status int
		body   string // or where to
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

// The document of the calls says where they are.
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

// Who looks for something in the wrong place, or sends nothing, is told so.
func TestRefusalsSayWhere(t *testing.T) {
	h, _ := serve(t, nil, Config{})

	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		body := call(t, h, http.StatusNotFound, "GET", path).Body.String()
		if !strings.Contains(body, "--admin-listen") {
			t.Errorf("%s: %s", path, body)
		}
	}

	body := call(t, h, http.StatusBadRequest, "PUT", "/p/counter").Body.String()
	if !strings.Contains(body, "The body is missing") {
		t.Errorf("no body: %s", body)
	}
}
