package gateway

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"headcount/gateway/websocket"
)

var soak = flag.Int("soak", 4_000, "connections that come and go in TestSoak")

// visits are the ways in which a connection comes and goes: what it sends, what it waits
// for, and how it ends.
var visits = []struct {
	sends func(page string) string
	waits string
	ends  func(c *net.TCPConn)
}{
	{func(p string) string { return handshake + joins(p) }, `"count"`, reset},
	{func(p string) string {
		return handshake + joins(p) + masked(websocket.Text, `{"type":"leave","page":"`+p+`"}`) + masked(websocket.Close, "\x03\xe8")
	}, "\x88\x02\x03\xe8", fin},
	{func(p string) string {
		return handshake + masked(websocket.Text, `{"type":"subscribe","pages":["`+p+`","q"],"precision":2}`)
	}, `"count"`, fin},
	{func(p string) string { return handshake + joins(p)[:20] }, `"welcome"`, reset},                     // in the middle of a frame
	{func(p string) string { return handshake + masked(partText, `{"type":"join",`) }, `"welcome"`, fin}, // in the middle of a message
	{func(p string) string { return handshake + "\x81\x02{}" }, `"unread"`, fin},                         // a breach of protocol
	{func(p string) string { return handshake[:60] }, "", reset},                                         // half a handshake
	{func(p string) string { return "GET /" + p + "/counter/events HTTP/1.1\r\nHost: h\r\n\r\n" }, "event: count", fin},
	{func(p string) string { return "GET /" + p + "/counter HTTP/1.1\r\nHost: h\r\n\r\n" }, `"version"`, fin},
	{func(p string) string { return handshake + joins(p) }, "", fin}, // and does not wait for the answer
}

func joins(page string) string { return masked(websocket.Text, `{"type":"join","page":"`+page+`"}`) }

const handshake = "GET /-/ws HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n" +
	"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"

func reset(c *net.TCPConn) { _ = c.SetLinger(0) }
func fin(c *net.TCPConn)   { _ = c.CloseWrite() }

// visit is the nth connection. Each has an address of its own, since the system
// keeps the pair of two addresses and ports for a while.
func (s *served) visit(n int) error {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, byte(1+n/62_500%250), byte(n/250%250), byte(1+n%250))}, Timeout: patient}
	nc, err := d.Dial("tcp", s.addr)
	if err != nil {
		return err
	}
	defer nc.Close()
	c := nc.(*net.TCPConn)
	_ = c.SetDeadline(time.Now().Add(patient))
	v := visits[n%len(visits)]
	if _, err := io.WriteString(c, v.sends("p"+strconv.Itoa(n/len(visits)%40))); err != nil {
		return err
	}
	var got []byte
	buf := make([]byte, 4096)
	for !bytes.Contains(got, []byte(v.waits)) {
		m, err := c.Read(buf)
		got = append(got, buf[:m]...)
		if err != nil {
			return fmt.Errorf("way %d got %q: %w", n%len(visits), got[max(0, len(got)-100):], err)
		}
	}
	v.ends(c)
	return nil
}

// rest waits until all connections are gone, and returns the heap in use.
func (s *served) rest() uint64 {
	s.t.Helper()
	s.settles(0)
	await(s.t, "users to be forgotten", func() bool {
		for i := range s.g.roster.lanes {
			l := &s.g.roster.lanes[i]
			l.mu.Lock()
			n := len(l.users) + len(l.flight) + len(l.queue)
			l.mu.Unlock()
			if n > 0 {
				return false
			}
		}
		return true
	})
	await(s.t, "pages and topics to be forgotten", func() bool {
		return s.g.hub.Topics() == 0
	})
	time.Sleep(lingerClose) // what has just ended may have a timer that long
	for range 3 {           // pools are emptied by the second
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Connections that come and go, in every way there is, leave nothing behind: no
// goroutine, no descriptor, no memory. `make soak` has a million of them.
func TestSoak(t *testing.T) {
	s := serveGateway(t, true, nil)
	var n atomic.Int64
	come := func(until int) {
		t.Helper()
		var group sync.WaitGroup
		for range 32 {
			group.Go(func() {
				for {
					i := int(n.Add(1))
					if i > until || t.Failed() {
						return
					}
					if err := s.visit(i); err != nil {
						t.Errorf("connection %d: %v", i, err)
					}
				}
			})
		}
		group.Wait()
		n.Store(int64(until))
	}
	warm := min(*soak, 20_000) // by then every table has its full size
	come(warm)
	heap, goroutines, files := s.rest(), runtime.NumGoroutine(), openFiles(t)
	began := time.Now()
	come(warm + *soak)
	took := time.Since(began)
	after := s.rest()
	await(t, "no more goroutines than before", func() bool { return runtime.NumGoroutine() <= goroutines+2 })
	await(t, "no more files than before", func() bool { return openFiles(t) <= files+2 })
	t.Logf("%d connections at %.0f/s: heap %d KB, then %d KB; %d goroutines, then %d", *soak, float64(*soak)/took.Seconds(),
		heap>>10, after>>10, goroutines, runtime.NumGoroutine())
	// The tables keep their size, however many come.
	if allowed := heap + 512<<10 + min(uint64(*soak)*50, 4<<20); after > allowed {
		t.Errorf("the heap has grown from %d to %d bytes", heap, after)
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
