package gateway

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	coder "github.com/coder/websocket"
	"github.com/prometheus/client_golang/prometheus"

	"headcount/gateway/fanout"
	"headcount/gateway/socket"
	"headcount/internal/testkit"
)

// serveTLS is serveGateway over TLS. The client speaks HTTP/2, or 1.1 if old is set.
func serveTLS(t *testing.T, tune func(*Config)) (s *served, client func(old bool) *http.Client) {
	t.Helper()
	var server *httptest.Server
	var idle []func()
	s = serveVia(t, true, tune, func(s *served, hs *httptest.Server) {
		server = hs
		limiter := s.g.Listener(hs.Listener)
		hs.Config.ConnState, hs.Config.ConnContext = limiter.State, limiter.Context
		hs.EnableHTTP2 = true
		// StartTLS wraps the listener, but the gateway needs the connections below TLS.
		hs.Listener = BelowTLS(limiter)
		hs.StartTLS()
	})

	t.Cleanup(func() {
		for _, f := range idle {
			f()
		}
	})

	return s, func(old bool) *http.Client {
		transport := server.Client().Transport.(*http.Transport).Clone()
		if old {
			transport.ForceAttemptHTTP2 = false
			transport.TLSClientConfig.NextProtos = []string{"http/1.1"}
			transport.Protocols = new(http.Protocols)
			transport.Protocols.SetHTTP1(true)
		}

		idle = append(idle, transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
}

// events reads an event stream.
type events struct {
	t    *testing.T
	body io.ReadCloser
	in   *bufio.Reader
	end  context.CancelFunc
}

func (s *served) events(client *http.Client, page string, major int) *events {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	s.t.Cleanup(cancel)

	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.addr+"/"+page+"/counter/events", nil)
	if err != nil {
		s.t.Fatal(err)
	}

	resp, err := client.Do(req)
	if err != nil {
		s.t.Fatal(err)
	}

	if resp.StatusCode != http.StatusOK || resp.ProtoMajor != major ||
		resp.Header.Get("Content-Type") != "text/event-stream" {
		s.t.Fatalf("got %s, %s, %q; want an event stream", resp.Proto, resp.Status, resp.Header)
	}

	if c := resp.Header.Get("Set-Cookie"); !strings.Contains(c, "; Secure") {
		s.t.Errorf("the cookie %q is not Secure", c)
	}

	return &events{s.t, resp.Body, bufio.NewReader(resp.Body), cancel}
}

// expect reads events until the page has this count.
func (e *events) expect(count int) {
	e.t.Helper()
	for want := fmt.Sprintf(`"count":%d,`, count); ; {
		line, err := e.in.ReadString('\n')
		if err != nil {
			e.t.Fatalf("%v; want %s", err, want)
		}

		if strings.Contains(line, want) {
			return
		}
	}
}

// Over TLS, calls and event streams of a client that knows HTTP/2 share one connection. WebSockets, and clients that
// know only HTTP/1.1, use that. All see the same counts, and each stream ends as it should.
func TestServerTLS(t *testing.T) {
	s, client := serveTLS(t, nil)
	modern, old := client(false), client(true)
	streams := []*events{s.events(modern, "p", 2), s.events(modern, "p", 2), s.events(old, "p", 1)}
	for _, e := range streams {
		e.expect(0)
	}

	resp, err := modern.Get("https://" + s.addr + "/p/counter")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.ProtoMajor != 2 || resp.StatusCode != http.StatusOK {
		t.Fatalf("got %s, %s; want HTTP/2 and 200", resp.Proto, resp.Status)
	}

	resp, err = modern.Get("https://" + s.addr + "/-/ws")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	// HTTP/2 forbids the header Upgrade, and curl ends a connection on which it comes.
	if resp.StatusCode != http.StatusUpgradeRequired || resp.Header["Upgrade"] != nil {
		t.Errorf("an upgrade over HTTP/2: %s, %v; want 426 without Upgrade", resp.Status, resp.Header)
	}

	// A client that speaks plain HTTP to this port gets its answer in plain HTTP.
	resp, err = http.Get("http://" + s.addr + "/p/counter")
	if err != nil {
		t.Fatal(err)
	}
	said, _ := io.ReadAll(resp.Body)
	resp.Body.Close()

	if kind := resp.Header.Get("Content-Type"); resp.StatusCode != http.StatusBadRequest ||
		kind != "application/problem+json" || !strings.Contains(string(said), "use https") {
		t.Errorf("a client without TLS: %s, %s, %s; want the advice to use https", resp.Status, kind, said)
	}

	join := func() {
		t.Helper()
		ws, upgraded, err := coder.Dial(t.Context(), "wss://"+s.addr+"/-/ws", &coder.DialOptions{HTTPClient: old})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ws.CloseNow() })
		if c := upgraded.Header.Get("Set-Cookie"); !strings.Contains(c, "; Secure") {
			t.Errorf("the cookie %q is not Secure", c)
		}

		if err := ws.Write(t.Context(), coder.MessageText, []byte(`{"type":"join","page":"p"}`)); err != nil {
			t.Fatal(err)
		}
	}

	join()
	for _, e := range streams {
		e.expect(1)
	}

	// Three streams and the socket.
	s.settles(4)
	streams[0].end() // the client's other streams stay
	s.settles(3)

	join()
	for _, e := range streams[1:] {
		e.expect(2)
	}

	for _, c := range s.g.hub.Clients() {
		_ = c.Close()
	}
	for _, e := range streams[1:] {
		// A stream that is cut off, and not ended, gives an error here.
		if _, err := io.Copy(io.Discard, e.in); err != nil {
			t.Errorf("the stream ends with %v, want a clean end", err)
		}
	}
}

