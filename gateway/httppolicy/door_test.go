package httppolicy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"headcount/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// house is an HTTP server behind a door of a few places.
type house struct {
	t       *testing.T
	door    *ConnLimiter
	evicted tally
}

// tally is a Counter.
type tally struct{ atomic.Int64 }

func (n *tally) Inc() { n.Add(1) }

func openHouse(t *testing.T, limit int) *house {
	t.Helper()
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	h := &house{t: t}
	h.door = newDoor(l, time.Minute, limit, &h.evicted)
	server := &http.Server{ConnState: h.door.State, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/long":
			c, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
			t.Cleanup(func() { c.Close() })
		}
	})}
	ended := make(chan error)
	go func() { ended <- server.Serve(h.door) }()
	t.Cleanup(func() {
		server.Close()
		<-ended
		testkit.Eventually(t, "an empty house", func() bool { return h.guests() == 0 })
	})
	return h
}

func (h *house) guests() int {
	h.door.mu.Lock()
	defer h.door.mu.Unlock()
	if len(h.door.guests) != h.door.steps.Len()+h.door.silent.Len() {
		h.t.Fatalf("%d guests, %d steps, %d silent", len(h.door.guests), h.door.steps.Len(), h.door.silent.Len())
	}
	return len(h.door.guests)
}

// says connects and sends text.
func (h *house) says(text string) net.Conn {
	h.t.Helper()
	c, err := net.Dial("tcp", h.door.Addr().String())
	if err != nil {
		h.t.Fatal(err)
	}
	h.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(testkit.Timeout))
	if _, err := io.WriteString(c, text); err != nil {
		h.t.Fatal(err)
	}
	return c
}

func (h *house) answered(c net.Conn) error {
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("status %d", resp.StatusCode)
	}
	return err
}

const wholeRequest = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"

// A client that sends its request is served, however many do not. Those make room, the
// oldest first, and never more than is needed.
func TestDoorHalfHandshakes(t *testing.T) {
	const limit = 8
	h := openHouse(t, limit)
	var slow []net.Conn
	for i := range limit {
		slow = append(slow, h.says("GET /-/ws HTTP/1.1\r\nHost: x\r\n"))
		testkit.Eventually(t, "a guest", func() bool { return h.guests() == i+1 })
	}
	watch := testkit.NewStopwatch(t)
	c := h.says(wholeRequest)
	if err := h.answered(c); err != nil {
		t.Fatalf("behind half handshakes: %v", err)
	}
	if took := watch.Elapsed(); took > 3*stepPatience {
		t.Errorf("it waited %s", took)
	}
	if n := h.evicted.Load(); n != 1 {
		t.Errorf("%d had to go, want one", n)
	}
	if _, err := slow[0].Read(make([]byte, 1)); err == nil {
		t.Error("the oldest half handshake is still there")
	}
	// The clients that are left have had their time, too: nobody waits for them now.
	for range limit - 1 {
		began := watch.Elapsed()
		if err := h.answered(h.says(wholeRequest)); err != nil {
			t.Fatal(err)
		}
		if took := watch.Elapsed() - began; took > stepPatience*3/4 {
			t.Errorf("it waited %s", took)
		}
	}
	if n := h.guests(); n > limit {
		t.Errorf("%d guests", n)
	}
}

