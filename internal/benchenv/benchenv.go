//go:build linux

// Package benchenv runs the program and its clients on a core each, for the programs
// that measure it. It needs taskset(1).
package benchenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"headcount/internal/servertest"
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
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = EndTime
	return cmd
}

// EndTime bounds how long a process takes to end.
const EndTime = 10 * time.Second

// Serve starts the program as a server, with further flags, and waits until it is
// ready. The caller ends it.
func Serve(ctx context.Context, program string, flags ...string) (public, admin string, server *servertest.Process, err error) {
	public, admin = servertest.FreeAddr(), servertest.FreeAddr()
	args := append([]string{"serve", "--listen", public, "--admin-listen", admin, "--log-level", "error", "--shutdown-timeout", "2s"}, flags...)
	server = &servertest.Process{}
	if err := server.Start(On(ctx, ServerCore, program, args...)); err != nil {
		return "", "", nil, err
	}
	if err := servertest.Await(server, 20*time.Second, func(ctx context.Context) error { return servertest.Ready(ctx, admin) }); err != nil {
		server.End(EndTime)
		return "", "", nil, fmt.Errorf("the server is not ready: %w", err)
	}
	return public, admin, server, nil
}
