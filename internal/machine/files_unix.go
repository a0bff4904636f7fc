//go:build unix && !portable

package machine

import "syscall"

// OpenFiles returns how many files and sockets this process may have open. ok is false
// if the system has no such limit, or does not report it.
func OpenFiles() (limit uint64, ok bool) {
	var files syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files); err != nil {
		return 0, false
	}

	// On FreeBSD Cur is signed.
	return uint64(files.Cur), true
}
