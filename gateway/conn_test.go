package gateway

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/counter"
	"headcount/counter/countertest"
	"headcount/gateway/api"
	"headcount/gateway/bounds"
	"headcount/gateway/conn"
	"headcount/gateway/counterapi"
	"headcount/gateway/identity"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/node"
	"headcount/presence/presencemem"
	"headcount/webhook"
)

// What clients may rely on, as package conn has it.
const (
	lingerClose  = time.Second            // how long a closed client may take to close its side
	throttleTime = 100 * time.Millisecond // how long a client is not read after it has sent too much
)

// served is a gateway behind a listener, with a node and a store.
type served struct {
	t    *testing.T
	g    *Gateway
	addr string
	dial func() (net.Conn, error)
	stop func() // ends the goroutines of gateway and node
	// listener is the system's; nil: connections are in memory.
	listener *net.TCPListener
}

// lone is a cluster of one process, and of gateways that are not asked for anything.
type lone struct {
	*node.Node
	store  *presencemem.Store
	others []presence.Process
	// gateway is what a member also asks for the parts of a count.
	gateway func(page string) presence.Parts
}

// Explain is that of a member.
func (l lone) Explain(ctx context.Context, page string) presence.Parts {
	parts, err := l.Node.Explain(ctx, page)
	parts.Add(l.gateway(page))
	parts.Moving = parts.Moving || err != nil || parts.Settled != presence.DefaultPartitions

	return parts
}

func (l lone) Members() []presence.Process { return l.others }

func (l lone) SendBeat(b *heartbeat.Beat) { l.Deliver(b) }

func (l lone) Hold(ctx context.Context, u presence.User, page string, on bool) error {
	return l.Node.Hold(ctx, presence.HoldChange{User: u, Page: page, On: on, Asked: time.Now()})
}

func (l lone) Ready() error {
	all := make([]int, presence.DefaultPartitions)
	for i := range all {
		all[i] = i
		if !l.Owns(i) {
			return presence.ErrUnavailable
		}
	}

	if missing, _ := l.store.Incomplete(context.Background(), all, true); len(missing) > 0 {
		return presence.ErrUnavailable
	}

	return nil
}

func TestMain(m *testing.M) { testkit.Main(m) }

// serveGateway runs a gateway until the test ends, and then checks that no connection is left
// of it.
func serveGateway(t *testing.T, polled bool, tune func(*Config)) *served {
	t.Helper()
	return serveVia(t, polled, tune, func(s *served, server *httptest.Server) {
		entrance, err := s.g.NewEntrance(s.listener, s.g.Handler(), silentTime)
		if err != nil {
			t.Fatal(err)
		}
		server.Listener = entrance
		server.Config.ConnState, server.Config.ConnContext = entrance.State, entrance.Context
		server.Start()

		var passed sync.WaitGroup
		passed.Go(func() { _ = server.Config.Serve(entrance.Passed()) })
		t.Cleanup(func() {
			_ = entrance.Passed().Close()
			passed.Wait()
		})
	})
}

// silentTime is how long a client of a test may be silent before its first request.
const silentTime = 10 * time.Second

// serveVia is serveGateway with another way to start its HTTP server, whose listener is that of the gateway.
func serveVia(t *testing.T, polled bool, tune func(*Config), begin func(*served, *httptest.Server)) *served {
	t.Helper()

	s := runGateway(t, polled, tune)
	server := httptest.NewUnstartedServer(s.g.Handler())
	s.listener = server.Listener.(*net.TCPListener)
	begin(s, server)
	_, s.addr, _ = strings.Cut(server.URL, "://")
	s.dial = dialFrom(s.addr, func() net.Addr { return nil })

	t.Cleanup(func() {
		s.drain()
		server.Close()
		s.stop()
	})

	return s
}

// dialFrom returns a function that connects from an address each time; nil: the system's choice.
func dialFrom(addr string, from func() net.Addr) func() (net.Conn, error) {
	return func() (net.Conn, error) {
		d := net.Dialer{LocalAddr: from()}
		return d.Dial("tcp", addr)
	}
}

