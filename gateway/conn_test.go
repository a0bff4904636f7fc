package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

	"headcount/gateway/identity"
	"headcount/gateway/socket"
	"headcount/gateway/websocket"
	"headcount/presence"
	"headcount/presence/heartbeat"
	"headcount/presence/memstore"
	"headcount/presence/node"
)

// patient is longer than anything here takes.
const patient = 10 * time.Second

// served is a gateway behind a real listener, with a node and a store.
type served struct {
	t    *testing.T
	g    *Gateway
	addr string
}

// lone is a cluster of one process.
type lone struct {
	*node.Node
	store *memstore.Store
}

func (l lone) SendBeat(b *heartbeat.Beat) { l.Deliver(b) }
func (l lone) Alive(string) bool          { return false }

func (l lone) Ready() error {
	all := make([]int, presence.DefaultPartitions)
	for i := range all {
		if all[i] = i; !l.Owns(i) {
			return presence.ErrUnavailable
		}
	}
	if missing, _ := l.store.Incomplete(context.Background(), all, true); len(missing) > 0 {
		return presence.ErrUnavailable
	}
	return nil
}

// serveGateway runs a gateway until the test ends, and then checks that nothing is left
// of it.
func serveGateway(t *testing.T, polled bool, tune func(*Config)) *served {
	t.Helper()
	return serveVia(t, polled, tune, (*httptest.Server).Start)
}

// serveVia is serveGateway with another way to start its HTTP server.
func serveVia(t *testing.T, polled bool, tune func(*Config), begin func(*httptest.Server)) *served {
	t.Helper()
	before := goleak.IgnoreCurrent()
	identities, err := identity.New(identity.Config{IDSecrets: [][]byte{[]byte("0123456789abcdef")}})
	if err != nil {
		t.Fatal(err)
	}
	origins, err := identity.NewOrigins(nil)
	if err != nil {
		t.Fatal(err)
	}
	proxies, err := identity.NewProxies(nil)
	if err != nil {
		t.Fatal(err)
	}
	store := memstore.New(memstore.Config{})
	var g *Gateway
	nd, err := node.New(store, node.Config{Name: "n", Reply: replies(func(_ string, r *heartbeat.Reply) { g.Receive(r) }), Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Name: "g", Store: store, Unread: store, Cluster: lone{nd, store},
		Identities: identities, Origins: origins, Proxies: proxies,
		Assets: fstest.MapFS{}, Log: zerolog.Nop(),
	}
	if tune != nil {
		tune(&cfg)
	}
	if g, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	if !polled {
		g.pollers.all = []*socket.Poller{nil}
	}
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
	server := httptest.NewUnstartedServer(g.Handler())
	door := g.Door(server.Listener)
	server.Listener, server.Config.ConnState, server.Config.ConnContext = door, door.State, door.Context
	begin(server)
	await(t, "a gateway that is ready", func() bool { return g.Ready() == nil })
	t.Cleanup(func() {
		within, stop := context.WithTimeout(context.Background(), patient)
		defer stop()
		if err := g.Drain(within); err != nil {
			t.Errorf("drain: %v", err)
		}
		if n := g.connections.Load(); n != 0 {
			t.Errorf("%d connections are left", n)
		}
		if left := g.hub.Wanted(); left != 0 {
			t.Errorf("%d topics are still wanted", left)
		}
		if left := g.unread.Users(); left != 0 {
			t.Errorf("%d users are left", left)
		}
		server.Close()
		cancel()
		wg.Wait()
		identities.Close()
		goleak.VerifyNone(t, before)
	})
	_, addr, _ := strings.Cut(server.URL, "://")
	return &served{t, g, addr}
}

// bothWays runs a test with the poller and with a goroutine per connection.
func bothWays(t *testing.T, tune func(*Config), test func(*testing.T, *served)) {
	t.Run("polled", func(t *testing.T) { test(t, serveGateway(t, true, tune)) })
	t.Run("a goroutine each", func(t *testing.T) { test(t, serveGateway(t, false, tune)) })
}

// await waits until something is so.
func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(patient); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// settles waits until only so many connections are left.
func (s *served) settles(want int) {
	s.t.Helper()
	await(s.t, fmt.Sprintf("%d connections to be left", want), func() bool {
		n := 0
		s.g.each(func(*conn) { n++ })
		return n == want && s.g.connections.Load() == int64(want)
	})
}

// raw is a client that knows no more of the protocol than a test wants it to.
type raw struct {
	t *testing.T
	*net.TCPConn
	in *bufio.Reader
}

// open sends the request's lines, and early right behind it.
func (s *served) open(target, early string, lines ...string) *raw {
	s.t.Helper()
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	r := &raw{s.t, c.(*net.TCPConn), bufio.NewReader(c)}
	r.write([]byte("GET " + target + " HTTP/1.1\r\nHost: h\r\n" + strings.Join(append(lines, "", ""), "\r\n") + early))
	return r
}

func (s *served) socket(early string) *raw {
	s.t.Helper()
	r := s.open("/-/ws", early, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13",
		"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol: headcount.v1")
	resp := r.response(http.StatusSwitchingProtocols)
	if got := resp.Header.Get("Sec-WebSocket-Accept"); got != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" {
		s.t.Fatalf("Sec-WebSocket-Accept is %q, not that of RFC 6455", got)
	}
	if got := resp.Header.Get("Sec-WebSocket-Protocol"); got != subprotocol {
		s.t.Fatalf("Sec-WebSocket-Protocol is %q", got)
	}
	r.expect(websocket.Text, `{"type":"welcome"`)
	r.expect(websocket.Text, unreadMsg)
	return r
}

