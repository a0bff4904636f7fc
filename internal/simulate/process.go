package simulate

import "github.com/prometheus/procfs"

// processes are the server's processes, as /proc shows them.
type processes struct {
	procs []procfs.Proc
	first usage // at the beginning of the run
	most  int64 // highest resident memory of all samples
}

// usage is the CPU time and the resident memory of all processes together.
type usage struct {
	cpu float64 // seconds
	rss int64   // bytes
}

// A ServerReport is what the server's processes used from the first connection
// to the last.
type ServerReport struct {
	CPUSeconds    float64 `json:"cpu_seconds"`
	RSSStartBytes int64   `json:"rss_start_bytes"`
	RSSMaxBytes   int64   `json:"rss_max_bytes"` // sampled once a second
	RSSEndBytes   int64   `json:"rss_end_bytes"`
}

func newProcesses(pids []int) (*processes, error) {
	p := &processes{}
	for _, pid := range pids {
		proc, err := procfs.NewProc(pid)
		if err != nil {
			return nil, err
		}
		p.procs = append(p.procs, proc)
	}

	p.first = p.sample()
	return p, nil
}

// usage returns the sum over all processes. A process that has ended adds nothing.
func (p *processes) usage() (sum usage) {
	for _, proc := range p.procs {
		if stat, err := proc.Stat(); err == nil {
			sum.cpu += stat.CPUTime()
			sum.rss += int64(stat.ResidentMemory())
		}
	}

	return sum
}

func (p *processes) report() *ServerReport {
	if len(p.procs) == 0 {
		return nil
	}

	now := p.sample()
	return &ServerReport{now.cpu - p.first.cpu, p.first.rss, p.most, now.rss}
}

// sample measures the usage and remembers the highest memory. It needs no lock: it is called before the watchdog
// starts, by the watchdog, and after the watchdog has ended.
func (p *processes) sample() usage {
	now := p.usage()
	p.most = max(p.most, now.rss)

	return now
}
