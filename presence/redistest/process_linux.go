package redistest

import (
	"runtime"
	"syscall"
)

// live is the process's life, in a goroutine of its own: the kernel kills the
// child when the thread that started it ends, so that thread is kept.
func (p *process) live(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	p.wait(started)
}