func (r *raw) response(status int) *http.Response {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(patient))
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
	_ = r.SetReadDeadline(time.Now().Add(patient))
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
	return head[0], payload, err
}

const unreadMsg = `{"type":"unread"`

// expect reads until the frame that is wanted, over pings and over what a client may be told again.
func (r *raw) expect(opcode byte, prefix string) {
	r.t.Helper()
	for {
		got, payload, err := r.frame()
		if err != nil {
			r.t.Fatalf("%v; want %q", err, prefix)
		}
		if got == websocket.Ping && opcode != websocket.Ping {
			continue
		}
		if bytes.HasPrefix(payload, []byte(unreadMsg)) && prefix != unreadMsg { // told again after a busy write
			continue
		}
		if got != opcode || !bytes.HasPrefix(payload, []byte(prefix)) {
			r.t.Fatalf("got %#x %q, want %#x %q", got, payload, opcode, prefix)
		}
		return
	}
}

func (r *raw) expectClose(code int) {
	r.t.Helper()
	r.expect(websocket.Close, string(binary.BigEndian.AppendUint16(nil, uint16(code))))
}

// expectEnd reads until the connection ends, whatever comes before.
func (r *raw) expectEnd() {
	r.t.Helper()
	_ = r.SetReadDeadline(time.Now().Add(patient))
	_, err := io.Copy(io.Discard, r.in)
	if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		r.t.Fatal("the connection has not ended")
	}
}

// masked is a client's frame.
func masked(first byte, payload string) string {
	b := websocket.AppendFrame(nil, first, []byte(payload))
	head := len(b) - len(payload)
	b[1] |= 0x80
	key := [4]byte{0x12, 0x34, 0x56, 0x78}
	out := append(append(append([]byte(nil), b[:head]...), key[:]...), payload...)
	for i := range payload {
		out[head+4+i] ^= key[i%4]
	}
	return string(out)
}

const (
	partText     = 0x01 // without FIN
	partMore     = 0x00
	lastPart     = 0x80
	heartbeatMsg = `{"type":"heartbeat"}`
)

