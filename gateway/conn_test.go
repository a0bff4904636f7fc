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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/fstest"
	"testing/synctest"
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

// Times that clients may rely on, as in package conn.
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
	// listener is nil if connections are in memory.
	listener *net.TCPListener
}

// lone is a cluster of one process, which other gateways ask for nothing.
type lone struct {
	*node.Node
	store  *presencemem.Store
	others []presence.Process
	// gateway returns the gateway's parts of a count, for which a member asks as well.
	gateway func(page string) presence.Parts
}

// Explain does what a member's Explain does.
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

// serveGateway runs a gateway until the test ends, and then checks that no connection is left.
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

// silentTime is how long a test's client may wait before it sends its first request.
const silentTime = 10 * time.Second

// serveVia is serveGateway with another way to start its HTTP server, which uses the gateway's listener.
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

// dialFrom returns a function that connects, each time from another address of from; if from is nil, the system
// chooses.
func dialFrom(addr string, from func() net.Addr) func() (net.Conn, error) {
	return func() (net.Conn, error) {
		d := net.Dialer{LocalAddr: from()}
		return d.Dial("tcp", addr)
	}
}

// runGateway runs a gateway without a listener, with a node and a store, until stop.
func runGateway(t *testing.T, poller bool, tune func(*Config)) *served {
	t.Helper()

	identities := identity.New(identity.Config{IDSecrets: [][]byte{[]byte("0123456789abcdef")}})
	origins, _ := identity.NewOrigins(nil) // an empty list is never an error, here and below
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
		// Without a poller a goroutine serves each connection, as on systems that have none.
		clear(g.pollers)
	}

	// The process owns all partitions, so no cluster is needed.
	own := make([]int, presence.DefaultPartitions)
	for i := range own {
		own[i] = i
	}
	nd.Gateways(nil)
	nd.Own(own)

	// The context of the test ends before its cleanups, and a gateway whose goroutines have ended cannot drain.
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

// drain makes the gateway send all clients away, and checks that nothing is left of them.
func (s *served) drain() {
	within, stop := context.WithTimeout(context.Background(), testkit.Timeout)
	defer stop()

	s.g.Drain(within)
	// Every test ends here, so each of them would show a client, a topic or a user that some way of leaving forgets.
	if n := s.g.clients.Connections(); n != 0 {
		s.t.Errorf("%d connections are left, want none", n)
	}
	if left := s.g.hub.Wanted(); left != 0 {
		s.t.Errorf("%d topics are still wanted, want none", left)
	}
	if left := s.g.unread.Users(); left != 0 {
		s.t.Errorf("%d users are left, want none", left)
	}
}

// bothWays runs a test with the poller and with a goroutine per connection.
func bothWays(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	t.Run("polled", func(t *testing.T) { test(t, serveGateway(t, true, tune)) })
	t.Run("a goroutine each", func(t *testing.T) { test(t, serveGateway(t, false, tune)) })
}

// polled runs a test with the poller alone: for a goroutine per connection it would check nothing else.
func polled(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	test(t, serveGateway(t, true, tune))
}

// settles waits until exactly so many connections are left.
func (s *served) settles(want int) {
	s.t.Helper()
	testkit.Eventually(s.t, fmt.Sprintf("%d connections to be left", want), func() bool {
		// A connection that ends first leaves the hub, and frees its place last.
		return len(s.g.hub.Clients()) == want && s.g.clients.Connections() == int64(want)
	})
}

// expire makes the tokens of all clients expire.
func (s *served) expire() {
	for _, c := range s.g.hub.Clients() {
		c.Expire()
	}
}

// raw is a client that knows only as much of the protocol as a test needs.
type raw struct {
	t *testing.T
	net.Conn
	in       *bufio.Reader
	noCounts bool // frame skips counts
}

// open sends the lines of a request, and early directly after them.
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

// tcp returns the TCP connection of a test that has a real one.
func (r *raw) tcp() *net.TCPConn { return r.Conn.(*net.TCPConn) }

