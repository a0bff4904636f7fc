package e2e

import (
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/testkit"
)

// When this process may open no more files, the log says so once, and so does /readyz.
func TestServerNoFiles(t *testing.T) {
	t.Parallel()
	s := start(t)
	admin := &http.Client{Timeout: testkit.Timeout} // it keeps its connection
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
		if err := unix.Prlimit(s.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: files, Max: 4096}, nil); err != nil {
			t.Fatal(err)
		}
	}
	limit(3) // fewer than are open

	// The kernel accepts the connection, but the server cannot.
	newcomer, err := net.Dial("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer newcomer.Close()

	const says = "new clients cannot be accepted, since this process has too many open files; raise ulimit -n, or " +
		"lower --max-connections"
	testkit.Eventually(t, "/readyz says so", func() bool { return strings.Contains(readyz(), "not ready: "+says) })
	time.Sleep(2 * time.Second) // the server tries several times, and logs nothing more

	limit(4096)
	testkit.Eventually(t, "it is ready again", func() bool { return readyz() == "ready\n" })

	const again = "new clients are accepted again"
	testkit.Eventually(t, "the log says so", func() bool { return strings.Contains(s.log.String(), again) })
	for _, line := range []string{says, again} {
		if n := s.log.Count(line); n != 1 {
			t.Errorf("%q is %d times in the log:\n%s", line, n, s.log)
		}
	}

	s.Signal(unix.SIGKILL)
	<-s.Ended()
	s.ended.Do(func() {}) // the log has an error on purpose
}
