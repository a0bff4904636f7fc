//go:build !portable

package httppolicy

import (
	"net"
	"net/http"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// A client that waits for the server to read what it sent is not closed.
func TestDoorOurOwnSlowness(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t}
	d := newDoor(l, time.Minute, 2, &h.evicted)
	h.door = d
	accept := func() net.Conn {
		c, err := d.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	h.says("")
	silent := accept()
	h.says(wholeRequest)
	sent := accept()
	testkit.Eventually(t, "the request", func() bool { return unreadBytes(sent) })
	time.Sleep(stepPatience)
	h.says(wholeRequest)
	next := accept()
	if d.guests[silent] != nil || d.guests[sent] == nil || d.guests[next] == nil || h.evicted.Load() != 1 {
		t.Fatalf("silent %v, sent %v, next %v; %d had to go", d.guests[silent], d.guests[sent], d.guests[next], h.evicted.Load())
	}
	time.Sleep(stepPatience)
	h.says("")
	began := time.Now()
	time.AfterFunc(stepPatience/4, func() { d.State(sent, http.StateClosed) })
	last := accept()
	if took := time.Since(began); took < stepPatience/4 || d.guests[next] == nil || d.guests[last] == nil || h.evicted.Load() != 1 {
		t.Fatalf("after %s: next %v, last %v; %d had to go", took, d.guests[next], d.guests[last], h.evicted.Load())
	}
	_ = d.Close()
}
