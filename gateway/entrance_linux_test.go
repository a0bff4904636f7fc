//go:build !portable

package gateway

import (
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/socket"
	"headcount/internal/testkit"
)

// entered is a gateway behind an entrance.
type entered struct {
	*served
	entrance *Entrance
	passed   atomic.Int64 // connections that were passed on to the HTTP server
}

// enter serves an entrance with two handlers: its own, and that of the HTTP server behind it.
func enter(t *testing.T, own, other http.Handler, silent time.Duration, tune func(*Config)) *entered {
	t.Helper()
	s := &entered{served: runGateway(t, true, tune)}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if own == nil {
		own, other = s.g.Handler(), s.g.Handler()
	}

	s.entrance, err = s.g.NewEntrance(l, own, silent)
	if err != nil {
		t.Fatal(err)
	}

	server := &http.Server{Handler: other, ConnState: func(c net.Conn, state http.ConnState) {
		s.entrance.State(c, state)
		if state == http.StateNew {
			s.passed.Add(1)
		}
	}}
	var serving sync.WaitGroup
	for _, l := range []net.Listener{s.entrance, s.entrance.Passed()} {
		serving.Go(func() { _ = server.Serve(l) })
	}
	s.addr = l.Addr().String()
	s.dial = dialFrom(s.addr, func() net.Addr { return nil })

	t.Cleanup(func() {
		s.drain()
		_ = server.Close()
		serving.Wait()
		s.stop()
	})

	return s
}

// says returns a handler that answers with a word and the method.
func says(word string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, word+" "+r.Method)
	})
}

const (
	upgradeHead = "GET /-/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
	upgradeRest = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)

// The entrance serves upgrades, and passes everything else on with every byte that it has read. A connection also goes
// on after the entrance has answered itself.
func TestServerEntrance(t *testing.T) {
	s := enter(t, says("entrance"), says("server"), time.Minute, nil)
	const get, post = "GET / HTTP/1.1\r\nHost: h\r\n\r\n", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n"

	large := "X-Large: " + strings.Repeat("a", 12_000) + "\r\n" // more than one read takes

	// The entrance reads once. It serves an upgrade that is complete then. Whatever needs a second read, or has a body,
	// goes to net/http.
	for name, tc := range map[string]struct{ first, then, want string }{
		"an upgrade":                {upgradeHead + upgradeRest, "", "entrance GET"},
		"another request":           {get, "", "server GET"},
		"an upgrade in two parts":   {upgradeHead, upgradeRest, "server GET"},
		"a letter at first":         {"P", post[1:] + "{}", "server POST"},
		"an upgrade with a length":  {upgradeHead + "Content-Length: 2\r\n" + upgradeRest + "{}", "", "server GET"},
		"an upgrade, and a request": {upgradeHead + upgradeRest + get, "", "entrance GET, server GET"},
		"several requests":          {get + post + "{}" + get, "", "server GET, server POST, server GET"},
		"a large head":              {strings.Replace(get, "Host", large+"Host", 1), "", "server GET"},
	} {
		before := s.passed.Load()
		r := s.raw(tc.first)
		if tc.then != "" {
			// Otherwise the system may join the two parts, and the entrance would see a whole request.
			testkit.Eventually(t, name, func() bool { return s.passed.Load() > before })
			r.write([]byte(tc.then))
		}

		for want := range strings.SplitSeq(tc.want, ", ") {
			body, err := io.ReadAll(r.response(http.StatusOK).Body)
			if string(body) != want || err != nil {
				t.Errorf("%s: %q, %v, want %q", name, body, err, want)
			}
		}
		_ = r.Close()
	}
}

// A refused upgrade gets the answer that net/http would give.
func TestServerEntranceRefuses(t *testing.T) {
	s := enter(t, nil, nil, time.Minute, nil)

	for name, fields := range map[string]string{
		"the version": "Sec-WebSocket-Version: 8\r\n\r\n",
		"the origin":  "Origin: https://other.example\r\n" + upgradeRest,
		"the API key": "X-API-Key: none\r\n" + upgradeRest,
	} {
		var heads [2]http.Header
		var statuses [2]int
		// With a Content-Length the request goes to net/http.
		for i, head := range []string{upgradeHead, upgradeHead + "Content-Length: 0\r\n"} {
			r := s.raw(head + fields)
			resp, err := http.ReadResponse(r.in, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(io.Discard, resp.Body); err != nil || resp.ContentLength <= 0 {
				t.Errorf("%s: the answer has %d bytes, %v; want some", name, resp.ContentLength, err)
			}

			for _, differs := range []string{"Date", "X-Request-Id"} {
				if resp.Header.Get(differs) == "" {
					t.Errorf("%s: the answer lacks %s", name, differs)
				}

				delete(resp.Header, differs)
			}

			heads[i], statuses[i] = resp.Header, resp.StatusCode
			_ = r.Close()
		}

		if !maps.EqualFunc(heads[0], heads[1], slices.Equal) || statuses[0] != statuses[1] {
			t.Errorf("%s: the entrance answers %d %v, and net/http %d %v",
				name, statuses[0], heads[0], statuses[1], heads[1])
		}
	}
}

// A client that sends nothing is closed in the end. One that goes away leaves its place to the next.
func TestServerEntranceSilence(t *testing.T) {
	reg := prometheus.NewRegistry()
	one := func(cfg *Config) {
		cfg.MaxConnections = 2 // which leaves two short connections
		cfg.Registerer = reg
	}
	s := enter(t, says("entrance"), says("server"), 200*time.Millisecond, one)

	silent, gone := s.raw(""), s.raw("")
	_ = gone.Conn.(*net.TCPConn).CloseWrite()
	for what, r := range map[string]*raw{"a silent client": silent, "a client that has gone": gone} {
		_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))
		if _, err := r.in.ReadByte(); err != io.EOF {
			t.Errorf("%s got %v, want EOF", what, err)
		}
	}

	// Both places must be free again without an eviction, which the metric below shows.
	for range 2 {
		s.raw(upgradeHead + upgradeRest).response(http.StatusOK)
	}

	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		evicted := f.GetName() == "headcount_connections_evicted_total"
		if evicted && f.GetMetric()[0].GetCounter().GetValue() > 0 {
			t.Error("a connection was evicted, though each had ended before the next came")
		}
	}
}

