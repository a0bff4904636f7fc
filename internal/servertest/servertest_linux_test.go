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

// A signal also reaches the children of a process.
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
		t.Error("the process has no memory in use")
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

// A port that was given to one process is not given to another, even while nothing listens there. The other process is
// this test itself.
func TestServerAPortIsOfOneProcess(t *testing.T) {
	const asked = "HEADCOUNT_TEST_PORT"
	if port, err := strconv.Atoi(os.Getenv(asked)); err == nil {
		os.Stdout.WriteString("claimed " + strconv.FormatBool(claim(port) != nil) + "\n")
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^TestServerAPortIsOfOneProcess$")
	cmd.Env = append(os.Environ(), asked+"="+strconv.Itoa(FreePort()))
	runtime.GC() // the collector must not end the claim
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "claimed false\n") {
		t.Errorf("another process: %v, %q", err, out)
	}
}
