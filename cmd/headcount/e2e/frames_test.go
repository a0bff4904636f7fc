package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/coder/websocket"
)

func TestServerWelcome(t *testing.T) {
	t.Parallel()
	s := common(t)
	c := s.ws(t) // checks that the first frames are welcome and unread 0
	c.mu.Lock()
	w := c.frames[0]
	c.mu.Unlock()

	if w.HeartbeatMS != sharedPing.Milliseconds() {
		t.Errorf("heartbeat_ms %d, want the ping interval: %s", w.HeartbeatMS, w.text)
	}
	if user, signature, ok := strings.Cut(c.id, "."); !ok || user != c.user || signature == "" {
		t.Errorf("user %q is not id %q without its signature", c.user, c.id)
	}
	if o := s.ws(t); o.user == c.user {
		t.Error("two users with the same id")
	}

	c.silent()
	c.send(`{"type":"read"}`)
	if f := c.take("unread"); f.text != `{"type":"unread","count":0}` {
		t.Errorf("read was answered with %s", f.text)
	}
}

// A connection has at most 100 pages, each counted once, whether it joined or subscribed. A frame that exceeds the
// limit changes nothing.
func TestServerHundredPages(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	base := fresh(t)
	page := func(i int) string { return fmt.Sprintf("%s/%d", base, i) }
	var all []string
	for i := range 99 {
		all = append(all, page(i))
	}

	for _, p := range all[:49] {
		c.join(p)
		c.awaitCount(p, 1)
	}

	c.subscribe("*")
	c.subscribe(append(all[20:], all[60:]...)...) // known pages, and pages named twice, do not count twice
	c.awaitCount(page(98), 0)

	refused := func(p string) {
		t.Helper()
		f := c.await("a refusal", func(f frame) bool { return f.Type == "error" || f.isCount(p) })
		if f.Code != "too_many_pages" || f.Page != nil && *f.Page != p {
			t.Errorf("%s: %s", p, f.text)
		}
	}

	// 99 pages and the site are 100 topics: no page more.
	c.join(page(100))
	refused(page(100))

	c.unsubscribe(page(98))
	c.subscribe(page(97), page(101), page(102)) // one would fit, not both: nothing changes
	refused(page(102))

	for range 2 {
		c.join(page(101)) // the second time it is one of the 100 already
		c.awaitCount(page(101), 1)
	}

	c.leave(page(20)) // an earlier subscription keeps it
	c.awaitCount(page(20), 0)

	c.join(page(102))
	refused(page(102))

	// Without the subscription the page is gone, and its place is free.
	c.unsubscribe(page(20))
	c.join(page(102))
	c.awaitCount(page(102), 1)
}

// Good frames in between do not make the server forget errors, of whatever kind.
func TestServerTwentiethErrorCloses(t *testing.T) {
	t.Parallel()
	c := common(t).ws(t)
	bad := []struct{ frame, code string }{
		{`{`, "bad_json"}, {`{"type":"x"}`, "bad_type"}, {`{"type":"join","page":""}`, "bad_page"},
	}
	for i := range 19 {
		c.send(bad[i%3].frame)
		c.takeError(bad[i%3].code)
		c.silent()
	}

	c.send(`{`)
	c.takeError("bad_json")
	c.takeError("too_many_errors")
	c.takeClose(websocket.StatusPolicyViolation)
}
