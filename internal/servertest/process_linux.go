package servertest

import (
	"bytes"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
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

// children are the processes that pid started and that still run.
func children(pid int) []int {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	var pids []int
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // it ended meanwhile
		}
		// pid (name) state parent …; a name may hold anything, also a bracket.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		if len(fields) < 2 || string(fields[1]) != strconv.Itoa(pid) {
			continue
		}
		if child, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, child)
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
