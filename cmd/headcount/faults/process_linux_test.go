package faults

import (
	"os/exec"
	"runtime"
	"syscall"
)

// live runs a process to its end. The kernel kills it when the thread that
// started it ends, so that thread is kept: no process outlives the tests.
func live(cmd *exec.Cmd, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	startAndWait(cmd, started)
}