// upgrade returns the header lines of an upgrade to a WebSocket, with the key of the example in RFC 6455.
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
		s.t.Fatalf("Sec-WebSocket-Protocol is %q, want %q", got, conn.Subprotocol)
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

// frame reads one frame, or returns the error that ends the connection.
func (r *raw) frame() (opcode byte, payload []byte, err error) {
	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))

	return r.next()
}

// next reads one frame as frame does, but sets no read deadline.
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

// expect reads until the wanted frame. It answers pings, and skips frames that the gateway may send again.
func (r *raw) expect(opcode byte, prefix string) {
	r.t.Helper()
	for began := time.Now(); ; {
		got, payload, err := r.frame()
		// Without this, a connection that keeps sending other frames would never let the test end.
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
		// The unread count may be sent again after a write to a busy client.
		if bytes.HasPrefix(payload, []byte(unreadMsg)) && prefix != unreadMsg {
			continue
		}

		if got != opcode || !bytes.HasPrefix(payload, []byte(prefix)) {
			r.t.Fatalf("got %#x %q, want %#x %q", got, payload, opcode, prefix)
		}

		return
	}
}

// expectPing skips messages until a ping, and answers it.
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

// expectEnd reads until the connection ends, whatever it sends before.
func (r *raw) expectEnd() {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(testkit.Timeout))

	_, err := io.Copy(io.Discard, r.in)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		r.t.Fatal("the connection has not ended")
	}
}

// masked returns the frame of a client.
func masked(first byte, payload string) string { return string(testkit.ClientFrame(first, payload)) }

const (
	partText     = 0x01 // without FIN
	partMore     = 0x00
	lastPart     = 0x80
	heartbeatMsg = `{"type":"heartbeat"}`
)

// TestServerFramesInPieces: the bytes of frames arrive split at any place, or one by one. The answers are the same.
func TestServerFramesInPieces(t *testing.T) {
	t.Parallel()
	polled(t, nil, framesInPieces)
}

func TestFramesInPieces(t *testing.T) { inMemory(t, nil, framesInPieces) }

func framesInPieces(t *testing.T, s *served) {
	sent := masked(websocket.Text, `{"type":"subscribe","pages":["p"]}`) +
		masked(websocket.Pong, "") +
		masked(partText, `{"type":"hea`) +
		masked(websocket.Ping, "between") + // a control frame is allowed between fragments
		masked(partMore, "") +
		masked(lastPart, `rtbeat"}`) +
		masked(websocket.Ping, "") +
		masked(websocket.Text, "") + // not JSON
		masked(websocket.Text, `{"type":"read","x":"`+strings.Repeat("x", 200)+`"}`)

	check := func(r *raw) {
		r.t.Helper()
		// Counts may come at any time, and the unread count comes again if the client was busy when a count was due.
		// Everything else comes in order.
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

			// The awaited unread count is the last answer, so an earlier one is a repetition.
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
				time.Sleep(20 * time.Millisecond) // otherwise the system may join the two parts
			}
			r.write([]byte(sent[cut:]))
			check(r)
			_ = r.Close()
		})
	}

	// Go's sockets do not use Nagle's algorithm, so each byte is a segment of its own.
	drip := s.socket("")
	for i := range sent {
		drip.write([]byte(sent[i : i+1]))
		time.Sleep(200 * time.Microsecond)
	}
	check(drip)
	_ = drip.Close()

	wg.Wait()

	// What directly follows the handshake is in the HTTP server's buffer, and must not be lost.
	early := s.socket(sent)
	check(early)
	_ = early.Close()

	s.settles(0)
}

// end is a way in which the connection of a client on a page ends.
type end func(r *raw)

