package e2e

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"headcount/internal/redistest"
	"headcount/internal/testkit"
)

// hookSecret is a secret of Standard Webhooks, and hookKey is its key.
const hookSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

var hookKey, _ = base64.StdEncoding.DecodeString(strings.TrimPrefix(hookSecret, "whsec_"))

// hooked is an event as it was received.
type hooked struct {
	ID, Type, Timestamp, Site, Page, Counter, User string
	Count, Value, Threshold                        *int
	Day, Version                                   string
}

// receiver is a server that receives webhooks.
type receiver struct {
	*httptest.Server
	t *testing.T

	mu     sync.Mutex
	status int // of its answers
	tries  map[string]int
	bodies map[string]string // by id of the message
	events []hooked          // each id once
	known  map[string]bool
}

func newReceiver(t *testing.T) *receiver {
	r := &receiver{
		t: t, status: http.StatusNoContent, tries: map[string]int{}, bodies: map[string]string{},
		known: map[string]bool{},
	}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)

	return r
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	id, at := req.Header.Get("webhook-id"), req.Header.Get("webhook-timestamp")
	mac := hmac.New(sha256.New, hookKey)
	fmt.Fprintf(mac, "%s.%s.%s", id, at, body)
	want := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	if err != nil || id == "" || req.Header.Get("webhook-signature") != want {
		r.t.Errorf("%v: the signature of %s with %v is not %s", err, body, req.Header, want)
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	if was, again := r.bodies[id]; again && was != string(body) {
		r.t.Errorf("%s came as %s and as %s", id, was, body)
	}

	r.bodies[id] = string(body)
	r.tries[id]++
	w.WriteHeader(r.status)
	if r.status/100 != 2 {
		return
	}

	var m struct {
		Type, Timestamp string
		Data            struct{ Events []hooked }
	}
	if err := json.Unmarshal(body, &m); err != nil || m.Type != "events" || len(m.Data.Events) == 0 {
		r.t.Errorf("%v in %s", err, body)
	}

	for _, e := range m.Data.Events {
		if !r.known[e.ID] {
			r.known[e.ID] = true
			r.events = append(r.events, e)
		}
	}
}

func (r *receiver) answers(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.status = status
}

// received returns the types of the events about a page, counter or user, in order. Two webhooks have no common order.
func (r *receiver) received(name string) (types []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.events {
		if e.Page == name || e.Counter == name || e.User == name {
			types = append(types, e.Type)
		}
	}

	return types
}

// await waits until exactly these events have been received, in any order.
func (r *receiver) await(name string, types ...string) {
	r.t.Helper()
	slices.Sort(types)
	testkit.Eventually(r.t, fmt.Sprint(name, ": ", types), func() bool {
		return slices.Equal(slices.Sorted(slices.Values(r.received(name))), types)
	})
}

func (s *server) hold(t *testing.T, method, user, page string) {
	t.Helper()
	do(t, method, s.url+"/-/users/"+user+"/pages/"+url.PathEscape(page), "", withKey).counter(t)
}

func TestClockWebhooks(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	r.answers(http.StatusInternalServerError)
	dir := t.TempDir()
	flags := []string{
		"--webhook=page:news/*=" + r.URL + "/a?b=c", "--webhook=page:news/*>1=" + r.URL,
		"--webhook=page:top>peak=" + r.URL, "--webhook=counter:votes:*>2=" + r.URL,
		"--webhook=page@shop:news/*=" + r.URL + "/shop", "--site=main=http://main.test", "--site=shop=http://shop.test",
		"--webhook-secret=" + hookSecret, "--webhook-settle=100ms", "--leave-grace=0s", "--api-key=" + apiKey,
		"--data-dir=" + dir,
	}

	s := start(t, flags...)
	s.hold(t, "PUT", "ann", "news/0")
	testkit.Eventually(t, "an attempt", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.tries) > 0
	})

	// An event that no receiver has accepted outlives the process.
	s.kill()

	r.answers(http.StatusOK)
	s = start(t, flags...)

	testkit.Eventually(t, "the event", func() bool { return len(r.received("news/0")) > 0 })
	r.mu.Lock()
	e := r.events[0]
	again := 0
	for _, n := range r.tries {
		again = max(again, n)
	}
	r.mu.Unlock()
	if e.Type != "page.occupied" || e.Site != "main" || e.Count == nil || *e.Count != 1 || e.Version == "" ||
		e.Timestamp == "" || again < 2 {
		t.Errorf("after %d tries came %+v; want page.occupied of main with the count 1, after 2 or more", again, e)
	}

	// Each condition of a webhook: the first user, a threshold, a peak, and the last user.
	s.hold(t, "PUT", "ann", "news/1")
	s.hold(t, "PUT", "bob", "news/1")
	s.hold(t, "PUT", "ann", "top")
	r.await("news/1", "page.occupied", "page.over")

	r.await("top", "page.peak")

	s.hold(t, "DELETE", "ann", "news/1")
	s.hold(t, "DELETE", "bob", "news/1")
	r.await("news/1", "page.occupied", "page.over", "page.vacated")

	for range 4 {
		s.call(t, "POST", "votes:x/increment", "").lasting(t)
	}
	r.await("votes:x", "counter.over")

	do(t, "PUT", s.url+"/-/users/ann/pages/news%2F3?site=shop", "", withKey).counter(t)
	r.await("news/3", "page.occupied", "page.occupied") // from the hook of all sites, and from the hook of one
	r.mu.Lock()
	for _, e := range r.events {
		if e.Page == "news/3" && e.Site != "shop" {
			t.Errorf("an event of another site than shop: %+v", e)
		}
	}
	r.mu.Unlock()
}

