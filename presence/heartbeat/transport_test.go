package heartbeat_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"headcount/internal/testkit"
	"headcount/presence"
	. "headcount/presence/heartbeat"
	"headcount/presence/seal"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// network delivers datagrams in memory. A datagram for which there is no room is lost.
type network struct {
	mu    sync.Mutex
	conns map[string]*conn
	lose  func(to string, p []byte) bool // under mu
}

type conn struct {
	net    *network
	addr   addr
	in     chan []byte
	closed chan struct{}
	stuck  chan struct{} // writes wait until it is closed; nil: they do not wait
	once   sync.Once
}

type addr string

func (a addr) Network() string { return "memory" }
func (a addr) String() string  { return string(a) }

func (n *network) listen(name string) *conn {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.conns == nil {
		n.conns = map[string]*conn{}
	}

	c := &conn{net: n, addr: addr(name), in: make(chan []byte, 4096), closed: make(chan struct{})}
	n.conns[name] = c
	return c
}

func (n *network) put(to string, p []byte) {
	n.mu.Lock()
	defer n.mu.Unlock()

	// As in a kernel, datagrams beyond the buffer are dropped.
	if c := n.conns[to]; c != nil && (n.lose == nil || !n.lose(to, p)) {
		select {
		case c.in <- append([]byte(nil), p...):
		default:
		}
	}
}

func (c *conn) ReadFrom(p []byte) (int, net.Addr, error) {
	select {
	case d := <-c.in:
		return copy(p, d), addr(""), nil
	case <-c.closed:
		return 0, nil, net.ErrClosed
	}
}

func (c *conn) WriteTo(p []byte, to net.Addr) (int, error) {
	if c.stuck != nil {
		select {
		case <-c.stuck:
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}

	c.net.put(to.String(), p)
	return len(p), nil
}

func (c *conn) LocalAddr() net.Addr              { return c.addr }
func (c *conn) SetDeadline(time.Time) error      { return nil }
func (c *conn) SetReadDeadline(time.Time) error  { return nil }
func (c *conn) SetWriteDeadline(time.Time) error { return nil }

func (c *conn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return nil
}

// names resolves each name to itself, except for one unknown name.
type names struct{}

func (names) Resolve(_ context.Context, name string) (net.Addr, error) {
	if name == "nowhere:1" {
		return nil, errors.New("no such host")
	}
	return addr(name), nil
}

var secret = [][]byte{[]byte("secret")}

var registries sync.Map // filled by start

// start runs a transport until the test ends, or stop is called.
func start(t testing.TB, cfg Config) (tr *Transport, stop func()) {
	t.Helper()
	reg := prometheus.NewRegistry()
	cfg.Registerer = reg
	tr, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}

	registries.Store(tr, reg)
	t.Cleanup(func() { registries.Delete(tr) })

	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- tr.Run(ctx) }()

	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	t.Cleanup(stop)

	return tr, stop
}

// metric returns the value of tr's metric of that name and labels, "in old".
func metric(t testing.TB, tr *Transport, name, labels string) float64 {
	t.Helper()
	kept, _ := registries.Load(tr)
	reg := kept.(*prometheus.Registry)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		for _, m := range f.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}

			if f.GetName() == "headcount_"+name && strings.Join(values, " ") == labels {
				return m.GetCounter().GetValue()
			}
		}
	}

	return 0
}

func beatOf(name string, partition int, users ...presence.User) *Beat {
	return &Beat{Source: Source{Gateway: name, Incarnation: 1}, Partition: partition, Alive: users}
}

func TestMessagesArrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		beats, replies := make(chan *Beat, 10), make(chan *Reply, 10)
		gw, _ := start(t, Config{
			Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{},
			OnReply: onReply(func(r *Reply) { replies <- r }),
		})
		nd, _ := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Incarnation: 1, Resolver: names{},
			OnBeat: onBeat(func(b *Beat) { beats <- b }),
		})

		synctest.Wait()

		began := time.Now()
		op := Op{Kind: Join, User: 3, Page: "home"}
		gw.SendBeat("nd:1", &Beat{
			Source: Source{Gateway: "gw:1", Incarnation: 1}, Partition: 3, Stream: 1, First: 1, Ops: []Op{op},
		})
		if b := <-beats; b.Source.Gateway != "gw:1" || b.Partition != 3 || len(b.Ops) != 1 || b.Ops[0] != op {
			t.Errorf("the node got the beat %+v", b)
		}

		nd.SendReply("gw:1", &Reply{Partition: 3, Stream: 1, Acked: 1})
		if r := <-replies; r.Acked != 1 {
			t.Errorf("the gateway got the reply %+v", r)
		}

		// In the bubble time passes only while all goroutines wait.
		if d := time.Since(began); d != 0 {
			t.Errorf("beat and reply took %s, want no time", d)
		}

		synctest.Wait() // a datagram is counted after it is sent
		if got := metric(t, gw, "datagrams_total", "out"); got != 1 {
			t.Errorf("the gateway sent %v datagrams, want 1", got)
		}
	})
}

// TestMessagesArePackedWhileTheNetworkIsSlow: messages that wait for the network are sent together. Those beyond the
// bound are dropped and counted.
func TestMessagesArePackedWhileTheNetworkIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		slow := n.listen("gw:1")
		slow.stuck = make(chan struct{})
		users := 0
		nd, _ := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnBeat: onBeat(func(b *Beat) { users += len(b.Alive) }),
		})
		gw, _ := start(t, Config{Conn: slow, Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{}})

		synctest.Wait()

		// The first message blocks in the network. The messages behind it wait together.
		gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
		synctest.Wait()
		for range 1000 {
			gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
		}
		close(slow.stuck)
		synctest.Wait()

		if users != 1001 {
			t.Errorf("%d of 1001 users arrived", users)
		}
		if got := metric(t, nd, "datagrams_total", "in"); got > 10 {
			t.Errorf("1001 messages of 8 bytes came in %v datagrams", got)
		}

		// The network blocks again, and there is no room for all of these large messages.
		slow.stuck = make(chan struct{})
		many := make([]presence.User, 1<<16)
		for range 20 {
			gw.SendBeat("nd:1", beatOf("gw:1", 0, many...))
			synctest.Wait()
		}

		if got := metric(t, gw, "datagrams_dropped_total", "out queue"); got == 0 || got > 12 {
			t.Errorf("%v messages were dropped, want 1 to 12", got)
		}

		close(slow.stuck)
		synctest.Wait()
	})
}

// resolver is a function that implements Resolver.
type resolver func(name string) (net.Addr, error)

func (r resolver) Resolve(_ context.Context, name string) (net.Addr, error) { return r(name) }

// TestAProcessComesBackElsewhere: a process comes back with its name and another address, as a container does.
func TestAProcessComesBackElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		at := "old:1"
		got := map[string]int{}
		for _, place := range []string{"old:1", "new:1"} {
			start(t, Config{
				Conn: n.listen(place), Keys: secret, Name: "nd:1", Resolver: names{},
				OnBeat: onBeat(func(*Beat) { got[place]++ }),
			})
		}

		gw, _ := start(t, Config{
			Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1,
			Resolver: resolver(func(string) (net.Addr, error) { return addr(at), nil }),
		})

		send := func() {
			synctest.Wait()
			gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
			synctest.Wait()
		}

		send()

		at = "new:1"
		// The leases show that a process of that name has started, so the name is resolved again.
		gw.Began("nd:1")
		send()

		if got["old:1"] != 1 || got["new:1"] != 1 {
			t.Errorf("the beats that arrived are %v, want one at each address", got)
		}
	})
}

func TestWhatIsQueuedIsSentAtTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		got := 0
		_, stopNode := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnBeat: onBeat(func(*Beat) { got++ }),
		})

		gw, stop := start(t, Config{
			Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{},
		})

		synctest.Wait()

		gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
		stop()

		// After the end nothing is sent any more.
		gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
		synctest.Wait()

		stopNode()

		if got != 1 {
			t.Errorf("%d beats arrived, want those from before the end", got)
		}
		if n := metric(t, gw, "datagrams_dropped_total", "out closed"); n != 1 {
			t.Errorf("%v messages were dropped after the end, want 1", n)
		}
	})
}

// senders counts the goroutines of transports alone: the runtime may start others at any time.
func senders() int {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	n := 0

	for stack := range strings.SplitSeq(string(stacks), "\n\n") {
		if strings.Contains(stack, "heartbeat.(*Transport)") {
			n++
		}
	}

	return n
}