// runGateway runs a gateway that has no listener yet, with a node and a store, until stop.
func runGateway(t *testing.T, poller bool, tune func(*Config)) *served {
	t.Helper()

	identities := identity.New(identity.Config{IDSecrets: [][]byte{[]byte("0123456789abcdef")}})
	origins, _ := identity.NewOrigins(nil) // only what is written may be wrong, here and below
	proxies, _ := identity.NewProxies(nil)
	sites, _ := identity.NewSites(nil)

	store := presencemem.New(presencemem.Config{})
	var g *Gateway // the node replies to the gateway, which is made after it
	nd, err := node.New(store, node.Config{
		Name: "n", PresenceTimeout: 7 * time.Second,
		Reply: replies(func(_ string, r *heartbeat.Reply) { g.Receive(r) }), Log: zerolog.Nop(),
	})
	if err != nil {
		t.Fatal(err)
	}

	cfg := Config{
		Name: "g", Incarnation: presence.NewIncarnation(time.Now()), Store: store, Unread: store, Cluster: lone{
			Node: nd, store: store, gateway: func(page string) presence.Parts { return g.Explain(page) },
		},
		Counters: counterapi.Config{
			Rules: counter.BuiltinRules(), Counters: countersIn(countertest.InMemory(t, nil)), Log: zerolog.Nop(),
		},
		API: api.Config{
			Origins: origins, HoldTime: 21 * time.Second, Assets: fstest.MapFS{}, Dashboard: noDashboard{},
			Regions: store, LastSeen: store,
			Arrivals: webhook.New(webhook.Config{}),
		},
		Access: api.Access{Identities: identities, Sites: sites, Proxies: proxies}, Log: zerolog.Nop(),
		Times: Times{
			HeartbeatInterval: 2 * time.Second, UpdateInterval: 250 * time.Millisecond, PingInterval: 15 * time.Second,
			PongTimeout: 5 * time.Second, WriteTimeout: 5 * time.Second, ShutdownTimeout: 30 * time.Second,
		},
		Limits: Limits{MaxConnections: 100_000},
	}

	if tune != nil {
		tune(&cfg)
	}
	g, err = New(cfg)
	if err != nil {
		t.Fatal(err)
	}

	if !poller {
		// Without a poller a goroutine serves each connection, as where the system has none.
		clear(g.pollers)
	}

	// The process owns every partition, so a test needs no cluster.
	own := make([]int, presence.DefaultPartitions)
	for i := range own {
		own[i] = i
	}
	nd.Gateways(nil)
	nd.Own(own)

	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Run(ctx) })
	wg.Go(func() { _ = nd.Run(ctx) })

	testkit.Eventually(t, "a gateway that is ready", func() bool { return g.Ready() == nil })

	return &served{t: t, g: g, stop: func() {
		cancel()
		wg.Wait()
		identities.Close()
	}}
}

// drain has the gateway send everybody away, and checks that nothing is left of them.
func (s *served) drain() {
	within, stop := context.WithTimeout(context.Background(), testkit.Timeout)
	defer stop()

	s.g.Drain(within)
	if n := s.g.clients.Connections(); n != 0 {
		s.t.Errorf("%d connections are left", n)
	}
	if left := s.g.hub.Wanted(); left != 0 {
		s.t.Errorf("%d topics are still wanted", left)
	}
	if left := s.g.unread.Users(); left != 0 {
		s.t.Errorf("%d users are left", left)
	}
}

// bothWays runs a test with the poller and with a goroutine per connection.
func bothWays(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	t.Run("polled", func(t *testing.T) { test(t, serveGateway(t, true, tune)) })
	t.Run("a goroutine each", func(t *testing.T) { test(t, serveGateway(t, false, tune)) })
}

// polled runs a test with the poller alone: it asks nothing that a goroutine per connection does otherwise.
func polled(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	test(t, serveGateway(t, true, tune))
}

// settles waits until only so many connections are left.
func (s *served) settles(want int) {
	s.t.Helper()
	testkit.Eventually(s.t, fmt.Sprintf("%d connections to be left", want), func() bool {
		// A connection that ends leaves the hub first, and gives back its place last.
		return len(s.g.hub.Clients()) == want && s.g.clients.Connections() == int64(want)
	})
}

// expire has the tokens of all clients expire.
func (s *served) expire() {
	for _, c := range s.g.hub.Clients() {
		c.Expire()
	}
}

// raw is a client that knows no more of the protocol than a test wants it to.
type raw struct {
	t *testing.T
	net.Conn
	in       *bufio.Reader
	noCounts bool // frame passes over counts
}

// open sends the request's lines, and early right behind it.
func (s *served) open(target, early string, lines ...string) *raw {
	s.t.Helper()
	c, err := s.dial()
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })

	r := &raw{t: s.t, Conn: c, in: bufio.NewReader(c)}
	r.write([]byte("GET " + target + " HTTP/1.1\r\nHost: h\r\n" + strings.Join(append(lines, "", ""), "\r\n") + early))

	return r
}

