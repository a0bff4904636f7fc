package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"headcount/internal/pgtest"
	"headcount/internal/redistest"
	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

const apiKey = "0123456789abcdef"

// server is a server within this process. It runs until stop is called.
type server struct {
	public, admin string
	ended         chan error
	cancel        context.CancelFunc
}

func startServer(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{public: servertest.FreeAddr(), admin: servertest.FreeAddr(), ended: make(chan error, 1)}
	cfg := settings(t, append(args, "--listen", s.public, "--admin-listen", s.admin, "--cluster-listen",
		servertest.FreeAddr(), "--api-key", apiKey)...)

	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	t.Cleanup(cancel)
	go func() { s.ended <- serve(ctx, cfg, zerolog.Nop()) }()

	return s
}

func (s *server) ready(t *testing.T) *server {
	t.Helper()
	testkit.Eventually(t, "the server is ready", func() bool {
		select {
		case err := <-s.ended:
			t.Fatalf("the server ended: %v", err)
		default:
		}
		return servertest.Ready(t.Context(), s.admin) == nil
	})

	return s
}

func (s *server) stop(t *testing.T) {
	t.Helper()
	s.cancel()
	if err := <-s.ended; err != nil {
		t.Fatal(err)
	}
}

// refused waits until the server has ended, with an error in one line that contains want.
func (s *server) refused(t *testing.T, want string) {
	t.Helper()
	var err error
	select {
	case err = <-s.ended:
	case <-time.After(2 * time.Minute):
		t.Fatalf("the server runs on, want it ended with %q", want)
	}

	if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
		t.Errorf("the server ended with %v, want %q", err, want)
	}
}

// call returns the value of the counter in the answer. Like every careful client it repeats a call that gets 503, under
// one Idempotency-Key.
func (s *server) call(t *testing.T, method, path, body string) (value int) {
	t.Helper()
	key := rand.Text()

	testkit.Eventually(t, method+" "+path+" is answered", func() (answered bool) {
		value, answered = s.try(t, method, path, body, key)
		return answered
	})

	return value
}

func (s *server) try(t *testing.T, method, path, body, key string) (value int, answered bool) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.public+"/api/v1/counters/"+path,
		strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}

	req.Header.Set("X-API-Key", apiKey)
	if method == "POST" {
		req.Header.Set("Idempotency-Key", key)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}

	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()

	text, _ := io.ReadAll(resp.Body)
	if resp.StatusCode == http.StatusServiceUnavailable {
		return 0, false
	}

	var c struct{ Value int }
	if err := json.Unmarshal(text, &c); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %s %s", method, path, resp.Status, text)
	}
	return c.Value, true
}

func (s *server) values(t *testing.T) string {
	t.Helper()
	return fmt.Sprint(s.call(t, "GET", "views:1/exact", ""), s.call(t, "GET", "stock:1/exact", ""),
		s.call(t, "GET", "likes:1/exact", ""))
}

