// Package machine reports how much memory and how many open files this process may use,
// and tunes Go's use of memory. Every function may be called from any goroutine.
package machine

import (
	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/pbnjay/memory"
)

// unknown is the size in bytes that Memory assumes if the system does not report one.
const unknown = 1 << 30

// Memory returns the bytes of memory that this process may use: the limit of its cgroup
// or the memory of the machine, whichever is smaller. It returns 1 GiB if the system
// reports neither.
func Memory() uint64 {
	total := memory.TotalMemory()
	if total == 0 {
		total = unknown
	}

	// In a container the memory of the machine is not what this process may use.
	if limit, err := memlimit.FromCgroup(); err == nil && limit > 0 {
		total = min(total, limit)
	}

	return total
}
