package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// awaitSeen waits until a user has left, and returns when the user was last seen. During a takeover the process may
// answer 503.
func (s *server) awaitSeen(t *testing.T, user string) time.Time {
	t.Helper()
	var is userState
	testkit.Eventually(t, "when the user was last here", func() bool {
		a := s.get(t, "/-/users/"+user, withKey)
		is = userState{}
		return a.status == http.StatusOK && json.Unmarshal([]byte(a.body), &is) == nil && !is.LastSeen.IsZero()
	})

	return is.LastSeen
}

// A data directory remembers when users were last seen, even users of a killed process. With the setting 0 it forgets
// everybody.
func TestServerLastSeenOverARestart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	flags := []string{
		"--api-key=" + apiKey, "--data-dir=" + dir, "--heartbeat-interval=500ms", "--presence-timeout=1500ms",
		"--leave-grace=200ms", "--page-stats=0",
	}
	remembering := append(flags, "--last-seen=30d")
	s := start(t, remembering...)
	user := ""
	for name, end := range ends {
		t.Log(name)
		left, stays := s.ws(t), s.ws(t)
		user = left.user
		for _, c := range []*client{left, stays} {
			c.join("p")
		}

		left.awaitCount("p", 2)
		leaves := time.Now()
		before := leaves.Add(-time.Second) // the times are whole seconds
		left.leave("p")
		at := s.awaitSeen(t, left.user)
		if at.Before(before) || at.After(time.Now()) {
			t.Errorf("last seen %s, left after %s", at, before)
		}

		written := func(file string, since time.Time) {
			testkit.Eventually(t, "that it is written", func() bool {
				is, err := os.Stat(filepath.Join(dir, file))
				return err == nil && is.ModTime().After(since)
			})
		}
		written("headcount.db", leaves) // only the last-seen time is written there
		written("present", time.Now())
		written("present", time.Now()) // the first write may have begun earlier

		end(t, s)

		// The user who left keeps the time. The one who does not come back was last seen later.
		s = start(t, remembering...)
		if again := s.users(t, left.user)[0].LastSeen; !again.Equal(at) {
			t.Errorf("after the restart: last seen %s, was %s", again, at)
		}

		if gone := s.awaitSeen(t, stays.user); gone.Before(at) || gone.After(time.Now()) {
			t.Errorf("a user who did not come back was last seen %s", gone)
		}
	}

	// A start without --last-seen forgets the times for good.
	for what, flags := range [][]string{flags, remembering} {
		s.Signal(syscall.SIGTERM)
		s.died(t, 0)
		s = start(t, flags...)
		if is := s.users(t, user)[0]; !is.LastSeen.IsZero() {
			t.Errorf("start %d from --last-seen 0 on: %+v", what, is)
		}
	}
}

// In a cluster the users of a killed process were last seen when their presence timed out. What the process knew about
// others is still known.
func TestClockLastSeenInACluster(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t).URL()
	flags := []string{
		"--api-key=" + apiKey, "--heartbeat-interval=500ms", "--presence-timeout=3s", "--leave-grace=200ms",
		"--last-seen=1d", "--id-secret=0123456789abcdef0123456789abcdef",
	}

	all := startAll(t, overRedis(redis, flags...), overRedis(redis, flags...))
	killed, stays := all[0], all[1]

	left := map[string]time.Time{} // users of both processes' partitions
	for i := range 20 {
		c := all[i%2].ws(t)
		c.join("p")
		c.await("a count", func(f frame) bool { return f.Type == "count" })
		left[c.user] = time.Now()
		c.leave("p")
	}

	var known time.Time // by then all of them had left
	wasSeen := func(s *server, user string) {
		t.Helper()

		// The times are whole seconds.
		if seen := s.awaitSeen(t, user); seen.Before(left[user].Add(-time.Second)) || seen.After(known) {
			t.Errorf("last seen %s, left after %s and until %s", seen, left[user], known)
		}
	}

	for user := range left {
		all[0].awaitSeen(t, user)
	}
	known = time.Now()

	for user := range left {
		for _, s := range all {
			wasSeen(s, user)
		}
	}

	// These users stay until their process is killed.
	var there []*client
	for i := range 10 {
		c := killed.ws(t)
		c.join(fmt.Sprint("page ", i))
		c.awaitCount(fmt.Sprint("page ", i), 1)
		there = append(there, c)
	}

	at := time.Now().Add(-time.Second)
	killed.kill()
	for _, c := range there {
		// Presence times out 3 s after the kill, or after the takeover that it leads to.
		if seen := stays.awaitSeen(t, c.user); seen.Before(at) || seen.After(time.Now()) {
			t.Errorf("of the killed process: last seen %s, killed after %s", seen, at)
		}
	}

	for user := range left {
		wasSeen(stays, user)
	}
}
