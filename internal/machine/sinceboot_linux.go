package machine

import (
	"time"

	"golang.org/x/sys/unix"
)

// SinceBoot returns the time since the machine started, including the time for which it slept. Nobody can set this
// clock.
func SinceBoot() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		panic(err) // cannot happen: every kernel since 2.6.39 has this clock
	}

	return time.Duration(t.Nano())
}
