// Package servertest runs the server processes of tests and benchmarks. On Linux they die with the process that started
// them, however that ends.
package servertest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/procfs"
)

// Process is a process that can be started again after it has ended. The zero value has not been started.
type Process struct {
	// Clock is by how much the process's wall clock is wrong, in whole seconds. It must be 0 except on Linux on amd64.
	Clock time.Duration

	mu    sync.Mutex
	cmd   *exec.Cmd     // the newest run
	ended chan struct{} // closed when that run has ended
}

// Start starts the program. An earlier run must have ended.
func (p *Process) Start(cmd *exec.Cmd) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	begin := cmd.Start
	if p.Clock != 0 {
		begin = func() error { return startWithClock(cmd, p.Clock) }
	}

	// The goroutine that starts the program has to live as long as the program: see live.
	started := make(chan error)
	ended := make(chan struct{})
	go func() { // ends with the program
		defer close(ended)
		live(cmd, begin, started)
	}()

	if err := <-started; err != nil {
		return err
	}

	p.cmd = cmd
	p.ended = ended

	return nil
}

// Serve starts a server that writes to the file output, and waits until answers returns no error. The error of Serve
// contains what the server has written.
func (p *Process) Serve(
	cmd *exec.Cmd, output string, within time.Duration, answers func(context.Context) error,
) error {
	out, err := os.Create(output)
	if err != nil {
		return err
	}
	defer out.Close() // the process has a descriptor of its own

	cmd.Stdout = out
	cmd.Stderr = out

	if err := p.Start(cmd); err != nil {
		return err
	}

	if err := Await(p, within, answers); err != nil {
		text, _ := os.ReadFile(output)
		return fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, text)
	}

	return nil
}

// startAndWait starts the program and waits until it has ended.
func startAndWait(cmd *exec.Cmd, begin func() error, started chan<- error) {
	err := begin()
	started <- err
	if err == nil {
		_ = cmd.Wait() // the outcome is in cmd.ProcessState
	}
}

// run returns the newest run; nil before the first.
func (p *Process) run() (cmd *exec.Cmd, ended <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.ended
}

// PID returns the process id. The process must have been started.
func (p *Process) PID() int {
	cmd, _ := p.run()
	return cmd.Process.Pid
}

// Runs reports whether the process was started and has not ended.
func (p *Process) Runs() bool {
	_, ended := p.run()

	select {
	case <-ended:
		return false
	default:
		return ended != nil
	}
}

// Ended returns a channel that is closed when the process has ended.
func (p *Process) Ended() <-chan struct{} {
	_, ended := p.run()
	return ended
}

// Wait waits for the end of the process and returns its exit status. The status is -1 when a signal has ended the
// process, or when it still runs after atMost.
func (p *Process) Wait(atMost time.Duration) int {
	cmd, ended := p.run()
	select {
	case <-ended:
		return cmd.ProcessState.ExitCode()
	case <-time.After(atMost):
		return -1
	}
}

// Signal sends a signal to the process, if it runs, and to its children.
func (p *Process) Signal(sig syscall.Signal) {
	if !p.Runs() {
		return
	}

	cmd, _ := p.run()
	started := children(cmd.Process.Pid) // before the signal: a process that has ended has no children
	_ = cmd.Process.Signal(sig)
	for _, pid := range started {
		_ = syscall.Kill(pid, sig)
	}
}

// Pause makes the process hang: its connections stay, and it answers nothing.
func (p *Process) Pause() { p.Signal(syscall.SIGSTOP) }

// Resume ends Pause.
func (p *Process) Resume() { p.Signal(syscall.SIGCONT) }

// Kill ends the process and its children at once, as a crash does.
func (p *Process) Kill() {
	if !p.Runs() {
		return
	}

	// A stopped process starts no more children. One that it started just before its end would live on. A child of
	// PostgreSQL could then wait forever for the lock of a dead one, and keep the shared memory.
	cmd, _ := p.run()
	_ = cmd.Process.Signal(syscall.SIGSTOP)
	p.Signal(syscall.SIGKILL)
	<-p.Ended()
}

// End terminates the process as an operator does, and returns its exit status. A process that takes longer than within
// is killed, and the status is -1. Before that, a Go program prints the stacks of its goroutines.
func (p *Process) End(within time.Duration) int {
	p.Signal(syscall.SIGTERM)
	status := p.Wait(within)

	if !p.Runs() {
		return status
	}

	p.Signal(syscall.SIGQUIT)
	_ = p.Wait(5 * time.Second) // writing the stacks takes a moment
	p.Kill()

	return -1
}

// Await calls ok until it returns no error. It returns an error when p has ended, or when that takes longer than
// within. p may be nil.
func Await(p *Process, within time.Duration, ok func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()

	var ended <-chan struct{} // nil, hence never ready, without a process
	if p != nil {
		ended = p.Ended()
	}

	for {
		// Before the check whether the process has ended, because a server may end right after it has answered.
		err := ok(ctx)
		if err == nil {
			return nil
		}

		select {
		case <-ended:
			return errors.New("it ended at once")
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Stat returns the /proc figures of a process. They are 0 when the process has ended, and on systems without /proc.
func Stat(pid int) (stat procfs.ProcStat) {
	if p, err := procfs.NewProc(pid); err == nil {
		stat, _ = p.Stat() // after an error all of it is 0
	}

	return stat
}

// Memory returns the resident memory of a process in bytes. It is 0 whenever the figures of Stat are.
func Memory(pid int) int64 { return int64(Stat(pid).ResidentMemory()) }

// Waited returns how long the threads of a process together have waited for a core; 0 when it has ended, and on systems
// without /proc.
func Waited(pid int) (sum time.Duration) {
	threads, _ := procfs.AllThreads(pid)
	for _, thread := range threads {
		if stat, err := thread.Schedstat(); err == nil {
			sum += time.Duration(stat.WaitingNanoseconds)
		}
	}

	return sum
}

// probe keeps no connection open, so that no goroutine is left.
var probe = &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// Ready returns an error unless a server of Headcount is ready. admin is the address of its --admin-listen.
func Ready(ctx context.Context, admin string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+admin+"/readyz", nil)
	if err != nil {
		return err
	}

	resp, err := probe.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()

	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it is not ready: %s", resp.Status)
	}

	return nil
}

// Listens returns an error unless a server accepts connections.
func Listens(ctx context.Context, addr string) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}

	return c.Close()
}