// ends returns all ways. When both close frames have been sent, the server closes the connection without waiting for
// the client, whichever side began, and whether or not the client still had data to send. It closes within promise.
func ends(t *testing.T, promise time.Duration) map[string]end {
	all := abruptEnds()
	watch := testkit.NewStopwatch(t)
	for name, c := range closes() {
		all[name] = func(r *raw) { c.end(r, name, watch, promise) }
	}

	return all
}

// abruptEnds returns the ways without the close frames of both sides.
func abruptEnds() map[string]end {
	half := masked(websocket.Text, heartbeatMsg)[:9]
	return map[string]end{
		"vanished":    func(r *raw) { _ = r.Close() },
		"half closed": func(r *raw) { _ = r.tcp().CloseWrite(); r.expectEnd() },
		"reset":       func(r *raw) { _ = r.tcp().SetLinger(0); _ = r.Close() },
		"reset in a frame": func(r *raw) {
			r.write([]byte(half))
			time.Sleep(5 * time.Millisecond) // so that the gateway has read what was sent
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
			// The gateway answers what it received before the client closed its side.
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
			r.write([]byte(masked(websocket.Ping, strings.Repeat("x", 126))[:8])) // the head is enough
			r.expectClose(1002)
			r.expectEnd() // even if the client does not close its side
		},
	}
}

// handshake is a way in which both sides send a close frame.
type handshake struct {
	sends string
	says  string // the last message before the close
	code  uint16
	more  string // data that the client sends before it receives the close frame
	first bool   // the client's close frame is the first
}

func closes() map[string]handshake {
	const tooLarge = `{"type":"error","code":"too_large"`

	return map[string]handshake{
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
	}
}

// closing returns the close frame of a client.
func closing(code uint16) string {
	return masked(websocket.Close, string(binary.BigEndian.AppendUint16(nil, code)))
}

// end closes the connection in this way, and checks that the server ends it within promise of the second close frame.
func (h handshake) end(r *raw, name string, watch *testkit.Stopwatch, promise time.Duration) {
	sent := time.Now()
	r.write([]byte(h.sends))

	var opcode byte
	var payload []byte
	said := ""
	for opcode != websocket.Close {
		said = string(payload) // the message before this frame
		var err error
		opcode, payload, err = r.frame()
		if err != nil {
			r.t.Errorf("%s: %v", name, err)
			return
		}
	}

	if got := binary.BigEndian.Uint16(payload); got != h.code || !strings.HasPrefix(said, h.says) {
		r.t.Errorf("%s: closed with %d after %q, want %d after %q", name, got, said, h.code, h.says)
	}

	began := watch.Elapsed()
	if !h.first {
		// The server waits for the answer for lingerClose. A busy machine may not run this client in that time.
		_, err := r.Write([]byte(h.more + closing(h.code)))
		if err != nil && time.Since(sent) < lingerClose {
			r.t.Errorf("%s: %v", name, err)
		}
	}

	r.expectEnd()
	if took := watch.Elapsed() - began; took >= promise {
		r.t.Errorf("%s: the end came after %s, want less than %s", name, took, promise)
	}
}

func joins(page string) string { return masked(websocket.Text, `{"type":"join","page":"`+page+`"}`) }

// visit opens a connection that joins a page, and ends it.
func (s *served) visit(page string, end end) {
	r := s.socket("")
	r.write([]byte(joins(page)))
	r.expect(websocket.Text, `{"type":"count","page":"`+page)

	r.noCounts = true // counts of others may come between the frames that end expects
	end(r)
	_ = r.Close()
}

// visitWithoutSocket opens and ends event streams, and a call with half a handshake behind it.
func (s *served) visitWithoutSocket(page string) {
	for i := range 3 {
		r := s.open("/"+page+"/counter/events", "")
		r.response(http.StatusOK)
		if line, err := r.in.ReadString('\n'); err != nil || line != "event: count\n" {
			r.t.Errorf("the stream begins with %q, %v; want an event with a count", line, err)
		}

		switch i {
		case 0:
			_ = r.tcp().SetLinger(0)
		case 1:
			r.write([]byte("nobody listens to this"))
		}

		_ = r.Close()
	}

	// Half a handshake follows a call on the same connection, which is then reset.
	call := s.open("/"+page+"/counter", "")
	_, _ = io.Copy(io.Discard, call.response(http.StatusOK).Body)
	call.write([]byte("GET /-/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\n"))
	_ = call.tcp().SetLinger(0)
	_ = call.Close()
}

