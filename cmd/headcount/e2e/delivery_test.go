package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"headcount/servertest"
)

// Two counts of one page to one subscriber are at least the update interval
// apart; the first change goes at once, and the newest always arrives.
func TestConflation(t *testing.T) {
	t.Parallel()
	const interval = 3 * time.Second
	s := start(t, "--update-interval="+interval.String(), "--leave-grace=0s")
	watcher, a, b, c := s.ws(t), s.ws(t), s.ws(t), s.ws(t)
	watcher.subscribe("p", "other")
	watcher.take("count")
	watcher.take("count")
	events := s.sse(t, "/p/counter/events")
	events.take()
	watcher.during(time.Now().Add(interval)) // it is long ago now
	joined := time.Now()
	a.join("p")
	first := watcher.takeCount("p", 1)
	if took := first.at.Sub(joined); took >= interval {
		t.Errorf("the first change took %s", took)
	}
	if e := events.take(); e.Count != 1 || e.at.Sub(joined) >= interval {
		t.Errorf("event %s after %s", e.data, e.at.Sub(joined))
	}
	b.join("p")
	b.takeCount("p", 2) // its own answer waits for nothing
	c.join("p")
	c.takeCount("p", 3)
	b.leave("p")
	c.join("other") // pages do not wait for each other
	if f := watcher.takeCount("other", 1); f.at.Sub(first.at) >= interval {
		t.Errorf("another page waited %s", f.at.Sub(first.at))
	}
	// Counts in between are not told, only the newest.
	second := watcher.takeCount("p", 2)
	if gap := second.at.Sub(first.at); gap < interval-200*time.Millisecond { // the first may have been read late
		t.Errorf("two counts of one page %s apart, want %s", gap, interval)
	}
	if e := events.take(); e.Count != 2 {
		t.Errorf("event %s", e.data)
	}
	if got := s.get(t, "/p/counter").counter(t); got.Count != 2 || got.Version != second.Version {
		t.Errorf("GET %+v after %s", got, second.text)
	}
}

// While a page changes all the time, its counts come at the interval, and their versions
// grow.
func TestConflationUnderSteadyChange(t *testing.T) {
	t.Parallel()
	const interval = 200 * time.Millisecond
	s := start(t, "--update-interval="+interval.String(), "--leave-grace=0s")
	watcher, busy, other := s.ws(t), s.ws(t), s.ws(t)
	watcher.subscribe("p")
	first := watcher.takeCount("p", 0)
	rounds := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); rounds++ {
		busy.join("p")
		busy.awaitCount("p", 1)
		busy.leave("p")
		busy.skim()
		eventually(t, "left", func() bool { return s.count(t, "p") == 0 })
		time.Sleep(25 * time.Millisecond) // three messages a round: under the rate of messages
	}
	other.join("p")
	other.awaitCount("p", 1)
	busy.join("p")
	busy.awaitCount("p", 2)
	counts := []frame{first}
	for counts[len(counts)-1].Count == nil || *counts[len(counts)-1].Count != 2 {
		counts = append(counts, watcher.await("count", func(f frame) bool { return f.isCount("p") }))
	}
	for i, f := range counts[1:] {
		if !newer(t, f.Version, counts[i].Version) {
			t.Errorf("%s after %s", f.text, counts[i].text)
		}
	}
	took := counts[len(counts)-1].at.Sub(first.at)
	if most := int(took/interval) + 2; len(counts) > most {
		t.Errorf("%d counts within %s, at most %d fit %s apart", len(counts), took, most, interval)
	}
	if rounds > 30 && len(counts) < 5 {
		t.Errorf("only %d counts of %d changes within %s", len(counts), 2*rounds, took)
	}
}

// A client that asks for rounded counts hears of a change only when the rounded number
// changes.
func TestPrecision(t *testing.T) {
	t.Parallel()
	s := start(t, "--update-interval=10ms", "--leave-grace=0s")
	exact, rough := s.ws(t), s.ws(t)
	exact.subscribe("p")
	exact.takeCount("p", 0)
	rough.send(`{"type":"subscribe","pages":["p"],"precision":1}`)
	rough.takeCount("p", 0)
	var last *client
	for n := 1; n <= 15; n++ {
		last = s.ws(t)
		last.join("p")
		exact.awaitCount("p", n)
	}
	f := rough.awaitCount("p", 20)
	if got := s.get(t, "/p/counter").counter(t); got.Version != f.Version || got.Count != 15 {
		t.Errorf("the counter is %+v after %s", got, f.text)
	}
	last.leave("p")
	exact.awaitCount("p", 14)
	rough.awaitCount("p", 10)
	last.join("p")
	exact.awaitCount("p", 15)
	rough.awaitCount("p", 20)
	for n := 16; n <= 20; n++ {
		s.ws(t).join("p")
		exact.awaitCount("p", n)
	}
	rough.silent()
	rough.send(`{"type":"subscribe","pages":["p"],"precision":2}`)
	rough.takeCount("p", 20)
	last.leave("p")
	rough.awaitCount("p", 19)
}

