//go:build !linux

package gateway

import (
	"net"
	"time"
)

// limitSilence leaves it to the system's keep-alive.
func limitSilence(*net.TCPConn, time.Duration) {}

// unread cannot be told everywhere.
func unreadBytes(net.Conn) bool { return false }
