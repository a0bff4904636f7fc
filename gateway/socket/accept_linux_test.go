//go:build !portable

package socket

import (
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// accepting returns the listener of an Acceptor, which is closed when the test ends.
func accepting(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a, err := Acceptor(l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })

	return a
}

// acceptOne returns both ends of a connection.
func acceptOne(t *testing.T) (c *Conn, client net.Conn) {
	t.Helper()
	l := accepting(t)
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })

	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = accepted.Close() })

	return accepted.(*Conn), client
}

// net/http can use a Conn like any other connection.
func TestServerConnServesHTTP(t *testing.T) {
	l := accepting(t)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_, _ = w.Write([]byte(r.RemoteAddr + " " + string(body)))
	})}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()

	var before string
	transport := &http.Transport{}
	client := &http.Client{Transport: transport}
	for range 2 { // over one connection
		resp, err := client.Post("http://"+l.Addr().String(), "text/plain", strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()

		addr, said, _ := strings.Cut(string(body), " ")
		if !strings.HasPrefix(addr, "127.0.0.1:") || said != "hello" || before != "" && before != addr {
			t.Errorf("got %q, before from %q", body, before)
		}
		before = addr
	}

	transport.CloseIdleConnections()
	_ = server.Close()
	if err := <-ended; err != http.ErrServerClosed {
		t.Errorf("Serve returned %v, want ErrServerClosed", err)
	}
}

// A Conn returns the errors from which net/http knows what happened.
func TestServerConnFails(t *testing.T) {
	c, client := acceptOne(t)
	c.Unread([]byte("first"))

	buf := make([]byte, 10)
	if n, err := c.Read(buf); string(buf[:n]) != "first" || err != nil {
		t.Errorf("read %q, %v", buf[:n], err)
	}

	var timeout net.Error
	_ = c.SetReadDeadline(time.Now().Add(-time.Second))
	_, err := c.Read(buf)
	if !errors.As(err, &timeout) || !timeout.Timeout() || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a read after the deadline: %v, want a timeout", err)
	}
	_ = c.SetReadDeadline(time.Time{})

	_ = client.(*net.TCPConn).CloseWrite()
	if _, err := c.Read(buf); err != io.EOF {
		t.Errorf("a read at the end: %v, want EOF", err)
	}

	if err := errors.Join(c.CloseWrite(), c.Close()); err != nil {
		t.Error(err)
	}
	if _, err := client.Read(buf); err != io.EOF {
		t.Errorf("the client read %v", err)
	}
	if _, err := c.Write(buf); !errors.Is(err, net.ErrClosed) {
		t.Errorf("a write after the close: %v, want net.ErrClosed", err)
	}
}

// A Wire that has taken a Conn over owns its descriptor, which nothing else closes.
func TestServerWireTakesAConn(t *testing.T) {
	c, client := acceptOne(t)
	r := &reader{timeout: time.Minute, freed: make(chan struct{}, 1), ended: make(chan struct{})}
	r.wire.Use(c, r)

	_, read := c.Read(make([]byte, 1))
	for _, err := range []error{read, c.Close(), c.Send([]byte("late"))} {
		if !errors.Is(err, net.ErrClosed) {
			t.Errorf("the Conn that was taken over returns %v, want net.ErrClosed", err)
		}
	}

	if err := r.wire.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	_ = r.wire.Close()
	if got, err := io.ReadAll(client); string(got) != "hello" || err != nil {
		t.Errorf("the client got %q, %v", got, err)
	}
}

// Accepted connections send small frames at once, because they inherit TCP_NODELAY.
func TestServerConnInheritsNoDelay(t *testing.T) {
	c, _ := acceptOne(t)
	raw, _ := c.SyscallConn()
	value := 0
	if err := raw.Control(func(fd uintptr) {
		value, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY)
	}); err != nil || value != 1 {
		t.Errorf("TCP_NODELAY is %d, %v", value, err)
	}
}
