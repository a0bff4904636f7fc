package redistest

import (
	"bytes"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Link is the way of a client to a server, which can stall: what is sent arrives when the link flows again, also when
// the client has closed its connection since.
type Link struct {
	mu    sync.Mutex
	armed bool          // the next run of a script stalls the link
	flows chan struct{} // closed when the link flows again; nil while it does
}

// Stall puts a proxy in front of the server whose link to it can stall, and returns the URL through it.
func (s *Server) Stall(t testing.TB) (url string, link *Link) {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}

	link = &Link{}
	var connections sync.WaitGroup
	connections.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			connections.Go(func() { link.carry(client, s.Addr) })
		}
	})
	t.Cleanup(func() { // the test has closed its clients by then
		link.Flow()
		_ = l.Close()
		connections.Wait()
	})

	port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)

	return strings.Replace(s.URL(), s.Addr, net.JoinHostPort(host, port), 1), link
}

func (l *Link) carry(client net.Conn, address string) {
	defer client.Close()
	server, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer server.Close()

	// What the server answers passes at any time.
	go func() {
		defer client.Close()
		_, _ = io.Copy(client, server)
	}()

	_, _ = io.Copy(writer(func(sent []byte) (int, error) {
		// In this direction alone: what stalls is what the client sends.
		l.pass(sent)
		return server.Write(sent)
	}), client)
}

// pass waits while the link stalls.
func (l *Link) pass(sent []byte) {
	l.mu.Lock()
	if l.armed && bytes.Contains(sent, []byte("evalsha")) {
		l.armed = false
		l.flows = make(chan struct{})
	}
	flows := l.flows
	// Before the wait, because Flow takes the lock to end it.
	l.mu.Unlock()

	if flows != nil {
		<-flows
	}
}

// StallAtScript makes the link stall when the next run of a script is sent.
func (l *Link) StallAtScript() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.armed = true
}

// Flow ends a stall.
func (l *Link) Flow() {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.armed = false

	if l.flows != nil {
		close(l.flows)
		l.flows = nil
	}
}
