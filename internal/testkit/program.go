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

// Program returns the path of the program, for tests that run it as a process. The environment variable HEADCOUNT_BIN
// may name it. Otherwise Program builds it into dir, without the race detector.
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

// Environ returns this process's environment and extra, for a program under test. It leaves out the variables that the
// program and its scripts read, so that the developer's settings do not change the test. With the race detector the
// program would sleep for a second at its exit, which Environ turns off.
func Environ(extra ...string) []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "HEADCOUNT_") || strings.HasPrefix(v, "CLUSTER_")
	})

	return append(append(env, "GORACE=atexit_sleep_ms=0"), extra...)
}

// RunWithProgram runs the tests of a package, with *program set to the program's path, and returns the exit status. Up
// to parallel tests run at the same time, unless the command line says otherwise.
func RunWithProgram(m *testing.M, parallel string, program *string) int {
	// Parsed here, because package testing does so only in m.Run.
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
