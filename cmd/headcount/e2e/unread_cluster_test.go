package e2e

import (
	"net/url"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"headcount/presence/redistest"
	"headcount/servertest"
)

// startCluster starts two processes with all roles, and these flags, over a Redis.
func startCluster(t *testing.T, redis string, flags ...string) (a, b *server) {
	t.Helper()
	flags = append(flags[:len(flags):len(flags)], "--redis="+redis)
	return startBoth(t, flags, flags)
}

// startBoth starts two processes at once.
func startBoth(t *testing.T, flags ...[]string) (a, b *server) {
	t.Helper()
	var both [2]*server
	var errs [2]error
	var wg sync.WaitGroup
	for i := range both {
		wg.Go(func() {
			both[i], errs[i] = launch(append(flags[i][:len(flags[i]):len(flags[i])], "--cluster-listen="+servertest.FreeAddr(), "--api-key="+apiKey, "--update-interval=10ms", "--leave-grace=300ms")...)
		})
	}
	wg.Wait()
	for i, s := range both {
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		t.Cleanup(func() {
			if problem := s.end(); problem != "" {
				t.Error(problem)
			}
		})
	}
	return both[0], both[1]
}

func TestUnreadOverRedis(t *testing.T) {
	t.Parallel()
	for name, open := range map[string]func() (url string){
		"one server":    func() string { return redistest.Start(t).URL() },
		"three masters": func() string { return redistest.StartCluster(t, 3, 0).URL() },
	} {
		t.Run(name, func(t *testing.T) {
			a, b := startCluster(t, open())
			page := fresh(t)
			one := a.ws(t)
			two := b.again(t, one)
			a.follow(t, one.as(), page)
			b.change(t, page, "", "Idempotency-Key: k")
			a.change(t, page, "", "Idempotency-Key: k") // every gateway knows the key
			one.awaitUnread(1)
			two.awaitUnread(1)
			two.send(`{"type":"read"}`)
			one.awaitUnread(0)
			two.awaitUnread(0)
			for range 20 {
				a.change(t, page, `{"by":`+quoted(one.user)+`}`)
			}
			b.change(t, page, `{"by":"somebody else"}`)
			for _, c := range []*client{one, two} {
				f := c.take("the one that counts")
				for c == two && f.Type == "unread" && *f.Count == 0 { // the change to 0, and the answer to read
					f = c.take("the one that counts")
				}
				if f.Type != "unread" || *f.Count != 1 {
					t.Errorf("own changes were told: %s", f.text)
				}
			}
			one.silent()
			for _, s := range []*server{a, b} {
				s.wantUnread(t, one.as(), 1)
			}

			// A user who is present through one gateway is present for all.
			b.put(t, "/-/me/follows/"+url.PathEscape(page), `{"away_only":true}`, one.as()).noContent(t)
			two.join(page)
			two.awaitCount(page, 1)
			a.settled(t, page, one, 1)
			a.change(t, page, "")
			one.silent()
			b.wantUnread(t, one.as(), 1)
			two.close()
			time.Sleep(time.Second)
			b.change(t, page, "")
			one.awaitUnread(2)

			// A gateway that is killed leaves nobody present.
			last := b.dial(t, dialer{query: "id=" + one.id, unread: 2})
			last.join(page)
			last.awaitCount(page, 1)
			b.settled(t, page, one, 2)
			b.signal(syscall.SIGKILL)
			b.killed(t)
			eventually(t, "a gateway that knows that the other is gone", func() bool {
				return strings.Contains(a.log.String(), "a process is gone")
			})
			a.change(t, page, "")
			one.awaitUnread(3)
		})
	}
}

func TestUnreadWhileRedisIsAway(t *testing.T) {
	t.Parallel()
	redis := redistest.Start(t, redistest.Durable...)
	a, _ := startCluster(t, redis.URL())
	page := fresh(t)
	c := a.ws(t)
	a.follow(t, c.as(), page)
	a.change(t, page, "")
	c.awaitUnread(1)
	redis.Kill()
	eventually(t, "a 503", func() bool { return a.get(t, "/-/me/unread", c.as()).status == 503 })
	a.get(t, "/-/me/unread", c.as()).problem(t, 503)
	a.get(t, "/-/me/follows", c.as()).problem(t, 503)
	a.put(t, "/-/me/follows/q", "", c.as()).problem(t, 503)
	a.put(t, "/-/me/unread", `{"action":"reset"}`, c.as()).problem(t, 503)
	do(t, "POST", a.url+"/p/changes", "", withKey).problem(t, 503)
	c.send(`{"type":"read"}`)
	c.await("the last known count", func(f frame) bool { return f.Type == "unread" && *f.Count == 1 })
	again := a.dial(t, dialer{query: "id=" + c.id, unread: 1}) // this process knows the user
	redis.Restart(t)
	eventually(t, "the same as before", func() bool {
		r := a.get(t, "/-/me/unread", c.as())
		return r.status == 200 && r.unread(t).Count == 1
	})
	eventually(t, "a change that is taken", func() bool {
		return do(t, "POST", a.url+"/"+url.PathEscape(page)+"/changes", "", withKey, "Idempotency-Key: once").status == 204
	})
	c.awaitUnread(2)
	again.awaitUnread(2)
}
