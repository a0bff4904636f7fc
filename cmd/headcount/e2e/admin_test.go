package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

func TestAdminEndpoints(t *testing.T) {
	t.Parallel()
	s := start(t, "--jwt-secret="+jwtSecret)
	const page, user = "a page of its own", "somebody"
	c := s.dial(t, dialer{query: "token=" + hs256(t, map[string]any{"sub": user})})
	c.join(page)
	c.takeCount(page, 1)
	c.send(`{"type":"join","page":"bad` + "\u2028" + `page"}`)
	c.takeError("bad_page")
	s.get(t, "/a%20page%20of%20its%20own/counter").counter(t)
	s.get(t, "/nothing%20like%20it").problem(t, 404)
	s.get(t, "/thirdname%00bad/counter").problem(t, 400)
	for _, path := range []string{"/healthz", "/readyz", "/metrics", "/debug/pprof/", "/debug/pprof/goroutine?debug=1"} {
		if a := do(t, "GET", s.admin+path, ""); a.status != 200 || a.body == "" {
			t.Errorf("%s: %d %.100s", path, a.status, a.body)
		}
	}
	metrics := do(t, "GET", s.admin+"/metrics", "").body
	for _, private := range []string{page, "its%20own", "nothing", "thirdname", "badpage", user, c.user} {
		if strings.Contains(metrics, private) {
			t.Errorf("%q is in /metrics", private)
		}
	}
	for _, name := range []string{"headcount_connections 1\n", "headcount_users 1\n", "go_goroutines ", "process_resident_memory_bytes "} {
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

func TestUpgrade(t *testing.T) {
	t.Parallel()
	s := common(t)
	for name, tc := range map[string]struct {
		offer []string
		want  string // "refused" for none of it
	}{
		"none":                {nil, ""},
		"ours":                {[]string{"headcount.v1"}, "headcount.v1"},
		"ours second":         {[]string{"other", "headcount.v1"}, "headcount.v1"},
		"ours first":          {[]string{"headcount.v1", "headcount.v2"}, "headcount.v1"},
		"another":             {[]string{"headcount.v2"}, "refused"},
		"several others":      {[]string{"mqtt", "graphql-ws"}, "refused"},
		"one that begins so":  {[]string{"headcount.v11"}, "refused"},
		"one that is part of": {[]string{"headcount"}, "refused"},
	} {
		t.Run(name, func(t *testing.T) {
			d := dialer{protocols: tc.offer}
			if tc.want == "refused" {
				s.refused(t, d).problem(t, 400)
				return
			}
			c := s.dial(t, d)
			if got := c.ws.Subprotocol(); got != tc.want {
				t.Errorf("subprotocol %q, want %q", got, tc.want)
			}
			if got := c.resp.Header.Get("Sec-WebSocket-Extensions"); got != "" {
				t.Errorf("extensions %q", got)
			}
		})
	}
	const head = "GET /-/ws HTTP/1.1\r\nHost: x\r\n"
	const key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
	for name, tc := range map[string]struct {
		request string
		want    int
	}{
		"no upgrade":              {head, 426},
		"upgrade to another":      {head + "Connection: Upgrade\r\nUpgrade: h2c\r\n", 426},
		"without Connection":      {head + "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" + key, 426},
		"version 8":               {head + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 8\r\n" + key, 400},
		"no version":              {head + "Connection: Upgrade\r\nUpgrade: websocket\r\n" + key, 400},
		"no key":                  {head + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n", 400},
		"a short key":             {head + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n", 400},
		"a key that is none":      {head + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: !\r\n", 400},
		"a POST":                  {"POST" + head[3:] + "Content-Length: 0\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" + key, 405},
		"HTTP/1.0":                {strings.Replace(head, "1.1", "1.0", 1) + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" + key, 426},
		"an upgrade of a counter": {strings.Replace(head, "/-/ws", "/p/counter", 1) + "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" + key, 200},
		"several tokens":          {head + "Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n" + key, 101},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.want == 101 {
				c := s.rawDial(t)
				fmt.Fprint(c, tc.request+"\r\n")
				line := make([]byte, 12)
				if _, err := c.Read(line); err != nil || string(line) != "HTTP/1.1 101" {
					t.Errorf("%s %v", line, err)
				}
				return
			}
			request := tc.request
			if !strings.Contains(request, "Connection:") {
				request += "Connection: close\r\n"
			}
			c := s.rawDial(t)
			a := readAnswer(t, c, func() { fmt.Fprint(c, request+"\r\n") })
			if tc.want == 200 {
				a.counter(t)
				return
			}
			a.problem(t, tc.want)
			if tc.want == 426 && !strings.EqualFold(a.header.Get("Upgrade"), "websocket") {
				t.Errorf("Upgrade %q", a.header.Get("Upgrade"))
			}
			if a.header["Set-Cookie"] != nil {
				t.Error("a refused upgrade sets a cookie")
			}
		})
	}
}

// What is not ready says so, and never counts 0.
func TestStartsReadyOrSaysSo(t *testing.T) {
	t.Parallel()
	for range 4 {
		s, err := spawn()
		if err != nil {
			t.Fatal(err)
		}
		ready := false
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
					t.Errorf("%s", f.text)
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
