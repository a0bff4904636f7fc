package probe

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"headcount/gateway/identity"
)

// A probe is answered once, to a caller that knows its name, and a bounded number of probes is open.
func TestProbes(t *testing.T) {
	proxies, err := identity.NewProxies([]string{"10.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}

	p := New(proxies, "")
	begin := func() string {
		w := httptest.NewRecorder()
		p.Begin(w, nil)
		return w.Body.String()
	}

	h := p.Before(http.NotFoundHandler())
	get := func(name, peer string, header ...string) (int, string) {
		r := httptest.NewRequest("GET", publicPath+name, nil)
		r.RemoteAddr = peer + ":1"
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}

		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w.Code, strings.TrimSpace(w.Body.String())
	}

	name := begin()
	if code, body := get(name, "10.1.2.3", "X-Forwarded-For", "192.0.2.7", "X-Forwarded-Proto", "https"); code != 200 ||
		body != `{"host":"example.com","forwarded_for":true,"peer":"10.1.2.3","trusted":true,"secure":true,"body":0}` {
		t.Errorf("the probe is answered %d %s", code, body)
	}
	if code, _ := get(name, "10.1.2.3"); code != 404 {
		t.Errorf("a second request is answered %d, want 404", code)
	}
	if code, body := get(begin(), "11.1.2.3", "X-Forwarded-For", "192.0.2.7", "X-Forwarded-Proto",
		"https"); code != 200 || !strings.Contains(body, `"trusted":false,"secure":false`) {
		t.Errorf("over an untrusted proxy the probe is answered %d %s", code, body)
	}

	first := begin()
	for range maxOpen {
		begin()
	}

	if code, _ := get(first, "10.1.2.3"); code != 404 || p.open.Len() != maxOpen {
		t.Errorf("the oldest probe is answered %d, and %d are open; want 404 and the bound", code, p.open.Len())
	}
	if code, _ := get("guessed", "10.1.2.3"); code != 404 {
		t.Errorf("a guessed name is answered %d, want 404", code)
	}
}
