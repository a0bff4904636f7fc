package e2e

import (
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// ends are the ways in which a process ends.
var ends = map[string]func(t *testing.T, s *server){
	"SIGTERM": func(t *testing.T, s *server) {
		s.Signal(syscall.SIGTERM)
		s.died(t, 0)
	},
	"kill -9": func(_ *testing.T, s *server) { s.kill() },
}

// A process that restarts over its data directory knows at once who was there, and forgets those who do not come back
// after the presence timeout: no visitor sees counts that begin at zero. The timeout is long, so that every restart is
// shorter. The grace is shorter than an orderly end, during which nobody can come back.
func TestServerWhoIsThereIsRememberedOverARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{"--data-dir=" + dir, "--presence-timeout=1m", "--leave-grace=200ms", "--update-interval=10ms"}
	s := start(t, flags...)
	left := map[string]int{} // how many are left on each page in the end
	for name, end := range ends {
		t.Log(name)
		page := fresh(t)
		path := url.PathEscape(page)
		for before := range left {
			left[before] = 0 // nobody comes back there
		}
		left[path] = 1

		there := make([]*client, 5)
		for i := range there {
			there[i] = s.ws(t)
			there[i].join(page)
		}

		there[0].awaitCount(page, 5)
		there[4].leave(page)
		there[0].awaitCount(page, 4)

		// The first write may have been prepared earlier. The second one begins after the changes.
		for range 2 {
			seen := written(dir)
			testkit.Eventually(t, "the users are written", func() bool { return written(dir).After(seen) })
		}

		moved := make(chan struct{})
		go func() { // a client that obeys at once finds no server until the next process runs
			defer close(moved)
			for {
				if f, ok, _ := there[3].poll(time.Now().Add(testkit.Timeout)); !ok || f.Type == "reconnect" {
					there[3].close()
					return
				}
			}
		}()

		end(t, s)
		<-moved
		s = start(t, flags...)
		if n := s.count(t, path); n != 4 {
			t.Errorf("%d are there after the restart, want the 4 of before", n)
		}

		// Two of the four come back, and the two others time out.
		back := []*client{s.again(t, there[0]), s.again(t, there[1])}
		for _, c := range back {
			c.join(page)
			if f := c.await("a count", func(f frame) bool { return f.Type == "count" }); *f.Count != 4 || f.Stale {
				t.Errorf("a user who comes back sees %s", f.text)
			}
		}

		back[1].leave(page)
		back[0].awaitCount(page, 3)
	}

	for path, n := range left {
		testkit.Eventually(t, "those who have not come back are gone", func() bool { return s.count(t, path) == n })
	}
}

// Everything that was answered before a kill holds after it, however soon the kill came: a hold that was taken or
// released, a leave that others saw, and the time when a user was last seen. The first process has written its file
// before that, so a file that lacks the rest would resurrect users who have left.
func TestClockWhatWasAnsweredOutlivesAKill(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{
		"--data-dir=" + dir, "--api-key=" + apiKey, "--presence-timeout=1m", "--leave-grace=0s",
		"--update-interval=10ms", "--last-seen=1h",
	}

	s := start(t, flags...)
	stays, leaves, ends, takes := s.ws(t), s.ws(t), s.ws(t), s.ws(t)
	hold := func(c *client, action string) {
		t.Helper()
		if a := s.put(t, "/p/counter", `{"action":"`+action+`"}`, "Headcount-Id: "+c.id); a.status != http.StatusOK {
			t.Fatalf("%s: %d %s", action, a.status, a.body)
		}
	}

	stays.join("p")
	leaves.join("p")
	hold(ends, "increment")
	stays.awaitCount("p", 3)
	for range 2 { // the first write may have been prepared earlier; the second one begins after the changes
		seen := written(dir)
		testkit.Eventually(t, "the users are written", func() bool { return written(dir).After(seen) })
	}

	// After the last write of the file.
	leaves.leave("p")
	left := s.awaitSeen(t, leaves.user)
	hold(ends, "decrement")
	hold(takes, "increment")
	stays.awaitCount("p", 2)
	s.kill()

	s = start(t, flags...)
	if n := s.count(t, "p"); n != 2 {
		t.Errorf("%d are there after the kill, want the one who stays and the one with a new hold", n)
	}

	for name, c := range map[string]*client{"with a new hold": takes, "without a hold": ends, "who left": leaves} {
		if is := s.users(t, c.user)[0]; is.Online != (c == takes) {
			t.Errorf("the client %s: %+v, want online %t", name, is, c == takes)
		}
	}

	if at := s.users(t, leaves.user)[0].LastSeen; !at.Equal(left) {
		t.Errorf("the user who left was last seen at %s after the kill, and at %s before", at, left)
	}
}

// written returns when the file of present users was last written or confirmed.
func written(dir string) time.Time {
	is, err := os.Stat(filepath.Join(dir, "present"))
	if err != nil {
		return time.Time{}
	}
	return is.ModTime()
}

// A process that has forgotten who was there marks its counts as stale, from the first client that comes back until the
// others had time for that.
func TestClockWithoutADataDirectoryCountsAreStaleAfterARestart(t *testing.T) {
	t.Parallel()
	s := start(t, "--update-interval=10ms")
	there := s.ws(t)
	there.join("p")
	if f := there.await("a count", func(f frame) bool { return f.Type == "count" }); f.Stale {
		t.Errorf("after a first start: %s", f.text)
	}

	s.kill()
	s = start(t, "--update-interval=10ms")

	newcomer := s.ws(t)
	newcomer.join("p")
	newcomer.awaitCount("p", 1)
	if got := s.get(t, "/p/counter").body; strings.Contains(got, "stale") {
		t.Errorf("nobody has come back, but: %s", got)
	}

	// A client with an old id shows that the process has restarted.
	back := s.dial(t, dialer{query: "id=" + there.id}) // a void id, as the secret is a new one
	back.join("p")
	if f := back.await("a count", func(f frame) bool { return f.Type == "count" }); !f.Stale || *f.Count != 2 {
		t.Errorf("a user who comes back sees %s", f.text)
	}
	newcomer.await("the same count", func(f frame) bool { return f.Type == "count" && f.Stale && *f.Count == 2 })

	if got := s.get(t, "/p/counter").body; !strings.Contains(got, `"stale":true`) {
		t.Errorf("a counter that may lack users: %s", got)
	}
	got := s.put(t, "/p/counter", `{"action":"increment"}`)
	if got.status != 200 || !strings.Contains(got.body, `"count":3`) || !strings.Contains(got.body, `"stale":true`) {
		t.Errorf("an increment meanwhile: %d %s", got.status, got.body)
	}

	// The end of that time is in gateway's TestCountsAreInDoubtUntilAllHadTimeToComeBack.
}
