package gateway

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// limitSilence ends c when what was sent is not acknowledged for d.
func limitSilence(c *net.TCPConn, d time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
}