// TestIdleDestinationGoesOn: a destination that was forgotten, and is used again, is not taken for a replay.
func TestIdleDestinationGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		got := 0
		_, stopNode := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnBeat: onBeat(func(*Beat) { got++ }),
		})

		gw, stop := start(t, Config{
			Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{},
		})

		synctest.Wait()

		before := senders()

		for range 5 {
			gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
			// Nobody receives these messages. That must not keep a goroutine.
			gw.SendBeat("nd:2", beatOf("gw:1", 1, 1))
			synctest.Wait()
			// In this time unused destinations are forgotten.
			time.Sleep(5 * time.Minute)
		}

		if now := senders(); now > before || before == 0 {
			t.Errorf("there were %d goroutines of transports, and now %d, want as many", before, now)
		}

		stop()
		stopNode()

		if got != 5 {
			t.Errorf("%d of 5 beats arrived", got)
		}
	})
}

func TestDropsAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		got := 0
		nd, _ := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnBeat: onBeat(func(*Beat) { got++ }),
		})

		gw, _ := start(t, Config{Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{}})
		stranger, _ := start(t, Config{
			Conn: n.listen("bad:1"), Keys: [][]byte{[]byte("guess")}, Name: "bad:1", Incarnation: 1, Resolver: names{},
		})

		var copies [][]byte
		n.lose = func(_ string, p []byte) bool {
			copies = append(copies, slices.Clone(p))
			return false
		}
		synctest.Wait()

		gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
		synctest.Wait()
		good := copies[0]

		// Each of these datagrams has one fault.
		n.put("nd:1", good)
		n.put("nd:1", append([]byte(nil), good[:40]...))
		n.put("nd:1", make([]byte, 3000))

		forged := append([]byte(nil), good...)
		forged[60]++
		n.put("nd:1", forged)

		stranger.SendBeat("nd:1", beatOf("bad:1", 1, 1))
		gw.SendBeat("nowhere:1", beatOf("gw:1", 1, 1))
		synctest.Wait()

		// After a minute the good datagram is refused as too old.
		time.Sleep(time.Minute)
		n.put("nd:1", good)
		synctest.Wait()

		for reason, want := range map[string]float64{
			"replayed": 1, "truncated": 1, "oversized": 1, "forged": 1, "key": 1, "old": 1,
		} {
			if got := metric(t, nd, "datagrams_dropped_total", "in "+reason); got != want {
				t.Errorf("%v dropped as %s, want %v", got, reason, want)
			}
		}
		if got := metric(t, gw, "datagrams_dropped_total", "out address"); got != 1 {
			t.Errorf("%v dropped for the address, want 1", got)
		}

		if got != 1 {
			t.Errorf("%d beats were accepted, want only the good one", got)
		}
	})
}

// TestAnotherFormat: datagrams of another format are counted and dropped, and logged once.
func TestAnotherFormat(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		var log bytes.Buffer
		got := 0
		nd, stop := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnBeat: onBeat(func(*Beat) { got++ }), Log: zerolog.New(&log),
		})
		gw, _ := start(t, Config{Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{}})
		n.lose = func(_ string, p []byte) bool { // changes the version of the format, and loses nothing
			p[2]++
			return false
		}
		synctest.Wait()

		for range 3 {
			gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
			synctest.Wait()
		}

		if dropped := metric(t, nd, "datagrams_dropped_total", "in version"); dropped != 3 || got != 0 {
			t.Errorf("%v datagrams were dropped and %d accepted, want 3 and 0", dropped, got)
		}

		stop()
		if n := strings.Count(log.String(), "run the same version everywhere"); n != 1 {
			t.Errorf("logged %d times, want once:\n%s", n, log.String())
		}
	})
}

func TestAnotherTableIsNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var n network
		var heard []string
		nd, _ := start(t, Config{
			Conn: n.listen("nd:1"), Keys: secret, Name: "nd:1", Resolver: names{},
			OnTable: onTable(func(from string, hash uint64) {
				heard = append(heard, fmt.Sprint(from, " ", hash))
			}),
		})
		gw, _ := start(t, Config{Conn: n.listen("gw:1"), Keys: secret, Name: "gw:1", Incarnation: 1, Resolver: names{}})

		nd.SetTable(5)

		// A process without a table cannot disagree.
		for _, hash := range []uint64{0, 5, 6} {
			gw.SetTable(hash)
			synctest.Wait()
			gw.SendBeat("nd:1", beatOf("gw:1", 1, 1))
			synctest.Wait()
		}

		if len(heard) != 1 || heard[0] != "gw:1 6" {
			t.Errorf("the disagreements are %q, want one of gw:1", heard)
		}
	})
}

