package httppolicy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// limitedServer is an HTTP server behind a ConnLimiter of a few places.
type limitedServer struct {
	t       *testing.T
	limiter *ConnLimiter
	evicted tally
}

// tally is a Counter.
type tally struct{ atomic.Int64 }

func (n *tally) Inc() { n.Add(1) }

func newLimitedServer(t *testing.T, limit int) *limitedServer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	s := &limitedServer{t: t}
	s.limiter = NewConnLimiter(l, time.Minute, limit, func(error) {}, &s.evicted)
	server := &http.Server{ConnState: s.limiter.State,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/long" {
				return
			}

			// A hijacked connection is no short one any more, and the test closes it.
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			t.Cleanup(func() { c.Close() })
		})}

	ended := make(chan error)
	go func() { ended <- server.Serve(s.limiter) }()
	t.Cleanup(func() {
		server.Close()
		<-ended
		testkit.Eventually(t, "the end of all connections", func() bool { return s.short() == 0 })
	})

	return s
}

func (s *limitedServer) short() int {
	s.limiter.mu.Lock()
	defer s.limiter.mu.Unlock()

	// Each short connection is in one of the two lists.
	if len(s.limiter.short) != s.limiter.active.Len()+s.limiter.silent.Len() {
		s.t.Fatalf("%d short connections, %d active, %d silent",
			len(s.limiter.short), s.limiter.active.Len(), s.limiter.silent.Len())
	}

	return len(s.limiter.short)
}

// says connects and sends text.
func (s *limitedServer) says(text string) net.Conn {
	s.t.Helper()
	c, err := net.Dial("tcp", s.limiter.Addr().String())
	if err != nil {
		s.t.Fatal(err)
	}

	s.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(testkit.Timeout))
	if _, err := io.WriteString(c, text); err != nil {
		s.t.Fatal(err)
	}
	return c
}

func (s *limitedServer) answered(c net.Conn) error {
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", resp.StatusCode)
	}

	return err
}

const (
	wholeRequest = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"
	halfRequest  = "GET /-/ws HTTP/1.1\r\nHost: x\r\n"
)

// Behind a real server a ConnLimiter learns whether a connection has sent something, whether it has made a step, and
// when it becomes a long one. How long each may stay is tested in memory.
func TestServerConnLimiter(t *testing.T) {
	t.Parallel()
	t.Log("long connections take no place, and no client is closed while there is room")
	const limit = 4
	s := newLimitedServer(t, limit)
	for range 10 * limit {
		if err := s.answered(s.says("GET /long HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
	}

	testkit.Eventually(t, "no short connection", func() bool { return s.short() == 0 })
	if n := s.evicted.Load(); n != 0 {
		t.Errorf("%d connections were evicted, want none", n)
	}

	t.Log("a client that has sent a part does not go before one that has sent nothing")
	s = newLimitedServer(t, 2)
	half := s.says(halfRequest)
	testkit.Eventually(t, "a short connection that has sent something", func() bool {
		s.limiter.mu.Lock()
		defer s.limiter.mu.Unlock()
		return s.limiter.silent.Len() == 1 && said(s.limiter.silent.Front().Value.(*shortConn).conn)
	})

	silent := s.says("")
	testkit.Eventually(t, "two short connections", func() bool { return s.short() == 2 })
	time.Sleep(silenceTimeout) // until the silent client has had its time

	if err := s.answered(s.says(wholeRequest)); err != nil {
		t.Fatal(err)
	}
	if _, err := silent.Read(make([]byte, 1)); err == nil {
		t.Error("the silent connection was not evicted")
	}
	if _, err := io.WriteString(half, "\r\n"); err != nil {
		t.Error(err)
	}
	if err := s.answered(half); err != nil {
		t.Errorf("a connection that had sent a part was evicted: %v", err)
	}

	t.Log("a connection whose last step was earlier is closed first")
	s = newLimitedServer(t, 2)
	first := s.says(wholeRequest)
	if err := s.answered(first); err != nil {
		t.Fatal(err)
	}

	second := s.says(halfRequest)
	testkit.Eventually(t, "two short connections", func() bool { return s.short() == 2 })

	ask := func() {
		t.Helper()
		if _, err := io.WriteString(first, wholeRequest); err != nil {
			t.Fatal(err)
		}
		if err := s.answered(first); err != nil {
			t.Fatalf("a connection with a second request was evicted: %v", err)
		}
	}

	ask()
	if err := s.answered(s.says(wholeRequest)); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Read(make([]byte, 1)); err == nil {
		t.Error("the half handshake was not evicted")
	}

	ask()
}

// A client that sends its request is served, however many clients send nothing or a part. These make room, the oldest
// first, and no more of them than necessary.
func TestConnLimiterHalfHandshakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit, apart = 8, 10 * time.Millisecond
		cl, _, clients := acceptAll(t, limit, 0)
		for range limit {
			c, client := acceptOne(t, cl)
			cl.State(c, http.StateActive)
			clients = append(clients, client)
			time.Sleep(apart)
		}

		// accepts connects one more client, and returns how long it waited.
		accepts := func() time.Duration {
			t.Helper()
			began := time.Now()
			c, _ := acceptOne(t, cl)
			cl.State(c, http.StateActive)
			return time.Since(began)
		}

		if waited := accepts(); waited != progressTimeout-limit*apart {
			t.Errorf("behind half handshakes a client waited for %s", waited)
		}
		if n := cl.evicted.(*tally).Load(); n != 1 {
			t.Errorf("%d connections were evicted, want 1", n)
		}
		if _, err := clients[0].Read(make([]byte, 1)); err == nil {
			t.Error("the oldest half handshake was not evicted")
		}

		// When the other clients have had their time, too, no client waits for them.
		time.Sleep(progressTimeout)
		for range limit - 1 {
			if waited := accepts(); waited != 0 {
				t.Errorf("a client waited for %s, want no time", waited)
			}
		}

		if len(cl.short) != limit {
			t.Errorf("there are %d short connections", len(cl.short))
		}
	})
}

