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

	"headcount/internal/testkit"
)

func TestClockDrain(t *testing.T) {
	t.Parallel()
	const within = 20 * time.Second // clients are sent away in the first half of it

	s := start(t, "--shutdown-timeout="+within.String(), "--leave-grace=300ms")

	// A client that receives reconnect leaves at once; the others stay to the end.
	mover := s.ws(t)
	stayers := []*client{s.ws(t), s.ws(t), s.ws(t)}
	for i, c := range append(stayers, mover) {
		c.join("p")
		c.awaitCount("p", i+1)
	}

	testkit.Eventually(t, "all are counted", func() bool { return s.count(t, "p") == 4 })
	st := s.sse(t, "/p/counter/events")
	st.take()

	watch := testkit.NewStopwatch(t)
	told := time.Now()
	s.Signal(syscall.SIGTERM)
	f := mover.await("reconnect", func(f frame) bool { return f.Type == "reconnect" })
	if f.AfterMS == nil || *f.AfterMS < 0 || *f.AfterMS >= within.Milliseconds()/2 {
		t.Errorf("told to reconnect after a time outside the first half of %s: %s", within, f.text)
	}

	// So few clients are sent away within a second. An answer that a slow machine gives later proves nothing.
	during := func(what string, ok bool, a answer, err error) {
		t.Helper()
		late := time.Since(told) > time.Second && watch.Elapsed() < time.Second
		if !ok && !late {
			t.Errorf("%s while it drains: %d %s, %v", what, a.status, a.body, err)
		}
	}

	for url, want := range map[string]int{
		s.admin + "/readyz": 503, s.admin + "/healthz": 200, s.url + "/p/counter/events": 503,
	} {
		a, err := try("GET", url, "")
		during(url, err == nil && a.status == want, a, err)
		if a.status == 503 && url != s.admin+"/readyz" {
			a.problem(t, 503)
		}
	}

	a, err := try("GET", s.url+"/p/counter", "")
	during("the count", err == nil && strings.Contains(a.body, `"count":4,`), a, err)

	a, err = try("GET", s.url+"/-/ws", "", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
	during("a WebSocket", err == nil && a.status == 503, a, err)
	if a.status == 503 {
		a.problem(t, 503)
	}

	// The stayers are served and counted until their own time has come.
	mover.close()

	for _, c := range stayers {
		f := c.await("reconnect", func(f frame) bool { return f.Type == "reconnect" })
		if f.AfterMS == nil || *f.AfterMS < 0 || *f.AfterMS >= within.Milliseconds()/2 {
			t.Errorf("told to reconnect after a time outside the first half of %s: %s", within, f.text)
		}

		var err error
		for ok := true; ok; {
			f, more, end := c.poll(time.Now().Add(testkit.Timeout))
			if more && f.Type != "count" {
				t.Errorf("after reconnect: %s", f.text)
			}
			if more && f.Type == "count" && *f.Count < 3 {
				t.Errorf("a client that waits to be sent away is not counted: %s", f.text)
			}
			ok, err = more, end
		}

		if closed := time.Since(told); closed < time.Duration(*f.AfterMS)*time.Millisecond {
			t.Errorf("closed after %s, sent away after %d ms", closed, *f.AfterMS)
		}
		if code := websocket.CloseStatus(err); code != websocket.StatusServiceRestart {
			t.Errorf("close %d: %v", code, err)
		}
	}

	st.end()
	s.died(t, 0)
	endedWithin(t, watch, within)
}

// endedWithin holds the promise of --shutdown-timeout. The end of a drained process takes a moment more.
func endedWithin(t *testing.T, watch *testkit.Stopwatch, timeout time.Duration) {
	t.Helper()
	if took := watch.Elapsed(); took > timeout+3*time.Second {
		t.Errorf("it took %s (the machine lost %s more) with a --shutdown-timeout of %s", took, watch.Lost(), timeout)
	}
}

// clog makes the server send w more than the sockets can buffer; w never reads.
func clog(w *rawSocket) {
	var pages []string
	for i := range 100 {
		pages = append(pages, fmt.Sprintf("%030d", i))
	}
	subscribe := testkit.ClientFrame(0x81, `{"type":"subscribe","pages":`+quoted(pages)+`}`)

	_ = w.SetWriteDeadline(time.Now().Add(testkit.Timeout))
	for range 900 { // each answer has 12 kB
		if _, err := w.Write(subscribe); err != nil {
			return // the server has closed the connection, or stopped reading
		}
	}
}

// No client can prevent a server from ending in time, and with status 0, nor can all kinds of them together. A server
// without clients ends so at the end of each test.
func TestClockDrainEndsInTime(t *testing.T) {
	t.Parallel()
	const within = 2 * time.Second
	s := start(t, "--shutdown-timeout="+within.String())

	// A profile on the admin address.
	go func() { // ends with the server
		resp, err := http.Get(s.admin + "/debug/pprof/trace?seconds=600")
		if err == nil {
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}()
	testkit.Eventually(t, "the profile", func() bool {
		return strings.Contains(do(t, "GET", s.admin+"/debug/pprof/goroutine?debug=2", "").body, "pprof.Trace")
	})

	// An event stream that is not read.
	fmt.Fprintf(s.rawDial(t), "GET /p/counter/events HTTP/1.1\r\nHost: x\r\n\r\n")
	testkit.Eventually(t, "the stream", func() bool { return s.metric(t, "headcount_connections") == 1 })

	// A connection that says nothing, half of a request, and half of a body.
	s.rawDial(t)
	fmt.Fprintf(s.rawDial(t), "GET /p/counter HTTP/1.1\r\nHost:")
	fmt.Fprintf(s.rawDial(t), "PUT /p/counter HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")

	// An idle connection.
	idle := s.rawDial(t)
	fmt.Fprintf(idle, "GET /p/counter HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := idle.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}

	// A WebSocket that does not answer the close, and one that has not read for long.
	s.rawWS(t, 0).send(0x81, `{"type":"join","page":"p"}`)
	clog(s.rawWS(t, 4096))

	watch := testkit.NewStopwatch(t)
	s.Signal(syscall.SIGTERM)
	s.died(t, 0)
	endedWithin(t, watch, within)
}