// tcp is the connection of a test that needs a real one.
func (r *raw) tcp() *net.TCPConn { return r.Conn.(*net.TCPConn) }

// upgrade returns the lines of an upgrade to a WebSocket, with the key of the example in RFC 6455.
func upgrade(more ...string) []string {
	return append(more, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
}

func (s *served) socket(early string) *raw {
	s.t.Helper()
	r := s.open("/-/ws", early, upgrade("Sec-WebSocket-Protocol: headcount.v1")...)

	resp := r.response(http.StatusSwitchingProtocols)
	if got := resp.Header.Get("Sec-WebSocket-Accept"); got != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		s.t.Fatalf("Sec-WebSocket-Accept is %q, not that of RFC 6455", got)
	}
	if got := resp.Header.Get("Sec-WebSocket-Protocol"); got != conn.Subprotocol {
		s.t.Fatalf("Sec-WebSocket-Protocol is %q", got)
	}

	r.expect(websocket.Text, `{"type":"welcome"`)
	r.expect(websocket.Text, unreadMsg)

	return r
}

func (r *raw) response(status int) *http.Response {
	r.t.Helper()

	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))
	resp, err := http.ReadResponse(r.in, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	if resp.StatusCode != status {
		r.t.Fatalf("status %d, want %d", resp.StatusCode, status)
	}

	return resp
}

func (r *raw) write(p []byte) {
	r.t.Helper()
	if _, err := r.Write(p); err != nil {
		r.t.Fatal(err)
	}
}

// frame reads one frame, or the end of the connection.
func (r *raw) frame() (opcode byte, payload []byte, err error) {
	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))

	return r.next()
}

// next is frame before the connection's own deadline.
func (r *raw) next() (opcode byte, payload []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(r.in, head[:]); err != nil {
		return 0, nil, err
	}

	n := int(head[1])
	if n == 126 {
		var long [2]byte
		if _, err := io.ReadFull(r.in, long[:]); err != nil {
			return 0, nil, err
		}
		n = int(binary.BigEndian.Uint16(long[:]))
	}

	payload = make([]byte, n)
	_, err = io.ReadFull(r.in, payload)
	if r.noCounts && countFrame.Match(payload) {
		return r.next()
	}

	return head[0], payload, err
}

var countFrame = regexp.MustCompile(`^{"(type":"count|event":"pusher_internal:subscription_count)"`)

const unreadMsg = `{"type":"unread"`

// expect reads until the wanted frame. It answers pings, and skips frames that a client may receive again.
func (r *raw) expect(opcode byte, prefix string) {
	r.t.Helper()
	for began := time.Now(); ; {
		got, payload, err := r.frame()
		// A connection that sends other frames all the time would keep the test from its end.
		if err == nil && time.Since(began) > testkit.Timeout {
			err = fmt.Errorf("not within %s", testkit.Timeout)
		}

		if err != nil {
			r.t.Fatalf("%v; want %q", err, prefix)
		}

		if got == websocket.Ping && opcode != websocket.Ping {
			_, _ = r.Write([]byte(masked(websocket.Pong, "")))
			continue
		}
		// The unread count is sent again after a busy write.
		if bytes.HasPrefix(payload, []byte(unreadMsg)) && prefix != unreadMsg {
			continue
		}

		if got != opcode || !bytes.HasPrefix(payload, []byte(prefix)) {
			r.t.Fatalf("got %#x %q, want %#x %q", got, payload, opcode, prefix)
		}

		return
	}
}

// expectPing reads until a ping, over messages, and answers it.
func (r *raw) expectPing() {
	r.t.Helper()
	for opcode := byte(0); opcode != websocket.Ping; {
		var err error
		opcode, _, err = r.frame()
		if err != nil {
			r.t.Fatalf("%v; want a ping", err)
		}
	}

	r.write([]byte(masked(websocket.Pong, "")))
}

func (r *raw) expectClose(code int) {
	r.t.Helper()
	r.expect(websocket.Close, string(binary.BigEndian.AppendUint16(nil, uint16(code))))
}

// expectEnd reads until the connection ends, whatever comes before.
func (r *raw) expectEnd() {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))

	_, err := io.Copy(io.Discard, r.in)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		r.t.Fatal("the connection has not ended")
	}
}

// masked is a client's frame.
func masked(first byte, payload string) string { return string(testkit.ClientFrame(first, payload)) }

const (
	partText     = 0x01 // without FIN
	partMore     = 0x00
	lastPart     = 0x80
	heartbeatMsg = `{"type":"heartbeat"}`
)

