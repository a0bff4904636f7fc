package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/testkit"
)

// changeWith sends a change with an idempotency key and its author, and returns the status, or 0 without an answer.
func (s *server) changeWith(page, by, key string) (status int, body string) {
	a, err := try("POST", s.url+"/"+url.PathEscape(page)+"/changes", `{"by":`+quoted(by)+`}`, withKey,
		"Idempotency-Key: "+key)
	if err != nil {
		return 0, err.Error()
	}

	return a.status, a.body
}

// A process is killed again and again while it stores changes and follows. Each change is sent until it is
// acknowledged, and some are sent once more. Each counts once, whether or not its first try was answered.
func TestClockKilledAgainAndAgain(t *testing.T) {
	t.Parallel()
	const rounds, workers = 20, 16
	dir := t.TempDir()
	page := fresh(t)

	s := startWithKey(t, "--data-dir="+dir)
	c := s.ws(t)
	s.follow(t, c.as(), page)
	c.close()

	sent := 0
	for round := range rounds {
		var wg sync.WaitGroup
		var mu sync.Mutex // guards again and sent
		var again []int   // changes to be sent after the restart
		began := make(chan struct{}, 1<<16)

		for range workers {
			wg.Go(func() {
				for {
					mu.Lock()
					i := sent
					sent++
					mu.Unlock()

					select {
					case began <- struct{}{}:
					default:
					}

					status, body := s.changeWith(page, "author "+strconv.Itoa(i%50), strconv.Itoa(i))
					acknowledged := status == http.StatusNoContent
					if !acknowledged || i%5 == 0 {
						mu.Lock()
						again = append(again, i)
						mu.Unlock()
					}
					if !acknowledged {
						if status != 0 {
							t.Errorf("change %d: %d %s", i, status, body)
						}
						return // the server is gone
					}
				}
			})
		}
		wg.Go(func() { // follows are written at the same time
			for i := 0; ; i++ {
				path := s.url + "/-/me/follows/" + url.PathEscape(fmt.Sprint(page, " ", i%7))
				if _, err := try("PUT", path, "", c.as()); err != nil {
					return
				}
				if _, err := try("DELETE", path, "", c.as()); err != nil {
					return
				}
			}
		})

		// The kill comes at a random moment, while several changes are under way.
		for range workers + rand.IntN(100) {
			<-began
		}
		time.Sleep(time.Duration(rand.IntN(10_000)) * time.Microsecond)
		s.kill()
		wg.Wait()

		s = startWithKey(t, "--data-dir="+dir)
		for _, i := range again {
			status, body := s.changeWith(page, "author "+strconv.Itoa(i%50), strconv.Itoa(i))
			if status != http.StatusNoContent {
				t.Fatalf("round %d: change %d, after the restart: %d %s", round, i, status, body)
			}
		}

		s.wantUnread(t, c.as(), sent)
		if log := s.log.String(); strings.Contains(log, "repaired") {
			t.Errorf("round %d: a crash needed a repair:\n%s", round, log)
		}
	}
}