// Long connections take no place, and no client is closed while there is room.
func TestDoorLetsLongConnectionsThrough(t *testing.T) {
	const limit = 4
	h := openHouse(t, limit)
	for range 10 * limit {
		if err := h.answered(h.says("GET /long HTTP/1.1\r\nHost: x\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
	}
	testkit.Eventually(t, "no guest", func() bool { return h.guests() == 0 })
	if n := h.evicted.Load(); n != 0 {
		t.Errorf("%d had to go", n)
	}
}

// A connection that is kept for the next request is closed before one whose last step
// was later.
func TestDoorStepsCount(t *testing.T) {
	h := openHouse(t, 2)
	first := h.says(wholeRequest)
	if err := h.answered(first); err != nil {
		t.Fatal(err)
	}
	second := h.says("GET / HTTP/1.1\r\n")
	testkit.Eventually(t, "two guests", func() bool { return h.guests() == 2 })
	if _, err := io.WriteString(first, wholeRequest); err != nil {
		t.Fatal(err)
	}
	if err := h.answered(first); err != nil {
		t.Fatal(err)
	}
	third := h.says(wholeRequest)
	if err := h.answered(third); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Read(make([]byte, 1)); err == nil {
		t.Error("the half handshake is still there")
	}
	if _, err := io.WriteString(first, wholeRequest); err != nil {
		t.Fatal(err)
	}
	if err := h.answered(first); err != nil {
		t.Errorf("the one that had asked again is gone: %v", err)
	}
}

// While all clients are new, the next one waits. Closing the door ends that.
func TestDoorClosesWhileOneWaits(t *testing.T) {
	h := openHouse(t, 1)
	h.says("GET / HTTP/1.1\r\n")
	testkit.Eventually(t, "a guest", func() bool { return h.guests() == 1 })
	waiting := h.says(wholeRequest)
	time.Sleep(stepPatience / 20) // let it come to the door; it waits much longer
	_ = h.door.Close()
	if err := h.answered(waiting); err == nil {
		t.Error("it was let in through a closed door")
	}
}

// A client that has sent something does not wait for clients that have sent nothing,
// however many come: their places become free first, also before those of clients that
// have sent a part.
func TestDoorSilentConnections(t *testing.T) {
	const limit = 100
	h := openHouse(t, limit)
	half := h.says("GET / HTTP/1.1\r\n")
	testkit.Eventually(t, "a guest that has spoken", func() bool {
		h.door.mu.Lock()
		defer h.door.mu.Unlock()
		return h.door.silent.Len() == 1 && said(h.door.silent.Front().Value.(*guest).conn)
	})
	stop := make(chan struct{})
	flood := make(chan struct{})
	go func() { // ends with stop
		defer close(flood)
		every := time.NewTicker(5 * time.Millisecond)
		defer every.Stop()
		for {
			select {
			case <-stop:
				return
			case <-every.C:
				if c, err := net.Dial("tcp", h.door.Addr().String()); err == nil {
					defer c.Close()
				}
			}
		}
	}()
	testkit.Eventually(t, "somebody who had to go", func() bool { return h.evicted.Load() > 0 })
	_ = half.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	if _, err := half.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one that had sent a part had to go first: %v", err)
	}
	watch := testkit.NewStopwatch(t)
	for range 20 {
		began := watch.Elapsed()
		c := h.says(wholeRequest)
		if err := h.answered(c); err != nil {
			t.Fatal(err)
		}
		if took := watch.Elapsed() - began; took > stepPatience/4 {
			t.Errorf("it waited %s", took)
		}
		c.Close()
		time.Sleep(10 * time.Millisecond)
	}
	close(stop)
	<-flood
}

// A connection with a long request, of which HTTP/2 has several, is no guest until the
// last of them is over.
func TestLongRequestOnSharedConnection(t *testing.T) {
	d, conns, _ := acceptAll(t, 1, 1)
	c := conns[0]
	guests := func(want int) {
		t.Helper()
		if len(d.guests) != want || d.steps.Len()+d.silent.Len() != want {
			t.Fatalf("%d guests, %d steps, %d silent; want %d", len(d.guests), d.steps.Len(), d.silent.Len(), want)
		}
	}
	ctx := d.Context(t.Context(), c)
	d.State(c, http.StateActive)
	guests(1)
	one, two := Stay(ctx), Stay(ctx)
	guests(0)
	d.State(c, http.StateIdle)
	one()
	guests(0)
	two()
	guests(1)
	over := Stay(ctx)
	d.State(c, http.StateClosed)
	over()
	guests(0)
	if len(d.long) != 0 {
		t.Fatal("a closed connection is remembered")
	}
	Stay(t.Context())() // of a server without a door
}

// A request that comes to say that it lasts when its connection is closed already leaves nothing.
func TestLongRequestOfAClosedConnection(t *testing.T) {
	d, conns, _ := acceptAll(t, 1, 1)
	ctx := d.Context(t.Context(), conns[0])
	d.State(conns[0], http.StateActive)
	d.State(conns[0], http.StateClosed)
	Stay(ctx)()
	d.call(conns[0])()
	if len(d.guests) != 0 || len(d.long) != 0 || len(d.loads) != 0 || len(d.most) != 0 {
		t.Fatalf("a closed connection is remembered: %v %v %v", d.guests, d.long, d.loads)
	}
}

// acceptAll opens a door and lets clients in.
func acceptAll(t *testing.T, limit, n int) (d *ConnLimiter, conns, clients []net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d = newDoor(l, time.Minute, limit, &tally{})
	t.Cleanup(func() { d.Close() })
	for range n {
		c, client := acceptOne(t, d)
		conns, clients = append(conns, c), append(clients, client)
	}
	return d, conns, clients
}

func acceptOne(t *testing.T, d *ConnLimiter) (conn, client net.Conn) {
	t.Helper()
	client, err := net.Dial("tcp", d.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if conn, err = d.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); conn.Close() })
	return conn, client
}

// Of connections that carry several calls the one with the most makes room, and no one has to
// go for its only call.
func TestDoorBoundsCallsOfSharedConnections(t *testing.T) {
	d, conns, clients := acceptAll(t, 4, 3)
	calls := func(want int) {
		t.Helper()
		sum := 0
		for c, l := range d.loads {
			sum += l.calls
			if d.most[l.place] != l || l.conn != c || l.calls > d.most[0].calls {
				t.Fatalf("the loads are not in their order: %v", d.most)
			}
		}
		if d.calls != want || sum != want || len(d.most) != len(d.loads) {
			t.Fatalf("%d calls, %d of loads, want %d", d.calls, sum, want)
		}
	}
	var overs []func()
	for _, i := range []int{0, 1, 1, 1} {
		overs = append(overs, d.call(conns[i]))
	}
	calls(4)
	lasting := d.stay(conns[1]) // one of its calls is none any more
	calls(3)
	overs = append(overs, d.call(conns[1]))
	calls(4)
	overs = append(overs, d.call(conns[2])) // and the connection with three has to go
	calls(2)
	_ = clients[1].SetReadDeadline(time.Now().Add(testkit.Timeout))
	if _, err := clients[1].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the one with the most calls is there: %v", err)
	}
	if n := d.evicted.(*tally).Load(); n != 1 {
		t.Errorf("%d had to go", n)
	}
	lasting()
	d.State(conns[1], http.StateClosed)
	calls(2)
	for _, over := range overs {
		over()
	}
	calls(0)
	if _, remembered := d.loads[conns[1]]; remembered || d.guests[conns[1]] != nil || d.long[conns[1]] != 0 {
		t.Error("the closed one is remembered")
	}

	d, conns, _ = acceptAll(t, 1, 1) // each of these stays
	for range 3 {
		d.stay(conns[len(conns)-1])
		c, _ := acceptOne(t, d)
		conns = append(conns, c)
	}
	for _, c := range conns {
		d.call(c)
	}
	calls(len(conns))
	if n := d.evicted.(*tally).Load(); n != 0 {
		t.Errorf("%d had to go for their only call", n)
	}
}
