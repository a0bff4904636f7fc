package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
)

func TestDrain(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			const within = 8 * time.Second
			s := start(t, "--shutdown-timeout="+within.String(), "--leave-grace=300ms")
			// A client that is told to reconnect leaves, the others stay to the end.
			mover, stayers := s.ws(t), []*client{s.ws(t), s.ws(t), s.ws(t)}
			for i, c := range append(stayers, mover) {
				c.join("p")
				c.awaitCount("p", i+1)
			}
			eventually(t, "all are counted", func() bool { return s.count(t, "p") == 4 })
			st := s.sse(t, "/p/counter/events")
			st.take()
			told := time.Now()
			s.signal(sig)
			f := mover.await("reconnect", func(f frame) bool { return f.Type == "reconnect" })
			if f.AfterMS == nil || *f.AfterMS < 0 || *f.AfterMS >= within.Milliseconds()/2 {
				t.Errorf("%s", f.text)
			}
			if a := do(t, "GET", s.admin+"/readyz", ""); a.status != 503 {
				t.Errorf("/readyz while it drains: %d", a.status)
			}
			if a := do(t, "GET", s.admin+"/healthz", ""); a.status != 200 {
				t.Errorf("/healthz while it drains: %d", a.status)
			}
			s.refused(t, dialer{}).problem(t, http.StatusServiceUnavailable)
			s.get(t, "/p/counter/events").problem(t, http.StatusServiceUnavailable)
			if got := s.count(t, "p"); got != 4 {
				t.Errorf("while it drains: %d", got)
			}
			mover.close()
			for _, c := range stayers {
				f := c.await("reconnect", func(f frame) bool { return f.Type == "reconnect" })
				if f.AfterMS == nil || *f.AfterMS < 0 || *f.AfterMS >= within.Milliseconds()/2 {
					t.Errorf("%s", f.text)
				}
				var err error
				for ok := true; ok; {
					f, more, end := c.poll(time.Now().Add(patience))
					if more && f.Type != "count" {
						t.Errorf("after reconnect: %s", f.text)
					}
					if more && f.Type == "count" && *f.Count < 3 {
						t.Errorf("one who waits to be sent away is not counted: %s", f.text)
					}
					ok, err = more, end
				}
				if closed := time.Since(told); closed < time.Duration(*f.AfterMS)*time.Millisecond {
					t.Errorf("closed after %s, told to go after %d ms", closed, *f.AfterMS)
				}
				if code := websocket.CloseStatus(err); code != websocket.StatusServiceRestart {
					t.Errorf("close %d: %v", code, err)
				}
			}
			st.end()
			s.died(t, 0, within+ending)
		})
	}
}

// No client can keep a server from ending in time, and with status 0.
func TestDrainEndsInTime(t *testing.T) {
	t.Parallel()
	for name, hang := range map[string]func(*testing.T, *server){
		"nobody": func(*testing.T, *server) {},
		"a WebSocket that does not answer the close": func(t *testing.T, s *server) {
			s.rawWS(t, 0).send(0x81, `{"type":"join","page":"p"}`)
		},
		"a WebSocket that has not read for long": func(t *testing.T, s *server) {
			clog(t, s, s.rawWS(t, 4096))
		},
		"an event stream that is not read": func(t *testing.T, s *server) {
			fmt.Fprintf(s.rawDial(t), "GET /p/counter/events HTTP/1.1\r\nHost: x\r\n\r\n")
			eventually(t, "the stream", func() bool { return s.metric(t, "headcount_connections") == 1 })
		},
		"a connection that says nothing": func(t *testing.T, s *server) { s.rawDial(t) },
		"half of a request": func(t *testing.T, s *server) {
			fmt.Fprintf(s.rawDial(t), "GET /p/counter HTTP/1.1\r\nHost:")
		},
		"half of a body": func(t *testing.T, s *server) {
			fmt.Fprintf(s.rawDial(t), "PUT /p/counter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
		},
		"an idle connection": func(t *testing.T, s *server) {
			c := s.rawDial(t)
			fmt.Fprintf(c, "GET /p/counter HTTP/1.1\r\nHost: x\r\n\r\n")
			if _, err := c.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		},
		"a profile on the admin address": func(t *testing.T, s *server) {
			go func() {
				resp, err := http.Get(s.admin + "/debug/pprof/trace?seconds=20")
				if err == nil {
					_, _ = io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
			}()
			eventually(t, "the profile", func() bool {
				return strings.Contains(do(t, "GET", s.admin+"/debug/pprof/goroutine?debug=2", "").body, "pprof.Trace")
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const within = 2 * time.Second
			s := start(t, "--shutdown-timeout="+within.String())
			hang(t, s)
			s.signal(syscall.SIGTERM)
			s.died(t, 0, within+ending)
		})
	}
}

func TestSecondSignal(t *testing.T) {
	t.Parallel()
	for _, pair := range [][2]syscall.Signal{{syscall.SIGTERM, syscall.SIGTERM}, {syscall.SIGINT, syscall.SIGTERM}} {
		s := start(t, "--shutdown-timeout=60s")
		c := s.ws(t)
		s.signal(pair[0])
		c.await("reconnect", func(f frame) bool { return f.Type == "reconnect" })
		s.signal(pair[1])
		s.died(t, 1, patience)
	}
}
