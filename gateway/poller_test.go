package gateway

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/rs/zerolog"
	"go.uber.org/goleak"

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

// serveGateway runs a gateway until the test ends, and then expects nothing to
// be left of it.
func serveGateway(t *testing.T, polled bool, tune func(*Config)) *served {
	t.Helper()
	before := goleak.IgnoreCurrent()
	identities, err := NewIdentities(IdentityConfig{IDSecrets: [][]byte{[]byte("0123456789abcdef")}})
	if err != nil {
		t.Fatal(err)
	}
	origins, err := NewOrigins(nil)
	if err != nil {
		t.Fatal(err)
	}
	proxies, err := NewProxies(nil)
	if err != nil {
		t.Fatal(err)
	}
	store := memstore.New(memstore.Config{})
	var g *Gateway
	nd, err := node.New(store, node.Config{Name: "n", Reply: func(_ string, r *heartbeat.Reply) { g.Receive(r) }, Log: zerolog.Nop()})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Name: "g", Store: store, Unread: store, Hold: nd.Hold,
		Send: func(b *heartbeat.Beat) { nd.Deliver(b) },
		Ready: func() error {
			for i := range presence.DefaultPartitions {
				if !nd.Owns(i) {
					return presence.ErrUnavailable
				}
			}
			return nil
		},

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
		for _, s := range g.hub.shards {
			s.poller = nil
		}
	}
	own := make([]int, presence.DefaultPartitions)
	for i := range own {
		own[i] = i
	}
	nd.Own(own)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { _ = g.Run(ctx) })
	wg.Go(func() { _ = nd.Run(ctx) })
	server := httptest.NewUnstartedServer(g.Handler())
	door := g.Door(server.Listener)
	server.Listener, server.Config.ConnState = door, door.State
	server.Start()
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
		for _, s := range g.hub.shards {
			if len(s.conns) != 0 || len(s.topics) != 0 {
				t.Errorf("a shard has %d connections and %d topics left", len(s.conns), len(s.topics))
			}
		}
		if fs := g.followers; len(fs.users)+len(fs.pages)+len(fs.staleUsers)+len(fs.stalePages)+len(fs.graces) != 0 {
			t.Errorf("%d users and %d pages of followers are left", len(fs.users), len(fs.pages))
		}
		server.Close()
		cancel()
		wg.Wait()
		identities.Close()
		goleak.VerifyNone(t, before)
	})
	return &served{t, g, strings.TrimPrefix(server.URL, "http://")}
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

// settles waits until so many connections are left.
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
	r.expect(frameText, `{"type":"welcome"`)
	r.expect(frameText, `{"type":"unread"`)
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

