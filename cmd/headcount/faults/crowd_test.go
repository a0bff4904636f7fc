package faults

import (
	"context"
	"sync"
	"testing"

	"headcount/client"
	"headcount/internal/simulate"
)

const (
	site     = "*"
	stayers  = 60 // users who are always there
	churners = 30 // users who come and go while the crowd churns
	watchers = 2  // clients for each gateway that subscribe to every page
)

var pages = []string{"home", "a/b?c", "Ω", "page 4", "p5", "p6"}

// newCrowd connects all clients of a topology, and waits until they are counted.
func newCrowd(t testing.TB, gateways []*member) *simulate.Crowd {
	t.Helper()
	cfg := simulate.CrowdConfig{Pages: pages, Stayers: stayers, Churners: churners, Watchers: watchers}
	for _, m := range gateways {
		cfg.Gateways = append(cfg.Gateways, simulate.Gateway{Name: m.name, URL: "http://" + m.addr, Up: m.up})
	}

	c, err := simulate.NewCrowd(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(c.Close)
	return c
}

// dial connects to a gateway.
func dial(to *member, id string) (*client.Conn, error) {
	return client.Dial(context.Background(), client.Config{URL: "http://" + to.addr, ID: id})
}

// mustDial connects a new user, until the test ends.
func mustDial(t testing.TB, to *member) *client.Conn {
	t.Helper()
	conn, err := dial(to, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Abort)
	return conn
}

// drain reads a connection to its end, so that it answers pings.
func drain(conn *client.Conn) {
	var f client.Frame
	for conn.Receive(&f) == nil {
	}
}

// shown has the last received count of each page.
type shown struct {
	mu     sync.Mutex
	counts map[string]client.Count
}

// watch reads a connection to its end, and keeps the received counts.
func watch(conn *client.Conn) *shown {
	s := &shown{counts: map[string]client.Count{}}
	go func() { // ends with the connection
		var f client.Frame
		for conn.Receive(&f) == nil {
			if f.Type == "count" {
				s.mu.Lock()
				s.counts[f.Count.Page] = f.Count
				s.mu.Unlock()
			}
		}
	}()

	return s
}

// is reports whether the newest count of a page is n, and not stale.
func (s *shown) is(page string, n int64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	count, known := s.counts[page]
	return known && count.Count == n && !count.Stale
}