// exposed is a connection that anybody can reach.
type exposed struct{ *conn }

func (exposed) LocalAddr() net.Addr { return &net.UDPAddr{IP: net.IPv4zero, Port: 1} }

// Above all, New refuses to send unsigned datagrams over a network on which others can listen.
func TestNewRefusesWhatCannotWork(t *testing.T) {
	var n network
	for name, cfg := range map[string]Config{
		"no connection":               {Name: "a:1"},
		"no name":                     {Conn: n.listen("a:1")},
		"long name":                   {Conn: n.listen("a:1"), Name: strings.Repeat("a", MaxName+1)},
		"empty secret":                {Conn: n.listen("a:1"), Name: "a:1", Keys: [][]byte{{}}},
		"open to all without secrets": {Conn: exposed{n.listen("a:1")}, Name: "a:1"},
		"partitions":                  {Conn: n.listen("a:1"), Name: "a:1", Partitions: -1},
	} {
		if _, err := New(cfg); !errors.Is(err, seal.ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConnectionThatBreaksEndsRun(t *testing.T) {
	var n network
	c := n.listen("a:1")
	tr, err := New(Config{Conn: c, Name: "a:1"})
	if err != nil {
		t.Fatal(err)
	}

	c.Close()
	if err := tr.Run(t.Context()); !errors.Is(err, net.ErrClosed) {
		t.Fatal(err)
	}
}

func loopback(t testing.TB) net.PacketConn {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// Datagrams are signed here. TestServerNamesAreResolved has unsigned ones.
func TestServerOverUDP(t *testing.T) {
	a, b := loopback(t), loopback(t)
	replies := make(chan *Reply, 1)
	var nd *Transport
	ready := make(chan struct{})

	nd, _ = start(t, Config{
		Conn: b, Keys: secret, Name: b.LocalAddr().String(), Incarnation: 2,
		OnBeat: onBeat(func(m *Beat) {
			<-ready
			nd.SendReply(m.Source.Gateway, &Reply{Partition: m.Partition, Unknown: m.Alive})
		}),
	})
	close(ready)

	gw, _ := start(t, Config{
		Conn: a, Keys: secret, Name: a.LocalAddr().String(), Incarnation: 1,
		OnReply: onReply(func(r *Reply) {
			select {
			case replies <- r:
			default:
			}
		}),
	})

	testkit.Eventually(t, "an answer", func() bool {
		gw.SendBeat(b.LocalAddr().String(), beatOf(a.LocalAddr().String(), 1, 1, 1+271))
		return len(replies) > 0
	})

	// Replies to later beats are merged into a waiting reply.
	r := <-replies
	slices.Sort(r.Unknown)
	unknown := slices.Compact(r.Unknown)
	if r.Partition != 1 || !slices.Equal(unknown, []presence.User{1, 1 + 271}) {
		t.Errorf("the merged reply is %+v", r)
	}
}

func TestServerNamesAreResolved(t *testing.T) {
	a, b := loopback(t), loopback(t)
	_, port, _ := net.SplitHostPort(b.LocalAddr().String())

	var got atomic.Bool
	start(t, Config{Conn: b, Name: "localhost:" + port, OnBeat: onBeat(func(*Beat) { got.Store(true) })})
	gw, _ := start(t, Config{Conn: a, Name: "a:1", Incarnation: 1})

	testkit.Eventually(t, "a beat", func() bool {
		gw.SendBeat("localhost:"+port, beatOf("a:1", 1, 1))
		return got.Load()
	})
}

// These functions serve as Beats, Replies and Tables.
type (
	onBeat  func(*Beat)
	onReply func(*Reply)
	onTable func(from string, hash uint64)
)

func (f onBeat) ReceiveBeat(b *Beat)                { f(b) }
func (f onReply) ReceiveReply(r *Reply)             { f(r) }
func (f onTable) Disagree(from string, hash uint64) { f(from, hash) }
