//go:build !portable

package gateway

import (
	"runtime"
	"testing"

	"headcount/gateway/websocket"
	"headcount/internal/testkit"
)

// TestSilentConnectionsHaveNoGoroutine: neither silent connections nor those in the
// middle of a frame have one.
func TestSilentConnectionsHaveNoGoroutine(t *testing.T) {
	s := serveGateway(t, true, nil)
	const n = 100
	socket := func() *raw {
		r := s.socket("")
		r.write([]byte(masked(websocket.Text, heartbeatMsg) + masked(partText, "{")[:3]))
		r.expect(websocket.Text, heartbeatMsg)
		return r
	}
	all := []*raw{socket()}
	before := runtime.NumGoroutine()
	for range n {
		all = append(all, socket())
	}
	testkit.Eventually(t, "the goroutines of one connection", func() bool { return runtime.NumGoroutine() <= before+n/10 })
	for _, r := range all {
		_ = r.Close()
	}
	s.settles(0)
}
