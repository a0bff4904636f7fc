package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// Redis comes back with older data, and assigns versions again that had other contents.
func TestClockUnreadCountsAreRightAfterRedisWasRestored(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	s := startWithKey(t, overRedis(redis.URL())...)
	tab := s.ws(t)

	page := fresh(t)
	made := 0

	changes := func(n int) {
		for range n {
			made++
			testkit.Eventually(t, "a change", func() bool { // a try may succeed although its answer is 503
				a, err := try("POST", s.url+"/"+page+"/changes", "", withKey, fmt.Sprint("Idempotency-Key: ", made))
				return err == nil && a.status == http.StatusNoContent
			})
		}
	}

	read := func(n int) {
		tab.awaitUnread(n)
		tab.send(`{"type":"read"}`)
		tab.awaitUnread(0)
	}

	s.follow(t, tab.as(), page)
	changes(1)
	read(1)

	// The changes after the snapshot are lost, but the reader has seen them.
	redis.Do(t, "SAVE")
	changes(3)
	read(3)

	redis.Restart(t)
	changes(3)
	tab.awaitUnread(3)

	testkit.Within(t, 10*time.Second, "GET says so, too", func() bool {
		a := s.get(t, "/-/me/unread", tab.as())
		return a.status == http.StatusOK && a.unread(t).Count == 3
	})

	// A new tab agrees with the old one.
	third := s.dial(t, dialer{query: "id=" + tab.id, unread: 3})
	third.send(`{"type":"read"}`)
	tab.awaitUnread(0)

	changes(1)
	tab.awaitUnread(1)
	third.awaitUnread(1)
}

func TestClockCountsAreStaleUntilARestoredRedisIsRight(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t)
	all := startAll(t, overRedis(redis.URL(), "--update-interval=10ms"), overRedis(redis.URL(), "--roles=gateway"))

	page := fresh(t)

	arrive := func(n int) {
		for range n {
			all[0].ws(t).join(page)
		}
	}

	look := func() (n int, fresh bool) {
		var c struct {
			Count int
			Stale bool
		}
		a := all[1].get(t, "/"+page+"/counter") // nobody subscribes to the page there
		if a.status == http.StatusServiceUnavailable {
			return 0, false
		}

		if err := json.Unmarshal([]byte(a.body), &c); err != nil {
			t.Fatal(err, a.body)
		}

		return c.Count, !c.Stale
	}

	arrive(8)
	testkit.Eventually(t, "8 users", func() bool {
		n, _ := look()
		return n == 8
	})

	// The snapshot has 8 users: no gateway may show 8 as a fresh count later.
	redis.Do(t, "SAVE")
	arrive(12)
	testkit.Eventually(t, "20 users", func() bool {
		n, _ := look()
		return n == 20
	})

	redis.Kill()
	testkit.Eventually(t, "Redis is away", func() bool {
		_, fresh := look()
		return !fresh
	})

	redis.Restart(t)
	wrong := 0
	testkit.Within(t, 10*time.Second, "20 users again", func() bool {
		n, fresh := look()
		if fresh && n != 20 {
			wrong++
		}
		return fresh && n == 20
	})

	if wrong > 0 {
		t.Errorf("%d answers said something else, and not that they are stale", wrong)
	}
}

func TestClockPagesRememberOverARestartOfRedis(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, redistest.Durable...)
	s := start(t, overRedis(redis.URL(), "--page-stats=1h", "--leave-grace=0s", "--update-interval=10ms")...)
	page := fresh(t)

	stays := s.ws(t)
	stays.join(page)

	for range 9 {
		leaves := s.ws(t)
		leaves.join(page)
		defer leaves.close()
	}
	stays.awaitCount(page, 10)

	another := s.ws(t)
	another.join(page)
	stays.awaitCount(page, 11)

	another.leave(page)
	stays.awaitCount(page, 10)

	peak := func(when string) {
		testkit.Eventually(t, "a peak of 11 "+when, func() bool { // the last minute is written within a second
			is := s.stats(t, "/"+page+"/stats?last=10m&step=1m")
			most, _ := is.sum()
			return is.Peak.Count == 11 && most == 11 && is.Now == 10
		})
	}

	peak("before")
	redis.Restart(t)
	testkit.Eventually(t, "the counts are complete again", func() bool {
		for _, path := range []string{"/" + page + "/counter", "/*/counter"} {
			var c struct {
				Count int
				Stale bool
			}
			a := s.get(t, path)
			if json.Unmarshal([]byte(a.body), &c) != nil || c.Stale || c.Count < 10 {
				return false
			}
		}

		return true
	})

	// Whoever writes everything anew does so a little later.
	for end := time.Now().Add(4 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		peak("after")
	}
}