// A client that sends something does not wait long for clients that send nothing, however many these are: their places
// become free first, even before those of clients that have sent a part.
func TestConnLimiterSilentConnections(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const limit = 10
		cl, conns, _ := acceptAll(t, limit, 1)
		half := conns[0]
		cl.State(half, http.StateActive)

		came := time.Now()
		longest := time.Duration(0)
		for n := range 200 {
			began := time.Now()
			c, _ := acceptOne(t, cl)
			longest = max(longest, time.Since(began))
			if n%3 == 0 { // a whole request, which is answered
				cl.State(c, http.StateActive)
				cl.State(c, http.StateClosed)
			}
		}

		if longest != silenceTimeout {
			t.Errorf("a client waited for %s, want at most the time in which a client may be silent, %s",
				longest, silenceTimeout)
		}
		if n := cl.evicted.(*tally).Load(); n < 100 {
			t.Errorf("%d connections were evicted", n)
		}
		if cl.short[half] == nil || time.Since(came) >= progressTimeout {
			t.Errorf("a connection that had sent a part was evicted first, after %s", time.Since(came))
		}
	})
}

// While all clients are new, the next one waits. Closing the ConnLimiter ends its wait.
func TestConnLimiterClosesWhileOneWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cl, conns, _ := acceptAll(t, 1, 1)
		cl.State(conns[0], http.StateActive)

		client, there := net.Pipe()
		defer client.Close()
		cl.Listener.(pipes) <- there
		ended := make(chan error, 1)
		go func() {
			_, err := cl.Accept()
			ended <- err
		}()

		synctest.Wait()
		if len(ended) > 0 {
			t.Fatal("the next client does not wait")
		}

		_ = cl.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Errorf("a closed ConnLimiter accepted a client: %v", err)
		}
	})
}

// A connection with a long request, of which HTTP/2 has several, is not a short one until the last of them has ended.
func TestLongRequestOnSharedConnection(t *testing.T) {
	cl, conns, _ := acceptAll(t, 1, 1)
	c := conns[0]
	short := func(want int) {
		t.Helper()
		if len(cl.short) != want || cl.active.Len()+cl.silent.Len() != want {
			t.Fatalf("%d short connections, %d active, %d silent; want %d",
				len(cl.short), cl.active.Len(), cl.silent.Len(), want)
		}
	}

	ctx := cl.Context(t.Context(), c)
	cl.State(c, http.StateActive)
	short(1)

	one, two := Stay(ctx), Stay(ctx)
	short(0)

	cl.State(c, http.StateIdle)
	one()
	short(0) // one of the two requests goes on
	two()
	short(1)

	over := Stay(ctx)
	cl.State(c, http.StateClosed)
	over()
	short(0)
	if len(cl.shared.long) != 0 {
		t.Fatal("a closed connection is still remembered")
	}

	Stay(t.Context())() // as on a server without a ConnLimiter
}

// A request is announced as long when its connection has been closed already. It leaves nothing behind.
func TestLongRequestOfAClosedConnection(t *testing.T) {
	cl, conns, _ := acceptAll(t, 1, 1)
	ctx := cl.Context(t.Context(), conns[0])
	cl.State(conns[0], http.StateActive)
	cl.State(conns[0], http.StateClosed)

	Stay(ctx)()
	cl.call(conns[0])()
	if len(cl.short) != 0 || len(cl.shared.long) != 0 || len(cl.shared.calls) != 0 || cl.shared.total != 0 {
		t.Fatalf("a closed connection is still remembered: %v %v %v", cl.short, cl.shared.long, cl.shared.calls)
	}
}

// pipes is a listener in memory, for one client at a time.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) { return <-p, nil }
func (pipes) Addr() net.Addr              { return &net.TCPAddr{} }
func (pipes) Close() error                { return nil }