// The same bytes come cut at every place, and one by one.
func TestServerFramesInPieces(t *testing.T) {
	t.Parallel()
	polled(t, nil, framesInPieces)
}

func TestFramesInPieces(t *testing.T) { inMemory(t, nil, framesInPieces) }

func framesInPieces(t *testing.T, s *served) {
	sent := masked(websocket.Text, `{"type":"subscribe","pages":["p"]}`) +
		masked(websocket.Pong, "") +
		masked(partText, `{"type":"hea`) +
		masked(websocket.Ping, "between") + // a control frame may come between fragments
		masked(partMore, "") +
		masked(lastPart, `rtbeat"}`) +
		masked(websocket.Ping, "") +
		masked(websocket.Text, "") + // no JSON
		masked(websocket.Text, `{"type":"read","x":"`+strings.Repeat("x", 200)+`"}`)

	check := func(r *raw) {
		r.t.Helper()
		// A count comes when it comes, and the unread count comes again to a client that was
		// busy when a count was due; everything else comes in order.
		want := []struct {
			opcode byte
			prefix string
		}{
			{websocket.Pong, "between"}, {websocket.Text, heartbeatMsg}, {websocket.Pong, ""},
			{websocket.Text, `{"type":"error","code":"bad_json"`}, {websocket.Text, unreadMsg},
		}

		for i := 0; i < len(want); {
			opcode, payload, err := r.frame()
			if err != nil {
				r.t.Fatal(err)
			}

			// The unread count is awaited at the end, so one that comes before the end is one that comes again.
			again := bytes.HasPrefix(payload, []byte(unreadMsg)) && i+1 < len(want)
			if again || bytes.HasPrefix(payload, []byte(`{"type":"count"`)) {
				continue
			}

			if opcode != want[i].opcode || !bytes.HasPrefix(payload, []byte(want[i].prefix)) {
				r.t.Fatalf("answer %d: got %#x %q, want %#x %q", i, opcode, payload, want[i].opcode, want[i].prefix)
			}

			i++
		}
	}

	var wg sync.WaitGroup
	const step = 3
	for cut := 0; cut <= len(sent); cut += step {
		r := s.socket("")
		wg.Go(func() {
			if cut > 0 {
				r.write([]byte(sent[:cut]))
				time.Sleep(20 * time.Millisecond) // else the system may join the two parts
			}
			r.write([]byte(sent[cut:]))
			check(r)
			_ = r.Close()
		})
	}

	// Without Nagle's algorithm, as Go's sockets are, each byte is a segment of its own.
	drip := s.socket("")
	for i := range sent {
		drip.write([]byte(sent[i : i+1]))
		time.Sleep(200 * time.Microsecond)
	}
	check(drip)
	_ = drip.Close()

	wg.Wait()

	// What comes right behind the handshake must not be lost with the HTTP server's buffer.
	early := s.socket(sent)
	check(early)
	_ = early.Close()

	s.settles(0)
}

// An end is a way in which a connection that is on a page ends.
type end func(r *raw)

