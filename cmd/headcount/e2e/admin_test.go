package e2e

import (
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

func TestServerAdminEndpoints(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret)
	const page, user = "a page of its own", "somebody"

	// Traffic with names that must not appear in metrics and logs.
	c := s.dial(t, dialer{query: "token=" + hs256(t, map[string]any{"sub": user})})
	c.join(page)
	c.takeCount(page, 1)

	c.send(`{"type":"join","page":"bad` + "\u2028" + `page"}`)
	c.takeError("bad_page")

	s.get(t, "/a%20page%20of%20its%20own/counter").counter(t)
	s.get(t, "/nothing%20like%20it").problem(t, 404)
	s.get(t, "/thirdname%00bad/counter").problem(t, 400)

	for _, path := range []string{
		"/healthz", "/readyz", "/readyz?exclude=store", "/metrics", "/debug/pprof/", "/debug/pprof/goroutine?debug=1",
	} {
		if a := do(t, "GET", s.admin+path, ""); a.status != 200 || a.body == "" {
			t.Errorf("%s: %d %.100s", path, a.status, a.body)
		}
	}

	// Only known hosts are served, so that no page of another site can read the metrics by DNS rebinding.
	port := s.admin[strings.LastIndex(s.admin, ":"):]
	if a := do(t, "GET", "http://localhost"+port+"/healthz", ""); a.status != 200 {
		t.Errorf("as localhost: %d %s", a.status, a.body)
	}
	a := do(t, "GET", s.admin+"/metrics", "", "Host: evil.example")
	if a.status != 421 || strings.Contains(a.body, "go_goroutines") {
		t.Errorf("as another host: %d %.100s", a.status, a.body)
	}

	metrics := do(t, "GET", s.admin+"/metrics", "").body
	for _, private := range []string{page, "its%20own", "nothing", "thirdname", "badpage", user, c.user} {
		if strings.Contains(metrics, private) {
			t.Errorf("%q is in /metrics", private)
		}
	}

	for _, name := range []string{
		"headcount_connections 1\n", "headcount_users 1\n", "go_goroutines ", "process_resident_memory_bytes ",
	} {
		if !strings.Contains(metrics, name) {
			t.Errorf("no %q in /metrics", name)
		}
	}

	for _, path := range []string{"/debug/pprof/cmdline", "/debug/pprof/", "/debug/vars", "/metrics"} {
		if strings.Contains(do(t, "GET", s.admin+path, "").body, jwtSecret) {
			t.Errorf("%s shows a secret", path)
		}
	}

	if log := s.log.String(); strings.Contains(log, user) {
		t.Errorf("the user is in the log: %s", log)
	}
}

// A server that is not ready says so, and never answers a count of 0.
func TestServerStartsReadyOrSaysSo(t *testing.T) {
	t.Parallel()
	for range 2 {
		s, err := spawn()
		if err != nil {
			t.Fatal(err)
		}

		ready := false

		// Asks again and again, until a few looks after the server has become ready.
		for end := 0; end < 3; {
			was := ready
			a := do(t, "GET", s.admin+"/readyz", "")
			ready = a.status == http.StatusOK
			if was && !ready {
				t.Error("no longer ready")
			}

			get := s.get(t, "/p/counter")
			switch {
			case get.status == http.StatusOK:
				get.counter(t)
			case ready:
				t.Errorf("ready, but GET is %d %s", get.status, get.body)
			default:
				get.problem(t, http.StatusServiceUnavailable)
			}

			c, err := s.connect(dialer{})
			switch {
			case err == nil:
				c.t = t
				c.subscribe("p")
				if f := c.await("count", func(f frame) bool { return f.isCount("p") }); f.Stale {
					t.Errorf("a stale count of a server that starts: %s", f.text)
				}
				_ = c.ws.Close(websocket.StatusNormalClosure, "")
			case ready:
				t.Errorf("ready, but an upgrade is refused: %v", err)
			}

			if ready {
				end++
			}
		}

		if problem := s.end(); problem != "" {
			t.Error(problem)
		}
	}
}