// TestClockEndsOfConnections ends connections in every way, many at a time, and nothing is left of them.
func TestClockEndsOfConnections(t *testing.T) {
	t.Parallel()
	const rounds = 6
	bothWays(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		for i := range rounds {
			for name, end := range ends(t, lingerClose) {
				// In hex, since the name becomes part of a JSON string. Every third round uses the same pages.
				wg.Go(func() { s.visit(fmt.Sprintf("%x %d", name, i%3), end) })
			}

			wg.Go(func() { s.visitWithoutSocket("p") })
		}

		wg.Wait()
		s.settles(0)
		s.open("/p/counter/events", "").response(http.StatusOK) // this stream is ended by the drain
		s.settles(1)
	})
}

// TestPongThenNothing: a connection that answers pings stays. One that does not answer, or sends only the beginning of
// a frame, is closed as silent.
func TestPongThenNothing(t *testing.T) {
	inMemory(t, func(cfg *Config) {
		cfg.PingInterval, cfg.PongTimeout = 100*time.Millisecond, 3*time.Second // a busy machine answers late
	}, func(t *testing.T, s *served) {
		deaf, half := s.socket(""), s.socket("")
		half.write([]byte{0x81, 0xfe}) // half a head of a frame is no sign of life

		r := s.socket("")
		r.expectPing()
		r.expectPing()

		r.write([]byte(masked(websocket.Text, heartbeatMsg)))
		r.expect(websocket.Text, heartbeatMsg)

		// A silent client is closed only after the pong timeout, so the reads wait beside the pings that r has to
		// answer.
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			deaf.expectEnd()
			half.expectEnd()
		}()

		// The client that answers outlives the other two.
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

// TestServerCloseWhileServing: the gateway may close a connection at any moment, also in the middle of a read or a
// write.
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
				// All of them write and read, so that a close comes in the middle of something.
				text := []byte(strings.Repeat(masked(websocket.Ping, "x")+masked(websocket.Pong, ""), 20))
				for {
					if _, err := r.Write(text); err != nil {
						return
					}
				}
			})
			wg.Go(func() { _, _ = io.Copy(io.Discard, r) })
		}

		// Each is closed twice at once, as when the gateway drains while a client is closed for its errors.
		for _, c := range s.g.hub.Clients() {
			wg.Go(func() { _ = c.Close() })
			wg.Go(func() { _ = c.Close() })
		}

		// A close that is lost in a race leaves its client in the hub. One that is done twice gives its place back
		// twice, which the number of connections shows.
		s.settles(0)
		wg.Wait()
	})
}

