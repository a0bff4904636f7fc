package servertest

import (
	"bytes"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"headcount/internal/testkit"
)

// The wall clock of a program is wrong by the given offset, and its monotonic clock is not. The program is this test
// itself.
func TestServerAClockIsWrong(t *testing.T) {
	const asked = "HEADCOUNT_TEST_CLOCK"
	if os.Getenv(asked) != "" {
		begun := time.Now()
		time.Sleep(10 * time.Millisecond)
		os.Stdout.WriteString("now " + strconv.FormatInt(begun.UnixMilli(), 10) + " " + time.Since(begun).String() +
			"\n")
		return
	}

	for _, offset := range []time.Duration{2 * time.Second, -2 * time.Second, 1000 * time.Hour} {
		var out bytes.Buffer
		cmd := exec.Command(os.Args[0], "-test.run", "^TestServerAClockIsWrong$")
		cmd.Env, cmd.Stdout = append(os.Environ(), asked+"=1"), &out
		p := Process{Clock: offset}
		begun := time.Now()
		if err := p.Start(cmd); err != nil {
			t.Fatal(err)
		}
		if status := p.Wait(testkit.Timeout); status != 0 {
			t.Fatalf("status %d:\n%s", status, out.String())
		}

		ended := time.Now()
		fields := strings.Fields(out.String())
		if len(fields) < 3 || fields[0] != "now" {
			t.Fatalf("the program printed %q", out.String())
		}

		ms, _ := strconv.ParseInt(fields[1], 10, 64)
		if at := time.UnixMilli(ms).Add(-offset); at.Before(begun.Add(-time.Millisecond)) || at.After(ended) {
			t.Errorf("its clock is %s beside ours, which went from %s to %s, want it off by %s",
				time.UnixMilli(ms), begun, ended, offset)
		}
		if slept, err := time.ParseDuration(fields[2]); err != nil || slept < 10*time.Millisecond ||
			slept > ended.Sub(begun) {
			t.Errorf("the program slept for %s, %v", fields[2], err)
		}
	}
}