// A stream that comes back says which count it had last.
func TestLastEventID(t *testing.T) {
	t.Parallel()
	s := start(t, "--update-interval=10ms", "--leave-grace=0s")
	a, b := s.ws(t), s.ws(t)
	a.join("p")
	a.takeCount("p", 1)
	events := s.sse(t, "/p/counter/events")
	first := events.awaitCount(1)
	events.resp.Body.Close()
	same := s.sse(t, "/p/counter/events", "Last-Event-ID: "+first.id)
	for _, id := range []string{"1-1", "", "x", first.id + "0"} {
		if e := s.sse(t, "/p/counter/events", "Last-Event-ID: "+id).take(); e.id != first.id {
			t.Errorf("with the id %q the first event is %s", id, e.data)
		}
	}
	b.join("p")
	b.takeCount("p", 2)
	if e := same.take(); e.Count != 2 {
		t.Errorf("after its own id a stream got %s", e.data)
	}
}

// clog has the server send w more than the sockets hold; w never reads.
func clog(t testing.TB, s *server, w *rawSocket) {
	t.Helper()
	var pages []string
	for i := range 100 {
		pages = append(pages, fmt.Sprintf("%030d", i))
	}
	subscribe := clientFrame(0x81, []byte(`{"type":"subscribe","pages":`+quoted(pages)+`}`))
	_ = w.SetWriteDeadline(time.Now().Add(patience))
	for range 900 { // each is answered with 12 kB
		if _, err := w.Write(subscribe); err != nil {
			return // closed by the server, or it has stopped reading
		}
	}
}

// A client that does not read harms only itself: others have their counts, it is closed
// after the write timeout, and nothing piles up for it.
func TestSlowConsumers(t *testing.T) {
	t.Parallel()
	const timeout = time.Second
	s := start(t, "--write-timeout="+timeout.String(), "--update-interval=10ms", "--leave-grace=0s")
	watcher, a := s.ws(t), s.ws(t)
	watcher.subscribe("p")
	watcher.takeCount("p", 0)
	before := servertest.Memory(s.cmd.Process.Pid)
	slow := make([]*rawSocket, 10)
	var wg sync.WaitGroup
	for i := range slow {
		slow[i] = s.rawWS(t, 4096)
		slow[i].send(0x81, `{"type":"subscribe","pages":["p"]}`)
	}
	// This one only takes its time.
	late := s.rawWS(t, 4096)
	late.send(0x81, `{"type":"subscribe","pages":["p"]}`)
	for _, w := range slow {
		wg.Go(func() { clog(t, s, w) })
	}
	slowest := time.Duration(0)
	for i := range 50 {
		at := time.Now()
		a.join("p")
		watcher.awaitCount("p", 1)
		a.leave("p")
		watcher.awaitCount("p", 0)
		if took := time.Since(at); took > slowest && i > 0 {
			slowest = took
		}
	}
	if slowest > 5*time.Second {
		t.Errorf("others waited %s", slowest)
	}
	wg.Wait()
	eventually(t, "those who do not read are closed", func() bool { return s.metric(t, "headcount_connections") == 3 })
	if grown := servertest.Memory(s.cmd.Process.Pid) - before; grown > 150<<20 {
		t.Errorf("it has grown by %d MB", grown>>20)
	}
	// The late client has missed the counts in between, but not the newest.
	a.join("p")
	watcher.awaitCount("p", 1)
	for {
		_, payload, err := late.frame()
		if err != nil {
			t.Fatalf("no newest count: %v", err)
		}
		if bytes.Contains(payload, []byte(`"count":1,`)) && bytes.Contains(payload, []byte(s.get(t, "/p/counter").counter(t).Version)) {
			break
		}
	}
}

// A client sends half a handshake and no more. The server closes it after a while;
// others notice nothing.
func TestSlowHandshakes(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	began := time.Now()
	var conns []net.Conn
	for i := range 100 {
		c := s.rawDial(t)
		if i%2 == 0 {
			fmt.Fprintf(c, "GET /-/ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n")
		}
		conns = append(conns, c)
	}
	for range 10 {
		s.visit(t)
	}
	closed := make(chan error, len(conns))
	for i, c := range conns {
		go func() {
			for { // one byte now and then does not help
				if i%4 == 0 {
					_, _ = c.Write([]byte("X"))
				}
				_ = c.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
				_, err := io.Copy(io.Discard, c)
				switch {
				case !errors.Is(err, os.ErrDeadlineExceeded):
					closed <- nil
					return
				case time.Since(began) > 3*patience:
					closed <- err
					return
				}
			}
		}()
	}
	for range conns {
		if err := <-closed; err != nil {
			t.Fatalf("still open after %s", time.Since(began))
		}
	}
}

