//go:build !linux || portable

package httppolicy

import (
	"net"
	"time"
)

// limitSilence does nothing here: the system's keep-alive ends a dead connection.
func limitSilence(*net.TCPConn, time.Duration) {}

// unreadBytes reports false: not every system can tell.
func unreadBytes(net.Conn) bool { return false }