// expect reads frames up to the next that is no ping.
func (r *raw) expect(opcode byte, prefix string) {
	r.t.Helper()
	for {
		got, payload, err := r.frame()
		if err != nil {
			r.t.Fatalf("%v; want %q", err, prefix)
		}
		if got == framePing && opcode != framePing {
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
	r.expect(frameClose, string(binary.BigEndian.AppendUint16(nil, uint16(code))))
}

// expectEnd expects the connection to end, whatever comes before.
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
	b := appendFrame(nil, first, []byte(payload))
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
	frameBinary  = 0x82
	heartbeatMsg = `{"type":"heartbeat"}`
)

// TestFramesInPieces sends the same bytes cut at every place, and one by one.
func TestFramesInPieces(t *testing.T) {
	sent := masked(frameText, `{"type":"subscribe","pages":["p"]}`) +
		masked(framePong, "") +
		masked(partText, `{"type":"hea`) +
		masked(framePing, "between") + // a control frame may come between fragments
		masked(partMore, "") +
		masked(lastPart, `rtbeat"}`) +
		masked(framePing, "") +
		masked(frameText, "") + // no JSON
		masked(frameText, `{"type":"read","x":"`+strings.Repeat("x", 200)+`"}`)
	check := func(r *raw) {
		r.t.Helper()
		// The count comes in its own time; the rest in order.
		want := []struct {
			opcode byte
			prefix string
		}{{framePong, "between"}, {frameText, heartbeatMsg}, {framePong, ""}, {frameText, `{"type":"error","code":"bad_json"`}, {frameText, `{"type":"unread"`}}
		for i := 0; i < len(want); {
			opcode, payload, err := r.frame()
			if err != nil {
				r.t.Fatal(err)
			}
			if bytes.HasPrefix(payload, []byte(`{"type":"count"`)) {
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
	half := masked(frameText, heartbeatMsg)[:9]
	ways := map[string]func(s *served, r *raw){
		"closed": func(_ *served, r *raw) {
			r.write([]byte(masked(frameClose, "\x03\xe8")))
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
			r.write([]byte(strings.Repeat(masked(frameText, heartbeatMsg), 10)))
			_ = r.CloseWrite()
			for range 10 {
				r.expect(frameText, heartbeatMsg)
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
			r.write([]byte(masked(framePing, strings.Repeat("x", 126))[:8])) // its head is enough
			r.expectClose(1002)
			r.expectEnd() // also when the client does not close its side
		},
		"no mask": func(_ *served, r *raw) { r.write(appendFrame(nil, frameText, []byte("{}"))); r.expectEnd() },
		"too long a frame": func(_ *served, r *raw) {
			r.write([]byte(masked(frameText, strings.Repeat("x", maxMessage+1))))
			r.expect(frameText, `{"type":"error","code":"too_large"`)
			r.expectClose(1009)
			r.expectEnd()
		},
		"too long in fragments": func(_ *served, r *raw) {
			r.write([]byte(masked(partText, strings.Repeat("x", maxMessage)) + masked(partMore, "x")))
			r.expect(frameText, `{"type":"error","code":"too_large"`)
			r.expectClose(1009)
			r.expectEnd()
		},
		"bad UTF-8": func(_ *served, r *raw) {
			r.write([]byte(masked(frameText, "\xff")))
			r.expectClose(1007)
			r.expectEnd()
		},
		"twenty errors": func(_ *served, r *raw) {
			r.write([]byte(strings.Repeat(masked(frameBinary, "x"), maxErrors+5)))
			for range maxErrors {
				r.expect(frameText, `{"type":"error","code":"binary"`)
			}
			r.expect(frameText, `{"type":"error","code":"too_many_errors"`)
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
				r.write([]byte(masked(frameText, `{"type":"join","page":"`+page+`"}`)))
				r.expect(frameText, `{"type":"count","page":"`+page)
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
				if _, err := out.Write(appendFrame(nil, opcode, payload)); err != nil {
					return
				}
			}
		}
	}()
	r.t.Cleanup(func() { _ = in.Close() })
	return in
}

// TestPongThenNothing: a connection that only answers pings stays, one that
// does not goes, and one that sends part of a frame is silent.
func TestPongThenNothing(t *testing.T) {
	bothWays(t, func(cfg *Config) {
		cfg.PingInterval, cfg.PongTimeout = 100*time.Millisecond, 400*time.Millisecond
	}, func(t *testing.T, s *served) {
		deaf, half := s.socket(""), s.socket("")
		half.write([]byte{0x81, 0xfe})
		r := s.socket("")
		for range 6 {
			r.expect(framePing, "")
			r.write([]byte(masked(framePong, "")))
		}
		r.write([]byte(masked(frameText, heartbeatMsg)))
		r.expect(frameText, heartbeatMsg)
		deaf.expectEnd()
		half.expectEnd()
		for range 2 {
			r.expect(framePing, "")
			r.write([]byte(masked(framePong, "")))
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
				text := []byte(strings.Repeat(masked(framePing, "x")+masked(framePong, ""), 20))
				for {
					if _, err := r.Write(text); err != nil {
						return
					}
				}
			})
			wg.Go(func() { _, _ = io.Copy(io.Discard, r) })
		}
		s.g.each(func(c *conn) {
			wg.Go(func() { c.dead() })
			wg.Go(func() { c.dead() })
		})
		s.settles(0)
		wg.Wait()
	})
}

// TestClientThatTakesNothing floods with requests and never reads an answer: it
// is not listened to, then closed, and the others notice nothing of it.
func TestClientThatTakesNothing(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.WriteTimeout = 500 * time.Millisecond }, func(t *testing.T, s *served) {
		hog := s.socket("")
		_ = hog.SetReadBuffer(4096)
		s.g.each(func(c *conn) { // without, the kernel takes megabytes of pongs first
			if tcp, ok := c.wire.Conn.(interface{ SetWriteBuffer(int) error }); ok {
				_ = tcp.SetWriteBuffer(4096)
			}
		})
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			text := []byte(strings.Repeat(masked(framePing, strings.Repeat("x", 125)), 100))
			for {
				if _, err := hog.Write(text); err != nil {
					return
				}
			}
		}()
		other := s.socket("")
		for i := 0; ; i++ {
			began := time.Now()
			other.write([]byte(masked(frameText, heartbeatMsg)))
			other.expect(frameText, heartbeatMsg)
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

// TestAnswersWaitForSlowClient: nothing is lost when a client takes its answers
// late.
func TestAnswersWaitForSlowClient(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.WriteTimeout = time.Minute }, func(t *testing.T, s *served) {
		r := s.socket("")
		_ = r.SetReadBuffer(32 << 10)
		const pings = 60_000
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := range pings {
				if _, err := r.Write([]byte(masked(framePing, fmt.Sprintf("%0100d", i)))); err != nil {
					t.Error(err)
					return
				}
			}
		})
		time.Sleep(300 * time.Millisecond)
		for i := range pings {
			r.expect(framePong, fmt.Sprintf("%0100d", i))
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

// TestDrainWaitsForTheClose: a client that closes its side in time has the
// close frame for certain, one that does not is closed after a moment.
func TestDrainWaitsForTheClose(t *testing.T) {
	bothWays(t, func(cfg *Config) { cfg.ShutdownTimeout = 500 * time.Millisecond }, func(t *testing.T, s *served) {
		good, bad := s.socket(""), s.socket("")
		s.settles(2)
		ctx, cancel := context.WithTimeout(context.Background(), patient)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- s.g.Drain(ctx) }()
		for _, r := range []*raw{good, bad} {
			r.expect(frameText, `{"type":"reconnect"`)
			r.expectClose(1012)
		}
		good.write([]byte(masked(frameClose, "\x03\xf4")))
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

// TestSilentConnectionsHaveNoGoroutine, nor have those in the middle of a frame.
func TestSilentConnectionsHaveNoGoroutine(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("elsewhere each has one")
	}
	s := serveGateway(t, true, nil)
	const n = 100
	socket := func() *raw {
		r := s.socket("")
		r.write([]byte(masked(frameText, heartbeatMsg) + masked(partText, "{")[:3]))
		r.expect(frameText, heartbeatMsg)
		return r
	}
	all := []*raw{socket()}
	before := runtime.NumGoroutine()
	for range n {
		all = append(all, socket())
	}
	await(t, "the goroutines of one connection", func() bool { return runtime.NumGoroutine() <= before+n/10 })
	for _, r := range all {
		_ = r.Close()
	}
	s.settles(0)
}

func TestFrameSize(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want int
	}{
		"nothing":                {"", 0},
		"one byte":               {"\x81", 0},
		"no key yet":             {"\x81\x85key", 0},
		"short":                  {"\x81\x85mask", 11},
		"no mask":                {"\x81\x05", 7},
		"empty":                  {"\x81\x80mask", 6},
		"half a length":          {"\x81\xfe\x01", 0},
		"two bytes of length":    {"\x81\xfe\x10\x00mask", 8 + maxMessage},
		"the longest":            {"\x81\xff\x00\x00\x00\x00\x00\x00\x10\x00mask", maxFrame},
		"too long":               {"\x81\xfe\x10\x01mask", math.MaxInt},
		"far too long":           {"\x02\xff\xff\xff\xff\xff\xff\xff\xff\xffmask", math.MaxInt},
		"ping":                   {"\x89\xfdmask", 6 + 125},
		"ping that is too long":  {"\x89\xfe\x10\x00mask", 8},
		"close that is too long": {"\x88\xff\xff\xff\xff\xff\xff\xff\xff\xffmask", 14},
	} {
		t.Run(name, func(t *testing.T) {
			if got := frameSize([]byte(tc.in)); got != tc.want {
				t.Errorf("frameSize(%q) = %d, want %d", tc.in, got, tc.want)
			}
		})
	}
}
