package deploy_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"headcount/internal/testkit"
)

// README.md shows three regions with one total, and a link that is cut and healed. The script does that.
func TestServerRegions(t *testing.T) {
	t.Parallel()
	all := freePorts(12)
	s := &script{lines: make(chan string, 100), listen: all[3:6], all: all, scratch: t.TempDir()}

	env := []string{
		// Holds outlast the test.
		"HEADCOUNT_BIN=" + binary, "TMPDIR=" + s.scratch, "HEADCOUNT_PRESENCE_TIMEOUT=2m",
		"REDIS_PORTS=" + strings.Join(all[:3], " "), "LISTEN_PORTS=" + strings.Join(all[3:6], " "),
		"ADMIN_PORTS=" + strings.Join(all[6:9], " "), "CLUSTER_PORTS=" + strings.Join(all[9:], " "),
	}

	s.run(t, "regions.sh", nil, env...)
	s.until(t, "ready")

	tool := func(want int, words ...string) {
		t.Helper()
		cmd := exec.Command("bash", append([]string{"regions.sh"}, words...)...)
		cmd.Env = testkit.Environ(env...)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != want || len(out) == 0 {
			t.Fatalf("%v: status %d, want %d; %v: %s", words, code, want, err, out)
		}
	}

	shows := func(want ...int) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("the counts %v of the regions", want), func() bool {
			got := []int{
				s.count(t, 0, http.MethodGet, ""), s.count(t, 1, http.MethodGet, ""), s.count(t, 2, http.MethodGet, ""),
			}
			return slices.Equal(got, want)
		})
	}

	join := func(regions ...int) {
		for _, r := range regions {
			s.count(t, r, http.MethodPut, `{"action":"increment"}`)
		}
	}

	join(0, 1, 2)
	shows(3, 3, 3)

	tool(0, "cut", "us", "eu")
	join(0, 1)
	shows(4, 4, 5)

	tool(0, "heal", "us", "eu")
	shows(5, 5, 5)

	// Typing errors are refused.
	tool(1, "cut", "us", "mars")
	tool(1, "cut", "us")

	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}

	s.until(t, "")
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit status %d, want 0; the output:\n%s", code, s.text())
	}

	s.nothingLeft(t)
	if left, err := os.ReadDir(s.scratch); err != nil || len(left) > 0 {
		t.Errorf("the temporary directory still has %v, %v", left, err)
	}
}
