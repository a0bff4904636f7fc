//go:build !linux || portable

package httppolicy

import (
	"net"
	"syscall"
	"time"
)

// limitSilence does nothing here: the system's keep-alive ends a dead connection.
func limitSilence(syscall.Conn, time.Duration) {}

// unreadBytes returns false, because not every system reports unread data.
func unreadBytes(net.Conn) bool { return false }