// ends are all of them. When both close frames have been sent, the server closes the connection and does not
// wait for the client. It does not matter which side began, or whether the client still had data to send. It closes
// within promise.
func ends(t *testing.T, promise time.Duration) map[string]end {
	half := masked(websocket.Text, heartbeatMsg)[:9]
	all := map[string]end{
		"vanished":    func(r *raw) { _ = r.Close() },
		"half closed": func(r *raw) { _ = r.tcp().CloseWrite(); r.expectEnd() },
		"reset":       func(r *raw) { _ = r.tcp().SetLinger(0); _ = r.Close() },
		"reset in a frame": func(r *raw) {
			r.write([]byte(half))
			time.Sleep(5 * time.Millisecond) // so that the gateway has read it
			_ = r.tcp().SetLinger(0)
			_ = r.Close()
		},
		"vanished in a frame": func(r *raw) { r.write([]byte(half)); _ = r.Close() },
		"vanished in a message": func(r *raw) {
			r.write([]byte(masked(partText, `{"type"`)))
			time.Sleep(5 * time.Millisecond)
			_ = r.Close()
		},
		"without waiting for the answers": func(r *raw) {
			r.write([]byte(joins("q") + masked(websocket.Text, `{"type":"subscribe","pages":["p","q"],"precision":2}`)))
			_ = r.Close()
		},
		"last words": func(r *raw) {
			r.write([]byte(strings.Repeat(masked(websocket.Text, heartbeatMsg), 10)))
			_ = r.tcp().CloseWrite()
			// The gateway answers what it had received before the end of the client's side.
			for range 10 {
				r.expect(websocket.Text, heartbeatMsg)
			}
			r.expectEnd()
		},
		"half closed after the close": func(r *raw) {
			r.write([]byte(masked(0xc1, "x")))
			r.expectClose(1002)
			_ = r.tcp().CloseWrite()
			r.expectEnd()
		},
		"long ping": func(r *raw) {
			r.write([]byte(masked(websocket.Ping, strings.Repeat("x", 126))[:8])) // its head is enough
			r.expectClose(1002)
			r.expectEnd() // also when the client does not close its side
		},
	}

	closing := func(code uint16) string {
		return masked(websocket.Close, string(binary.BigEndian.AppendUint16(nil, code)))
	}

	tooLarge := `{"type":"error","code":"too_large"`
	watch := testkit.NewStopwatch(t)
	for name, tc := range map[string]struct {
		sends string
		says  string // the last message before the close
		code  uint16
		more  string // data that the client sends before it receives the close frame
		first bool   // the client's close frame is the first
	}{
		"the client's":        {sends: closing(1000), code: 1000, first: true},
		"the client's, going": {sends: masked(partText, "x") + closing(1001), code: 1001, first: true},
		"the client's, left": {
			sends: masked(websocket.Text, `{"type":"leave","page":"p"}`) + closing(1000), code: 1000, first: true,
		},
		"a reason of no UTF-8": {
			sends: masked(websocket.Close, "\x03\xe8\xff"), code: websocket.StatusInvalidPayload, first: true,
		},
		"a code of none": {sends: closing(1005), code: websocket.StatusProtocolError, first: true},
		"too long a frame": {
			masked(websocket.Text, strings.Repeat("x", 100_000)), tooLarge, websocket.StatusTooBig,
			masked(websocket.Text, heartbeatMsg), false,
		},
		"too long in fragments": {
			masked(partText, strings.Repeat("x", websocket.MaxMessage)) + masked(lastPart, "x"), tooLarge,
			websocket.StatusTooBig, "", false,
		},
		"twenty errors": {strings.Repeat(masked(websocket.Binary, "x"), bounds.Errors.Max+5),
			`{"type":"error","code":"too_many_errors"`,
			websocket.StatusPolicyViolation, masked(websocket.Ping, "x"), false},
		"bad UTF-8": {
			masked(partText, "\xc3") + masked(lastPart, "x"), "", websocket.StatusInvalidPayload, masked(partText, "x"),
			false,
		},
		"no mask":       {"\x81\x02{}", "", websocket.StatusProtocolError, "", false},
		"reserved bits": {masked(0xf1, strings.Repeat("\x88\x80", 5000)), "", websocket.StatusProtocolError, "", false},
	} {
		all[name] = func(r *raw) {
			sent := time.Now()
			r.write([]byte(tc.sends))

			var opcode byte
			var payload []byte
			said := ""
			for opcode != websocket.Close {
				said = string(payload) // the message before this one
				var err error
				opcode, payload, err = r.frame()
				if err != nil {
					r.t.Errorf("%s: %v", name, err)
					return
				}
			}
			if got := binary.BigEndian.Uint16(payload); got != tc.code || !strings.HasPrefix(said, tc.says) {
				r.t.Errorf("%s: closed with %d after %q, want %d", name, got, said, tc.code)
			}

			began := watch.Elapsed()
			if !tc.first {
				// The server waits for the answer for lingerClose, in which a busy machine may not run this client.
				_, err := r.Write([]byte(tc.more + closing(tc.code)))
				if err != nil && time.Since(sent) < lingerClose {
					r.t.Errorf("%s: %v", name, err)
				}
			}

			r.expectEnd()
			if took := watch.Elapsed() - began; took >= promise {
				r.t.Errorf("%s: the end came after %s", name, took)
			}
		}
	}

	return all
}

func joins(page string) string { return masked(websocket.Text, `{"type":"join","page":"`+page+`"}`) }

// visit has a connection come to a page, and end.
func (s *served) visit(page string, end end) {
	r := s.socket("")
	r.write([]byte(joins(page)))
	r.expect(websocket.Text, `{"type":"count","page":"`+page)

	r.noCounts = true // of others, which may come between what the end expects
	end(r)
	_ = r.Close()
}