// A client floods the gateway with requests and never reads an answer. The gateway stops reading from it, then closes
// it. Other clients notice nothing.
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
	hog := s.narrowSocket(4096) // otherwise the kernel buffers megabytes of pongs
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

	// The other client is served by the same gateway all the time. If one write could hold up others, its answers would
	// come only after the write timeout.
	other := s.socket("")
	watch := testkit.NewStopwatch(t)
	for {
		began := watch.Elapsed()
		other.write([]byte(masked(websocket.Text, heartbeatMsg)))
		other.expect(websocket.Text, heartbeatMsg)

		// This is less than the write timeout: no client waits until a write to another client fails.
		if took := watch.Elapsed() - began; took > 400*time.Millisecond {
			t.Errorf("the other client waited for %s, want 400ms at most", took)
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

// narrowSocket is socket with small buffers between server and client. Later sockets of the same listener have them,
// too.
func (s *served) narrowSocket(bytes int) *raw {
	s.t.Helper()

	// Accepted connections inherit the listener's buffer. One in memory has a buffer only at the client's end.
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
	s.settles(1) // the welcome is sent before the hub has the client

	return r
}

// A client that does not read for a while stays connected, although no ping can be sent to it meanwhile and none of its
// frames is read. It loses neither updates nor answers to its messages.
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

// slowClientLives has a client that does not read for a while, and sends some pings in each tenth of a second.
func slowClientLives(t *testing.T, s *served, asks int) {
	r := s.narrowSocket(64 << 10)
	const fillers = 10
	sent := 0
	// Ten of these do not fit into the buffers, so the gateway has to keep some of them.
	filler := bytes.Repeat([]byte("x"), 60_000)
	for _, c := range s.g.hub.Clients() {
		for !c.Busy() && sent < fillers {
			_ = c.Try(websocket.AppendFrame(nil, websocket.Text, filler))
			sent++
		}

		if !c.Busy() {
			t.Error("the buffers took everything, so the test proves nothing")
		}
	}

	// A silent client would be closed within this time. Meanwhile pings are due and cannot be sent.
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

	// The client reads again. It must find all that was sent meanwhile, in order: a gateway that dropped what did not
	// fit would lose answers that the client waits for.
	for range sent {
		r.expect(websocket.Text, string(filler))
	}

	for i := range rounds * asks {
		r.expect(websocket.Pong, fmt.Sprintf("%0100d", i))
	}

	talking.Wait()

	// A ping and its answer show that the connection is in its usual state again, and not only emptied.
	r.expectPing()
	r.write([]byte(masked(websocket.Text, heartbeatMsg)))
	r.expect(websocket.Text, heartbeatMsg)

	_ = r.Close()
	s.settles(0)
}

// A client that closes its side in time always gets the close frame. A client that does not is closed a moment later.
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

	// Only the good client closes its side.
	good.write([]byte(masked(websocket.Close, "\x03\xf4")))
	if tcp, ok := good.Conn.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	} else {
		_ = good.Close()
	}
	good.expectEnd()
	s.settles(1)

	// The other client has its close frame and does nothing, like one that is suspended. Without a bound it would hold
	// up the end of the process.
	watch := testkit.NewStopwatch(t)
	bad.expectEnd()
	if took := watch.Elapsed(); took > 2*lingerClose {
		t.Errorf("the drain took %s, want %s at most", took, 2*lingerClose)
	}

	drained.Wait()
}

// counted returns the value of a counter with the given label, or -1.
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
			// The gateway's close frame is the first, so the client's answer is not the cause.
			s.expire()
			r.expect(websocket.Text, `{"type":"error","code":"token_expired"`)
			r.expectClose(websocket.StatusPolicyViolation)
			r.write([]byte(masked(websocket.Close, "\x03\xf0")))
		},
		"lost": func(r *raw) { _ = r.tcp().SetLinger(0) },
	} {
		// One visit after the other, since expire sends all clients away.
		s.visit("p", end)
		s.settles(0)

		if n := counted(t, reg, "headcount_leaves_total", cause); n != 1 {
			t.Errorf("%v leaves with the cause %s, want 1", n, cause)
		}
	}
}

// TestTheFirstTotalHasTheVisitor: a client joins a page and asks for the total of the site in one write. No total comes
// that lacks the visitor, unless the gateway's patience has ended.
func TestTheFirstTotalHasTheVisitor(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		for i := range 5 {
			r := s.socket("")
			began := time.Now()

			r.write([]byte(masked(websocket.Text, fmt.Sprintf(`{"type":"join","page":"p%d"}`, i)) +
				masked(websocket.Text, `{"type":"subscribe","pages":["*"]}`)))
			// The visitors of earlier rounds are still present.
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

				if time.Since(began) < time.Second { // within the patience of the fan-out
					t.Fatalf("the total is %s, want it to begin with %s", payload, want)
				}
			}
		}
	})
}

