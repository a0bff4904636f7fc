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

// live runs the program to its end. The kernel kills it when the thread that
// started it ends, so this goroutine keeps the thread until then.
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

// claim keeps a port from other processes until what it returns is closed or this
// process ends; nil when another has it. The kernel gives each abstract name of a
// socket once.
func claim(port int) io.Closer {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@headcount-test-port-" + strconv.Itoa(port), Net: "unix"})
	if err != nil {
		return nil
	}

	return l
}

// holdForks keeps this process from starting others until release: a child has the parent's sockets, also closed ones,
// until it runs its program.
func holdForks() (release func()) {
	syscall.ForkLock.RLock()
	return syscall.ForkLock.RUnlock
}