// visitWithoutSocket has event streams, and a call with half a handshake behind it, come and end.
func (s *served) visitWithoutSocket(page string) {
	for i := range 3 {
		r := s.open("/"+page+"/counter/events", "")
		r.response(http.StatusOK)
		if line, err := r.in.ReadString('\n'); err != nil || line != "event: count\n" {
			r.t.Errorf("got %q, %v", line, err)
		}
		switch i {
		case 0:
			_ = r.tcp().SetLinger(0)
		case 1:
			r.write([]byte("nobody listens to this"))
		}

		_ = r.Close()
	}

	// Half a handshake stands behind a call on the same connection, and is reset.
	call := s.open("/"+page+"/counter", "")
	_, _ = io.Copy(io.Discard, call.response(http.StatusOK).Body)
	call.write([]byte("GET /-/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"))
	_ = call.tcp().SetLinger(0)
	_ = call.Close()
}

// TestClockEndsOfConnections has connections end in every way, many at a time.
func TestClockEndsOfConnections(t *testing.T) {
	t.Parallel()
	const rounds = 6
	bothWays(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		for i := range rounds {
			for name, end := range ends(t, lingerClose) {
				// In hex, since the name stands between quotes in JSON. Every third round is on the same pages.
				wg.Go(func() { s.visit(fmt.Sprintf("%x %d", name, i%3), end) })
			}
			wg.Go(func() { s.visitWithoutSocket("p") })
		}

		wg.Wait()
		s.settles(0)
		s.open("/p/counter/events", "").response(http.StatusOK) // left to the drain
		s.settles(1)
	})
}

// TestPongThenNothing: a connection that answers pings stays. One that does not answer
// them, or only begins a frame, is closed as silent.
func TestPongThenNothing(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		cfg.PingInterval, cfg.PongTimeout = 100*time.Millisecond, 3*time.Second // a busy machine answers late
	}, func(t *testing.T, s *served) {
		deaf, half := s.socket(""), s.socket("")
		half.write([]byte{0x81, 0xfe}) // the head of a frame is no sign of life

		r := s.socket("")
		r.expectPing()
		r.expectPing()

		r.write([]byte(masked(websocket.Text, heartbeatMsg)))
		r.expect(websocket.Text, heartbeatMsg)

		ended := make(chan struct{})
		go func() {
			defer close(ended)
			deaf.expectEnd()
			half.expectEnd()
		}()

		// The client that answers outlives both.
		for open := true; open; {
			r.expectPing()
			select {
			case <-ended:
				open = false
			default:
			}
		}

		r.expectPing()
		s.settles(1)

		_ = r.Close()
		s.settles(0)
	})
}

// TestServerCloseWhileServing closes connections at all times from the gateway's side.
func TestServerCloseWhileServing(t *testing.T) {
	t.Parallel()
	polled(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		var all []*raw
		for range 50 {
			all = append(all, s.socket(""))
		}
		s.settles(len(all))

		for _, r := range all {
			wg.Go(func() {
				// All of them write and read, so that a close falls into the middle of something.
				text := []byte(strings.Repeat(masked(websocket.Ping, "x")+masked(websocket.Pong, ""), 20))
				for {
					if _, err := r.Write(text); err != nil {
						return
					}
				}
			})
			wg.Go(func() { _, _ = io.Copy(io.Discard, r) })
		}

		// Twice at once, as when the gateway drains while a client is closed for its errors.
		for _, c := range s.g.hub.Clients() {
			wg.Go(func() { _ = c.Close() })
			wg.Go(func() { _ = c.Close() })
		}

		s.settles(0)
		wg.Wait()
	})
}

// A client floods the gateway with requests and never reads an answer. The gateway stops reading from that client, then
// closes it. Other clients notice nothing.
func TestClockClientThatTakesNothing(t *testing.T) {
	reg := prometheus.NewRegistry()
	polled(t, takesNothing(reg), func(t *testing.T, s *served) { clientTakesNothing(t, s, reg) })
}

func TestClientThatTakesNothing(t *testing.T) {
	reg := prometheus.NewRegistry()
	inMemory(t, takesNothing(reg), func(t *testing.T, s *served) { clientTakesNothing(t, s, reg) })
}

func takesNothing(reg *prometheus.Registry) func(*Config) {
	return func(cfg *Config) {
		cfg.WriteTimeout = 500 * time.Millisecond
		cfg.Registerer = reg
	}
}

