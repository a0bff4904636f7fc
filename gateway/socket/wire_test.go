package socket

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// reader is an Owner that collects what it reads. Before each read it also reads into an empty buffer.
type reader struct {
	wire    Wire
	timeout time.Duration
	slow    atomic.Int64 // calls of Slow
	group   sync.WaitGroup
	got     strings.Builder
	taken   atomic.Int64 // bytes of got
	freed   chan struct{}
	ended   chan struct{}
}

func (r *reader) Spawn(f func())              { r.group.Go(f) }
func (r *reader) Ended()                      { close(r.ended) }
func (r *reader) WriteTimeout() time.Duration { return r.timeout }
func (r *reader) Slow()                       { r.slow.Add(1) }

func (r *reader) Freed(bool) {
	select {
	case r.freed <- struct{}{}:
	default:
	}
}

func (r *reader) Look(in *Input) (more bool, err error) {
	// A read into an empty buffer returns 0, which must not be taken for the end of the connection.
	if n, _, err := r.wire.Read(nil); n != 0 || err != nil {
		return false, errors.New("a read into no buffer is taken for the end")
	}

	// The buffer is so small that there is more to read than fits.
	n, more, err := r.wire.Read(in[:16])
	r.got.Write(in[:n])
	r.taken.Add(int64(n))
	return more, err
}

func newReader(t *testing.T, timeout time.Duration) (*reader, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })

	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}

	return startReader(t, server, timeout), client
}

// startReader reads a connection without a poller until the test ends.
func startReader(t *testing.T, conn net.Conn, timeout time.Duration) *reader {
	r := &reader{timeout: timeout, freed: make(chan struct{}, 1), ended: make(chan struct{})}
	r.wire.Use(conn, r)
	r.wire.Start(nil)
	t.Cleanup(func() {
		_ = r.wire.Close()
		<-r.ended
		r.group.Wait()
	})

	return r
}

// inMemory runs a test with a connection without a descriptor. A goroutine finishes each write, as on systems without a
// poller, and as below TLS there.
func inMemory(t *testing.T, timeout time.Duration, test func(*testing.T, *reader, net.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		t.Cleanup(func() { client.Close() })
		test(t, startReader(t, server, timeout), client)
	})
}

// Everything that a client sends is read, to the end.
func TestServerReadsToTheEnd(t *testing.T) {
	r, client := newReader(t, time.Minute)
	readsToTheEnd(t, r, client)
}

func TestReadsToTheEnd(t *testing.T) { inMemory(t, time.Minute, readsToTheEnd) }

func readsToTheEnd(t *testing.T, r *reader, client net.Conn) {
	text := strings.Repeat("0123456789", 1000)
	if _, err := io.WriteString(client, text); err != nil {
		t.Fatal(err)
	}

	_ = client.Close()
	<-r.ended
	if n := r.slow.Load(); n != 0 {
		t.Errorf("a client that went away counted as slow %d times, want 0", n)
	}

	if got := r.got.String(); got != text {
		t.Fatalf("got %d bytes, want %d: %.100q", len(got), len(text), got)
	}

	if err := r.wire.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("a write after the end: %v, want net.ErrClosed", err)
	}
}

// writeMuch writes more to a client than the system buffers, then an end, and checks that the client reads all of it in
// order.
func writeMuch(t *testing.T, r *reader, client io.Reader) {
	t.Helper()
	large := strings.Repeat("x", 16<<20) // more than the buffers of the system hold
	if err := r.wire.Write([]byte(large)); err != nil {
		t.Fatal(err)
	}
	if !r.wire.Busy() {
		t.Fatal("the buffers of the system took everything, so the test proves nothing")
	}

	if err := r.wire.Try([]byte("no")); !errors.Is(err, ErrBusy) {
		t.Fatalf("Try on a busy wire: %v, want ErrBusy", err)
	}

	if err := errors.Join(r.wire.Write([]byte("one")), r.wire.End([]byte("two"))); err != nil {
		t.Fatal(err)
	}

	if err := r.wire.Write([]byte("no")); !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Write after End: %v, want net.ErrClosed", err)
	}

	got := make([]byte, len(large)+len("onetwo"))
	if _, err := io.ReadFull(client, got); err != nil {
		t.Fatal(err)
	}
	if string(got) != large+"onetwo" {
		t.Fatalf("the client received other bytes, which end with %q", got[len(large):])
	}
	<-r.freed
}

// Bytes that a client does not read are kept, and arrive in order. Try writes nothing to a busy wire, and nothing
// follows End.
func TestServerWritesToSlowClient(t *testing.T) {
	r, client := newReader(t, time.Minute)
	writesToSlowClient(t, r, client)
}

func TestWritesToSlowClient(t *testing.T) { inMemory(t, time.Minute, writesToSlowClient) }

func writesToSlowClient(t *testing.T, r *reader, client net.Conn) {
	writeMuch(t, r, client)
	if r.wire.Busy() {
		t.Fatal("the wire is still busy")
	}
}

// A client that does not read is closed after the timeout, and its owner is notified that it was slow. A client that
// goes away is not slow.
func TestServerClientThatTakesNothing(t *testing.T) {
	r, client := newReader(t, 50*time.Millisecond)
	clientTakesNothing(t, r, client)
}

func TestClientThatTakesNothing(t *testing.T) { inMemory(t, 50*time.Millisecond, clientTakesNothing) }

func clientTakesNothing(t *testing.T, r *reader, _ net.Conn) {
	if err := r.wire.Write(make([]byte, 16<<20)); err != nil {
		t.Fatal(err)
	}

	<-r.ended
	if !r.wire.Closed() {
		t.Fatal("the wire is not closed")
	}

	if n := r.slow.Load(); n != 1 {
		t.Errorf("the owner was notified %d times that the client is slow, want 1", n)
	}
}