// TestFramesInPieces sends the same bytes cut at every place, and one by one.
func TestFramesInPieces(t *testing.T) {
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
		}{{websocket.Pong, "between"}, {websocket.Text, heartbeatMsg}, {websocket.Pong, ""}, {websocket.Text, `{"type":"error","code":"bad_json"`}, {websocket.Text, unreadMsg}}
		for i := 0; i < len(want); {
			opcode, payload, err := r.frame()
			if err != nil {
				r.t.Fatal(err)
			}
			if bytes.HasPrefix(payload, []byte(`{"type":"count"`)) || i+1 < len(want) && bytes.HasPrefix(payload, []byte(unreadMsg)) {
				continue
			}
			if opcode != want[i].opcode || !bytes.HasPrefix(payload, []byte(want[i].prefix)) {
				r.t.Fatalf("answer %d: got %#x %q, want %#x %q", i, opcode, payload, want[i].opcode, want[i].prefix)
			}
			i++
		}
	}
	bothWays(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		for cut := 0; cut <= len(sent); cut++ {
			r := s.socket("")
			wg.Go(func() {
				if cut > 0 {
					r.write([]byte(sent[:cut]))
					time.Sleep(20 * time.Millisecond)
				}
				r.write([]byte(sent[cut:]))
				check(r)
				_ = r.Close()
			})
		}
		drip := s.socket("")
		_ = drip.SetNoDelay(true)
		for i := range sent {
			drip.write([]byte(sent[i : i+1]))
			time.Sleep(200 * time.Microsecond)
		}
		check(drip)
		_ = drip.Close()
		wg.Wait()
		early := s.socket(sent)
		check(early)
		_ = early.Close()
		s.settles(0)
	})
}

// TestEndsOfConnections has connections end in every way, many at a time.
func TestEndsOfConnections(t *testing.T) {
	half := masked(websocket.Text, heartbeatMsg)[:9]
	ways := map[string]func(s *served, r *raw){
		"closed": func(_ *served, r *raw) {
			r.write([]byte(masked(websocket.Close, "\x03\xe8")))
			r.expectClose(1000)
			r.expectEnd()
		},
		"vanished":    func(_ *served, r *raw) { _ = r.Close() },
		"half closed": func(_ *served, r *raw) { _ = r.CloseWrite(); r.expectEnd() },
		"reset":       func(_ *served, r *raw) { _ = r.SetLinger(0); _ = r.Close() },
		"reset in a frame": func(_ *served, r *raw) {
			r.write([]byte(half))
			time.Sleep(5 * time.Millisecond)
			_ = r.SetLinger(0)
			_ = r.Close()
		},
		"vanished in a frame": func(_ *served, r *raw) { r.write([]byte(half)); _ = r.Close() },
		"vanished in a message": func(_ *served, r *raw) {
			r.write([]byte(masked(partText, `{"type"`)))
			time.Sleep(5 * time.Millisecond)
			_ = r.Close()
		},
		"last words": func(_ *served, r *raw) {
			r.write([]byte(strings.Repeat(masked(websocket.Text, heartbeatMsg), 10)))
			_ = r.CloseWrite()
			for range 10 {
				r.expect(websocket.Text, heartbeatMsg)
			}
			r.expectEnd()
		},
		"reserved bits": func(_ *served, r *raw) {
			r.write([]byte(masked(0xc1, "x")))
			r.expectClose(1002)
			_ = r.CloseWrite()
			r.expectEnd()
		},
		"long ping": func(_ *served, r *raw) {
			r.write([]byte(masked(websocket.Ping, strings.Repeat("x", 126))[:8])) // its head is enough
			r.expectClose(1002)
			r.expectEnd() // also when the client does not close its side
		},
		"no mask": func(_ *served, r *raw) {
			r.write(websocket.AppendFrame(nil, websocket.Text, []byte("{}")))
			r.expectEnd()
		},
		"too long a frame": func(_ *served, r *raw) {
			r.write([]byte(masked(websocket.Text, strings.Repeat("x", websocket.MaxMessage+1))))
			r.expect(websocket.Text, `{"type":"error","code":"too_large"`)
			r.expectClose(1009)
			r.expectEnd()
		},
		"too long in fragments": func(_ *served, r *raw) {
			r.write([]byte(masked(partText, strings.Repeat("x", websocket.MaxMessage)) + masked(partMore, "x")))
			r.expect(websocket.Text, `{"type":"error","code":"too_large"`)
			r.expectClose(1009)
			r.expectEnd()
		},
		"bad UTF-8": func(_ *served, r *raw) {
			r.write([]byte(masked(websocket.Text, "\xff")))
			r.expectClose(1007)
			r.expectEnd()
		},
		"twenty errors": func(_ *served, r *raw) {
			r.write([]byte(strings.Repeat(masked(websocket.Binary, "x"), maxErrors+5)))
			for range maxErrors {
				r.expect(websocket.Text, `{"type":"error","code":"binary"`)
			}
			r.expect(websocket.Text, `{"type":"error","code":"too_many_errors"`)
			r.expectClose(1008)
			r.expectEnd()
		},
	}
	bothWays(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		for name, way := range ways {
			for i := range 20 {
				r := s.socket("")
				page := fmt.Sprintf("%s %d", name, i%3)
				r.write([]byte(masked(websocket.Text, `{"type":"join","page":"`+page+`"}`)))
				r.expect(websocket.Text, `{"type":"count","page":"`+page)
				wg.Go(func() { // after a count, none comes: the users stay for the grace
					way(s, &raw{t, r.TCPConn, bufio.NewReader(skipCounts(r))})
				})
			}
		}
		wg.Wait()
		s.settles(0)
	})
}

