// Package programtest is for the tests that run the program as a process.
package programtest

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Path returns the program that the environment's HEADCOUNT_BIN names. Without
// one it builds the program into dir, with further flags of go build.
func Path(dir string, flags ...string) (string, error) {
	if bin := os.Getenv("HEADCOUNT_BIN"); bin != "" {
		return bin, nil
	}
	bin := filepath.Join(dir, "headcount")
	args := append(append([]string{"build"}, flags...), "-o", bin, "headcount/cmd/headcount")
	if out, err := exec.Command("go", args...).CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return bin, nil
}

// Run runs the tests of a package with the program, built with the race detector, and
// returns the exit status. So many tests run at once, unless -parallel says otherwise.
func Run(m *testing.M, parallel string, program *string) int {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = flag.Set("test.parallel", parallel)
	}
	dir, err := os.MkdirTemp("", "headcount-test-")
	if err == nil {
		defer os.RemoveAll(dir)
		*program, err = Path(dir, "-race")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
