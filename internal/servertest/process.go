// Package servertest runs the server processes of tests and benchmarks. On Linux
// they die with the process that started them, however it ends.
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

// Process is a program that is started, ends, and may be started again. The zero
// value has not been started.
type Process struct {
	// Clock is by how much the program's wall clock is wrong, in whole seconds. Only
	// Linux on amd64 can start a program with another one than 0.
	Clock time.Duration

	mu    sync.Mutex
	cmd   *exec.Cmd     // the newest run
	ended chan struct{} // closed when that has ended
}

// Start starts the program. The run before it has ended.
func (p *Process) Start(cmd *exec.Cmd) error {
	p.mu.Lock()
	defer p.mu.Unlock()

	begin := cmd.Start
	if p.Clock != 0 {
		begin = func() error { return startWithClock(cmd, p.Clock) }
	}

	// The goroutine that starts it has to be the one that lives as long as the program; see live.
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

// Serve starts a server that writes to the file output, and waits until it answers: until answers returns no error. The
// error of Serve has what the server wrote.
func (p *Process) Serve(
	cmd *exec.Cmd, output string, within time.Duration, answers func(context.Context) error,
) error {
	out, err := os.Create(output)
	if err != nil {
		return err
	}
	defer out.Close() // the process has it as its own

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
		_ = cmd.Wait() // ProcessState has it
	}
}

// run returns the newest run; nil before the first.
func (p *Process) run() (cmd *exec.Cmd, ended <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.ended
}

// PID returns the id of a process that was started.
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

// Wait returns the exit status. It is -1 when a signal has ended the process, or
// when it still runs after that time.
func (p *Process) Wait(atMost time.Duration) int {
	cmd, ended := p.run()
	select {
	case <-ended:
		return cmd.ProcessState.ExitCode()
	case <-time.After(atMost):
		return -1
	}
}

// Signal sends a signal to the process, if it runs, and to those that it started.
func (p *Process) Signal(sig syscall.Signal) {
	if !p.Runs() {
		return
	}

	cmd, _ := p.run()
	started := children(cmd.Process.Pid) // listed first: what has ended has no children

	_ = cmd.Process.Signal(sig)

	for _, pid := range started {
		_ = syscall.Kill(pid, sig)
	}
}

// Pause makes the process hang: its connections stay, and it answers nothing.
func (p *Process) Pause() { p.Signal(syscall.SIGSTOP) }

// Resume ends Pause.
func (p *Process) Resume() { p.Signal(syscall.SIGCONT) }

// Kill ends the process and those that it started at once, as a crash does.
func (p *Process) Kill() {
	if !p.Runs() {
		return
	}

	// A stopped process starts nothing more: a child that it started unseen would live on, and one of PostgreSQL's may
	// then wait forever for a lock that a dead one has, and keep the memory.
	cmd, _ := p.run()
	_ = cmd.Process.Signal(syscall.SIGSTOP)
	// A stopped process is killed all the same.
	p.Signal(syscall.SIGKILL)
	<-p.Ended()
}

// End ends the process as an operator does, and returns its exit status. A process
// that takes longer than within is killed, and the status is -1. A Go program then
// first says where its goroutines are.
func (p *Process) End(within time.Duration) int {
	p.Signal(syscall.SIGTERM)
	status := p.Wait(within)

	if !p.Runs() {
		return status
	}

	p.Signal(syscall.SIGQUIT)
	// The stacks take a moment to be written.
	_ = p.Wait(5 * time.Second)
	p.Kill()
	return -1

}

// Await asks until ok returns no error, and returns an error when p has ended or that
// takes too long. p may be nil.
func Await(p *Process, within time.Duration, ok func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()

	var ended <-chan struct{} // nil, hence never ready, without a process
	if p != nil {
		ended = p.Ended()
	}

	for {
		// Asked before it is looked whether the process has ended: a server may answer and end at once.
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

// Stat returns what /proc has of a process; all of it is 0 when the process has ended, and on systems without /proc.
func Stat(pid int) (stat procfs.ProcStat) {
	if p, err := procfs.NewProc(pid); err == nil {
		stat, _ = p.Stat() // after an error all of it is 0
	}

	return stat
}

// Memory returns the resident memory of a process in bytes, or 0 where Stat does.
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

// Ready asks the program of this repository whether it is ready; admin is its
// operators' address.
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

// Listens asks whether a server takes connections.
func Listens(ctx context.Context, addr string) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}

	return c.Close()
}