// skipCounts passes on all frames but those of counts.
func skipCounts(r *raw) io.Reader {
	in, out := io.Pipe()
	go func() {
		for {
			opcode, payload, err := r.frame()
			if err != nil {
				_ = out.CloseWithError(err)
				return
			}
			if !bytes.HasPrefix(payload, []byte(`{"type":"count"`)) {
				if _, err := out.Write(websocket.AppendFrame(nil, opcode, payload)); err != nil {
					return
				}
			}
		}
	}()
	r.t.Cleanup(func() { _ = in.Close() })
	return in
}

// TestPongThenNothing: a connection that answers pings stays. One that does not answer
// them, or only begins a frame, is closed as silent.
func TestPongThenNothing(t *testing.T) {
	bothWays(t, func(cfg *Config) {
		cfg.PingInterval, cfg.PongTimeout = 100*time.Millisecond, 400*time.Millisecond
	}, func(t *testing.T, s *served) {
		deaf, half := s.socket(""), s.socket("")
		half.write([]byte{0x81, 0xfe})
		r := s.socket("")
		for range 6 {
			r.expect(websocket.Ping, "")
			r.write([]byte(masked(websocket.Pong, "")))
		}
		r.write([]byte(masked(websocket.Text, heartbeatMsg)))
		r.expect(websocket.Text, heartbeatMsg)
		deaf.expectEnd()
		half.expectEnd()
		for range 2 {
			r.expect(websocket.Ping, "")
			r.write([]byte(masked(websocket.Pong, "")))
		}
		s.settles(1)
		_ = r.Close()
		s.settles(0)
	})
}

// TestCloseWhileServing closes connections at all times from the gateway's side.
func TestCloseWhileServing(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, s *served) {
		var wg sync.WaitGroup
		var all []*raw
		for range 50 {
			all = append(all, s.socket(""))
		}
		s.settles(len(all))
		for _, r := range all {
			wg.Go(func() {
				text := []byte(strings.Repeat(masked(websocket.Ping, "x")+masked(websocket.Pong, ""), 20))
				for {
					if _, err := r.Write(text); err != nil {
						return
					}
				}
			})
			wg.Go(func() { _, _ = io.Copy(io.Discard, r) })
		}
		s.g.each(func(c *conn) {
			wg.Go(func() { _ = c.Close() })
			wg.Go(func() { _ = c.Close() })
		})
		s.settles(0)
		wg.Wait()
	})
}

// TestClientThatTakesNothing floods the gateway with requests and never reads an answer.
// The gateway stops reading from that client, then closes it. Other clients notice
// nothing.
func TestClientThatTakesNothing(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.WriteTimeout = 500 * time.Millisecond }, func(t *testing.T, s *served) {
		hog := s.socket("")
		_ = hog.SetReadBuffer(4096)
		s.g.each(func(c *conn) { // without, the kernel takes megabytes of pongs first
			if tcp, ok := c.wire.NetConn().(interface{ SetWriteBuffer(int) error }); ok {
				_ = tcp.SetWriteBuffer(4096)
			}
		})
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
		for i := 0; ; i++ {
			began := time.Now()
			other.write([]byte(masked(websocket.Text, heartbeatMsg)))
			other.expect(websocket.Text, heartbeatMsg)
			if took := time.Since(began); took > 400*time.Millisecond {
				t.Errorf("the other client waited %s", took)
			}
			select {
			case <-gone:
				s.settles(1)
				_ = other.Close()
				s.settles(0)
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	})
}