// PostgreSQL is added to servers that used Redis alone, and gets their counters. From then on no server without
// PostgreSQL, and none without Redis, can change them.
func TestServerPostgresIsAdded(t *testing.T) {
	redis := redistest.Start(t).URL()
	postgres := pgtest.Start(t).Database(t)

	both := []string{"--redis", redis, "--postgres", postgres}
	export := func(want string, args ...string) {
		t.Helper()
		status, text, said := runCommand(t, nil, append([]string{"export"}, args...)...)
		if want == "" {
			if status != exitOK || !strings.Contains(text, `"views:1"`) {
				t.Errorf("export %s: status %d, %s", args, status, said)
			}
			return
		}

		if status == exitOK || !strings.Contains(said, want) || strings.Count(said, "\n") != 1 {
			t.Errorf("export %s: status %d, %s; want %q", args, status, said, want)
		}
	}

	// Beside a server with Redis alone nothing may use PostgreSQL.
	s := startServer(t, "--redis", redis).ready(t)
	s.call(t, "POST", "views:1/increment", `{"delta":1000}`)
	s.call(t, "POST", "stock:1/adjust", `{"delta":10,"reason":"r","by":"b"}`)
	s.call(t, "POST", "likes:1/members", `{"add":["ann"]}`)

	export("leave --postgres out", both...)
	_, text, _ := runCommand(t, nil, "export", "--redis", redis)
	status, _, said := runCommand(t, strings.NewReader(text), append([]string{"import"}, both...)...)
	if status == exitOK || !strings.Contains(said, "processes without --postgres use this Redis") ||
		strings.Count(said, "\n") != 1 {
		t.Errorf("an import with PostgreSQL while a server runs without it: status %d, %s", status, said)
	}

	startServer(t, both...).refused(t, "processes without --postgres use this Redis")
	if is := s.values(t); is != "1000 10 1" {
		t.Errorf("after an export and a refused start the values are %s, want 1000 10 1", is)
	}
	s.stop(t)

	// A server with both takes the counters over, and a server with Redis alone is refused.
	s = startServer(t, both...).ready(t)
	if is := s.values(t); is != "1000 10 1" {
		t.Fatalf("after PostgreSQL was added the values are %s, want 1000 10 1", is)
	}
	startServer(t, "--redis", redis).refused(t, "give this process their --postgres")

	// An export is possible while the server is busy.
	ctx, quiet := context.WithCancel(t.Context())
	var busy sync.WaitGroup
	busy.Go(func() {
		for ctx.Err() == nil {
			s.call(t, "POST", "views:1/increment", "")
			time.Sleep(time.Millisecond)
		}
	})
	export("", both...)
	quiet()
	busy.Wait()

	before := s.values(t)
	export("", both...) // waits for the last changes: a server that ends gives PostgreSQL only 2 s
	s.stop(t)

	// Without servers, an export needs both stores, or PostgreSQL alone when Redis is lost for good.
	export("", both...)
	export("", "--postgres", postgres)

	export("give its --postgres", "--redis", redis)
	startServer(t, "--redis", redis).refused(t, "give this process their --postgres")
	startServer(t, "--postgres", postgres).refused(t, "give its --redis")
	for _, args := range [][]string{{"--redis", redis}, {"--postgres", postgres}} {
		status, _, said := runCommand(t, strings.NewReader(""), append([]string{"import"}, args...)...)
		if status == exitOK || !strings.Contains(said, "give its --") || strings.Count(said, "\n") != 1 {
			t.Errorf("import %s: %d %s", args, status, said)
		}
	}

	s = startServer(t, both...).ready(t)
	if is := s.values(t); is != before {
		t.Errorf("in the end the values are %s, want %s", is, before)
	}
	s.stop(t)
}

// An import into Redis with PostgreSQL behind it is refused while servers run. Afterwards the imported counters are
// visible, also those that Redis had already. Counters that are not in the file lose nothing, and all of them can be
// changed.
func TestServerImportIntoTwoTiers(t *testing.T) {
	redis := redistest.Start(t).URL()
	postgres := pgtest.Single(t).Database(t)
	both := []string{"--redis", redis, "--postgres", postgres}
	s := startServer(t, both...).ready(t)

	// Redis has these counters, and knows that there is no likes:1.
	for _, path := range []string{"views:1/increment", "stock:1/increment"} {
		s.call(t, "POST", path, "")
	}
	s.values(t)

	// Another server writes the file.
	dir := t.TempDir()
	file := startServer(t, "--data-dir", dir).ready(t)
	file.call(t, "POST", "views:1/increment", `{"delta":1000}`)
	file.call(t, "POST", "stock:1/increment", `{"delta":10}`)
	file.call(t, "POST", "likes:1/members", `{"add":["ann"]}`)
	file.stop(t)

	status, text, said := runCommand(t, nil, "export", "--data-dir", dir)
	if status != exitOK {
		t.Fatal(said)
	}

	// This counter is not in the file, and its changes may not be persisted yet.
	const made = 3
	for range made {
		s.call(t, "POST", "views:other/increment", "")
	}

	load := append([]string{"import"}, both...)
	status, _, said = runCommand(t, strings.NewReader(text), load...)
	if status != exitFailure || !strings.Contains(said, "in use by other processes") {
		t.Errorf("an import while a server runs: status %d, %s", status, said)
	}

	s.stop(t)

	// The second start shows that everything was persisted.
	status, _, said = runCommand(t, strings.NewReader(text), load...)
	s = startServer(t, both...).ready(t)
	if is := s.values(t); status != exitOK || is != "1000 10 1" {
		t.Errorf("after the import (status %d, %s) the values are %s", status, said, is)
	}

	for range 2 {
		if is := s.call(t, "GET", "views:other/exact", ""); is != made {
			t.Errorf("of a counter outside the file %d are left, want %d", is, made)
		}
		if is := s.call(t, "POST", "views:1/increment", "") + s.call(t, "POST", "stock:1/decrement", ""); is != 1001+9 {
			t.Errorf("the next changes give %d together, want 1010", is)
		}

		s.call(t, "POST", "views:1/decrement", "")
		s.call(t, "POST", "stock:1/increment", "")
		s.stop(t)
		s = startServer(t, both...).ready(t)
	}
	s.stop(t)
}
