package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// The server also closes a client that sends requests and never reads an answer.
func TestClockAnswersThatAreNeverRead(t *testing.T) {
	t.Parallel()
	s := start(t, "--leave-grace=0s")
	c := s.rawDial(t)
	if err := c.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}

	// The answers fill the buffers, and then the server waits for the client.
	requests := strings.Repeat("GET /-/headcount.js HTTP/1.1\r\nHost: x\r\n\r\n", 100)
	for end := time.Now().Add(testkit.Timeout); ; {
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		_, err := io.WriteString(c, requests)
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			break // the server has closed the connection
		}

		if time.Now().After(end) {
			t.Fatal("the server waits for ever")
		}
	}

	if got := s.count(t, "p"); got != 0 {
		t.Errorf("the client that never read still counts: %d, want 0", got)
	}
}

// A paused connection receives no counts and counters, but all other frames. Then it receives the newest values that
// changed, once.
func TestServerPause(t *testing.T) {
	t.Parallel()
	s := startWithKey(t)
	c, others := s.ws(t), s.ws(t)
	page, still, later := fresh(t), fresh(t), fresh(t)
	key := "likes:" + fresh(t)

	like := func() {
		t.Helper()
		a := s.put(t, "/api/v1/counters/"+url.PathEscape(key)+"/members/me", "", s.ws(t).as())
		if a.status != http.StatusOK {
			t.Fatalf("a like: %d %s", a.status, a.body)
		}
	}

	counter := func(n int) {
		t.Helper()
		c.await(fmt.Sprint("a counter of ", n), func(f frame) bool {
			return f.Type == "counter" && f.Value == int64(n)
		})
	}

	c.join(page)
	c.awaitCount(page, 1)
	c.subscribe(still)
	c.awaitCount(still, 0)
	c.send(`{"type":"subscribe","counters":[` + quoted(key) + `]}`)
	counter(0)
	s.follow(t, c.as(), page)

	for range 2 {
		c.send(`{"type":"pause"}`)
	}
	c.silent()

	// All of this happens during the pause.
	others.join(page)
	others.awaitCount(page, 2)
	others.join(later)
	others.awaitCount(later, 1)
	c.subscribe(later)
	like()
	s.change(t, page, "")

	c.awaitUnread(1) // a count would have come before it

	third := s.ws(t)
	third.join(page)
	third.awaitCount(page, 3)
	like()
	third.send(`{"type":"subscribe","counters":[` + quoted(key) + `]}`)
	third.await("a counter of 2", func(f frame) bool { return f.Type == "counter" && f.Value == 2 })

	if s.count(t, page) != 3 {
		t.Error("a paused client is not counted")
	}

	c.silent()
	c.send(`{"type":"resume"}`)

	// After the pause, one frame for each topic that changed, and none for the page that did not.
	got := map[string]int{}
	for len(got) < 3 {
		f := c.take("what changed meanwhile")

		topic := f.Key
		if f.Type == "count" {
			topic = *f.Page
		}
		got[topic]++
		if got[topic] > 1 {
			t.Fatalf("a second frame of %s: %s", topic, f.text)
		}

		if f.Type == "count" && topic == page && *f.Count != 3 || f.Type == "counter" && f.Value != 2 {
			t.Errorf("not the newest: %s", f.text)
		}
	}

	if got[page] != 1 || got[later] != 1 || got[key] != 1 {
		t.Errorf("frames by topic: %v, want one each of %s, %s and %s", got, page, later, key)
	}

	c.send(`{"type":"resume"}`)
	c.silent()
	third.leave(page)
	c.awaitCount(page, 2) // as before the pause

	for _, kind := range []string{"pause", "resume"} {
		c.send(`{"type":"` + kind + `"}`)
	}
	c.silent() // nothing changed
}
