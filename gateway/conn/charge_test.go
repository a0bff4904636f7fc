package conn

import (
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"headcount/gateway/fanout"
	"headcount/gateway/identity"
	"headcount/gateway/websocket"
)

// taking is a connection whose client takes all that it is sent.
type taking struct{ net.Conn }

func (taking) Write(p []byte) (int, error)      { return len(p), nil }
func (taking) SetWriteDeadline(time.Time) error { return nil }

// A client's answer to a ping of the gateway is free, even when the client has used up its rate.
func TestPongToOurPingIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := fanout.New(fanout.Config{
			Shards: 1, Buckets: 1, Interval: time.Second, Ping: time.Minute, Pong: time.Minute,
		})
		c := New(Config{Hub: hub, Group: &sync.WaitGroup{}}).newConn(taking{}, identity.Identity{}, nil)

		for range 3 {
			synctest.Wait() // until the last write has ended
			if !c.Ping() {
				t.Fatal("no ping was sent")
			}
			if !c.charge(websocket.Pong) {
				t.Fatal("the pong that answers a ping was charged")
			}
		}

		before := c.messagesRate
		c.charge(websocket.Pong)
		if c.messagesRate <= before {
			t.Fatalf("an unasked pong was free: the rate is used up until %s, then until %s", before, c.messagesRate)
		}
	})
}
