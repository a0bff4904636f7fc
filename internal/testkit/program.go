package testkit

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Program returns the path of the program for tests that run it as a process: the one
// that the environment's HEADCOUNT_BIN names, else one that it builds into dir, without
// the race detector: tests of another process do not look for races.
func Program(dir string) (string, error) {
	if bin := os.Getenv("HEADCOUNT_BIN"); bin != "" {
		return bin, nil
	}
	bin := filepath.Join(dir, "headcount")
	if out, err := exec.Command("go", "build", "-o", bin, "headcount/cmd/headcount").CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return bin, nil
}

// Environ is the environment without the variables that the program and its scripts
// read, and without the second that the race detector waits at each exit.
func Environ(extra ...string) []string {
	// A setting in the developer's environment must not change what is tested.
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "HEADCOUNT_") || strings.HasPrefix(v, "CLUSTER_")
	})
	return append(append(env, "GORACE=atexit_sleep_ms=0"), extra...)
}

// RunWithProgram runs the tests of a package, with *program set to the program's path,
// and returns the exit status. Up to parallel tests run at the same time, unless
// the command line says otherwise.
func RunWithProgram(m *testing.M, parallel string, program *string) int {
	// Before the flag is asked for, because testing parses it later.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		_ = flag.Set("test.parallel", parallel)
	}
	dir, err := os.MkdirTemp("", "headcount-test-")
	if err == nil {
		defer os.RemoveAll(dir)
		*program, err = Program(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
