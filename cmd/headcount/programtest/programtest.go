// Package programtest finds the program for the tests that run it.
package programtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