// A user comes online once, whatever tabs and holds follow, and goes offline once, when the last of them has ended. A
// reload is neither, nor is a restart of the server for users who come back.
func TestServerWebhooksOfUsers(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	dir := t.TempDir()
	flags := []string{
		"--webhook=user:*=" + r.URL, "--webhook=user@shop:ann=" + r.URL + "/shop",
		"--site=main=http://main.test", "--site=shop=http://shop.test",
		"--webhook-secret=" + hookSecret, "--webhook-settle=5s", "--leave-grace=0s", "--presence-timeout=3s",
		"--heartbeat-interval=500ms", "--api-key=" + apiKey, "--data-dir=" + dir,
	}

	s := start(t, flags...)
	one, watches := s.ws(t), s.ws(t)
	watches.subscribe("p")
	tab := s.again(t, one)
	for i, c := range []*client{one, tab} {
		c.join("p")
		c.awaitCount("p", 1)
		c.join(fmt.Sprint("q", i))
	}

	s.sse(t, "/p/counter/events?join=1")
	s.hold(t, "PUT", "ann", "p")
	s.hold(t, "PUT", "ann", "q")
	do(t, "PUT", s.url+"/-/users/ann/pages/p?site=shop", "", withKey).counter(t)
	r.await("ann", "user.online", "user.online", "user.online") // on two sites, from two webhooks on the shop
	r.await(one.user, "user.online")
	testkit.Eventually(t, "the user of the stream", func() bool { return len(r.online()) == 4 })

	// A reload.
	one.close()
	tab.close()
	one = s.again(t, one)
	one.join("p")
	one.await("a count", func(f frame) bool { return f.Type == "count" })

	s.hold(t, "DELETE", "ann", "p")
	for _, end := range []string{"SIGTERM", "kill -9"} {
		t.Log("a restart after " + end)
		ends[end](t, s)

		s = start(t, flags...)
		one = s.again(t, one)
		one.join("p")
		one.await("a count", func(f frame) bool { return f.Type == "count" })
	}

	// The holds have ended.
	r.await("ann", "user.online", "user.online", "user.online", "user.offline", "user.offline", "user.offline")

	one.leave("p")
	r.await(one.user, "user.online", "user.offline")
	one.join("p")
	r.await(one.user, "user.online", "user.offline", "user.online")

	if types := r.received(watches.user); len(types) > 0 {
		t.Errorf("about a user who only watches: %v", types)
	}

	// The file must not reveal who was there.
	s.end()
	raw, err := os.ReadFile(filepath.Join(dir, "webhooks.db"))
	if err != nil || bytes.Contains(raw, []byte(one.user)) {
		t.Errorf("the file has the id of a user in the clear, %v", err)
	}
}

// online returns the users who came online.
func (r *receiver) online() map[string]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	users := map[string]bool{}
	for _, e := range r.events {
		if e.Type == "user.online" {
			users[e.Site+"/"+e.User] = true
		}
	}

	return users
}

// Users who were connected to a killed process, or whose partition it owned, go offline. The other processes report
// that.
func TestClockWebhooksOfUsersInACluster(t *testing.T) {
	t.Parallel()
	r := newReceiver(t)
	redis := redistest.Start(t).URL()
	flags := []string{
		"--webhook=user:*=" + r.URL, "--webhook-secret=" + hookSecret, "--webhook-settle=1s", "--leave-grace=200ms",
		"--presence-timeout=3s", "--heartbeat-interval=500ms",
		"--api-key=" + apiKey, "--id-secret=0123456789abcdef0123456789abcdef",
		"--cluster-secret=0123456789abcdef0123456789abcdef",
	}

	all := startAll(t,
		overRedis(redis, append(flags, "--roles=gateway")...), overRedis(redis, append(flags, "--roles=gateway")...),
		overRedis(redis, append(flags, "--roles=presence")...),
		overRedis(redis, append(flags, "--roles=presence,dispatcher")...))

	var users []string
	var stay []*client
	for i := range 20 {
		c := all[0].ws(t)
		c.join(fmt.Sprint("p", i))
		c.awaitCount(fmt.Sprint("p", i), 1)
		if i%2 == 0 { // a tab at the other gateway
			tab := all[1].again(t, c)
			tab.join("tabs")
			tab.await("a count", func(f frame) bool { return f.Type == "count" })
			stay = append(stay, tab)
		} else {
			users = append(users, c.user)
		}
	}

	for _, user := range users {
		r.await(user, "user.online")
	}

	// One gateway and one presence node are killed. Users with a tab at the other gateway stay online.
	all[0].kill()
	all[2].kill()
	for _, user := range users {
		r.await(user, "user.online", "user.offline")
	}

	for _, c := range stay {
		r.await(c.user, "user.online")
		c.close()
	}

	for _, c := range stay {
		r.await(c.user, "user.online", "user.offline")
	}
}
