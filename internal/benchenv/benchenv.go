//go:build linux

// Package benchenv starts Headcount on one core and its clients on another, for the programs that measure it. It needs
// taskset(1).
package benchenv

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// The cores of the server and of its clients.
const ServerCore, ClientCore = 0, 1

// Cores returns an error unless this process may use both.
func Cores() error {
	var cores unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cores); err != nil || !cores.IsSet(ServerCore) || !cores.IsSet(ClientCore) {
		return errors.New("cores 0 and 1 are needed, one for the server and one for its clients")
	}

	return nil
}

// On returns a command that runs on one core, with one thread for Go code.
func On(ctx context.Context, core int, program string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "taskset", append([]string{"-c", strconv.Itoa(core), program}, args...)...)
	cmd.Env = append(os.Environ(), "GOMAXPROCS=1")
	cmd.Stderr = os.Stderr

	// A server may shut down in order; after WaitDelay it is killed.
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = EndTime

	return cmd
}
