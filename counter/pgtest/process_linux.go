package pgtest

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
)

// live is the process's life, in a goroutine of its own: the kernel kills the
// child when the thread that started it ends, so that thread is kept.
func (p *process) live(started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	p.wait(started)
}

// children are the processes that pid started: every connection has one.
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
