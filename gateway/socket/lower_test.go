package socket

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"math/big"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// bytewise writes one byte at a time, so that records arrive in pieces.
type bytewise struct{ net.Conn }

func (c bytewise) Write(p []byte) (int, error) {
	for i := range p {
		if _, err := c.Conn.Write(p[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(p), nil
}

// newTLS returns a reader over TLS, with a poller where there is one, and its client.
func newTLS(t *testing.T, timeout time.Duration) (*reader, *tls.Conn) {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	l := Listener{tcp}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}

	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}

	poller, err := NewPoller()
	if err != nil {
		t.Fatal(err)
	}

	return speakTLS(t, server, client, poller, timeout)
}

// inMemoryTLS runs a test with a TLS connection without a descriptor, as on systems without a poller.
func inMemoryTLS(t *testing.T, test func(*testing.T, *reader, *tls.Conn)) {
	synctest.Test(t, func(t *testing.T) {
		client, server := net.Pipe()
		r, over := speakTLS(t, server, client, nil, time.Minute)
		test(t, r, over)
	})
}

// speakTLS runs a poller, and reads a connection over TLS with it until the test ends.
func speakTLS(t *testing.T, lower, plain net.Conn, poller *Poller, timeout time.Duration) (*reader, *tls.Conn) {
	t.Helper()
	client := tls.Client(bytewise{plain}, &tls.Config{InsecureSkipVerify: true})
	t.Cleanup(func() { client.Close() })

	server := tls.Server(lower, &tls.Config{Certificates: []tls.Certificate{certificate(t)}})
	var both sync.WaitGroup
	// In a handshake both sides wait for each other, so they need a goroutine each.
	var err error
	both.Go(func() { err = client.Handshake() })
	failed := server.Handshake()
	both.Wait()
	if err := errors.Join(failed, err); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	both.Go(func() { poller.Run(ctx) })

	r := &reader{timeout: timeout, freed: make(chan struct{}, 1), ended: make(chan struct{})}
	r.wire.Use(server, r)
	r.wire.Start(poller)
	t.Cleanup(func() {
		_ = r.wire.Close()
		<-r.ended
		r.group.Wait()
		cancel()
		both.Wait()
	})

	return r, client
}

// certificate returns a certificate that is not verified.
func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}

	one := &x509.Certificate{SerialNumber: big.NewInt(1)}
	der, err := x509.CreateCertificate(rand.Reader, one, one, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}

	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// Records are read to the end, whether they come in pieces or several at once.
func TestServerReadsThroughTLS(t *testing.T) {
	r, client := newTLS(t, time.Minute)
	readsThroughTLS(t, r, client)
}

func TestReadsThroughTLS(t *testing.T) { inMemoryTLS(t, readsThroughTLS) }

func readsThroughTLS(t *testing.T, r *reader, client *tls.Conn) {
	text := strings.Repeat("0123456789", 100)
	for part := range strings.SplitSeq(text, "5") {
		if _, err := io.WriteString(client, part+"5"); err != nil {
			t.Fatal(err)
		}
	}

	_ = client.CloseWrite()
	<-r.ended
	if got := r.got.String(); got != text+"5" {
		t.Fatalf("got %d bytes, want %d: %.100q", len(got), len(text)+1, got)
	}

	// TLS has announced the end, so the client knows that nothing was cut off.
	if _, err := client.Read(make([]byte, 1)); err != io.EOF {
		t.Fatalf("the connection ends with %v, want EOF", err)
	}
}

// What the client does not read is kept as it was encrypted, and arrives in order. Then TLS announces the end.
func TestServerWritesThroughTLS(t *testing.T) {
	r, client := newTLS(t, time.Minute)
	writesThroughTLS(t, r, client)
}

func TestWritesThroughTLS(t *testing.T) { inMemoryTLS(t, writesThroughTLS) }

func writesThroughTLS(t *testing.T, r *reader, client *tls.Conn) {
	writeMuch(t, r, client)
	_ = r.wire.Close()
	if rest, err := io.ReadAll(client); err != nil || len(rest) > 0 {
		t.Fatalf("after the end: %q, %v", rest, err)
	}
}

// A client that sends something other than a TLS record is closed.
func TestServerNoRecord(t *testing.T) {
	r, client := newTLS(t, time.Minute)
	if _, err := client.NetConn().(bytewise).Conn.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	<-r.ended
}

// A client that does not read is closed after the timeout.
func TestServerClientThatTakesNothingThroughTLS(t *testing.T) {
	r, _ := newTLS(t, 50*time.Millisecond)
	if err := r.wire.Write(make([]byte, 16<<20)); err != nil {
		t.Fatal(err)
	}
	<-r.ended
}

// While a client does not read, it is not read through TLS either: otherwise the answers that TLS makes by itself would
// have to be kept. It is read when it has read what waited.
func TestServerBusyTLSIsNotRead(t *testing.T) {
	r, client := newTLS(t, time.Minute)
	if r.wire.fd == noDescriptor {
		return // without a poller a goroutine reads, and writes wait
	}

	const large = 16 << 20 // more than the buffers of the system hold
	if err := r.wire.Write(make([]byte, large)); err != nil {
		t.Fatal(err)
	}

	if !r.wire.Busy() {
		t.Fatal("the buffers of the system took everything, so the test proves nothing")
	}

	if _, err := io.WriteString(client, "more"); err != nil {
		t.Fatal(err)
	}

	r.wire.occasion() // whoever serves the wire now finds the new data
	for r.wire.turns.Load() != 0 {
		time.Sleep(time.Millisecond)
	}

	if n := r.taken.Load(); n != 0 {
		t.Errorf("%d bytes were read while the client did not read, want none", n)
	}

	if _, err := io.CopyN(io.Discard, client, large); err != nil {
		t.Fatal(err)
	}

	_ = client.CloseWrite()
	<-r.ended
	if got := r.got.String(); got != "more" {
		t.Fatalf("got %q, want \"more\"", got)
	}
}