func clientTakesNothing(t *testing.T, s *served, reg *prometheus.Registry) {
	hog := s.narrowSocket(4096) // else the kernel takes megabytes of pongs first
	defer hog.Close()

	gone := make(chan struct{})
	go func() {
		defer close(gone)
		text := []byte(strings.Repeat(masked(websocket.Ping, strings.Repeat("x", 125)), 100))
		for {
			if _, err := hog.Write(text); err != nil {
				return
			}
		}
	}()

	other := s.socket("")
	watch := testkit.NewStopwatch(t)
	for {
		began := watch.Elapsed()
		other.write([]byte(masked(websocket.Text, heartbeatMsg)))
		other.expect(websocket.Text, heartbeatMsg)

		// Less than the write timeout: nobody may wait for a write to the other client.
		if took := watch.Elapsed() - began; took > 400*time.Millisecond {
			t.Errorf("the other client waited %s", took)
		}

		select {
		case <-gone:
			s.settles(1)
			if n := counted(t, reg, "headcount_connections_closed_total", "slow"); n != 1 {
				t.Errorf("%v clients were closed because they did not read, want 1", n)
			}

			_ = other.Close()
			s.settles(0)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// narrowSocket is socket with small buffers between server and client. Sockets that are opened after it have them, too.
func (s *served) narrowSocket(bytes int) *raw {
	s.t.Helper()

	// What the listener accepts inherits it. A connection in memory has a buffer at the client's end alone.
	if s.listener != nil {
		listener, err := s.listener.SyscallConn()
		if err != nil {
			s.t.Fatal(err)
		}
		failed := listener.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_SNDBUF, bytes)
		})
		if err := cmp.Or(failed, err); err != nil {
			s.t.Fatal(err)
		}
	}

	r := s.socket("")
	_ = r.Conn.(interface{ SetReadBuffer(int) error }).SetReadBuffer(bytes)
	s.settles(1) // a client is welcomed before the gateway knows it

	return r
}

// A client that reads only after a while stays connected, although meanwhile no ping could be sent to it and
// none of its frames was read. It loses neither updates nor answers to its messages.
func TestServerASlowClientLives(t *testing.T) {
	t.Parallel()
	polled(t, pingsOften, func(t *testing.T, s *served) { slowClientLives(t, s, 25) })
}

func TestASlowClientLives(t *testing.T) {
	for name, asks := range map[string]int{"silent": 0, "talks": 25} {
		t.Run(name, func(t *testing.T) {
			inMemory(t, pingsOften, func(t *testing.T, s *served) { slowClientLives(t, s, asks) })
		})
	}
}

func pingsOften(cfg *Config) {
	cfg.PingInterval = time.Second
	cfg.PongTimeout = time.Second
}

// slowClientLives has a client that sends some pings in each tenth of a second while it does not read.
func slowClientLives(t *testing.T, s *served, asks int) {
	r := s.narrowSocket(64 << 10)
	const fillers = 10
	sent := 0
	// Ten of these do not fit into the buffers, so the gateway has to keep a part.
	filler := bytes.Repeat([]byte("x"), 60_000)
	for _, c := range s.g.hub.Clients() {
		for !c.Busy() && sent < fillers {
			_ = c.Try(websocket.AppendFrame(nil, websocket.Text, filler))
			sent++
		}
		if !c.Busy() {
			t.Error("the client has taken everything; the test shows nothing")
		}
	}

	// A silent client would be closed by then. All the while pings are due and cannot be sent.
	const rounds, pause = 21, 100 * time.Millisecond
	var talking sync.WaitGroup
	talking.Go(func() {
		for n := range rounds * asks {
			if n%asks == 0 {
				time.Sleep(pause)
			}
			if _, err := r.Write([]byte(masked(websocket.Ping, fmt.Sprintf("%0100d", n)))); err != nil {
				t.Error(err)
				return
			}
		}
	})
	time.Sleep(rounds * pause)

	for range sent {
		r.expect(websocket.Text, string(filler))
	}
	for i := range rounds * asks {
		r.expect(websocket.Pong, fmt.Sprintf("%0100d", i))
	}
	talking.Wait()

	r.expectPing()
	r.write([]byte(masked(websocket.Text, heartbeatMsg)))
	r.expect(websocket.Text, heartbeatMsg)

	_ = r.Close()
	s.settles(0)
}

// A client that closes its side in time is certain to get the close frame. A client that does not is closed after a
// moment.
func TestClockDrainWaitsForTheClose(t *testing.T) {
	t.Parallel()
	polled(t, drainsSoon, drainWaitsForTheClose)
}

func TestDrainWaitsForTheClose(t *testing.T) { inMemory(t, drainsSoon, drainWaitsForTheClose) }

func drainsSoon(cfg *Config) { cfg.ShutdownTimeout = 500 * time.Millisecond }

