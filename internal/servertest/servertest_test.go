package servertest

import (
	"context"
	"errors"
	"net"
	"os/exec"
	"sync"
	"testing"
	"time"

	"headcount/internal/testkit"
)

func TestServerPortsAreFreeAndGivenOnce(t *testing.T) {
	given := map[int]bool{}
	for range 100 {
		port := FreePort(10000)
		for _, p := range []int{port, port + 10000} {
			if p < firstPort || p >= endPort || given[p] {
				t.Fatalf("port %d is out of range, or was given before", p)
			}

			given[p] = true
		}

		l, err := net.Listen("tcp", addr(port))
		if err != nil {
			t.Fatal(err)
		}

		_ = l.Close()
	}
}

// TestServerAFreePortStaysFree: a free port stays free while other tests of this process start servers.
func TestServerAFreePortStaysFree(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	var starters sync.WaitGroup
	for range 3 {
		starters.Go(func() {
			for ctx.Err() == nil {
				_ = exec.Command("true").Run()
			}
		})
	}

	for range 500 {
		l, err := net.Listen("tcp", FreeAddr())
		if err != nil {
			t.Error(err)
			break
		}

		_ = l.Close()
	}

	stop()
	starters.Wait()
}

// sleeper returns a process whose child sleeps.
func sleeper(t *testing.T) *Process {
	t.Helper()
	p := &Process{}
	if err := p.Start(exec.Command("sh", "-c", "sleep 600 & wait")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func TestServerProcess(t *testing.T) {
	var p Process
	if p.Runs() {
		t.Error("Runs is true before Start")
	}

	p.Kill() // no effect
	if err := p.Start(exec.Command("sh", "-c", "exit 7")); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(testkit.Timeout); status != 7 || p.Runs() {
		t.Errorf("the exit status is %d, and Runs is %t", status, p.Runs())
	}
	if err := p.Start(exec.Command("sleep", "600")); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(0); status != -1 || !p.Runs() {
		t.Errorf("the exit status is %d, and Runs is %t", status, p.Runs())
	}

	p.Kill()
	if p.Runs() {
		t.Error("the process runs after Kill")
	}
	if err := p.Start(exec.Command("/does/not/exist")); err == nil {
		t.Error("a program that does not exist was started")
	}
}

func TestServerEnd(t *testing.T) {
	for _, tc := range []struct {
		trap   string
		within time.Duration
		want   int
	}{
		{`trap "exit 3" TERM`, testkit.Timeout, 3},
		{`trap "" TERM`, time.Millisecond, -1},
	} {
		var p Process
		cmd := exec.Command("sh", "-c", tc.trap+`; echo; while :; do sleep 0.01; done`)
		ready := make(heard, 1)
		cmd.Stdout = ready
		if err := p.Start(cmd); err != nil {
			t.Fatal(err)
		}

		<-ready
		if got := p.End(tc.within); got != tc.want || p.Runs() {
			t.Errorf("%s: the exit status is %d, want %d; Runs is %t", tc.trap, got, tc.want, p.Runs())
		}
	}
}

// heard is a writer that signals when a process has written something.
type heard chan struct{}

func (h heard) Write(p []byte) (int, error) {
	select {
	case h <- struct{}{}:
	default:
	}
	return len(p), nil
}

func TestServerAwait(t *testing.T) {
	p := sleeper(t)
	asked := 0
	not := errors.New("not yet")
	err := Await(p, testkit.Timeout, func(context.Context) error {
		if asked++; asked < 3 {
			return not
		}

		return nil
	})

	if err != nil || asked != 3 {
		t.Errorf("the wait ended with %v after %d questions", err, asked)
	}
	if err := Await(nil, time.Millisecond, func(context.Context) error { return not }); !errors.Is(err, not) {
		t.Errorf("a condition that comes true in time: %v", err)
	}

	p.Kill()
	if err := Await(p, testkit.Timeout, func(context.Context) error { return not }); err == nil || errors.Is(err, not) {
		t.Errorf("a wait for a process that has ended: %v", err)
	}
}
