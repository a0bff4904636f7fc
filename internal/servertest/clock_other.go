//go:build !linux || !amd64

package servertest

import (
	"errors"
	"os/exec"
	"time"
)

var errClock = errors.New("servertest: a clock that is wrong needs Linux on amd64")

func startWithClock(*exec.Cmd, time.Duration) error { return errClock }

// SetClock returns an error.
func (p *Process) SetClock(time.Duration) error { return errClock }
