//go:build !linux || !amd64

package servertest

import (
	"errors"
	"os/exec"
	"time"
)

func startWithClock(*exec.Cmd, time.Duration) error {
	return errors.New("servertest: a clock that is wrong needs Linux on amd64")
}
