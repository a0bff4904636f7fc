package e2e

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"headcount/internal/servertest"
	"headcount/internal/testkit"
)

// Without a terminal, the output of top has no commands for one. In a terminal it takes no more lines and columns than
// there are. Ctrl-C ends top, and a simulation, without an error.
func TestServerTopAndSimulate(t *testing.T) {
	t.Parallel()
	s := common(t)

	var once bytes.Buffer
	headcount(t, nil, &once, "top", "--url="+s.url, "--api-key="+apiKey)
	if text := once.String(); strings.Contains(text, "\x1b") || !strings.Contains(text, "\nPROCESS ") ||
		!strings.HasSuffix(text, "\n") {
		t.Errorf("the output of top has commands for a terminal, or no list of processes: %q", text)
	}

	for _, size := range []unix.Winsize{{Row: 1, Col: 20}, {Row: 4, Col: 30}, {Row: 24, Col: 1}} {
		reads, writes := terminal(t, size)
		top := begin(t, writes, "top", "--url="+s.url, "--api-key="+apiKey, "--interval=20ms")
		_ = writes.Close()

		// Several screens: the last one may be incomplete.
		var shown []string
		for text, b := "", make([]byte, 1<<16); len(shown) < 6; shown = strings.Split(text, "\x1b[H") {
			n, err := reads.Read(b)
			if err != nil {
				t.Fatalf("%v after %q:\n%s", err, text, &top.said)
			}
			text += string(b[:n])
		}

		rest := make(chan string, 1)
		go func() { // ends with top
			text, _ := io.ReadAll(reads) // the error says that nobody writes any more
			rest <- string(text)
		}()

		top.ends(t)
		if text := <-rest; !strings.HasSuffix(text, "\r\n") {
			t.Errorf("the next prompt is not on a line of its own: %q", text)
		}

		for _, screen := range shown[1:5] {
			lines := strings.Split(strings.NewReplacer("\x1b[K", "", "\x1b[J", "").Replace(screen), "\r\n")
			for _, line := range lines {
				if utf8.RuneCountInString(line) > int(size.Col) || strings.Contains(line, "\x1b") {
					t.Errorf("in %d columns: %q", size.Col, line)
				}
			}
			if len(lines) > int(size.Row) {
				t.Errorf("%d lines in %d:\n%q", len(lines), size.Row, screen)
			}
		}
	}

	out := &servertest.Log{}
	simulation := begin(t, out, "simulate", "--url="+start(t).url, "--users=3", "--pages=1", "--duration=10m")

	testkit.Eventually(t, "the simulation is under way",
		func() bool { return strings.Contains(simulation.said.String(), "churning") })
	simulation.ends(t)

	if text := out.String(); !strings.Contains(text, "\ninterrupted ") ||
		!strings.Contains(text, "\nwrong counts   0\n") {
		t.Errorf("no report of a simulation that was interrupted, without wrong counts:\n%s", text)
	}

	if said := simulation.said.String(); strings.Contains(said, "headcount: ") {
		t.Errorf("the simulation ended with an error:\n%s", said)
	}
}

// terminal returns the two ends of a terminal: the output of the program can be read from the other end.
func terminal(t *testing.T, size unix.Winsize) (reads, writes *os.File) {
	t.Helper()
	reads, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { reads.Close() })

	fd := int(reads.Fd())
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &size)
	}
	if err == nil {
		writes, err = os.OpenFile(fmt.Sprint("/dev/pts/", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}

	return reads, writes
}

// running is a command that ends with Ctrl-C.
type running struct {
	servertest.Process
	said servertest.Log // its stderr
}

func begin(t *testing.T, out io.Writer, args ...string) *running {
	t.Helper()
	r := &running{}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = out, &r.said
	if err := r.Start(cmd); err != nil {
		t.Fatal(err)
	}

	t.Cleanup(r.Kill)
	return r
}

// ends sends the signal of Ctrl-C; the command must end as if it had done its work.
func (r *running) ends(t *testing.T) {
	t.Helper()
	r.Signal(syscall.SIGINT)
	if status := r.Wait(testkit.Timeout); status != 0 {
		t.Errorf("status %d:\n%s", status, &r.said)
	}
}