// visit has somebody come to a page that nobody is on, and leave it.
func (s *server) visit(t *testing.T) {
	t.Helper()
	c := s.ws(t)
	c.join("p")
	c.takeCount("p", 1)
	c.leave("p")
	c.close()
	eventually(t, "left", func() bool { return s.count(t, "p") == 0 })
}

// There are more half handshakes than places. They make room for each other and for
// everyone else, and take no more than those places.
func TestManyHalfHandshakes(t *testing.T) {
	t.Parallel()
	s := start(t, "--max-connections=50", "--leave-grace=0s") // and so there are 100 places for short connections
	for range 400 {
		fmt.Fprintf(s.rawDial(t), "GET /-/ws HTTP/1.1\r\nHost: x\r\n")
	}
	for range 20 {
		s.visit(t)
	}
	eventually(t, "all half handshakes have come to the door", func() bool { return s.metric(t, "headcount_connections_evicted_total") >= 300 })
	if n := s.metric(t, "process_open_fds"); n > 100+50+50 {
		t.Errorf("%.0f descriptors", n)
	}
}

// A client that sends requests and never reads an answer is closed, too.
func TestAnswersThatAreNeverRead(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	c := s.rawDial(t)
	if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	requests := strings.Repeat("GET /-/headcount.js HTTP/1.1\r\nHost: x\r\n\r\n", 100)
	for end := time.Now().Add(3 * patience); ; {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := io.WriteString(c, requests)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			break // the server has closed it
		}
		if time.Now().After(end) {
			t.Fatal("the server waits for ever")
		}
	}
	if got := s.count(t, "p"); got != 0 {
		t.Errorf("%d", got)
	}
}

// Bytes that are no frames end their connection and nothing else.
func TestBrokenFrames(t *testing.T) {
	t.Parallel()
	s := common(t)
	page := fresh(t)
	bystander := s.ws(t)
	bystander.join(page)
	bystander.takeCount(page, 1)
	mask := "\x01\x02\x03\x04"
	for name, text := range map[string]string{
		"an unmasked text":            "\x81\x02{}",
		"a reserved bit":              "\xc1\x80" + mask,
		"another reserved bit":        "\xa1\x80" + mask,
		"the third":                   "\x91\x80" + mask,
		"opcode 3":                    "\x83\x80" + mask,
		"opcode 15":                   "\x8f\x80" + mask,
		"a ping in parts":             "\x09\x80" + mask,
		"a ping of 126 bytes":         "\x89\xfe\x00\x7e" + mask + strings.Repeat("x", 126),
		"a continuation of nothing":   "\x80\x80" + mask,
		"a message within a message":  "\x01\x80" + mask + "\x81\x80" + mask,
		"a length with the top bit":   "\x81\xff\xff\xff\xff\xff\xff\xff\xff\xff" + mask + strings.Repeat("x", 5000),
		"a close of one byte":         "\x88\x81" + mask + "x",
		"a close with code 1005":      "\x88\x82" + mask + "\x02\xef",
		"a close with code 0":         "\x88\x82" + mask + "\x01\x02",
		"HTTP":                        "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
		"TLS":                         "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + strings.Repeat("r", 500),
		"a huge length, nothing else": "\x82\xff\x7f\xff\xff\xff\xff\xff\xff\xff" + mask + strings.Repeat("x", 5000),
	} {
		t.Run(name, func(t *testing.T) {
			w := s.rawWS(t, 0)
			w.t = t
			_, _ = io.WriteString(w, text)
			if code, texts := w.closing(); code != 0 && code != 1002 && code != 1009 {
				t.Errorf("close %d after %q", code, texts)
			}
		})
	}
	t.Run("noise", func(t *testing.T) {
		r := rand.New(rand.NewPCG(1, 2))
		for range 60 {
			w := s.rawWS(t, 0)
			noise := make([]byte, r.IntN(6000))
			for i := range noise {
				noise[i] = byte(r.Uint32())
			}
			if len(noise) > 0 && r.IntN(2) == 0 {
				noise = clientFrame(0x80|byte(r.IntN(11)), noise) // one good frame, at least in form
			}
			_, _ = w.Write(noise)
			w.Close()
		}
		// The same with bits that flip in what was a good conversation.
		for i := range 60 {
			w := s.rawWS(t, 0)
			var talk []byte
			for _, text := range []string{`{"type":"join","page":"` + page + `"}`, `{"type":"subscribe","pages":["*"]}`, `{"type":"heartbeat"}`} {
				talk = append(talk, clientFrame(0x81, []byte(text))...)
			}
			talk[r.IntN(len(talk))] ^= 1 << (i % 8)
			_, _ = w.Write(talk)
			w.Close()
		}
	})
	bystander.awaitCount(page, 1)
	bystander.skim()
	c := s.ws(t)
	c.join(page)
	c.await("count with both", func(f frame) bool { return f.isCount(page) && *f.Count >= 2 })
}