// A client that does not read costs bounded memory over HTTP/2 as well: its stream ends at --write-timeout.
func TestServerSlowClientOverHTTP2(t *testing.T) {
	reg := prometheus.NewRegistry()
	s, client := serveTLS(t, func(c *Config) {
		c.WriteTimeout = time.Second
		c.Registerer = reg
	})

	s.events(client(false), "p", 2)
	s.settles(1)
	// Enough to fill the system's buffers, so that a write waits. It waits for the first counts, too.
	enough := make([]byte, 16<<20)
	for _, c := range s.g.hub.Clients() {
		testkit.Eventually(t, "the write begins", func() bool { return !errors.Is(c.Try(enough), fanout.ErrBusy) })
	}

	s.settles(0)

	// The cause is counted as well, since a stream that ended for another reason would leave the gateway, too.
	if n := counted(t, reg, "headcount_connections_closed_total", "slow"); n != 1 {
		t.Errorf("%v clients were closed because they did not read, want 1", n)
	}
}

// The metric of how long answers take has of an event stream the time to open it alone, over HTTP/2 as well, where the
// handler returns at the end of the stream.
func TestServerTimeToOpenAStreamOverHTTP2(t *testing.T) {
	reg := prometheus.NewRegistry()
	s, client := serveTLS(t, func(c *Config) { c.Registerer = reg })

	began := time.Now()
	e := s.events(client(false), "p", 2)
	e.expect(0)
	opened := time.Since(began)

	// So the whole stream lasts longer than it took to open, and the metric would show if it had that time.
	time.Sleep(100 * time.Millisecond)
	e.end()
	s.settles(0)

	// The handler returns right after the connection is gone.
	testkit.Eventually(t, "the metric of the stream", func() bool {
		n, _ := observed(t, reg, "headcount_http_request_seconds")
		return n == 1
	})
	if _, sum := observed(t, reg, "headcount_http_request_seconds"); sum > opened.Seconds() {
		t.Errorf("the stream took %v s to open, want less than the %s until its first event", sum, opened)
	}
}

// observed returns how many observations a histogram has, and their sum.
func observed(t *testing.T, reg *prometheus.Registry, name string) (n uint64, sum float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, family := range families {
		if family.GetName() != name {
			continue
		}

		for _, m := range family.GetMetric() {
			n += m.GetHistogram().GetSampleCount()
			sum += m.GetHistogram().GetSampleSum()
		}
	}

	return n, sum
}

// TestServerSilentTLSHasNoGoroutine: where there is a poller, a silent connection over TLS has no goroutine either.
func TestServerSilentTLSHasNoGoroutine(t *testing.T) {
	if p, err := socket.NewPoller(); err != nil {
		t.Fatal(err)
	} else if p == nil {
		return // without a poller each connection has a goroutine
	}

	s, client := serveTLS(t, nil)
	old := client(true)
	const n = 30
	before := 0
	for i := range n {
		ws, _, err := coder.Dial(t.Context(), "wss://"+s.addr+"/-/ws", &coder.DialOptions{HTTPClient: old})
		if err != nil {
			t.Fatal(err)
		}

		defer ws.CloseNow()

		if i == 0 {
			before = runtime.NumGoroutine()
		}
	}

	// The client has up to two goroutines for each connection.
	testkit.Eventually(t, "the goroutines of clients alone",
		func() bool { return runtime.NumGoroutine() <= before+2*n+n/3 })
}

// A client that makes many calls on one connection, and takes no answer, is closed when others need its place.
func TestServerCallsThatAreNotTakenOverHTTP2(t *testing.T) {
	const most = 20
	s, client := serveTLS(t, func(c *Config) { c.MaxConnections = most })
	c, err := tls.Dial("tcp", s.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()

	frame := func(kind, flags byte, stream uint32, payload string) {
		t.Helper()
		n := len(payload)
		head := binary.BigEndian.AppendUint32([]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}, stream)
		if _, err := io.WriteString(c, string(head)+payload); err != nil {
			t.Fatal(err)
		}
	}

	const settings, headers, endOfAll = 4, 1, 5 // the flags for the end of the stream and of its headers
	if _, err := io.WriteString(c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"); err != nil {
		t.Fatal(err)
	}

	frame(settings, 0, 0, "\x00\x04\x00\x00\x00\x00") // the server may send no byte of a body
	for i := range most + 1 {
		frame(headers, endOfAll, uint32(2*i+1), "\x82\x87\x04\x0a/p/counter\x01\x01h") // GET, https, path, authority
	}

	_ = c.SetReadDeadline(time.Now().Add(testkit.Timeout))
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatal("the client kept its place")
	}

	resp, err := client(false).Get("https://" + s.addr + "/p/counter")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.ProtoMajor != 2 || resp.StatusCode != http.StatusOK {
		t.Fatalf("another client got %s, %s; want HTTP/2 and 200", resp.Proto, resp.Status)
	}
}
