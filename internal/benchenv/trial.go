//go:build linux

package benchenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"headcount/internal/servertest"
)

// EndTime bounds how long a process takes to end.
const EndTime = 10 * time.Second

// A Trial is one run of a measurement. It stands in for a *testing.T, so that helpers of tests can start their servers
// in it: it ends them when it is over, and panics where a test would fail.
type Trial struct {
	testing.TB
	ctx      context.Context
	cleanups []func()
}

// Try runs a trial and ends the processes that it started.
func Try(ctx context.Context, run func(*Trial)) (err error) {
	t := &Trial{ctx: ctx}
	defer func() {
		// Helpers of tests report failures by the methods below, which panic.
		if failed := recover(); failed != nil {
			err = fmt.Errorf("%v", failed)
		}

		// In reverse order, as in a test: a server ends before its folder is removed.
		for _, c := range slices.Backward(t.cleanups) {
			c()
		}
	}()

	run(t)
	return ctx.Err()
}

func (t *Trial) Helper()                   {}
func (t *Trial) Context() context.Context  { return t.ctx }
func (t *Trial) Cleanup(f func())          { t.cleanups = append(t.cleanups, f) }
func (t *Trial) Errorf(f string, a ...any) { panic(fmt.Errorf(f, a...)) }
func (t *Trial) Fatalf(f string, a ...any) { panic(fmt.Errorf(f, a...)) }
func (t *Trial) Fatal(a ...any)            { panic(errors.New(fmt.Sprint(a...))) }
func (t *Trial) TempDir() string           { return t.Folder("") }

// Folder creates a folder below dir ("": the system's folder of temporary files), which is removed after the trial.
func (t *Trial) Folder(dir string) string {
	name, err := os.MkdirTemp(dir, "headcount-trial-")
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = os.RemoveAll(name) })
	return name
}

// Start starts a command, which ends with the trial.
func (t *Trial) Start(cmd *exec.Cmd) *servertest.Process {
	p := &servertest.Process{}
	if err := p.Start(cmd); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { p.End(EndTime) })
	return p
}

// A Server is a running `headcount serve`. The caller may end it before the trial is over.
type Server struct {
	*servertest.Process
	Addr, Admin string // host:port of --listen and --admin-listen
}

// Serve starts the program as a server, with further flags, and waits until it is ready.
func (t *Trial) Serve(program string, flags ...string) Server {
	s := Server{Addr: servertest.FreeAddr(), Admin: servertest.FreeAddr()}
	args := append([]string{
		"serve", "--listen", s.Addr, "--admin-listen", s.Admin, "--log-level", "error", "--shutdown-timeout", "2s",
	}, flags...)
	s.Process = t.Start(On(t.ctx, ServerCore, program, args...))

	ready := func(ctx context.Context) error { return servertest.Ready(ctx, s.Admin) }
	if err := servertest.Await(s.Process, 20*time.Second, ready); err != nil {
		t.Fatalf("the server is not ready: %w", err)
	}

	return s
}
