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

// Link is a link from clients to a server that can stall. Requests that were sent meanwhile arrive when the link flows
// again, even if the client has closed its connection by then.
type Link struct {
	mu    sync.Mutex
	armed bool          // the next run of a script stalls the link
	flows chan struct{} // closed when a stall ends; nil: the link does not stall
}

// Stall puts a proxy in front of the server, and returns the URL through it. The link to the server can stall.
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

	// Answers are not held back.
	go func() { // ends with either connection
		defer client.Close()
		_, _ = io.Copy(client, server)
	}()

	_, _ = io.Copy(writer(func(sent []byte) (int, error) {
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
	l.mu.Unlock() // before the wait, which Flow ends with the lock

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
