//go:build !portable

package httppolicy

import (
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// limitSilence makes the system close c when sent data is not acknowledged for d. No connection inherits that from its
// listener.
func limitSilence(c syscall.Conn, d time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	// Without this option the system ends the connection, too, only much later.
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
}

// unreadBytes reports whether c has data that the server has not read.
func unreadBytes(c net.Conn) bool {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }) // n stays 0 if c is closed
	return n > 0
}
