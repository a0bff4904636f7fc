//go:build !linux

package servertest

import (
	"io"
	"os/exec"
)

func live(cmd *exec.Cmd, begin func() error, started chan<- error) { startAndWait(cmd, begin, started) }

// children returns none, because this system does not list them. They end by themselves when they notice that their
// parent is gone.
func children(int) []int { return nil }

// claim cannot keep a port from other processes on this system. Two tests rarely choose the same one.
func claim(int) io.Closer { return io.NopCloser(nil) }

func holdForks() (release func()) { return func() {} }
