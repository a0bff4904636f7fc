package conn

import (
	"time"

	"headcount/gateway/bounds"
	"headcount/gateway/websocket"
	"headcount/presence"
)

// throttleTime is how long the messages of a client that has sent too much are not read. So the client does not
// reach its twentieth error at once, and what it sends in the meantime waits in its own memory, not in ours.
const throttleTime = 100 * time.Millisecond

// charge charges a frame to the client's message rate. It reports whether the frame may be
// served. The answer to a ping of this gateway is free.
func (c *conn) charge(kind byte) bool {
	switch kind {
	case websocket.Text, websocket.Binary:
		c.all.metrics.received.Add(1)
	case websocket.Pong:
		if c.awaitsPong.Swap(false) {
			return true
		}
	case websocket.Close:
		return true // no frame is served after a close frame
	}

	return c.allow()
}

// chargeRead charges one read to the client's message rate where no frames are counted: on
// an event stream, and after the close frame to the client.
func (c *conn) chargeRead() {
	unframed := c.speech == stream || c.closing.Load() != open
	if unframed && !c.allow() {
		c.throttle()
	}
}

// allow takes one message from the client's message rate.
func (c *conn) allow() bool {
	back, wait := bounds.Messages.Take(c.messagesRate, c.Now(), 1)
	// A refused frame is not charged, or a client that goes on sending would never be served again.
	if wait == 0 {
		c.messagesRate = back
	}

	return wait == 0
}

// admitNewTopics charges the topics that are new to the gateway to the rates of the client, its
// address and the gateway, and reports whether all of them allow it. If not, the client's own
// rate is not charged.
func (c *conn) admitNewTopics(topics ...presence.Topic) bool {
	if len(topics) == 0 {
		return true
	}

	// A topic that somebody here follows already costs the store nothing.
	fresh := c.all.cfg.Hub.Unwatched(topics)
	back, wait := bounds.NewTopics.Take(c.newTopicsRate, c.Now(), fresh)
	if wait > 0 {
		return false
	}

	// The client's own rate comes first, so that what it refuses is not charged to the address, which others share.
	refusal := bounds.Admit(bounds.Caller{Addr: c.addr}, fresh, c.all.cfg.NewTopics...)
	if refusal == nil {
		c.newTopicsRate = back
	}

	return refusal == nil
}

// chargeNames charges names in lists to the client. If they are too many, the client is throttled until the
// rate allows them.
func (c *conn) chargeNames(names int) {
	back, wait := bounds.Names.Take(c.namesRate, c.Now(), names)
	c.namesRate = back

	// This list is served all the same: the client waits afterwards, and so pays for it.
	if wait > 0 {
		c.throttleFor(wait)
	}
}

// throttle stops reading from the client for throttleTime.
func (c *conn) throttle() { c.throttleFor(throttleTime) }

func (c *conn) throttleFor(d time.Duration) {
	// Otherwise a timer is running already.
	if c.throttledUntil == 0 {
		c.throttledUntil = c.Now() + d
		c.wire.ServeAfter(d)
	}
}

// throttled reports whether the client is throttled. Without a poller it waits until the
// throttling ends, and returns false.
func (c *conn) throttled() bool {
	if c.throttledUntil == 0 || c.wire.Closed() {
		return false
	}

	left := c.throttledUntil - c.Now()
	if left > 0 && c.wire.Polled() {
		return true
	}

	// A wire without a poller has this goroutine to itself, so it may wait. With one, nothing is left to wait for.
	time.Sleep(left)
	c.throttledUntil = 0

	return false
}