// When the HTTP server has ended, no client is left waiting for it.
func TestServerEntranceCloses(t *testing.T) {
	s := enter(t, says("entrance"), says("server"), time.Minute, nil)
	_ = s.entrance.Passed().Close()

	late := s.raw("GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	_ = late.SetReadDeadline(time.Now().Add(testkit.Timeout))
	if _, err := late.in.ReadByte(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a client that no server will serve got %v, want the end of the connection", err)
	}
}

// A handler that panics breaks off its own connection, as behind net/http, and no other.
func TestServerEntrancePanic(t *testing.T) {
	panics := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Abort") != "" {
			panic(http.ErrAbortHandler)
		}
		panic("a defect")
	})

	s := enter(t, panics, says("server"), time.Minute, nil)

	for _, field := range []string{"X-Abort: 1\r\n", ""} {
		r := s.raw(upgradeHead + field + upgradeRest)
		_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))
		if _, err := r.in.ReadByte(); err != io.EOF {
			t.Errorf("after a panic the client got %v, want EOF", err)
		}
	}

	// The process still runs and accepts others: a poller calls the handler, so a panic that passes would end
	// everything.
	s.raw("GET / HTTP/1.1\r\nHost: h\r\n\r\n").response(http.StatusOK)
}

// acceptor returns a function that accepts a new client each time. The clients stay until the test ends.
func acceptor(t *testing.T) (accept func() *socket.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a, err := socket.Acceptor(l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })

	return func() *socket.Conn {
		t.Helper()
		client, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = client.Close() })

		over, err := a.Accept()
		if err != nil {
			t.Fatal(err)
		}

		return over.(*socket.Conn)
	}
}

// A client whose time is over when its first bytes come is closed. Nothing else uses its descriptor, which may belong
// to another client by then.
func TestServerEntranceLate(t *testing.T) {
	served := make(chan struct{}, 1)
	own := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served <- struct{}{} })
	s := enter(t, own, says("server"), time.Minute, nil)
	over := acceptor(t)()
	defer over.Close()

	a := &arrival{Entrance: s.entrance, client: over, silent: time.NewTimer(time.Minute)}
	a.silent.Stop() // as if it had fired, and were about to close the connection
	a.Awaited(over, []byte(upgradeHead+upgradeRest))

	select {
	case <-served:
		t.Error("a client was served that is about to be closed")
	default:
	}
}

// A client whose request is being served is not evicted like one that has sent nothing.
func TestServerEntranceServing(t *testing.T) {
	serving, goOn := make(chan struct{}), make(chan struct{})
	own := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(serving)
		<-goOn
		_, _ = io.WriteString(w, "entrance")
	})

	one := func(cfg *Config) {
		cfg.MaxConnections = 1 // which leaves one short connection
		cfg.Waits = true
	}

	s := enter(t, own, says("server"), time.Minute, one)

	first := s.raw(upgradeHead + upgradeRest)
	<-serving
	s.raw("") // this one wants the place of the first
	time.Sleep(200 * time.Millisecond)
	close(goOn)
	// An eviction would have cut this answer off.
	first.response(http.StatusOK)
}

// A connection that is taken over from net/http has all that the client has sent, even what net/http has not read yet.
func TestServerEntranceEarly(t *testing.T) {
	s := enter(t, nil, nil, time.Minute, nil)

	const pings = 40 // of 131 bytes each: more than net/http reads at once
	ping := "\x89\xfd\x00\x00\x00\x00" + strings.Repeat("a", 125)
	// With a Content-Length the request goes to net/http.
	end := "\x88\x82\x00\x00\x00\x00\x03\xe8"
	r := s.raw(upgradeHead + "Content-Length: 0\r\n" + upgradeRest + strings.Repeat(ping, pings) + end)
	r.response(http.StatusSwitchingProtocols)

	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))
	got, err := io.ReadAll(r.in)
	if n := strings.Count(string(got), "\x8a\x7d"); n != pings || err != nil {
		t.Errorf("%d pings of %d were answered, %v: %q", n, pings, err, got[max(len(got)-50, 0):])
	}
}

// A client that is closed to make room for others, before it has sent anything, leaves no memory behind. Otherwise a
// flood of such clients would have what it costs kept until their time to send something is over.
func TestServerNothingIsKeptOfAClosedArrival(t *testing.T) {
	s := enter(t, nil, nil, time.Hour, nil)
	accept := acceptor(t)

	var freed atomic.Int64
	const n = 10
	for range n {
		over := accept()
		runtime.AddCleanup(over, func(struct{}) { freed.Add(1) }, struct{}{})
		if !s.entrance.await(over, over) {
			t.Fatal("no poller waits for the client")
		}
		_ = over.Close()
	}

	// The variables above may keep the last one.
	testkit.Eventually(t, "the memory of closed clients to be freed", func() bool {
		runtime.GC()
		return freed.Load() >= n-1
	})
}
