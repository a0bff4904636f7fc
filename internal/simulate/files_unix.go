//go:build unix

package simulate

import (
	"fmt"
	"syscall"
)

// enoughFiles raises the limit of open files to the hard limit and refuses a run
// that needs more.
func enoughFiles(need int) error {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("simulate: read the limit of open files: %w", err)
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return fmt.Errorf("simulate: raise the limit of open files: %w", err)
	}
	if uint64(need) > uint64(limit.Max) {
		return fmt.Errorf("%w: --users, --tabs: the run needs up to %d open files and may open %d: give smaller numbers or raise `ulimit -Hn`",
			ErrSettings, need, limit.Max)
	}
	return nil
}