// limitFiles lets no file of the process grow beyond so many bytes.
func (s *server) limitFiles(t *testing.T, bytes uint64) {
	t.Helper()
	limit := unix.Rlimit{Cur: bytes, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(s.PID(), unix.RLIMIT_FSIZE, &limit, nil); err != nil {
		t.Fatal(err)
	}
}

// The disk has no room for counters, and nothing else is written. /readyz and the metrics say so, and notice by
// themselves when there is room again.
func TestServerNoRoomForCounters(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startWithKey(t, "--data-dir="+dir)

	file, err := os.Stat(filepath.Join(dir, "counters.db"))
	if err != nil {
		t.Fatal(err)
	}
	s.limitFiles(t, uint64(file.Size()))

	for i := 0; ; i++ {
		members := make([]string, 1000)
		for j := range members {
			members[j] = fmt.Sprintf(`"member %d of %d"`, j, i)
		}

		body := `{"add":[` + strings.Join(members, ",") + `]}`
		a := do(t, "POST", s.url+"/api/v1/counters/likes:"+strconv.Itoa(i)+"/members", body, withKey)
		if a.status != http.StatusOK {
			a.problem(t, http.StatusServiceUnavailable)
			break
		}
	}

	readyz := do(t, "GET", s.admin+"/readyz", "")
	if readyz.status != http.StatusServiceUnavailable ||
		!strings.Contains(readyz.body, "not ready: the data directory cannot be written: ") {
		t.Errorf("/readyz without room for counters: %d %s", readyz.status, readyz.body)
	}

	const down = `headcount_store_up{store="data-dir"} 0`
	if metrics := do(t, "GET", s.admin+"/metrics", "").body; !strings.Contains(metrics, down) {
		t.Errorf("the metrics lack %s", down)
	}

	s.limitFiles(t, unix.RLIM_INFINITY)
	testkit.Eventually(t, "it is ready again", s.ready)

	s.Signal(syscall.SIGKILL)
	<-s.Ended()
	s.ended.Do(func() {}) // the log has an error on purpose
}

// The disk is full. A refused change does not count, not even in part, and /readyz says why. With room again everything
// works as before.
func TestServerDiskFull(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	page := fresh(t)
	s := startWithKey(t, "--data-dir="+dir)
	c := s.ws(t)
	s.follow(t, c.as(), page)
	s.changeWith(page, "x", "first")
	c.awaitUnread(1)

	file, err := os.Stat(filepath.Join(dir, "headcount.db"))
	if err != nil {
		t.Fatal(err)
	}

	// The file cannot grow any more. Changes that fit into its free pages still succeed.
	s.limitFiles(t, uint64(file.Size()))
	sent, kept := 0, 1
	send := func() (status int) {
		t.Helper()
		sent++
		status, body := s.changeWith(page, "author "+strconv.Itoa(sent), strconv.Itoa(sent))
		switch {
		case status == http.StatusNoContent:
			kept++
		case status != http.StatusServiceUnavailable:
			t.Fatalf("change %d: %d %s", sent, status, body)
		}

		return status
	}

	stock := "stock:" + fresh(t)
	batches := 0
	batch := func() (made bool) { // of two counters: both change, or neither
		t.Helper()
		body := fmt.Sprintf(`{"changes":[{"key":%s},{"key":%s}]}`, quoted(stock), quoted(stock+" 2"))
		a := do(t, "POST", s.url+"/api/v1/counters", body, withKey, "Idempotency-Key: "+strconv.Itoa(batches))
		if a.status == http.StatusOK {
			batches++
			return true
		}

		a.problem(t, http.StatusServiceUnavailable)
		return false
	}

	for send() == http.StatusNoContent {
		if sent > 20_000 {
			t.Fatal("the file cannot grow, and nothing is refused")
		}
	}

	// From now on everything is refused.
	for range 100 {
		if send() != http.StatusServiceUnavailable {
			t.Fatal("a change was kept on a full disk")
		}
		s.put(t, "/-/me/follows/other", "", c.as()).problem(t, http.StatusServiceUnavailable)
	}
	s.wantUnread(t, c.as(), kept)

	// The counters are in a file of their own, which fills up later.
	for batch() {
		if batches > 20_000 {
			t.Fatal("the file of counters cannot grow, and nothing is refused")
		}
	}
	first, second := s.exact(t, stock), s.exact(t, stock+" 2")
	if first != int64(batches) || second != first || len(s.ledger(t, stock)) != batches {
		t.Errorf("%d and %d in stock, and %d entries, after %d batches",
			first, second, len(s.ledger(t, stock)), batches)
	}

	readyz := do(t, "GET", s.admin+"/readyz", "")
	if readyz.status != http.StatusServiceUnavailable ||
		!strings.Contains(readyz.body, "not ready: the data directory cannot be written: ") {
		t.Errorf("/readyz on a full disk: %d %s", readyz.status, readyz.body)
	}

	c.join(page) // presence needs no disk
	c.awaitCount(page, 1)

	// With room again, all refused changes succeed under their keys, each once.
	s.limitFiles(t, unix.RLIM_INFINITY)
	testkit.Eventually(t, "it is ready again", s.ready)
	testkit.Eventually(t, "a batch with room again", batch)

	total := sent + 1
	for i := 1; i <= sent; i++ {
		status, body := s.changeWith(page, "author "+strconv.Itoa(i), strconv.Itoa(i))
		if status != http.StatusNoContent {
			t.Fatalf("change %d with room again: %d %s", i, status, body)
		}
	}
	s.wantUnread(t, c.as(), total)

	for _, says := range []string{
		"the data directory cannot be written; changes and follows are refused until it can",
		`"the data directory can be written again"`, `"counters: the data directory can be written again"`,
	} {
		if n := strings.Count(s.log.String(), says); n != 1 {
			t.Errorf("%q is %d times in the log, want once:\n%s", says, n, s.log)
		}
	}

	s.Signal(syscall.SIGKILL)
	<-s.Ended()
	s.ended.Do(func() {}) // the log has an error on purpose

	s = startWithKey(t, "--data-dir="+dir)
	s.wantUnread(t, c.as(), total)
	if n := s.exact(t, stock); n != int64(batches) {
		t.Errorf("after the kill %d are in stock, want %d, one of each batch", n, batches)
	}
}