func drainWaitsForTheClose(t *testing.T, s *served) {
	good, bad := s.socket(""), s.socket("")
	s.settles(2)

	ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
	defer cancel()
	var drained sync.WaitGroup
	drained.Go(func() { s.g.Drain(ctx) })

	for _, r := range []*raw{good, bad} {
		r.expect(websocket.Text, `{"type":"reconnect"`)
		r.expectClose(1012)
	}

	// Only the good one answers with its side's end.
	good.write([]byte(masked(websocket.Close, "\x03\xf4")))
	if tcp, ok := good.Conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	} else {
		_ = good.Close()
	}
	good.expectEnd()
	s.settles(1)

	watch := testkit.NewStopwatch(t)
	bad.expectEnd()
	if took := watch.Elapsed(); took > 2*lingerClose {
		t.Errorf("the end came after %s", took)
	}

	drained.Wait()
}

// counted returns the value of a counter with one label, or -1.
func counted(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name && m.GetLabel()[0].GetValue() == label {
				return m.GetCounter().GetValue()
			}
		}
	}

	return -1
}

// TestServerCausesOfLeaves: who sent the first close frame decides the cause, whoever ends the connection.
func TestServerCausesOfLeaves(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	s := serveGateway(t, true, func(cfg *Config) { cfg.Registerer = reg })

	for cause, end := range map[string]func(*raw){
		"closed": func(r *raw) {
			r.write([]byte(masked(websocket.Close, "\x03\xe8")))
			r.expectClose(1000)
		},
		"sent_away": func(r *raw) {
			// The gateway's close frame is the first, so the client's answer does not make it the cause.
			s.expire()
			r.expect(websocket.Text, `{"type":"error","code":"token_expired"`)
			r.expectClose(websocket.StatusPolicyViolation)
			r.write([]byte(masked(websocket.Close, "\x03\xf0")))
		},
		"lost": func(r *raw) { _ = r.tcp().SetLinger(0) },
	} {
		s.visit("p", end)
		s.settles(0)

		if n := counted(t, reg, "headcount_leaves_total", cause); n != 1 {
			t.Errorf("%s: %v leaves", cause, n)
		}
	}
}

// TestTheFirstTotalHasTheVisitor joins and asks for the total in one breath: no total may
// come that lacks the visitor, but one after the time for which a gateway waits.
func TestTheFirstTotalHasTheVisitor(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		for i := range 5 {
			r := s.socket("")
			began := time.Now()

			r.write([]byte(masked(websocket.Text, fmt.Sprintf(`{"type":"join","page":"p%d"}`, i)) +
				masked(websocket.Text, `{"type":"subscribe","pages":["*"]}`)))
			// The visitors of the rounds before are still there.
			want := fmt.Sprintf(`{"type":"count","page":"*","count":%d,`, i+1)

			for {
				_, payload, err := r.frame()
				if err != nil {
					t.Fatal(err)
				}

				if !bytes.HasPrefix(payload, []byte(`{"type":"count","page":"*"`)) {
					continue
				}

				if bytes.HasPrefix(payload, []byte(want)) {
					break
				}

				if time.Since(began) < time.Second { // the patience of fanout.Subscriber.Hold
					t.Fatalf("the total is %s, want it to begin with %s", payload, want)
				}
			}
		}
	})
}

// A client that leaves the page that its count of the site waits for gets that count at once, also if the page has no
// subscription left.
func TestALeaveReleasesTheTotal(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		for range 5 {
			r := s.socket("")
			watch := testkit.NewStopwatch(t)
			for _, frame := range []string{
				`{"type":"join","page":"p"}`, `{"type":"unsubscribe","pages":["p"]}`,
				`{"type":"subscribe","pages":["*"]}`, `{"type":"leave","page":"p"}`,
			} {
				r.write([]byte(masked(websocket.Text, frame)))
			}

			for payload := []byte(nil); !bytes.HasPrefix(payload, []byte(`{"type":"count","page":"*"`)); {
				var err error
				_, payload, err = r.frame()
				if err != nil {
					t.Fatal(err)
				}
			}

			if took := watch.Elapsed(); took > 3*time.Second { // the sweep ends a forgotten hold after 5 s
				t.Fatalf("the count of the site came after %s", took)
			}

			_ = r.Close()
		}
	})
}

// replies is a function as node.Replies.
type replies func(gateway string, r *heartbeat.Reply)

func (f replies) SendReply(gateway string, r *heartbeat.Reply) { f(gateway, r) }
