package servertest

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"headcount/internal/testkit"
)

// A signal also reaches what the process has started.
func TestServerKillEndsChildren(t *testing.T) {
	p := sleeper(t)
	var pids []int
	if err := Await(p, testkit.Timeout, func(context.Context) error {
		if pids = children(p.PID()); len(pids) == 0 {
			return errors.New("it has no child yet")
		}

		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if Memory(p.PID()) == 0 {
		t.Error("a process without memory")
	}

	p.Kill()
	if err := Await(nil, testkit.Timeout, func(context.Context) error {
		if Memory(pids[0]) > 0 {
			return errors.New("the child is still there")
		}

		return nil
	}); err != nil {
		t.Error(err)
	}
}

// A port of one process is not given by another, also while nothing listens there. The
// other process is this test.
func TestServerAPortIsOfOneProcess(t *testing.T) {
	const asked = "HEADCOUNT_TEST_PORT"
	if port, err := strconv.Atoi(os.Getenv(asked)); err == nil {
		os.Stdout.WriteString("claimed " + strconv.FormatBool(claim(port) != nil) + "\n")
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestServerAPortIsOfOneProcess$")
	cmd.Env = append(os.Environ(), asked+"="+strconv.Itoa(FreePort()))
	runtime.GC() // a claim is kept
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "claimed false\n") {
		t.Errorf("another process: %v, %q", err, out)
	}
}
