package machine

import (
	"os"
	"runtime/metrics"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Usage returns the CPU time of all threads of this process, in seconds, and its resident memory in bytes, as the
// system reports them.
func Usage() (cpu float64, memory int64) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err == nil {
		cpu = time.Duration(used.Utime.Nano() + used.Stime.Nano()).Seconds()
	}

	return cpu, residentMemory()
}

// residentMemory returns the resident memory in bytes. Only Linux reports it in a file;
// elsewhere it is the memory that Go has obtained from the system and not returned.
func residentMemory() int64 {
	if text, err := os.ReadFile("/proc/self/statm"); err == nil { // size resident shared …, in pages
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			if pages, err := strconv.ParseInt(fields[1], 10, 64); err == nil {
				return pages * int64(os.Getpagesize())
			}
		}
	}
	return goMemory()
}

func goMemory() int64 {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)

	return int64(s[0].Value.Uint64() - s[1].Value.Uint64())
}
