//go:build !portable

package httppolicy

import (
	"net"
	"net/http"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/testkit"
)

// A client that waits for the server to read what it has sent is not closed.
func TestServerConnLimiterOurOwnSlowness(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &limitedServer{t: t}
	cl := NewConnLimiter(l, time.Minute, 2, func(error) {}, &s.evicted)
	s.limiter = cl

	accept := func() net.Conn {
		c, err := cl.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}

	s.says("")
	silent := accept()

	s.says(wholeRequest)
	sent := accept()
	testkit.Eventually(t, "the request", func() bool { return unreadBytes(sent) })
	time.Sleep(progressTimeout)

	// The client that has sent its request waits for this server. That is not its fault, so the silent one makes room.
	s.says(wholeRequest)
	next := accept()
	if cl.short[silent] != nil || cl.short[sent] == nil || cl.short[next] == nil || s.evicted.Load() != 1 {
		t.Fatalf("silent %v, sent %v, next %v; %d had to go",
			cl.short[silent], cl.short[sent], cl.short[next], s.evicted.Load())
	}

	// Both remaining clients wait for this server, so a newcomer waits until a place becomes free.
	time.Sleep(progressTimeout)
	s.says("")
	began := time.Now()
	time.AfterFunc(progressTimeout/4, func() { cl.State(sent, http.StateClosed) })
	last := accept()
	took := time.Since(began)
	bothStay := cl.short[next] != nil && cl.short[last] != nil
	if took < progressTimeout/4 || !bothStay || s.evicted.Load() != 1 {
		t.Fatalf("after %s: next %v, last %v; %d had to go", took, cl.short[next], cl.short[last], s.evicted.Load())
	}

	_ = cl.Close()
}

// The system ends a connection whose client acknowledges nothing.
func TestServerConnLimiterSilence(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	cl := NewConnLimiter(l, time.Minute, 2, func(error) {}, &tally{})
	defer cl.Close()

	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}

	defer client.Close()
	c, err := cl.Accept()
	if err != nil {
		t.Fatal(err)
	}

	defer c.Close()

	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}

	ms := 0
	_ = raw.Control(func(fd uintptr) { ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT) })
	if ms != 60_000 || err != nil {
		t.Errorf("TCP_USER_TIMEOUT is %d ms, %v", ms, err)
	}
}
