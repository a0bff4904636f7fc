package node

import (
	"time"

	"headcount/internal/setting"
)

// CheckTimes refuses times with which a user could be removed while still connected. The
// presence timeout must last for three heartbeats of a gateway, since datagrams get lost,
// and must be longer than a connection's grace. The error is a *setting.Error.
func CheckTimes(timeout, heartbeat, grace time.Duration) error {
	switch {
	case timeout/3 < heartbeat: // the product might overflow
		return setting.Errorf("presence-timeout",
			"%s is shorter than 3 heartbeats of %s; raise it, or lower --heartbeat-interval", timeout, heartbeat)
	case grace >= timeout:
		return setting.Errorf("leave-grace",
			"%s is not shorter than the --presence-timeout of %s; lower it, or raise the timeout", grace, timeout)
	}

	return nil
}

const holdTimeouts = 3 // presence timeouts that a hold lasts

// HoldTime returns how long a user's hold on a page lasts unless it is renewed.
func HoldTime(timeout time.Duration) time.Duration { return holdTimeouts * timeout }
