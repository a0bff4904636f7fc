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
)

// changeWith sends a change with an idempotency key and its author, and returns the
// status; 0: there was no answer.
func (s *server) changeWith(page, by, key string) (status int, body string) {
	a, err := try("POST", s.url+"/"+url.PathEscape(page)+"/changes", `{"by":`+quoted(by)+`}`, withKey, "Idempotency-Key: "+key)
	if err != nil {
		return 0, err.Error()
	}
	return a.status, a.body
}

// A process is killed again and again while it keeps changes and follows. Each change is
// sent until it is acknowledged, and some are sent once more. Each counts once, whether
// its first try was answered or not.
func TestKilledAgainAndAgain(t *testing.T) {
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
		var mu sync.Mutex // guards what follows
		var again []int   // changes that are sent after the restart
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
					if status != http.StatusNoContent || i%5 == 0 {
						mu.Lock()
						again = append(again, i)
						mu.Unlock()
					}
					if status != http.StatusNoContent {
						if status != 0 {
							t.Errorf("change %d: %d %s", i, status, body)
						}
						return // it is gone
					}
				}
			})
		}
		wg.Go(func() { // follows are written beside them
			for i := 0; ; i++ {
				if _, err := try("PUT", s.url+"/-/me/follows/"+url.PathEscape(fmt.Sprint(page, " ", i%7)), "", c.as()); err != nil {
					return
				}
				if _, err := try("DELETE", s.url+"/-/me/follows/"+url.PathEscape(fmt.Sprint(page, " ", i%7)), "", c.as()); err != nil {
					return
				}
			}
		})
		for range workers + rand.IntN(100) {
			<-began
		}
		time.Sleep(time.Duration(rand.IntN(10_000)) * time.Microsecond)
		s.signal(syscall.SIGKILL)
		wg.Wait()
		s.killed(t)
		s = startWithKey(t, "--data-dir="+dir)
		for _, i := range again {
			if status, body := s.changeWith(page, "author "+strconv.Itoa(i%50), strconv.Itoa(i)); status != http.StatusNoContent {
				t.Fatalf("round %d: change %d, after the restart: %d %s", round, i, status, body)
			}
		}
		s.wantUnread(t, c.as(), sent)
		if log := s.log.String(); strings.Contains(log, "repaired") {
			t.Errorf("round %d: a crash needed a repair:\n%s", round, log)
		}
	}
}

