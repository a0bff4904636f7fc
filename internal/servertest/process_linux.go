package servertest

import (
	"io"
	"net"
	"os/exec"
	"runtime"
	"strconv"
	"syscall"

	"github.com/prometheus/procfs"
)

// live runs the program to its end. The kernel kills the program when the thread that started it ends, so this
// goroutine keeps the thread.
func live(cmd *exec.Cmd, begin func() error, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}

	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	startAndWait(cmd, begin, started)
}

// children returns the processes that pid started and that still run.
func children(pid int) []int {
	all, _ := procfs.AllProcs()
	var pids []int

	for _, p := range all {
		if stat, err := p.Stat(); err == nil && stat.PPID == pid { // an error: it ended meanwhile
			pids = append(pids, p.PID)
		}
	}

	return pids
}

// claim keeps a port from other processes until the returned socket is closed or this process ends. It returns nil when
// another process has the port: the kernel gives each abstract name of a socket only once.
func claim(port int) io.Closer {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@headcount-test-port-" + strconv.Itoa(port), Net: "unix"})
	if err != nil {
		return nil
	}

	return l
}

// holdForks keeps this process from starting others until release. Until a new process runs its program, it has all of
// its parent's sockets, even those that the parent has closed since.
func holdForks() (release func()) {
	syscall.ForkLock.RLock()
	return syscall.ForkLock.RUnlock
}