// acceptAll opens a ConnLimiter and accepts n clients.
func acceptAll(t *testing.T, limit, n int) (cl *ConnLimiter, conns, clients []net.Conn) {
	t.Helper()
	cl = NewConnLimiter(make(pipes, 1), time.Minute, limit, func(error) {}, &tally{})
	t.Cleanup(func() { cl.Close() })

	for range n {
		c, client := acceptOne(t, cl)
		conns, clients = append(conns, c), append(clients, client)
	}

	return cl, conns, clients
}

func acceptOne(t *testing.T, cl *ConnLimiter) (conn, client net.Conn) {
	t.Helper()
	client, there := net.Pipe()
	cl.Listener.(pipes) <- there

	conn, err := cl.Accept()
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { client.Close(); conn.Close() })
	return conn, client
}

// Among connections with several calls the one with the most makes room. No connection is closed for its only call.
func TestConnLimiterBoundsCallsOfSharedConnections(t *testing.T) {
	cl, conns, clients := acceptAll(t, 4, 3)
	calls := func(want int) {
		t.Helper()
		sum := 0
		for _, n := range cl.shared.calls {
			sum += n
		}
		if cl.shared.total != want || sum != want {
			t.Fatalf("%d calls, %d of connections, want %d", cl.shared.total, sum, want)
		}
	}

	var overs []func()
	for _, i := range []int{0, 1, 1, 1} {
		overs = append(overs, cl.call(conns[i]))
	}

	calls(4)
	lasting := cl.stay(conns[1]) // one of its calls becomes a long one, and does not count
	calls(3)
	overs = append(overs, cl.call(conns[1]))
	calls(4)

	overs = append(overs, cl.call(conns[2])) // now the connection with three calls is evicted
	calls(2)

	_ = clients[1].SetReadDeadline(time.Now().Add(testkit.Timeout))
	if _, err := clients[1].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection with the most calls was not evicted: %v", err)
	}

	if n := cl.evicted.(*tally).Load(); n != 1 {
		t.Errorf("%d connections were evicted, want 1", n)
	}

	lasting()
	cl.State(conns[1], http.StateClosed)
	calls(2)
	for _, over := range overs {
		over()
	}
	calls(0)
	if _, remembered := cl.shared.calls[conns[1]]; remembered || cl.short[conns[1]] != nil ||
		cl.shared.long[conns[1]] != 0 {
		t.Error("the closed connection is still remembered")
	}

	// No connection is evicted for its only call: all of these stay.
	cl, conns, _ = acceptAll(t, 1, 1)
	for range 3 {
		cl.call(conns[len(conns)-1])
		cl.stay(conns[len(conns)-1]) // the call becomes a long one
		c, _ := acceptOne(t, cl)
		conns = append(conns, c)
	}

	for _, c := range conns {
		cl.call(c)
	}
	calls(len(conns))
	if n := cl.evicted.(*tally).Load(); n != 0 {
		t.Errorf("%d connections were evicted for their only call, want none", n)
	}
}

func TestAddressesOfOneCustomer(t *testing.T) {
	for name, tc := range map[string]struct {
		a, b string
		same bool
	}{
		"one /64":           {"2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", true},
		"two /64":           {"2001:db8::1", "2001:db8:0:1::1", false},
		"IPv4 in IPv6 form": {"192.0.2.1", "::ffff:192.0.2.1", true},
		"two IPv4":          {"192.0.2.1", "192.0.2.2", false},
		"two mapped IPv4":   {"::ffff:192.0.2.1", "::ffff:192.0.2.2", false},
		"a zone":            {"fe80::1", "fe80::2%eth0", true},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := Customer(netip.MustParseAddr(tc.a)), Customer(netip.MustParseAddr(tc.b))
			if (a == b) != tc.same {
				t.Fatalf("%s and %s must count as one customer's, or not: the opposite is the case", a, b)
			}
		})
	}
}

// failingListener is a listener whose calls of Accept end with these errors, one after the other.
type failingListener struct {
	net.Listener
	errs []error
}

func (l *failingListener) Accept() (net.Conn, error) {
	err := l.errs[0]
	l.errs = l.errs[1:]

	return nil, err
}

// Who cannot accept clients for want of files says so once, and nothing of the kind when the listener is closed.
func TestWantOfFilesIsToldAlone(t *testing.T) {
	var told []error
	l := &failingListener{errs: []error{syscall.EMFILE, syscall.ENFILE, net.ErrClosed}}
	limiter := NewConnLimiter(l, time.Minute, 1, func(err error) { told = append(told, err) }, &tally{})

	for range 3 {
		if _, err := limiter.Accept(); err == nil {
			t.Error("a client was accepted")
		}
	}
	if len(told) != 1 || !errors.Is(told[0], syscall.EMFILE) {
		t.Errorf("told of %v, want %v alone", told, syscall.EMFILE)
	}
}