// limitFiles has no file of the process grow beyond so many bytes.
func (s *server) limitFiles(t *testing.T, bytes uint64) {
	t.Helper()
	limit := unix.Rlimit{Cur: bytes, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(s.cmd.Process.Pid, unix.RLIMIT_FSIZE, &limit, nil); err != nil {
		t.Fatal(err)
	}
}

// The disk is full. What is refused does not count, is refused at once, and /readyz says
// why. With room again everything works as before.
func TestDiskFull(t *testing.T) {
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
	// The file does not grow any more. Changes that fit into its free pages still
	// succeed.
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
	for send() == http.StatusNoContent {
		if sent > 20_000 {
			t.Fatal("the file cannot grow, and nothing is refused")
		}
	}
	const refusals = 100
	begin := time.Now()
	for range refusals {
		if send() != http.StatusServiceUnavailable {
			t.Fatal("a change was kept on a full disk")
		}
		if a := s.put(t, "/-/me/follows/other", "", c.as()); a.status != http.StatusServiceUnavailable || a.header.Get("Retry-After") == "" {
			t.Fatalf("a follow on a full disk: %d %s", a.status, a.body)
		}
	}
	if took := time.Since(begin); took > patience {
		t.Errorf("%d refusals took %s", 2*refusals, took)
	}
	s.wantUnread(t, c.as(), kept)
	if a := do(t, "GET", s.admin+"/readyz", ""); a.status != http.StatusServiceUnavailable || !strings.Contains(a.body, "not ready: the data directory cannot be written: ") {
		t.Errorf("/readyz on a full disk: %d %s", a.status, a.body)
	}
	c.join(page) // counts go on
	c.awaitCount(page, 1)

	s.limitFiles(t, unix.RLIM_INFINITY)
	eventually(t, "it is ready again", func() bool { return do(t, "GET", s.admin+"/readyz", "").status == http.StatusOK })
	total := sent + 1
	for i := 1; i <= sent; i++ {
		if status, body := s.changeWith(page, "author "+strconv.Itoa(i), strconv.Itoa(i)); status != http.StatusNoContent {
			t.Fatalf("change %d with room again: %d %s", i, status, body)
		}
	}
	s.wantUnread(t, c.as(), total)
	for _, says := range []string{"the data directory cannot be written; changes and follows are refused until it can", "the data directory can be written again"} {
		if n := strings.Count(s.log.String(), says); n != 1 {
			t.Errorf("%q is %d times in the log:\n%s", says, n, s.log)
		}
	}
	s.signal(syscall.SIGKILL)
	<-s.gone
	s.ended.Do(func() {}) // the log has the error that was wanted
	s = startWithKey(t, "--data-dir="+dir)
	s.wantUnread(t, c.as(), total)
}

// The disk is full for counters. What is refused is not made, not even in part, is refused at once, and what
// there is can be read. With room again everything that is repeated counts once.
func TestDiskFullOfCounters(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := startWithKey(t, "--data-dir="+dir)
	stock, likes := "stock:"+fresh(t), "likes:"+fresh(t)
	path := url.PathEscape(stock)
	s.call(t, "POST", path+"/increment", "", withKey).lasting(t)
	sent, kept := 0, 0
	// change makes the changes of i: a batch on two counters, and a member.
	change := func(i int) (made bool) {
		t.Helper()
		made = true
		body := fmt.Sprintf(`{"changes":[{"key":%s},{"key":%s}]}`, quoted(stock), quoted(fmt.Sprint("views:", stock, i%50)))
		for _, a := range []answer{
			do(t, "POST", s.url+"/api/v1/counters", body, withKey, "Content-Type: application/json", "Idempotency-Key: "+strconv.Itoa(i)),
			s.call(t, "PUT", url.PathEscape(likes)+"/members/"+strconv.Itoa(i), "", withKey),
		} {
			switch {
			case a.status == http.StatusServiceUnavailable && a.header.Get("Retry-After") != "":
				made = false
			case a.status != http.StatusOK:
				t.Fatalf("changes %d: %d %s", i, a.status, a.body)
			}
		}
		return made
	}
	check := func(least, most int) {
		t.Helper()
		value := int(s.exact(t, stock)) - 1
		if value < least || value > most {
			t.Errorf("%d batches are made, want %d to %d", value, least, most)
		}
		if n := len(s.ledger(t, stock)) - 1; n != value {
			t.Errorf("%d entries for a value of %d", n, value)
		}
		a := do(t, "GET", s.url+"/api/v1/counters/views:*/aggregate", "", withKey)
		if !strings.Contains(a.body, fmt.Sprintf(`"value":%d}`, value)) {
			t.Errorf("%d batches are made, and of their other counters %s", value, a.body)
		}
	}
	file, err := os.Stat(filepath.Join(dir, "counters.db"))
	if err != nil {
		t.Fatal(err)
	}
	s.limitFiles(t, uint64(file.Size())) // the file does not grow any more
	for full := false; !full; sent++ {
		if full = !change(sent); !full {
			kept++
		}
		if sent > 20_000 {
			t.Fatal("the file cannot grow, and nothing is refused")
		}
	}
	begin := time.Now()
	for range 100 {
		if change(sent) {
			kept++ // it fitted into what is free in the file
		}
		sent++
	}
	if took := time.Since(begin); took > patience {
		t.Errorf("200 refusals took %s", took)
	}
	check(kept, sent)

	s.limitFiles(t, unix.RLIM_INFINITY)
	for i := range sent {
		eventually(t, "changes with room again", func() bool { return change(i) })
	}
	check(sent, sent)
	s.signal(syscall.SIGKILL)
	<-s.gone
	s.ended.Do(func() {}) // the log has the error that was wanted
	s = startWithKey(t, "--data-dir="+dir)
	check(sent, sent)
	if c := s.call(t, "GET", url.PathEscape(likes)+"/exact", "").lasting(t); c.Value != int64(sent) {
		t.Errorf("%+v, want %d members", c, sent)
	}
}
