package e2e

import (
	"strings"
	"testing"
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
