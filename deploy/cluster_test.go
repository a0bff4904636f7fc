// Package deploy_test runs the files of this directory as an operator would.
package deploy_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

var binary string // the path of the program

func TestMain(m *testing.M) {
	os.Exit(testkit.RunWithProgram(m, "4", &binary))
}

// freePorts returns different ports, free for TCP and UDP.
func freePorts(n int) []string {
	var free []string
	for range n {
		free = append(free, strconv.Itoa(servertest.FreePort()))
	}

	return free
}

// script is a run of cluster.sh or regions.sh.
type script struct {
	cmd     *exec.Cmd
	lines   chan string // closed at its end
	output  []string
	listen  []string
	all     []string // ports
	scratch string
}

// start runs cluster.sh on free ports.
func start(t *testing.T, args ...string) *script {
	t.Helper()
	all := freePorts(17)
	s := &script{lines: make(chan string, 100), listen: all[1:3], all: all, scratch: t.TempDir()}
	s.run(t, "cluster.sh", args, "HEADCOUNT_BIN="+binary, "TMPDIR="+s.scratch,
		"REDIS_PORT="+all[0], "LISTEN_PORTS="+strings.Join(s.listen, " "),
		"ADMIN_PORTS="+strings.Join(all[3:10], " "), "CLUSTER_PORTS="+strings.Join(all[10:], " "))

	return s
}

// run starts a script with additional variables in its environment.
func (s *script) run(t *testing.T, name string, args []string, env ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	s.cmd = exec.CommandContext(ctx, "bash", append([]string{name}, args...)...)
	s.cmd.Cancel = func() error { return s.cmd.Process.Signal(syscall.SIGTERM) }
	s.cmd.WaitDelay = testkit.Timeout // longer than the script takes to kill what does not end
	s.cmd.Env = testkit.Environ(env...)
	// A signal that this process handles has its default effect in the script. Without this, a shell that runs the
	// tests in the background would let the script inherit an ignored SIGINT.
	handled := make(chan os.Signal, 1)
	signal.Notify(handled, os.Interrupt)

	// Both streams of the script are one list of lines.
	out, in := io.Pipe()
	s.cmd.Stdout, s.cmd.Stderr = in, in
	err := s.cmd.Start()
	signal.Stop(handled)
	if err != nil {
		cancel()
		t.Fatal(err)
	}

	ended := make(chan struct{})
	go func() { // ends with the script
		defer close(ended)
		_ = s.cmd.Wait() // ProcessState has the result
		_ = in.Close()
	}()

	go func() { // ends with the pipe
		defer close(s.lines)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			s.lines <- scan.Text()
		}
	}()

	t.Cleanup(func() {
		cancel()
		for range s.lines {
		}

		<-ended
	})
}

// until reads lines up to the first that begins with prefix; "" reads all to the end.
func (s *script) until(t *testing.T, prefix string) {
	t.Helper()
	for line := range s.lines {
		s.output = append(s.output, line)
		if prefix != "" && strings.HasPrefix(line, prefix) {
			return
		}
	}

	if prefix != "" {
		t.Fatalf("no line %q; the output:\n%s", prefix, s.text())
	}
}

func (s *script) text() string { return strings.Join(s.output, "\n") }

// logs returns the logs of the processes.
func (s *script) logs() string {
	var text strings.Builder
	files, _ := filepath.Glob(filepath.Join(s.scratch, "*", "*.log")) // nothing is wrong with the pattern
	for _, file := range files {
		log, err := os.ReadFile(file)
		fmt.Fprintf(&text, "%s: %v\n%s\n", filepath.Base(file), err, log)
	}

	return text.String()
}

var row = regexp.MustCompile(`^(redis|gateway-[12]|presence-[123]|dispatcher-[12]) +(\d+) `)