// A client that reads only after a while stays connected, although meanwhile no ping
// could be sent to it and none of its frames was read.
func TestASlowClientLives(t *testing.T) {
	tune := func(cfg *Config) { cfg.PingInterval, cfg.PongTimeout = time.Second, time.Second }
	for name, c := range map[string]struct {
		stall time.Duration
		talks bool
	}{"silent": {1500 * time.Millisecond, false}, "talks": {2500 * time.Millisecond, true}} {
		t.Run(name, func(t *testing.T) {
			s := serveGateway(t, true, tune)
			r := s.socket("")
			_ = r.SetReadBuffer(64 << 10)
			s.g.each(func(c *conn) {
				if tcp, ok := c.wire.NetConn().(interface{ SetWriteBuffer(int) error }); ok {
					_ = tcp.SetWriteBuffer(64 << 10)
				}
				for range 10 {
					_ = c.send(websocket.Text, bytes.Repeat([]byte("x"), 60_000))
				}
				if !c.Busy() {
					t.Error("the client has taken everything; the test shows nothing")
				}
			})
			for began := time.Now(); time.Since(began) < c.stall; time.Sleep(100 * time.Millisecond) {
				if c.talks {
					r.write([]byte(masked(websocket.Pong, "")))
				}
			}
			pings := 0
			for pings < 2 {
				opcode, _, err := r.frame()
				if err != nil {
					t.Fatalf("cut after %d pings: %v", pings, err)
				}
				if opcode == websocket.Ping {
					pings++
					r.write([]byte(masked(websocket.Pong, "")))
				}
			}
			_ = r.Close()
			s.settles(0)
		})
	}
}

// TestAnswersWaitForSlowClient: nothing is lost when a client takes its answers
// late.
func TestAnswersWaitForSlowClient(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.WriteTimeout = time.Minute }, func(t *testing.T, s *served) {
		r := s.socket("")
		// Systems differ in how much a socket holds, so the test fills it first. Bytes
		// move on from one side's buffer to the other's, so the test looks several
		// times.
		filler, fillers, looks := bytes.Repeat([]byte("x"), 60_000), 0, 0
		await(t, "a client that owes the server its reading", func() bool {
			s.g.each(func(c *conn) {
				looks++
				for ; !c.wire.Busy() && fillers < 1000; fillers++ {
					if err := c.send(websocket.Text, filler); err != nil {
						t.Error(err)
						return
					}
					looks = 0
				}
			})
			return looks > 30
		})
		const pings = 500
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range pings {
				if _, err := r.Write([]byte(masked(websocket.Ping, fmt.Sprintf("%0100d", i)))); err != nil {
					t.Error(err)
					return
				}
			}
		})
		s.g.each(func(c *conn) {
			if !c.wire.Busy() {
				t.Error("the client has taken everything; the test shows nothing")
			}
		})
		for range fillers {
			r.expect(websocket.Text, string(filler))
		}
		for i := range pings {
			r.expect(websocket.Pong, fmt.Sprintf("%0100d", i))
		}
		wg.Wait()
		_ = r.Close()
		s.settles(0)
	})
}

func TestEventStreamsEnd(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, s *served) {
		var streams []*raw
		for range 30 {
			r := s.open("/p/counter/events", "")
			r.response(http.StatusOK)
			if line, err := r.in.ReadString('\n'); err != nil || line != "event: count\n" {
				t.Fatalf("got %q, %v", line, err)
			}
			streams = append(streams, r)
		}
		s.settles(30)
		for i, r := range streams {
			switch i % 3 {
			case 0:
				_ = r.SetLinger(0)
			case 1:
				r.write([]byte("nobody listens to this"))
			}
			_ = r.Close()
		}
		s.settles(0)
		s.open("/p/counter/events", "").response(http.StatusOK) // left to the drain
		s.settles(1)
	})
}

