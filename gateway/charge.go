package gateway

import (
	"net/netip"
	"time"

	"headcount/counter/limit"
	"headcount/gateway/httppolicy"
	"headcount/gateway/websocket"
	"headcount/presence"
)

const (
	// A client may send this many frames a second, and this many at once: far
	// more than a page needs, and few enough to cost others little. Pings and
	// fragments count too, since each costs as much as a message.
	messageRate  = 500
	messageBurst = 2000

	// A client's lists may name this many pages and counters a second, and this many at
	// once: 25 subscribe messages with as many as it may have. A longer list is more work, so
	// a client that sends more is read more slowly; that is no error.
	nameRate  = 25 * presence.MaxPages
	nameBurst = 25 * presence.MaxPages

	// A client may name this many pages a second that the gateway does not have
	// yet, and at once as many as it may have and a few more. Each costs the store a call, and the
	// gateway keeps it for a while.
	newPageRate  = 20
	newPageBurst = presence.MaxPages + newPageRate

	// All connections of one address together, also those that have ended, and its calls may name
	// this many. Many people may share an address, and all of them come back after a
	// restart.
	addressPageRate  = 1_000
	addressPageBurst = 20_000

	// All clients of the gateway together may name this many.
	gatewayPageRate  = 5_000
	gatewayPageBurst = 100_000

	// A client that has sent too much is not read for restTime. So it does
	// not reach its twentieth error at once, and what it sends meanwhile waits in
	// its own memory and not in ours.
	throttleTime = 100 * time.Millisecond
)

// charge takes what a frame costs from the client's message rate. It reports
// whether the client may be served. The answer to a ping of ours is free.
func (c *conn) charge(kind byte) bool {
	switch kind {
	case websocket.Text, websocket.Binary:
		c.g.metrics.received.Add(1)
	case websocket.Pong:
		if c.awaitsPong.Swap(false) {
			return true
		}
	case websocket.Close:
		return true // there is no second one
	}
	return c.allow()
}

// chargeRead takes what one read costs where no frames are counted: on an event
// stream, and after the close frame to the client.
func (c *conn) chargeRead() {
	if (c.events || c.closing.Load() != open) && !c.allow() {
		c.throttle()
	}
}

// allow takes one message from the client's message rate.
func (c *conn) allow() bool {
	back, wait := limit.PerSecond(messageRate, messageBurst).Take(c.messagesRate, c.Now(), 1)
	if wait == 0 {
		c.messagesRate = back
	}
	return wait == 0
}

// admitNewTopics takes the topics that the gateway does not have yet from what the client may
// still name. It reports whether the client may; if not, nothing is taken from it.
func (c *conn) admitNewTopics(topics ...presence.Topic) bool {
	if len(topics) == 0 {
		return true
	}
	fresh := c.g.hub.Unwatched(topics)
	if fresh == 0 {
		return true
	}
	back, wait := limit.PerSecond(newPageRate, newPageBurst).Take(c.newTopicsRate, c.Now(), fresh)
	if wait > 0 || !c.g.newTopics.Admit(c.addr, fresh) {
		return false
	}
	c.newTopicsRate = back
	return true
}

// newTopics bounds how many topics that the gateway does not have yet one address, and all
// addresses together, may name.
type newTopics struct {
	ofAddress *httppolicy.RateLimiter
	ofAll     *httppolicy.RateLimiter // has one caller, which is everybody
}

func newNewTopics() *newTopics {
	return &newTopics{httppolicy.NewRateLimiter(addressPageRate, addressPageBurst), httppolicy.NewRateLimiter(gatewayPageRate, gatewayPageBurst)}
}

// Admit takes n new topics from what the address and everybody may still name. It reports whether
// they may.
func (t *newTopics) Admit(addr netip.Addr, n int) bool {
	now := time.Now()
	ok, _ := t.ofAddress.AllowN(httppolicy.Caller{Addr: addr}, n, now)
	if ok {
		ok, _ = t.ofAll.AllowN(httppolicy.Caller{}, n, now)
	}
	return ok
}

// chargeNames takes so many names from what the client's lists may name. If they are too many, the client
// rests until they would not have been.
func (c *conn) chargeNames(names int) {
	back, wait := limit.PerSecond(nameRate, nameBurst).Take(c.namesRate, c.Now(), names)
	c.namesRate = back
	if wait > 0 {
		c.throttleFor(wait)
	}
}

// rest stops reading from the client for a while.
func (c *conn) throttle() { c.throttleFor(throttleTime) }

func (c *conn) throttleFor(d time.Duration) {
	if c.throttledUntil == 0 {
		c.throttledUntil = c.Now() + d
		c.wire.ServeAfter(d)
	}
}

// resting reports whether the client is not read now. Without a poller it waits
// until the client may speak again.
func (c *conn) throttled() bool {
	if c.throttledUntil == 0 || c.wire.Closed() {
		return false
	}
	left := c.throttledUntil - c.Now()
	if left > 0 && c.wire.Polled() {
		return true
	}
	time.Sleep(left)
	c.throttledUntil = 0
	return false
}
