package e2e

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// With few open files the server serves as many clients as fit. It refuses the others
// with an answer, and still answers operators.
func TestFewFiles(t *testing.T) {
	t.Parallel()
	s, err := spawnBy([]string{"sh", "-c", `ulimit -n 100; exec "$0" "$@"`, program}, "--data-dir="+t.TempDir(), "--max-connections=10000")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if problem := s.end(); problem != "" {
			t.Error(problem)
		}
	})
	ready := func() bool {
		resp, err := http.Get(s.admin + "/readyz")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	}
	eventually(t, "it is ready", ready)
	var streams []*http.Response
	alone := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	served, refused := 0, 0
	for range 150 {
		resp, err := alone.Get(s.url + "/p/counter/events")
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, resp)
		switch resp.StatusCode {
		case http.StatusOK:
			served++
		case http.StatusServiceUnavailable:
			refused++
		}
	}
	silent := make([]net.Conn, 150)
	for i := range silent { // they send nothing
		if silent[i], err = net.Dial("tcp", s.addr); err != nil {
			t.Fatal(err)
		}
	}
	if served != 30 || refused != 120 {
		t.Errorf("%d served and %d refused, want 30 and 120", served, refused)
	}
	for range 20 {
		if !ready() {
			t.Error("it is not ready")
		}
	}
	for _, resp := range streams {
		resp.Body.Close()
	}
	for _, c := range silent {
		c.Close()
	}
	eventually(t, "a newcomer is served", func() bool {
		resp, err := alone.Get(s.url + "/p/counter/events")
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK
	})
	if n := strings.Count(s.log.String(), "raise ulimit -n"); n != 1 {
		t.Errorf("the log names ulimit %d times:\n%s", n, s.log)
	}
}

// When no file is free, the log says so once, and /readyz says so too.
func TestNoFiles(t *testing.T) {
	t.Parallel()
	s := start(t)
	admin := &http.Client{Timeout: patience} // its connection is kept
	readyz := func() string {
		t.Helper()
		resp, err := admin.Get(s.admin + "/readyz")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	readyz()
	limit := func(files uint64) {
		t.Helper()
		if err := unix.Prlimit(s.cmd.Process.Pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: 4096}, nil); err != nil {
			t.Fatal(err)
		}
	}
	limit(3) // fewer than it has
	newcomer, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer newcomer.Close()
	const says = "new clients cannot be accepted, since this process has too many open files; raise ulimit -n, or lower --max-connections"
	eventually(t, "/readyz says so", func() bool { return strings.Contains(readyz(), "not ready: "+says) })
	time.Sleep(2 * time.Second) // it tries again in that time
	limit(4096)
	eventually(t, "it is ready again", func() bool { return readyz() == "ready\n" })
	const again = "new clients are accepted again"
	eventually(t, "the log says so", func() bool { return strings.Contains(s.log.String(), again) })
	for _, line := range []string{says, again} {
		if n := strings.Count(s.log.String(), line); n != 1 {
			t.Errorf("%q is %d times in the log:\n%s", line, n, s.log)
		}
	}
	s.signal(unix.SIGKILL)
	<-s.gone
	s.ended.Do(func() {}) // the log has the error that was wanted
}