// TestDrainWaitsForTheClose: a client that closes its side in time is certain to get the
// close frame. A client that does not is closed after a moment.
func TestDrainWaitsForTheClose(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.ShutdownTimeout = 500 * time.Millisecond }, func(t *testing.T, s *served) {
		good, bad := s.socket(""), s.socket("")
		s.settles(2)
		ctx, cancel := context.WithTimeout(context.Background(), patient)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- s.g.Drain(ctx) }()
		for _, r := range []*raw{good, bad} {
			r.expect(websocket.Text, `{"type":"reconnect"`)
			r.expectClose(1012)
		}
		good.write([]byte(masked(websocket.Close, "\x03\xf4")))
		_ = good.CloseWrite()
		good.expectEnd()
		s.settles(1)
		began := time.Now()
		bad.expectEnd()
		if took := time.Since(began); took > 2*lingerClose {
			t.Errorf("the end came after %s", took)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestCloseHandshakeEndsAtOnce: when both close frames have been sent, the server closes
// the connection and does not wait for the client. It does not matter who began, or what
// the client still had to say.
func TestCloseHandshakeEndsAtOnce(t *testing.T) {
	closing := func(code uint16) string {
		return masked(websocket.Close, string(binary.BigEndian.AppendUint16(nil, code)))
	}
	for name, tc := range map[string]struct {
		sends string
		code  int
		more  string // what is on its way before the client hears of the end
	}{
		"the client's":           {closing(1000), 1000, ""},
		"the client's, going":    {masked(partText, "x") + closing(1001), 1001, ""},
		"too large":              {masked(websocket.Text, strings.Repeat("x", 100_000)), websocket.StatusTooBig, masked(websocket.Text, heartbeatMsg)},
		"too large in fragments": {masked(partText, strings.Repeat("x", 4000)) + masked(lastPart, strings.Repeat("x", 4000)), websocket.StatusTooBig, ""},
		"too many errors":        {strings.Repeat(masked(websocket.Text, "{"), maxErrors), websocket.StatusPolicyViolation, masked(websocket.Ping, "x")},
		"invalid UTF-8":          {masked(partText, "\xc3") + masked(lastPart, "x"), websocket.StatusInvalidPayload, masked(partText, "x")},
		"a reason of no UTF-8":   {masked(websocket.Close, "\x03\xe8\xff"), websocket.StatusInvalidPayload, ""},
		"a code of none":         {closing(1005), websocket.StatusProtocolError, ""},
		"no mask":                {"\x81\x02{}", websocket.StatusProtocolError, ""},
		"reserved bits":          {masked(0xf1, strings.Repeat("\x88\x80", 5000)), websocket.StatusProtocolError, ""},
	} {
		t.Run(name, func(t *testing.T) {
			bothWays(t, nil, func(t *testing.T, s *served) {
				r := s.socket("")
				r.write([]byte(tc.sends))
				for {
					opcode, payload, err := r.frame()
					if err != nil {
						t.Fatal(err)
					}
					if opcode != websocket.Close {
						continue
					}
					if got := int(binary.BigEndian.Uint16(payload)); got != tc.code {
						t.Fatalf("closed with %d, want %d", got, tc.code)
					}
					break
				}
				began := time.Now()
				if !strings.HasPrefix(name, "the client's") && !strings.HasPrefix(name, "a ") {
					r.write([]byte(tc.more + closing(uint16(tc.code))))
				}
				r.expectEnd()
				if took := time.Since(began); took >= lingerClose {
					t.Errorf("the end came after %s", took)
				}
				s.settles(0)
			})
		})
	}
}

// TestTheFirstTotalHasTheVisitor joins and asks for the total in one breath: no total may
// come that lacks the visitor, but one after the time for which a gateway waits.
func TestTheFirstTotalHasTheVisitor(t *testing.T) {
	bothWays(t, nil, func(t *testing.T, s *served) {
		for i := range 5 {
			r := s.socket("")
			began := time.Now()
			r.write([]byte(masked(websocket.Text, fmt.Sprintf(`{"type":"join","page":"p%d"}`, i)) +
				masked(websocket.Text, `{"type":"subscribe","pages":["*"]}`)))
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

// replies is a function as node.Replies.
type replies func(gateway string, r *heartbeat.Reply)

func (f replies) SendReply(gateway string, r *heartbeat.Reply) { f(gateway, r) }
