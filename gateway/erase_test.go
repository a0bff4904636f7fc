package gateway

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"headcount/presence"
)

// The erasures of visitors are bounded, together and of an address; those of servers wait for
// their like alone.
func TestErasuresAreBounded(t *testing.T) {
	s := serveGateway(t, true, func(c *Config) { c.APIKeys = []string{"key"} })
	erase := func(path string, headers ...string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodDelete, "http://"+s.addr+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Close = true
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp
	}
	known, err := s.g.cfg.Identities.Identify(httptest.NewRequest(http.MethodGet, "/", nil), presence.DefaultSite, false)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 * eraseBurst { // nothing is kept of who was never here
		if resp := erase("/-/me"); resp.StatusCode != http.StatusNoContent {
			t.Fatal(resp.Status)
		}
	}
	left := 100 * eraseBurst // beyond what may come back while a busy machine makes them
	for ; left > 0; left-- {
		if resp := erase("/-/me", "Headcount-Id", known.Signed); resp.StatusCode == http.StatusTooManyRequests {
			if resp.Header.Get("Retry-After") != "1" {
				t.Errorf("Retry-After is %q", resp.Header.Get("Retry-After"))
			}
			break
		} else if resp.StatusCode != http.StatusNoContent {
			t.Fatal(resp.Status)
		}
	}
	if left == 0 {
		t.Error("one address may erase as often as it likes")
	}
	for range 2 * eraseBurst {
		if resp := erase("/-/users/ann", "X-API-Key", "key"); resp.StatusCode != http.StatusNoContent {
			t.Fatalf("a server: %s", resp.Status)
		}
	}

	e := newErasures()
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, server := range []bool{false, true} {
		var end func()
		for range erasesAtOnce {
			if end, err = e.turn(t.Context(), server); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := e.turn(ended, server); err == nil {
			t.Error("there are more at once than may be")
		}
		end()
		if _, err := e.turn(t.Context(), server); err != nil {
			t.Error(err)
		}
	}
}