// mute is a cluster in which no beats of a gateway arrive while it is on.
type mute struct {
	Cluster
	on *atomic.Bool
}

func (m mute) SendBeat(b *heartbeat.Beat) {
	if !m.on.Load() {
		m.Cluster.SendBeat(b)
	}
}

// So it is when the client had subscribed to the count of the site before it joined its first page.
func TestATotalThatIsWatchedHasTheVisitor(t *testing.T) {
	var away atomic.Bool
	inMemory(t, func(cfg *Config) { cfg.Cluster = mute{cfg.Cluster, &away} }, func(t *testing.T, s *served) {
		defer s.dispatch()()
		r := s.socket("")
		r.write([]byte(masked(websocket.Text, `{"type":"subscribe","pages":["*"]}`)))
		r.expect(websocket.Text, `{"type":"count","page":"*","count":0,`)
		time.Sleep(time.Second) // more than an interval, so that the next count comes at once

		// The join is not stored yet, and somebody else comes by another way.
		away.Store(true)
		r.write([]byte(masked(websocket.Text, `{"type":"join","page":"p"}`)))
		synctest.Wait()
		s.do(http.MethodPut, "/q/counter", incrementBody)
		time.Sleep(time.Second)
		away.Store(false)

		// The first count of the site after the join decides. If it came for the other user alone, this client would
		// see a total without itself.
		for {
			_, payload, err := r.frame()
			if err != nil {
				t.Fatal(err)
			}
			if bytes.HasPrefix(payload, []byte(`{"type":"count","page":"*",`)) {
				const want = `{"type":"count","page":"*","count":2,`
				if !bytes.HasPrefix(payload, []byte(want)) {
					t.Errorf("the first total after the join is %s, want it to begin with %s", payload, want)
				}
				return
			}
		}
	})
}

// A client whose join is not stored for long gets the count of the site marked as stale, and again each time that it
// asks.
func TestAnOverdueTotalIsAnswered(t *testing.T) {
	var away atomic.Bool
	inMemory(t, func(cfg *Config) { cfg.Cluster = mute{cfg.Cluster, &away} }, func(t *testing.T, s *served) {
		defer s.dispatch()()
		c := s.tab()
		away.Store(true)
		c.join("p")

		// The first answer may take as long as a count is withheld. After that the client has waited enough, and each
		// further subscribe is answered soon.
		for _, within := range []time.Duration{7 * time.Second, time.Second, time.Second} {
			c.subscribe("*")
			got := slices.ContainsFunc(c.during(within), func(f tabFrame) bool { return f.Page == "*" && f.Stale })
			if !got {
				t.Errorf("there is no count of the site within %s of a subscribe", within)
			}
		}

		// Whoever takes the count anew waits anew.
		c.say(`{"type":"unsubscribe","pages":["*"]}`)
		c.subscribe("*")
		away.Store(false)
		for _, f := range c.during(3 * time.Second) {
			if f.Page == "*" && !f.counts("*", 1) {
				t.Errorf("the count of the site is %s", f.text)
			}
		}
	})
}

// A client's count of the site is withheld until its join of a page is stored. If the client leaves the page, it gets
// the count at once, even if the page has no other subscription.
func TestALeaveReleasesTheTotal(t *testing.T) {
	inMemory(t, nil, func(t *testing.T, s *served) {
		for range 5 {
			r := s.socket("")
			watch := testkit.NewStopwatch(t)
			// All frames go out before an answer comes, so the leave usually arrives while the join still waits for the
			// store.
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

			if took := watch.Elapsed(); took > 3*time.Second { // a forgotten count would come with the sweep, after 5 s
				t.Fatalf("the count of the site came after %s, want 3s at most", took)
			}

			_ = r.Close()
		}
	})
}

// replies is a function that implements node.Replies.
type replies func(gateway string, r *heartbeat.Reply)

func (f replies) SendReply(gateway string, r *heartbeat.Reply) { f(gateway, r) }
