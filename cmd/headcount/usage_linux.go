package main

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"headcount/presence"
)

// usage returns the CPU time of all threads of this process and its resident
// memory, as the system reports them.
func usage() (s presence.ProcessStats) {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err == nil {
		s.CPU = time.Duration(used.Utime.Nano() + used.Stime.Nano())
	}
	if text, err := os.ReadFile("/proc/self/statm"); err == nil { // size resident shared …, in pages
		if fields := strings.Fields(string(text)); len(fields) > 1 {
			pages, _ := strconv.ParseInt(fields[1], 10, 64) // 0, which means unknown, when the text is not a number
			s.Memory = pages * int64(os.Getpagesize())
		}
	}
	return s
}
