//go:build !portable

package gateway

import (
	"encoding/binary"
	"runtime"
	"testing"
	"time"

	"headcount/gateway/pusher"
	"headcount/gateway/websocket"
	"headcount/internal/testkit"
)

// TestServerSilentConnectionsHaveNoGoroutine: a silent connection has no goroutine, not even in the middle of a frame.
func TestServerSilentConnectionsHaveNoGoroutine(t *testing.T) {
	s := serveGateway(t, true, nil)
	const n = 100

	socket := func() *raw {
		r := s.socket("")
		r.write([]byte(masked(websocket.Text, heartbeatMsg) + masked(partText, "{")[:3]))
		r.expect(websocket.Text, heartbeatMsg)

		return r
	}

	// The first connection starts what all connections share.
	all := []*raw{socket()}
	before := runtime.NumGoroutine()
	for range n {
		all = append(all, socket())
	}

	testkit.Eventually(t, "the goroutines of one connection",
		func() bool { return runtime.NumGoroutine() <= before+n/10 })

	for _, r := range all {
		_ = r.Close()
	}
	s.settles(0)
}

// A client that does not answer pings is closed like any other. Its close frame says why, if it can be sent at all: a
// write that has to wait would not end before the connection does.
func TestServerPusherThatIsSilent(t *testing.T) {
	t.Parallel()
	s := serveGateway(t, true, func(cfg *Config) {
		forPusher(cfg)
		cfg.PingInterval, cfg.PongTimeout = 100*time.Millisecond, time.Second // a busy machine answers late
	})

	watcher := s.socket("")
	deaf := s.pusher("")
	deaf.enters("p")
	deaf.awaitsCount("p", 1)
	deaf.expect(websocket.Ping, "") // this ping gets no answer

	for opcode := byte(0); opcode != websocket.Close; {
		var payload []byte
		var err error
		opcode, payload, err = deaf.frame()
		if err != nil {
			t.Fatal(err)
		}

		if opcode == websocket.Close && int(binary.BigEndian.Uint16(payload)) != pusher.CodePongTimeout {
			t.Errorf("closed with %q, want %d", payload, pusher.CodePongTimeout)
		}
	}

	deaf.expectEnd()
	_ = watcher.Close()
	s.settles(0)
}