// pids returns the processes of the printed table by name.
func (s *script) pids(t *testing.T) map[string]int {
	t.Helper()
	found := map[string]int{}
	for _, line := range s.output {
		if m := row.FindStringSubmatch(line); m != nil {
			pid, err := strconv.Atoi(m[2])
			if err != nil {
				t.Fatal(err)
			}
			found[m[1]] = pid
		}
	}

	if len(found) != 8 {
		t.Fatalf("the table has %d processes, want 8:\n%s", len(found), s.text())
	}

	return found
}

// nothingLeft checks that the script has freed its ports.
func (s *script) nothingLeft(t *testing.T) {
	t.Helper()

	// A process that runs on would hold one of the ports.
	for _, port := range s.all {
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err != nil {
			t.Errorf("after the end: %v", err)
		} else {
			_ = l.Close()
		}
		if l, err := net.ListenPacket("udp", "127.0.0.1:"+port); err != nil {
			t.Errorf("after the end: %v", err)
		} else {
			_ = l.Close()
		}
	}
}

// count reads the page's count from a gateway, or changes it.
func (s *script) count(t *testing.T, gateway int, method, body string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://127.0.0.1:"+s.listen[gateway]+"/here/counter",
		strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true

	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()

	var counter struct{ Count *int }
	answer, err := io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(answer, &counter)
	}

	if err != nil || resp.StatusCode != http.StatusOK || counter.Count == nil {
		t.Fatalf("%s from %s: %s, %v: %s\n%s", method, s.listen[gateway], resp.Status, err, answer, s.logs())
	}

	return *counter.Count
}

func TestServerCluster(t *testing.T) {
	t.Parallel() // the script mostly waits, so it may run beside others

	s := start(t)
	s.until(t, "ready")
	pids := s.pids(t)

	if n := s.count(t, 0, http.MethodPut, `{"action":"increment"}`); n != 1 {
		t.Errorf("the gateway of the change counts %d, want 1", n)
	}
	testkit.Eventually(t, "the count of the other gateway",
		func() bool { return s.count(t, 1, http.MethodGet, "") == 1 })

	// The script reports a killed process, and starts it again on request.
	if err := syscall.Kill(pids["presence-2"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	s.until(t, fmt.Sprintf("presence-2 (pid %d) has ended with status 137", pids["presence-2"]))
	if err := s.cmd.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	s.until(t, "presence-2 is started again")

	// On SIGINT all processes end, and nothing stays behind.
	if err := s.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	s.until(t, "")
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("exit status %d, want 0; the output:\n%s", code, s.text())
	}
	for name, pid := range pids {
		if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
			t.Errorf("%s, pid %d, still runs: %v", name, pid, err)
		}
	}

	s.nothingLeft(t)
	if left, err := os.ReadDir(s.scratch); err != nil || len(left) > 0 {
		t.Errorf("the temporary directory still has %v, %v", left, err)
	}
}

func TestServerClusterThatCannotStart(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args []string
		busy int // the index of a port that is occupied for datagrams; 0 for none
		want string
	}{
		"a bad setting": {
			args: []string{"--update-interval", "often"},
			want: "    headcount: --update-interval: it is not a duration",
		},
		"one of them": {busy: 13, want: "cluster: presence-2 ended with status 1 at its start"},
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, tc.args...)
			if tc.busy > 0 {
				l, err := net.ListenPacket("udp", "127.0.0.1:"+s.all[tc.busy])
				if err != nil {
					t.Fatal(err)
				}

				defer l.Close()
			}

			s.until(t, "")
			if code := s.cmd.ProcessState.ExitCode(); code != 1 {
				t.Errorf("exit status %d, want 1", code)
			}

			if !strings.Contains(s.text(), tc.want) {
				t.Errorf("the output lacks %q:\n%s", tc.want, s.text())
			}
			if strings.Contains(s.text(), "ready;") {
				t.Errorf("the script reports that the cluster is ready:\n%s", s.text())
			}

			// Redis is gone as well.
			if l, err := net.Listen("tcp", "127.0.0.1:"+s.all[0]); err != nil {
				t.Errorf("after the end: %v", err)
			} else {
				_ = l.Close()
			}
		})
	}
}
