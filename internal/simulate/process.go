package simulate

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
)

// processes are those of the server, as /proc shows them.
type processes struct {
	pids  []int
	first usage // at the beginning of the run
	most  int64 // resident memory, whenever sample was called
}

// usage is the CPU time and the resident memory of all of them together.
type usage struct {
	cpu float64 // seconds
	rss int64   // bytes
}

// A ServerReport is what the server's processes used from the first connection
// to the last.
type ServerReport struct {
	CPUSeconds    float64 `json:"cpu_seconds"`
	RSSStartBytes int64   `json:"rss_start_bytes"`
	RSSMaxBytes   int64   `json:"rss_max_bytes"` // looked at once a second
	RSSEndBytes   int64   `json:"rss_end_bytes"`
}

func newProcesses(pids []int) (*processes, error) {
	p := &processes{pids: pids}
	for _, pid := range pids {
		if _, err := readUsage(pid); err != nil {
			return nil, err
		}
	}
	p.first = p.sample()
	return p, nil
}

// usage is the sum over all processes. A process that has ended adds nothing.
func (p *processes) usage() (sum usage) {
	for _, pid := range p.pids {
		if u, err := readUsage(pid); err == nil {
			sum.cpu += u.cpu
			sum.rss += u.rss
		}
	}
	return sum
}

func (p *processes) report() *ServerReport {
	if len(p.pids) == 0 {
		return nil
	}
	now := p.sample()
	return &ServerReport{now.cpu - p.first.cpu, p.first.rss, p.most, now.rss}
}

// sample looks at the processes and remembers the most memory seen. It is called
// before the watchdog starts, by the watchdog, and after it has ended.
func (p *processes) sample() usage {
	now := p.usage()
	p.most = max(p.most, now.rss)
	return now
}

// ticksPerSecond is USER_HZ, 100 on every Linux.
const ticksPerSecond = 100

func readUsage(pid int) (usage, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return usage{}, fmt.Errorf("read CPU and memory of process %d: %w", pid, err)
	}
	return parseStat(stat)
}

// parseStat reads utime, stime and rss, the fields 14, 15 and 24 of proc(5),
// counted from behind the name in parentheses, which may hold anything.
func parseStat(stat []byte) (usage, error) {
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 22 {
		return usage{}, fmt.Errorf("read stat: %d fields", len(fields))
	}
	var n [3]int64
	for i, at := range []int{11, 12, 21} {
		var err error
		if n[i], err = strconv.ParseInt(fields[at], 10, 64); err != nil {
			return usage{}, fmt.Errorf("read stat: %w", err)
		}
	}
	return usage{cpu: float64(n[0]+n[1]) / ticksPerSecond, rss: n[2] * int64(os.Getpagesize())}, nil
}
