//go:build !linux

package machine

import "time"

// SinceBoot returns a time that goes on while the machine sleeps. Here it is the wall clock, which can be set.
func SinceBoot() time.Duration { return time.Duration(time.Now().UnixNano()) }
